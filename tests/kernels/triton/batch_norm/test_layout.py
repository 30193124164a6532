"""How tensors are cut: the numbers behind it are in docs/kernels.md."""

from __future__ import annotations

import pytest

from normmatters.kernels.triton.batch_norm.layout import SMALL, View, apply_tiling_of, is_small, tiling_of

# Rows and channels of layers in ResNet-50 and ResNet-56, and some that fit nothing.
LAYERS = [
    (256 * 28 * 28, 128), (256 * 14 * 14, 256), (256 * 7 * 7, 512), (256 * 7 * 7, 2048), (32 * 56 * 56, 64),
    (32 * 14 * 14, 256), (32 * 7 * 7, 2048), (128 * 32 * 32, 16), (128 * 16 * 16, 32), (128 * 8 * 8, 64),
    (16 * 7 * 7, 2048), (4096, 1000), (64, 10), (3, 3), (1, 1),
]  # fmt: skip


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("rows", "cols"), LAYERS)
def test_a_program_adds_fewer_partial_sums_than_it_reads_elements(rows, cols, itemsize):
    view = View(rows, cols, 1)
    if not is_small(view, itemsize):
        assert apply_tiling_of(view, itemsize) == tiling_of(view, itemsize)
        return
    tiling = apply_tiling_of(view, itemsize)
    planes = 2
    sums = planes * tiling.splits * tiling.block_c
    elements = -(-tiling.tiles // tiling.splits) * 4 * tiling.block_r * tiling.block_c
    assert 4 * sums <= itemsize * elements


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("rows", "cols"), LAYERS)
def test_the_tiles_cover_the_tensor_once(rows, cols, itemsize):
    view = View(rows, cols, 1)
    tiling = apply_tiling_of(view, itemsize)
    assert (tiling.tiles - 1) * 4 * tiling.block_r < rows <= tiling.tiles * 4 * tiling.block_r
    assert 1 <= tiling.splits <= tiling.tiles


@pytest.mark.parametrize(("size", "block_c"), [(2 * 2**20, 16), (16 * 2**20, 32), (SMALL, 64), (2 * SMALL, 128)])
def test_the_smaller_the_tensor_the_narrower_its_tiles(size, block_c):
    assert apply_tiling_of(View(size // 512, 256, 1), 2).block_c == block_c
