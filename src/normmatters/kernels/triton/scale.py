"""The kinds of statistic, and what comes of one: D, by which the deviations are divided, and the running statistics."""

from __future__ import annotations

import triton
import triton.language as tl

# Kinds of statistic, as the kernels see them.
L1: tl.constexpr = tl.constexpr(0)
L2: tl.constexpr = tl.constexpr(1)
EXTREME: tl.constexpr = tl.constexpr(2)  # L∞ and Top(k)
RANGE: tl.constexpr = tl.constexpr(3)
MEAN: tl.constexpr = tl.constexpr(4)

#: The same for launches, by the names that :func:`normmatters.functional.statistic.statistic_kind` gives.
KINDS = {
    "l1": L1.value,
    "l2": L2.value,
    "linf": EXTREME.value,
    "topk": EXTREME.value,
    "range": RANGE.value,
    "mean": MEAN.value,
}


@triton.jit
def scale_factors(mean, scale, eps, KIND: tl.constexpr):
    """1/D with D = √(s²+eps), and s/D."""
    if KIND == MEAN:
        return mean * 0.0 + 1.0, mean * 0.0
    inverse = 1.0 / tl.sqrt(scale * scale + eps)
    return inverse, scale * inverse


@triton.jit
def write_statistics(
    stats_ptr,
    running_mean_ptr,
    running_var_ptr,
    batches_ptr,
    channel,
    mask,
    channels,
    mean,
    scale,
    momentum,
    eps,
    unbias,
    HAS_RUNNING: tl.constexpr,
    COUNTS: tl.constexpr,
    KIND: tl.constexpr,
):
    """stats[0] = μ, stats[1] = 1/D, stats[2] = s/D; the running statistics move by ``momentum``.

    COUNTS: the program that has channel 0 adds one to the number of batches.
    """
    inverse, ratio = scale_factors(mean, scale, eps, KIND)
    tl.store(stats_ptr + channel, mean, mask=mask)
    tl.store(stats_ptr + channels + channel, inverse, mask=mask)
    tl.store(stats_ptr + 2 * channels + channel, ratio, mask=mask)
    if HAS_RUNNING:
        # No difference is taken: of an infinite old one it would be NaN, and a momentum of 1 leaves no rounding of it.
        old = tl.load(running_mean_ptr + channel, mask=mask, other=0.0).to(tl.float32)
        tl.store(running_mean_ptr + channel, (1.0 - momentum) * old + momentum * mean, mask=mask)
        if KIND != MEAN:
            old = tl.load(running_var_ptr + channel, mask=mask, other=0.0).to(tl.float32)
            tl.store(running_var_ptr + channel, (1.0 - momentum) * old + momentum * (scale * scale * unbias), mask=mask)
    if COUNTS:
        number = batches_ptr + 0 * channel
        tl.store(number, tl.load(number, mask=channel == 0, other=0) + 1, mask=channel == 0)
