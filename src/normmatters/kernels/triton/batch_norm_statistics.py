"""Launches of the statistics: a pilot, the moments, and what finishes them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from normmatters.kernels import MAX_PLANS
from normmatters.kernels.triton.batch_norm_plan import MAX_REGISTERS, Moved, channel_blocks, empty, is_even, overlapping
from normmatters.kernels.triton.batch_norm_saved import kept
from normmatters.kernels.triton.batch_norm_small import finalize_launch, sums
from normmatters.kernels.triton.launch import Launch
from normmatters.kernels.triton.layout import ROWS_PER_CODE, Tiling, View, next_power_of_2, tiling_of, view_of
from normmatters.kernels.triton.scale import KINDS
from normmatters.kernels.triton.select import select_kernel
from normmatters.kernels.triton.stats import finalize_kernel, moments_kernel, pilot_kernel

# Above these, ``select_kernel`` would need more registers or steps than it is worth.
MAX_K = 64
MAX_GROUPS = 16384

# With this many samples the pilot mean is within 1.6 % of σ (one standard error); twice as many where they cost little.
PILOT_SAMPLES = 4096

# What the pilot's first-order correction misses is estimated from this many.
BEND_SAMPLES = 2048


def groups_of(view: View, itemsize: int, k: int) -> int:
    """Groups a channel whose extremes ``select_kernel`` must hold."""
    tiling = _extreme_tiling(view, itemsize, k)
    return tiling.splits * _groups_a_split(view, tiling, k)


def _groups_a_split(view: View, tiling: Tiling, k: int) -> int:
    return (tiling.block_r if k > 1 else 1) * view.spatial // tiling.group


def _extreme_tiling(view: View, itemsize: int, k: int) -> Tiling:
    # Top(k) keeps more groups a program, so it gets fewer programs: a channel's groups must fit into one. Of few
    # channels a program has many rows, so that still fewer must do (16 channels: 64 groups a program).
    tiling = tiling_of(view, itemsize, 528 if k == 1 else 264)
    most = max(1, MAX_GROUPS // _groups_a_split(view, tiling, k))
    return tiling._replace(splits=min(tiling.splits, most))


class StatisticsPlan(NamedTuple):
    """The launches of :func:`statistics` at one shape; scratch holds the pilot sums, then the partial sums."""

    pilot: Launch | None
    moments: Launch
    finish: Launch
    scratch: int
    extremes: int
    unbias: float


@functools.lru_cache(MAX_PLANS)
def _statistics_plan(view: View, dtype: torch.dtype, kind: str, k: int, moved: Moved) -> StatisticsPlan:
    itemsize = dtype.itemsize
    number = KINDS[kind]
    contiguous = view.spatial > 1
    extreme = kind in ("linf", "topk", "range")
    keep = k if kind == "topk" else 1
    tiling = _extreme_tiling(view, itemsize, keep) if extreme else tiling_of(view, itemsize)
    entries, per_channel = tiling.entries(view), view.spatial // tiling.group
    pilot, pilot_splits, samples = None, 0, view.n
    if kind in ("l1", "l2"):
        pilot, pilot_splits, samples = _pilot(view)
    sizes = (view.rows, view.cols, view.spatial, view.channels, entries)
    moments = overlapping(
        moments_kernel,
        (-(-view.cols // tiling.block_c), tiling.splits),
        (*sizes, samples, tiling.tiles),
        {
            "KIND": number,
            "CONTIGUOUS": contiguous,
            "EVEN": is_even(view, tiling),
            "KEEP_R": keep > 1,
            "PILOT_SPLITS": pilot_splits,
            "GROUP": tiling.group,
            "BLOCK_R": tiling.block_r,
            "BLOCK_C": tiling.block_c,
        },
        num_warps=tiling.num_warps,
        maxnreg=MAX_REGISTERS,
    )
    if extreme:
        groups = groups_of(view, itemsize, keep)
        block_g = next_power_of_2(groups)
        elements = (
            -(-tiling.tiles // tiling.splits) * ROWS_PER_CODE * (1 if keep > 1 else tiling.block_r) * tiling.group
        )
        finish = overlapping(
            select_kernel,
            (view.channels, 1),
            (*sizes, tiling.splits, per_channel, tiling.tiles, groups, elements, view.n),
            {
                "K": keep,
                "KIND": number,
                **moved.constants,
                "KEEP_R": keep > 1,
                "GROUP": tiling.group,
                "BLOCK_R": tiling.block_r,
                "BLOCK_G": block_g,
                "BLOCK_E": min(1024, next_power_of_2(elements)),
            },
            num_warps=max(4, min(16, block_g // 1024)),  # the most groups spill from the registers of 4
        )
    else:
        block_c, block_e, programs = channel_blocks(view)
        finish = overlapping(
            finalize_kernel,
            (programs, 1),
            (*sizes, tiling.splits, per_channel, samples, min(view.n, BEND_SAMPLES), view.n),
            {
                "KIND": number,
                **moved.constants,
                "PILOT_IS_SAMPLE": samples < view.n,
                "PILOT_SPLITS": pilot_splits,
                "BLOCK_S": next_power_of_2(min(view.n, BEND_SAMPLES)),
                "BLOCK_E": block_e,
                "BLOCK_C": block_c,
            },
            num_warps=8,
        )
    planes = {"l1": 3, "l2": 2}.get(kind, 1)
    slots = tiling.splits * (tiling.block_r if keep > 1 else 1)
    return StatisticsPlan(
        pilot,
        moments,
        finish,
        pilot_splits * view.channels + planes * tiling.splits * entries,
        2 * slots * entries if extreme else 0,
        # The range does not see the mean, so it has no degree of freedom to correct for.
        1.0 if kind == "range" else view.n / (view.n - 1),
    )


def _pilot(view: View) -> tuple[Launch, int, int]:
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
    launch = overlapping(
        pilot_kernel,
        (blocks, splits),
        (view.rows, view.cols, view.spatial, view.channels, samples, step),
        {"CONTIGUOUS": contiguous, "BLOCK_I": block_i, "BLOCK_J": block_j},
        num_warps=8,
    )
    return launch, splits, count


def statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    kind: str,
    k: int,
    constant: float,
    batches: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """μ, 1/D and s/D as rows of one [3, C] tensor, and the extreme elements' offsets; moves the running statistics.

    ``batches``, an int64 in the device's memory, is raised by one.
    """
    view = view_of(x)
    out = empty(x, 3, view.channels)
    whole = sums(x, running_mean, running_var, momentum, eps, kind, k, constant, batches)
    if whole is not None:
        launch = finalize_launch(view, x.dtype, kind, whole.moved)
        launch((x, whole.scratch, out, whole.running_mean, whole.running_var, whole.batches), whole.numbers)
        return out, None
    has_running = running_mean is not None or running_var is not None
    # Where only one of them is kept, the other one moves in vain.
    unused = empty(x, view.channels) if has_running and (running_mean is None or running_var is None) else out
    rm = unused if running_mean is None else running_mean.contiguous()
    rv = unused if running_var is None else running_var.contiguous()
    moved = Moved((rm.dtype, rv.dtype) if has_running else None, batches is not None)
    number = out if batches is None else batches
    plan = _statistics_plan(view, x.dtype, kind, k, moved)
    scratch = empty(x, plan.scratch)
    if plan.pilot is not None:
        plan.pilot((x, scratch))
    extremes = empty(x, plan.extremes) if plan.extremes else scratch
    plan.moments((x, scratch, extremes))
    numbers = (constant, momentum, eps, plan.unbias)
    if not plan.extremes:
        index = None
        plan.finish((x, scratch, out, rm, rv, number), numbers)
    else:
        index = empty(x, kept(kind, k), view.channels, dtype=torch.int64)
        plan.finish((x, scratch, extremes, out, index, rm, rv, number), numbers)
    for kept_by_caller, new in ((running_mean, rm), (running_var, rv)):
        if kept_by_caller is not None and kept_by_caller is not new:
            kept_by_caller.copy_(new)
    return out, index
