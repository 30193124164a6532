"""Launches of the sums of small tensors: who needs the statistics, mostly the normalization, makes them of these."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from normmatters.kernels import MAX_PLANS
from normmatters.kernels.triton.batch_norm_plan import MAX_REGISTERS, Moved, is_even, overlapping
from normmatters.kernels.triton.launch import Launch
from normmatters.kernels.triton.layout import View, apply_tiling_of, is_small, next_power_of_2, view_of
from normmatters.kernels.triton.scale import KINDS
from normmatters.kernels.triton.small_stats import deviation_kernel, whole_finalize_kernel
from normmatters.kernels.triton.stats import moments_kernel


class SumsPlan(NamedTuple):
    """The launches of :func:`sums` at one shape."""

    sums: Launch
    deviations: Launch | None
    scratch: int
    unbias: float


@functools.lru_cache(MAX_PLANS)
def _sums_plan(view: View, dtype: torch.dtype, kind: str) -> SumsPlan | None:
    if not is_small(view, dtype.itemsize) or kind not in ("l1", "l2", "mean"):
        return None
    tiling = apply_tiling_of(view, dtype.itemsize)
    grid = (-(-view.cols // tiling.block_c), tiling.splits)
    even = is_even(view, tiling)
    sums = overlapping(
        moments_kernel,
        grid,
        (view.rows, view.cols, 1, view.channels, view.channels, view.n, tiling.tiles),
        {
            "KIND": KINDS["mean"],
            "CONTIGUOUS": False,
            "EVEN": even,
            "KEEP_R": False,
            "PILOT_SPLITS": 0,
            "GROUP": 1,
            "BLOCK_R": tiling.block_r,
            "BLOCK_C": tiling.block_c,
        },
        num_warps=tiling.num_warps,
        maxnreg=MAX_REGISTERS,
    )
    deviations = None
    if kind != "mean":
        deviations = overlapping(
            deviation_kernel,
            grid,
            (view.rows, view.cols, tiling.tiles),
            {
                "KIND": KINDS[kind],
                "EVEN": even,
                "SPLITS": tiling.splits,
                "BLOCK_S": next_power_of_2(tiling.splits),
                "BLOCK_R": tiling.block_r,
                "BLOCK_C": tiling.block_c,
            },
            num_warps=tiling.num_warps,
            maxnreg=MAX_REGISTERS,
        )
    return SumsPlan(sums, deviations, 2 * tiling.splits * view.channels, view.n / (view.n - 1))


class Finalize(NamedTuple):
    """Partial sums of a small tensor, and all else that is needed to make the statistics of them."""

    scratch: Tensor
    running_mean: Tensor
    running_var: Tensor
    batches: Tensor
    moved: Moved
    numbers: tuple[float, float, float, float]  # constant, momentum, eps, n/(n−1)


def sums(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    kind: str,
    k: int,
    constant: float,
    batches: Tensor | None = None,
) -> Finalize | None:
    """What the normalization needs to make the statistics itself; None where that does not pay or cannot be done."""
    plan = _sums_plan(view_of(x), x.dtype, kind)
    if plan is None:
        return None
    running = None
    if running_mean is not None and running_var is not None:
        if not (running_mean.is_contiguous() and running_var.is_contiguous()):
            return None
        running = (running_mean.dtype, running_var.dtype)
    elif running_mean is not running_var:
        return None
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=x.device)
    plan.sums((x, scratch, scratch))
    if plan.deviations is not None:
        plan.deviations((x, scratch))
    numbers = (constant, momentum, eps, plan.unbias)
    if running_mean is None or running_var is None:
        running_mean = running_var = scratch
    moved = Moved(running, batches is not None)
    return Finalize(scratch, running_mean, running_var, scratch if batches is None else batches, moved, numbers)


@functools.lru_cache(MAX_PLANS)
def finalize_launch(view: View, dtype: torch.dtype, kind: str, moved: Moved) -> Launch:
    """The launch that makes the statistics of the sums, where nothing is normalized right behind them."""
    tiling = apply_tiling_of(view, dtype.itemsize)
    return overlapping(
        whole_finalize_kernel,
        (-(-view.cols // tiling.block_c), 1),
        (view.rows, view.cols),
        {
            "KIND": KINDS[kind],
            **moved.constants,
            "SPLITS": tiling.splits,
            "BLOCK_S": next_power_of_2(tiling.splits),
            "BLOCK_C": tiling.block_c,
        },
        num_warps=tiling.num_warps,
    )
