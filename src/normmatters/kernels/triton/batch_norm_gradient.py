"""Launches of the backward pass: its sums, the coefficients of dx, and dx itself."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from normmatters.kernels import MAX_PLANS
from normmatters.kernels.triton.batch_norm_plan import (
    MAX_REGISTERS,
    Affine,
    affine_of,
    channel_blocks,
    has_of,
    is_even,
    overlapping,
    rounding_of,
)
from normmatters.kernels.triton.batch_norm_saved import code_bits, inverts_output, kept
from normmatters.kernels.triton.coefficients import FROM_CODE, FROM_INPUT, FROM_OUTPUT, gradient_kernel
from normmatters.kernels.triton.input_gradient import input_gradient_kernel, scatter_kernel
from normmatters.kernels.triton.launch import Launch
from normmatters.kernels.triton.layout import Tiling, View, apply_tiling_of, is_small, next_power_of_2, view_of
from normmatters.kernels.triton.reduce import reduce_kernel
from normmatters.kernels.triton.scale import KINDS


class GradientPlan(NamedTuple):
    """The launches of :func:`gradient` at one shape; scratch holds the coefficients, then the partial sums."""

    reduce: Launch
    finish: Launch | None
    input_gradient: Launch
    scatter: Launch | None
    scratch: int


def coefficients_launch(
    view: View, dtype: torch.dtype, affine: Affine, tiling: Tiling, kind: str, k: int, source: int
) -> Launch:
    """The launch that makes dγ, dβ and dx's coefficients from the partial sums of one ``tiling``."""
    block_c, block_e, programs = channel_blocks(view)
    return overlapping(
        gradient_kernel,
        (programs, 1),
        (view.channels, tiling.entries(view), tiling.splits, view.spatial // tiling.group, view.n),
        {
            "KIND": KINDS[kind],
            "SOURCE": source,
            "K": 1 if kind == "range" else max(kept(kind, k), 1),
            **has_of(affine),
            **rounding_of(dtype),
            "BLOCK_E": block_e,
            "BLOCK_C": block_c,
        },
        num_warps=8,
    )


@functools.lru_cache(MAX_PLANS)
def _gradient_plan(
    view: View,
    dtype: torch.dtype,
    affine: Affine,
    kind: str,
    k: int,
    relu: bool,
    residual: bool,
    lean: bool,
    need_dresidual: bool,
    linked: bool,
) -> GradientPlan:
    tiling = apply_tiling_of(view, dtype.itemsize)
    number = KINDS[kind]
    contiguous, even = view.spatial > 1, is_even(view, tiling)
    entries = tiling.entries(view)
    source = FROM_INPUT.value
    if lean:
        source = FROM_OUTPUT.value if inverts_output(relu=relu, residual=residual) else FROM_CODE.value
    bits = code_bits(kind, relu=relu, residual=residual, lean=lean)
    terms = kept(kind, k)
    solves = is_small(view, dtype.itemsize) and not terms
    has, rounding = has_of(affine), rounding_of(dtype)
    blocks = {"BLOCK_R": tiling.block_r, "BLOCK_C": tiling.block_c}
    grid = (-(-view.cols // tiling.block_c), tiling.splits)
    sizes = (view.rows, view.cols, view.spatial, view.channels)
    reduce = overlapping(
        reduce_kernel,
        grid,
        (*sizes, entries, tiling.tiles),
        {
            "SOURCE": source,
            "MEAN_ONLY": kind == "mean",
            "CONTIGUOUS": contiguous,
            "EVEN": even,
            **has,
            "RELU": relu,
            "LINKED": linked,
            **rounding,
            "GROUP": tiling.group,
            **blocks,
        },
        num_warps=tiling.num_warps,
        # Three tensors on their way need more room.
        maxnreg=None if linked and not lean else MAX_REGISTERS,
    )
    finish = None if solves else coefficients_launch(view, dtype, affine, tiling, kind, k, source)
    # What the sums kernel wrote of a linked gradient is behind the ReLU already.
    masks = relu and not linked
    input_gradient = overlapping(
        input_gradient_kernel,
        grid,
        (*sizes, tiling.tiles),
        {
            "KIND": number,
            "K": terms,
            "SOLVE": solves,
            "SOURCE": source,
            **has,
            **rounding,
            "BLOCK_S": next_power_of_2(tiling.splits),
            "SPLITS": tiling.splits,
            "CODE_BITS": bits if masks or kind == "l1" else 0,
            "CONTIGUOUS": contiguous,
            "EVEN": even,
            "RELU": masks,
            "WRITE_RESIDUAL": masks and need_dresidual,
            "EARLY": not (linked and solves),  # the sums kernel writes a linked gradient
            **blocks,
        },
        num_warps=tiling.num_warps,
        maxnreg=MAX_REGISTERS,
    )
    scatter = None
    if terms:
        block = min(128, next_power_of_2(view.channels))
        grid = (-(-view.channels // block), 1)
        scatter = overlapping(scatter_kernel, grid, (view.channels,), {"K": terms, "BLOCK_C": block}, num_warps=1)
    planes = 1 if kind == "mean" else 2
    return GradientPlan(reduce, finish, input_gradient, scatter, 4 * view.channels + planes * tiling.splits * entries)


def gradient(
    g: Tensor,
    link: Tensor | None,
    saved: Tensor,
    code: Tensor,
    count: Tensor,
    statistics: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    k: int,
    constant: float,
    *,
    relu: bool,
    residual: bool,
    lean: bool,
    need_dresidual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dx, dγ, dβ and the residual's gradient (None where it is g itself or not wanted). ``link`` is added to g."""
    view = view_of(g)
    linked = link is not None
    plan = _gradient_plan(view, g.dtype, affine_of(weight, bias), kind, k, relu, residual, lean, need_dresidual, linked)
    w = statistics if weight is None else weight
    b = statistics if bias is None else bias
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=g.device)
    dweight = torch.empty(view.channels, dtype=torch.float32, device=g.device)
    dbias = torch.empty_like(dweight)
    dx = torch.empty_like(g)
    # Without a ReLU the residual's gradient is g itself: the caller hands that on.
    behind = torch.empty_like(g) if linked or (need_dresidual and relu) else dx
    extremes = statistics if index is None else index
    plan.reduce((g, g if link is None else link, behind, saved, code, w, b, statistics, scratch))
    if plan.finish is not None:
        plan.finish((scratch, count, w, b, statistics, dweight, dbias), (constant,))
    plan.input_gradient(
        (
            behind if linked else g, saved, code, statistics, scratch, count, w, b, extremes, dx, behind, dweight, dbias
        ),
        (constant,),
    )  # fmt: skip
    if plan.scatter is not None:
        plan.scatter((dx, extremes, scratch))
    return dx, dweight, dbias, behind if need_dresidual and behind is not dx else None
