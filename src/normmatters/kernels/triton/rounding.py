"""Emulated low-precision arithmetic on a GPU: an operation and its rounding, and means by a tree of averages.

Tensors are float32 and hold values of a format. The results equal PyTorch's operation followed by its conversion to the
bit, on every GPU and through Triton's interpreter. fp16 is Triton's conversion. bf16 and fp8 are rounded by hand: the
interpreter truncates bf16, and older GPUs have no fp8.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.operators import on_device
from normmatters.kernels.triton.launch import Launch, cached_plan, wait_for_previous

FORMATS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
_TILE = 1024  # elements per program: 8 per thread
_SLICES = 16  # at most, in one launch of a tree: a thread waits for that many loads at a time
_TREE_TILE = 512  # columns per program: four per thread


# Rounding and operations on elements ----------------------------------------------------------------------------------


@triton.jit
def _round_fp8(x, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr):
    """LOWEST: exponent of the smallest normal number, with float32's bias."""
    bits = x.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    size = tl.where(size > LARGEST, LARGEST, size)  # NaN stays
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, LOWEST)
    # The last place of size + shift is the format's at size: the addition rounds, and the difference is exact.
    shift = ((exponent + (23 - MANTISSA)) << 23).to(tl.float32, bitcast=True)
    size = (size + shift) - shift
    return (size.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def round_to(x, FORMAT: tl.constexpr):
    """x in the nearest values of FORMAT, ties to even: to infinity beyond fp16 and bf16, to the largest beyond fp8."""
    if FORMAT == "fp16":
        return x.to(tl.float16).to(tl.float32)
    elif FORMAT == "bf16":
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    elif FORMAT == "e4m3":
        return _round_fp8(x, 3, 121, 448.0)
    elif FORMAT == "e5m2":
        return _round_fp8(x, 2, 113, 57344.0)
    else:
        return x


@triton.jit
def _load(pointer, row, column, rows, n, row_stride, column_stride, COLUMNS: tl.constexpr):
    """[BLOCK_R, BLOCK_N], or of an operand without columns of its own [BLOCK_R, 1]."""
    if COLUMNS:
        return tl.load(pointer + row * row_stride + column * column_stride, mask=(row < rows) & (column < n), other=0.0)
    else:
        return tl.load(pointer + row * row_stride, mask=row < rows, other=0.0)


@triton.jit
def operation_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    rows,
    n,
    x_row,
    x_column,
    y_row,
    y_column,
    number,
    OPERATION: tl.constexpr,
    NUMBER: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    Y_COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    blocks = tl.cdiv(n, BLOCK_N)
    row = ((tl.program_id(0) // blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    column = ((tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    x = _load(x_ptr, row, column, rows, n, x_row, x_column, X_COLUMNS)
    if NUMBER:
        y = number
    elif OPERATION != "none":
        y = _load(y_ptr, row, column, rows, n, y_row, y_column, Y_COLUMNS)
    if OPERATION == "add":
        x = x + y
    elif OPERATION == "subtract":
        x = x - y
    elif OPERATION == "multiply":
        x = x * y
    elif OPERATION == "divide":
        x = tl.div_rn(x, y)  # `/` is off by a unit or two in the last place
    z = tl.broadcast_to(round_to(x, FORMAT), (BLOCK_R, BLOCK_N))
    tl.store(z_ptr + row * n + column, z, mask=(row < rows) & (column < n))


@cached_plan
def operation_launch(
    operation: str, shape: tuple[int, ...], x: tuple[int, ...], y: tuple[int, ...] = (), *, dtype: torch.dtype
) -> Launch:
    """x, y: their strides; y has none if it is a number."""
    rows, n = shape
    block_n = min(triton.next_power_of_2(n), _TILE)
    block_r = min(triton.next_power_of_2(rows), _TILE // block_n)
    return Launch(
        operation_kernel,
        (triton.cdiv(rows, block_r) * triton.cdiv(n, block_n), 1),
        {
            "rows": rows,
            "n": n,
            "x_row": x[0],
            "x_column": x[1],
            "y_row": y[0] if y else 0,
            "y_column": y[1] if y else 0,
            "OPERATION": operation,
            "NUMBER": not y,
            "X_COLUMNS": n > 1 and x[1] != 0,
            "Y_COLUMNS": n > 1 and y != () and y[1] != 0,
            "FORMAT": FORMATS[dtype],
            "BLOCK_R": block_r,
            "BLOCK_N": block_n,
        },
        contracts=False,
    )


def _tensors(x: Tensor, y: Tensor | float) -> list[Tensor]:
    return [x, y] if isinstance(y, Tensor) else [x]


def _flat(tensors: list[Tensor]) -> bool:
    """Whether all are the same vector, by their places in memory."""
    return all(t.is_contiguous() and t.shape == tensors[0].shape for t in tensors)


def takes(x: Tensor, y: Tensor | float = 0.0) -> bool:
    """Whether :func:`operate` computes with x and y: matrices that broadcast, or of one shape and dense."""
    tensors = _tensors(x, y)
    if any(t.dtype != torch.float32 or t.device != x.device or t.numel() == 0 for t in tensors):
        return False
    return all(t.dim() == 2 for t in tensors) or _flat(tensors)


def operate(operation: str, x: Tensor, y: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x and y added, subtracted, multiplied or divided, and rounded to ``dtype``; with "none", x rounded."""
    tensors = _tensors(x, y)
    if _flat(tensors):
        shape: tuple[int, ...] = x.shape
        launch = operation_launch(operation, (1, x.numel()), *[(0, 1)] * len(tensors), dtype=dtype)
    else:
        shape = tuple(map(max, *(t.shape for t in tensors))) if isinstance(y, Tensor) else x.shape
        launch = operation_launch(operation, shape, *(t.expand(shape).stride() for t in tensors), dtype=dtype)
    z = torch.empty(shape, dtype=torch.float32, device=x.device)
    with on_device(x.device):
        launch((x, tensors[-1], z), (0.0 if isinstance(y, Tensor) else float(y),))
    return z


# Means by a tree of rounded averages ----------------------------------------------------------------------------------
# A level of the tree averages the first half of a row with the second, number by number. So the first levels are
# averages of whole slices of the row, which a thread makes in registers for its own columns (`_mean_of_slices`). One
# program halves the rest, up to 512 numbers, among its threads (`_mean_of_tile`).


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


@cached_plan
def tree_launches(rows: int, n: int, inner: int, dtype: torch.dtype) -> list[tuple[Launch, int]]:
    """With each launch how many of n it leaves. ``inner``: numbers side by side, each of a mean of its own."""
    launches = []
    whole = inner == 1 and n == n & -n  # one program can end it
    while n % 2 == 0:
        last = whole and n <= _SLICES * _TREE_TILE
        most = n // _TREE_TILE if last else n // (_SLICES * _TREE_TILE) if whole else n & -n
        slices = max(min(most, _SLICES), 1)
        n //= slices
        step = n * inner
        block_n = min(triton.next_power_of_2(step), _TREE_TILE)
        block_r = min(triton.next_power_of_2(rows), _TREE_TILE // block_n)
        launch = Launch(
            tree_mean_kernel,
            (triton.cdiv(rows, block_r) * triton.cdiv(step, block_n), 1),
            {
                "rows": rows,
                "step": step,
                "SLICES": slices,
                "LAST": last,
                "FORMAT": FORMATS[dtype],
                "BLOCK_R": block_r,
                "BLOCK_N": block_n,
            },
            contracts=False,  # halving and the next level's addition, made one, would not round a subnormal half
        )
        n = 1 if last else n
        launches.append((launch, n))
    return launches


# Running sums ---------------------------------------------------------------------------------------------------------

_AT_ONCE = 64  # loads that are under way together: the additions wait for each other, the loads need not


@triton.jit
def running_sum_kernel(
    x_ptr, y_ptr, n, FORMAT: tl.constexpr, AT_ONCE: tl.constexpr, EVEN: tl.constexpr, OVERLAP: tl.constexpr
):
    """One program per row. EVEN: n is a multiple of AT_ONCE."""
    wait_for_previous(OVERLAP, LONG=True)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * n
    total = tl.full((), 0.0, tl.float16 if FORMAT == "fp16" else tl.float32)
    for start in range(0, n, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            if EVEN:
                value = tl.load(x_ptr + start + i)
            else:
                value = tl.load(x_ptr + start + i, mask=start + i < n, other=0.0)
            if FORMAT == "fp16":
                total = total + value.to(tl.float16)  # one rounded addition, where float32's takes two conversions
            else:
                total = round_to(total + round_to(value, FORMAT), FORMAT)
    tl.store(y_ptr + row, total.to(tl.float32))


@cached_plan
def running_launch(rows: int, n: int, dtype: torch.dtype) -> Launch:
    at_once = min(triton.next_power_of_2(n), _AT_ONCE)
    return Launch(
        running_sum_kernel,
        (rows, 1),
        {"n": n, "FORMAT": FORMATS[dtype], "AT_ONCE": at_once, "EVEN": n % at_once == 0},
        num_warps=1,
        contracts=False,
    )


def running_sum(x: Tensor, accumulate: torch.dtype) -> Tensor:
    """The sum of each row of a contiguous float32 matrix, number by number, each addition rounded."""
    total = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    with on_device(x.device):
        running_launch(*x.shape, accumulate)((x, total))
    return total


def takes_mean(x: Tensor, dim: int) -> bool:
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
        for launch, left in tree_launches(x.numel() // (n * inner), n, inner, accumulate):
            shape[dim] = left
            y = torch.empty(shape, dtype=torch.float32, device=x.device)
            launch((x, y))
            x = y
    return x
