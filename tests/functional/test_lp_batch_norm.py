"""lp_batch_norm against the formulas written a second time, and against what the formulas imply."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from normmatters.constants import gaussian_scale
from normmatters.functional import lp_batch_norm
from support import oracle, tolerances

SHAPES = [(7, 3), (4, 3, 5), (3, 2, 4, 5), (2, 3, 2, 3, 2)]


def exact_constant(p: float | str, n: int, k: int | None) -> float:
    return 1.0 if p == "mean" else gaussian_scale(p, n, k)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("p", "k"), oracle.KINDS)
def test_values_and_running_statistics(p: float | str, k: int | None, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64) * 2 + 1
    channels, n = shape[1], x.numel() // shape[1]
    weight = None if p == "mean" else torch.randn(channels, dtype=torch.float64)
    bias = torch.randn(channels, dtype=torch.float64)
    running_mean, running_var = torch.randn(channels, dtype=torch.float64), torch.rand(channels, dtype=torch.float64)
    old_mean, old_var = running_mean.clone(), running_var.clone()

    y = lp_batch_norm(x, running_mean, running_var, weight, bias, True, 0.3, 1e-3, p=p, k=k)

    expected, mean, square = oracle.batch_norm(x, weight, bias, 1e-3, p, k, exact_constant(p, n, k))
    torch.testing.assert_close(y, expected, rtol=0, atol=tolerances.normalized(torch.float64, n))
    torch.testing.assert_close(running_mean, 0.7 * old_mean + 0.3 * mean)
    if p == "mean":
        assert torch.equal(running_var, old_var)
    else:
        correction = 1.0 if p == "range" else n / (n - 1)
        torch.testing.assert_close(running_var, 0.7 * old_var + 0.3 * square * correction)


@pytest.mark.parametrize(
    ("p", "k", "constant", "expected"),
    [
        (1, None, "exact", oracle.constant_l1()),
        (1, None, "paper", oracle.constant_l1()),
        (1, None, 4.0, 4 * oracle.constant_l1()),
        (2, None, "exact", 1.0),
        (1.5, None, "exact", oracle.constant_lp(1.5)),
        (math.inf, None, "paper", oracle.constant_linf(60)),
        (math.inf, 3, "paper", oracle.constant_topk(60, 3)),
        (math.inf, 60, "paper", oracle.constant_l1()),
        (math.inf, 60, "exact", oracle.constant_l1()),
        (math.inf, 3, "none", 1.0),
        ("range", None, "none", 1.0),
    ],
)
def test_constants(p: float | str, k: int | None, constant: str | float, expected: float) -> None:
    x = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    y = lp_batch_norm(x, training=True, eps=0.0, p=p, k=k, constant=constant)
    reference, _, _ = oracle.batch_norm(x, None, None, 0.0, p, k, expected)
    torch.testing.assert_close(y, reference, rtol=1e-6, atol=0)  # the exact constants are good to 1e-6


@pytest.mark.parametrize(("p", "k"), oracle.SCALED_KINDS)
def test_scale_of_gaussian_data_is_one(p: float | str, k: int | None) -> None:
    """The constants make every kind estimate the standard deviation; 400 channels average the extremes' noise away."""
    x = 3 * torch.randn(64, 400, dtype=torch.float64) + 5
    running_var = torch.zeros(400, dtype=torch.float64)
    lp_batch_norm(x, torch.zeros(400, dtype=torch.float64), running_var, training=True, momentum=1.0, p=p, k=k)
    # The noisiest estimate here, L∞ of 64, spreads by 15 % a channel: 4 standard errors over 400 channels.
    assert abs(running_var.sqrt().mean().item() / 3 - 1) < 4 * 0.15 / math.sqrt(400)


@pytest.mark.parametrize("act", [None, "relu"])
@pytest.mark.parametrize(("p", "k"), oracle.KINDS)
def test_gradients(p: float | str, k: int | None, act: str | None) -> None:
    x, residual = (torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(
        lambda x, w, b, r: lp_batch_norm(
            x, None, None, None if p == "mean" else w, b, True, p=p, k=k, act=act, residual=r
        ),
        (x, weight, bias, residual),
        # Finite differences of L∞ and Top(k) hold as long as no step of 1e-6 changes which element is largest.
        check_undefined_grad=False,
    )


@pytest.mark.parametrize(("p", "k"), [(1, None), (1.5, None), (math.inf, 3)])
def test_second_derivatives(p: float, k: int | None) -> None:
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: lp_batch_norm(x, training=True, p=p, k=k), (x,))


def test_l1_gradient_is_the_designs_formula() -> None:
    """dx = (1/D)[ĝ − mean ĝ − (s/D)·C·(sign − mean sign)·mean(ĝx̂)], in numbers."""
    x = torch.randn(9, 1, dtype=torch.float64, requires_grad=True)
    g = torch.randn(9, 1, dtype=torch.float64)
    eps, C = 1e-2, oracle.constant_l1()
    (dx,) = torch.autograd.grad(lp_batch_norm(x, training=True, eps=eps), x, g)
    c = (x - x.mean()).detach()
    s = C * c.abs().mean()
    D = (s**2 + eps) ** 0.5
    sign = c.sign()
    expected = (g - g.mean() - s / D * C * (sign - sign.mean()) * (g * c / D).mean()) / D
    torch.testing.assert_close(dx, expected)


@pytest.mark.parametrize(("p", "k"), oracle.SCALED_KINDS)
def test_scale_and_shift_do_not_matter_without_eps(p: float | str, k: int | None) -> None:
    """F1: BN(a·x + b) = BN(x), and the gradient scales by 1/a."""
    x = torch.randn(6, 3, 4, dtype=torch.float64, requires_grad=True)
    moved = (1000 * x.detach() - 7).requires_grad_()
    g = torch.randn_like(x)
    y, z = (lp_batch_norm(t, training=True, eps=0.0, p=p, k=k) for t in (x, moved))
    torch.testing.assert_close(y, z, rtol=0, atol=1e-11)
    (dx,), (dz,) = torch.autograd.grad(y, x, g), torch.autograd.grad(z, moved, g)
    torch.testing.assert_close(dx, 1000 * dz, rtol=0, atol=1e-10)


@pytest.mark.parametrize("act", [None, "relu"])
@pytest.mark.parametrize(("p", "k"), oracle.KINDS)
def test_eval_is_batch_norm_on_the_running_statistics(p: float | str, k: int | None, act: str | None) -> None:
    x, residual = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    weight = None if p == "mean" else torch.randn(4)
    bias, mean, var = torch.randn(4), torch.randn(4), torch.rand(4)
    y = lp_batch_norm(x, mean, var, weight, bias, False, 0.1, 1e-3, p=p, k=k, act=act, residual=residual)
    if p == "mean":
        expected = x - mean.view(1, 4, 1, 1) + bias.view(1, 4, 1, 1) + residual
        torch.testing.assert_close(y, expected.relu() if act else expected)
    else:
        expected = F.batch_norm(x, mean, var, weight, bias, False, 0.1, 1e-3) + residual
        assert torch.equal(y, expected.relu() if act else expected)


def test_residual_and_relu() -> None:
    x, residual = torch.randn(2, 6, 3, 4, dtype=torch.float64).unbind()
    plain = lp_batch_norm(x, training=True)
    both = lp_batch_norm(x, training=True, act="relu", residual=residual)
    assert torch.equal(both, (plain + residual).clamp(min=0))


@given(
    samples=st.integers(2, 5),
    channels=st.sampled_from([1, 3, 65]),
    pixels=st.lists(st.integers(1, 4), max_size=3),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    layout=st.sampled_from(["contiguous", "channels_last", "strided"]),
    kind=st.sampled_from(oracle.KINDS),
)
def test_any_shape_dtype_and_layout(
    samples: int,
    channels: int,
    pixels: list[int],
    dtype: torch.dtype,
    layout: str,
    kind: tuple[float | str, int | None],
) -> None:
    p, k = kind
    n = samples * math.prod(pixels)
    k = None if k is None else min(k, n)
    x = laid_out(torch.randn(samples, channels, *pixels).to(dtype), layout)
    y = lp_batch_norm(x, training=True, p=p, k=k)
    expected, _, square = oracle.batch_norm(x, None, None, 1e-5, p, k, exact_constant(p, n, k))
    assert y.dtype == dtype
    # Two nearly equal samples divide by nearly 0: the deviation's rounding is relative to x, which is of order 1.
    worst = max(1.0, square.rsqrt().max().item())
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=worst * tolerances.normalized(dtype, n))


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "channels_last" and x.dim() in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "strided":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    return x


def test_half_precision_is_rounded_once() -> None:
    """In float32 up to the end: the result is the float32 result, rounded."""
    x, residual = torch.randn(2, 16, 4, 3, 3).bfloat16().unbind()
    wide = lp_batch_norm(x.float(), training=True, act="relu", residual=residual.float())
    assert torch.equal(lp_batch_norm(x, training=True, act="relu", residual=residual), wide.bfloat16())


@pytest.mark.parametrize(("p", "k"), oracle.SCALED_KINDS)
def test_a_constant_channel_gives_the_bias_and_finite_gradients(p: float | str, k: int | None) -> None:
    x = torch.full((4, 1, 2), 3.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.5], dtype=torch.float64)
    y = lp_batch_norm(x, None, None, None, bias, True, p=p, k=k)
    assert torch.equal(y, torch.full_like(y, 0.5))
    g = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(dx, (g - g.mean()) / math.sqrt(1e-5))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("p", "k"), oracle.KINDS)
def test_nan_and_inf_spoil_their_channel_only(p: float | str, k: int | None, bad: float) -> None:
    x = torch.randn(4, 2, 3)
    x[1, 0, 2] = bad
    mean, var = torch.zeros(2), torch.ones(2)
    y = lp_batch_norm(x, mean, var, training=True, p=p, k=k)
    assert not y[:, 0].isfinite().any()
    assert y[:, 1].isfinite().all()
    assert not mean[0].isfinite()
    assert mean[1].isfinite()


@pytest.mark.parametrize(("p", "k"), oracle.KINDS)
def test_an_empty_batch_passes_as_in_torch(p: float | str, k: int | None) -> None:
    x = torch.randn(0, 3, 2, requires_grad=True)
    weight = None if p == "mean" else torch.ones(3, requires_grad=True)
    mean, var = torch.zeros(3), torch.ones(3)
    y = lp_batch_norm(x, mean, var, weight, None, True, p=p, k=k)
    y.sum().backward()
    assert y.shape == x.shape
    assert torch.equal(mean, torch.zeros(3))
    assert torch.equal(var, torch.ones(3))
    if weight is not None:
        assert torch.equal(weight.grad, torch.zeros(3))


def test_an_update_that_fails_leaves_the_running_statistics() -> None:
    """`vmap` cannot write the statistics of several batches into one buffer."""
    running_mean, running_var = torch.ones(3), torch.full((3,), 2.0)
    with pytest.raises(RuntimeError):
        torch.vmap(lambda x: lp_batch_norm(x, running_mean, running_var, training=True))(torch.randn(2, 5, 3))
    assert running_mean.tolist() == [1.0] * 3
    assert running_var.tolist() == [2.0] * 3
