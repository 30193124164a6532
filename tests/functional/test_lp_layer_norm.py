"""lp_layer_norm and lp_rms_norm: batch norm's equation over the features of one token (F10)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from normmatters.constants import gaussian_scale
from normmatters.functional import lp_layer_norm, lp_rms_norm
from support import oracle, tolerances

NORMS = [(1, None), (2, None), (1.5, None), (math.inf, None)]


@pytest.mark.parametrize(("p", "k"), oracle.SCALED_KINDS)
def test_layer_norm_values(p: float | str, k: int | None) -> None:
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64) * 3 - 1
    weight, bias = torch.randn(2, 3, 4, dtype=torch.float64).unbind()
    y = lp_layer_norm(x, (3, 4), weight, bias, 1e-3, p=p, k=k)
    # Batch norm with the tokens as channels.
    expected, _, _ = oracle.batch_norm(x.reshape(10, 12).t(), None, None, 1e-3, p, k, gaussian_scale(p, 12, k))
    expected = expected.t().reshape(x.shape) * weight + bias
    torch.testing.assert_close(y, expected, rtol=0, atol=4 * tolerances.normalized(torch.float64, 12))


@pytest.mark.parametrize(("p", "k"), oracle.SCALED_KINDS)
def test_layer_norm_gradients(p: float | str, k: int | None) -> None:
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, w, b: lp_layer_norm(x, (5,), w, b, p=p, k=k), (x, weight, bias))


def test_layer_norm_of_order_two_is_torchs() -> None:
    x = torch.randn(4, 6, 32, requires_grad=True)
    weight, bias = (torch.randn(32, requires_grad=True) for _ in range(2))
    g = torch.randn_like(x)
    ours, theirs = lp_layer_norm(x, (32,), weight, bias, p=2), F.layer_norm(x, (32,), weight, bias)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=4 * tolerances.normalized(torch.float32, 32))
    gradients = zip(*(torch.autograd.grad(y, (x, weight, bias), g) for y in (ours, theirs)))
    for mine, reference in gradients:
        torch.testing.assert_close(mine, reference, rtol=0, atol=4 * tolerances.parameter_gradient(torch.float32, 32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rms_norm_of_order_two_is_torchs(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 32).to(dtype)
    x[0, 0] *= 1e-4  # where the default eps matters
    weight = torch.randn(32).to(dtype)
    ours, theirs = lp_rms_norm(x, (32,), weight, p=2), F.rms_norm(x, (32,), weight)
    torch.testing.assert_close(ours, theirs, rtol=tolerances.elementwise(dtype), atol=0)


@pytest.mark.parametrize(("p", "k"), NORMS)
def test_rms_norm_values_and_gradients(p: float, k: int | None) -> None:
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, dtype=torch.float64, requires_grad=True)
    y = lp_rms_norm(x, (7,), weight, 1e-2, p=p)
    C = gaussian_scale(p, 7)
    expected = [row / ((C * oracle.statistic(row, p, k)) ** 2 + 1e-2) ** 0.5 * weight for row in x]
    torch.testing.assert_close(y, torch.stack(expected))
    assert torch.autograd.gradcheck(lambda x, w: lp_rms_norm(x, (7,), w, 1e-2, p=p), (x, weight))


@given(
    tokens=st.lists(st.integers(0, 4), max_size=2),
    features=st.lists(st.integers(1, 6), min_size=1, max_size=2),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    strided=st.booleans(),
    p=st.sampled_from([1, 2, 1.5, math.inf, "range"]),
)
def test_any_shape_dtype_and_layout(
    tokens: list[int], features: list[int], dtype: torch.dtype, strided: bool, p: float | str
) -> None:
    x = torch.randn(*tokens, *features).to(dtype)
    if strided:
        x = x.repeat_interleave(2, dim=-1)[..., ::2]
    y = lp_layer_norm(x, features, p=p)
    n = math.prod(features)
    assert y.dtype == dtype
    assert y.shape == x.shape
    rows = x.reshape(-1, n) if x.numel() else x.new_zeros(0, n)
    expected, _, square = (
        oracle.batch_norm(rows.t(), None, None, 1e-5, p, None, gaussian_scale(p, max(n, 2)))
        if len(rows)
        else (rows.t(), None, torch.ones(1))
    )
    worst = max(1.0, (square + 1e-5).rsqrt().max().item())
    error = (y.double().reshape(expected.t().shape) - expected.t()).abs().max().item() if y.numel() else 0.0
    assert error <= worst * tolerances.normalized(dtype, n)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: lp_layer_norm(x, (4,)), "end in normalized_shape"),
        (lambda x: lp_layer_norm(x, ()), "end in normalized_shape"),
        (lambda x: lp_layer_norm(x, (5,), weight=torch.ones(4)), "weight must have"),
        (lambda x: lp_layer_norm(x, (5,), bias=torch.ones(1)), "bias must have"),
        (lambda x: lp_layer_norm(x, (5,), eps=-1.0), "eps must not be negative"),
        (lambda x: lp_layer_norm(x, (5,), p=0.5), "p must be at least 1"),
        (lambda x: lp_layer_norm(x, (5,), p="mean"), "need a scale"),
        (lambda x: lp_layer_norm(x, (5,), p=math.inf, k=6), "k <= the 5 values"),
        (lambda x: lp_layer_norm(x, (5,), constant="approximate"), "constant must be"),
        (lambda x: lp_rms_norm(x, (5,), p="range"), "RMS norm must be a number"),
    ],
)
def test_bad_arguments(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.randn(3, 5))


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"floating-point dtype, got torch\.int64"):
        lp_layer_norm(torch.arange(6).reshape(2, 3), (3,))
