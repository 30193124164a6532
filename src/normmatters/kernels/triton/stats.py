"""Batch statistics in one read of the tensor: mean, then the scale of the deviations, one number a channel.

L1 needs the mean before the deviations, which would cost a second read. Instead a *pilot* mean m comes from a small
sample of the rows, and one pass collects Σ(x−m), Σ|x−m| and the count of x ≥ m, from which to first order

    Σ|x−μ| = Σ|x−m| − (μ−m)·Σsign(x−m).

What this misses comes from the elements between m and μ: little for smooth data, but much where values crowd at the
mean, as zeros do. A second small sample, taken when μ is known, gives it (:func:`bend`); that leaves an error of about
4e-4 of the deviation where half of the values crowd there, and 1e-5 for Gaussian data. Where the pilot missed (one huge
outlier in the sample, say) the channel is summed once more about its true mean. L2 uses the same pilot as a shift,
which keeps Σ(x−m)² from cancelling. L∞, Top(k) and range need no mean first; ``select.py`` finishes them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.launch import wait_for_previous
from normmatters.kernels.triton.scale import EXTREME, L1, L2, RANGE, write_statistics
from normmatters.kernels.triton.tiles import (
    add_entries,
    add_splits,
    by_group,
    load_tile,
    my_part,
    tile_rows,
    typical,
)

# The pilot is close enough when it is within this part of the deviation: four standard errors of 4096 samples for
# Gaussian data, so good channels are hardly ever summed twice.
PILOT_TOLERANCE: tl.constexpr = tl.constexpr(0.08)


@triton.jit
def pilot_kernel(
    x_ptr,
    out_ptr,
    rows,
    cols,
    spatial,
    channels,
    samples,
    step,
    CONTIGUOUS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sums a sample of each channel: a row of every stratum, or of every image a short run of pixels."""
    wait_for_previous(OVERLAP)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    if CONTIGUOUS:
        # ``samples`` pixels of every image, starting at a place that changes from image to image.
        channel = tl.program_id(0)
        acc = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
        for i0 in range(split * BLOCK_I, rows, splits * BLOCK_I):
            image = i0 + tl.arange(0, BLOCK_I)
            start = (image * step) % (spatial - samples + 1)
            base = image.to(tl.int64) * cols + channel * spatial + start
            for j0 in range(0, samples, BLOCK_J):
                j = j0 + tl.arange(0, BLOCK_J)
                mask = (image < rows)[:, None] & (j < samples)[None, :]
                acc += tl.load(x_ptr + base[:, None] + j[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + split * channels + channel, tl.sum(tl.sum(acc, axis=1), axis=0))
    else:
        col = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
        acc = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
        for i0 in range(split * BLOCK_I, samples, splits * BLOCK_I):
            i = i0 + tl.arange(0, BLOCK_I)
            mask = (i < samples)[:, None] & (col < cols)[None, :]
            # Anywhere within its stratum: even spacing would meet the same columns of every image.
            first = i.to(tl.int64) * rows // samples
            row = first + (i * 40503 >> 4) % step
            offset = (row * cols)[:, None] + col[None, :]
            acc += tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + split * channels + col, tl.sum(acc, axis=0), mask=col < cols)


@triton.jit
def moments_kernel(
    x_ptr,
    scratch_ptr,
    extreme_ptr,
    rows,
    cols,
    spatial,
    channels,
    entries,
    pilot_count,
    tiles,
    KIND: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    EVEN: tl.constexpr,
    KEEP_R: tl.constexpr,
    PILOT_SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Partial sums [stat, split, entry] behind the pilot's; for L∞, Top(k) and range also extremes [2, slot, entry]."""
    PILOT: tl.constexpr = KIND == L1 or KIND == L2
    if not PILOT:
        wait_for_previous(OVERLAP)
    part_ptr = scratch_ptr + PILOT_SPLITS * channels
    block, split, splits, col, inside, channel = my_part(cols, spatial, CONTIGUOUS, CONTIGUOUS, BLOCK_C)
    # Two tiles are on their way while one is summed. The input is there: the pilot has waited for it.
    last = tiles - 1 - split
    ahead = load_tile(x_ptr, last, col, rows, cols, BLOCK_R, EVEN, True)
    second_ahead = load_tile(
        x_ptr, tl.where(last >= splits, last - splits, tiles), col, rows, cols, BLOCK_R, EVEN, True
    )
    if PILOT:
        wait_for_previous(OVERLAP)
        shift = add_splits(scratch_ptr, channel, inside, channels, PILOT_SPLITS, PILOT_SPLITS) / pilot_count
    else:
        shift = typical(x_ptr, channel, inside, rows, cols, spatial)

    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    third = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    if KIND == EXTREME or KIND == RANGE:
        second += float("-inf")
        third += float("inf")
    for it in range(split, tiles, splits):
        tile = tiles - 1 - it
        x = ahead.to(tl.float32)
        ahead = second_ahead
        following = tl.where(tile >= 2 * splits, tile - 2 * splits, tiles)
        second_ahead = load_tile(x_ptr, following, col, rows, cols, BLOCK_R, EVEN, True)
        d = x - shift[None, None, :]
        if not EVEN:
            valid = (tile_rows(tile, BLOCK_R) < rows) & inside[None, None, :]
            d = tl.where(valid, d, 0.0)
        first += tl.sum(d, axis=1)
        if KIND == L1:
            second += tl.sum(tl.abs(d), axis=1)
            above = tl.where(d >= 0, 1.0, 0.0)
            if not EVEN:
                above = tl.where(valid, above, 0.0)
            third += tl.sum(above, axis=1)
        elif KIND == L2:
            second += tl.sum(d * d, axis=1)
        elif KIND == EXTREME or KIND == RANGE:
            if EVEN:
                high = x
                low = x
            else:
                high = tl.where(valid, x, float("-inf"))
                low = tl.where(valid, x, float("inf"))
            second = tl.maximum(second, tl.max(high, axis=1))
            third = tl.minimum(third, tl.min(low, axis=1))

    entry = block * (BLOCK_C // GROUP) + tl.arange(0, BLOCK_C // GROUP)
    stored = entry < entries
    plane = splits * entries
    out = part_ptr + split * entries + entry
    tl.store(out, by_group(tl.sum(first, axis=0), GROUP, BLOCK_C), mask=stored)
    if KIND == L1 or KIND == L2:
        tl.store(out + plane, by_group(tl.sum(second, axis=0), GROUP, BLOCK_C), mask=stored)
    if KIND == L1:
        tl.store(out + 2 * plane, by_group(tl.sum(third, axis=0), GROUP, BLOCK_C), mask=stored)
    if KIND == EXTREME or KIND == RANGE:
        if GROUP > 1:
            second = tl.max(tl.reshape(second, (BLOCK_R, BLOCK_C // GROUP, GROUP)), axis=2)
            third = tl.min(tl.reshape(third, (BLOCK_R, BLOCK_C // GROUP, GROUP)), axis=2)
        if KEEP_R:
            slot = split * BLOCK_R + tl.arange(0, BLOCK_R)
            at = extreme_ptr + slot[:, None] * entries + entry[None, :]
            tl.store(at, second, mask=stored[None, :])
            tl.store(at + plane * BLOCK_R, third, mask=stored[None, :])
        else:
            at = extreme_ptr + split * entries + entry
            tl.store(at, tl.max(second, axis=0), mask=stored)
            tl.store(at + plane, tl.min(third, axis=0), mask=stored)


@triton.jit
def deviation_about(x_ptr, mean, channel, mask, spatial, cols, n, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr):
    """Σ|x−μ| of whole channels by one program: slow, and only for channels whose pilot missed."""
    total = tl.zeros((BLOCK_E, BLOCK_C), tl.float32)
    for e0 in range(0, n, BLOCK_E):
        place = (e0 + tl.arange(0, BLOCK_E)).to(tl.int64)
        offset = (place // spatial * cols + place % spatial)[:, None] + (channel * spatial)[None, :]
        m = (place < n)[:, None] & mask[None, :]
        x = tl.load(x_ptr + offset, mask=m, other=0.0).to(tl.float32)
        total += tl.where(m, tl.abs(x - mean[None, :]), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def load_sample(x_ptr, channel, mask, spatial, cols, n, samples, BLOCK_S: tl.constexpr):
    """Elements of each channel, one anywhere in each of ``samples`` strata, [BLOCK_S, BLOCK_C]; and which are some."""
    e = tl.arange(0, BLOCK_S)
    place = e.to(tl.int64) * n // samples + (e * 40503 >> 4) % (n // samples)
    offset = (place // spatial * cols + place % spatial)[:, None] + (channel * spatial)[None, :]
    valid = (e < samples)[:, None] & mask[None, :]
    return tl.load(x_ptr + offset, mask=valid, other=0.0), valid


@triton.jit
def bend(x, valid, pilot, mean, samples):
    """Mean of |x−μ| − |x−m| + (μ−m)·sign(x−m) over a sample: not 0 only between m and μ, and at most 2|μ−m| there."""
    step = mean - pilot
    side = tl.where(x >= pilot[None, :], step[None, :], -step[None, :])
    total = tl.abs(x - mean[None, :]) - tl.abs(x - pilot[None, :]) + side
    return tl.sum(tl.where(valid, total, 0.0), axis=0) / samples


@triton.jit
def finalize_kernel(
    x_ptr,
    scratch_ptr,
    stats_ptr,
    running_mean_ptr,
    running_var_ptr,
    batches_ptr,
    rows,
    cols,
    spatial,
    channels,
    entries,
    splits,
    per_channel,
    pilot_count,
    bend_samples,
    n,
    constant,
    momentum,
    eps,
    unbias,
    KIND: tl.constexpr,
    HAS_RUNNING: tl.constexpr,
    COUNTS: tl.constexpr,
    PILOT_IS_SAMPLE: tl.constexpr,
    PILOT_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Partial sums -> μ, 1/D, s/D and the running statistics (L1, L2, mean-only)."""
    part_ptr = scratch_ptr + PILOT_SPLITS * channels
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < channels
    BEND: tl.constexpr = KIND == L1 and PILOT_IS_SAMPLE
    if BEND:  # on its way while the sums are still being made; the kernels before have waited for the input
        sample, valid = load_sample(x_ptr, channel, mask, spatial, cols, n, bend_samples, BLOCK_S)
    wait_for_previous(OVERLAP)
    PLANES: tl.constexpr = 3 if KIND == L1 else (2 if KIND == L2 else 1)
    first, second, third = add_entries(
        part_ptr, splits * entries, channel, mask, splits, entries, per_channel, PLANES, BLOCK_E, BLOCK_C
    )
    if KIND == L1 or KIND == L2:
        shift = add_splits(scratch_ptr, channel, mask, channels, PILOT_SPLITS, PILOT_SPLITS) / pilot_count
    else:
        shift = typical(x_ptr, channel, mask, rows, cols, spatial)
    delta = first / n
    mean = shift + delta
    scale = mean
    if KIND == L1:
        deviation = (second - delta * (2.0 * third - n)) / n
        if BEND:
            deviation += bend(sample.to(tl.float32), valid, shift, mean, bend_samples)
            missed = mask & ~(tl.abs(delta) <= deviation * PILOT_TOLERANCE) & (second > 0)
            if tl.max(missed.to(tl.int32), axis=0) > 0:
                exact = deviation_about(x_ptr, mean, channel, mask, spatial, cols, n, BLOCK_E, BLOCK_C) / n
                deviation = tl.where(missed, exact, deviation)
        scale = constant * deviation
    elif KIND == L2:
        scale = constant * tl.sqrt(tl.maximum(second / n - delta * delta, 0.0))
    write_statistics(
        stats_ptr, running_mean_ptr, running_var_ptr, batches_ptr, channel, mask, channels,
        mean, scale, momentum, eps, unbias, HAS_RUNNING, COUNTS, KIND,
    )  # fmt: skip
