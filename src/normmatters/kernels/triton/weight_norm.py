"""Weight norm of many tensors in one launch: w = ρ·v/‖v‖_p for every row (F11–F13), and its gradient.

ρ is a tensor's, or each row's own and learned (F11, which calls it g). The results go into one flat buffer, in the
dtype that the layers compute in; gradients of the weights, g here, are read where they are. With x̂ = v/‖v‖

    dv = (ρ/‖v‖)·(g − u·⟨g, x̂⟩),   u = ∂‖v‖/∂v = x̂ (p = 2),   sign v (p = 1),   sign v on the ties of max|v|, shared
    equally (p = ∞).   dρ = ⟨g, x̂⟩.             A row of zeros has no norm: w = 0, dv = ρ·g and dρ = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.triton.rows import (
    address_table,
    aligned,
    clear_gap,
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
def _load_rho(ptr, row, rows, LEARNED: tl.constexpr):
    """ρ of each row, [R], or the one of all rows."""
    if LEARNED:
        return tl.load(ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    else:
        return tl.load(ptr)


@triton.jit
def _forward_rows(
    v_ptr,
    w_ptr,
    norm_ptr,
    rho_ptr,
    first,
    rows,
    n,
    P: tl.constexpr,
    LEARNED: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    row = first + tl.arange(0, R).to(tl.int64)
    column = tl.arange(0, B)
    rho = _load_rho(rho_ptr, row, rows, LEARNED)
    norm = _row_norms(v_ptr, row, rows, n, P, R, B)
    tl.store(norm_ptr + row, norm, mask=row < rows)
    scale = rho / tl.where(norm == 0, 1.0, norm)
    for start in range(0, n, B):
        col = start + column
        w = load_rows(v_ptr, row, col, rows, n) * scale[:, None]
        store_rows(w_ptr, w, row, col, rows, n)


@triton.jit
def _backward_rows(
    g_ptr,
    v_ptr,
    dv_ptr,
    drho_ptr,
    norm_ptr,
    rho_ptr,
    first,
    rows,
    n,
    P: tl.constexpr,
    LEARNED: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    row = first + tl.arange(0, R).to(tl.int64)
    column = tl.arange(0, B)
    norm = tl.load(norm_ptr + row, mask=row < rows, other=0.0)
    unit = tl.where(norm == 0, 1.0, norm)
    scale = _load_rho(rho_ptr, row, rows, LEARNED) / unit
    unit = unit[:, None]
    product = tl.zeros((R, B), tl.float32)
    ties = tl.zeros((R, B), tl.float32)
    for start in range(0, n, B):
        v = load_rows(v_ptr, row, start + column, rows, n)
        product += load_rows(g_ptr, row, start + column, rows, n) * (v / unit)
        if P == 0:
            ties += tl.where(tl.abs(v) == norm[:, None], 1.0, 0.0)
    along = tl.sum(product, axis=1)
    if LEARNED:
        tl.store(drho_ptr + row, along.to(drho_ptr.dtype.element_ty), mask=row < rows)
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
        dv = (load_rows(g_ptr, row, col, rows, n) - slope * along[:, None]) * scale[:, None]
        store_rows(dv_ptr, dv, row, col, rows, n)


@triton.jit
def forward_kernel(
    addresses_ptr,
    layers_ptr,
    tasks_ptr,
    w_ptr,
    norm_ptr,
    tensors,
    P: tl.constexpr,
    V: tl.constexpr,
    LEARNED: tl.constexpr,
    WIDE: tl.constexpr,
):
    tensor, first, rows, n, offset, norms = load_task(layers_ptr, tasks_ptr, tensors, WIDE)
    v_ptr = load_pointer(addresses_ptr, tensor, V, WIDE)
    rho_ptr = load_pointer(addresses_ptr, tensors + tensor, V if LEARNED else tl.float32, 1)
    w_ptr += offset
    norm_ptr += norms
    if first == 0:
        clear_gap(w_ptr, rows * n)
    if n <= 128:
        _forward_rows(v_ptr, w_ptr, norm_ptr, rho_ptr, first, rows, n, P, LEARNED, 16, 128)
    elif n <= 512:
        _forward_rows(v_ptr, w_ptr, norm_ptr, rho_ptr, first, rows, n, P, LEARNED, 4, 512)
    else:
        _forward_rows(v_ptr, w_ptr, norm_ptr, rho_ptr, first, rows, n, P, LEARNED, 1, 2048)


@triton.jit
def backward_kernel(
    addresses_ptr,
    gradients_ptr,
    layers_ptr,
    tasks_ptr,
    dv_ptr,
    drho_ptr,
    norm_ptr,
    tensors,
    P: tl.constexpr,
    V: tl.constexpr,
    LEARNED: tl.constexpr,
    G: tl.constexpr,
    WIDE: tl.constexpr,
):
    tensor, first, rows, n, offset, norms = load_task(layers_ptr, tasks_ptr, tensors, WIDE)
    g_ptr = load_pointer(gradients_ptr, tensor, G, WIDE)
    v_ptr = load_pointer(addresses_ptr, tensor, V, WIDE)
    rho_ptr = load_pointer(addresses_ptr, tensors + tensor, V if LEARNED else tl.float32, 1)
    dv_ptr += offset
    drho_ptr += norms
    norm_ptr += norms
    if first == 0:
        clear_gap(dv_ptr, rows * n)
    if n <= 128:
        _backward_rows(g_ptr, v_ptr, dv_ptr, drho_ptr, norm_ptr, rho_ptr, first, rows, n, P, LEARNED, 16, 128)
    elif n <= 512:
        _backward_rows(g_ptr, v_ptr, dv_ptr, drho_ptr, norm_ptr, rho_ptr, first, rows, n, P, LEARNED, 4, 512)
    else:
        _backward_rows(g_ptr, v_ptr, dv_ptr, drho_ptr, norm_ptr, rho_ptr, first, rows, n, P, LEARNED, 1, 2048)


class Plan:
    """The launches for one list of tensors: all that follows from their shapes.

    Args:
        v: tensors of one device and dtype whose slices along dimension 0 are dense in memory, one after the other.
        p: 1, 2 or ``INF``.
        dtype: of the weights and their gradients.
        learned: every row has a ρ of its own, of v's dtype, which gets a gradient; else ρ is a float32 scalar.
    """

    def __init__(self, v: Sequence[Tensor], p: int, dtype: torch.dtype, learned: bool) -> None:
        self.dtype, self.learned = dtype, learned
        self._tables = tables_of(list(v))
        forward: dict[str, Any] = {"P": p, "V": DTYPES[v[0].dtype], "LEARNED": learned}
        backward = {**forward, "G": DTYPES[dtype]}
        self._forward = self._tables.launches(forward_kernel, forward)
        self._backward = self._tables.launches(backward_kernel, backward)

    def forward(self, v: Sequence[Tensor], rho: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """All weights in one flat buffer, at ``places_of`` their sizes and in the memory order of v; and all norms.

        Args:
            v: tensors like those that the plan was made for.
            rho: for each a scalar, or one number for each row, dense in memory.
        """
        pointers = [*map(Tensor.data_ptr, v)]
        addresses = address_table([*pointers, *map(Tensor.data_ptr, rho)], self._tables)
        w = torch.empty(self._tables.numel, dtype=self.dtype, device=v[0].device)
        norms = torch.empty(self._tables.rows, dtype=torch.float32, device=v[0].device)
        for launch, tasks in self._forward[aligned(pointers)]:
            launch((addresses, self._tables.layers, tasks, w, norms))
        return w, norms

    def backward(
        self, g: list[int], v: Sequence[Tensor], rho: Sequence[Tensor], norms: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of all v in one flat buffer, and those of all ρ, row after row, if they are learned.

        Args:
            g: where the gradient of each weight is, laid out as its v.
            v, rho, norms: as in :meth:`forward`.
        """
        pointers = [*map(Tensor.data_ptr, v)]
        addresses = address_table([*pointers, *map(Tensor.data_ptr, rho)], self._tables)
        gradients = address_table(g, self._tables)
        dv = torch.empty(self._tables.numel, dtype=v[0].dtype, device=v[0].device)
        drho = torch.empty(norms.shape, dtype=dv.dtype, device=dv.device) if self.learned else None
        for launch, tasks in self._backward[aligned(pointers + g)]:
            # If ρ is not learned, nothing is written there.
            launch((addresses, gradients, self._tables.layers, tasks, dv, norms if drho is None else drho, norms))
        return dv, drho
