"""Row operations of the optimizers, each in one launch for all weights of a model.

- `RotationPlan` turns every row by one angle and takes the gradient into the momentum on the way (`AngularSGD`).
- `RowNormsPlan` measures the norm of every row, and how far the row turned (`NormRecorder`).
- `RowScalesPlan` multiplies every row by its own number (`StepSizeCorrection`).

A tensor counts as a matrix: dimension 0 counts its rows, and each row is dense in memory. Rows differ in length, from a
few numbers to a whole embedding, so a program takes a tile of several short rows, or a long row piece by piece. Two
tables tell a program which rows are its own. One depends on shapes alone and is made once. The other holds addresses,
and is sent again only when they change.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import OrderedDict
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.triton.launch import Launch

# Tiles of 2048 elements: (rows, longest row). The last one takes longer rows piece by piece. The kernels below choose
# among them by the same numbers.
TILES = ((16, 128), (4, 512), (1, 2048))
# Elements of one wide load: 16 bytes of float32.
_WIDE = 4
# In a flat buffer the results of each tensor begin at a multiple of this many elements: half-precision matrix kernels
# are fastest on weights that are aligned so.
PIECE = tl.constexpr(64)
_MAX_ADDRESS_TABLES = 256
_MAX_TABLES = 256
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# What the direction of a rotation is: given, a momentum buffer that first takes in the gradient, or Nesterov's form.
GIVEN, MOMENTUM, NESTEROV = 0, 1, 2
# What plans take. One program works along a whole row; for longer rows PyTorch's many programs are faster.
ROTATED, MEASURED, LONGEST_ROW = (torch.float32,), tuple(TYPES), 2**16


@triton.jit
def load_task(layers_ptr, tasks_ptr, tensors, WIDE: tl.constexpr):
    """This program's tensor and first row; the tensor's rows, their length, and where its results begin."""
    tensor = tl.load(tasks_ptr + 2 * tl.program_id(0))
    first = tl.load(tasks_ptr + 2 * tl.program_id(0) + 1)
    n = tl.load(layers_ptr + tensor)
    rows = tl.load(layers_ptr + tensors + tensor)
    offset = tl.load(layers_ptr + 2 * tensors + tensor)
    rows_before = tl.load(layers_ptr + 3 * tensors + tensor)
    # These change no number. They show the compiler the factor that allows wide loads.
    n = n // WIDE * WIDE
    offset = offset // WIDE * WIDE
    return tensor, first, rows, n, offset, rows_before


@triton.jit
def load_pointer(addresses_ptr, index, TYPE: tl.constexpr, WIDE: tl.constexpr):
    ptr = tl.load(addresses_ptr + index).to(tl.pointer_type(TYPE))
    if WIDE > 1:
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def load_rows(ptr, row, col, rows, n):
    """A tile of rows of length n in float32; zero outside."""
    inside = (row < rows)[:, None] & (col < n)[None, :]
    return tl.load(ptr + row[:, None] * n + col[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, value, row, col, rows, n):
    inside = (row < rows)[:, None] & (col < n)[None, :]
    tl.store(ptr + row[:, None] * n + col[None, :], value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def clear_gap(ptr, numel):
    """Write zeros from the end of a tensor's ``numel`` results to the start of the next tensor's."""
    lane = tl.arange(0, PIECE)
    tl.store(ptr + numel + lane, tl.zeros((PIECE,), ptr.dtype.element_ty), mask=lane < (PIECE - numel % PIECE) % PIECE)


class Tables(NamedTuple):
    """Where the rows lie. Depends on shapes alone."""

    layers: (
        Tensor  # int64 [4, tensors]: row length, rows, where results begin in a flat buffer, rows of earlier tensors
    )
    tasks: tuple[tuple[int, Tensor], ...]  # (elements per load, int32 [programs, 2]: tensor and first row)
    rows: int
    numel: int  # of the flat buffer

    def launches(self, kernel: Any, constants: dict[str, Any]) -> dict[bool, list[tuple[Launch, Tensor]]]:
        """Launches with their tasks, for tensors that are all `aligned` (True) and for others (False).

        Rows that allow wide loads get a launch of their own. The kernel takes one integer, the number of tensors; its
        last constant is WIDE.
        """
        return {
            aligned: [
                (Launch(kernel, (len(tasks), 1), {**constants, "tensors": self.layers.shape[1], "WIDE": width}), tasks)
                for wide, tasks in self.tasks
                for width in (wide if aligned else 1,)
            ]
            for aligned in (True, False)
        }


_tables: OrderedDict[tuple[torch.device, tuple[tuple[int, int], ...]], Tables] = OrderedDict()
_captured: dict[int, Tables] = {}  # by id, for good: a CUDA graph that reads them may be replayed at any time
_addresses: dict[tuple[torch.device, int, tuple[int, ...]], Tensor] = {}


def places_of(sizes: list[int]) -> tuple[list[int], int]:
    """The start of each piece of these sizes in one flat buffer, and the size of the buffer."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // PIECE.value) * PIECE.value
    return places, end


def tables_of(tensors: list[Tensor]) -> Tables:
    """The tables for these shapes. A plan holds those that it launches with; of the others the oldest are dropped."""
    shapes = tuple((x.numel() // x.shape[0], x.shape[0]) for x in tensors)
    device = tensors[0].device
    tables = _tables.get((device, shapes))
    if tables is None:
        layers: list[list[int]] = []
        tasks: dict[int, list[tuple[int, int]]] = {_WIDE: [], 1: []}
        places, numel = places_of([n * rows for n, rows in shapes])
        rows_before = 0
        for t, ((n, rows), place) in enumerate(zip(shapes, places)):
            layers.append([n, rows, place, rows_before])
            block = next((r for r, longest in TILES if n <= longest), 1)
            wide = _WIDE if n % _WIDE == 0 else 1
            tasks[wide] += [(t, first) for first in range(0, rows, block)]
            rows_before += rows
        lists = tuple((w, _to_device(one, torch.int32, device)) for w, one in tasks.items() if one)
        matrix = _to_device(list(zip(*layers)), torch.int64, device)
        # `setdefault`, because another thread may have made them meanwhile.
        tables = _tables.setdefault((device, shapes), Tables(matrix, lists, rows_before, numel))
        if len(_tables) > _MAX_TABLES:
            _tables.popitem(last=False)
    return tables


def _to_device(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers as a tensor, made on the host whatever the default device is."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device)


def address_table(pointers: list[int], tables: Tables) -> Tensor:
    """These addresses as an int64 tensor on the device of ``tables``, which the same launch uses."""
    device = tables.layers.device
    if device.type != "cuda":
        return torch.tensor(pointers, device=device)
    if torch.cuda.is_current_stream_capturing():
        _captured[id(tables)] = tables
        # A graph gets a table of its own. Its entries are arguments of a kernel, because a graph may not copy from the
        # host.
        table = torch.zeros(len(pointers), dtype=torch.int64, device=device)
        torch._foreach_add_(list(table.unbind()), pointers)
        return table
    # One table per stream: the stream that fills a table is the one that reads it and frees it, so the order is right.
    key = (device, torch.cuda.current_stream(device).cuda_stream, tuple(pointers))
    kept = _addresses.get(key)  # looked up once: another thread may clear them
    if kept is None:
        if len(_addresses) >= _MAX_ADDRESS_TABLES:
            _addresses.clear()
        # Pinned, so that the host need not wait for the device.
        kept = _addresses[key] = torch.tensor(pointers, device="cpu").pin_memory().to(device, non_blocking=True)
    return kept


def aligned(pointers: list[int]) -> bool:
    """Whether a wide load may begin at each of these addresses."""
    return not functools.reduce(operator.or_, pointers) & 15


# Norms and angles. A program reads a tile of rows once, and with angles a second time from cache. So a launch costs one
# read of the weights, and with angles two reads and one write. Every sum has one order: equal runs give equal bits.


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
        # w = (1 + c)·b + p with p orthogonal to b, from w − b, which is exact where w hardly moved. The cosine, or
        # 1 + c itself, would lose every angle below float32's √eps; ‖w − b‖² − c²‖b‖² would lose the angle of a row
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
        # tan(θ/2) = sin θ/(1 + cos θ) = (1 − cos θ)/sin θ: take the form without a difference of close numbers.
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


class _FixedPlan:
    """The launches for tensors that stay where they are: only what they hold changes from call to call.

    Args:
        kernel: takes the addresses of ``tensors``.
        tensors: all tensors, list after list.
        wide: which of them must be aligned for wide loads, the weights first.
        constants: of the kernel.
    """

    def __init__(self, kernel: Any, tensors: list[Tensor], wide: list[list[Tensor]], **constants: Any) -> None:
        weights = wide[0]
        self._tables = tables_of(weights)
        self._tensors = tensors  # held, because the kernel has nothing but their addresses
        self._pointers = [x.data_ptr() for x in tensors]
        launches = self._tables.launches(kernel, {"TYPE": TYPES[weights[0].dtype], **constants})
        self._launches = launches[aligned([x.data_ptr() for x in chain(*wide)])]

    def __call__(self) -> None:
        """Work on what the tensors hold now."""
        addresses = address_table(self._pointers, self._tables)
        for launch, tasks in self._launches:
            launch((addresses, self._tables.layers, tasks))


class RowNormsPlan(_FixedPlan):
    """Measures one list of weights and writes the results to fixed places.

    Args:
        weights: tensors of one device and one dtype of `TYPES` whose slices along dimension 0 are dense in memory.
        norms: for each weight `[rows]` float32, dense: takes the norm of each row.
        previous: the weights of the last call, each strided as its weight; overwritten by the present ones.
        tangents: as ``norms``, takes tan(θ/2) of the angle θ between each previous and present row; nan for norm 0.
    """

    def __init__(
        self,
        weights: list[Tensor],
        norms: list[Tensor],
        previous: list[Tensor] | None = None,
        tangents: list[Tensor] | None = None,
    ) -> None:
        if previous is None or tangents is None:
            super().__init__(_row_norms, [*norms, *weights], [weights], ANGLE=False)
        else:
            tensors = [*norms, *weights, *previous, *tangents]
            super().__init__(_row_norms, tensors, [weights, previous], ANGLE=True)


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


class RowScalesPlan(_FixedPlan):
    """Multiplies one list of weights by factors from fixed places.

    Args:
        weights: as for `RowNormsPlan`.
        ratios: for each weight `[rows]` float32, dense: the factor of each row.
    """

    def __init__(self, weights: list[Tensor], ratios: list[Tensor]) -> None:
        super().__init__(_scale_rows, [*weights, *ratios], [weights])


# Rotation. A program takes a tile of rows: their momentum, their dot products, the part of the direction that is
# orthogonal to each row, then the turned rows. They come from DRAM once and from cache after that, so a launch costs
# three reads and one write, and with momentum one more write.


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
    # Reduced in every round: sums of whole tiles would take the registers that more loads in flight need.
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
        # Of the gradient the largest number, because a square could underflow to zero.
        parts = tl.reduce((w * w, w * d, d * d, tl.abs(g)), 1, _gather)
        ww += parts[0]
        wd += parts[1]
        dd += parts[2]
        gg = tl.maximum(gg, parts[3])
    norm = tl.where(ww == 0, 0.0, norm)  # a pruned row has no direction and stays 0
    ww = tl.where(ww == 0, 1.0, ww)
    along = wd / ww
    if FORM > 0:
        tl.debug_barrier()  # below, a thread may load what another thread stored above

    pp = tl.zeros((R,), tl.float32)
    for start in range(0, n, B):
        w = load_rows(w_ptr, row, start + column, rows, n)
        d = load_rows(d_ptr, row, start + column, rows, n)
        if FORM == 2:
            d = momentum * d + sign * load_rows(g_ptr, row, start + column, rows, n)
        # Subtract first, square then: dd − wd²/ww would lose the digits of a direction that is nearly parallel to w.
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
    """Turns the rows of one list of weights; holds what follows from their shapes.

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
        """Turn each row of ``weights`` by ``angle`` away from ``directions``, as `rotate_channel_` does.

        Args:
            weights: of the shapes that the plan was made for.
            directions, grads: each strided as its weight. With momentum, b ← momentum·b + sign·g is written to
                ``directions`` and the rows turn away from b, or in Nesterov's form from momentum·b + sign·g.
            norms: for each weight the new norm of its rows, dense.
            angle: in radians; the host does not read a tensor.
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
