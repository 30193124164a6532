"""Turn every row of many matrices by one angle, in one launch: the kernel behind `normmatters.optim.AngularSGD`.

A program takes a tile of rows: their momentum, their dot products, then the part of the direction that is orthogonal to
each, then the turned rows. They are read from DRAM once and found in cache after that, so the launch costs three reads
and one write, and with momentum one write more.
"""

from __future__ import annotations

import math
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.triton.rows import (
    address_table,
    aligned,
    load_pointer,
    load_rows,
    load_task,
    store_rows,
    tables_of,
)

# What a direction is: as it is given, a momentum buffer that takes in the gradient first, or Nesterov's form of that.
GIVEN, MOMENTUM, NESTEROV = 0, 1, 2


@triton.jit
def _gather(a0, b0, c0, d0, a1, b1, c1, d1):
    return a0 + a1, b0 + b1, c0 + c1, tl.maximum(d0, d1)


@triton.jit
def _rotate(
    w_ptr,
    d_ptr,
    g_ptr,
    norm_ptr,
    cos,
    sin,
    tolerance,
    momentum,
    sign,
    first,
    rows,
    n,
    FORM: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    row = first + tl.arange(0, R).to(tl.int64)
    column = tl.arange(0, B)
    norm = tl.load(norm_ptr + row, mask=row < rows, other=0.0)
    # Reduced in every round: sums of whole tiles would take the registers that more rows on their way need.
    ww = tl.zeros((R,), tl.float32)
    wd = tl.zeros((R,), tl.float32)
    dd = tl.zeros((R,), tl.float32)
    gg = tl.zeros((R,), tl.float32)
    for start in range(0, n, B):
        w = load_rows(w_ptr, row, start + column, rows, n)
        d = load_rows(d_ptr, row, start + column, rows, n)
        g = load_rows(g_ptr, row, start + column, rows, n)
        if FORM > 0:
            d = momentum * d + sign * g
            store_rows(d_ptr, d, row, start + column, rows, n)
        if FORM == 2:
            d = momentum * d + sign * g
        # The gradient's largest number, as a square could underflow to zero.
        parts = tl.reduce((w * w, w * d, d * d, tl.abs(g)), 1, _gather)
        ww += parts[0]
        wd += parts[1]
        dd += parts[2]
        gg = tl.maximum(gg, parts[3])
    norm = tl.where(ww == 0, 0.0, norm)  # a pruned row has no direction: it stays 0
    ww = tl.where(ww == 0, 1.0, ww)
    along = wd / ww
    if FORM > 0:
        tl.debug_barrier()  # what one thread has stored another may load below

    pp = tl.zeros((R,), tl.float32)
    for start in range(0, n, B):
        w = load_rows(w_ptr, row, start + column, rows, n)
        d = load_rows(d_ptr, row, start + column, rows, n)
        if FORM == 2:
            d = momentum * d + sign * load_rows(g_ptr, row, start + column, rows, n)
        # Subtract first, square after: dd − wd²/ww would lose the digits of a direction that is nearly along w.
        p = d - along[:, None] * w
        pp += tl.sum(p * p, axis=1)
    perpendicular = tl.sqrt_rn(pp)

    turns = (gg > 0) & (perpendicular > tolerance * tl.sqrt_rn(dd))
    a = tl.where(turns, cos, 1.0) * norm / tl.sqrt_rn(ww)
    b = tl.where(turns, sin * norm / tl.where(turns, perpendicular, 1.0), 0.0)
    for start in range(0, n, B):
        w = load_rows(w_ptr, row, start + column, rows, n)
        d = load_rows(d_ptr, row, start + column, rows, n)
        if FORM == 2:
            d = momentum * d + sign * load_rows(g_ptr, row, start + column, rows, n)
        p = d - along[:, None] * w
        store_rows(w_ptr, a[:, None] * w - b[:, None] * p, row, start + column, rows, n)


@triton.jit
def _rotate_rows(
    addresses_ptr,
    layers_ptr,
    tasks_ptr,
    turn_ptr,
    tensors,
    cos,
    sin,
    tolerance,
    momentum,
    sign,
    FORM: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    WIDE: tl.constexpr,
):
    t, first, rows, n, _offset, _before = load_task(layers_ptr, tasks_ptr, tensors, WIDE)
    w_ptr = load_pointer(addresses_ptr, t, tl.float32, WIDE)
    d_ptr = load_pointer(addresses_ptr, tensors + t, tl.float32, WIDE)
    g_ptr = load_pointer(addresses_ptr, 2 * tensors + t, tl.float32, WIDE)
    norm_ptr = load_pointer(addresses_ptr, 3 * tensors + t, tl.float32, 1)
    if ON_DEVICE:
        cos = tl.load(turn_ptr)
        sin = tl.load(turn_ptr + 1)
    if n <= 128:
        _rotate(w_ptr, d_ptr, g_ptr, norm_ptr, cos, sin, tolerance, momentum, sign, first, rows, n, FORM, 16, 128)
    elif n <= 512:
        _rotate(w_ptr, d_ptr, g_ptr, norm_ptr, cos, sin, tolerance, momentum, sign, first, rows, n, FORM, 4, 512)
    else:
        _rotate(w_ptr, d_ptr, g_ptr, norm_ptr, cos, sin, tolerance, momentum, sign, first, rows, n, FORM, 1, 2048)


class RotationPlan:
    """The launches for one list of weights: all that follows from their shapes.

    Args:
        weights: float32 tensors of one device whose slices along dimension 0 are dense in memory.
        form: `GIVEN`, `MOMENTUM` or `NESTEROV`.
    """

    def __init__(self, weights: list[Tensor], form: int = GIVEN) -> None:
        self._tables = tables_of(weights)
        self._device = weights[0].device
        self._launches = {
            on_device: self._tables.launches(_rotate_rows, {"FORM": form, "ON_DEVICE": on_device})
            for on_device in (True, False)
        }

    def __call__(
        self,
        weights: list[Tensor],
        directions: list[Tensor],
        grads: list[Tensor],
        norms: list[Tensor],
        angle: float | Tensor,
        momentum: float = 0.0,
        sign: float = 1.0,
    ) -> None:
        """Turn each row of ``weights`` by ``angle`` away from ``directions``; see `multi_tensor`.

        Args:
            weights: as those that the plan was made for.
            directions, grads: each strided as its weight. With momentum b ← momentum·b + sign·g is written to
                ``directions``, and the rows turn away from it, or in Nesterov's form from momentum·b + sign·g.
            norms: for each weight the new norm of its rows, dense.
            angle: in radians; a tensor is not read by the host.
        """
        pointers = [*map(Tensor.data_ptr, chain(weights, directions, grads))]
        addresses = address_table([*pointers, *map(Tensor.data_ptr, norms)], self._tables)
        cos = sin = 0.0
        turn = addresses  # not read
        if isinstance(angle, Tensor):
            turn = torch.stack((angle.cos(), angle.sin())).to(self._device, torch.float32)
        else:
            cos, sin = math.cos(angle), math.sin(angle)
        numbers = (cos, sin, 16 * torch.finfo(torch.float32).eps, momentum, sign)
        for launch, tasks in self._launches[isinstance(angle, Tensor)][aligned(pointers)]:
            launch((addresses, self._tables.layers, tasks, turn), numbers)
