"""One view for every memory layout: a matrix of rows and columns whose columns belong to channels.

| layout                    | rows      | columns | spatial (columns a channel) |
|---------------------------|-----------|---------|-----------------------------|
| channels_last, or (N, C)  | N·H·W     | C       | 1                           |
| contiguous (N, C, *)      | N         | C·H·W   | H·W                         |

So one family of kernels serves both: it reduces down the columns, four rows at a time, and column j belongs to channel
j // spatial. Four rows are the unit because four 2-bit (4-bit) codes make one int8 (int16): packing happens within a
thread, and needs no exchange. Eight rows were tried and ran out of registers.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from normmatters.kernels import MAX_PLANS

ROWS_PER_CODE = 4

# Programs that fill the device: four on each of 132 multiprocessors (H200). Channels-last work is cut into one such
# wave; contiguous work, whose blocks of columns cannot be cut evenly, into about three, so that the last costs little.
_WAVE = 528


#: Rows and columns, and of each column up to five partial sums, are counted in 32 bits.
MAX_ROWS, MAX_COLS = 2**30, 2**29


class View(NamedTuple):
    """A tensor as the kernels see it."""

    rows: int
    cols: int
    spatial: int

    @property
    def channels(self) -> int:
        return self.cols // self.spatial

    @property
    def n(self) -> int:
        """Reduced elements a channel."""
        return self.rows * self.spatial

    @property
    def code_rows(self) -> int:
        return -(-self.rows // ROWS_PER_CODE)


class Tiling(NamedTuple):
    """How a view is cut: tiles of 4·block_r rows and block_c columns, ``splits`` programs down the rows."""

    block_c: int
    block_r: int
    group: int  # columns that share one partial sum; they belong to one channel
    splits: int
    tiles: int
    num_warps: int

    def entries(self, view: View) -> int:
        """Partial sums a split."""
        return -(-view.cols // self.group)


def memory_format(x: Tensor) -> torch.memory_format:
    """The format in which ``x`` (and everything shaped like it) is handed to the kernels."""
    if x.is_contiguous():
        return torch.contiguous_format
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return suggest_memory_format(x)  # it is copied: into the layout that torch's batch norm would take


def view_of(x: Tensor) -> View:
    """The view of ``x``, which is dense in its :func:`memory_format`.

    Plain integers: the tiling depends on the sizes, so a compiled graph is specialized to them.
    """
    # A plain tensor's sizes are integers already; a traced one's may be symbols, which no cache takes.
    return _view(x.shape if type(x) is Tensor else tuple(map(int, x.shape)), x.is_contiguous())


@functools.lru_cache(MAX_PLANS)
def _view(shape: tuple[int, ...], contiguous: bool) -> View:
    batch, channels, *rest = map(int, shape)
    spatial = math.prod(rest)
    if spatial == 1 or not contiguous:
        return View(batch * spatial, channels, 1)
    return View(batch, channels * spatial, spatial)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.lru_cache(MAX_PLANS)
def tiling_of(view: View, itemsize: int, programs: int = _WAVE) -> Tiling:
    """Tiles of 16 bytes a thread and row; wide rows first, so that neighbours read neighbouring memory."""
    num_warps = 4
    vector = 8 if itemsize <= 2 else 4
    elements = 32 * num_warps * vector
    block_c = min(next_power_of_2(view.cols), elements if view.spatial > 1 else 128)
    row_groups = view.code_rows
    block_r = max(1, min(elements // block_c, next_power_of_2(row_groups)))
    tiles = -(-row_groups // block_r)
    blocks = -(-view.cols // block_c)
    wanted = programs if view.spatial == 1 else 3 * programs
    splits = max(1, min(tiles, wanted // blocks))
    # A group must not cross a channel's border, and a power of two keeps the reduction inside a thread or a warp.
    group = min(math.gcd(view.spatial, 16), block_c)
    return Tiling(block_c, block_r, group, splits, tiles, num_warps)


#: Up to this size launches, not bytes, decide how long a channels-last layer takes, and reading a tensor a second time
#: costs little: most of it is still in the cache (50 MB).
SMALL = 64 * 2**20

# Columns and programs of a small tensor of up to so many elements. The fewer programs, the more runs that share the
# device get done; one alone hardly notices.
_SMALL_CUTS = ((2 * 2**20, 16, _WAVE // 4), (8 * 2**20, 32, _WAVE // 2), (SMALL, 64, _WAVE // 2))


def is_small(view: View, itemsize: int) -> bool:
    """Whether programs add the partial sums of their channels themselves, instead of one more launch."""
    return view.spatial == 1 and view.rows * view.cols * itemsize <= SMALL


@functools.lru_cache(MAX_PLANS)
def apply_tiling_of(view: View, itemsize: int) -> Tiling:
    """The tiling of what is not a statistic. Small tensors: few and large programs, so that partial sums are few.

    A program adds the partial sums of all splits of its columns. Half the columns are half as many splits and a quarter
    of the sums: the smaller the tensor, the more that counts against reading shorter pieces of memory.
    """
    if not is_small(view, itemsize):
        return tiling_of(view, itemsize)
    widest, programs = next(cut for most, *cut in _SMALL_CUTS if view.rows * view.cols <= most)
    num_warps = 8
    elements = 32 * num_warps * (8 if itemsize <= 2 else 4)
    block_c = min(next_power_of_2(view.cols), widest)
    block_r = max(1, min(elements // block_c, next_power_of_2(view.code_rows)))
    tiles = -(-view.code_rows // block_r)
    splits = max(1, min(tiles, programs // -(-view.cols // block_c)))
    return Tiling(block_c, block_r, 1, splits, tiles, num_warps)
