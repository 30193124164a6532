"""The normalization: z = act((x−μ)/D·γ + β + residual), and for every element a code for the backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from normmatters.kernels.triton.batch_norm import layout
from normmatters.kernels.triton.batch_norm.layout import (
    MAX_REGISTERS,
    ROWS_PER_CODE,
    Affine,
    Tiling,
    Variant,
    View,
    grid_of,
    has_of,
    values_of,
)
from normmatters.kernels.triton.batch_norm.statistics import small_statistics
from normmatters.kernels.triton.batch_norm.tiles import (
    coarse_code,
    load_affine,
    load_tile,
    middle_value,
    pack,
    pack_codes,
    program_part,
    rows_above,
    scale_factors,
    store_sums,
    store_tile,
    store_words,
    tile_rows,
    write_statistics,
)
from normmatters.kernels.triton.launch import Launch, wait_for_previous

# What the forward pass saves for the backward pass --------------------------------------------------------------------


class Saved(NamedTuple):
    """Shapes and dtypes of what the backward pass needs beside its tensor: codes, and for L1 counts above the mean."""

    code: tuple[int, int] = (0, 0)
    code_dtype: torch.dtype = torch.int8
    counts: tuple[int, int] = (0, 0)
    count_dtype: torch.dtype = torch.int32


def saved_shapes(view: View, itemsize: int, variant: Variant, *, save: bool) -> Saved:
    """What is saved; nothing unless ``save``."""
    if not save:
        return Saved()
    bits = variant.code_bits
    saved = Saved((view.code_rows, view.cols) if bits else (0, 0), torch.int16 if bits == 4 else torch.int8)
    if variant.kind != "l1":
        return saved
    tiling = layout.apply_tiling_of(view, itemsize)
    return saved._replace(
        counts=(tiling.splits, tiling.entries(view)), count_dtype=count_dtype(tiling, ROWS_PER_CODE * tiling.group)
    )


def count_dtype(tiling: Tiling, elements: int) -> torch.dtype:
    """The least integer that holds what one program can count, with so many elements in each place of a tile."""
    most = -(-tiling.tiles // tiling.splits) * tiling.block_r * elements
    return torch.uint8 if most <= 255 else torch.int16 if most <= 32767 else torch.int32


# Kernel ---------------------------------------------------------------------------------------------------------------


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
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """z and its codes. The kernel before is the one that made the statistics, and has waited for all else.

    FINALIZE: there are partial sums instead of statistics, and the first programs write these too.
    """
    block, split, splits, col, inside, channel = program_part(cols, spatial, CONTIGUOUS, False, BLOCK_C)
    gamma, beta = load_affine(weight_ptr, bias_ptr, channel, inside, HAS_WEIGHT, HAS_BIAS)
    # Against the way of the kernel before, which went forwards: the cache holds what it read last.
    start = tiles - 1 - split if FINALIZE else split
    ahead = load_tile(x_ptr, start, col, rows, cols, BLOCK_R, EVEN, False)
    if HAS_RESIDUAL:
        residual_ahead = load_tile(residual_ptr, start, col, rows, cols, BLOCK_R, EVEN, False)
    if FINALIZE:
        shift = middle_value(x_ptr, channel, inside, rows, cols, 1)
    wait_for_previous(OVERLAP)
    if FINALIZE:
        mean, scale = small_statistics(
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
        d = ahead.to(tl.float32) - mean[None, None, :]
        if not EVEN and COUNT:  # what lies outside is not above the mean
            d = tl.where((tile_rows(tile, BLOCK_R) < rows) & inside[None, None, :], d, -1e30)
        ahead = load_tile(x_ptr, following, col, rows, cols, BLOCK_R, EVEN, False)
        y = d * slope + beta[None, None, :]
        if HAS_RESIDUAL:
            y += residual_ahead.to(tl.float32)
            residual_ahead = load_tile(residual_ptr, following, col, rows, cols, BLOCK_R, EVEN, False)
        z = y
        if RELU:
            # NaN passes through, as in PyTorch.
            z = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
        store_tile(z_ptr, z, tile, col, rows, cols, BLOCK_R, EVEN)
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
        store_sums(count_ptr, tl.sum(count, axis=0), block, split, entries, GROUP, BLOCK_C)


# Launch ---------------------------------------------------------------------------------------------------------------


def normalize_launch(
    view: View, dtype: torch.dtype, affine: Affine, variant: Variant, values: dict[str, Any], save: bool
) -> Launch:
    """The launch after those of the statistics of the same tensor, with their ``values``.

    So the other tensors can be read before they have ended.
    """
    tiling = layout.apply_tiling_of(view, dtype.itemsize)
    own = {
        "HAS_RESIDUAL": variant.residual,
        "RELU": variant.relu,
        "CODE_BITS": variant.code_bits if save else 0,
        "COUNT": variant.kind == "l1" and save,
    }
    return Launch(
        normalize_kernel,
        grid_of(view, tiling),
        values_of(view, tiling) | has_of(affine) | values | own,
        num_warps=tiling.num_warps,
        # With a residual, two tensors are on their way at a time: fewer programs, more loads each.
        maxnreg=None if variant.residual else MAX_REGISTERS,
    )
