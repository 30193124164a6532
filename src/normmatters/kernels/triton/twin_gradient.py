"""The backward pass of two L1 batch norms that are added: z = relu(norm₁(x₁) + norm₂(x₂)), see ``twin_normalize.py``.

g is read for the three sums Σg, Σg·x̂₁ and Σg·x̂₂, and once more for both inputs' gradients.

LINKED: g comes in two parts. Unlike for one norm, whose residual's gradient is their sum and is written anyway, nobody
else wants the sum: both kernels add the parts, which moves as many bytes as writing it and needs no room.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.codes import coarse, has_bit, is_open_code, load_words, rows_above
from normmatters.kernels.triton.coefficients import FROM_CODE, FROM_INPUT, solve
from normmatters.kernels.triton.launch import wait_for_previous
from normmatters.kernels.triton.scale import L1
from normmatters.kernels.triton.tiles import ROWS, add_entries, by_group, load_affine, load_tile, my_part, tile_rows


@triton.jit
def added(g, link):
    """The sum of both parts, rounded as a tensor of its own would be."""
    return (g.to(tl.float32) + link.to(tl.float32)).to(g.dtype).to(tl.float32)


@triton.jit
def twin_reduce_kernel(
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

    They stand in the scratch behind the coefficients. The counts are made here, not in the forward pass, for here are
    registers to spare.
    """
    wait_for_previous(OVERLAP)
    part_ptr = scratch_ptr + 6 * channels
    block, split, splits, col, inside, channel = my_part(cols, spatial, CONTIGUOUS, CONTIGUOUS, BLOCK_C)
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

    entry = block * (BLOCK_C // GROUP) + tl.arange(0, BLOCK_C // GROUP)
    stored = entry < entries
    plane = splits * entries
    out = part_ptr + split * entries + entry
    tl.store(out, by_group(tl.sum(sum_g, axis=0), GROUP, BLOCK_C), mask=stored)
    tl.store(out + plane, by_group(tl.sum(sum1, axis=0), GROUP, BLOCK_C), mask=stored)
    tl.store(out + 2 * plane, by_group(tl.sum(sum2, axis=0), GROUP, BLOCK_C), mask=stored)
    count1 = tl.sum((count & 0xFFFF).to(tl.float32), axis=0)
    count2 = tl.sum((count >> 16).to(tl.float32), axis=0)
    tl.store(out + 3 * plane, by_group(count1, GROUP, BLOCK_C), mask=stored)
    tl.store(out + 4 * plane, by_group(count2, GROUP, BLOCK_C), mask=stored)


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
def twin_gradient_kernel(
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
    coefficient_ptr,
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
    _, split, splits, col, inside, channel = my_part(cols, spatial, CONTIGUOUS, False, BLOCK_C)
    code2_ptr = code_ptr + tl.cast(tl.cdiv(rows, ROWS), tl.int64) * cols
    slope1 = tl.load(coefficient_ptr + channel, mask=inside, other=0.0)[None, None, :]
    tilt1 = tl.load(coefficient_ptr + channels + channel, mask=inside, other=0.0)
    even1 = tl.load(coefficient_ptr + 2 * channels + channel, mask=inside, other=0.0)
    slope2 = tl.load(coefficient_ptr + 3 * channels + channel, mask=inside, other=0.0)[None, None, :]
    tilt2 = tl.load(coefficient_ptr + 4 * channels + channel, mask=inside, other=0.0)
    even2 = tl.load(coefficient_ptr + 5 * channels + channel, mask=inside, other=0.0)
    for tile in range(split, tiles, splits):
        row = tile_rows(tile, BLOCK_R)
        offset = row.to(tl.int64) * cols + col[None, None, :]
        mask = row < rows
        if not EVEN:
            mask = mask & inside[None, None, :]
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
        tl.store(dx1_ptr + offset, dx1.to(dx1_ptr.dtype.element_ty), mask=mask)
        dx2 = tl.where(above2, g * slope2 + (even2 + tilt2)[None, None, :], g * slope2 + even2[None, None, :])
        tl.store(dx2_ptr + offset, dx2.to(dx2_ptr.dtype.element_ty), mask=mask)
