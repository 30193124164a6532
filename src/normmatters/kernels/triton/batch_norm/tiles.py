"""Device functions of all batch norm kernels: tiles of a view (see ``layout.py``), partial sums, statistics, codes.

No atomics anywhere: every program leaves its partial sums, and one small kernel adds them in a fixed order, so results
are bitwise equal from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.batch_norm.layout import ROWS_PER_CODE

ROWS: tl.constexpr = tl.constexpr(ROWS_PER_CODE)


@triton.jit
def program_part(cols, spatial, CONTIGUOUS: tl.constexpr, LAST_FIRST: tl.constexpr, BLOCK_C: tl.constexpr):
    """This program's block of columns and its split of the rows, of how many, then the columns, inside, their channels.

    LAST_FIRST: the last block comes first, for what the layer before wrote last is still in the cache.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    if LAST_FIRST:
        block = tl.num_programs(0) - 1 - block
    col = block * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = col < cols
    channel = col
    if CONTIGUOUS:
        channel = col // spatial
    return block, split, splits, col, inside, channel


@triton.jit
def tile_rows(tile, BLOCK_R: tl.constexpr):
    """The rows of a tile, [BLOCK_R, ROWS, 1]: packed row q holds rows ROWS·q and the next ones.

    They are the middle axis because the compiler gives threads to the last axis, then the first: what remains
    in the middle stays in one thread, and sums and packing along it need no exchange.
    """
    packed = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    return packed[:, None, None] * ROWS + tl.arange(0, ROWS)[None, :, None]


@triton.jit
def load_tile(ptr, tile, col, rows, cols, BLOCK_R: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr):
    """A tile, [BLOCK_R, ROWS, BLOCK_C]; zero outside, so that a tile after the last one reads nothing.

    KEEP says that the next kernel reads it again; other tiles leave the cache first.
    """
    row = tile_rows(tile, BLOCK_R)
    mask = row < rows
    if not EVEN:
        mask = mask & (col < cols)[None, None, :]
    POLICY: tl.constexpr = "" if KEEP else "evict_first"
    return tl.load(ptr + row.to(tl.int64) * cols + col[None, None, :], mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def store_tile(ptr, value, tile, col, rows, cols, BLOCK_R: tl.constexpr, EVEN: tl.constexpr):
    row = tile_rows(tile, BLOCK_R)
    mask = row < rows
    if not EVEN:
        mask = mask & (col < cols)[None, None, :]
    tl.store(ptr + row.to(tl.int64) * cols + col[None, None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def by_group(acc, GROUP: tl.constexpr, BLOCK_C: tl.constexpr):
    """Adds neighbouring columns of one channel: [BLOCK_C] -> [BLOCK_C // GROUP]."""
    if GROUP == 1:
        return acc
    return tl.sum(tl.reshape(acc, (BLOCK_C // GROUP, GROUP)), axis=1)


@triton.jit
def store_sums(part_ptr, sums, block, split, entries, GROUP: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program's partial sums, [BLOCK_C], into [split, entry]."""
    entry = block * (BLOCK_C // GROUP) + tl.arange(0, BLOCK_C // GROUP)
    sums = by_group(sums, GROUP, BLOCK_C).to(part_ptr.dtype.element_ty)
    tl.store(part_ptr + split * entries + entry, sums, mask=entry < entries)


@triton.jit
def add_splits(part_ptr, channel, mask, channels, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Σ over partial sums [SPLITS, channels], all in one load: a loop would wait for memory once a split."""
    split = tl.arange(0, BLOCK_S)
    at = part_ptr + split[:, None] * channels + channel[None, :]
    return tl.sum(tl.load(at, mask=(split < SPLITS)[:, None] & mask[None, :], other=0.0), axis=0)


@triton.jit
def add_entries(
    part_ptr,
    plane,
    channel,
    mask,
    splits,
    entries,
    per_channel,
    PLANES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Adds the partial sums of a channel over splits and columns, in a fixed order, for up to three statistics."""
    a = tl.zeros((BLOCK_E, BLOCK_C), tl.float32)
    b = tl.zeros((BLOCK_E, BLOCK_C), tl.float32)
    c = tl.zeros((BLOCK_E, BLOCK_C), tl.float32)
    for e0 in range(0, splits * per_channel, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        offset = (e // per_channel * entries + e % per_channel)[:, None] + (channel * per_channel)[None, :]
        m = (e < splits * per_channel)[:, None] & mask[None, :]
        a += tl.load(part_ptr + offset, mask=m, other=0.0)
        if PLANES > 1:
            b += tl.load(part_ptr + plane + offset, mask=m, other=0.0)
        if PLANES > 2:
            c += tl.load(part_ptr + 2 * plane + offset, mask=m, other=0.0)
    return tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0)


@triton.jit
def middle_value(x_ptr, channel, mask, rows, cols, spatial):
    """The middle one of three values of a channel: taken off before summing, it keeps a large common offset out."""
    base = x_ptr + channel * spatial
    a = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(base + tl.cast(rows // 2, tl.int64) * cols + spatial // 2, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(base + tl.cast(rows - 1, tl.int64) * cols + spatial - 1, mask=mask, other=0.0).to(tl.float32)
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def load_affine(weight_ptr, bias_ptr, channel, mask, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    gamma = tl.where(mask, 1.0, 1.0)
    beta = gamma * 0.0
    if HAS_WEIGHT:
        gamma = tl.load(weight_ptr + channel, mask=mask, other=1.0).to(tl.float32)
    if HAS_BIAS:
        beta = tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    return gamma, beta


# Statistics: their kinds, and D, by which the deviations are divided --------------------------------------------------

# Kinds of statistic, as the kernels see them.
L1: tl.constexpr = tl.constexpr(0)
L2: tl.constexpr = tl.constexpr(1)
EXTREME: tl.constexpr = tl.constexpr(2)  # L∞ and Top(k)
RANGE: tl.constexpr = tl.constexpr(3)
MEAN: tl.constexpr = tl.constexpr(4)

#: The same for launches, by the names that :class:`normmatters.norm.Norm` gives as its kind.
KINDS = {
    "l1": L1.value,
    "l2": L2.value,
    "linf": EXTREME.value,
    "topk": EXTREME.value,
    "range": RANGE.value,
    "mean": MEAN.value,
}


@triton.jit
def scale_factors(mean, scale, eps, KIND: tl.constexpr):
    """1/D with D = √(s²+eps), and s/D."""
    if KIND == MEAN:
        return mean * 0.0 + 1.0, mean * 0.0
    inverse = 1.0 / tl.sqrt(scale * scale + eps)
    return inverse, scale * inverse


@triton.jit
def write_statistics(
    stats_ptr,
    running_mean_ptr,
    running_var_ptr,
    batches_ptr,
    channel,
    mask,
    channels,
    mean,
    scale,
    momentum,
    eps,
    unbias,
    HAS_RUNNING: tl.constexpr,
    COUNTS: tl.constexpr,
    KIND: tl.constexpr,
):
    """stats[0] = μ, stats[1] = 1/D, stats[2] = s/D; the running statistics move by ``momentum``.

    COUNTS: the program that has channel 0 adds one to the number of batches.
    """
    inverse, ratio = scale_factors(mean, scale, eps, KIND)
    tl.store(stats_ptr + channel, mean, mask=mask)
    tl.store(stats_ptr + channels + channel, inverse, mask=mask)
    tl.store(stats_ptr + 2 * channels + channel, ratio, mask=mask)
    if HAS_RUNNING:
        # No difference is taken: of an infinite old one it would be NaN, and a momentum of 1 leaves no rounding of it.
        old = tl.load(running_mean_ptr + channel, mask=mask, other=0.0).to(tl.float32)
        tl.store(running_mean_ptr + channel, (1.0 - momentum) * old + momentum * mean, mask=mask)
        if KIND != MEAN:
            old = tl.load(running_var_ptr + channel, mask=mask, other=0.0).to(tl.float32)
            tl.store(running_var_ptr + channel, (1.0 - momentum) * old + momentum * (scale * scale * unbias), mask=mask)
    if COUNTS:
        number = batches_ptr + 0 * channel
        tl.store(number, tl.load(number, mask=channel == 0, other=0) + 1, mask=channel == 0)


# Codes: a few bits per element that the backward pass needs, four rows in one word ------------------------------------
#
# g is the gradient masked by the ReLU, so "open" elements are those with z > 0.
# - two bits: bit 0 = [x ≥ μ], bit 1 = open. Where γ is too small against β for (z−β)/γ to mean anything, Σg·x̂ is taken
#   from the sign alone, times the mean of |x̂|.
# - four bits: 0 and 15 = closed; 1 … 14 = open, x̂ ≈ 0.4·(code − 7.5). The top bit is [x ≥ μ] in either case.

CODE_STEP: tl.constexpr = tl.constexpr(0.4)


@triton.jit
def pack(bits, VALUE: tl.constexpr):
    """Two bits per row, of which these give VALUE: [BLOCK_R, ROWS, BLOCK_C] -> [BLOCK_R, BLOCK_C]."""
    weight = VALUE << (tl.arange(0, ROWS) * 2)
    return tl.sum(tl.where(bits, weight[None, :, None], 0), axis=1)


@triton.jit
def coarse_code(d, inverse):
    """The four-bit code of x̂ = d·inverse, 1 … 14.

    Near 2²³ floats are whole numbers: adding that rounds, and the code stands in the last four bits. The half is taken
    off first, as it cannot be said at that size; then the top bit is [x ≥ μ], exactly.
    """
    level = (d * (inverse * (1.0 / CODE_STEP))[None, None, :] - 0.5) + (8388608.0 + 8.0)
    level = tl.minimum(tl.maximum(level, 8388608.0 + 1.0), 8388608.0 + 14.0)
    return level.to(tl.int32, bitcast=True) & 15


@triton.jit
def pack_codes(code):
    """Four bits per row: [BLOCK_R, ROWS, BLOCK_C] -> [BLOCK_R, BLOCK_C]."""
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
    """code − 8 of four-bit codes: x̂ in steps, less the half that one sum per channel puts back."""
    code = (words.to(tl.int32)[:, None, :] >> (tl.arange(0, ROWS) * 4)[None, :, None]) & 15
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 8.0)
