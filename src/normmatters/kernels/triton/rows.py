"""The rows of many tensors in one launch: tables that tell each program which rows of which tensor are its own.

A tensor counts as a matrix: dimension 0 counts its rows, which are dense in memory, one after the other. Rows come in
all lengths, from a few numbers to a whole embedding, so a program takes a tile of several short rows, or a piece of a
long one at a time. Two tables say where everything lies. One depends on shapes alone and is made once; the other holds
the addresses of the tensors, and is sent again only if they change.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.triton.launch import Launch

# Tiles of 2048 elements: rows, and the longest row that each is for. The last one goes along longer rows in steps.
# Kernels choose among them by the same numbers.
TILES = ((16, 128), (4, 512), (1, 2048))
# Elements that one wide load takes: 16 bytes of float32.
_WIDE = 4
# The results of each tensor begin at a multiple of this many elements in a flat buffer: where half-precision matrix
# kernels like their weights to begin.
PIECE = tl.constexpr(64)
_MAX_ADDRESS_TABLES = 256
_MAX_TABLES = 256


@triton.jit
def load_task(layers_ptr, tasks_ptr, tensors, WIDE: tl.constexpr):
    """What this program is to do: the tensor, its first row, its rows and their length, and where its results begin."""
    tensor = tl.load(tasks_ptr + 2 * tl.program_id(0))
    first = tl.load(tasks_ptr + 2 * tl.program_id(0) + 1)
    n = tl.load(layers_ptr + tensor)
    rows = tl.load(layers_ptr + tensors + tensor)
    offset = tl.load(layers_ptr + 2 * tensors + tensor)
    rows_before = tl.load(layers_ptr + 3 * tensors + tensor)
    # Nothing but hints for wide loads: the compiler sees the factor.
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
    """Zeros from the end of a tensor's ``numel`` results to where the next tensor's begin."""
    lane = tl.arange(0, PIECE)
    tl.store(ptr + numel + lane, tl.zeros((PIECE,), ptr.dtype.element_ty), mask=lane < (PIECE - numel % PIECE) % PIECE)


class Tables(NamedTuple):
    """Where the rows lie; it depends on shapes alone."""

    layers: Tensor  # int64 [4, tensors]: row length, rows, where results begin in a flat buffer, rows before
    tasks: tuple[tuple[int, Tensor], ...]  # (elements a load, int32 [programs, 2]: tensor and first row)
    rows: int
    numel: int  # of the flat buffer

    def launches(self, kernel: Any, constants: dict[str, Any]) -> dict[bool, list[tuple[Launch, Tensor]]]:
        """For tensors that are all `aligned` and for others: a launch and its tasks for rows that allow wide loads, and
        one for the rest. The kernel's one integer is the number of tensors, its last constant WIDE."""
        return {
            aligned: [
                (Launch(kernel, (len(tasks), 1), (self.layers.shape[1],), {**constants, "WIDE": width}), tasks)
                for wide, tasks in self.tasks
                for width in (wide if aligned else 1,)
            ]
            for aligned in (True, False)
        }


_tables: OrderedDict[tuple[torch.device, tuple[tuple[int, int], ...]], Tables] = OrderedDict()
_captured: dict[int, Tables] = {}  # by their ids: graphs that read them may be replayed at any time
_addresses: dict[tuple[torch.device, int, tuple[int, ...]], Tensor] = {}


def places_of(sizes: list[int]) -> tuple[list[int], int]:
    """Where pieces of these sizes begin in one flat buffer, and the size of the buffer."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // PIECE.value) * PIECE.value
    return places, end


def tables_of(tensors: list[Tensor]) -> Tables:
    """The tables for these shapes. Whoever launches with them holds them; of the others the oldest go in the end."""
    shapes = tuple((x.numel() // x.shape[0], x.shape[0]) for x in tensors)
    device = tensors[0].device
    found = _tables.get((device, shapes))
    if found is None:
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
        lists = tuple((w, _sent(one, torch.int32, device)) for w, one in tasks.items() if one)
        matrix = _sent(list(zip(*layers)), torch.int64, device)
        # Another thread may have made them by now.
        found = _tables.setdefault((device, shapes), Tables(matrix, lists, rows_before, numel))
        if len(_tables) > _MAX_TABLES:
            _tables.popitem(last=False)
    return found


def _sent(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """By way of the host, whatever the default device is."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device)


def address_table(pointers: list[int], tables: Tables) -> Tensor:
    """These addresses as a tensor, int64, on the device of the tables that they will be launched with."""
    device = tables.layers.device
    if device.type != "cuda":
        return torch.tensor(pointers, device=device)
    if torch.cuda.is_current_stream_capturing():
        _captured[id(tables)] = tables
        # A graph keeps a table of its own. Its entries travel as arguments of a kernel, not as a copy from the host.
        table = torch.zeros(len(pointers), dtype=torch.int64, device=device)
        torch._foreach_add_(list(table.unbind()), pointers)
        return table
    # A table belongs to the stream that fills it, so that it is neither read too early nor freed too early.
    key = (device, torch.cuda.current_stream(device).cuda_stream, tuple(pointers))
    found = _addresses.get(key)  # once: another thread may clear them
    if found is None:
        if len(_addresses) >= _MAX_ADDRESS_TABLES:
            _addresses.clear()
        # Pinned, so that the host need not wait for the device.
        found = _addresses[key] = torch.tensor(pointers, device="cpu").pin_memory().to(device, non_blocking=True)
    return found


def aligned(pointers: list[int]) -> bool:
    """Whether a wide load may begin at each of these addresses."""
    return not functools.reduce(operator.or_, pointers) & 15
