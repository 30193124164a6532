"""The k largest deviations of each channel, from the extremes that the one pass over the tensor left behind.

``moments_kernel`` keeps the largest and the smallest value of each *group* of elements. With the mean known, the
largest deviation of a group is max(max − μ, μ − min), and the k largest elements lie in at most k groups: a k-way merge
takes the group with the largest head, finds that element, and looks into this one group for its next head. So Top(k)
reads the tensor once and a few thousand elements again, never sorts, and finds the same elements every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.launch import wait_for_previous
from normmatters.kernels.triton.scale import RANGE, write_statistics
from normmatters.kernels.triton.tiles import ROWS, add_entries, typical


@triton.jit
def group_values(
    x_ptr,
    group,
    e,
    channel,
    rows,
    cols,
    spatial,
    per_channel,
    tiles,
    splits,
    KEEP_R: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Values, offsets and validity of elements e of a group: those that one accumulator of ``moments_kernel`` saw."""
    TILE_ROWS: tl.constexpr = ROWS if KEEP_R else ROWS * BLOCK_R
    SLOTS: tl.constexpr = BLOCK_R if KEEP_R else 1
    slot = group // per_channel
    it = slot // SLOTS + e // (TILE_ROWS * GROUP) * splits
    row = ((tiles - 1 - it) * BLOCK_R + slot % SLOTS) * ROWS + e % TILE_ROWS
    col = channel * spatial + group % per_channel * GROUP + e // TILE_ROWS % GROUP
    valid = (it < tiles) & (row >= 0) & (row < rows)
    offset = row.to(tl.int64) * cols + col
    return tl.load(x_ptr + offset, mask=valid, other=0.0).to(tl.float32), offset, valid


@triton.jit
def select_kernel(
    x_ptr,
    part_ptr,
    extreme_ptr,
    stats_ptr,
    index_ptr,
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
    tiles,
    groups,
    elements,
    n,
    constant,
    momentum,
    eps,
    unbias,
    K: tl.constexpr,
    KIND: tl.constexpr,
    HAS_RUNNING: tl.constexpr,
    COUNTS: tl.constexpr,
    KEEP_R: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One channel a program: μ, the statistic, and index[j] = offset of the j-th element (~offset below the mean)."""
    wait_for_previous(OVERLAP, LONG=True)
    channel = tl.program_id(0)
    one = channel + tl.arange(0, 1)
    total, _b, _c = add_entries(
        part_ptr, splits * entries, one, one < channels, splits, entries, per_channel, 1, 256, 1
    )
    shift = typical(x_ptr, channel, channel < channels, rows, cols, spatial)
    mean = shift + tl.sum(total, axis=0) / n

    g = tl.arange(0, BLOCK_G)
    known = g < groups
    at = extreme_ptr + g // per_channel * entries + channel * per_channel + g % per_channel
    high = tl.load(at, mask=known, other=float("-inf"))
    low = tl.load(at + groups // per_channel * entries, mask=known, other=float("inf"))

    statistic = 0.0
    if KIND == RANGE:
        top = tl.max(high, axis=0)
        bottom = tl.min(low, axis=0)
        statistic = top - bottom
        for side in tl.static_range(2):
            if side == 0:
                value = top
                group = tl.min(tl.where(high == top, g, BLOCK_G), axis=0)
            else:
                value = bottom
                group = tl.min(tl.where(low == bottom, g, BLOCK_G), axis=0)
            nowhere = tl.cast(rows, tl.int64) * cols  # a single row is a constant here, which has no .to
            place = nowhere
            for e0 in range(0, elements, BLOCK_E):
                e = e0 + tl.arange(0, BLOCK_E)
                v, offset, valid = group_values(
                    x_ptr, group, e, channel, rows, cols, spatial, per_channel, tiles, splits, KEEP_R, GROUP, BLOCK_R
                )
                found = tl.where(valid & (v == value), offset, nowhere)
                place = tl.minimum(place, tl.min(found, axis=0))
            # Not found only where the channel holds NaN: any element of it will do.
            place = tl.where(place < nowhere, place, channel * spatial)
            if side == 1:
                place = ~place
            tl.store(index_ptr + side * channels + channel, place)
    else:
        head = tl.maximum(high - mean, mean - low)
        head = tl.where(known, head, -1.0)
        last = -1  # taken, where the group holds its value again: then the same group is the first among the largest
        for j in range(K):
            best, group = tl.max(head, axis=0, return_indices=True)
            chosen = elements * 1
            equal = 0  # of its value, not yet taken
            after = -1.0
            for e0 in range(0, elements, BLOCK_E):
                e = e0 + tl.arange(0, BLOCK_E)
                v, _o, valid = group_values(
                    x_ptr, group, e, channel, rows, cols, spatial, per_channel, tiles, splits, KEEP_R, GROUP, BLOCK_R
                )
                deviation = tl.where(valid, tl.abs(v - mean), -1.0)
                fresh = (deviation == best) & (e > last)
                chosen = tl.minimum(chosen, tl.min(tl.where(fresh, e, elements), axis=0))
                equal += tl.sum(fresh.to(tl.int32), axis=0)
                after = tl.maximum(after, tl.max(tl.where(deviation < best, deviation, -1.0), axis=0))
            v, offset, valid = group_values(
                x_ptr, group, chosen, channel, rows, cols, spatial, per_channel, tiles, splits, KEEP_R, GROUP, BLOCK_R
            )
            # Not found only where the channel holds NaN: any element of it will do.
            offset = tl.where(valid, offset, channel * spatial)
            place = tl.where(v >= mean, offset, ~offset)
            tl.store(index_ptr + j * channels + channel, place)
            statistic += best / K
            head = tl.where(g == group, tl.where(equal > 1, best, after), head)
            last = tl.where(equal > 1, chosen, -1)

    statistic = tl.where(mean == mean, statistic, mean)  # a maximum passes over NaN
    write_statistics(
        stats_ptr, running_mean_ptr, running_var_ptr, batches_ptr, channel, channel < channels, channels,
        mean, constant * statistic, momentum, eps, unbias, HAS_RUNNING, COUNTS, KIND,
    )  # fmt: skip
