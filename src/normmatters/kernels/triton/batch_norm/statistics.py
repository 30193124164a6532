"""Batch statistics: the mean, then the scale of the deviations, one number per channel.

Large tensors in one read. L1 needs the mean before the deviations, which would cost a second read. Instead a *pilot*
mean m comes from a small sample of the rows, and one pass collects Σ(x−m), Σ|x−m| and the count of x ≥ m, from which to
first order

    Σ|x−μ| = Σ|x−m| − (μ−m)·Σsign(x−m).

What this misses comes from the elements between m and μ: little for smooth data, but much where values crowd at the
mean, as zeros do. A second small sample, taken when μ is known, gives it (``pilot_correction``). That leaves an error
of about 4e-4 of the deviation where half of the values crowd there, and 1e-5 for Gaussian data. Where the pilot missed
(one huge outlier in the sample, say) the channel is summed once more about its true mean. L2 uses the same pilot as a
shift, which keeps Σ(x−m)² from cancelling. L∞, Top(k) and range need no mean first; ``select.py`` finishes them.

Small channels-last tensors in two reads, and exactly: the second one comes from the cache. ``moments_kernel`` sums the
deviations from one of the channel's values, ``small_deviation_kernel`` those from the mean. Each program that needs a
statistic adds the few partial sums itself (``small_statistics``), which saves a launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.triton.batch_norm import layout
from normmatters.kernels.triton.batch_norm.layout import (
    MAX_REGISTERS,
    Moved,
    Statistic,
    Tiling,
    View,
    channel_blocks,
    empty,
    grid_of,
    is_small,
    moved_of,
    next_power_of_2,
    values_of,
    view_of,
)
from normmatters.kernels.triton.batch_norm.select import select_launch, tiling_for_extremes
from normmatters.kernels.triton.batch_norm.tiles import (
    EXTREME,
    KINDS,
    L1,
    L2,
    MEAN,
    RANGE,
    add_entries,
    add_splits,
    load_tile,
    middle_value,
    program_part,
    store_sums,
    tile_rows,
    write_statistics,
)
from normmatters.kernels.triton.launch import Launch, Launches, cached_plan, wait_for_previous
from normmatters.norm import RunningStats

# With this many samples the pilot mean is within 1.6 % of σ (one standard error); twice as many where they cost little.
PILOT_SAMPLES = 4096

# What the pilot's first-order correction misses is estimated from this many.
CORRECTION_SAMPLES = 2048

# The pilot is close enough when it is within this part of the deviation: four standard errors of 4096 samples for
# Gaussian data, so good channels are hardly ever summed twice.
PILOT_TOLERANCE: tl.constexpr = tl.constexpr(0.08)


@triton.jit
def pilot_kernel(
    x_ptr,
    scratch_ptr,
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
        tl.store(scratch_ptr + split * channels + channel, tl.sum(tl.sum(acc, axis=1), axis=0))
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
        tl.store(scratch_ptr + split * channels + col, tl.sum(acc, axis=0), mask=col < cols)


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
    """Partial sums [stat, split, entry] after the pilot's; for L∞, Top(k) and range also extremes [2, slot, entry]."""
    PILOT: tl.constexpr = KIND == L1 or KIND == L2
    if not PILOT:
        wait_for_previous(OVERLAP)
    part_ptr = scratch_ptr + PILOT_SPLITS * channels
    block, split, splits, col, inside, channel = program_part(cols, spatial, CONTIGUOUS, CONTIGUOUS, BLOCK_C)
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
        shift = middle_value(x_ptr, channel, inside, rows, cols, spatial)

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

    plane = splits * entries
    store_sums(part_ptr, tl.sum(first, axis=0), block, split, entries, GROUP, BLOCK_C)
    if KIND == L1 or KIND == L2:
        store_sums(part_ptr + plane, tl.sum(second, axis=0), block, split, entries, GROUP, BLOCK_C)
    if KIND == L1:
        store_sums(part_ptr + 2 * plane, tl.sum(third, axis=0), block, split, entries, GROUP, BLOCK_C)
    if KIND == EXTREME or KIND == RANGE:
        entry = block * (BLOCK_C // GROUP) + tl.arange(0, BLOCK_C // GROUP)
        stored = entry < entries
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
def exact_deviation(x_ptr, mean, channel, mask, spatial, cols, n, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr):
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
def pilot_correction(x, valid, pilot, mean, samples):
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
    correction_samples,
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
    CORRECT: tl.constexpr = KIND == L1 and PILOT_IS_SAMPLE
    if CORRECT:  # on its way while the sums are still being made; the kernels before have waited for the input
        sample, valid = load_sample(x_ptr, channel, mask, spatial, cols, n, correction_samples, BLOCK_S)
    wait_for_previous(OVERLAP)
    PLANES: tl.constexpr = 3 if KIND == L1 else (2 if KIND == L2 else 1)
    first, second, third = add_entries(
        part_ptr, splits * entries, channel, mask, splits, entries, per_channel, PLANES, BLOCK_E, BLOCK_C
    )
    if KIND == L1 or KIND == L2:
        shift = add_splits(scratch_ptr, channel, mask, channels, PILOT_SPLITS, PILOT_SPLITS) / pilot_count
    else:
        shift = middle_value(x_ptr, channel, mask, rows, cols, spatial)
    delta = first / n
    mean = shift + delta
    scale = mean
    if KIND == L1:
        deviation = (second - delta * (2.0 * third - n)) / n
        if CORRECT:
            deviation += pilot_correction(sample.to(tl.float32), valid, shift, mean, correction_samples)
            missed = mask & ~(tl.abs(delta) <= deviation * PILOT_TOLERANCE) & (second > 0)
            if tl.max(missed.to(tl.int32), axis=0) > 0:
                exact = exact_deviation(x_ptr, mean, channel, mask, spatial, cols, n, BLOCK_E, BLOCK_C) / n
                deviation = tl.where(missed, exact, deviation)
        scale = constant * deviation
    elif KIND == L2:
        scale = constant * tl.sqrt(tl.maximum(second / n - delta * delta, 0.0))
    write_statistics(
        stats_ptr, running_mean_ptr, running_var_ptr, batches_ptr, channel, mask, channels,
        mean, scale, momentum, eps, unbias, HAS_RUNNING, COUNTS, KIND,
    )  # fmt: skip


# Small tensors --------------------------------------------------------------------------------------------------------


@triton.jit
def small_mean(shift, scratch_ptr, channel, mask, channels, rows, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """μ from the partial sums of the whole tensor and the typical value that was taken off before."""
    return shift + add_splits(scratch_ptr, channel, mask, channels, SPLITS, BLOCK_S) / rows


@triton.jit
def small_deviation_kernel(
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
    """Partial Σ|x−μ| (L1) or Σ(x−μ)² (L2), [split, channel], after the sums, of a small channels-last tensor."""
    split = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = col < cols
    ahead = load_tile(x_ptr, split, col, rows, cols, BLOCK_R, EVEN, True)
    second_ahead = load_tile(x_ptr, split + SPLITS, col, rows, cols, BLOCK_R, EVEN, True)
    shift = middle_value(x_ptr, col, inside, rows, cols, 1)
    wait_for_previous(OVERLAP)
    mean = small_mean(shift, scratch_ptr, col, inside, cols, rows, SPLITS, BLOCK_S)
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
def small_statistics(
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
    mean = small_mean(shift, scratch_ptr, channel, mask, channels, rows, SPLITS, BLOCK_S)
    scale = mean
    if KIND != MEAN:
        second = add_splits(scratch_ptr + SPLITS * channels, channel, mask, channels, SPLITS, BLOCK_S) / rows
        if KIND == L1:
            scale = constant * second
        else:
            scale = constant * tl.sqrt(second)
    return mean, scale


@triton.jit
def small_finalize_kernel(
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
    shift = middle_value(x_ptr, channel, mask, rows, cols, 1)
    mean, scale = small_statistics(shift, scratch_ptr, channel, mask, cols, rows, constant, KIND, SPLITS, BLOCK_S)
    write_statistics(
        stats_ptr, running_mean_ptr, running_var_ptr, batches_ptr, channel, mask, cols,
        mean, scale, momentum, eps, unbias, HAS_RUNNING, COUNTS, KIND,
    )  # fmt: skip


# Launches -------------------------------------------------------------------------------------------------------------


class StatisticsPlan(NamedTuple):
    """The launches that make the statistics at one shape, and how many numbers they leave in between."""

    launches: Launches
    scratch: int
    extremes: int
    selected: int
    whole: bool  # or partial sums, of which the normalization makes the statistics


@cached_plan
def statistics_plan(
    view: View, dtype: torch.dtype, statistic: Statistic, moved: Moved, alone: bool = True
) -> StatisticsPlan:
    """``alone``: no normalization that could end the work follows at once."""
    kind, itemsize = statistic.kind, dtype.itemsize
    common = {**statistic.values(view), **moved.values, "KIND": KINDS[kind]}
    if is_small(view, itemsize) and kind in ("l1", "l2", "mean"):
        return _small_plan(view, itemsize, kind, common, alone)
    rank = statistic.k if kind == "topk" else 1
    selects = statistic.selected > 0
    tiling = tiling_for_extremes(view, itemsize, rank) if selects else layout.tiling_of(view, itemsize)
    values = values_of(view, tiling) | common | {"KEEP_R": rank > 1}
    pilot, pilot_splits, samples = _pilot(view, values) if kind in ("l1", "l2") else (None, 0, view.n)
    values |= {"pilot_count": samples, "PILOT_SPLITS": pilot_splits}
    moments = _moments_launch(view, tiling, values)
    if selects:
        finish = select_launch(view, itemsize, rank, values)
    else:
        block_c, block_e, programs = channel_blocks(view)
        correction = min(view.n, CORRECTION_SAMPLES)
        own = {
            "correction_samples": correction,
            "PILOT_IS_SAMPLE": samples < view.n,
            "BLOCK_S": next_power_of_2(correction),
            "BLOCK_E": block_e,
            "BLOCK_C": block_c,
        }
        finish = Launch(finalize_kernel, (programs, 1), values | own, num_warps=8)
    entries = tiling.splits * tiling.entries(view)
    planes = {"l1": 3, "l2": 2}.get(kind, 1)
    return StatisticsPlan(
        Launches(*([pilot] if pilot else []), moments, finish),
        pilot_splits * view.channels + planes * entries,
        2 * entries * (tiling.block_r if rank > 1 else 1) if selects else 0,
        statistic.selected,
        True,
    )


def _moments_launch(view: View, tiling: Tiling, values: dict[str, Any]) -> Launch:
    return Launch(
        moments_kernel, grid_of(view, tiling), values, num_warps=tiling.num_warps, maxnreg=MAX_REGISTERS
    )  # fmt: skip


def _small_plan(view: View, itemsize: int, kind: str, common: dict[str, Any], alone: bool) -> StatisticsPlan:
    tiling = layout.apply_tiling_of(view, itemsize)
    values = values_of(view, tiling) | common
    sums = {"KIND": KINDS["mean"], "KEEP_R": False, "pilot_count": view.n, "PILOT_SPLITS": 0}
    launches = [_moments_launch(view, tiling, values | sums)]
    grid, num_warps = grid_of(view, tiling), tiling.num_warps
    if kind != "mean":
        launches.append(Launch(small_deviation_kernel, grid, values, num_warps=num_warps, maxnreg=MAX_REGISTERS))
    if alone:
        launches.append(Launch(small_finalize_kernel, (grid[0], 1), values, num_warps=num_warps))
    return StatisticsPlan(Launches(*launches), 2 * tiling.splits * view.channels, 0, 0, alone)


def _pilot(view: View, values: dict[str, Any]) -> tuple[Launch, int, int]:
    """The launch that samples each channel, its splits, and how many elements it takes."""
    contiguous = view.spatial > 1
    wanted = PILOT_SAMPLES * (2 if view.n >= 32 * PILOT_SAMPLES else 1)
    if contiguous:
        samples = min(view.spatial, max(16, -(-wanted // view.rows)))
        step = 1 + int(0.618 * view.spatial)
        count = samples * view.rows
        block_j = min(64, next_power_of_2(samples))
        blocks, work = view.channels, view.rows
    else:
        samples = min(view.rows, wanted)
        step = view.rows // samples
        count = samples
        block_j = min(64, next_power_of_2(view.cols))
        blocks, work = -(-view.cols // block_j), samples
    # Tall tiles: a program waits for memory once or twice only.
    block_i = min(16384 // block_j, next_power_of_2(work))
    splits = 1 << max(0, min(16, -(-work // block_i)).bit_length() - 1)
    own = {"samples": samples, "step": step, "BLOCK_I": block_i, "BLOCK_J": block_j}
    return Launch(pilot_kernel, (blocks, splits), values | own, num_warps=8), splits, count


def statistics_tensors(plan: StatisticsPlan, x: Tensor, running: RunningStats) -> dict[str, Tensor]:
    """What the plan's launches take; they make μ, 1/D and s/D, the rows of ``stats_ptr``, and ``index_ptr``."""
    channels = x.shape[1]
    mean, var, batches, _ = running
    stats, scratch = empty(x, 3, channels), empty(x, plan.scratch)
    unused = stats
    if (mean is None) != (var is None):  # the kernel writes the one that there is not, too
        unused = empty(x, channels)
    return {
        "x_ptr": x,
        "scratch_ptr": scratch,
        "extreme_ptr": empty(x, plan.extremes) if plan.extremes else scratch,
        "stats_ptr": stats,
        "index_ptr": empty(x, plan.selected, channels, dtype=torch.int64) if plan.selected else scratch,
        "running_mean_ptr": unused if mean is None else mean.contiguous(),
        "running_var_ptr": unused if var is None else var.contiguous(),
        "batches_ptr": stats if batches is None else batches,
    }


def put_back(running: RunningStats, tensors: dict[str, Tensor]) -> None:
    """Buffers that are not contiguous moved as copies."""
    for buffer, moved in ((running.mean, tensors["running_mean_ptr"]), (running.var, tensors["running_var_ptr"])):
        if buffer is not None and buffer is not moved:
            buffer.copy_(moved)


def statistics(x: Tensor, statistic: Statistic, running: RunningStats) -> tuple[Tensor, Tensor | None]:
    """μ, 1/D and s/D as rows of one [3, C] tensor, and the extreme elements' offsets; moves the running statistics.

    ``running.num_batches``, an int64 in the device's memory, is raised by one.
    """
    plan = statistics_plan(view_of(x), x.dtype, statistic, moved_of(running))
    tensors = statistics_tensors(plan, x, running)
    plan.launches(tensors, (running.momentum,))  # type: ignore[arg-type]
    put_back(running, tensors)
    return tensors["stats_ptr"], tensors["index_ptr"] if plan.selected else None
