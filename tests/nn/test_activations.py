"""TReLU (F15): the constants are the half-normal's mean and standard deviation."""

from __future__ import annotations

import math

import torch

from normmatters.nn import TReLU


def test_values_and_gradient() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = TReLU()(x)
    low = -(1 / math.sqrt(2 * math.pi)) / math.sqrt(0.5 * (1 - 1 / math.pi))
    slope = 1 / math.sqrt(0.5 * (1 - 1 / math.pi))
    torch.testing.assert_close(y, torch.tensor([low, low, low + 2 * slope], dtype=torch.float64))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([0, 0, slope], dtype=torch.float64))


def test_keeps_zero_mean_and_unit_variance() -> None:
    """Integrated over a standard Gaussian on a fine grid."""
    x = torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    y = TReLU()(x)
    assert abs(torch.trapezoid(y * density, x)) < 1e-8
    assert abs(torch.trapezoid(y.square() * density, x) - 1) < 1e-8
