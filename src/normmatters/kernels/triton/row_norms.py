"""Norms of the rows of many matrices, and how far each row turned, in one launch: the kernel behind `NormRecorder`.

A program takes a tile of rows, at most twice: the second time they are found in cache. So with angles the launch costs
two reads and one write of the weights, without them one read. Every sum has one order: equal runs give equal bits.
"""

from __future__ import annotations

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

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _measure(
    w_ptr, b_ptr, norm_ptr, tangent_ptr, first, rows, n, ANGLE: tl.constexpr, R: tl.constexpr, B: tl.constexpr
):
    row = first + tl.arange(0, R).to(tl.int64)
    column = tl.arange(0, B)
    ww = tl.zeros((R, B), tl.float32)
    bb = tl.zeros((R, B), tl.float32)
    db = tl.zeros((R, B), tl.float32)
    for start in range(0, n, B):
        w = load_rows(w_ptr, row, start + column, rows, n)
        ww += w * w
        if ANGLE:
            b = load_rows(b_ptr, row, start + column, rows, n)
            bb += b * b
            db += (w - b) * b
    norm = tl.sqrt_rn(tl.sum(ww, axis=1))
    tl.store(norm_ptr + row, norm, mask=row < rows)

    if ANGLE:
        # w = (1 + c)·b + p with p orthogonal to b. From the difference w − b, which is exact where w hardly moved: the
        # cosine, or 1 + c itself, would lose every angle below float32's √eps, and ‖w − b‖² − c²‖b‖² those of a row
        # that grew more than it turned.
        before2 = tl.sum(bb, axis=1)
        c = tl.sum(db, axis=1) / before2
        pp = tl.zeros((R, B), tl.float32)
        for start in range(0, n, B):
            w = load_rows(w_ptr, row, start + column, rows, n)
            b = load_rows(b_ptr, row, start + column, rows, n)
            p = (w - b) - c[:, None] * b
            pp += p * p
            store_rows(b_ptr, w, row, start + column, rows, n)
        across = tl.sqrt_rn(tl.sum(pp, axis=1))
        along = tl.sqrt_rn(before2) * (1 + c)
        # tan(θ/2) = sin θ/(1 + cos θ) = (1 − cos θ)/sin θ: the one without a difference of near numbers.
        tangent = tl.where(along >= 0, across / (norm + along), (norm - along) / across)
        tl.store(tangent_ptr + row, tangent, mask=row < rows)


@triton.jit
def _row_norms(
    addresses_ptr, layers_ptr, tasks_ptr, tensors, TYPE: tl.constexpr, ANGLE: tl.constexpr, WIDE: tl.constexpr
):
    t, first, rows, n, _offset, _before = load_task(layers_ptr, tasks_ptr, tensors, WIDE)
    norm_ptr = load_pointer(addresses_ptr, t, tl.float32, 1)
    w_ptr = load_pointer(addresses_ptr, tensors + t, TYPE, WIDE)
    b_ptr = w_ptr
    tangent_ptr = norm_ptr
    if ANGLE:
        b_ptr = load_pointer(addresses_ptr, 2 * tensors + t, TYPE, WIDE)
        tangent_ptr = load_pointer(addresses_ptr, 3 * tensors + t, tl.float32, 1)
    if n <= 128:
        _measure(w_ptr, b_ptr, norm_ptr, tangent_ptr, first, rows, n, ANGLE, 16, 128)
    elif n <= 512:
        _measure(w_ptr, b_ptr, norm_ptr, tangent_ptr, first, rows, n, ANGLE, 4, 512)
    else:
        _measure(w_ptr, b_ptr, norm_ptr, tangent_ptr, first, rows, n, ANGLE, 1, 2048)


class RowNormsPlan:
    """The launches for one list of weights and the places of their results; the same for every reading.

    Args:
        weights: tensors of one device and one dtype of `TYPES` whose slices along dimension 0 are dense in memory.
        norms: for each weight `[rows]` float32, dense: the norm of each row will be written there.
        previous: the weights of before, each strided as its weight; overwritten by the weights.
        tangents: as ``norms``: tan(θ/2) of the angle θ between the rows of before and of now; nan where a norm is 0.
    """

    def __init__(
        self,
        weights: list[Tensor],
        norms: list[Tensor],
        previous: list[Tensor] | None = None,
        tangents: list[Tensor] | None = None,
    ) -> None:
        angles = [] if previous is None or tangents is None else [previous, tangents]
        self._tables = tables_of(weights)
        self._tensors = [*chain(norms, weights, *angles)]  # kept, as the kernel has nothing but their addresses
        self._pointers = [x.data_ptr() for x in self._tensors]
        constants = {"TYPE": TYPES[weights[0].dtype], "ANGLE": bool(angles)}
        wide = aligned([x.data_ptr() for x in chain(weights, *angles[:1])])
        self._launches = self._tables.launches(_row_norms, constants)[wide]

    def __call__(self) -> None:
        """Measure the weights as they are now."""
        addresses = address_table(self._pointers, self._tables)
        for launch, tasks in self._launches:
            launch((addresses, self._tables.layers, tasks))
