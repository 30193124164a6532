"""Two added L1 batch norms in one operation, against the equation in float64, and as operators of PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from normmatters.kernels import dispatch
from normmatters.kernels.triton.batch_norm import statistics
from normmatters.nn import L1BatchNorm2d, twin
from support.batch_norm_cases import DEVICE, EPS, affine, made
from support.twin_cases import Norm, check, fused

ODD, EVEN = (9, 3, 2, 3), (8, 4, 2, 4)  # rows and columns that do not, or do, fill the tiles of ``small_tiles``
SHAPE = (5, 3, 2, 3)


def two(shape: tuple[int, ...], layout: str = "contiguous", dtype: torch.dtype = torch.float32) -> tuple[Norm, Norm]:
    first, second = (Norm(made(shape, layout, dtype), **affine("l1", shape[1])) for _ in range(2))
    second.x.mul_(0.3).add_(1)  # another scale and another mean
    return first, second


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "layout", "memory", "linked"),
    [
        (ODD, "contiguous", "lean", False),
        (ODD, "contiguous", "exact", True),
        (ODD, "channels_last", "lean", True),
        (ODD, "channels_last", "exact", False),
        (EVEN, "contiguous", "lean", True),
        (EVEN, "contiguous", "exact", False),
        (EVEN, "channels_last", "lean", False),
        (EVEN, "channels_last", "exact", True),
    ],
)
def test_values_and_gradients(shape, layout, memory, linked, small_tiles, poisoned_empty):
    check(*two(shape, layout), memory, linked=linked)


@pytest.mark.parametrize(
    ("dtype", "layout", "memory", "linked"),
    [
        (torch.float16, "channels_last", "lean", False),
        (torch.float16, "channels_last", "lean", True),
        (torch.float16, "contiguous", "exact", True),
        (torch.bfloat16, "contiguous", "exact", False),  # unlinked: the interpreter cuts a bfloat16 sum, not rounds it
    ],
)
def test_half_precision(dtype, layout, memory, linked, small_tiles, poisoned_empty):
    check(*two(ODD, layout, dtype), memory, linked=linked)


@pytest.mark.parametrize(
    ("shape", "layout", "memory"),
    [((7, 3), "", "exact"), ((5, 3, 6), "", "lean"), ((3, 3, 2, 2, 3), "channels_last", "lean"), ((6, 1), "", "lean")],
    ids=str,
)
def test_dimensions(shape, layout, memory, poisoned_empty):
    check(*two(shape, layout or "contiguous"), memory)


@pytest.mark.parametrize(("which", "memory"), [(0, "exact"), (1, "lean")])
def test_zero_negative_and_tiny_weights(which, memory, small_tiles):
    """γ = 0 of either norm still has a gradient."""
    norms = two((9, 7, 2, 3), "channels_last")
    norms[which].weight = torch.tensor([0.0, -0.0, -1.5, 1e-9, -1e-6, 1e-3, -1e-30], device=DEVICE)
    norms[1 - which].weight[2:4] *= -1
    assert (check(*norms, memory)[which].dweight != 0).all()


def test_absent_parameters_and_other_constants():
    first, second = two(ODD)
    check(Norm(first.x, None, first.bias), Norm(second.x, second.weight, None, "none"), "exact")
    check(Norm(first.x, first.weight, None, 2.0), Norm(second.x, None, second.bias.half()), "lean")


@pytest.mark.parametrize(("which", "memory"), [(0, "exact"), (1, "lean")])
def test_constant_channels_offsets_and_outliers(which, memory, small_tiles):
    norms = two((9, 5, 2, 3), "channels_last")
    x = norms[which].x
    x[:, 0] = 3.0
    x[:, 1] = 0.0
    x[:, 2] += 3000.0
    x[4, 3, 1, 2] = -1e5
    x[:, 4] *= 1e-6  # far below √eps
    ours = check(*norms, memory)[which]
    assert ours.y.isfinite().all()
    assert ours.dx.isfinite().all()


def test_lean_codes_are_right_on_average():
    """A gradient of one sign adds up any bias of the codes."""
    norms = two((16, 3, 4, 4))
    check(*norms, "lean", g=1 + 0.1 * torch.randn_like(norms[0].x))


def test_pilot(monkeypatch, fresh_plans, poisoned_empty):
    monkeypatch.setattr(statistics, "PILOT_SAMPLES", 256)
    monkeypatch.setattr(statistics, "is_small", lambda *_: False)
    check(*two((8, 4, 8, 10), "channels_last"), "lean")


@pytest.mark.parametrize("which", [0, 1])
def test_nan_stays_in_its_channel(which, small_tiles):
    norms = two((5, 3, 1, 3), "channels_last")
    g = torch.ones_like(norms[0].x)
    clean = fused(*norms, g, "lean")
    norms[which].x[3, 1, 0, 2] = float("nan")
    for ours, before in zip(fused(*norms, g, "lean"), clean):
        assert ours.y[:, 1].isnan().all()
        for name in ("y", "dx"):
            assert torch.equal(getattr(ours, name)[:, ::2], getattr(before, name)[:, ::2])


def test_strided_tensors():
    """Inputs that are dense in no order or in another one, and a gradient of stride 0."""
    whole = torch.randn(9, 6, 4, 10, device=DEVICE)
    first = Norm(whole[:, ::2, 1:, ::2], (0.5 + torch.rand(6, device=DEVICE))[::2])
    second = Norm(whole[:, 1::2, :3, 1::2].to(memory_format=torch.channels_last), None, torch.ones(3, device=DEVICE))
    g = torch.ones(1, 3, 1, 1, device=DEVICE).expand(9, 3, 3, 5)
    ours = fused(first, second, g, "exact")
    dense = fused(Norm(first.x.contiguous(), first.weight.contiguous()), second, g.contiguous(), "exact")
    for mine, theirs in zip(ours, dense):
        for name in ("y", "dx", "dweight", "dbias", "running_mean", "running_var"):
            if getattr(theirs, name) is not None:
                assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    check(Norm(first.x.contiguous(), first.weight), Norm(second.x.contiguous(), None, second.bias), "exact")


def test_bitwise_equal_from_run_to_run():
    norms, g = two(ODD), torch.randn(ODD, device=DEVICE)
    for mine, again in zip(fused(*norms, g, "lean", g), fused(*norms, g, "lean", g)):
        for name, value in vars(mine).items():
            assert value is None or torch.equal(value, getattr(again, name)), name


# What is saved -------------------------------------------------------------------------------------------------------


def added(first: Norm, second: Norm, memory: str, linked: bool = False) -> tuple[Tensor, Tensor | None]:
    return dispatch.twin_batch_norm(first.side(memory), second.side(memory), linked=linked)


@pytest.mark.parametrize(("memory", "share"), [("lean", 0.5), ("exact", 2.25)])
def test_saved_bytes(memory, share):
    first, second = two((32, 4, 8, 16), "channels_last", torch.float16)
    first.x.requires_grad_()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y, _ = added(first, second, memory)
    unique = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in packed}
    assert y.untyped_storage().data_ptr() not in unique
    size = y.untyped_storage().nbytes()
    assert share * size <= sum(unique.values()) <= (share + 0.02) * size


def test_nothing_is_saved_without_grad_and_no_gradient_for_what_needs_none():
    first, second = two(SHAPE)
    first.x.requires_grad_()
    with torch.no_grad():
        quiet, link = added(first, second, "lean", linked=True)
    assert link is None
    assert quiet.grad_fn is None
    torch.testing.assert_close(quiet.double(), (first.plain() + second.plain()).relu().detach(), rtol=0, atol=1e-5)
    first.x.requires_grad_(False)
    second.weight.requires_grad_()
    y, _ = added(first, second, "exact")
    assert torch.equal(y, quiet)
    y.backward(torch.ones_like(y))
    assert first.x.grad is second.x.grad is first.bias.grad is None
    xhat = Norm(second.x).plain()
    torch.testing.assert_close(second.weight.grad.double(), (xhat * (y > 0)).sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


def test_second_derivatives_are_refused():
    first, second = two(SHAPE)
    x = first.x.requires_grad_()
    y, _ = added(first, second, "exact")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        dx.sum().backward()


# Operators -----------------------------------------------------------------------------------------------------------

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


def forward_arguments(lean: bool, save: bool, linked: bool, layout: str) -> list:
    first, second = two(SHAPE, layout)
    tensors = [first.x, first.weight, first.bias, second.x, second.weight, None]
    running = [torch.rand(3, device=DEVICE) for _ in range(3)]
    batches = torch.zeros((), dtype=torch.int64, device=DEVICE)
    states = [*running[:2], batches, 0.3, EPS, 1.25, running[2], None, None, 0.2, EPS, 1.3]
    return [*(t if t is None else t.requires_grad_(save) for t in tensors), *states, lean, save, linked]


@pytest.mark.parametrize(
    ("lean", "save", "linked", "layout"),
    [(True, True, True, "channels_last"), (False, True, False, "contiguous"), (True, False, False, "contiguous")],
)
def test_opcheck_forward(lean, save, linked, layout):
    arguments = forward_arguments(lean, save, linked, layout)
    torch.library.opcheck(torch.ops.normmatters.twin_batch_norm_forward, arguments, test_utils=CHECKS)


@pytest.mark.parametrize(("lean", "layout"), [(True, "channels_last"), (False, "contiguous")])
def test_opcheck_backward(lean, layout):
    arguments = forward_arguments(lean, True, False, layout)
    x1, weight1, _, x2, weight2, _ = (None if t is None else t.detach() for t in arguments[:6])
    _, _, code, *stats = torch.ops.normmatters.twin_batch_norm_forward(*arguments)
    g, link = made(SHAPE, layout), made(SHAPE, layout)
    rest = (1.25, 1.3, lean, layout == "channels_last")
    torch.library.opcheck(
        torch.ops.normmatters.twin_batch_norm_backward,
        (g, link, x1, x2, code, *stats, weight1, weight2, *rest),
        test_utils=CHECKS,
    )


class Pair(nn.Module):
    """Two norms, the sum of them, and the ReLU."""

    def __init__(self, memory: str) -> None:
        super().__init__()
        self.first, self.second = L1BatchNorm2d(3, act="relu", memory=memory), L1BatchNorm2d(3, memory=memory)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        assert twin.twin_fits(self.first, x1, self.second, x2)
        z, link = twin.twin_batch_norm(self.first, x1, self.second, x2, linked=True)
        z, _ = self.first.forward_linked(2 * z, z, link, linked=False)
        return z


def test_compiled_is_eager():
    def step(model, call):
        inputs = [t.detach().requires_grad_() for t in data]
        model.zero_grad()
        y = call(*inputs)
        y.backward(g)
        return [y.detach(), *(t.grad for t in (*inputs, *model.parameters())), *(b.clone() for b in model.buffers())]

    torch.compiler.reset()
    model = Pair("lean").to(DEVICE)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    data, g = [made((6, 3, 4, 5), "channels_last") for _ in range(2)], torch.randn(6, 3, 4, 5, device=DEVICE)
    for _ in range(2):  # and a second step, from moved statistics
        for mine, reference in zip(step(other, compiled), step(model, model), strict=True):
            assert torch.equal(mine, reference)
            assert mine.stride() == reference.stride()


def test_a_link_out_gives_the_gradients_that_a_sum_gives():
    """The norm behind it takes the output as its residual, and sends that gradient through the link."""

    def gradients(linked):
        leaves = [t.detach().requires_grad_() for t in data]
        model.zero_grad()
        z, link = twin.twin_batch_norm(model.first, leaves[0], model.second, leaves[1], linked=linked)
        assert (link is not None) == linked
        if linked:
            assert link.untyped_storage().nbytes() == z.element_size()
        y, _ = model.first.forward_linked(1.5 * z, z, link, linked=False)
        (y * g).sum().backward()
        return [y.detach(), *(t.grad for t in (*leaves, *model.parameters()))]

    model = Pair("lean").to(DEVICE)
    data, g = [made(SHAPE) for _ in range(2)], made(SHAPE)
    for mine, theirs in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
