"""Batch statistics of a small channels-last tensor: exact, in two reads, for the second one comes from the cache.

``moments_kernel`` sums the deviations from a typical value, :func:`deviation_kernel` those from the mean. Each program
that needs a statistic adds the few partial sums itself (:func:`whole_statistics`), which saves a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.launch import wait_for_previous
from normmatters.kernels.triton.scale import L1, MEAN, write_statistics
from normmatters.kernels.triton.tiles import add_splits, load_tile, tile_rows, typical


@triton.jit
def whole_mean(shift, scratch_ptr, channel, mask, channels, rows, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """μ from the partial sums of the whole tensor and the typical value that was taken off before."""
    return shift + add_splits(scratch_ptr, channel, mask, channels, SPLITS, BLOCK_S) / rows


@triton.jit
def deviation_kernel(
    x_ptr,
    scratch_ptr,
    rows,
    cols,
    tiles,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Partial Σ|x−μ| (L1) or Σ(x−μ)² (L2), [split, channel], behind the sums, of a small channels-last tensor."""
    split = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = col < cols
    ahead = load_tile(x_ptr, split, col, rows, cols, BLOCK_R, EVEN, True)
    second_ahead = load_tile(x_ptr, split + SPLITS, col, rows, cols, BLOCK_R, EVEN, True)
    shift = typical(x_ptr, col, inside, rows, cols, 1)
    wait_for_previous(OVERLAP)
    mean = whole_mean(shift, scratch_ptr, col, inside, cols, rows, SPLITS, BLOCK_S)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for it in range(split, tiles, SPLITS):
        d = ahead.to(tl.float32) - mean[None, None, :]
        ahead = second_ahead
        second_ahead = load_tile(x_ptr, it + 2 * SPLITS, col, rows, cols, BLOCK_R, EVEN, True)
        if not EVEN:
            d = tl.where((tile_rows(it, BLOCK_R) < rows) & inside[None, None, :], d, 0.0)
        if KIND == L1:
            d = tl.abs(d)
        else:
            d = d * d
        total += tl.sum(d, axis=1)
    tl.store(scratch_ptr + (SPLITS + split) * cols + col, tl.sum(total, axis=0), mask=inside)


@triton.jit
def whole_statistics(
    shift,
    scratch_ptr,
    channel,
    mask,
    channels,
    rows,
    constant,
    KIND: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """μ and s of a small tensor from all its partial sums."""
    mean = whole_mean(shift, scratch_ptr, channel, mask, channels, rows, SPLITS, BLOCK_S)
    scale = mean
    if KIND != MEAN:
        second = add_splits(scratch_ptr + SPLITS * channels, channel, mask, channels, SPLITS, BLOCK_S) / rows
        if KIND == L1:
            scale = constant * second
        else:
            scale = constant * tl.sqrt(second)
    return mean, scale


@triton.jit
def whole_finalize_kernel(
    x_ptr,
    scratch_ptr,
    stats_ptr,
    running_mean_ptr,
    running_var_ptr,
    batches_ptr,
    rows,
    cols,
    constant,
    momentum,
    eps,
    unbias,
    KIND: tl.constexpr,
    HAS_RUNNING: tl.constexpr,
    COUNTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The statistics of a small tensor on their own, for those who normalize later."""
    wait_for_previous(OVERLAP)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < cols
    shift = typical(x_ptr, channel, mask, rows, cols, 1)
    mean, scale = whole_statistics(shift, scratch_ptr, channel, mask, cols, rows, constant, KIND, SPLITS, BLOCK_S)
    write_statistics(
        stats_ptr, running_mean_ptr, running_var_ptr, batches_ptr, channel, mask, cols,
        mean, scale, momentum, eps, unbias, HAS_RUNNING, COUNTS, KIND,
    )  # fmt: skip
