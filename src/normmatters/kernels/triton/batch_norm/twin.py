"""Two L1 batch norms whose sum goes through one ReLU, z = relu(norm₁(x₁) + norm₂(x₂)), in one pass each way.

That is how a residual block ends whose shortcut has a norm of its own. By two operations the second norm's output is
written and read back, and the gradient masked by the ReLU, which is both norms' gradient, written once and read twice
more. Here the forward pass reads x₁ and x₂ and writes z. The
backward pass reads g for the three sums Σg, Σg·x̂₁ and Σg·x̂₂, and once more for both inputs' gradients.

Codes stand in two planes, one a norm, as in :mod:`~normmatters.kernels.triton.codes`; what is open they say in the
first plane only. Lean: four bits a norm, and x̂₂'s are always 1 … 14. Exact: two bits, and one of them for the second
norm.

LINKED: g comes in two parts. Unlike for one norm, whose residual's gradient is their sum and is written anyway, nobody
else wants the sum: both kernels add the parts, which moves as many bytes as writing it and needs no room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.operators import Operator, in_dtype, needs_grad
from normmatters.kernels.triton.batch_norm import layout
from normmatters.kernels.triton.batch_norm.gradient import FROM_CODE, FROM_INPUT, solve
from normmatters.kernels.triton.batch_norm.layout import (
    MAX_REGISTERS,
    Affine,
    Statistic,
    affine_of,
    channel_blocks,
    dense,
    empty,
    grid_of,
    memory_format,
    next_power_of_2,
    sizes_of,
    statistic_of,
    stored_format,
    values_of,
    view_of_shape,
)
from normmatters.kernels.triton.batch_norm.statistics import statistics
from normmatters.kernels.triton.batch_norm.tiles import (
    L1,
    ROWS,
    add_entries,
    coarse,
    coarse_code,
    has_bit,
    is_open_code,
    load_affine,
    load_tile,
    load_words,
    pack,
    pack_codes,
    program_part,
    rows_above,
    store_sums,
    store_tile,
    store_words,
    tile_rows,
)
from normmatters.kernels.triton.launch import Launch, Launches, cached_plan, wait_for_previous
from normmatters.norm import RunningStats

# Kernels --------------------------------------------------------------------------------------------------------------


@triton.jit
def twin_normalize_kernel(
    x1_ptr,
    x2_ptr,
    weight1_ptr,
    bias1_ptr,
    weight2_ptr,
    bias2_ptr,
    stats1_ptr,
    stats2_ptr,
    z_ptr,
    code_ptr,
    rows,
    cols,
    spatial,
    channels,
    tiles,
    CONTIGUOUS: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_WEIGHT1: tl.constexpr,
    HAS_BIAS1: tl.constexpr,
    HAS_WEIGHT2: tl.constexpr,
    HAS_BIAS2: tl.constexpr,
    LEAN: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """z, and codes [2, row, column].

    One tile of each input at a time: what the next ones bring would not fit the registers. Two tensors on their way are
    as much as one and its next tile, which is what the kernels of one norm keep there.
    """
    wait_for_previous(OVERLAP)
    _, split, splits, col, inside, channel = program_part(cols, spatial, CONTIGUOUS, False, BLOCK_C)
    gamma1, beta = load_affine(weight1_ptr, bias1_ptr, channel, inside, HAS_WEIGHT1, HAS_BIAS1)
    gamma2, beta2 = load_affine(weight2_ptr, bias2_ptr, channel, inside, HAS_WEIGHT2, HAS_BIAS2)
    beta += beta2
    mean1 = tl.load(stats1_ptr + channel, mask=inside, other=0.0)
    inverse1 = tl.load(stats1_ptr + channels + channel, mask=inside, other=0.0)
    mean2 = tl.load(stats2_ptr + channel, mask=inside, other=0.0)
    inverse2 = tl.load(stats2_ptr + channels + channel, mask=inside, other=0.0)
    slope1 = gamma1 * inverse1
    slope2 = gamma2 * inverse2
    code2_ptr = code_ptr + tl.cast(tl.cdiv(rows, ROWS), tl.int64) * cols
    for tile in range(split, tiles, splits):
        if not EVEN:
            mask = (tile_rows(tile, BLOCK_R) < rows) & inside[None, None, :]
        x2 = load_tile(x2_ptr, tile, col, rows, cols, BLOCK_R, EVEN, False)
        x1 = load_tile(x1_ptr, tile, col, rows, cols, BLOCK_R, EVEN, False)
        d2 = x2.to(tl.float32) - mean2[None, None, :]
        if not EVEN:
            d2 = tl.where(mask, d2, -1e30)  # what lies outside is not above the mean
        y = d2 * slope2[None, None, :] + beta[None, None, :]
        if SAVE:
            if LEAN:
                words2 = pack_codes(coarse_code(d2, inverse2))
            else:
                words2 = pack(d2 >= 0, 1)
            store_words(code2_ptr, words2, tile, col, rows, cols, BLOCK_R, EVEN)
        d1 = x1.to(tl.float32) - mean1[None, None, :]
        if not EVEN:
            d1 = tl.where(mask, d1, -1e30)
        y += d1 * slope1[None, None, :]
        z = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)  # NaN passes through, as in PyTorch
        store_tile(z_ptr, z, tile, col, rows, cols, BLOCK_R, EVEN)
        if SAVE:
            if LEAN:
                code = coarse_code(d1, inverse1)
                words1 = pack_codes(tl.where(y > 0, code, tl.where(code >= 8, 15, 0)))
            else:
                words1 = pack(d1 >= 0, 1) + pack(y > 0, 2)
            store_words(code_ptr, words1, tile, col, rows, cols, BLOCK_R, EVEN)


@triton.jit
def added(g, link):
    """The sum of both parts, rounded as a tensor of its own would be."""
    return (g.to(tl.float32) + link.to(tl.float32)).to(g.dtype).to(tl.float32)


@triton.jit
def twin_sums_kernel(
    g_ptr,
    link_ptr,
    x1_ptr,
    x2_ptr,
    code_ptr,
    stats1_ptr,
    stats2_ptr,
    scratch_ptr,
    rows,
    cols,
    spatial,
    channels,
    entries,
    tiles,
    LEAN: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    EVEN: tl.constexpr,
    LINKED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Partial Σg, Σg·t₁ and Σg·t₂, where t is x−μ or x̂'s code, and Σ[x₁ ≥ μ₁] and Σ[x₂ ≥ μ₂].

    They stand in the scratch after the coefficients. The counts are made here, not in the forward pass, for here are
    registers to spare.
    """
    wait_for_previous(OVERLAP)
    part_ptr = scratch_ptr + 6 * channels
    block, split, splits, col, inside, channel = program_part(cols, spatial, CONTIGUOUS, CONTIGUOUS, BLOCK_C)
    code2_ptr = code_ptr + tl.cast(tl.cdiv(rows, ROWS), tl.int64) * cols
    sum_g = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    sum1 = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    sum2 = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    count = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)  # two in one: a thread has less than 2¹⁵ rows, or no memory would do
    CODE_BITS: tl.constexpr = 4 if LEAN else 2
    last = tiles - 1 - split
    g_ahead = load_tile(g_ptr, last, col, rows, cols, BLOCK_R, EVEN, True)
    if LINKED:
        link_ahead = load_tile(link_ptr, last, col, rows, cols, BLOCK_R, EVEN, True)
    words1_ahead = load_words(code_ptr, last, col, rows, cols, BLOCK_R, EVEN)
    words2_ahead = load_words(code2_ptr, last, col, rows, cols, BLOCK_R, EVEN)
    if not LEAN:
        mean1 = tl.load(stats1_ptr + channel, mask=inside, other=0.0)
        mean2 = tl.load(stats2_ptr + channel, mask=inside, other=0.0)
    for it in range(split, tiles, splits):
        tile = tiles - 1 - it
        following = tl.where(tile >= splits, tile - splits, tiles)
        g = g_ahead.to(tl.float32)
        if LINKED:
            g = added(g_ahead, link_ahead)
            link_ahead = load_tile(link_ptr, following, col, rows, cols, BLOCK_R, EVEN, True)
        g_ahead = load_tile(g_ptr, following, col, rows, cols, BLOCK_R, EVEN, True)
        words1 = words1_ahead
        words1_ahead = load_words(code_ptr, following, col, rows, cols, BLOCK_R, EVEN)
        words2 = words2_ahead
        words2_ahead = load_words(code2_ptr, following, col, rows, cols, BLOCK_R, EVEN)
        count += rows_above(words1.to(tl.int32), CODE_BITS) + (rows_above(words2.to(tl.int32), CODE_BITS) << 16)
        if LEAN:
            g = tl.where(is_open_code(words1), g, 0.0)
            sum1 += tl.sum(g * coarse(words1), axis=1)
            sum2 += tl.sum(g * coarse(words2), axis=1)
        else:
            x1 = load_tile(x1_ptr, tile, col, rows, cols, BLOCK_R, EVEN, False)
            x2 = load_tile(x2_ptr, tile, col, rows, cols, BLOCK_R, EVEN, False)
            g = tl.where(has_bit(words1, 1, 2), g, 0.0)
            sum1 += tl.sum(g * (x1.to(tl.float32) - mean1[None, None, :]), axis=1)
            sum2 += tl.sum(g * (x2.to(tl.float32) - mean2[None, None, :]), axis=1)
        sum_g += tl.sum(g, axis=1)

    plane = splits * entries
    store_sums(part_ptr, tl.sum(sum_g, axis=0), block, split, entries, GROUP, BLOCK_C)
    store_sums(part_ptr + plane, tl.sum(sum1, axis=0), block, split, entries, GROUP, BLOCK_C)
    store_sums(part_ptr + 2 * plane, tl.sum(sum2, axis=0), block, split, entries, GROUP, BLOCK_C)
    count1 = tl.sum((count & 0xFFFF).to(tl.float32), axis=0)
    count2 = tl.sum((count >> 16).to(tl.float32), axis=0)
    store_sums(part_ptr + 3 * plane, count1, block, split, entries, GROUP, BLOCK_C)
    store_sums(part_ptr + 4 * plane, count2, block, split, entries, GROUP, BLOCK_C)


@triton.jit
def finish_norm(
    sum_g,
    sum_gt,
    count,
    inverse,
    ratio,
    gamma,
    n,
    constant,
    coefficient_ptr,
    dweight_ptr,
    dbias_ptr,
    channel,
    mask,
    channels,
    SOURCE: tl.constexpr,
):
    """dγ, dβ and A, B, E of one of the norms."""
    dweight, slope, tilt, even, _ = solve(
        sum_g, sum_gt, count, inverse, ratio, gamma, gamma, n, constant, L1, SOURCE, 1, 0.0, 0.0
    )
    tl.store(dbias_ptr + channel, sum_g, mask=mask)
    tl.store(dweight_ptr + channel, dweight, mask=mask)
    tl.store(coefficient_ptr + channel, slope, mask=mask)
    tl.store(coefficient_ptr + channels + channel, tilt, mask=mask)
    tl.store(coefficient_ptr + 2 * channels + channel, even, mask=mask)


@triton.jit
def twin_coefficients_kernel(
    scratch_ptr,
    weight1_ptr,
    weight2_ptr,
    stats1_ptr,
    stats2_ptr,
    dweight1_ptr,
    dbias1_ptr,
    dweight2_ptr,
    dbias2_ptr,
    channels,
    entries,
    splits,
    per_channel,
    n,
    constant1,
    constant2,
    HAS_WEIGHT1: tl.constexpr,
    HAS_WEIGHT2: tl.constexpr,
    LEAN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Both norms' dγ, dβ and coefficients of dx = A·g + B·[x ≥ μ] + E: [0..2] and [3..5] of the scratch."""
    SOURCE: tl.constexpr = FROM_CODE if LEAN else FROM_INPUT
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < channels
    # What the forward pass left is there: the kernel before, which is ours, has waited for it.
    inverse1 = tl.load(stats1_ptr + channels + channel, mask=mask, other=1.0)
    ratio1 = tl.load(stats1_ptr + 2 * channels + channel, mask=mask, other=0.0)
    inverse2 = tl.load(stats2_ptr + channels + channel, mask=mask, other=1.0)
    ratio2 = tl.load(stats2_ptr + 2 * channels + channel, mask=mask, other=0.0)
    gamma1, _ = load_affine(weight1_ptr, weight1_ptr, channel, mask, HAS_WEIGHT1, False)
    gamma2, _ = load_affine(weight2_ptr, weight2_ptr, channel, mask, HAS_WEIGHT2, False)
    wait_for_previous(OVERLAP)
    part_ptr = scratch_ptr + 6 * channels
    plane = splits * entries
    sum_g, sum1, sum2 = add_entries(part_ptr, plane, channel, mask, splits, entries, per_channel, 3, BLOCK_E, BLOCK_C)
    count1, count2, _ = add_entries(
        part_ptr + 3 * plane, plane, channel, mask, splits, entries, per_channel, 2, BLOCK_E, BLOCK_C
    )
    finish_norm(
        sum_g, sum1, count1, inverse1, ratio1, gamma1, n, constant1,
        scratch_ptr, dweight1_ptr, dbias1_ptr, channel, mask, channels, SOURCE,
    )  # fmt: skip
    finish_norm(
        sum_g, sum2, count2, inverse2, ratio2, gamma2, n, constant2,
        scratch_ptr + 3 * channels, dweight2_ptr, dbias2_ptr, channel, mask, channels, SOURCE,
    )  # fmt: skip


@triton.jit
def twin_input_gradient_kernel(
    g_ptr,
    link_ptr,
    code_ptr,
    scratch_ptr,
    dx1_ptr,
    dx2_ptr,
    rows,
    cols,
    spatial,
    channels,
    tiles,
    LEAN: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    EVEN: tl.constexpr,
    LINKED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """dx = A·g + B·[x ≥ μ] + E of both inputs; one tile at a time, as in the forward pass."""
    wait_for_previous(OVERLAP)
    _, split, splits, col, inside, channel = program_part(cols, spatial, CONTIGUOUS, False, BLOCK_C)
    code2_ptr = code_ptr + tl.cast(tl.cdiv(rows, ROWS), tl.int64) * cols
    slope1 = tl.load(scratch_ptr + channel, mask=inside, other=0.0)[None, None, :]
    tilt1 = tl.load(scratch_ptr + channels + channel, mask=inside, other=0.0)
    even1 = tl.load(scratch_ptr + 2 * channels + channel, mask=inside, other=0.0)
    slope2 = tl.load(scratch_ptr + 3 * channels + channel, mask=inside, other=0.0)[None, None, :]
    tilt2 = tl.load(scratch_ptr + 4 * channels + channel, mask=inside, other=0.0)
    even2 = tl.load(scratch_ptr + 5 * channels + channel, mask=inside, other=0.0)
    for tile in range(split, tiles, splits):
        words1 = load_words(code_ptr, tile, col, rows, cols, BLOCK_R, EVEN)
        words2 = load_words(code2_ptr, tile, col, rows, cols, BLOCK_R, EVEN)
        part = load_tile(g_ptr, tile, col, rows, cols, BLOCK_R, EVEN, False)
        g = part.to(tl.float32)
        if LINKED:
            g = added(part, load_tile(link_ptr, tile, col, rows, cols, BLOCK_R, EVEN, False))
        if LEAN:
            g = tl.where(is_open_code(words1), g, 0.0)
            above1 = has_bit(words1, 3, 4)
            above2 = has_bit(words2, 3, 4)
        else:
            g = tl.where(has_bit(words1, 1, 2), g, 0.0)
            above1 = has_bit(words1, 0, 2)
            above2 = has_bit(words2, 0, 2)
        # Both sides from g, so that the choice stays in g's layout.
        dx1 = tl.where(above1, g * slope1 + (even1 + tilt1)[None, None, :], g * slope1 + even1[None, None, :])
        store_tile(dx1_ptr, dx1, tile, col, rows, cols, BLOCK_R, EVEN)
        dx2 = tl.where(above2, g * slope2 + (even2 + tilt2)[None, None, :], g * slope2 + even2[None, None, :])
        store_tile(dx2_ptr, dx2, tile, col, rows, cols, BLOCK_R, EVEN)


# Launches -------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The launches at one shape; scratch holds the coefficients, then the partial sums."""

    normalize: Launches
    gradient: Launches
    channels: int
    scratch: int
    code: tuple[int, int, int]


@cached_plan
def _plan(
    sizes: tuple[int, ...],
    contiguous: bool,
    dtype: torch.dtype,
    affine: tuple[Affine, Affine],
    constants: tuple[float, float],
    lean: bool,
    save: bool,
    linked: bool,
) -> Plan:
    view = view_of_shape(sizes, contiguous)
    tiling = layout.tiling_of(view, dtype.itemsize)
    (weight1, bias1), (weight2, bias2) = affine
    values = {
        **values_of(view, tiling),
        "constant1": constants[0],
        "constant2": constants[1],
        "HAS_WEIGHT1": weight1 is not None,
        "HAS_BIAS1": bias1 is not None,
        "HAS_WEIGHT2": weight2 is not None,
        "HAS_BIAS2": bias2 is not None,
        "LEAN": lean,
        "SAVE": save,
        "LINKED": linked,
    }
    normalize, sums, input_gradient = (
        Launch(kernel, grid_of(view, tiling), values, num_warps=tiling.num_warps, maxnreg=MAX_REGISTERS)
        for kernel in (twin_normalize_kernel, twin_sums_kernel, twin_input_gradient_kernel)
    )
    block_c, block_e, programs = channel_blocks(view)
    block_e = min(block_e, next_power_of_2(tiling.splits * view.spatial // tiling.group))
    finish = values | {"BLOCK_E": block_e, "BLOCK_C": block_c}
    return Plan(
        Launches(normalize),
        Launches(sums, Launch(twin_coefficients_kernel, (programs, 1), finish, num_warps=8), input_gradient),
        view.channels,
        6 * view.channels + 5 * tiling.splits * tiling.entries(view),
        (2, view.code_rows if save else 0, view.cols),
    )


# Autograd and operators -----------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """What a forward pass is called with beside its tensors. ``save``: there will be a backward pass."""

    running_mean1: Tensor | None
    running_var1: Tensor | None
    batches1: Tensor | None
    momentum1: float
    eps1: float
    constant1: float
    running_mean2: Tensor | None
    running_var2: Tensor | None
    batches2: Tensor | None
    momentum2: float
    eps2: float
    constant2: float
    lean: bool
    save: bool
    linked: bool


def _forward(
    x1: Tensor,
    weight1: Tensor | None,
    bias1: Tensor | None,
    x2: Tensor,
    weight2: Tensor | None,
    bias2: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, its codes (empty unless ``options.save``), both statistics; updates the running ones."""
    x1 = dense(x1)
    x2 = x2.contiguous(memory_format=memory_format(x1))
    stats: list[Tensor] = []
    # The shortcut's first: it was written last, and what is still in the cache of it is read from there.
    for x, (mean, var, batches, momentum, eps, constant) in ((x2, options[6:12]), (x1, options[:6])):
        running = RunningStats(mean, var, batches, momentum)
        stats += [statistics(x, Statistic("l1", 0, constant, eps), running)[0]]
    stats2, stats1 = stats
    plan = _plan(
        sizes_of(x1), x1.is_contiguous(), x1.dtype, (affine_of(weight1, bias1), affine_of(weight2, bias2)),
        (options.constant1, options.constant2), options.lean, options.save, False,
    )  # fmt: skip
    z, code = torch.empty_like(x1), empty(x1, *plan.code, dtype=torch.int16 if options.lean else torch.int8)
    tensors = {
        "x1_ptr": x1,
        "x2_ptr": x2,
        "weight1_ptr": stats1 if weight1 is None else weight1,
        "bias1_ptr": stats1 if bias1 is None else bias1,
        "weight2_ptr": stats2 if weight2 is None else weight2,
        "bias2_ptr": stats2 if bias2 is None else bias2,
        "stats1_ptr": stats1,
        "stats2_ptr": stats2,
        "z_ptr": z,
        "code_ptr": code,
    }
    plan.normalize(tensors)
    return z, code, stats1, stats2


def _backward(
    g: Tensor,
    link: Tensor | None,
    x1: Tensor,
    x2: Tensor,
    code: Tensor,
    statistics1: Tensor,
    statistics2: Tensor,
    weight1: Tensor | None,
    weight2: Tensor | None,
    constant1: float,
    constant2: float,
    lean: bool,
    channels_last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dγ and dβ of each norm. ``link`` is added to g; of ``x1`` and ``x2`` nothing is read if ``lean``."""
    stored = stored_format(g, channels_last)
    dense_g = g.contiguous(memory_format=stored)
    x1, x2 = (dense_g if x is g else x.contiguous(memory_format=stored) for x in (x1, x2))  # as in `operator.py`
    if link is not None:
        link = link.contiguous(memory_format=stored)
    affine = ((None if weight1 is None else weight1.dtype, None), (None if weight2 is None else weight2.dtype, None))
    plan = _plan(
        sizes_of(dense_g), dense_g.is_contiguous(), g.dtype, affine, (constant1, constant2), lean, True,
        link is not None,
    )  # fmt: skip
    dweight1, dbias1, dweight2, dbias2 = (empty(g, plan.channels) for _ in range(4))
    dx1, dx2 = torch.empty_like(dense_g), torch.empty_like(dense_g)
    tensors = {
        "g_ptr": dense_g,
        "link_ptr": dense_g if link is None else link,
        "x1_ptr": x1,
        "x2_ptr": x2,
        "code_ptr": code,
        "stats1_ptr": statistics1,
        "stats2_ptr": statistics2,
        "weight1_ptr": statistics1 if weight1 is None else weight1,
        "weight2_ptr": statistics2 if weight2 is None else weight2,
        "scratch_ptr": empty(g, plan.scratch),
        "dx1_ptr": dx1,
        "dweight1_ptr": dweight1,
        "dbias1_ptr": dbias1,
        "dx2_ptr": dx2,
        "dweight2_ptr": dweight2,
        "dbias2_ptr": dbias2,
    }
    plan.gradient(tensors)
    return dx1, dweight1, dbias1, dx2, dweight2, dbias2


def _save(ctx: Any, tensors: tuple[Any, ...], options: Options, results: tuple[Any, ...]) -> None:
    """Save the inputs (exact), or codes alone (lean)."""
    x1, weight1, _, x2, weight2, _ = tensors
    _, code, *stats = results
    stored = memory_format(x1)
    inputs = (None, None) if options.lean else (dense(x1), x2.contiguous(memory_format=stored))
    ctx.save_for_backward(*inputs, code, *stats, weight1, weight2)
    ctx.linked = options.linked
    ctx.dtypes = [None if t is None else t.dtype for t in tensors]
    ctx.arguments = (options.constant1, options.constant2, options.lean, stored is not torch.contiguous_format)


def _gradients(ctx: Any, backward: Callable[..., Any], g: Tensor, link: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of both norms' x, γ and β."""
    x1, x2, *others = ctx.saved_tensors
    computed = backward(
        g, link if ctx.linked else None, g if x1 is None else x1, g if x2 is None else x2, *others, *ctx.arguments
    )
    return tuple(map(in_dtype, computed, ctx.dtypes))


_twin_batch_norm = Operator(
    "twin_batch_norm",
    options=Options,
    forward=_forward,
    save=_save,
    backward=_backward,
    gradients=_gradients,
    changes=("running_mean1", "running_var1", "batches1", "running_mean2", "running_var2", "batches2"),
    links=True,
)


def twin_batch_norm(first: Any, second: Any, *, linked: bool) -> tuple[Tensor, Tensor | None]:
    """:func:`normmatters.kernels.dispatch.twin_batch_norm`, which has checked the arguments."""
    x1 = dense(first.input)  # as in `operator.py`
    x2 = second.input.contiguous(memory_format=memory_format(x1))
    tensors: list[Tensor | None] = []
    states: list[Any] = []
    for x, (_, norm, weight, bias, running) in ((x1, first), (x2, second)):
        tensors += [x, *(None if t is None else t.contiguous() for t in (weight, bias))]
        _, _, constant, eps = statistic_of(norm, int(x.numel() // x.shape[1]))
        mean, var, batches, momentum = running
        states += [mean, var, batches, float(momentum), eps, constant]
    save = needs_grad(*tensors)
    options = Options._make([*states, first.norm.memory == "lean", save, linked and save])
    out = _twin_batch_norm(*tensors, options, needs_grad=save)
    return out if options.linked else (out, None)
