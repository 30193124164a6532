"""Means by a tree of rounded averages, in one or two launches where the equation takes several for each level.

A level of the tree averages the first half of a row with the second, number by number. So its first levels are
averages of whole slices of the row, which a thread makes in registers for its own columns (`_mean_of_slices`); what
is left, up to 512 numbers, one program halves among its threads (`_mean_of_tile`). Every average is that of the
equation, to the bit.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels import MAX_PLANS
from normmatters.kernels.operators import on_device
from normmatters.kernels.triton.launch import Launch, wait_for_previous
from normmatters.kernels.triton.rounding import FORMATS, round_to

_SLICES = 16  # at most, in one launch: that many loads of a thread are on their way at a time
_TILE = 512  # columns a program: four a thread


@triton.jit
def _mean_of_slices(pointers, inside, step, SLICES: tl.constexpr, FORMAT: tl.constexpr):
    """The slices are ``step`` apart. The last of their levels averages the even ones' mean with the odd ones'."""
    if SLICES == 1:
        return round_to(tl.load(pointers, mask=inside, other=0.0), FORMAT)
    else:
        even = _mean_of_slices(pointers, inside, 2 * step, SLICES // 2, FORMAT)
        odd = _mean_of_slices(pointers + step, inside, 2 * step, SLICES // 2, FORMAT)
        return round_to((even + odd) * 0.5, FORMAT)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _mean_of_tile(x, ROWS: tl.constexpr, SIZE: tl.constexpr, FORMAT: tl.constexpr):
    """[ROWS, SIZE] -> [ROWS]. A sum of two has one order, and `tl.split` would gather the tile in every thread."""
    if SIZE == 1:
        return tl.reshape(x, (ROWS,))
    else:
        # Not `tl.sum`: the interpreter's starts at 0, and 0 + -0 + -0 is 0.
        both = tl.reduce(tl.reshape(x, (ROWS, 2, SIZE // 2)), 1, _add)
        return _mean_of_tile(round_to(both * 0.5, FORMAT), ROWS, SIZE // 2, FORMAT)


@triton.jit
def tree_mean_kernel(
    x_ptr,
    y_ptr,
    rows,
    step,
    SLICES: tl.constexpr,
    LAST: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    blocks = tl.cdiv(step, BLOCK_N)
    rows_here = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = rows_here[:, None]
    column = ((tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    inside = (row < rows) & (column < step)
    mean = _mean_of_slices(x_ptr + row * (step * SLICES) + column, inside, step, SLICES, FORMAT)
    if LAST:
        tl.store(y_ptr + rows_here, _mean_of_tile(mean, BLOCK_R, BLOCK_N, FORMAT), mask=rows_here < rows)
    else:
        tl.store(y_ptr + row * step + column, mean, mask=inside)


@functools.lru_cache(MAX_PLANS)
def _launches(rows: int, n: int, inner: int, dtype: torch.dtype) -> list[tuple[Launch, int]]:
    """With each launch how many of n it leaves. ``inner``: numbers side by side, each of a mean of its own."""
    launches = []
    whole = inner == 1 and n == n & -n  # one program can end it
    while n % 2 == 0:
        last = whole and n <= _SLICES * _TILE
        most = n // _TILE if last else n // (_SLICES * _TILE) if whole else n & -n
        slices = max(min(most, _SLICES), 1)
        n //= slices
        step = n * inner
        block_n = min(triton.next_power_of_2(step), _TILE)
        block_r = min(triton.next_power_of_2(rows), _TILE // block_n)
        launch = Launch(
            tree_mean_kernel,
            (triton.cdiv(rows, block_r) * triton.cdiv(step, block_n), 1),
            (rows, step),
            {
                "SLICES": slices,
                "LAST": last,
                "FORMAT": FORMATS[dtype],
                "BLOCK_R": block_r,
                "BLOCK_N": block_n,
            },
            overlaps=True,
            contracts=False,  # halving and the next level's addition, made one, would not round a subnormal half
        )
        n = 1 if last else n
        launches.append((launch, n))
    return launches


def takes(x: Tensor, dim: int) -> bool:
    """Whether there are levels for :func:`tree_mean` to compute."""
    return x.dtype == torch.float32 and 0 < x.numel() < 2**31 and x.shape[dim] % 2 == 0


def tree_mean(x: Tensor, dim: int, accumulate: torch.dtype) -> Tensor:
    """x, rounded, after as many levels as halve it evenly: of n = 2^m along ``dim`` one number is left, the mean.

    x: float32 of any shape. Of n = odd·2^m, odd numbers are left.
    """
    dim = dim % x.dim()
    shape, n, inner = list(x.shape), x.shape[dim], math.prod(x.shape[dim + 1 :])
    x = x.contiguous()
    with on_device(x.device):
        for launch, left in _launches(x.numel() // (n * inner), n, inner, accumulate):
            shape[dim] = left
            y = torch.empty(shape, dtype=torch.float32, device=x.device)
            launch((x, y))
            x = y
    return x
