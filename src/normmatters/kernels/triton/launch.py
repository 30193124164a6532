"""Launching without looking twice.

Triton works out the types, alignments and special values of some thirty arguments at every launch; on a small layer
that takes longer than the kernel runs. A :class:`Launch` belongs to one shape, dtype and set of options, from which all
its integers follow, so the compiled kernel is kept and launched directly. Only the pointers' alignment can differ from
call to call: where one is not a multiple of 16 bytes, Triton's own way is taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def are_aligned(*tensors: Tensor | None) -> bool:
    """Whether all these tensors start at a multiple of 16 bytes. PyTorch's own allocations do."""
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


class Launch:
    """A kernel at one shape: its grid, its integers and its compile-time constants, in the order of its signature."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        integers: tuple[int, ...],
        constants: dict[str, Any],
        *,
        num_warps: int = 4,
        maxnreg: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.integers = integers
        self.constants = constants
        self.options = {"num_warps": num_warps, "maxnreg": maxnreg}
        self._compiled: dict[int, tuple[Any, Any, Any]] = {}
        self._values = tuple(constants.values())

    def __call__(self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...] = (), *, aligned: bool = True) -> None:
        """Launch on the current stream of the first tensor's device; ``numbers`` come after the integers."""
        device = tensors[0].get_device()
        found = self._compiled.get(device) if aligned else None
        if found is not None:
            run, function, metadata = found
            stream = torch._C._cuda_getCurrentRawStream(device)
            arguments = (*tensors, *self.integers, *numbers, *self._values)
            run(*self.grid, 1, stream, function, metadata, None, None, None, *arguments)
            return
        compiled = self.kernel[self.grid](*tensors, *self.integers, *numbers, **self.constants, **self.options)
        if aligned and compiled is not None:  # the interpreter gives nothing back
            self._compiled[device] = (compiled.run, compiled.function, compiled.packed_metadata)
