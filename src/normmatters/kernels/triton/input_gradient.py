"""The gradient of the input from the gradient of the output and a few bits an element.

dx = A·g + B·[x ≥ μ] + E with per-channel A, B, E (L1); Q·(x−μ) instead of B·[…] for L2; for L∞, Top(k) and range a
handful of elements a channel get an extra term (``scatter_kernel``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.codes import has_bit, is_open_code, load_words
from normmatters.kernels.triton.coefficients import solve
from normmatters.kernels.triton.launch import wait_for_previous
from normmatters.kernels.triton.scale import EXTREME, L1, L2, MEAN
from normmatters.kernels.triton.tiles import add_splits, load_affine, load_tile, my_part, tile_rows


@triton.jit
def input_gradient_kernel(
    g_ptr,
    saved_ptr,
    code_ptr,
    stats_ptr,
    coefficient_ptr,
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

    SOLVE: there are partial sums instead of coefficients, and the first programs write dγ and dβ too. EARLY: g is not
    what the kernel before writes.
    """
    _, split, splits, col, inside, channel = my_part(cols, spatial, CONTIGUOUS, False, BLOCK_C)
    # The gradient and the codes are there: the kernel before, which is ours, has waited for them.
    if EARLY:
        g_ahead = load_tile(g_ptr, split, col, rows, cols, BLOCK_R, EVEN, False)
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
        g_ahead = load_tile(g_ptr, split, col, rows, cols, BLOCK_R, EVEN, False)
    if SOLVE:
        part_ptr = coefficient_ptr + 4 * channels
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
        slope = tl.load(coefficient_ptr + channel, mask=inside, other=0.0)
        tilt = tl.load(coefficient_ptr + channels + channel, mask=inside, other=0.0)
        even = tl.load(coefficient_ptr + 2 * channels + channel, mask=inside, other=0.0)
    slope = slope[None, None, :]
    if KIND == EXTREME:
        # The sparse term sums to zero over a channel: what the extremes get, all the others give.
        each = tl.load(coefficient_ptr + 3 * channels + channel, mask=inside, other=0.0)
        signs = tl.zeros((BLOCK_C,), tl.float32)
        for j in range(K):
            at = tl.load(index_ptr + j * channels + channel, mask=inside, other=0)
            signs += tl.where(at >= 0, 1.0, -1.0)
        even -= each * signs / (rows * 1.0 * spatial)
    if KIND == L2:
        mean = tl.load(stats_ptr + channel, mask=inside, other=0.0)[None, None, :]

    for it in range(split, tiles, splits):
        row = tile_rows(it, BLOCK_R)
        offset = row.to(tl.int64) * cols + col[None, None, :]
        mask = row < rows
        if not EVEN:
            mask = mask & inside[None, None, :]
        g = g_ahead.to(tl.float32)
        g_ahead = load_tile(g_ptr, it + splits, col, rows, cols, BLOCK_R, EVEN, False)
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
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WRITE_RESIDUAL:
            tl.store(dresidual_ptr + offset, g.to(dresidual_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scatter_kernel(
    dx_ptr, index_ptr, coefficient_ptr, channels, K: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr
):
    """Adds the extra term of the K extreme elements of each channel."""
    wait_for_previous(OVERLAP)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < channels
    each = tl.load(coefficient_ptr + 3 * channels + channel, mask=mask, other=0.0)
    for j in range(K):
        at = tl.load(index_ptr + j * channels + channel, mask=mask, other=0)
        offset = tl.where(at >= 0, at, ~at)
        old = tl.load(dx_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        new = old + tl.where(at >= 0, each, -each)
        tl.store(dx_ptr + offset, new.to(dx_ptr.dtype.element_ty), mask=mask)
