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

import triton
import triton.language as tl

from normmatters.kernels.triton.launch import wait_for_previous
from normmatters.kernels.triton.tiles import load_affine

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
def pooled_reduce_kernel(
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

    They stand in the scratch behind the coefficients, as ``gradient_kernel`` expects them.
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
    coefficient_ptr,
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
    slope = tl.load(coefficient_ptr + col, mask=inside, other=0.0)[None, :]
    tilt = tl.load(coefficient_ptr + cols + col, mask=inside, other=0.0)[None, :]
    even = tl.load(coefficient_ptr + 2 * cols + col, mask=inside, other=0.0)[None, :]
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
