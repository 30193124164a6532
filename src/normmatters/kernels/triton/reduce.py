"""The backward pass's two sums a channel, Σg and Σg·x̂, in one read of the gradient.

x̂ comes from x (exact), from the output (lean: x̂ = (z−β)/γ), or from 4-bit codes of x̂ (lean with a residual).
"""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.codes import coarse, has_bit, is_open_code, load_words
from normmatters.kernels.triton.coefficients import FROM_CODE, FROM_INPUT, FROM_OUTPUT, is_vague
from normmatters.kernels.triton.launch import wait_for_previous
from normmatters.kernels.triton.tiles import by_group, load_affine, load_tile, my_part, tile_rows


@triton.jit
def reduce_kernel(
    g_ptr,
    link_ptr,
    d_ptr,
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

    They stand in the scratch behind the coefficients. LINKED: g comes in two parts, and their sum behind the ReLU is
    written to d, rounded as a tensor of its own would be.
    """
    wait_for_previous(OVERLAP)
    part_ptr = scratch_ptr + 4 * channels
    block, split, splits, col, inside, channel = my_part(cols, spatial, CONTIGUOUS, CONTIGUOUS, BLOCK_C)
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
            g = (g + link_ahead.to(tl.float32)).to(d_ptr.dtype.element_ty).to(tl.float32)
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
            row = tile_rows(tile, BLOCK_R)
            mask = row < rows
            if not EVEN:
                mask = mask & inside[None, None, :]
            tl.store(d_ptr + row.to(tl.int64) * cols + col[None, None, :], g.to(d_ptr.dtype.element_ty), mask=mask)
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

    entry = block * (BLOCK_C // GROUP) + tl.arange(0, BLOCK_C // GROUP)
    out = part_ptr + split * entries + entry
    tl.store(out, by_group(tl.sum(first, axis=0), GROUP, BLOCK_C), mask=entry < entries)
    if not MEAN_ONLY:
        tl.store(out + splits * entries, by_group(tl.sum(second, axis=0), GROUP, BLOCK_C), mask=entry < entries)
