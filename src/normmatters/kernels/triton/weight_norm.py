"""Bounded weight norm of many tensors in one launch: w = ρ·v/‖v‖_p for every row (F12, F13), and its gradient.

The tensors of a model differ in shape, so a program looks up in tables which rows of which tensor are its own. The
results go into one flat buffer, in the dtype that the layers compute in. With x̂ = v/‖v‖ the gradient is

    dv = (ρ/‖v‖)·(g − u·⟨g, x̂⟩),   u = ∂‖v‖/∂v = x̂ (p = 2),   sign v (p = 1),   sign v on the ties of max|v|, shared
    equally (p = ∞).                                A row of zeros has no norm: w = 0 and dv = ρ·g.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
INF = 0  # p = ∞, as the kernels see it

# Tiles of 2048 elements: rows, and the longest row that each is for. The last one loops along longer rows.
TILES = ((16, 128), (4, 512), (1, 2048))
# Elements that one wide load takes (float32).
_WIDE = 4
_MAX_TABLES = 256


@triton.jit
def _load(ptr, row, col, rows, n):
    """A tile of rows of length n, [R, B] in float32; zero outside."""
    inside = (row < rows)[:, None] & (col < n)[None, :]
    return tl.load(ptr + row[:, None] * n + col[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _row_norms(v_ptr, row, rows, n, P: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """‖v‖_p of each row, [R]."""
    column = tl.arange(0, B)
    total = tl.zeros((R, B), tl.float32)
    for start in range(0, n, B):
        x = tl.abs(_load(v_ptr, row, start + column, rows, n))
        total = total + x if P == 1 else tl.maximum(total, x)
    if P == 1:
        return tl.sum(total, axis=1)
    largest = tl.max(total, axis=1)
    if P == 2:
        # Squares leave float32's range long before the numbers do, so take them of x/max|x|.
        unit = tl.where(largest == 0, 1.0, largest)
        squares = tl.zeros((R, B), tl.float32)
        for start in range(0, n, B):
            x = _load(v_ptr, row, start + column, rows, n) / unit[:, None]
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
        w = _load(v_ptr, row, col, rows, n) * scale[:, None]
        inside = (row < rows)[:, None] & (col < n)[None, :]
        tl.store(w_ptr + row[:, None] * n + col[None, :], w.to(w_ptr.dtype.element_ty), mask=inside)


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
        v = _load(v_ptr, row, start + column, rows, n)
        product += _load(g_ptr, row, start + column, rows, n) * (v / unit)
        if P == 0:
            ties += tl.where(tl.abs(v) == norm[:, None], 1.0, 0.0)
    along = tl.sum(product, axis=1)
    if P == 0:
        along = along / tl.sum(ties, axis=1)
    for start in range(0, n, B):
        col = start + column
        v = _load(v_ptr, row, col, rows, n)
        if P == 2:
            slope = v / unit
        else:
            slope = tl.where(v > 0, 1.0, tl.where(v < 0, -1.0, 0.0))
            if P == 0:
                slope = tl.where(tl.abs(v) == norm[:, None], slope, 0.0)
        dv = (_load(g_ptr, row, col, rows, n) - slope * along[:, None]) * (rho / unit)
        inside = (row < rows)[:, None] & (col < n)[None, :]
        tl.store(dv_ptr + row[:, None] * n + col[None, :], dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _task(addresses_ptr, layers_ptr, tasks_ptr, tensors, V: tl.constexpr, WIDE: tl.constexpr):
    """What this program is to do: the first row, and where its tensor, its ρ and its results lie."""
    t = tl.load(tasks_ptr + 2 * tl.program_id(0))
    first = tl.load(tasks_ptr + 2 * tl.program_id(0) + 1)
    n = tl.load(layers_ptr + t)
    rows = tl.load(layers_ptr + tensors + t)
    offset = tl.load(layers_ptr + 2 * tensors + t)
    norms = tl.load(layers_ptr + 3 * tensors + t)
    v_ptr = tl.load(addresses_ptr + t).to(tl.pointer_type(V))
    rho = tl.load(tl.load(addresses_ptr + tensors + t).to(tl.pointer_type(tl.float32)))
    if WIDE > 1:
        # Nothing but hints for wide loads: the compiler sees the factor.
        n = n // WIDE * WIDE
        offset = offset // WIDE * WIDE
        v_ptr = tl.multiple_of(v_ptr, 16)
    return first, rows, n, offset, norms, v_ptr, rho


@triton.jit
def forward_kernel(
    addresses_ptr, layers_ptr, tasks_ptr, w_ptr, norm_ptr, tensors, P: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr
):
    first, rows, n, offset, norms, v_ptr, rho = _task(addresses_ptr, layers_ptr, tasks_ptr, tensors, V, WIDE)
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
    first, rows, n, offset, norms, v_ptr, rho = _task(addresses_ptr, layers_ptr, tasks_ptr, tensors, V, WIDE)
    if n <= 128:
        _backward_rows(g_ptr + offset, v_ptr, dv_ptr + offset, norm_ptr + norms, rho, first, rows, n, P, 16, 128)
    elif n <= 512:
        _backward_rows(g_ptr + offset, v_ptr, dv_ptr + offset, norm_ptr + norms, rho, first, rows, n, P, 4, 512)
    else:
        _backward_rows(g_ptr + offset, v_ptr, dv_ptr + offset, norm_ptr + norms, rho, first, rows, n, P, 1, 2048)


class Tables(NamedTuple):
    """Where everything lies; it depends on shapes alone."""

    layers: Tensor  # int64 [4, tensors]: row length, rows, first element in the flat buffer, first row among all
    tasks: tuple[tuple[int, Tensor], ...]  # (elements a load, int32 [programs, 2]: tensor and first row)
    rows: int
    numel: int


_tables: dict[tuple[torch.device, tuple[tuple[int, int], ...]], Tables] = {}
_addresses: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}


def _tables_of(v: list[Tensor]) -> Tables:
    shapes = tuple((x.numel() // x.shape[0], x.shape[0]) for x in v)
    device = v[0].device
    if (device, shapes) not in _tables:
        columns: list[list[int]] = []
        tasks: dict[int, list[tuple[int, int]]] = {_WIDE: [], 1: []}
        offset = norms = 0
        for t, (n, rows) in enumerate(shapes):
            columns.append([n, rows, offset, norms])
            block = next((r for r, longest in TILES if n <= longest), 1)
            wide = _WIDE if n % _WIDE == 0 and offset % _WIDE == 0 else 1
            tasks[wide] += [(t, first) for first in range(0, rows, block)]
            offset, norms = offset + n * rows, norms + rows
        layers = torch.tensor(columns, dtype=torch.int64).t().contiguous().to(device)
        lists = tuple((w, torch.tensor(one, dtype=torch.int32).to(device)) for w, one in tasks.items() if one)
        _tables[device, shapes] = Tables(layers, lists, norms, offset)
    return _tables[device, shapes]


def _addresses_of(v: list[Tensor], rho: list[Tensor]) -> tuple[Tensor, bool]:
    """The addresses of all tensors, on the device, and whether wide loads may be used on the first ones."""
    pointers = tuple(x.data_ptr() for xs in (v, rho) for x in xs)
    device = v[0].device
    aligned = all(pointer % 16 == 0 for pointer in pointers[: len(v)])
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A graph keeps a table of its own. Its entries travel as arguments of a kernel, not as a copy from the host.
        table = torch.zeros(len(pointers), dtype=torch.int64, device=device)
        torch._foreach_add_(list(table.unbind()), list(pointers))
        return table, aligned
    if (device, pointers) not in _addresses:
        if len(_addresses) >= _MAX_TABLES:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a kernel on another stream may still read a table
            _addresses.clear()
        _addresses[device, pointers] = torch.tensor(pointers, dtype=torch.int64).to(device)
    return _addresses[device, pointers], aligned


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
    tables = _tables_of(v)
    addresses, aligned = _addresses_of(v, rho)
    w = torch.empty(tables.numel, dtype=dtype, device=v[0].device)
    norms = torch.empty(tables.rows, dtype=torch.float32, device=v[0].device)
    for wide, tasks in tables.tasks:
        forward_kernel[(len(tasks),)](
            addresses, tables.layers, tasks, w, norms, len(v),
            P=p, V=DTYPES[v[0].dtype], WIDE=wide if aligned else 1, num_warps=4,
        )  # fmt: skip
    return w, norms


def backward(g: Tensor, v: list[Tensor], rho: list[Tensor], norms: Tensor, p: int) -> Tensor:
    """The gradients of all v in one flat buffer, from ``g``, the gradient of the flat weights."""
    tables = _tables_of(v)
    addresses, aligned = _addresses_of(v, rho)
    dv = torch.empty(tables.numel, dtype=v[0].dtype, device=v[0].device)
    for wide, tasks in tables.tasks:
        backward_kernel[(len(tasks),)](
            addresses, tables.layers, tasks, g, dv, norms, len(v),
            P=p, V=DTYPES[v[0].dtype], WIDE=wide if aligned else 1, num_warps=4,
        )  # fmt: skip
    return dv
