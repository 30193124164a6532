"""The kernels of weight norm, many tensors at once, against the equation: on a GPU, or through Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from normmatters.functional import bounded_weight
from normmatters.functional.weight import slice_norm
from normmatters.kernels.triton import weight_norm as kernels
from support import tolerances
from support.weight_norm_cases import DEVICE, ORDERS, close


@pytest.fixture(params=["bounded", "classic"])
def kind(request: pytest.FixtureRequest) -> str:
    """One fixed ρ for each tensor, or a learned one for each row."""
    return str(request.param)


def tensors() -> list[Tensor]:
    """Every class of row length, odd ones among them, several rows a tile and several tiles, both memory orders."""
    shapes = [(5, 3), (1, 1), (4,), (6, 4, 3, 3), (19, 8, 1, 1), (9, 65), (3, 700), (2, 2100)]
    made = [torch.randn(shape, device=DEVICE) for shape in shapes]
    return [x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for x in made]


def rho_for(v: list[Tensor], kind: str) -> list[Tensor]:
    if kind == "bounded":
        return [torch.tensor(0.5 + i, device=DEVICE) for i in range(len(v))]
    # Of either sign, and one of them 0.
    made = [torch.arange(-1.0, x.shape[0] - 1, device=DEVICE).view(-1, *[1] * (x.ndim - 1)) for x in v]
    return [(r / x.shape[0]).to(x.dtype).requires_grad_() for x, r in zip(v, made)]


def check_weights(v: list[Tensor], p: float, dtype: torch.dtype, kind: str) -> None:
    v = [x.detach().requires_grad_() for x in v]
    rho = rho_for(v, kind)
    for x, r in zip(v, rho):
        assert not kernels.why_not(x, r, dim=0, p=p, k=None)
    weights = kernels.WeightGroup(v, p, dtype, kind == "classic")(v, rho)
    gradients = [torch.randn(w.shape, device=DEVICE).to(dtype) for w in weights]
    torch.autograd.backward(weights, gradients)
    for x, r, w, g in zip(v, rho, weights, gradients):
        reference, exact = x.detach().double().requires_grad_(), r.detach().double().requires_grad_()
        expected = bounded_weight(reference, exact, p=p)
        expected.backward(g.double())
        n = x.numel() // x.shape[0]
        assert w.dtype == dtype
        assert w.stride() == x.stride()
        assert x.grad is not None
        assert x.grad.stride() == x.stride()
        assert x.grad.dtype == x.dtype
        close(w, expected, tolerances.statistic(dtype, n) + tolerances.elementwise(dtype))
        # The two terms of the gradient may cancel: their size is that of rho·g/‖v‖.
        norm = slice_norm(reference.detach(), p=p)
        bound = tolerances.statistic(x.dtype, n) + tolerances.elementwise(x.dtype)
        terms = g.double() / torch.where(norm == 0, 1, norm)
        close(x.grad, reference.grad, bound, float((r * terms).detach().abs().max()))
        if kind == "classic":
            assert r.grad is not None
            assert (r.grad.shape, r.grad.stride(), r.grad.dtype) == (r.shape, r.stride(), r.dtype)
            size = (terms * reference.detach()).abs().reshape(x.shape[0], -1).sum(1).max()
            close(r.grad, exact.grad, bound, float(size))


@pytest.mark.parametrize("p", ORDERS)
def test_values_and_gradients(p, kind, poisoned_empty):
    check_weights(tensors(), p, torch.float32, kind)


@pytest.mark.parametrize(("dtype", "out"), [(torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)])
def test_half_precision(dtype, out, kind):
    check_weights([x.to(dtype) for x in tensors()], 2, out, kind)


@pytest.mark.parametrize("p", ORDERS)
def test_zero_rows_ties_and_extreme_scales(p, kind):
    v = torch.randn(6, 12, device=DEVICE)
    v[0] = 0
    v[1] = torch.tensor([1.0, -1.0, 0.0], device=DEVICE).repeat(4)  # at p = ∞ eight elements share the gradient
    v[2, ::2] = 0
    check_weights([v], p, torch.float32, kind)
    for scale in (1e-30, 1e30):  # their squares are outside float32's range
        check_weights([torch.randn(3, 20, device=DEVICE) * scale], p, torch.float32, kind)


def test_unaligned_storage(kind):
    """A parameter that starts anywhere in memory, and one whose rows do."""
    flat = torch.randn(100, device=DEVICE)
    check_weights([flat[1:81].view(10, 8), torch.randn(3, 8, device=DEVICE)], 2, torch.float32, kind)


def test_supported():
    v, rho = torch.zeros(4, 3, device=DEVICE), torch.ones((), device=DEVICE)

    def reason(v: Tensor, rho: Tensor = rho, *, dim: int | None = 0, p: float = 2, k: int | None = None) -> str:
        return kernels.why_not(v, rho, dim=dim, p=p, k=k)

    assert reason(v) == ""
    assert reason(v, dim=-2) == ""
    assert "float64" in reason(v.double())
    assert "dimension 0" in reason(v, dim=1)
    assert "dimension 0" in reason(v, dim=None)
    assert "p = 3" in reason(v, p=3)
    assert "k = 2" in reason(v, p=math.inf, k=2)
    assert "dense" in reason(v.t())
    assert "dense" in reason(v[:, :2])
    assert "meta" in reason(v.to("meta"))
    g = torch.ones(4, 1, device=DEVICE)
    assert reason(v, g) == ""
    assert reason(v.half(), g.half()) == ""
    assert reason(v[:, 0].contiguous(), g[:, 0]) == ""
    assert "float32 with torch.float16" in reason(v, g.half())
    assert "float16 with torch.float32" in reason(v.half(), g)
    assert "(4, 1)" in reason(v, g[:1])
    assert "(4, 1)" in reason(v, g[:, 0])
    assert "(4, 1)" in reason(v, g[:1].expand(4, 1))


def test_gradients_in_any_layout_and_missing_ones(kind):
    """A layer may hand back a gradient laid out otherwise than its weight, or none."""
    v = [torch.randn(4, 3, 2, 2, device=DEVICE).to(memory_format=torch.channels_last), torch.randn(5, 6, device=DEVICE)]
    v = [x.requires_grad_() for x in v]
    rho = rho_for(v, kind)
    learned = [(x, r) if kind == "classic" else (x,) for x, r in zip(v, rho)]
    g = torch.randn(4, 3, 2, 2, device=DEVICE)
    weight = kernels.WeightGroup(v, 1, torch.float32, kind == "classic")(v, rho)[0]
    expected = torch.autograd.grad(bounded_weight(v[0], rho[0], p=1), learned[0], g)
    for _ in range(2):
        first, second = (torch.autograd.grad(weight, which, g, retain_graph=True) for which in learned)
        torch.testing.assert_close(first, expected)
        assert not any(map(torch.any, second))


def test_differentiated_once(kind):
    v = [torch.randn(4, 3, device=DEVICE, requires_grad=True)]
    rho = rho_for(v, kind)
    for leaf in [*v, *rho][: 2 if kind == "classic" else 1]:
        (weight,) = kernels.WeightGroup(v, 2, torch.float32, kind == "classic")(v, rho)
        (gradient,) = torch.autograd.grad(weight.square().sum(), leaf, create_graph=True)  # using it is fine
        with pytest.raises(RuntimeError, match="only once"):
            gradient.sum().backward()


# On a GPU, at real sizes ----------------------------------------------------------------------------------------------


def resnet50_shapes() -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            shapes += [(4 * width, inputs, 1, 1)] if block == 0 else []
            inputs = 4 * width
    return [*shapes, (1000, 2048)]


@pytest.mark.gpu
@pytest.mark.parametrize("p", ORDERS)
def test_resnet50_weights_and_an_embedding(p, kind, poisoned_empty):
    v = [torch.randn(shape, device=DEVICE) for shape in resnet50_shapes()]
    v = [x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for x in v]
    others = [torch.randn(20001, 100, device=DEVICE), torch.randn(2, 2**21, device=DEVICE)]
    check_weights([*v, *others], p, torch.float32, kind)
    check_weights(v, p, torch.bfloat16, kind)


def check_repeatable(shapes: list[tuple[int, ...]], kind: str) -> None:
    v = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    rho = rho_for(v, kind)
    learned = [*v, *rho] if kind == "classic" else v
    together = kernels.WeightGroup(v, 2, torch.bfloat16, kind == "classic")
    first, second = together(v, rho), together(v, rho)
    gradients = [torch.randn_like(w) for w in first]
    for ours in (zip(first, second), zip(*(torch.autograd.grad(w, learned, gradients) for w in (first, second)))):
        for a, b in ours:
            assert torch.equal(a, b)


def test_bitwise_repeatable(kind, poisoned_empty):
    check_repeatable([(5, 3), (6, 4, 3, 3), (3, 700)], kind)


@pytest.mark.gpu
def test_bitwise_repeatable_at_real_sizes(kind):
    check_repeatable(resnet50_shapes(), kind)
