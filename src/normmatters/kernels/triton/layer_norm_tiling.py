"""How the layer norm kernels cut their rows, and share them among programs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

# Rows up to here keep the vectors along them in registers.
MAX_KEPT = 1024
# Rows up to here keep the parameter gradients in registers while they go; above, a second kernel reads the columns.
MAX_FUSED = 8192


class Tiling(NamedTuple):
    """How rows are cut: tiles of ``block_r`` whole rows, ``programs`` programs that share them."""

    block_r: int
    block_n: int
    num_warps: int
    programs: int


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Tuning(NamedTuple):
    """What is chosen by measuring. The defaults are what was fastest on an H200.

    Attributes:
        per_thread: elements a thread: with 16, a row, its gradient, the two sums for the parameters and the next row
            fit in registers.
        registers: at most that many a thread: the least that compiles without spilling to memory.
        threads: that fit on a multiprocessor with these registers.
    """

    per_thread: int = 16
    registers: int = 64
    threads: int = 1024


def forward_tuning(cols: int, dtype: torch.dtype, l1: bool, centered: bool) -> Tuning:
    """For rows of this length. The threads of a row meet twice, for the mean and for the deviation from it."""
    if cols <= MAX_KEPT:
        return Tuning(registers=96, threads=640)
    if l1 and centered and 2048 < cols <= 4096 and dtype.itemsize == 2:
        # Half as many threads meet sooner, and five rows fit where four did: 2.28 passes, not 2.51. L2, with one sum
        # less, gains nothing by it; float32 would spill.
        return Tuning(per_thread=32, registers=96, threads=640)
    return Tuning()


def backward_tuning(cols: int) -> Tuning:
    """For rows of this length."""
    return Tuning(registers=128 if cols <= MAX_FUSED else 64, threads=512)


def tiling_of(rows: int, cols: int, device: torch.device, tuning: Tuning) -> Tiling:
    """Tiles of so many elements a thread, and as many programs as fit on the device."""
    block_n = max(16, triton.next_power_of_2(cols))
    num_warps = max(4, min(32, block_n // (32 * tuning.per_thread)))
    block_r = max(1, min(32 * num_warps * tuning.per_thread // block_n, triton.next_power_of_2(rows)))
    resident = multiprocessors(device) * max(1, tuning.threads // (32 * num_warps))
    return Tiling(block_r, block_n, num_warps, max(1, min(-(-rows // block_r), resident)))
