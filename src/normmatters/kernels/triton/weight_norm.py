"""Bounded weight norm of many tensors in one launch: w = ρ·v/‖v‖_p for every row (F12, F13), and its gradient.

The results go into one flat buffer, in the dtype that the layers compute in. With x̂ = v/‖v‖ the gradient is

    dv = (ρ/‖v‖)·(g − u·⟨g, x̂⟩),   u = ∂‖v‖/∂v = x̂ (p = 2),   sign v (p = 1),   sign v on the ties of max|v|, shared
    equally (p = ∞).                                A row of zeros has no norm: w = 0 and dv = ρ·g.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.triton.rows import (
    addresses_of,
    aligned,
    load_pointer,
    load_rows,
    load_task,
    store_rows,
    tables_of,
)

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
INF = 0  # p = ∞, as the kernels see it


@triton.jit
def _row_norms(v_ptr, row, rows, n, P: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """‖v‖_p of each row, [R]."""
    column = tl.arange(0, B)
    total = tl.zeros((R, B), tl.float32)
    for start in range(0, n, B):
        x = tl.abs(load_rows(v_ptr, row, start + column, rows, n))
        total = total + x if P == 1 else tl.maximum(total, x)
    if P == 1:
        return tl.sum(total, axis=1)
    largest = tl.max(total, axis=1)
    if P == 2:
        # Squares leave float32's range long before the numbers do, so take them of x/max|x|.
        unit = tl.where(largest == 0, 1.0, largest)
        squares = tl.zeros((R, B), tl.float32)
        for start in range(0, n, B):
            x = load_rows(v_ptr, row, start + column, rows, n) / unit[:, None]
            squares += x * x
        largest *= tl.sqrt_rn(tl.sum(squares, axis=1))
    return largest


@triton.jit
def _forward_rows(v_ptr, w_ptr, norm_ptr, rho, first, rows, n, P: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    row = first + tl.arange(0, R).to(tl.int64)
    column = tl.arange(0, B)
    norm = _row_norms(v_ptr, row, rows, n, P, R, B)
    tl.store(norm_ptr + row, norm, mask=row < rows)
    scale = rho / tl.where(norm == 0, 1.0, norm)
    for start in range(0, n, B):
        col = start + column
        w = load_rows(v_ptr, row, col, rows, n) * scale[:, None]
        store_rows(w_ptr, w, row, col, rows, n)


@triton.jit
def _backward_rows(
    g_ptr, v_ptr, dv_ptr, norm_ptr, rho, first, rows, n, P: tl.constexpr, R: tl.constexpr, B: tl.constexpr
):
    row = first + tl.arange(0, R).to(tl.int64)
    column = tl.arange(0, B)
    norm = tl.load(norm_ptr + row, mask=row < rows, other=0.0)
    unit = tl.where(norm == 0, 1.0, norm)[:, None]
    product = tl.zeros((R, B), tl.float32)
    ties = tl.zeros((R, B), tl.float32)
    for start in range(0, n, B):
        v = load_rows(v_ptr, row, start + column, rows, n)
        product += load_rows(g_ptr, row, start + column, rows, n) * (v / unit)
        if P == 0:
            ties += tl.where(tl.abs(v) == norm[:, None], 1.0, 0.0)
    along = tl.sum(product, axis=1)
    if P == 0:
        along = along / tl.sum(ties, axis=1)
    for start in range(0, n, B):
        col = start + column
        v = load_rows(v_ptr, row, col, rows, n)
        if P == 2:
            slope = v / unit
        else:
            slope = tl.where(v > 0, 1.0, tl.where(v < 0, -1.0, 0.0))
            if P == 0:
                slope = tl.where(tl.abs(v) == norm[:, None], slope, 0.0)
        dv = (load_rows(g_ptr, row, col, rows, n) - slope * along[:, None]) * (rho / unit)
        store_rows(dv_ptr, dv, row, col, rows, n)


@triton.jit
def forward_kernel(
    addresses_ptr, layers_ptr, tasks_ptr, w_ptr, norm_ptr, tensors, P: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr
):
    tensor, first, rows, n, offset, norms = load_task(layers_ptr, tasks_ptr, tensors, WIDE)
    v_ptr = load_pointer(addresses_ptr, tensor, V, WIDE)
    rho = tl.load(load_pointer(addresses_ptr, tensors + tensor, tl.float32, 1))
    if n <= 128:
        _forward_rows(v_ptr, w_ptr + offset, norm_ptr + norms, rho, first, rows, n, P, 16, 128)
    elif n <= 512:
        _forward_rows(v_ptr, w_ptr + offset, norm_ptr + norms, rho, first, rows, n, P, 4, 512)
    else:
        _forward_rows(v_ptr, w_ptr + offset, norm_ptr + norms, rho, first, rows, n, P, 1, 2048)


@triton.jit
def backward_kernel(
    addresses_ptr,
    layers_ptr,
    tasks_ptr,
    g_ptr,
    dv_ptr,
    norm_ptr,
    tensors,
    P: tl.constexpr,
    V: tl.constexpr,
    WIDE: tl.constexpr,
):
    tensor, first, rows, n, offset, norms = load_task(layers_ptr, tasks_ptr, tensors, WIDE)
    v_ptr = load_pointer(addresses_ptr, tensor, V, WIDE)
    rho = tl.load(load_pointer(addresses_ptr, tensors + tensor, tl.float32, 1))
    if n <= 128:
        _backward_rows(g_ptr + offset, v_ptr, dv_ptr + offset, norm_ptr + norms, rho, first, rows, n, P, 16, 128)
    elif n <= 512:
        _backward_rows(g_ptr + offset, v_ptr, dv_ptr + offset, norm_ptr + norms, rho, first, rows, n, P, 4, 512)
    else:
        _backward_rows(g_ptr + offset, v_ptr, dv_ptr + offset, norm_ptr + norms, rho, first, rows, n, P, 1, 2048)


def sizes(v: list[Tensor]) -> tuple[int, int]:
    """Elements and rows of all tensors together."""
    return sum(x.numel() for x in v), sum(x.shape[0] for x in v)


def forward(v: list[Tensor], rho: list[Tensor], p: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All weights in one flat buffer, each in the memory order of its v, and the norms of all rows.

    Args:
        v: tensors of one device and dtype whose slices along dimension 0 are dense in memory, one after the other.
        rho: a float32 scalar for each.
        p: 1, 2 or ``INF``.
        dtype: of the weights.
    """
    tables, addresses = tables_of(v), addresses_of(v, rho)
    w = torch.empty(tables.numel, dtype=dtype, device=v[0].device)
    norms = torch.empty(tables.rows, dtype=torch.float32, device=v[0].device)
    for wide, tasks in tables.launches(aligned=aligned(v)):
        forward_kernel[(len(tasks),)](
            addresses, tables.layers, tasks, w, norms, len(v),
            P=p, V=DTYPES[v[0].dtype], WIDE=wide, num_warps=4,
        )  # fmt: skip
    return w, norms


def backward(g: Tensor, v: list[Tensor], rho: list[Tensor], norms: Tensor, p: int) -> Tensor:
    """The gradients of all v in one flat buffer, from ``g``, the gradient of the flat weights."""
    tables, addresses = tables_of(v), addresses_of(v, rho)
    dv = torch.empty(tables.numel, dtype=v[0].dtype, device=v[0].device)
    for wide, tasks in tables.launches(aligned=aligned(v)):
        backward_kernel[(len(tasks),)](
            addresses, tables.layers, tasks, g, dv, norms, len(v),
            P=p, V=DTYPES[v[0].dtype], WIDE=wide, num_warps=4,
        )  # fmt: skip
    return dv
