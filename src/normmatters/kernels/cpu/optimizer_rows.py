"""Row operations of the optimizers on a CPU, each in one native call for all weights of a model.

- `RotationPlan` turns every row by one angle and takes the gradient into the momentum on the way (`AngularSGD`).
- `RowNormsPlan` measures the norm of every row, and how far the row turned (`NormRecorder`).
- `RowScalesPlan` multiplies every row by its own number (`StepSizeCorrection`, `NormSchedule`).
- `momentum_step_` is a step of SGD with momentum, element by element (`WeightDecayFreeSGD`, and SGD's own).

The plans have the interface of :mod:`normmatters.kernels.triton.rows`. The kernels are in native/optimizer_rows.cpp. A
row is read from memory once: a rotation costs what a step of SGD costs. Each row's numbers depend on that row alone, so
they are the same for any number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from normmatters.kernels import backends
from normmatters.kernels.cpu import DTYPES, library

# What the direction of a rotation is: given, a momentum buffer that first takes in the gradient, or Nesterov's form.
GIVEN, MOMENTUM, NESTEROV = 0, 1, 2
# The dtypes that plans and steps take. Without the native library, or with kernels switched off, that is nothing.
ROTATED = MEASURED = STEPPED = () if backends.NATIVE_MISSING else tuple(DTYPES)
LONGEST_ROW = 2**20  # one thread works along a whole row; longer rows are better off with PyTorch's many


@functools.cache
def _function(name: str, numbers: str) -> Any:
    """A kernel; its first arguments are the table, the number of elements before each tensor, the count, the dtype."""
    opened = library()
    assert opened is not None, "ROTATED and MEASURED are empty without the library"
    return opened.function(name, "ppii" + numbers)


def _starts(tensors: Sequence[Tensor]) -> Any:
    starts = [*accumulate(map(Tensor.numel, tensors), initial=0)]
    return (ctypes.c_int64 * len(starts))(*starts)


def _table(columns: Sequence[list[int]]) -> Any:
    """The columns as an array of C structs, one for each tensor."""
    width = len(columns)
    table: Any = (ctypes.c_int64 * (width * len(columns[0])))()
    for i, column in enumerate(columns):
        table[i::width] = column
    return table


def _pointers(tensors: Sequence[Tensor]) -> list[int]:
    return [*map(Tensor.data_ptr, tensors)]


class _Rows:
    """The rows of a list of weights: what follows from their shapes and dtype."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.starts, self.count, self.dtype = _starts(weights), len(weights), DTYPES[weights[0].dtype]
        rows = [w.shape[0] for w in weights]
        self._sizes = [rows, [w.numel() // n for w, n in zip(weights, rows)]]

    def arguments(self, *columns: list[int]) -> tuple[Any, ...]:
        return _table([*columns, *self._sizes]), self.starts, self.count, self.dtype


class RotationPlan:
    """One call for a list of weights: all that follows from their shapes.

    Args:
        weights: CPU tensors of one dtype whose slices along dimension 0 are dense in memory.
        form: `GIVEN`, `MOMENTUM` or `NESTEROV`.
    """

    def __init__(self, weights: list[Tensor], form: int = GIVEN) -> None:
        self._rows, self._form = _Rows(weights), form

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
        """Turn each row of ``weights`` by ``angle`` away from ``directions``; see `normmatters.optim.channels`.

        Args:
            weights: as those that the plan was made for.
            directions, grads: each strided as its weight. With momentum b ← momentum·b + sign·g is written to
                ``directions``, and the rows turn away from it, or in Nesterov's form from momentum·b + sign·g.
            norms: for each weight the new norm of its rows, dense, in the dtype that the weight is computed in.
            angle: in radians.
        """
        arguments = self._rows.arguments(*map(_pointers, (weights, directions, grads, norms)))
        angle = float(angle)
        kernel = _function("nm_rotate_rows", "idddd")
        kernel(*arguments, self._form, math.cos(angle), math.sin(angle), momentum, sign)
        torch.autograd.graph.increment_version(weights)
        if self._form != GIVEN:
            torch.autograd.graph.increment_version(directions)


class RowNormsPlan:
    """The call that reads these weights; the tensors stay where they are.

    Args:
        weights: CPU tensors of one dtype whose slices along dimension 0 are dense in memory.
        norms: for each weight `[rows]`, dense, in the dtype that it is computed in: the norm of each row is written
            there. With ``previous`` its norm at the last reading is read there first.
        previous: for each weight a tensor strided as it is: the weight at the last reading; becomes the present one.
        tangents: for each weight `[rows]`: tan(θ/2) of the angle θ by which each row turned.
    """

    def __init__(
        self,
        weights: list[Tensor],
        norms: list[Tensor],
        previous: list[Tensor] | None = None,
        tangents: list[Tensor] | None = None,
    ) -> None:
        # The tensors are held because the table has only their addresses.
        self._tensors = [weights, norms, previous or [], tangents or []]
        none = [0] * len(weights)
        self._arguments = _Rows(weights).arguments(*(_pointers(xs) or none for xs in self._tensors))

    def __call__(self) -> None:
        _function("nm_measure_rows", "")(*self._arguments)


class RowScalesPlan:
    """The call that scales these weights; the tensors stay where they are.

    Args:
        weights: CPU tensors of one dtype whose slices along dimension 0 are dense in memory.
        ratios: for each weight `[rows]`, dense, in the dtype that it is computed in: the factor of each row.
    """

    def __init__(self, weights: list[Tensor], ratios: list[Tensor]) -> None:
        self._tensors = [weights, weights, ratios]
        self._arguments = _Rows(weights).arguments(*map(_pointers, self._tensors))

    def __call__(self) -> None:
        _function("nm_scale_rows", "")(*self._arguments)
        torch.autograd.graph.increment_version(self._tensors[0])


def momentum_step_(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    of_weight: tuple[float, float, float],
    of_buffer: tuple[float, float, float],
) -> None:
    """(Δw, b) ← M·(w, b, g) for each element, w ← w + Δw: every form of SGD with momentum is such a step.

    Args:
        params, grads, buffers: CPU tensors of one dtype of `STEPPED`, of which those that belong together are strided
            alike, without gaps. No buffers without momentum.
        of_weight, of_buffer: the rows of M, for Δw and for b.
    """
    columns = [_pointers(params), _pointers(buffers) or [0] * len(params), _pointers(grads)]
    kernel = _function("nm_momentum_step", "dddddd")
    kernel(_table(columns), _starts(params), len(params), DTYPES[params[0].dtype], *of_weight, *of_buffer)
    torch.autograd.graph.increment_version([*params, *buffers])
