"""One operation on elements and its rounding, in one launch: float32 in, float32 that holds values of a format out.

To the bit what PyTorch's operation and its conversions give, on every GPU and through Triton's interpreter. fp16 is
Triton's conversion. bf16 and fp8 are rounded by hand: the interpreter cuts bf16 off, and older GPUs have no fp8.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels import MAX_PLANS
from normmatters.kernels.operators import on_device
from normmatters.kernels.triton.launch import Launch, wait_for_previous

FORMATS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
_TILE = 1024  # elements a program: 8 a thread


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


@functools.lru_cache(MAX_PLANS)
def _launch_of(
    operation: str, shape: tuple[int, ...], x: tuple[int, ...], y: tuple[int, ...] = (), *, dtype: torch.dtype
) -> Launch:
    """x, y: their strides; y has none if it is a number."""
    rows, n = shape
    block_n = min(triton.next_power_of_2(n), _TILE)
    block_r = min(triton.next_power_of_2(rows), _TILE // block_n)
    return Launch(
        operation_kernel,
        (triton.cdiv(rows, block_r) * triton.cdiv(n, block_n), 1),
        (rows, n, *x, *(y or (0, 0))),
        {
            "OPERATION": operation,
            "NUMBER": not y,
            "X_COLUMNS": n > 1 and x[1] != 0,
            "Y_COLUMNS": n > 1 and y != () and y[1] != 0,
            "FORMAT": FORMATS[dtype],
            "BLOCK_R": block_r,
            "BLOCK_N": block_n,
        },
        overlaps=True,
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
        launch = _launch_of(operation, (1, x.numel()), *[(0, 1)] * len(tensors), dtype=dtype)
    else:
        shape = tuple(map(max, *(t.shape for t in tensors))) if isinstance(y, Tensor) else x.shape
        launch = _launch_of(operation, shape, *(t.expand(shape).stride() for t in tensors), dtype=dtype)
    z = torch.empty(shape, dtype=torch.float32, device=x.device)
    with on_device(x.device):
        launch((x, tensors[-1], z), (0.0 if isinstance(y, Tensor) else float(y),))
    return z
