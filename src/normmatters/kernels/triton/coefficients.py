"""From the backward pass's sums to dγ, dβ and the coefficients of dx: a few numbers a channel."""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.codes import STEP
from normmatters.kernels.triton.launch import wait_for_previous
from normmatters.kernels.triton.scale import L1, L2, MEAN
from normmatters.kernels.triton.tiles import add_entries, load_affine

# What the backward pass knows x̂ from.
FROM_INPUT: tl.constexpr = tl.constexpr(0)
FROM_OUTPUT: tl.constexpr = tl.constexpr(1)
FROM_CODE: tl.constexpr = tl.constexpr(2)


@triton.jit
def is_vague(gamma, beta, ROUNDING: tl.constexpr, TINY: tl.constexpr):
    """Whether rounding the output lost x̂: a step of the output is more than 1/16 of x̂'s unit."""
    return tl.abs(gamma) < 16.0 * (ROUNDING * tl.abs(beta) + TINY)


@triton.jit
def solve(
    first,
    second,
    count,
    inverse,
    ratio,
    gamma,
    beta,
    n,
    constant,
    KIND: tl.constexpr,
    SOURCE: tl.constexpr,
    K: tl.constexpr,
    ROUNDING: tl.constexpr,
    TINY: tl.constexpr,
):
    """dγ and the coefficients of dx = A·g + B·t + E from Σg and Σg·t; and what each extreme element gets."""
    if SOURCE == FROM_INPUT:
        dweight = second * inverse
    elif SOURCE == FROM_OUTPUT:
        vague = is_vague(gamma, beta, ROUNDING, TINY)
        dweight = second * tl.where(vague, ratio / constant, 1.0 / tl.where(vague, 1.0, gamma))
    else:
        dweight = (second + 0.5 * first) * STEP  # Σg·(code − 7.5)
    slope = gamma * inverse
    even = -slope * first / n
    pull = slope * dweight / n  # (1/D)·mean(ĝx̂)
    tilt = pull * 0.0
    each = pull * 0.0
    if KIND == L1:
        # sign = 2·[x ≥ μ] − 1, and its mean is taken off: only the bit and its mean remain.
        tilt = -2.0 * constant * ratio * pull
        even -= tilt * count / n
    elif KIND == L2:
        tilt = -constant * constant * pull * inverse
    elif KIND != MEAN:
        each = -constant * ratio * pull * n / K
    return dweight, slope, tilt, even, each


@triton.jit
def gradient_kernel(
    scratch_ptr,
    count_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    dweight_ptr,
    dbias_ptr,
    channels,
    entries,
    splits,
    per_channel,
    n,
    constant,
    KIND: tl.constexpr,
    SOURCE: tl.constexpr,
    K: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDING: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """dγ, dβ and the coefficients of dx = A·g + B·t + E: coefficient[0..2]; [3] is what each extreme element gets."""
    coefficient_ptr = scratch_ptr
    part_ptr = scratch_ptr + 4 * channels
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < channels
    # What the forward pass left is there: the kernel before, which is ours, has waited for it.
    inverse = tl.load(stats_ptr + channels + channel, mask=mask, other=1.0)
    ratio = tl.load(stats_ptr + 2 * channels + channel, mask=mask, other=0.0)
    gamma, beta = load_affine(weight_ptr, bias_ptr, channel, mask, HAS_WEIGHT, HAS_BIAS)
    count = inverse
    if KIND == L1:
        count, _, _ = add_entries(count_ptr, 0, channel, mask, splits, entries, per_channel, 1, BLOCK_E, BLOCK_C)
    wait_for_previous(OVERLAP)
    PLANES: tl.constexpr = 1 if KIND == MEAN else 2
    first, second, _ = add_entries(
        part_ptr, splits * entries, channel, mask, splits, entries, per_channel, PLANES, BLOCK_E, BLOCK_C
    )
    dweight, slope, tilt, even, each = solve(
        first, second, count, inverse, ratio, gamma, beta, n, constant, KIND, SOURCE, K, ROUNDING, TINY
    )
    tl.store(dbias_ptr + channel, first, mask=mask)
    tl.store(dweight_ptr + channel, dweight, mask=mask)

    tl.store(coefficient_ptr + channel, slope, mask=mask)
    tl.store(coefficient_ptr + channels + channel, tilt, mask=mask)
    tl.store(coefficient_ptr + 2 * channels + channel, even, mask=mask)
    tl.store(coefficient_ptr + 3 * channels + channel, each, mask=mask)
