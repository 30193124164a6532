"""Large outputs of the CPU kernels, in the memory of earlier ones that nobody holds any more.

The system takes large blocks back when they are freed. To map new ones and fill them with zeros can take longer than
the kernels: it was a tenth of a training step of ResNet-18. So blocks stay, and are used again once they are free.
They never have more than half as many bytes again as were in use at once: before a block would exceed that, free ones
go, those first whose size was wanted longest ago. :func:`release_memory` lets all go.

A block is memory that Python maps. A tensor's storage holds it as long as anything holds the storage: a view, a graph,
an array of NumPy. So the number of references to the block says whether it is free.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

SMALLEST = 2**20  # bytes: smaller blocks the allocator keeps by itself
SPARE = 1.5  # of the bytes in use at once: gradients of one size are wanted while outputs of another are held


def _references(blocks: Sequence[object], i: int) -> int:
    return sys.getrefcount(blocks[i])


_FREE = _references([object()], 0)  # of a block that only its list holds; versions of Python count differently

# By bytes; the size and the block that were used last come last. A thread takes a list out while it looks through it:
# another one finds none, and makes blocks of its own. A lock could be held when the process forks.
_blocks: dict[int, list[mmap]] = {}
_peak = 0  # the most bytes that were in use when a block was made


def empty_like(x: Tensor) -> Tensor:
    """``torch.empty_like`` of a dense CPU tensor. If it is large, its storage cannot be resized.

    Example::

        >>> x = torch.empty(2**18)
        >>> first = empty_like(x).data_ptr()
        >>> empty_like(x).data_ptr() == first
        True
    """
    size = x.numel() * x.element_size()
    if size < SMALLEST:
        return torch.empty_like(x)
    blocks = _blocks.pop(size, [])
    for i in reversed(range(len(blocks))):
        if _references(blocks, i) == _FREE:
            block = blocks.pop(i)
            break
    else:
        _make_room(size, size * len(blocks))
        try:
            block = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)  # private: after a fork each process writes its own
        except OSError:  # no memory: what nobody uses may be enough, and if not the error is PyTorch's
            release_memory()
            return torch.empty_like(x)
    blocks.append(block)
    _blocks[size] = blocks
    storage = torch.frombuffer(block, dtype=x.dtype).untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape, x.stride())


def _make_room(wanted: int, in_use: int) -> None:
    """Let free blocks go where a new one of ``wanted`` bytes would be too much; ``in_use`` beside what is found."""
    global _peak
    taken = {size: _blocks.pop(size, []) for size in list(_blocks)}
    held = in_use + wanted + sum(size * len(blocks) for size, blocks in taken.items())
    in_use += wanted + sum(
        size for size, blocks in taken.items() for i in range(len(blocks)) if _references(blocks, i) != _FREE
    )
    _peak = max(_peak, in_use)
    for size, blocks in taken.items():
        for i in reversed(range(len(blocks))):
            if held > SPARE * _peak and _references(blocks, i) == _FREE:
                del blocks[i]
                held -= size
        if blocks:
            _blocks[size] = blocks


def release_memory() -> None:
    """Give back the memory that the CPU kernels hold for their next outputs, for example after training.

    Example::

        >>> output = empty_like(torch.empty(2**18))
        >>> held_bytes() >= output.nbytes
        True
        >>> release_memory()  # what is in use is freed with the tensors that use it
        >>> held_bytes()
        0
    """
    global _peak
    _blocks.clear()
    _peak = 0


def held_bytes() -> int:
    """The bytes of all blocks, free or in use."""
    return sum(size * len(blocks) for size, blocks in list(_blocks.items()))
