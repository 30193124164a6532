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
        warps: of a program; None is as many as one row takes, and four at least.
        registers: at most that many a thread: the least that compiles without spilling to memory.
        threads: that fit on a multiprocessor with these registers.
        overlap: whether programs take their places while the kernel before still runs.
        ahead: whether the forward pass loads two rows ahead, not one, and sums the next with this one's deviations.
        stream: whether what is read leaves the cache first.
        finish: partial sums that a program of ``parameters_kernel`` adds at a time.
    """

    per_thread: int = 16
    warps: int | None = None
    registers: int = 64
    threads: int = 1024
    overlap: bool = False
    ahead: bool = False
    stream: bool = False
    finish: int = 32


def forward_tuning(cols: int) -> Tuning:
    """For rows of this length."""
    return Tuning() if cols > MAX_KEPT else Tuning(registers=96, threads=640)


def backward_tuning(cols: int) -> Tuning:
    """For rows of this length."""
    return Tuning(registers=128 if cols <= MAX_FUSED else 64, threads=512)


def tiling_of(rows: int, cols: int, device: torch.device, tuning: Tuning) -> Tiling:
    """Tiles of so many elements a thread, and as many programs as fit on the device."""
    block_n = max(16, triton.next_power_of_2(cols))
    num_warps = tuning.warps or max(4, min(32, block_n // (32 * tuning.per_thread)))
    block_r = max(1, min(32 * num_warps * tuning.per_thread // block_n, triton.next_power_of_2(rows)))
    resident = multiprocessors(device) * max(1, tuning.threads // (32 * num_warps))
    return Tiling(block_r, block_n, num_warps, max(1, min(-(-rows // block_r), resident)))
