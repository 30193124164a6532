"""The launch of the normalization."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from normmatters.kernels import MAX_PLANS
from normmatters.kernels.triton.batch_norm_plan import (
    MAX_REGISTERS,
    Affine,
    Moved,
    affine_of,
    has_of,
    is_even,
    overlapping,
)
from normmatters.kernels.triton.batch_norm_saved import Saved, code_bits, saved_shapes
from normmatters.kernels.triton.batch_norm_small import Finalize
from normmatters.kernels.triton.launch import Launch
from normmatters.kernels.triton.layout import View, apply_tiling_of, next_power_of_2, view_of
from normmatters.kernels.triton.normalize import normalize_kernel
from normmatters.kernels.triton.scale import KINDS

_NOTHING_MOVES = Moved(None, counts=False)


class NormalizePlan(NamedTuple):
    """The launch of :func:`normalize` at one shape, and what it saves."""

    launch: Launch
    saved: Saved


@functools.lru_cache(MAX_PLANS)
def _normalize_plan(
    view: View,
    dtype: torch.dtype,
    affine: Affine,
    residual: bool,
    kind: str,
    relu: bool,
    lean: bool,
    save: bool,
    early: bool,
    finalize: bool,
    moved: Moved,
) -> NormalizePlan:
    tiling = apply_tiling_of(view, dtype.itemsize)
    bits = code_bits(kind, relu=relu, residual=residual, lean=lean) if save else 0
    launch = overlapping(
        normalize_kernel,
        (-(-view.cols // tiling.block_c), tiling.splits),
        (view.rows, view.cols, view.spatial, view.channels, tiling.entries(view), tiling.tiles),
        {
            "KIND": KINDS[kind],
            "FINALIZE": finalize,
            **moved.constants,
            "BLOCK_S": next_power_of_2(tiling.splits),
            "SPLITS": tiling.splits,
            "CONTIGUOUS": view.spatial > 1,
            "EVEN": is_even(view, tiling),
            **has_of(affine),
            "HAS_RESIDUAL": residual,
            "RELU": relu,
            "CODE_BITS": bits,
            "COUNT": kind == "l1" and save,
            "EARLY": early,
            "GROUP": tiling.group,
            "BLOCK_R": tiling.block_r,
            "BLOCK_C": tiling.block_c,
        },
        num_warps=tiling.num_warps,
        # With a residual, two tensors are on their way at a time: fewer programs, more loads each.
        maxnreg=None if residual else MAX_REGISTERS,
    )
    saved = saved_shapes(view, dtype.itemsize, kind, relu=relu, residual=residual, lean=lean, save=save)
    return NormalizePlan(launch, saved)


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: Tensor,
    kind: str,
    *,
    relu: bool,
    lean: bool,
    save: bool,
    early: bool = False,
    finalize: Finalize | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, its codes, and how many elements lie above the mean (L1); the last two empty unless ``save``.

    ``early`` says that the statistics of this very ``x`` were the last thing launched: then the other tensors can be
    read before it has ended. With ``finalize``, ``statistics`` is written, not read.
    """
    has_residual, finalizes = residual is not None, finalize is not None
    if finalize is None:
        finalize = Finalize(statistics, statistics, statistics, statistics, _NOTHING_MOVES, (0.0, 0.0, 0.0, 0.0))
    scratch, rm, rv, batches, moved, numbers = finalize
    plan = _normalize_plan(
        view_of(x), x.dtype, affine_of(weight, bias), has_residual, kind, relu, lean, save, early, finalizes, moved
    )
    z = torch.empty_like(x)
    saved, device = plan.saved, x.device
    code = torch.empty(saved.code, dtype=saved.code_dtype, device=device)
    count = torch.empty(saved.counts, dtype=saved.count_dtype, device=device)
    w = statistics if weight is None else weight
    b = statistics if bias is None else bias
    r = x if residual is None else residual
    plan.launch((x, r, w, b, statistics, scratch, rm, rv, batches, z, code, count), numbers)
    return z, code, count
