"""Launching without looking twice.

Triton works out the types, alignments and special values of some thirty arguments at every launch; on a small layer that
takes longer than the kernel runs. Here all integers follow from the ``key`` (shape, dtype, device, options), so the
compiled kernel is kept under it and launched directly. Only the pointers' alignment can differ from call to call: where
one is not a multiple of 16 bytes, Triton's own way is taken.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

_compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    key: Hashable,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    *,
    num_warps: int = 4,
    maxnreg: int | None = None,
) -> None:
    """Run ``kernel`` with ``args``, which come first in its signature, and ``constants``, which come last, in order."""
    aligned = not any(isinstance(a, torch.Tensor) and a.data_ptr() % 16 for a in args)
    at = (kernel, key)
    if aligned and at in _compiled:
        compiled, values = _compiled[at]
        compiled[(*grid, 1, 1)[:3]](*args, *values)
        return
    compiled = kernel[grid](*args, **constants, num_warps=num_warps, maxnreg=maxnreg)
    if aligned and compiled is not None:  # the interpreter gives nothing back
        _compiled[at] = (compiled, tuple(constants.values()))
