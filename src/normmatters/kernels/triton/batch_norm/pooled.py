"""L1 batch norm, ReLU and max pool (3×3, stride 2, padding 1) in one: the stem of a ResNet, channels last.

Forward: z = max over a window of relu((x−μ)/D·γ + β). The affine map is monotone, so the window's largest x (smallest
where γ < 0) is found first and mapped alone. Of the tensor in full resolution nothing is written.

The gradient needs the x that won each window, ∞ where z = 0, and one byte: bits 4 … 7 say which of the nine elements
won (row by row; CLOSED where z = 0), bits 0 … 3 are [x ≥ μ] of the four that the window *owns*, its lower right ones:
each element of x is owned by one window. z would do for x, but not where γ is small: rounding z loses x̂ there, and a
winner lies too far out for its sign to stand for it.

    0 1 2
    3 4 5        4, 5, 7 and 8 are owned; 8 is also the 6, 2 and 0 of the windows to its right, below, and both
    6 7 8

Backward: the sums run over pooled elements only; dx = A·g + B·[x ≥ μ] + E is written by the owner, with g from the up
to four windows that an element can have won. Every sum has a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.operators import Operator, in_dtype, needs_grad
from normmatters.kernels.triton.batch_norm.gradient import FROM_INPUT, coefficients_launch
from normmatters.kernels.triton.batch_norm.layout import (
    MAX_REGISTERS,
    Affine,
    Statistic,
    Tiling,
    View,
    affine_of,
    empty,
    has_of,
    next_power_of_2,
    rounding_of,
    statistic_of,
    values_of,
)
from normmatters.kernels.triton.batch_norm.normalize import count_dtype
from normmatters.kernels.triton.batch_norm.statistics import statistics
from normmatters.kernels.triton.batch_norm.tiles import KINDS, load_affine
from normmatters.kernels.triton.launch import Launch, Launches, cached_plan, wait_for_previous
from normmatters.norm import Norm, RunningStats

# Kernels --------------------------------------------------------------------------------------------------------------

CLOSED: tl.constexpr = tl.constexpr(15)


@triton.jit
def windows(tile, out_height, out_width, BLOCK_R: tl.constexpr):
    """The windows of a tile, [BLOCK_R]: their number, image, row and column."""
    window = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    line = window // out_width
    return window, line // out_height, line % out_height, window % out_width


@triton.jit
def load_row(x_ptr, center, col, cols, left, valid, right, inside, other, EVEN: tl.constexpr):
    """Three neighbours of x, [BLOCK_R, BLOCK_C] each; ``center`` counts the pixels up to the middle one."""
    mask_l, mask_m, mask_r = (left & valid)[:, None], valid[:, None], (right & valid)[:, None]
    if not EVEN:
        mask_l, mask_m, mask_r = mask_l & inside[None, :], mask_m & inside[None, :], mask_r & inside[None, :]
    at = x_ptr + center.to(tl.int64)[:, None] * cols + col[None, :]
    a = tl.load(at - cols, mask=mask_l, other=other)
    b = tl.load(at, mask=mask_m, other=other)
    c = tl.load(at + cols, mask=mask_r, other=other)
    return a, b, c


@triton.jit
def key_of(x, turn):
    """x·sign(γ), in a type of x's size that is compared two at a time: bfloat16's bits have the same order as float16.

    From 2¹²¹ on they are infinities and NaN to float16. A channel with such a number has a scale whose square is
    infinite in float32: its output is β, and no gradient asks who won.
    """
    return x.to(turn.dtype, bitcast=True) * turn


@triton.jit
def where_best(winner, key, best, valid, INDEX: tl.constexpr):
    """INDEX where the key is the best one. Asked from the last to the first, of equal ones the first remains."""
    return tl.where((key == best) & valid[:, None], INDEX, winner)


@triton.jit
def pooled_normalize_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    z_ptr,
    winner_ptr,
    code_ptr,
    count_ptr,
    windows_in_all,
    cols,
    height,
    width,
    out_height,
    out_width,
    tiles,
    EVEN: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """z, and with SAVE the x that won each window, the codes, and the partial counts [split, channel] of x ≥ μ."""
    wait_for_previous(OVERLAP)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = col < cols
    gamma, beta = load_affine(weight_ptr, bias_ptr, col, inside, HAS_WEIGHT, HAS_BIAS)
    mean = tl.load(stats_ptr + col, mask=inside, other=0.0)[None, :]
    inverse = tl.load(stats_ptr + cols + col, mask=inside, other=0.0)
    slope = (gamma * inverse)[None, :]
    # The largest key wins; with γ = 0 all are equal, to what is not there too, whose key is −∞ otherwise.
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    KEY: tl.constexpr = tl.float16 if dtype == tl.bfloat16 else dtype
    sign = tl.where(gamma > 0, 1.0, tl.where(gamma < 0, -1.0, 0.0))[None, :]
    turn = sign.to(KEY)
    other = tl.where(sign == 0.0, 0.0, tl.where(sign > 0, float("-inf"), float("inf")))
    other = other.to(KEY).to(dtype, bitcast=True)
    count = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for tile in range(split, tiles, splits):
        window, image, i, j = windows(tile, out_height, out_width, BLOCK_R)
        live = window < windows_in_all
        top, bottom = live & (i > 0), live & (2 * i + 1 < height)
        left, right = j > 0, 2 * j + 1 < width
        center = (image * height + 2 * i) * width + 2 * j
        x0, x1, x2 = load_row(x_ptr, center - width, col, cols, left, top, right, inside, other, EVEN)
        x3, x4, x5 = load_row(x_ptr, center, col, cols, left, live, right, inside, other, EVEN)
        x6, x7, x8 = load_row(x_ptr, center + width, col, cols, left, bottom, right, inside, other, EVEN)
        k0, k1, k2 = key_of(x0, turn), key_of(x1, turn), key_of(x2, turn)
        k3, k4, k5 = key_of(x3, turn), key_of(x4, turn), key_of(x5, turn)
        k6, k7, k8 = key_of(x6, turn), key_of(x7, turn), key_of(x8, turn)
        best = tl.maximum(tl.maximum(k0, k1), tl.maximum(k2, k3))
        best = tl.maximum(tl.maximum(best, k4), tl.maximum(tl.maximum(k5, k6), tl.maximum(k7, k8)))
        winner = tl.full((BLOCK_R, BLOCK_C), 4, tl.int32)
        winner = where_best(winner, k8, best, bottom & right, 8)
        winner = where_best(winner, k7, best, bottom, 7)
        winner = where_best(winner, k6, best, bottom & left, 6)
        winner = where_best(winner, k5, best, right, 5)
        winner = where_best(winner, k4, best, live, 4)
        winner = where_best(winner, k3, best, left, 3)
        winner = where_best(winner, k2, best, top & right, 2)
        winner = where_best(winner, k1, best, top, 1)
        winner = where_best(winner, k0, best, top & left, 0)

        offset = window.to(tl.int64)[:, None] * cols + col[None, :]
        mask = live[:, None]
        if not EVEN:
            mask = mask & inside[None, :]
        x = best.to(dtype, bitcast=True).to(tl.float32) * sign  # 0 where γ = 0: there y is β, whatever x is
        y = (x - mean) * slope + beta[None, :]
        z = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL).to(z_ptr.dtype.element_ty)
        tl.store(z_ptr + offset, z, mask=mask)
        if SAVE:
            first = pick_first(x0, x1, x3, x4, top & left, top, left)
            x = tl.where(sign == 0.0, first.to(tl.float32), x)
            x = tl.where(z > 0, x, float("inf"))
            tl.store(winner_ptr + offset, x.to(dtype), mask=mask)
            above = tl.where((x4.to(tl.float32) >= mean) & mask, 1, 0)
            above += tl.where((x5.to(tl.float32) >= mean) & right[:, None] & mask, 2, 0)
            above += tl.where((x7.to(tl.float32) >= mean) & bottom[:, None] & mask, 4, 0)
            above += tl.where((x8.to(tl.float32) >= mean) & (bottom & right)[:, None] & mask, 8, 0)
            code = above + (tl.where(z > 0, winner, CLOSED) << 4)
            tl.store(code_ptr + offset, code.to(tl.uint8), mask=mask)
            pairs = (above & 5) + ((above >> 1) & 5)
            count += (pairs & 3) + (pairs >> 2)
    if SAVE:
        total = tl.sum(count, axis=0)
        tl.store(count_ptr + split * cols + col, total.to(count_ptr.dtype.element_ty), mask=inside)


@triton.jit
def pick_first(x0, x1, x3, x4, has_0, has_1, has_3):
    """The first element of each window that is there."""
    first = tl.where(has_3[:, None], x3, x4)
    return tl.where(has_0[:, None], x0, tl.where(has_1[:, None], x1, first))


@triton.jit
def load_pooled(ptr, tile, col, windows_in_all, cols, BLOCK_R: tl.constexpr, EVEN: tl.constexpr):
    """A tile of a pooled tensor, [BLOCK_R, BLOCK_C]; zero outside: a tile before the first one reads nothing."""
    window = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = ((window >= 0) & (window < windows_in_all))[:, None]
    if not EVEN:
        mask = mask & (col < cols)[None, :]
    return tl.load(ptr + window.to(tl.int64)[:, None] * cols + col[None, :], mask=mask, other=0)


@triton.jit
def load_pair(g_ptr, winner_ptr, tile, col, windows_in_all, cols, BLOCK_R: tl.constexpr, EVEN: tl.constexpr):
    """The same tile of the gradient and of the winners."""
    g = load_pooled(g_ptr, tile, col, windows_in_all, cols, BLOCK_R, EVEN)
    return g, load_pooled(winner_ptr, tile, col, windows_in_all, cols, BLOCK_R, EVEN)


@triton.jit
def pooled_sums_kernel(
    g_ptr,
    winner_ptr,
    stats_ptr,
    scratch_ptr,
    windows_in_all,
    cols,
    tiles,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Partial Σg and Σg·(x−μ) of open windows, x their winners.

    They stand in the scratch after the coefficients, as ``gradient_kernel`` expects them.
    """
    wait_for_previous(OVERLAP)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = col < cols
    mean = tl.load(stats_ptr + col, mask=inside, other=0.0)[None, :]
    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    # Last tiles first: ``pooled_input_gradient_kernel`` begins with the first ones, which are then in the cache. Two
    # tiles are on their way while one is summed; there is little to do with each.
    tile = tiles - 1 - split
    g_ahead, x_ahead = load_pair(g_ptr, winner_ptr, tile, col, windows_in_all, cols, BLOCK_R, EVEN)
    g_later, x_later = load_pair(g_ptr, winner_ptr, tile - splits, col, windows_in_all, cols, BLOCK_R, EVEN)
    for it in range(split, tiles, splits):
        tile = tiles - 1 - it
        g, x = g_ahead.to(tl.float32), x_ahead.to(tl.float32)
        g_ahead, x_ahead = g_later, x_later
        g_later, x_later = load_pair(g_ptr, winner_ptr, tile - 2 * splits, col, windows_in_all, cols, BLOCK_R, EVEN)
        is_open = x < float("inf")
        first += tl.where(is_open, g, 0.0)
        second += tl.where(is_open, g * (x - mean), 0.0)
    out = scratch_ptr + (4 + split) * cols + col
    tl.store(out, tl.sum(first, axis=0), mask=inside)
    tl.store(out + splits * cols, tl.sum(second, axis=0), mask=inside)


@triton.jit
def won(g, winner, INDEX: tl.constexpr):
    """What an element gets from a window of which it is number INDEX."""
    return tl.where(winner == INDEX, g, 0.0)


@triton.jit
def load_window(g_ptr, code_ptr, offset, mask):
    """The gradient and the code of one window; outside, g = 0 for number 0."""
    g = tl.load(g_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    return g, tl.load(code_ptr + offset, mask=mask, other=0).to(tl.int32)


@triton.jit
def pooled_input_gradient_kernel(
    g_ptr,
    code_ptr,
    scratch_ptr,
    dx_ptr,
    windows_in_all,
    cols,
    height,
    width,
    out_height,
    out_width,
    tiles,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """dx = A·g + B·[x ≥ μ] + E of the four elements that each window owns."""
    wait_for_previous(OVERLAP)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = col < cols
    slope = tl.load(scratch_ptr + col, mask=inside, other=0.0)[None, :]
    tilt = tl.load(scratch_ptr + cols + col, mask=inside, other=0.0)[None, :]
    even = tl.load(scratch_ptr + 2 * cols + col, mask=inside, other=0.0)[None, :]
    for tile in range(split, tiles, splits):
        window, image, i, j = windows(tile, out_height, out_width, BLOCK_R)
        live = (window < windows_in_all)[:, None]
        if not EVEN:
            live = live & inside[None, :]
        below = live & (i + 1 < out_height)[:, None]
        beside = (j + 1 < out_width)[:, None]
        offset = window.to(tl.int64)[:, None] * cols + col[None, :]
        under = offset + out_width * cols
        g_a, code = load_window(g_ptr, code_ptr, offset, live)
        g_b, code_b = load_window(g_ptr, code_ptr, offset + cols, live & beside)
        g_c, code_c = load_window(g_ptr, code_ptr, under, below)
        g_d, code_d = load_window(g_ptr, code_ptr, under + cols, below & beside)
        a, b, c, d = code >> 4, code_b >> 4, code_c >> 4, code_d >> 4
        g_4 = won(g_a, a, 4)
        g_5 = won(g_a, a, 5) + won(g_b, b, 3)
        g_7 = won(g_a, a, 7) + won(g_c, c, 1)
        g_8 = won(g_a, a, 8) + won(g_b, b, 6) + (won(g_c, c, 2) + won(g_d, d, 0))

        pixel = (image * height + 2 * i) * width + 2 * j
        at = dx_ptr + pixel.to(tl.int64)[:, None] * cols + col[None, :]
        right, bottom = (2 * j + 1 < width)[:, None], (2 * i + 1 < height)[:, None]
        store_gradient(at, g_4, code & 1, slope, tilt, even, live)
        store_gradient(at + cols, g_5, code & 2, slope, tilt, even, live & right)
        store_gradient(at + width * cols, g_7, code & 4, slope, tilt, even, live & bottom)
        store_gradient(at + (width + 1) * cols, g_8, code & 8, slope, tilt, even, live & right & bottom)


@triton.jit
def store_gradient(at, g, above, slope, tilt, even, mask):
    """One of the four elements; both sides from g, so that the choice stays in g's layout."""
    dx = tl.where(above != 0, g * slope + (even + tilt), g * slope + even)
    tl.store(at, dx.to(at.dtype.element_ty), mask=mask)


# Launches -------------------------------------------------------------------------------------------------------------

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


@cached_plan
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

    forward: Launches
    backward: Launches
    scratch: int
    saved: Saved


@cached_plan
def _plan(shape: Shape, dtype: torch.dtype, affine: Affine, constant: float, save: bool) -> Plan:
    tiling = tiling_of(shape, dtype.itemsize)
    grid = (-(-shape.channels // tiling.block_c), tiling.splits)
    values = {
        **values_of(shape.view, tiling),
        **has_of(affine),
        **rounding_of(dtype),
        "constant": constant,
        "KIND": KINDS["l1"],
        "SOURCE": FROM_INPUT.value,
        "K": 1,
        "windows_in_all": shape.windows,
        "height": shape.height,
        "width": shape.width,
        "out_height": shape.out_height,
        "out_width": shape.out_width,
        "EVEN": shape.channels % tiling.block_c == 0,
        "SAVE": save,
    }
    normalize, sums, input_gradient = (
        Launch(kernel, grid, values, num_warps=tiling.num_warps, maxnreg=MAX_REGISTERS)
        for kernel in (pooled_normalize_kernel, pooled_sums_kernel, pooled_input_gradient_kernel)
    )
    return Plan(
        Launches(normalize),
        Launches(sums, coefficients_launch(shape.view, values), input_gradient),
        (4 + 2 * tiling.splits) * shape.channels,
        saved_shapes(shape, dtype.itemsize, save=save),
    )


# Autograd and operators -----------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """What a forward pass is called with beside its tensors. ``save``: there will be a backward pass."""

    running_mean: Tensor | None
    running_var: Tensor | None
    batches: Tensor | None
    momentum: float
    constant: float
    eps: float
    save: bool


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The pooled output, and what the backward pass needs: winners, codes, counts (see `saved_shapes`), statistics.

    Moves the running statistics and raises the number of batches.
    """
    x = _channels_last(x)
    mean, var, batches, momentum, constant, eps, save = options
    stats, _ = statistics(x, Statistic("l1", 0, constant, eps), RunningStats(mean, var, batches, momentum))
    shape = shape_of(x)
    launches, _, _, saved = _plan(shape, x.dtype, affine_of(weight, bias), constant, save)
    z = torch.empty(shape.pooled, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    winner = empty(x, *saved.winner, dtype=x.dtype)
    code = empty(x, *saved.code, dtype=torch.uint8)
    count = empty(x, *saved.counts, dtype=saved.count_dtype)
    tensors = {
        "x_ptr": x,
        "weight_ptr": stats if weight is None else weight,
        "bias_ptr": stats if bias is None else bias,
        "stats_ptr": stats,
        "z_ptr": z,
        "winner_ptr": winner,
        "code_ptr": code,
        "count_ptr": count,
    }
    launches(tensors)
    return z, winner, code, count, stats


def _backward(
    g: Tensor,
    winner: Tensor,
    code: Tensor,
    count: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    constant: float,
    height: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    g = _channels_last(g)
    batch, channels, *_ = shape_of(g)
    # β has no part in the gradient.
    plan = _plan(Shape(batch, channels, height, width), g.dtype, affine_of(weight, None), constant, True)
    size = (batch, channels, height, width)
    dx = torch.empty(size, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
    dweight, dbias = empty(g, channels), empty(g, channels)
    tensors = {
        "g_ptr": g,
        "winner_ptr": winner,
        "code_ptr": code,
        "count_ptr": count,
        "stats_ptr": statistics,
        "weight_ptr": statistics if weight is None else weight,
        "bias_ptr": statistics,
        "scratch_ptr": empty(g, plan.scratch),
        "dx_ptr": dx,
        "dweight_ptr": dweight,
        "dbias_ptr": dbias,
    }
    plan.backward(tensors)
    return dx, dweight, dbias


def _save(ctx: Any, tensors: tuple[Any, ...], options: Options, results: tuple[Tensor, ...]) -> None:
    x, weight, bias = tensors
    _, *saved = results
    ctx.save_for_backward(*saved, weight)
    ctx.arguments = (options.constant, int(x.shape[2]), int(x.shape[3]))
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx: Any, backward: Callable[..., Any], g: Tensor, link: None) -> tuple[Tensor | None, ...]:
    """Gradients of x, γ and β."""
    *saved, weight = ctx.saved_tensors
    dx, dweight, dbias = backward(g, *saved, weight, *ctx.arguments)
    return dx, in_dtype(dweight, None if weight is None else weight.dtype), in_dtype(dbias, ctx.bias_dtype)


_pooled_batch_norm = Operator(
    "pooled_batch_norm",
    options=Options,
    forward=_forward,
    save=_save,
    backward=_backward,
    gradients=_gradients,
    changes=("running_mean", "running_var", "batches"),
)


def pooled_batch_norm(
    x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None, running: RunningStats
) -> Tensor:
    """L1 batch norm in training, ReLU and pool of a channels-last ``x``; the dispatcher has checked them."""
    weight, bias = weight if weight is None else weight.contiguous(), bias if bias is None else bias.contiguous()
    save = needs_grad(x, weight, bias)
    _, _, constant, eps = statistic_of(norm, int(x.numel() // x.shape[1]))
    mean, var, batches, momentum = running
    options = Options(mean, var, batches, float(momentum), constant, eps, save)
    output: Tensor = _pooled_batch_norm(x, weight, bias, options, needs_grad=save)
    return output
