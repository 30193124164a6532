"""What every batch norm kernel is made of: tiles of a view (see ``layout.py``), partial sums, and numbers a channel.

No atomics anywhere: every program leaves its partial sums, and one small kernel adds them in a fixed order, so results
are bitwise equal from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.layout import ROWS_PER_CODE

ROWS: tl.constexpr = tl.constexpr(ROWS_PER_CODE)


@triton.jit
def my_part(cols, spatial, CONTIGUOUS: tl.constexpr, LAST_FIRST: tl.constexpr, BLOCK_C: tl.constexpr):
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
    """A tile, [BLOCK_R, ROWS, BLOCK_C]; zero outside, so that a tile behind the last one reads nothing.

    KEEP says that the next kernel reads it again; other tiles leave the cache first.
    """
    row = tile_rows(tile, BLOCK_R)
    mask = row < rows
    if not EVEN:
        mask = mask & (col < cols)[None, None, :]
    POLICY: tl.constexpr = "" if KEEP else "evict_first"
    return tl.load(ptr + row.to(tl.int64) * cols + col[None, None, :], mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def by_group(acc, GROUP: tl.constexpr, BLOCK_C: tl.constexpr):
    """Adds neighbouring columns of one channel: [BLOCK_C] -> [BLOCK_C // GROUP]."""
    if GROUP == 1:
        return acc
    return tl.sum(tl.reshape(acc, (BLOCK_C // GROUP, GROUP)), axis=1)


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
def typical(x_ptr, channel, mask, rows, cols, spatial):
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
