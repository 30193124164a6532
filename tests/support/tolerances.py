"""How far two computations of the same quantity may differ, derived from the rounding of their dtype.

A test compares a result with a float64 oracle. Each bound is a small multiple of ``finfo.eps``; the factor √n is how
rounding errors of n terms add up when their signs are independent. ``FEW`` covers the handful of elementwise roundings
before and after a sum, and the tail of the distribution over thousands of compared elements.
"""

from __future__ import annotations

import math

import torch

FEW = 8.0

#: Relative, for any data: the L1 scale by a pilot. The part of the deviation that first order misses, at most 2·δ with
#: δ <= 0.08 of it, is estimated from 2048 samples: 0.16·√(1/4)/√2048 where half of the data crowd at their mean.
PILOT_ANY = 0.16 * 0.5 / 2048**0.5


def elementwise(dtype: torch.dtype) -> float:
    """Relative: a few roundings per element and no sum, for example eval-mode batch norm."""
    return FEW * torch.finfo(dtype).eps


def statistic(dtype: torch.dtype, n: int) -> float:
    """Relative: a mean or scale of n values, computed in float32 at least."""
    return FEW * torch.finfo(_computed_in(dtype)).eps * math.sqrt(n)


def normalized(dtype: torch.dtype, n: int) -> float:
    """Absolute, for outputs of order 1: the statistics' error, then one rounding to the output's dtype.

    That rounding is relative to the output, which reaches about 4 standard deviations and an affine map of order 1.
    """
    return statistic(dtype, n) + 4 * torch.finfo(dtype).eps


def gradient(dtype: torch.dtype, n: int) -> float:
    """Absolute, for incoming gradients of order 1: two chained sums (the statistics, then Σg and Σg·x̂)."""
    return 2 * normalized(dtype, n)


def parameter_gradient(dtype: torch.dtype, n: int) -> float:
    """Absolute, for Σg·x̂ and Σg over n elements of order 1: each of the n terms carries the output's rounding."""
    return FEW * math.sqrt(n) * normalized(dtype, n)


def offset(dtype: torch.dtype, mean_over_scale: float) -> float:
    """Relative to the scale: a mean stored in one number loses half its last digit, twice with the way to it."""
    return torch.finfo(_computed_in(dtype)).eps * mean_over_scale


def pilot(n: int) -> float:
    """Relative, for Gaussian data: the L1 scale of n values from one pass about a pilot mean, off by δ ≤ 0.08·E|x−μ|.

    A Gaussian's density at the mean accounts for the second-order term, at most 2e-3 for any smooth density. What is
    left is chance: of the n·0.4·δ/σ values expected between the pilot and the mean, √ of that more or fewer, each of
    which counts by up to 2δ. With δ = 0.08·0.8·σ, and the scale 0.8·σ, that is 2·0.064·√(0.0256·n)/(0.8·n); 4 times
    that is hardly ever met. It is 6e-4 at 4096 values, below which the pilot is the mean and this is 0.
    """
    return 4 * 0.0256 / math.sqrt(n)


def regrouped(dtype: torch.dtype) -> float:
    """Relative to the largest result: sums whose terms other threads add.

    At most 256 terms are added in the compute type, then in double. Where the bounds of such a block move, each of its
    256 roundings, by half a digit, may be another.
    """
    return 256 * torch.finfo(_computed_in(dtype)).eps / 2


def unknown(errors: torch.Tensor) -> torch.Tensor:
    """A bound on Σ errors of each row, (C, n), if their signs are independent: six standard deviations."""
    return 6 * errors.square().sum(1).sqrt()


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
