"""The backward pass: its sums per channel, the coefficients of dx, and dx itself.

The sums are Σg and Σg·x̂, in one read of the gradient; x̂ comes from x (exact), from the output (lean: x̂ = (z−β)/γ), or
from 4-bit codes of x̂ (lean with a residual).

dx = A·g + B·[x ≥ μ] + E with per-channel A, B, E (L1); Q·(x−μ) instead of B·[…] for L2; for L∞, Top(k) and range a
handful of elements per channel get an extra term (``scatter_kernel``).
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
    Affine,
    Variant,
    View,
    affine_of,
    channel_blocks,
    empty,
    grid_of,
    has_of,
    is_small,
    next_power_of_2,
    rounding_of,
    sizes_of,
    values_of,
    view_of_shape,
)
from normmatters.kernels.triton.batch_norm.tiles import (
    CODE_STEP,
    EXTREME,
    KINDS,
    L1,
    L2,
    MEAN,
    add_entries,
    add_splits,
    coarse,
    has_bit,
    is_open_code,
    load_affine,
    load_tile,
    load_words,
    program_part,
    store_sums,
    store_tile,
)
from normmatters.kernels.triton.launch import Launch, Launches, cached_plan, wait_for_previous

# What the backward pass knows x̂ from.
FROM_INPUT: tl.constexpr = tl.constexpr(0)
FROM_OUTPUT: tl.constexpr = tl.constexpr(1)
FROM_CODE: tl.constexpr = tl.constexpr(2)


@triton.jit
def is_vague(gamma, beta, ROUNDING: tl.constexpr, TINY: tl.constexpr):
    """Whether rounding the output lost x̂: a step of the output is more than 1/16 of x̂'s unit."""
    return tl.abs(gamma) < 16.0 * (ROUNDING * tl.abs(beta) + TINY)


@triton.jit
def sums_kernel(
    g_ptr,
    link_ptr,
    dresidual_ptr,
    saved_ptr,
    code_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    scratch_ptr,
    rows,
    cols,
    spatial,
    channels,
    entries,
    tiles,
    SOURCE: tl.constexpr,
    MEAN_ONLY: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    LINKED: tl.constexpr,
    ROUNDING: tl.constexpr,
    TINY: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Partial Σg and Σg·t, where t is x−μ, z−β (the sign of x−μ where that is vague) or x̂'s code.

    They stand in the scratch after the coefficients. LINKED: g comes in two parts, and their sum, masked by the ReLU,
    is written to dresidual, rounded as a tensor of its own would be.
    """
    wait_for_previous(OVERLAP)
    part_ptr = scratch_ptr + 4 * channels
    block, split, splits, col, inside, channel = program_part(cols, spatial, CONTIGUOUS, CONTIGUOUS, BLOCK_C)
    gamma, beta = load_affine(weight_ptr, bias_ptr, channel, inside, HAS_WEIGHT, HAS_BIAS)
    center = beta
    if SOURCE == FROM_INPUT:
        center = tl.load(stats_ptr + channel, mask=inside, other=0.0)
    WORDS: tl.constexpr = SOURCE == FROM_CODE or (RELU and SOURCE == FROM_INPUT)
    TENSOR: tl.constexpr = SOURCE != FROM_CODE and not MEAN_ONLY
    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    g_ahead = load_tile(g_ptr, tiles - 1 - split, col, rows, cols, BLOCK_R, EVEN, not LINKED)
    if LINKED:
        link_ahead = load_tile(link_ptr, tiles - 1 - split, col, rows, cols, BLOCK_R, EVEN, False)
    if TENSOR:
        t_ahead = load_tile(saved_ptr, tiles - 1 - split, col, rows, cols, BLOCK_R, EVEN, False)
    if WORDS:
        words_ahead = load_words(code_ptr, tiles - 1 - split, col, rows, cols, BLOCK_R, EVEN)
    for it in range(split, tiles, splits):
        tile = tiles - 1 - it
        following = tl.where(tile >= splits, tile - splits, tiles)
        g = g_ahead.to(tl.float32)
        g_ahead = load_tile(g_ptr, following, col, rows, cols, BLOCK_R, EVEN, not LINKED)
        if LINKED:
            g = (g + link_ahead.to(tl.float32)).to(dresidual_ptr.dtype.element_ty).to(tl.float32)
            link_ahead = load_tile(link_ptr, following, col, rows, cols, BLOCK_R, EVEN, False)
        if WORDS:
            words = words_ahead
            words_ahead = load_words(code_ptr, following, col, rows, cols, BLOCK_R, EVEN)
        if SOURCE == FROM_CODE:
            if RELU:
                g = tl.where(is_open_code(words), g, 0.0)
            second += tl.sum(g * coarse(words), axis=1)
        elif RELU and SOURCE == FROM_INPUT:
            g = tl.where(has_bit(words, 1, 2), g, 0.0)
        if TENSOR:
            t = t_ahead.to(tl.float32)
            t_ahead = load_tile(saved_ptr, following, col, rows, cols, BLOCK_R, EVEN, False)
            if RELU and SOURCE == FROM_OUTPUT:
                g = tl.where(t > 0, g, 0.0)
            t = t - center[None, None, :]
            second += tl.sum(g * t, axis=1)
        first += tl.sum(g, axis=1)
        if LINKED:
            store_tile(dresidual_ptr, g, tile, col, rows, cols, BLOCK_R, EVEN)
    if SOURCE == FROM_OUTPUT:
        vague = is_vague(gamma, beta, ROUNDING, TINY) & inside
        if tl.max(vague.to(tl.int32), axis=0) > 0:
            signed = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
            for it in range(split, tiles, splits):
                g = load_tile(g_ptr, it, col, rows, cols, BLOCK_R, EVEN, not LINKED).to(tl.float32)
                if LINKED:
                    g += load_tile(link_ptr, it, col, rows, cols, BLOCK_R, EVEN, False).to(tl.float32)
                if RELU:
                    g = tl.where(load_tile(saved_ptr, it, col, rows, cols, BLOCK_R, EVEN, False) > 0, g, 0.0)
                words = load_words(code_ptr, it, col, rows, cols, BLOCK_R, EVEN)
                signed += tl.sum(tl.where(has_bit(words, 0, 2), g, -g), axis=1)
            second = tl.where(vague[None, :], signed, second)

    store_sums(part_ptr, tl.sum(first, axis=0), block, split, entries, GROUP, BLOCK_C)
    if not MEAN_ONLY:
        plane = splits * entries
        store_sums(part_ptr + plane, tl.sum(second, axis=0), block, split, entries, GROUP, BLOCK_C)


@triton.jit
def solve(
    first,
    second,
    count,
    inverse,
    ratio,
    gamma,
    beta,
    n,
    constant,
    KIND: tl.constexpr,
    SOURCE: tl.constexpr,
    K: tl.constexpr,
    ROUNDING: tl.constexpr,
    TINY: tl.constexpr,
):
    """dγ and the coefficients of dx = A·g + B·t + E from Σg and Σg·t; and what each extreme element gets."""
    if SOURCE == FROM_INPUT:
        dweight = second * inverse
    elif SOURCE == FROM_OUTPUT:
        vague = is_vague(gamma, beta, ROUNDING, TINY)
        dweight = second * tl.where(vague, ratio / constant, 1.0 / tl.where(vague, 1.0, gamma))
    else:
        dweight = (second + 0.5 * first) * CODE_STEP  # Σg·(code − 7.5)
    slope = gamma * inverse
    even = -slope * first / n
    pull = slope * dweight / n  # (1/D)·mean(ĝx̂)
    tilt = pull * 0.0
    each = pull * 0.0
    if KIND == L1:
        # sign = 2·[x ≥ μ] − 1, and its mean is taken off: only the bit and its mean remain.
        tilt = -2.0 * constant * ratio * pull
        even -= tilt * count / n
    elif KIND == L2:
        tilt = -constant * constant * pull * inverse
    elif KIND != MEAN:
        each = -constant * ratio * pull * n / K
    return dweight, slope, tilt, even, each


@triton.jit
def coefficients_kernel(
    scratch_ptr,
    count_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    dweight_ptr,
    dbias_ptr,
    channels,
    entries,
    splits,
    per_channel,
    n,
    constant,
    KIND: tl.constexpr,
    SOURCE: tl.constexpr,
    K: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDING: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """dγ, dβ and the coefficients of dx = A·g + B·t + E: coefficient[0..2]; [3] is what each extreme element gets."""
    part_ptr = scratch_ptr + 4 * channels
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < channels
    # What the forward pass left is there: the kernel before, which is ours, has waited for it.
    inverse = tl.load(stats_ptr + channels + channel, mask=mask, other=1.0)
    ratio = tl.load(stats_ptr + 2 * channels + channel, mask=mask, other=0.0)
    gamma, beta = load_affine(weight_ptr, bias_ptr, channel, mask, HAS_WEIGHT, HAS_BIAS)
    count = inverse
    if KIND == L1:
        count, _, _ = add_entries(count_ptr, 0, channel, mask, splits, entries, per_channel, 1, BLOCK_E, BLOCK_C)
    wait_for_previous(OVERLAP)
    PLANES: tl.constexpr = 1 if KIND == MEAN else 2
    first, second, _ = add_entries(
        part_ptr, splits * entries, channel, mask, splits, entries, per_channel, PLANES, BLOCK_E, BLOCK_C
    )
    dweight, slope, tilt, even, each = solve(
        first, second, count, inverse, ratio, gamma, beta, n, constant, KIND, SOURCE, K, ROUNDING, TINY
    )
    tl.store(dbias_ptr + channel, first, mask=mask)
    tl.store(dweight_ptr + channel, dweight, mask=mask)

    tl.store(scratch_ptr + channel, slope, mask=mask)
    tl.store(scratch_ptr + channels + channel, tilt, mask=mask)
    tl.store(scratch_ptr + 2 * channels + channel, even, mask=mask)
    tl.store(scratch_ptr + 3 * channels + channel, each, mask=mask)


@triton.jit
def input_gradient_kernel(
    masked_ptr,
    saved_ptr,
    code_ptr,
    stats_ptr,
    scratch_ptr,
    count_ptr,
    weight_ptr,
    bias_ptr,
    index_ptr,
    dx_ptr,
    dresidual_ptr,
    dweight_ptr,
    dbias_ptr,
    rows,
    cols,
    spatial,
    channels,
    tiles,
    constant,
    KIND: tl.constexpr,
    K: tl.constexpr,
    SOLVE: tl.constexpr,
    SOURCE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDING: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    EVEN: tl.constexpr,
    RELU: tl.constexpr,
    WRITE_RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """dx = A·g + B·t + E, and the residual's gradient: the masked g.

    SOLVE: there are partial sums instead of coefficients, and the first programs write dγ and dβ too. EARLY: the masked
    gradient is not what the kernel before writes, and may not be masked yet.
    """
    _, split, splits, col, inside, channel = program_part(cols, spatial, CONTIGUOUS, False, BLOCK_C)
    # The gradient and the codes are there: the kernel before, which is ours, has waited for them.
    if EARLY:
        g_ahead = load_tile(masked_ptr, split, col, rows, cols, BLOCK_R, EVEN, False)
    if CODE_BITS > 0:
        words_ahead = load_words(code_ptr, split, col, rows, cols, BLOCK_R, EVEN)
    if KIND == L2:
        x_ahead = load_tile(saved_ptr, split, col, rows, cols, BLOCK_R, EVEN, False)
    if SOLVE:
        inverse = tl.load(stats_ptr + channels + channel, mask=inside, other=1.0)
        ratio = tl.load(stats_ptr + 2 * channels + channel, mask=inside, other=0.0)
        gamma, beta = load_affine(weight_ptr, bias_ptr, channel, inside, HAS_WEIGHT, HAS_BIAS)
        count = inverse
        if KIND == L1:
            count = add_splits(count_ptr, channel, inside, channels, SPLITS, BLOCK_S).to(tl.float32)
    wait_for_previous(OVERLAP)
    if not EARLY:
        g_ahead = load_tile(masked_ptr, split, col, rows, cols, BLOCK_R, EVEN, False)
    if SOLVE:
        part_ptr = scratch_ptr + 4 * channels
        first = add_splits(part_ptr, channel, inside, channels, SPLITS, BLOCK_S)
        second = first
        if KIND != MEAN:
            second = add_splits(part_ptr + SPLITS * channels, channel, inside, channels, SPLITS, BLOCK_S)
        dweight, slope, tilt, even, each = solve(
            first, second, count, inverse, ratio, gamma, beta, rows * 1.0, constant, KIND, SOURCE, 1, ROUNDING, TINY
        )
        if split == 0:
            tl.store(dbias_ptr + channel, first, mask=inside)
            tl.store(dweight_ptr + channel, dweight, mask=inside)
    else:
        slope = tl.load(scratch_ptr + channel, mask=inside, other=0.0)
        tilt = tl.load(scratch_ptr + channels + channel, mask=inside, other=0.0)
        even = tl.load(scratch_ptr + 2 * channels + channel, mask=inside, other=0.0)
    slope = slope[None, None, :]
    if KIND == EXTREME:
        # The sparse term sums to zero over a channel: what the extremes get, all the others give.
        each = tl.load(scratch_ptr + 3 * channels + channel, mask=inside, other=0.0)
        signs = tl.zeros((BLOCK_C,), tl.float32)
        for j in range(K):
            at = tl.load(index_ptr + j * channels + channel, mask=inside, other=0)
            signs += tl.where(at >= 0, 1.0, -1.0)
        even -= each * signs / (rows * 1.0 * spatial)
    if KIND == L2:
        mean = tl.load(stats_ptr + channel, mask=inside, other=0.0)[None, None, :]

    for it in range(split, tiles, splits):
        g = g_ahead.to(tl.float32)
        g_ahead = load_tile(masked_ptr, it + splits, col, rows, cols, BLOCK_R, EVEN, False)
        if CODE_BITS > 0:
            words = words_ahead
            words_ahead = load_words(code_ptr, it + splits, col, rows, cols, BLOCK_R, EVEN)
        if CODE_BITS == 4:
            is_open = is_open_code(words)
            above = has_bit(words, 3, 4)
        elif CODE_BITS == 2:
            is_open = has_bit(words, 1, 2)
            above = has_bit(words, 0, 2)
        if RELU:
            g = tl.where(is_open, g, 0.0)
        if KIND == L1:
            # Both sides from g, so that the choice stays in g's layout.
            dx = tl.where(above, g * slope + (even + tilt)[None, None, :], g * slope + even[None, None, :])
        else:
            dx = g * slope + even[None, None, :]
        if KIND == L2:
            dx += tilt[None, None, :] * (x_ahead.to(tl.float32) - mean)
            x_ahead = load_tile(saved_ptr, it + splits, col, rows, cols, BLOCK_R, EVEN, False)
        store_tile(dx_ptr, dx, it, col, rows, cols, BLOCK_R, EVEN)
        if WRITE_RESIDUAL:
            store_tile(dresidual_ptr, g, it, col, rows, cols, BLOCK_R, EVEN)


@triton.jit
def scatter_kernel(
    dx_ptr, index_ptr, scratch_ptr, channels, K: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr
):
    """Adds the extra term of the K extreme elements of each channel."""
    wait_for_previous(OVERLAP)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < channels
    each = tl.load(scratch_ptr + 3 * channels + channel, mask=mask, other=0.0)
    for j in range(K):
        at = tl.load(index_ptr + j * channels + channel, mask=mask, other=0)
        offset = tl.where(at >= 0, at, ~at)
        old = tl.load(dx_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        new = old + tl.where(at >= 0, each, -each)
        tl.store(dx_ptr + offset, new.to(dx_ptr.dtype.element_ty), mask=mask)


# Launches -------------------------------------------------------------------------------------------------------------


class GradientPlan(NamedTuple):
    """The launches of :func:`gradient` at one shape; scratch holds the coefficients, then the partial sums."""

    launches: Launches
    channels: int
    scratch: int


def coefficients_launch(view: View, values: dict[str, Any]) -> Launch:
    """The launch that makes dγ, dβ and dx's coefficients from the partial sums, with the ``values`` of these."""
    block_c, block_e, programs = channel_blocks(view)
    return Launch(coefficients_kernel, (programs, 1), values | {"BLOCK_E": block_e, "BLOCK_C": block_c}, num_warps=8)


@cached_plan
def _gradient_plan(
    sizes: tuple[int, ...],
    contiguous: bool,
    dtype: torch.dtype,
    affine: Affine,
    variant: Variant,
    constant: float,
    need_dresidual: bool,
    linked: bool,
) -> GradientPlan:
    view = view_of_shape(sizes, contiguous)
    tiling = layout.apply_tiling_of(view, dtype.itemsize)
    kind, relu, lean, terms = variant.kind, variant.relu, variant.lean, variant.selected
    source = FROM_INPUT.value
    if lean:
        source = FROM_OUTPUT.value if variant.inverts_output else FROM_CODE.value
    solves = is_small(view, dtype.itemsize) and not terms
    values = {
        **values_of(view, tiling),
        **has_of(affine),
        **rounding_of(dtype),
        "constant": float(constant),
        "KIND": KINDS[kind],
        "SOURCE": source,
        "K": 1 if kind == "range" else max(terms, 1),
    }
    grid, num_warps = grid_of(view, tiling), tiling.num_warps
    sums = Launch(
        sums_kernel,
        grid,
        {**values, "MEAN_ONLY": kind == "mean", "RELU": relu, "LINKED": linked},
        num_warps=num_warps,
        # Three tensors on their way need more room.
        maxnreg=None if linked and not lean else MAX_REGISTERS,
    )
    # What the sums kernel wrote of a linked gradient has passed the ReLU already.
    masks = relu and not linked
    input_gradient = Launch(
        input_gradient_kernel,
        grid,
        {
            **values,
            "K": terms,
            "SOLVE": solves,
            "CODE_BITS": variant.code_bits if masks or kind == "l1" else 0,
            "RELU": masks,
            "WRITE_RESIDUAL": masks and need_dresidual,
            "EARLY": not (linked and solves),  # the sums kernel writes a linked gradient
        },
        num_warps=num_warps,
        maxnreg=MAX_REGISTERS,
    )
    launches = [sums, *([] if solves else [coefficients_launch(view, values)]), input_gradient]
    if terms:
        block = min(128, next_power_of_2(view.channels))
        scatter = values | {"K": terms, "BLOCK_C": block}
        launches.append(Launch(scatter_kernel, (-(-view.channels // block), 1), scatter, num_warps=1))
    sums_in_all = (1 if kind == "mean" else 2) * tiling.splits * tiling.entries(view)
    return GradientPlan(Launches(*launches), view.channels, 4 * view.channels + sums_in_all)


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
    variant: Variant,
    constant: float,
    *,
    need_dresidual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dx, dγ, dβ and the residual's gradient (None where it is g itself or not wanted). ``link`` is added to g."""
    linked = link is not None
    plan = _gradient_plan(
        sizes_of(g), g.is_contiguous(), g.dtype, affine_of(weight, bias), variant, constant, need_dresidual, linked
    )
    scratch, dweight, dbias = empty(g, plan.scratch), empty(g, plan.channels), empty(g, plan.channels)
    dx = torch.empty_like(g)
    # Without a ReLU the residual's gradient is g itself: the caller returns that.
    dresidual = torch.empty_like(g) if linked or (need_dresidual and variant.relu) else dx
    tensors = {
        "g_ptr": g,
        "link_ptr": g if link is None else link,
        "masked_ptr": dresidual if linked else g,
        "saved_ptr": saved,
        "code_ptr": code,
        "count_ptr": count,
        "stats_ptr": statistics,
        "index_ptr": index if index is not None and variant.selected else statistics,
        "weight_ptr": statistics if weight is None else weight,
        "bias_ptr": statistics if bias is None else bias,
        "scratch_ptr": scratch,
        "dx_ptr": dx,
        "dresidual_ptr": dresidual,
        "dweight_ptr": dweight,
        "dbias_ptr": dbias,
    }
    plan.launches(tensors)
    return dx, dweight, dbias, dresidual if need_dresidual and dresidual is not dx else None
