"""Launches of the pooled batch norm kernels: L1, ReLU and a 3×3 max pool of stride 2, channels last.

The statistics are :func:`normmatters.kernels.triton.batch_norm_statistics.statistics`'.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from normmatters.kernels import MAX_PLANS
from normmatters.kernels.triton import pooled
from normmatters.kernels.triton.batch_norm_gradient import coefficients_launch
from normmatters.kernels.triton.batch_norm_plan import MAX_REGISTERS, Affine, affine_of, has_of, overlapping
from normmatters.kernels.triton.batch_norm_saved import count_dtype
from normmatters.kernels.triton.coefficients import FROM_INPUT
from normmatters.kernels.triton.launch import Launch
from normmatters.kernels.triton.layout import Tiling, View, next_power_of_2

#: Pixels of the input that a window owns.
OWNED = 4

# One wave of four programs on each of 132 multiprocessors (H200); so few partial sums cost nothing to add.
_PROGRAMS = 528


class Shape(NamedTuple):
    """The input's sizes; the pooled ones follow."""

    batch: int
    channels: int
    height: int
    width: int

    @property
    def out_height(self) -> int:
        return -(-self.height // 2)

    @property
    def out_width(self) -> int:
        return -(-self.width // 2)

    @property
    def windows(self) -> int:
        return self.batch * self.out_height * self.out_width

    @property
    def view(self) -> View:
        """The input as rows and columns."""
        return View(self.batch * self.height * self.width, self.channels, 1)

    @property
    def pooled(self) -> tuple[int, int, int, int]:
        return self.batch, self.channels, self.out_height, self.out_width


def shape_of(x: Tensor) -> Shape:
    """Plain integers, to which a compiled graph is specialized."""
    return Shape(*map(int, x.shape))


@functools.lru_cache(MAX_PLANS)
def tiling_of(shape: Shape, itemsize: int) -> Tiling:
    """Tiles of 16 bytes a thread: neighbouring windows, so that their common pixels come from the cache."""
    num_warps = 4
    elements = 32 * num_warps * (8 if itemsize <= 2 else 4)
    block_c = min(next_power_of_2(shape.channels), 64)
    block_r = min(elements // block_c, next_power_of_2(shape.windows))
    tiles = -(-shape.windows // block_r)
    splits = max(1, min(tiles, _PROGRAMS // -(-shape.channels // block_c)))
    return Tiling(block_c, block_r, 1, splits, tiles, num_warps)


class Saved(NamedTuple):
    """Shapes and dtypes of what the backward pass needs."""

    winner: tuple[int, int] = (0, 0)
    code: tuple[int, int] = (0, 0)
    counts: tuple[int, int] = (0, 0)
    count_dtype: torch.dtype = torch.int32


def saved_shapes(shape: Shape, itemsize: int, *, save: bool) -> Saved:
    """What is saved: the x that won each window, a code for it, and how many lie above the mean. Or nothing."""
    if not save:
        return Saved()
    tiling = tiling_of(shape, itemsize)
    # Two dimensions: a compiler that prefers channels last would lay out four of them anew, there and back.
    stored = (shape.windows, shape.channels)
    return Saved(stored, stored, (tiling.splits, shape.channels), count_dtype(tiling, OWNED))


class Plan(NamedTuple):
    """The launches at one shape."""

    normalize: Launch
    reduce: Launch
    finish: Launch
    input_gradient: Launch
    scratch: int
    saved: Saved


@functools.lru_cache(MAX_PLANS)
def _plan(shape: Shape, dtype: torch.dtype, affine: Affine, save: bool) -> Plan:
    tiling = tiling_of(shape, dtype.itemsize)
    grid = (-(-shape.channels // tiling.block_c), tiling.splits)
    even = {"EVEN": shape.channels % tiling.block_c == 0}
    blocks = {"BLOCK_R": tiling.block_r, "BLOCK_C": tiling.block_c}
    sizes = (shape.windows, shape.channels)
    pooled_sizes = (shape.out_height, shape.out_width, tiling.tiles)
    launch = functools.partial(overlapping, num_warps=tiling.num_warps, maxnreg=MAX_REGISTERS)
    return Plan(
        launch(
            pooled.pooled_normalize_kernel,
            grid,
            (*sizes, shape.height, shape.width, *pooled_sizes),
            {**even, **has_of(affine), "SAVE": save, **blocks},
        ),
        launch(
            pooled.pooled_reduce_kernel,
            grid,
            (*sizes, tiling.tiles),
            {**even, **blocks},
        ),
        coefficients_launch(shape.view, dtype, affine, tiling, "l1", 0, FROM_INPUT.value),
        launch(
            pooled.pooled_input_gradient_kernel,
            grid,
            (*sizes, shape.height, shape.width, *pooled_sizes),
            {**even, **blocks},
        ),
        (4 + 2 * tiling.splits) * shape.channels,
        saved_shapes(shape, dtype.itemsize, save=save),
    )


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, *, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pooled output, the x that won each window, the codes, and how many lie above the mean (see `saved_shapes`).

    x: (N, C, H, W), channels last; output: (N, C, ⌈H/2⌉, ⌈W/2⌉), channels last.
    """
    shape = shape_of(x)
    plan = _plan(shape, x.dtype, affine_of(weight, bias), save)
    saved = plan.saved
    z = torch.empty(shape.pooled, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    winner = torch.empty(saved.winner, dtype=x.dtype, device=x.device)
    code = torch.empty(saved.code, dtype=torch.uint8, device=x.device)
    count = torch.empty(saved.counts, dtype=saved.count_dtype, device=x.device)
    w = statistics if weight is None else weight
    b = statistics if bias is None else bias
    plan.normalize((x, w, b, statistics, z, winner, code, count))
    return z, winner, code, count


def gradient(
    g: Tensor,
    winner: Tensor,
    code: Tensor,
    count: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    constant: float,
    size: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """dx of height and width ``size``, dγ and dβ; g and dx channels last."""
    batch, channels, *_ = shape_of(g)
    shape = Shape(batch, channels, *size)
    plan = _plan(shape, g.dtype, affine_of(weight, None), True)  # β has no part in the gradient
    w = statistics if weight is None else weight
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=g.device)
    dweight = torch.empty(channels, dtype=torch.float32, device=g.device)
    dbias = torch.empty(channels, dtype=torch.float32, device=g.device)
    dx = torch.empty((batch, channels, *size), dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
    plan.reduce((g, winner, statistics, scratch))
    plan.finish((scratch, count, w, statistics, statistics, dweight, dbias), (constant,))
    plan.input_gradient((g, code, scratch, dx))
    return dx, dweight, dbias
