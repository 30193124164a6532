"""The normalization itself: z = act((x−μ)/D·γ + β + residual), and of every element a code for the backward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.codes import coarse_code, pack, pack_codes, rows_above, store_words
from normmatters.kernels.triton.launch import wait_for_previous
from normmatters.kernels.triton.scale import scale_factors, write_statistics
from normmatters.kernels.triton.small_stats import whole_statistics
from normmatters.kernels.triton.tiles import by_group, load_affine, load_tile, my_part, tile_rows, typical


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
    block, split, splits, col, inside, channel = my_part(cols, spatial, CONTIGUOUS, False, BLOCK_C)
    gamma, beta = load_affine(weight_ptr, bias_ptr, channel, inside, HAS_WEIGHT, HAS_BIAS)
    # Against the way of the kernel before, which went forwards: the cache holds what it read last.
    start = tiles - 1 - split if FINALIZE else split
    ahead = load_tile(x_ptr, start, col, rows, cols, BLOCK_R, EVEN, False)
    if HAS_RESIDUAL:
        residual_ahead = load_tile(residual_ptr, start, col, rows, cols, BLOCK_R, EVEN, False)
    if FINALIZE:
        shift = typical(x_ptr, channel, inside, rows, cols, 1)
    if EARLY:
        wait_for_previous(OVERLAP)
    if FINALIZE:
        mean, scale = whole_statistics(
            shift, scratch_ptr, channel, inside, channels, rows, constant, KIND, SPLITS, BLOCK_S
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
        entry = block * (BLOCK_C // GROUP) + tl.arange(0, BLOCK_C // GROUP)
        total = by_group(tl.sum(count, axis=0), GROUP, BLOCK_C)
        tl.store(count_ptr + split * entries + entry, total.to(count_ptr.dtype.element_ty), mask=entry < entries)
