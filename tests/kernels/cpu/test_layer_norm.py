"""The native layer norm and RMS norm, beside the same equations in float64."""

from __future__ import annotations

import math

import pytest
import torch

from normmatters import L1LayerNorm, L1RMSNorm, LpLayerNorm
from normmatters.functional.layer_norm import layer_norm as plain_layer_norm
from normmatters.kernels import cpu, dispatch
from normmatters.norm import Norm, compute_dtype

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=cpu.why_not())

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NORMS = {"l1": Norm(1), "l2": Norm(2), "lp": Norm(1.5), "l3": Norm(3), "paper": Norm(1, constant="paper")}
# Around the width of a vector, of four vectors, and of the block whose sums stay in single precision.
SIZES = [1, 2, 15, 16, 17, 63, 64, 65, 200, 1000, 4096, 4097, 9000]


def both(norm, x, weight, bias, g, centered=True, shape=None):
    """(y, dx, dweight, dbias) of the kernels, and in float64 by the plain equation."""
    results = []
    for wide in (False, True):
        leaves = [t if t is None else (t.double() if wide else t.clone()).requires_grad_() for t in (x, weight, bias)]
        call = plain_layer_norm if wide else dispatch.layer_norm
        y = call(leaves[0], shape or x.shape[-1:], norm, leaves[1], leaves[2], centered=centered)
        inputs = [t for t in leaves if t is not None]
        results.append([y.detach(), *torch.autograd.grad(y, inputs, g.double() if wide else g)])
    return results


def check(norm, x, weight, bias, g, centered=True, slack=1.0):
    """Compare with roundings of the numbers that each result is a sum of."""
    assert dispatch.layer_norm_backend(x, x.shape[-1:], norm).name == "cpu"
    own, wide = both(norm, x, weight, bias, g, centered)
    n, rounding, inner = x.shape[-1], torch.finfo(x.dtype).eps, 16 * torch.finfo(compute_dtype(x.dtype)).eps
    eps = norm.epsilon(x.dtype)
    y = x.double() - (x.double().mean(-1, keepdim=True) if centered else 0)
    p, c = float(norm.p), norm.scale_constant(n)
    inverse = 1 / ((c * (y.abs() ** p).mean(-1, keepdim=True) ** (1 / p)).square() + eps).sqrt()
    gamma = 1.0 if weight is None else weight.double().abs()
    # What one rounding of x is after the division, for the mean of the row is only as exact as its numbers.
    blur = (x.double().abs().amax(-1, keepdim=True) * torch.finfo(compute_dtype(x.dtype)).eps ** 2 * inverse).clamp(
        max=1
    )
    largest = (y * inverse).abs().amax(-1, keepdim=True)
    scales = {
        "y": ((y * inverse).abs() + 0.1) * gamma + (0 if bias is None else bias.double().abs()),
        "dx": inverse * (g.double() * gamma).abs().amax(-1, keepdim=True) * (1 + largest**2),
        "dw": (g.double() * y * inverse).abs().sum_to_size(n),
        "db": g.double().abs().sum_to_size(n),
    }
    names = ["y", "dx", *(["dw"] if weight is not None else []), *(["db"] if bias is not None else [])]
    for name, a, b in zip(names, own, wide, strict=True):
        subnormal = torch.finfo(x.dtype).smallest_normal * rounding
        bound = slack * scales[name] * (rounding + inner * (1 + math.log2(n)) + blur.max()) + subnormal
        error = (a.double() - b).abs()
        assert a.dtype == (x.dtype if name in ("y", "dx") else a.dtype)
        assert (error <= bound).all(), f"{name} is off by {(error / bound).max():.3g} of its bound"


def data(rows, n, dtype, offset=0.0):
    torch.manual_seed(rows * 10007 + n)
    x = (torch.randn(rows, n, dtype=torch.float64) + offset).to(dtype)
    weight, bias, g = torch.randn(n).to(dtype), torch.randn(n).to(dtype), torch.randn(rows, n).to(dtype)
    weight[0] = 0  # and others are negative
    return x, weight, bias, g


@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_values_and_gradients(kind, dtype, centered):
    for n in SIZES:
        for rows in (1, 4, 7) if n < 4096 else (5,):
            x, weight, bias, g = data(rows, n, dtype)
            check(NORMS[kind], x, weight, bias if centered else None, g, centered)
    x, weight, bias, g = data(3, 40, dtype)
    for w, b in ((None, bias), (weight, None), (None, None)):
        check(NORMS[kind], x, w, b, g, centered)


@pytest.mark.parametrize(("rows", "n"), [(3000, 8), (700, 33), (200, 256)])
def test_gradients_of_parameters_over_many_rows(rows, n):
    x, weight, bias, g = data(rows, n, torch.float32)
    check(Norm(1), x, weight, bias, g)


@pytest.mark.parametrize("kind", NORMS)
def test_a_mean_far_above_the_deviation(kind):
    """At 1e6 a float32 counts in steps of 1/16: the mean must be finer than that."""
    x, weight, bias, g = data(5, 300, torch.float32, offset=1e6)
    check(NORMS[kind], x, weight, bias, g)


@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("kind", NORMS)
def test_extreme_rows(kind, centered):
    x, weight, bias, g = data(6, 50, torch.float32)
    x[0] = 3.0  # constant
    x[1] = 0.0
    x[2, 7] = 1e15  # one huge outlier
    x[3] *= 1e-15
    x[4, 5:] = 0.0  # numbers that are equal to the mean, nearly or exactly
    x[4, :2], x[4, 2:5] = torch.tensor([1.0, -1.0]), 0.0
    norm = NORMS[kind]
    own, wide = both(norm, x, weight, bias if centered else None, g, centered)
    for a, b in zip(own, wide):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5 * b.abs().amax().item() / 300)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("kind", NORMS)
def test_bad_numbers_stay_in_their_row(kind, centered, bad):
    x, weight, _, g = data(6, 50, torch.float32)
    x[2, 7] = bad
    own, wide = both(NORMS[kind], x, weight, None, g, centered)
    for a, b in zip(own[:2], wide[:2]):
        assert torch.equal(a.isnan(), b.isnan())
        assert a[[0, 1, 3, 4, 5]].isfinite().all()
    assert torch.equal(own[2].isnan(), wide[2].isnan())


def test_shapes_and_strides():
    torch.manual_seed(0)
    x = torch.randn(4, 6, 5, 8)
    for shape in ((8,), (5, 8), (6, 5, 8)):
        for view in (
            x,
            x.contiguous(memory_format=torch.channels_last),
            x.transpose(0, 1).contiguous().transpose(0, 1),
        ):
            weight, bias, g = torch.randn(shape), torch.randn(shape), torch.randn(4, 6, 5, 8).transpose(0, 3)
            g = g.transpose(0, 3)
            own, wide = both(Norm(1), view, weight, bias, g, shape=shape)
            for a, b in zip(own, wide):
                torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    own, wide = both(Norm(1), x[:, ::2, 1:, ::3], None, None, torch.ones(4, 3, 4, 3))
    torch.testing.assert_close(own[0].double(), wide[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
def test_no_rows(shape):
    x, weight = torch.empty(shape, requires_grad=True), torch.ones(8, requires_grad=True)
    y = dispatch.layer_norm(x, (8,), Norm(1), weight)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros(8))


def test_random_shapes_and_strides():
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        rows, n = (int(torch.randint(1, high, (), generator=generator)) for high in (70, 300))
        x, weight, bias, g = data(rows, n, torch.float32)
        stride = int(torch.randint(1, 4, (), generator=generator))
        x = torch.randn(n, rows * stride, generator=generator)[:, ::stride].t() if rows % 2 else x
        check(Norm(1 + float(torch.rand((), generator=generator)) * 2), x, weight, bias, g, slack=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_threads_changes_no_bit(dtype, threads):
    x, weight, bias, g = data(1000, 130, dtype)
    results = []
    for count in (1, 2, 3, 2):
        threads(count)
        results.append(both(Norm(1), x, weight, bias, g)[0])
    threads(7)
    check(Norm(1), *data(2, 70_000, dtype))  # more threads than rows
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("layer", [L1LayerNorm(6), LpLayerNorm(6, p=1.5), L1RMSNorm(6)], ids=["l1", "lp", "rms"])
def test_second_derivatives_are_those_of_the_plain_equation(layer):
    torch.manual_seed(0)
    layer, x = layer.double(), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, *ps: layer(x), (x, *layer.parameters()))
    assert torch.autograd.gradcheck(lambda x, *ps: layer(x), (x, *layer.parameters()))


@pytest.mark.parametrize("size", [4096, 4500], ids=["aligned rows", "others"])
def test_large_outputs_are_those_of_their_parts(size):
    """Outputs of 16 MB and more are stored past the cache."""
    torch.manual_seed(0)
    rows = (17 << 20) // (4 * size)
    x, weight, bias = torch.randn(rows, size), torch.randn(size), torch.randn(size)

    def run(x):
        x = x.clone().requires_grad_()
        y = dispatch.layer_norm(x, [size], Norm(1), weight, bias)
        return y.detach(), *torch.autograd.grad(y, x, x.detach() ** 2)

    parts = [run(part) for part in x.chunk(3)]
    for whole, own in zip(run(x), zip(*parts)):
        assert torch.equal(whole, torch.cat(own))
