"""functional.bounded_weight: values against hand-written equations, gradients in float64, edges (F11–F13)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normmatters.functional.weight import bounded_weight, slice_norm

INF = math.inf
NORMS = [(1, None), (2, None), (1.5, None), (4, None), (INF, None), (INF, 3)]


def norm_by_hand(row, p, k):
    values = sorted((abs(x) for x in row.flatten().tolist()), reverse=True)
    if k is not None:
        return sum(values[:k])
    return values[0] if p == INF else sum(x**p for x in values) ** (1 / p)


@pytest.mark.parametrize(("p", "k"), NORMS)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, None])
def test_each_slice_is_rho_v_over_its_norm(p, k, dim):
    torch.manual_seed(0)
    v = torch.randn(3, 4, 5, dtype=torch.float64)
    out = bounded_weight(v, 0.7, dim=dim, p=p, k=k)
    slices = [(v, out)] if dim is None else zip(v.unbind(dim), out.unbind(dim))
    for given_slice, got in slices:
        torch.testing.assert_close(got, 0.7 * given_slice / norm_by_hand(given_slice, p, k), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("p", "k"), NORMS)
@pytest.mark.parametrize("dim", [0, 1, None])
def test_gradients(p, k, dim):
    torch.manual_seed(1)
    v = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    rho = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v, rho: bounded_weight(v, rho, dim=dim, p=p, k=k), (v, rho))


def test_gradient_is_orthogonal_to_v_so_that_its_norm_grows():
    v = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    (bounded_weight(v, 2.0) * torch.randn_like(v)).sum().backward()
    torch.testing.assert_close((v.grad * v).sum(1), torch.zeros(4, dtype=torch.float64), atol=1e-14, rtol=0)
    assert ((v - v.grad).norm(dim=1) > v.norm(dim=1)).all()


def test_topk_norm_goes_from_linf_to_l1():
    v = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(slice_norm(v, p=INF, k=1), slice_norm(v, p=INF))
    torch.testing.assert_close(slice_norm(v, p=INF, k=8), slice_norm(v, p=1))


def test_per_channel_rho_is_classic_weight_norm():
    v, g = torch.randn(3, 4, 2), torch.rand(3, 1, 1)
    torch.testing.assert_close(bounded_weight(v, g), torch._weight_norm(v, g, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_fp32(dtype):
    torch.manual_seed(2)
    v = (300 * torch.randn(4, 512)).to(dtype)  # the sum of squares overflows fp16
    out = bounded_weight(v, 1.0)
    assert out.dtype == dtype
    # One rounding of the result: half a unit in the last place, relative.
    torch.testing.assert_close(
        out.double(), bounded_weight(v.double(), 1.0), rtol=torch.finfo(dtype).eps / 2, atol=1e-7
    )


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e25])
@pytest.mark.parametrize("p", [2, 8.0])
def test_any_length_of_v_gives_the_same_weight(scale, p):
    v = torch.tensor([[3.0, -4.0, 1.0]])
    scaled = (v * scale).requires_grad_()
    out = bounded_weight(scaled, 1.0, p=p)
    torch.testing.assert_close(out, bounded_weight(v, 1.0, p=p), rtol=1e-5, atol=0)
    assert out.sum().isfinite()


@pytest.mark.parametrize(("p", "k"), NORMS)
def test_a_zero_slice_gives_zeros_and_a_finite_gradient(p, k):
    v = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 2.0]], requires_grad=True)
    out = bounded_weight(v, 3.0, p=p, k=k)
    out.sum().backward()
    assert out[0].eq(0).all()
    torch.testing.assert_close(v.grad[0], torch.full((3,), 3.0))
    assert v.grad.isfinite().all()


def test_nan_passes_through_its_own_slice_only():
    out = bounded_weight(torch.tensor([[math.nan, 1.0], [3.0, 4.0]]), 5.0)
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1], torch.tensor([3.0, 4.0]))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dim=st.integers(-4, 3) | st.none(),
    p=st.sampled_from([1, 2, 3.5, INF]),
    rho=st.floats(1e-3, 1e3),
)
def test_every_slice_has_norm_rho_in_any_layout(shape, dim, p, rho):
    if dim is not None and not -len(shape) <= dim < len(shape):
        dim = None
    v = torch.randn(shape[::-1], dtype=torch.float64).permute(*range(len(shape) - 1, -1, -1))
    norms = slice_norm(bounded_weight(v, rho, dim=dim, p=p), dim=dim, p=p)
    torch.testing.assert_close(norms, torch.full_like(norms, rho), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"v": torch.ones(2, 3, dtype=torch.int64)}, TypeError, "floating-point"),
        ({"v": [1.0, 2.0]}, TypeError, "tensor"),
        ({"v": torch.tensor(1.0)}, ValueError, "one dimension"),
        ({"v": torch.ones(0, 3)}, ValueError, "one element"),
        ({"rho": 0.0}, ValueError, "positive"),
        ({"rho": -1}, ValueError, "positive"),
        ({"rho": math.nan}, ValueError, "positive"),
        ({"rho": INF}, ValueError, "finite"),
        ({"rho": "init"}, TypeError, "positive number"),
        ({"dim": 2}, ValueError, "-2..1"),
        ({"dim": -3}, ValueError, "-2..1"),
        ({"dim": 0.0}, TypeError, "dim"),
        ({"p": 0.5}, ValueError, "at least 1"),
        ({"p": math.nan}, ValueError, "at least 1"),
        ({"p": "range"}, ValueError, "range"),
        ({"p": None}, TypeError, "p must be"),
        ({"p": INF, "k": 4}, ValueError, "slice size 3"),
        ({"p": INF, "k": 0}, ValueError, "at least 1"),
        ({"p": INF, "k": 1.0}, TypeError, "k must"),
        ({"k": 2}, ValueError, "k=2"),
    ],
)
def test_bad_input(arguments, error, message):
    v, rho = arguments.pop("v", torch.ones(2, 3)), arguments.pop("rho", 1.0)
    with pytest.raises(error, match=message):
        bounded_weight(v, rho, **arguments)
