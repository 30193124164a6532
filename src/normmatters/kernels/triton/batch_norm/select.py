"""The k largest deviations of each channel, from the extremes that the one pass over the tensor left.

``moments_kernel`` keeps the largest and the smallest value of each *group* of elements. With the mean known, the
largest deviation of a group is max(max − μ, μ − min), and the k largest elements lie in at most k groups: a k-way merge
takes the group with the largest head, finds that element, and looks into this one group for its next head. So Top(k)
reads the tensor once and a few thousand elements again, never sorts, and finds the same elements every time.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from normmatters.kernels.triton.batch_norm import layout
from normmatters.kernels.triton.batch_norm.layout import ROWS_PER_CODE, Tiling, View, next_power_of_2
from normmatters.kernels.triton.batch_norm.tiles import RANGE, ROWS, add_entries, middle_value, write_statistics
from normmatters.kernels.triton.launch import Launch, wait_for_previous

# Above these, ``select_kernel`` would need more registers or steps than it is worth.
MAX_K = 64
MAX_GROUPS = 16384


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
    scratch_ptr,
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
        scratch_ptr, splits * entries, one, one < channels, splits, entries, per_channel, 1, 256, 1
    )
    shift = middle_value(x_ptr, channel, channel < channels, rows, cols, spatial)
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


# Launch ---------------------------------------------------------------------------------------------------------------


def groups_of(view: View, itemsize: int, k: int) -> int:
    """Groups per channel whose extremes ``select_kernel`` must hold."""
    tiling = tiling_for_extremes(view, itemsize, k)
    return tiling.splits * _groups_per_split(view, tiling, k)


def _groups_per_split(view: View, tiling: Tiling, k: int) -> int:
    return (tiling.block_r if k > 1 else 1) * view.spatial // tiling.group


def tiling_for_extremes(view: View, itemsize: int, k: int) -> Tiling:
    """The tiling of ``moments_kernel`` for L∞ (k = 1), Top(k) and range (k = 1)."""
    # Top(k) has more groups per program, so it gets fewer programs: a channel's groups must fit into one. Of few
    # channels a program has many rows, so that still fewer must do (16 channels: 64 groups per program).
    tiling = layout.tiling_of(view, itemsize, 528 if k == 1 else 264)
    most = max(1, MAX_GROUPS // _groups_per_split(view, tiling, k))
    return tiling._replace(splits=min(tiling.splits, most))


def select_launch(view: View, itemsize: int, k: int, values: dict[str, Any]) -> Launch:
    """The launch of ``select_kernel``; ``k`` is 1 for L∞ and range, and ``values`` are those of ``moments_kernel``."""
    tiling = tiling_for_extremes(view, itemsize, k)
    groups = groups_of(view, itemsize, k)
    block_g = next_power_of_2(groups)
    elements = -(-tiling.tiles // tiling.splits) * ROWS_PER_CODE * (1 if k > 1 else tiling.block_r) * tiling.group
    own = {
        "groups": groups,
        "elements": elements,
        "K": k,
        "BLOCK_G": block_g,
        "BLOCK_E": min(1024, next_power_of_2(elements)),
    }
    # The most groups spill from the registers of 4 warps.
    return Launch(select_kernel, (view.channels, 1), values | own, num_warps=max(4, min(16, block_g // 1024)))
