"""What the plans of all batch norms share: a plan is the launches of one step, at one shape and set of dtypes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from normmatters.kernels.triton.launch import Launch
from normmatters.kernels.triton.layout import ROWS_PER_CODE, Tiling, View

# Four programs of four warps a multiprocessor: enough loads in flight, and the grid is one wave of them.
MAX_REGISTERS = 128

#: A launch of a kernel that waits for the one before; all batch norm kernels do.
overlapping = functools.partial(Launch, overlaps=True)

# Half a unit in the last place, and half the smallest number: what storing an output loses.
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24}
_TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}


def rounding_of(dtype: torch.dtype) -> dict[str, float]:
    """What storing an output of this dtype loses, as the kernels ask for it."""
    return {"ROUNDING": _ROUNDING[dtype], "TINY": _TINY[dtype]}


def is_even(view: View, tiling: Tiling) -> bool:
    """Whether tiles cover the view exactly: then only a tile behind the last one needs a mask."""
    return view.cols % tiling.block_c == 0 and view.rows % (ROWS_PER_CODE * tiling.block_r) == 0


def channel_blocks(view: View) -> tuple[int, int, int]:
    """Channels and partial sums that a program of the small per-channel kernels takes at a time, and its programs."""
    block_c, block_e = (2, 2048) if view.spatial > 1 else (8, 1024)
    return block_c, block_e, -(-view.channels // block_c)


def empty(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


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

    running: tuple[torch.dtype, torch.dtype] | None
    counts: bool

    @property
    def constants(self) -> dict[str, bool]:
        """As the kernels ask for it."""
        return {"HAS_RUNNING": self.running is not None, "COUNTS": self.counts}
