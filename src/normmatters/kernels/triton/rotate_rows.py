"""Turn every row of many matrices by one angle, in one launch: the kernel behind `normmatters.optim.AngularSGD`.

A program takes a tile of rows: their dot products, then the part of the direction that is orthogonal to each, then the
turned rows. They are read from DRAM once and found in cache after that, so the launch costs three reads and one write.
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


@triton.jit
def _rotate(w_ptr, d_ptr, g_ptr, norm_ptr, cos, sin, tolerance, first, rows, n, R: tl.constexpr, B: tl.constexpr):
    row = first + tl.arange(0, R).to(tl.int64)
    column = tl.arange(0, B)
    norm = tl.load(norm_ptr + row, mask=row < rows, other=0.0)
    ww = tl.zeros((R, B), tl.float32)
    wd = tl.zeros((R, B), tl.float32)
    dd = tl.zeros((R, B), tl.float32)
    gg = tl.zeros((R, B), tl.float32)
    for start in range(0, n, B):
        w = load_rows(w_ptr, row, start + column, rows, n)
        d = load_rows(d_ptr, row, start + column, rows, n)
        g = load_rows(g_ptr, row, start + column, rows, n)
        ww += w * w
        wd += w * d
        dd += d * d
        gg = tl.maximum(gg, tl.abs(g))  # a square could underflow to zero
    length2 = tl.sum(ww, axis=1)
    along = tl.sum(wd, axis=1) / length2

    pp = tl.zeros((R, B), tl.float32)
    for start in range(0, n, B):
        w = load_rows(w_ptr, row, start + column, rows, n)
        # Subtract first, square after: dd − wd²/ww would lose the digits of a direction that is nearly along w.
        p = load_rows(d_ptr, row, start + column, rows, n) - along[:, None] * w
        pp += p * p
    perpendicular = tl.sqrt_rn(tl.sum(pp, axis=1))

    turns = (tl.max(gg, axis=1) > 0) & (perpendicular > tolerance * tl.sqrt_rn(tl.sum(dd, axis=1)))
    a = tl.where(turns, cos, 1.0) * norm / tl.sqrt_rn(length2)
    b = tl.where(turns, sin * norm / tl.where(turns, perpendicular, 1.0), 0.0)
    for start in range(0, n, B):
        w = load_rows(w_ptr, row, start + column, rows, n)
        p = load_rows(d_ptr, row, start + column, rows, n) - along[:, None] * w
        store_rows(w_ptr, a[:, None] * w - b[:, None] * p, row, start + column, rows, n)


@triton.jit
def _rotate_rows(addresses_ptr, layers_ptr, tasks_ptr, angle_ptr, tensors, tolerance, WIDE: tl.constexpr):
    t, first, rows, n, _offset, _before = load_task(layers_ptr, tasks_ptr, tensors, WIDE)
    w_ptr = load_pointer(addresses_ptr, t, tl.float32, WIDE)
    d_ptr = load_pointer(addresses_ptr, tensors + t, tl.float32, WIDE)
    g_ptr = load_pointer(addresses_ptr, 2 * tensors + t, tl.float32, WIDE)
    norm_ptr = load_pointer(addresses_ptr, 3 * tensors + t, tl.float32, 1)
    cos = tl.cos(tl.load(angle_ptr))
    sin = tl.sin(tl.load(angle_ptr))
    if n <= 128:
        _rotate(w_ptr, d_ptr, g_ptr, norm_ptr, cos, sin, tolerance, first, rows, n, 16, 128)
    elif n <= 512:
        _rotate(w_ptr, d_ptr, g_ptr, norm_ptr, cos, sin, tolerance, first, rows, n, 4, 512)
    else:
        _rotate(w_ptr, d_ptr, g_ptr, norm_ptr, cos, sin, tolerance, first, rows, n, 1, 2048)


def rotate_rows_(
    weights: list[Tensor], directions: list[Tensor], grads: list[Tensor], norms: list[Tensor], angle: Tensor
) -> None:
    """Turn each row of ``weights`` by ``angle`` (0-dim float32) away from ``directions``; see `multi_tensor`.

    Args:
        weights, directions, grads: float32 tensors of one device whose slices along dimension 0 are dense in memory,
            the three of one weight strided alike.
        norms: for each weight the new norm of its rows, dense.
    """
    tables, addresses = tables_of(weights), addresses_of(weights, directions, grads, norms)
    for wide, tasks in tables.launches(aligned=aligned(weights, directions, grads)):
        _rotate_rows[(len(tasks),)](
            addresses, tables.layers, tasks, angle, len(weights), 16 * torch.finfo(torch.float32).eps, WIDE=wide
        )
