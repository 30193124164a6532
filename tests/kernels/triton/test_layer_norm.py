"""The layer norm kernels against the plain equations in float64: on a GPU, or through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from normmatters.functional import lp_layer_norm, lp_rms_norm
from normmatters.kernels.triton import layer_norm as kernels
from normmatters.kernels.triton.layer_norm import Tiling, Tuning, forward_tuning, layer_norm, tiling_of, why_not
from normmatters.norm import Norm
from support import tolerances

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = {"l1": 1, "l2": 2}
L1 = Norm(1)


def fused(x: Tensor, w: Tensor | None, b: Tensor | None, kind: str, centered: bool, constant: str | float) -> Tensor:
    return layer_norm(x, x.shape[-1:], Norm(KINDS[kind], None, constant, 1e-3), w, b, centered=centered)


def plain(x: Tensor, w: Tensor | None, b: Tensor | None, kind: str, centered: bool, constant: str | float) -> Tensor:
    if centered:
        return lp_layer_norm(x, x.shape[-1:], w, b, 1e-3, p=KINDS[kind], constant=constant)
    return lp_rms_norm(x, x.shape[-1:], w, 1e-3, p=KINDS[kind], constant=constant)


def leaf(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.detach().to(dtype).requires_grad_()


def check(
    x: Tensor, w: Tensor | None, b: Tensor | None, kind: str, centered: bool, constant: str | float = "exact"
) -> None:
    """Values and all gradients, within a bound for their size."""
    inputs = [leaf(t, t.dtype) if t is not None else None for t in (x, w, b)]
    references = [leaf(t, torch.float64) for t in (x, w, b)]
    y = fused(*inputs, kind, centered, constant)  # type: ignore[arg-type]
    expected = plain(*references, kind, centered, constant)  # type: ignore[arg-type]
    g = torch.randn(x.shape, dtype=torch.float32, device=x.device).to(x.dtype)
    y.backward(g)
    expected.backward(g.double())
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    n, rows = x.shape[-1], x.numel() // x.shape[-1]
    bounds = [tolerances.gradient(x.dtype, n), *[tolerances.parameter_gradient(x.dtype, rows)] * 2]
    close(y, expected, tolerances.normalized(x.dtype, n))
    unsure = side_unsure(x) if kind == "l1" and centered else torch.zeros_like(x, dtype=torch.bool)
    assert inputs[0] is not None
    assert inputs[0].grad is not None
    assert references[0] is not None
    assert unsure.double().mean() < 0.01
    inputs[0].grad = torch.where(unsure, references[0].grad.to(x.dtype), inputs[0].grad)  # type: ignore[union-attr]
    for ours, reference, bound in zip(inputs, references, bounds):
        if ours is not None and reference is not None:
            assert ours.grad is not None
            assert ours.grad.dtype == ours.dtype
            close(ours.grad, reference.grad, bound + tolerances.elementwise(ours.dtype))


def side_unsure(x: Tensor) -> Tensor:
    """Where float32 cannot tell on which side of the mean an element lies, on which L1's gradient depends."""
    d = x.double() - x.double().mean(-1, keepdim=True)
    rounding = 16 * torch.finfo(torch.float32).eps * x.double().abs().amax(-1, keepdim=True)
    return (d != 0) & (d.abs() < rounding)


def close(ours: Tensor, reference: Tensor | None, bound: float) -> None:
    assert reference is not None
    size = max(1.0, float(reference.detach().abs().max()))
    torch.testing.assert_close(ours.double(), reference.double(), rtol=0, atol=bound * size)


def forget_launches() -> None:
    kernels.forward_launch.cache_clear()
    kernels.backward_plan.cache_clear()


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tiles and two programs, so that a handful of rows goes through the loop several times."""
    whole = kernels.tiling_of

    def cut(rows: int, cols: int, device: torch.device, tuning: Tuning) -> Tiling:
        tiling = whole(rows, cols, device, tuning)
        return tiling._replace(block_r=min(tiling.block_r, 4), programs=min(-(-rows // min(tiling.block_r, 4)), 2))

    monkeypatch.setattr(kernels, "tiling_of", cut)
    forget_launches()
    yield
    forget_launches()


@pytest.mark.parametrize("cols", [1, 3, 65, 64, 257])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, centered, cols, few_programs, poisoned_empty):
    x = torch.randn(19, cols, device=DEVICE) * 2 + 1
    w, b = torch.randn(2, cols, device=DEVICE).unbind()
    check(x, w, b if centered else None, kind, centered)


@pytest.mark.parametrize(("cols", "per_thread"), [(1100, 16), (1100, 64), (300, 8)])
def test_any_tuning_gives_the_same(cols, per_thread, monkeypatch):
    """Rows too long to keep the vectors along them, one or four to a tile, and tiles of which the last is not full."""
    tuning = Tuning(per_thread, registers=128, threads=512)
    monkeypatch.setattr(kernels, "forward_tuning", lambda *kind: tuning)
    monkeypatch.setattr(kernels, "backward_tuning", lambda cols: tuning)
    monkeypatch.setattr(kernels, "PARTS_AT_A_TIME", 2)  # several steps
    forget_launches()
    x = torch.randn(5, cols, device=DEVICE) + 1
    w, b = torch.randn(2, cols, device=DEVICE).unbind()
    check(x, w, b, "l1", True)
    check(x, w, b, "l2", True)
    check(x, w, None, "l1", False)
    forget_launches()


def test_a_tuning_says_how_rows_are_cut():
    cpu = torch.device("cpu")  # counts as one multiprocessor
    assert tiling_of(100, 4096, cpu, Tuning()) == Tiling(1, 4096, 8, 4)
    assert tiling_of(100, 4096, cpu, Tuning(per_thread=32, threads=640)) == Tiling(1, 4096, 4, 5)
    assert tiling_of(100, 2048, cpu, Tuning(per_thread=32, threads=512)) == Tiling(2, 2048, 4, 4)
    assert tiling_of(3, 4000, cpu, Tuning()) == Tiling(1, 4096, 8, 3)
    assert tiling_of(100, 5, cpu, Tuning()) == Tiling(128, 16, 4, 1)


def test_rows_of_l1_that_half_as_many_threads_hold():
    """Where it was measured to be faster, and where a thread's 32 elements and the next row's fit in its registers."""
    bf16, cpu = torch.bfloat16, torch.device("cpu")
    for cols in (2049, 4096):
        assert tiling_of(100, cols, cpu, forward_tuning(cols, bf16, True, True)) == Tiling(1, 4096, 4, 5)
    for other in ((2048, bf16, True, True), (8192, bf16, True, True), (4096, torch.float32, True, True)):
        assert forward_tuning(*other) == Tuning()
    assert forward_tuning(4096, bf16, False, True) == forward_tuning(4096, bf16, True, False) == Tuning()


@pytest.mark.parametrize("affine", ["none", "weight", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_weight_or_bias(kind, affine, few_programs):
    x = torch.randn(2, 5, 33, device=DEVICE)
    vector = torch.randn(33, device=DEVICE)
    check(x, vector if affine == "weight" else None, vector if affine == "bias" else None, kind, True)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, parameters, few_programs):
    x = (torch.randn(9, 48, device=DEVICE) * 3 - 1).to(dtype)
    w, b = torch.randn(2, 48, device=DEVICE).to(parameters).unbind()
    check(x, w, b, "l1", True)


@pytest.mark.parametrize("constant", ["none", "paper", 2.0])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_constants(kind, centered, constant):
    """A constant other than 1 enters the gradient in its own place."""
    check(torch.randn(4, 20, device=DEVICE), torch.randn(20, device=DEVICE), None, kind, centered, constant)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_hard_rows(kind, centered):
    """Constant and zero rows, one huge outlier, tiny numbers, zeros (where |x| has slope 0), ties with the mean."""
    x = torch.randn(7, 32, device=DEVICE)
    x[0], x[1], x[2, 5] = 3.0, 0.0, 1e4
    x[3] *= 1e-8
    x[4] = x[4].relu()
    x[5] = torch.tensor([-1.0, 0.0, 1.0, 0.0], device=DEVICE).repeat(8)
    check(x, torch.randn(32, device=DEVICE), None, kind, centered)


def test_large_offset_keeps_the_digits():
    """Two passes over registers: a mean a thousand times the deviation costs no more than its rounding."""
    x = torch.randn(4, 256, device=DEVICE) + 1000
    y = fused(x, None, None, "l1", True, "exact")
    close(y, plain(x.double(), None, None, "l1", True, "exact"), 1000 * torch.finfo(torch.float32).eps * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_too_long_for_sums_in_registers(kind, monkeypatch, few_programs):
    monkeypatch.setattr(kernels, "MAX_FUSED", 16)
    w, b = torch.randn(2, 70, device=DEVICE).unbind()
    check(torch.randn(37, 70, device=DEVICE), w, b, kind, True)
    check(torch.randn(37, 70, device=DEVICE), w, None, kind, False)


def test_any_layout_and_shape():
    base = torch.randn(4, 6, 5, device=DEVICE)
    transposed = base.transpose(0, 1)
    w = torch.randn(4, 5, device=DEVICE)
    y = layer_norm(transposed, (4, 5), L1, w, None)
    expected = layer_norm(transposed.contiguous(), (4, 5), L1, w, None)
    assert torch.equal(y, expected)
    vector = torch.randn(10, device=DEVICE).requires_grad_()
    layer_norm(vector, (10,), Norm(2), None, None).sum().backward()
    assert vector.grad is not None
    assert vector.grad.abs().max() < 1e-5  # the mean of a layer norm's output does not depend on its input
    expanded = torch.randn(3, 5, device=DEVICE).requires_grad_()
    # The gradient of a sum is expanded: stride 0.
    layer_norm(expanded, (5,), L1, None, None, centered=False).sum().backward()
    reference = leaf(expanded, torch.float64)
    assert reference is not None
    lp_rms_norm(reference, (5,), None, 1e-5).sum().backward()
    assert expanded.grad is not None
    close(expanded.grad, reference.grad, 1e-5)


def test_no_rows():
    x = torch.randn(0, 8, device=DEVICE).requires_grad_()
    w = torch.randn(8, device=DEVICE).requires_grad_()
    y = layer_norm(x, (8,), L1, w, None)
    y.sum().backward()
    assert y.shape == (0, 8)
    assert w.grad is not None
    assert torch.equal(w.grad, torch.zeros_like(w))


def test_frozen_parameters_get_no_gradient():
    x = torch.randn(3, 8, device=DEVICE).requires_grad_()
    w, b = torch.randn(2, 8, device=DEVICE).unbind()
    layer_norm(x, (8,), L1, w, b.requires_grad_()).sum().backward()
    assert w.grad is None
    assert b.grad is not None
    close(b.grad, torch.full((8,), 3.0), 0)


def test_supported():
    assert why_not(torch.zeros(2, 8), (8,), L1) == ""
    assert "16385" in why_not(torch.zeros(1, 16385), (16385,), L1)
    assert "not 0" in why_not(torch.zeros(2, 0), (0,), L1)
    assert "536870913" in why_not(torch.zeros(1).expand(2**29 + 1, 1), (1,), L1)


@pytest.mark.parametrize(("p", "centered"), [(1.0, True), (1.0, False), (2.0, True), (2.0, False)])
def test_opcheck(p, centered):
    x = torch.randn(3, 9, device=DEVICE, requires_grad=True)
    w = torch.randn(9, device=DEVICE, requires_grad=True)
    b = torch.randn(9, device=DEVICE, requires_grad=True) if centered else None
    options = (1e-5, 1.25, p, centered, 1)
    torch.library.opcheck(torch.ops.normmatters.layer_norm_forward, (x, w, b, *options))
    _, stats = torch.ops.normmatters.layer_norm_forward(x, w, b, *options)
    arguments = (x.detach(), x.detach(), w.detach(), stats, *options, True, torch.float32, torch.bfloat16)
    torch.library.opcheck(torch.ops.normmatters.layer_norm_backward, arguments)


def test_opcheck_without_parameters_and_strided():
    x = torch.randn(9, 3, device=DEVICE).bfloat16().t().requires_grad_()
    options = (1e-5, 1.25, 1.0, True, 1)
    torch.library.opcheck(torch.ops.normmatters.layer_norm_forward, (x, None, None, *options))
    y, stats = torch.ops.normmatters.layer_norm_forward(x, None, None, *options)
    arguments = (x.detach(), None, stats, *options, False, torch.bfloat16, torch.bfloat16)
    torch.library.opcheck(torch.ops.normmatters.layer_norm_backward, (y.detach(), *arguments))


def test_differentiated_once():
    x = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    y = layer_norm(x, (8,), L1, None, None)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)  # using the gradient is fine
    with pytest.raises(RuntimeError, match="only once"):
        dx.sum().backward()


def test_compiled_in_one_graph():
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return layer_norm(x * 2, (12,), L1, w, None).sin()

    compiled = torch.compile(norm, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    w = torch.randn(12, device=DEVICE, requires_grad=True)
    for batch in (6, 5):  # a batch that changes becomes symbolic
        x = torch.randn(batch, 12, device=DEVICE, requires_grad=True)
        ours, reference = compiled(x, w), norm(x, w)
        torch.testing.assert_close(ours, reference)
        for found, expected in zip(
            torch.autograd.grad(ours.square().sum(), (x, w)), torch.autograd.grad(reference.square().sum(), (x, w))
        ):
            torch.testing.assert_close(found, expected)


def gradients(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    y = fused(*leaves, "l1", True, "exact")
    return [y, *torch.autograd.grad(y, leaves, g)]


def test_bitwise_repeatable(few_programs):
    x, g = torch.randn(2, 17, 24, device=DEVICE).unbind()
    w, b = torch.randn(2, 24, device=DEVICE).unbind()
    for first, second in zip(gradients(x, w, b, g), gradients(x, w, b, g)):
        assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cols", [64, 768, 1000, 4096, 8192, 16384])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_real_sizes(kind, centered, cols, dtype, poisoned_empty):
    x = (torch.randn(3001 if cols < 8192 else 301, cols, device=DEVICE) * 2 + 1).to(dtype)
    w, b = torch.randn(2, cols, device=DEVICE).unbind()
    check(x, w, b if centered else None, kind, centered)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    x = torch.empty(2**31 // 4096 + 64, 4096, dtype=torch.bfloat16, device=DEVICE).normal_()
    w, b = torch.randn(2, 4096, device=DEVICE).unbind()
    y, dx, _, _ = gradients(x, w, b, x)
    y_last, dx_last, _, _ = gradients(x[-64:], w, b, x[-64:])
    torch.testing.assert_close(y[-64:], y_last)
    torch.testing.assert_close(dx[-64:], dx_last)


@pytest.mark.gpu
def test_cuda_graph_and_repeatability():
    x, g = torch.randn(2, 4096, 4096, device=DEVICE).bfloat16().unbind()
    w, b = torch.randn(2, 4096, device=DEVICE).unbind()
    expected = gradients(x, w, b, g)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(x, w, b, g)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(x, w, b, g)
    for _ in range(2):
        graph.replay()
        for ours, reference in zip(found, expected):
            assert torch.equal(ours, reference)
