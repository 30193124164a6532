"""How a tensor is seen and cut, and what the launches of all stages share.

One view for every memory layout: a matrix of rows and columns whose columns belong to channels.

| layout                    | rows      | columns | spatial (columns per channel) |
|---------------------------|-----------|---------|-------------------------------|
| channels_last, or (N, C)  | N·H·W     | C       | 1                             |
| contiguous (N, C, *)      | N         | C·H·W   | H·W                           |

So one family of kernels serves both: it reduces down the columns, four rows at a time, and column j belongs to channel
j // spatial. Four rows are the unit because four 2-bit (4-bit) codes make one int8 (int16): packing happens within a
thread, and needs no exchange. Eight rows were tried and ran out of registers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normmatters.kernels.memory_format import memory_format
from normmatters.kernels.triton.launch import cached_plan
from normmatters.norm import Norm, RunningStats

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
        """Reduced elements per channel."""
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
        """Partial sums per split."""
        return -(-view.cols // self.group)


def dense(x: Tensor) -> Tensor:
    """``x``, or a copy of it, dense in its :func:`memory_format`."""
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return x  # quicker than a call that returns it
    return x.contiguous(memory_format=memory_format(x))


def stored_format(g: Tensor, channels_last: bool) -> torch.memory_format:
    """The memory format of a backward pass, whose forward pass was in ``channels_last`` or not."""
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last if g.dim() == 4 else torch.channels_last_3d


def view_of(x: Tensor) -> View:
    """The view of ``x``, which is dense in its :func:`memory_format`."""
    return view_of_shape(sizes_of(x), x.is_contiguous())


def sizes_of(x: Tensor) -> tuple[int, ...]:
    """Plain integers: the tiling depends on the sizes, so a compiled graph is specialized to them."""
    # A plain tensor's sizes are integers already; a traced one's may be symbols, which no cache takes.
    return x.shape if type(x) is Tensor else tuple(map(int, x.shape))


@cached_plan
def view_of_shape(shape: tuple[int, ...], contiguous: bool) -> View:
    batch, channels, *rest = map(int, shape)
    spatial = math.prod(rest)
    if spatial == 1 or not contiguous:
        return View(batch * spatial, channels, 1)
    return View(batch, channels * spatial, spatial)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@cached_plan
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


@cached_plan
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


# What launches share --------------------------------------------------------------------------------------------------

# Four programs of four warps a multiprocessor: enough loads in flight, and the grid is one wave of them.
MAX_REGISTERS = 128


def values_of(view: View, tiling: Tiling) -> dict[str, Any]:
    """What kernels take of a view and its tiling."""
    return {
        "rows": view.rows,
        "cols": view.cols,
        "spatial": view.spatial,
        "channels": view.channels,
        "n": view.n,
        "entries": tiling.entries(view),
        "per_channel": view.spatial // tiling.group,
        "splits": tiling.splits,
        "tiles": tiling.tiles,
        "CONTIGUOUS": view.spatial > 1,
        "EVEN": is_even(view, tiling),
        "SPLITS": tiling.splits,
        "BLOCK_S": next_power_of_2(tiling.splits),
        "GROUP": tiling.group,
        "BLOCK_R": tiling.block_r,
        "BLOCK_C": tiling.block_c,
    }


def grid_of(view: View, tiling: Tiling) -> tuple[int, int]:
    """A program for each block of columns and each split."""
    return -(-view.cols // tiling.block_c), tiling.splits


# Half a unit in the last place, and half the smallest number: what storing an output loses.
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24}
_TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}


def rounding_of(dtype: torch.dtype) -> dict[str, float]:
    """What storing an output of this dtype loses, as the kernels ask for it."""
    return {"ROUNDING": _ROUNDING[dtype], "TINY": _TINY[dtype]}


def is_even(view: View, tiling: Tiling) -> bool:
    """Whether tiles cover the view exactly: then only a tile after the last one needs a mask."""
    return view.cols % tiling.block_c == 0 and view.rows % (ROWS_PER_CODE * tiling.block_r) == 0


def channel_blocks(view: View) -> tuple[int, int, int]:
    """Channels and partial sums that a program of the small per-channel kernels takes at a time, and its programs."""
    block_c, block_e = (2, 2048) if view.spatial > 1 else (8, 1024)
    return block_c, block_e, -(-view.channels // block_c)


def empty(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialized tensor on the device of ``x``."""
    return torch.empty(*shape, dtype=dtype, device=x.device)  # a tuple would take half as long again


#: The dtypes of weight and bias: a plan is for one set of dtypes, as its compiled kernels are.
Affine = tuple[torch.dtype | None, torch.dtype | None]


def affine_of(weight: Tensor | None, bias: Tensor | None) -> Affine:
    """The dtypes of weight and bias."""
    return None if weight is None else weight.dtype, None if bias is None else bias.dtype


def has_of(affine: Affine) -> dict[str, bool]:
    """Which of weight and bias there are, as the kernels ask for it."""
    return {"HAS_WEIGHT": affine[0] is not None, "HAS_BIAS": affine[1] is not None}


class Moved(NamedTuple):
    """What moves beside the statistics: the dtypes of the running ones, if there are, and whether batches count."""

    running: tuple[torch.dtype, torch.dtype] | None = None
    counts: bool = False

    @property
    def values(self) -> dict[str, bool]:
        """As the kernels take it."""
        return {"HAS_RUNNING": self.running is not None, "COUNTS": self.counts}


def moved_of(running: RunningStats) -> Moved:
    """What moves of these buffers. Where there is only one, the other one is float32 memory that nobody reads."""
    mean, var, batches, _ = running
    if mean is None and var is None:
        return Moved(None, batches is not None)
    dtypes = (torch.float32 if mean is None else mean.dtype, torch.float32 if var is None else var.dtype)
    return Moved(dtypes, batches is not None)


class Statistic(NamedTuple):
    """A statistic, and the numbers that make s and D = √(s² + eps) of it."""

    kind: str
    k: int
    constant: float
    eps: float

    @property
    def selected(self) -> int:
        """How many elements per channel it is made of and have a term of their own in the gradient; 0 where all do."""
        return {"linf": 1, "topk": self.k, "range": 2}.get(self.kind, 0)

    def values(self, view: View) -> dict[str, float]:
        """The numbers that kernels take of it."""
        # The range does not see the mean, so it has no degree of freedom to correct for.
        unbias = 1.0 if self.kind == "range" else view.n / (view.n - 1)
        return {"constant": float(self.constant), "eps": float(self.eps), "unbias": unbias}


def statistic_of(norm: Norm, n: int) -> Statistic:
    """The statistic of ``n`` elements per channel that ``norm`` asks for."""
    assert norm.eps is not None
    return Statistic(norm.kind, norm.k or 0, norm.scale_constant(n), norm.eps)


class Variant(NamedTuple):
    """What decides which code of the kernels runs, beside shapes and dtypes."""

    kind: str
    selected: int
    relu: bool
    residual: bool
    lean: bool

    @property
    def inverts_output(self) -> bool:
        """Whether the lean backward pass finds x̂ in the output, which the layer after a ReLU saves anyway.

        A residual hides x̂, and an output without a ReLU is often saved by nobody else: then codes of x̂ are cheaper.
        """
        return self.lean and self.relu and not self.residual

    @property
    def code_bits(self) -> int:
        """Bits per element that the backward pass needs beside its tensor."""
        if self.lean and not self.inverts_output:
            return 4
        return 2 if self.relu or self.kind == "l1" else 0
