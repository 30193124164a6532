"""Two L1 batch norms whose sum goes through one ReLU, z = relu(norm₁(x₁) + norm₂(x₂)), in one pass each way.

That is how a residual block ends whose shortcut has a norm of its own. By two operations the second norm's output is
written and read back, and the gradient behind the ReLU, which is both norms' gradient, written once and read twice
more. Here the forward pass reads x₁ and x₂ and writes z; for the backward pass see ``twin_gradient.py``.

Codes stand in two planes, one a norm, as in :mod:`~normmatters.kernels.triton.codes`; what is open they say in the
first plane only. Lean: four bits a norm, and x̂₂'s are always 1 … 14. Exact: two bits, and one of them for the second
norm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.codes import coarse_code, pack, pack_codes, store_words
from normmatters.kernels.triton.launch import wait_for_previous
from normmatters.kernels.triton.tiles import ROWS, load_affine, load_tile, my_part, tile_rows


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
    _, split, splits, col, inside, channel = my_part(cols, spatial, CONTIGUOUS, False, BLOCK_C)
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
        row = tile_rows(tile, BLOCK_R)
        offset = row.to(tl.int64) * cols + col[None, None, :]
        mask = row < rows
        if not EVEN:
            mask = mask & inside[None, None, :]
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
        tl.store(z_ptr + offset, z.to(z_ptr.dtype.element_ty), mask=mask)
        if SAVE:
            if LEAN:
                code = coarse_code(d1, inverse1)
                words1 = pack_codes(tl.where(y > 0, code, tl.where(code >= 8, 15, 0)))
            else:
                words1 = pack(d1 >= 0, 1) + pack(y > 0, 2)
            store_words(code_ptr, words1, tile, col, rows, cols, BLOCK_R, EVEN)
