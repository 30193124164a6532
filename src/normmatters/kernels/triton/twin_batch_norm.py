"""Launches of the kernels for two L1 batch norms that are added. Statistics are one call each."""

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
    empty,
    is_even,
    overlapping,
)
from normmatters.kernels.triton.launch import Launch
from normmatters.kernels.triton.layout import View, next_power_of_2, tiling_of, view_of
from normmatters.kernels.triton.twin_gradient import (
    twin_gradient_kernel,
    twin_input_gradient_kernel,
    twin_reduce_kernel,
)
from normmatters.kernels.triton.twin_normalize import twin_normalize_kernel


def code_shape(view: View, *, lean: bool, save: bool) -> tuple[tuple[int, int, int], torch.dtype]:
    """Shape and dtype of the codes, in two planes; nothing unless ``save``."""
    return (2, view.code_rows if save else 0, view.cols), torch.int16 if lean else torch.int8


@functools.lru_cache(MAX_PLANS)
def _normalize_plan(view: View, dtype: torch.dtype, first: Affine, second: Affine, lean: bool, save: bool) -> Launch:
    tiling = tiling_of(view, dtype.itemsize)
    return overlapping(
        twin_normalize_kernel,
        (-(-view.cols // tiling.block_c), tiling.splits),
        (view.rows, view.cols, view.spatial, view.channels, tiling.tiles),
        {
            "CONTIGUOUS": view.spatial > 1,
            "EVEN": is_even(view, tiling),
            "HAS_WEIGHT1": first[0] is not None,
            "HAS_BIAS1": first[1] is not None,
            "HAS_WEIGHT2": second[0] is not None,
            "HAS_BIAS2": second[1] is not None,
            "LEAN": lean,
            "SAVE": save,
            "BLOCK_R": tiling.block_r,
            "BLOCK_C": tiling.block_c,
        },
        num_warps=tiling.num_warps,
        maxnreg=MAX_REGISTERS,
    )


class Normed(NamedTuple):
    """What the normalization of one input needs: its affine parameters, and (μ, 1/D, s/D) as [3, C]."""

    weight: Tensor | None
    bias: Tensor | None
    statistics: Tensor

    @property
    def affine(self) -> Affine:
        return affine_of(self.weight, self.bias)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Weight and bias for a kernel, which does not look at the absent ones."""
        return (
            self.statistics if self.weight is None else self.weight,
            self.statistics if self.bias is None else self.bias,
        )


def normalize(
    x1: Tensor, first: Normed, x2: Tensor, second: Normed, *, lean: bool, save: bool
) -> tuple[Tensor, Tensor]:
    """relu(norm₁(x₁) + norm₂(x₂)) and its codes. Both inputs are dense in the same memory format."""
    view = view_of(x1)
    shape, dtype = code_shape(view, lean=lean, save=save)
    z, code = torch.empty_like(x1), empty(x1, *shape, dtype=dtype)
    launch = _normalize_plan(view, x1.dtype, first.affine, second.affine, lean, save)
    launch((x1, x2, *first.tensors, *second.tensors, first.statistics, second.statistics, z, code))
    return z, code


class GradientPlan(NamedTuple):
    """The launches of :func:`gradient` at one shape; scratch holds the coefficients, then the partial sums."""

    reduce: Launch
    finish: Launch
    input_gradient: Launch
    scratch: int


@functools.lru_cache(MAX_PLANS)
def _gradient_plan(
    view: View, dtype: torch.dtype, first: Affine, second: Affine, lean: bool, linked: bool
) -> GradientPlan:
    tiling = tiling_of(view, dtype.itemsize)
    entries, per_channel = tiling.entries(view), view.spatial // tiling.group
    grid = (-(-view.cols // tiling.block_c), tiling.splits)
    sizes = (view.rows, view.cols, view.spatial, view.channels)
    kind = {"LEAN": lean, "CONTIGUOUS": view.spatial > 1, "EVEN": is_even(view, tiling), "LINKED": linked}
    blocks = {"BLOCK_R": tiling.block_r, "BLOCK_C": tiling.block_c}
    reduce = overlapping(
        twin_reduce_kernel,
        grid,
        (*sizes, entries, tiling.tiles),
        {**kind, "GROUP": tiling.group, **blocks},
        num_warps=tiling.num_warps,
        maxnreg=MAX_REGISTERS,
    )
    block_c, block_e, programs = channel_blocks(view)
    finish = overlapping(
        twin_gradient_kernel,
        (programs, 1),
        (view.channels, entries, tiling.splits, per_channel, view.n),
        {
            "HAS_WEIGHT1": first[0] is not None,
            "HAS_WEIGHT2": second[0] is not None,
            "LEAN": lean,
            "BLOCK_E": min(block_e, next_power_of_2(tiling.splits * per_channel)),
            "BLOCK_C": block_c,
        },
        num_warps=8,
    )
    input_gradient = overlapping(
        twin_input_gradient_kernel,
        grid,
        (*sizes, tiling.tiles),
        {**kind, **blocks},
        num_warps=tiling.num_warps,
        maxnreg=MAX_REGISTERS,
    )
    return GradientPlan(reduce, finish, input_gradient, 6 * view.channels + 5 * tiling.splits * entries)


class Gradients(NamedTuple):
    """dx, dγ and dβ of each norm."""

    dx1: Tensor
    dweight1: Tensor
    dbias1: Tensor
    dx2: Tensor
    dweight2: Tensor
    dbias2: Tensor


def gradient(
    g: Tensor,
    link: Tensor | None,
    x1: Tensor,
    x2: Tensor,
    code: Tensor,
    first: Normed,
    second: Normed,
    constant1: float,
    constant2: float,
    *,
    lean: bool,
) -> Gradients:
    """Both norms' gradients. ``link`` is added to g; of ``x1`` and ``x2`` nothing is read if ``lean``."""
    view = view_of(g)
    plan = _gradient_plan(view, g.dtype, first.affine, second.affine, lean, link is not None)
    scratch = empty(g, plan.scratch)
    dweight1, dbias1, dweight2, dbias2 = (empty(g, view.channels) for _ in range(4))
    dx1, dx2 = torch.empty_like(g), torch.empty_like(g)
    other = g if link is None else link
    stats1, stats2 = first.statistics, second.statistics
    plan.reduce((g, other, x1, x2, code, stats1, stats2, scratch))
    plan.finish(
        (
            scratch, first.tensors[0], second.tensors[0], stats1, stats2, dweight1, dbias1, dweight2, dbias2
        ),
        (constant1, constant2),
    )  # fmt: skip
    plan.input_gradient((g, other, code, scratch, dx1, dx2))
    return Gradients(dx1, dweight1, dbias1, dx2, dweight2, dbias2)
