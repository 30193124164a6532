"""A few bits an element that the backward pass needs, four rows in one word.

g is the gradient behind the ReLU, so "open" elements are those with z > 0.
- two bits: bit 0 = [x ≥ μ], bit 1 = open. Where γ is too small against β for (z−β)/γ to mean anything, Σg·x̂ is taken
  from the sign alone, times the mean of |x̂|.
- four bits: 0 and 15 = closed; 1 … 14 = open, x̂ ≈ 0.4·(code − 7.5). The top bit is [x ≥ μ] in either case.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.tiles import ROWS

STEP: tl.constexpr = tl.constexpr(0.4)


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
