"""Multiply every row of many matrices by its own number, in one launch: the kernel behind `StepSizeCorrection`."""

from __future__ import annotations

from itertools import chain

import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.triton.row_norms import TYPES
from normmatters.kernels.triton.rows import (
    address_table,
    aligned,
    load_pointer,
    load_rows,
    load_task,
    store_rows,
    tables_of,
)


@triton.jit
def _scale(w_ptr, ratio_ptr, first, rows, n, R: tl.constexpr, B: tl.constexpr):
    row = first + tl.arange(0, R).to(tl.int64)
    ratio = tl.load(ratio_ptr + row, mask=row < rows, other=0.0)
    for start in range(0, n, B):
        column = start + tl.arange(0, B)
        w = load_rows(w_ptr, row, column, rows, n)
        store_rows(w_ptr, ratio[:, None] * w, row, column, rows, n)


@triton.jit
def _scale_rows(addresses_ptr, layers_ptr, tasks_ptr, tensors, TYPE: tl.constexpr, WIDE: tl.constexpr):
    t, first, rows, n, _offset, _before = load_task(layers_ptr, tasks_ptr, tensors, WIDE)
    w_ptr = load_pointer(addresses_ptr, t, TYPE, WIDE)
    ratio_ptr = load_pointer(addresses_ptr, tensors + t, tl.float32, 1)
    if n <= 128:
        _scale(w_ptr, ratio_ptr, first, rows, n, 16, 128)
    elif n <= 512:
        _scale(w_ptr, ratio_ptr, first, rows, n, 4, 512)
    else:
        _scale(w_ptr, ratio_ptr, first, rows, n, 1, 2048)


class ScaledRowsPlan:
    """The launches for one list of weights and the places of their numbers; the same for every step.

    Args:
        weights: tensors of one device and one dtype of `TYPES` whose slices along dimension 0 are dense in memory.
        ratios: for each weight `[rows]` float32, dense: the factor of each row.
    """

    def __init__(self, weights: list[Tensor], ratios: list[Tensor]) -> None:
        self._tables = tables_of(weights)
        self._tensors = [*chain(weights, ratios)]  # kept, as the kernel has nothing but their addresses
        self._pointers = [x.data_ptr() for x in self._tensors]
        wide = aligned(self._pointers[: len(weights)])
        self._launches = self._tables.launches(_scale_rows, {"TYPE": TYPES[weights[0].dtype]})[wide]

    def __call__(self) -> None:
        """Scale the weights by the ratios as they are now."""
        addresses = address_table(self._pointers, self._tables)
        for launch, tasks in self._launches:
            launch((addresses, self._tables.layers, tasks))
