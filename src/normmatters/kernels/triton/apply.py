"""The normalization itself, and its backward from the output and a few bits an element.

Forward:  z = act((x−μ)/D·γ + β + residual), and of every element a code for the backward pass.
Backward: dx = A·g + B·[x ≥ μ] + E with per-channel A, B, E (L1); Q·(x−μ) instead of B·[…] for L2; for L∞, Top(k) and
range a handful of elements a channel get an extra term (``scatter_kernel``). The two sums it needs, Σg and Σg·x̂, come
from x (exact), from the output (lean: x̂ = (z−β)/γ), or from 4-bit codes of x̂ (lean with a residual).

Codes, four rows in one word. g is the gradient behind the ReLU, so "open" elements are those with z > 0.
- two bits: bit 0 = [x ≥ μ], bit 1 = open. Where γ is too small against β for (z−β)/γ to mean anything, Σg·x̂ is taken
  from the sign alone, times the mean of |x̂|.
- four bits: 0 and 15 = closed; 1 … 14 = open, x̂ ≈ 0.4·(code − 7.5). The top bit is [x ≥ μ] in either case.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.launch import wait_for_previous
from normmatters.kernels.triton.stats import (
    EXTREME,
    L1,
    L2,
    MEAN,
    ROWS,
    add_entries,
    add_splits,
    by_group,
    load_tile,
    scale_factors,
    tile_rows,
    whole_statistics,
    write_statistics,
)

# What the backward pass knows x̂ from.
FROM_INPUT: tl.constexpr = tl.constexpr(0)
FROM_OUTPUT: tl.constexpr = tl.constexpr(1)
FROM_CODE: tl.constexpr = tl.constexpr(2)

STEP: tl.constexpr = tl.constexpr(0.4)


@triton.jit
def load_affine(weight_ptr, bias_ptr, channel, mask, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    gamma = tl.where(mask, 1.0, 1.0)
    beta = gamma * 0.0
    if HAS_WEIGHT:
        gamma = tl.load(weight_ptr + channel, mask=mask, other=1.0).to(tl.float32)
    if HAS_BIAS:
        beta = tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    return gamma, beta


@triton.jit
def is_vague(gamma, beta, ROUNDING: tl.constexpr, TINY: tl.constexpr):
    """Whether rounding the output lost x̂: a step of the output is more than 1/16 of x̂'s unit."""
    return tl.abs(gamma) < 16.0 * (ROUNDING * tl.abs(beta) + TINY)


@triton.jit
def normalize_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    scratch_ptr,
    running_mean_ptr,
    running_var_ptr,
    batches_ptr,
    z_ptr,
    code_ptr,
    count_ptr,
    rows,
    cols,
    spatial,
    channels,
    entries,
    tiles,
    constant,
    momentum,
    eps,
    unbias,
    KIND: tl.constexpr,
    FINALIZE: tl.constexpr,
    HAS_RUNNING: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    CODE_BITS: tl.constexpr,
    COUNT: tl.constexpr,
    EARLY: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """z and its codes. EARLY: the kernel before is the one that made the statistics, and has waited for all else.

    FINALIZE: there are partial sums instead of statistics, and the first programs write these too.
    """
    if not EARLY:
        wait_for_previous(OVERLAP)
    pid = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    col = pid * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = col < cols
    channel = col
    if CONTIGUOUS:
        channel = col // spatial
    gamma, beta = load_affine(weight_ptr, bias_ptr, channel, inside, HAS_WEIGHT, HAS_BIAS)
    # Against the way of the kernel before, which went forwards: the cache holds what it read last.
    start = tiles - 1 - split if FINALIZE else split
    ahead = load_tile(x_ptr, start, col, rows, cols, BLOCK_R, EVEN, False)
    if HAS_RESIDUAL:
        residual_ahead = load_tile(residual_ptr, start, col, rows, cols, BLOCK_R, EVEN, False)
    if EARLY:
        wait_for_previous(OVERLAP)
    if FINALIZE:
        mean, scale = whole_statistics(
            x_ptr, scratch_ptr, channel, inside, channels, rows, constant, KIND, SPLITS, BLOCK_S
        )
        inverse, _ = scale_factors(mean, scale, eps, KIND)
        if split == 0:
            write_statistics(
                stats_ptr, running_mean_ptr, running_var_ptr, batches_ptr, channel, inside, channels,
                mean, scale, momentum, eps, unbias, HAS_RUNNING, COUNTS, KIND,
            )  # fmt: skip
    else:
        mean = tl.load(stats_ptr + channel, mask=inside, other=0.0)
        inverse = tl.load(stats_ptr + channels + channel, mask=inside, other=0.0)
    slope = (gamma * inverse)[None, None, :]
    count = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for it in range(split, tiles, splits):
        tile = it
        following = it + splits
        if FINALIZE:
            tile = tiles - 1 - it
            following = tl.where(tile >= splits, tile - splits, tiles)
        row = tile_rows(tile, BLOCK_R)
        mask = row < rows
        if not EVEN:
            mask = mask & inside[None, None, :]
        d = ahead.to(tl.float32) - mean[None, None, :]
        if not EVEN and COUNT:
            d = tl.where(mask, d, -1e30)  # what lies outside is not above the mean
        ahead = load_tile(x_ptr, following, col, rows, cols, BLOCK_R, EVEN, False)
        y = d * slope + beta[None, None, :]
        if HAS_RESIDUAL:
            y += residual_ahead.to(tl.float32)
            residual_ahead = load_tile(residual_ptr, following, col, rows, cols, BLOCK_R, EVEN, False)
        z = y
        if RELU:
            # NaN passes through, as in PyTorch.
            z = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(z_ptr + row.to(tl.int64) * cols + col[None, None, :], z.to(z_ptr.dtype.element_ty), mask=mask)
        if CODE_BITS == 2:
            word = pack(d >= 0, 1)
            if RELU:
                word += pack(y > 0, 2)
        if CODE_BITS == 4:
            code = coarse_code(d, inverse)
            if RELU:
                code = tl.where(y > 0, code, tl.where(code >= 8, 15, 0))
            word = pack_codes(code)
        if CODE_BITS > 0:
            store_words(code_ptr, word, tile, col, rows, cols, BLOCK_R, EVEN)
            if COUNT:
                count += rows_above(word, CODE_BITS)
    if COUNT:
        entry = pid * (BLOCK_C // GROUP) + tl.arange(0, BLOCK_C // GROUP)
        total = by_group(tl.sum(count, axis=0), GROUP, BLOCK_C)
        tl.store(count_ptr + split * entries + entry, total.to(count_ptr.dtype.element_ty), mask=entry < entries)


@triton.jit
def pack(bits, VALUE: tl.constexpr):
    """Two bits a row, of which these give VALUE: [BLOCK_R, ROWS, BLOCK_C] -> [BLOCK_R, BLOCK_C]."""
    weight = VALUE << (tl.arange(0, ROWS) * 2)
    return tl.sum(tl.where(bits, weight[None, :, None], 0), axis=1)


@triton.jit
def coarse_code(d, inverse):
    """The four-bit code of x̂ = d·inverse, 1 … 14.

    Near 2²³ floats are whole numbers: adding that rounds, and the code stands in the last four bits. The half is taken
    off first, as it cannot be said at that size; then the top bit is [x ≥ μ], exactly.
    """
    level = (d * (inverse * (1.0 / STEP))[None, None, :] - 0.5) + (8388608.0 + 8.0)
    level = tl.minimum(tl.maximum(level, 8388608.0 + 1.0), 8388608.0 + 14.0)
    return level.to(tl.int32, bitcast=True) & 15


@triton.jit
def pack_codes(code):
    """Four bits a row: [BLOCK_R, ROWS, BLOCK_C] -> [BLOCK_R, BLOCK_C]."""
    return tl.sum(code << (tl.arange(0, ROWS) * 4)[None, :, None], axis=1)


@triton.jit
def rows_above(word, CODE_BITS: tl.constexpr):
    """In how many of a word's rows x ≥ μ: bit 0 of two-bit codes, the top bit of four-bit codes."""
    if CODE_BITS == 2:
        pairs = (word & 0x11) + ((word >> 2) & 0x11)
        return (pairs + (pairs >> 4)) & 7
    tops = (word >> 3) & 0x1111
    return (tops + (tops >> 4) + (tops >> 8) + (tops >> 12)) & 7


@triton.jit
def load_words(code_ptr, tile, col, rows, cols, BLOCK_R: tl.constexpr, EVEN: tl.constexpr):
    """The packed codes of a tile, [BLOCK_R, BLOCK_C]."""
    packed = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = (packed * ROWS < rows)[:, None]
    if not EVEN:
        mask = mask & (col < cols)[None, :]
    return tl.load(code_ptr + packed.to(tl.int64)[:, None] * cols + col[None, :], mask=mask, other=0)


@triton.jit
def store_words(code_ptr, words, tile, col, rows, cols, BLOCK_R: tl.constexpr, EVEN: tl.constexpr):
    packed = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = (packed * ROWS < rows)[:, None]
    if not EVEN:
        mask = mask & (col < cols)[None, :]
    at = packed.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(code_ptr + at, words.to(code_ptr.dtype.element_ty), mask=mask)


@triton.jit
def has_bit(words, FIRST: tl.constexpr, BITS: tl.constexpr):
    """Whether bit FIRST of each row's code is set: [BLOCK_R, BLOCK_C] -> [BLOCK_R, ROWS, BLOCK_C]."""
    weight = (1 << FIRST) << (tl.arange(0, ROWS) * BITS)
    return (words.to(tl.int32)[:, None, :] & weight[None, :, None]) != 0


@triton.jit
def is_open_code(words):
    """Whether four-bit codes are neither 0 nor 15, i.e. have two neighbouring bits that differ; all rows at once."""
    w = words.to(tl.int32)
    differ = (w ^ (w >> 1)) & 0x7777
    return has_bit(differ | (differ >> 1) | (differ >> 2), 0, 4)


@triton.jit
def coarse(words):
    """code − 8 of four-bit codes: x̂ in steps, less the half that one sum a channel puts back."""
    code = (words.to(tl.int32)[:, None, :] >> (tl.arange(0, ROWS) * 4)[None, :, None]) & 15
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 8.0)


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
    pid = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    if CONTIGUOUS:
        pid = tl.num_programs(0) - 1 - pid
    col = pid * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = col < cols
    channel = col
    if CONTIGUOUS:
        channel = col // spatial
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

    entry = pid * (BLOCK_C // GROUP) + tl.arange(0, BLOCK_C // GROUP)
    out = part_ptr + split * entries + entry
    tl.store(out, by_group(tl.sum(first, axis=0), GROUP, BLOCK_C), mask=entry < entries)
    if not MEAN_ONLY:
        tl.store(out + splits * entries, by_group(tl.sum(second, axis=0), GROUP, BLOCK_C), mask=entry < entries)


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
        dweight = (second + 0.5 * first) * STEP  # Σg·(code − 7.5)
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
def gradient_kernel(
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
    coefficient_ptr = scratch_ptr
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

    tl.store(coefficient_ptr + channel, slope, mask=mask)
    tl.store(coefficient_ptr + channels + channel, tilt, mask=mask)
    tl.store(coefficient_ptr + 2 * channels + channel, even, mask=mask)
    tl.store(coefficient_ptr + 3 * channels + channel, each, mask=mask)


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
    pid = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    col = pid * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = col < cols
    channel = col
    if CONTIGUOUS:
        channel = col // spatial
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
