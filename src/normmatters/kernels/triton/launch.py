"""Launching without looking twice.

Triton works out the types, alignments and special values of some thirty arguments at every launch; on a small layer
that takes longer than the kernel runs. A :class:`Launch` belongs to one shape, dtype and set of options, from which all
its integers follow, so the compiled kernel is kept and launched directly. Only the pointers' alignment can differ from
call to call: where one is not a multiple of 16 bytes, Triton's own way is taken, as it is while somebody listens to its
launches (its profiler does).

From compute capability 9.0 on, a kernel's programs take their places while the kernel before still runs (programmatic
dependent launch), and :func:`wait_for_previous`, the first thing that each of them does, holds them there until it has
ended. That hides the time that a launch takes, some microseconds, of which a layer has seven.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from normmatters.kernels import MAX_PLANS

_plans: list[Any] = []
_data_ptr = Tensor.data_ptr
# None in place of Triton's metadata for hooks, and of the two hooks: where there is one, Triton launches.
_NO_HOOKS = (None, None, None)


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr, LONG: tl.constexpr = False):
    """Nothing of the kernel before may be read, and nothing that it reads be written, until this returns.

    ``LONG``: a few programs that take their time. The next kernel's would hold the rest of the device, and whatever
    runs on other streams, for as long; so they are not placed before these have ended.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        if not LONG:
            tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def can_overlap(device: int) -> bool:
    """Whether a kernel's programs may be placed before the kernel before it has ended."""
    return device >= 0 and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def cached_plan(function: Any) -> Any:
    """Cache what ``function`` returns: the launches at one shape and one set of options."""
    cached = functools.lru_cache(MAX_PLANS)(function)
    _plans.append(cached)
    return cached


def forget_plans() -> None:
    """Empty the caches of all plans: for whoever changes how tensors are cut."""
    for cached in _plans:
        cached.cache_clear()


class Launch:
    """A kernel at one shape: its grid, its integers and its compile-time constants, in the order of its signature.

    A signature names the tensors, the integers, then other numbers, then the constants. A call passes the tensors and
    the other numbers; :meth:`by_name` takes the tensors by keyword, and checks the names at its first call.

    With ``overlaps`` the signature ends with ``OVERLAP``, which is set here, and the kernel waits for the previous one.
    Without ``contracts`` the compiler does not fuse a product and a sum, and each is rounded.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        integers: tuple[int, ...] | dict[str, int],
        constants: dict[str, Any],
        *,
        num_warps: int = 4,
        maxnreg: int | None = None,
        overlaps: bool = False,
        contracts: bool = True,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.integers = tuple(integers.values()) if isinstance(integers, dict) else integers
        self.constants = constants
        self._names = [*integers] if isinstance(integers, dict) else None
        self.options = {"num_warps": num_warps, "maxnreg": maxnreg, "enable_fp_fusion": contracts}
        self._names_checked = False
        self._compiled: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self.overlaps = overlaps
        self._values = (*constants.values(), *([None] if overlaps else []))  # a compiled kernel does not look at them

    def by_name(self, /, *numbers: float, **tensors: Tensor) -> None:
        """Launch; ``tensors`` are in the order of the kernel's signature, which is kept for quickness."""
        if not self._names_checked:
            self._check_names([*tensors], len(numbers))
        self(tensors.values(), numbers)

    def __call__(self, tensors: Iterable[Tensor], numbers: tuple[float, ...] = ()) -> None:
        """Launch on the current stream of the first tensor's device."""
        device = next(iter(tensors)).get_device()
        found = self._compiled.get(device)
        if found is not None and not _watched():
            # As integers: the launcher would ask the driver about each tensor's pointer.
            pointers = [*map(_data_ptr, tensors)]
            if not functools.reduce(operator.or_, pointers) & 15:
                launch, fixed = found
                stream = torch._C._cuda_getCurrentRawStream(device)
                launch(*self.grid, 1, stream, *fixed, *pointers, *self.integers, *numbers, *self._values)
                return
        options = self.options
        if self.overlaps:
            options = {**options, "OVERLAP": can_overlap(device), "launch_pdl": can_overlap(device)}
        # As floats: for a momentum of 1, without a point, Triton would compile a kernel that knows no other.
        numbers = tuple(map(float, numbers))
        compiled = self.kernel[self.grid](*tensors, *self.integers, *numbers, **self.constants, **options)
        if compiled is not None and not any(t.data_ptr() & 15 for t in tensors):  # the interpreter gives nothing back
            self._compiled[device] = _launcher(compiled)

    def _check_names(self, tensors: list[str], numbers: int) -> None:
        """Raise unless tensors, integers, so many numbers, and constants are the kernel's parameters in order."""
        expected = [*self.kernel.arg_names]
        before = [*tensors, *(self._names or [])]
        after = [*self.constants, *(["OVERLAP"] if self.overlaps else [])]
        given = [*before, *expected[len(before) : len(before) + numbers], *after]
        if given != expected:
            raise TypeError(f"{self.kernel.__name__} takes {expected}, got {given}")
        self._names_checked = True


def _watched() -> bool:
    """Whether somebody wants to know of every launch: a chain of hooks (empty if not), or a hook set in its place."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _launcher(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a compiled kernel, and its arguments between the stream and the kernel's own.

    Triton 3.6's launcher is a Python function around a C function: it allocates what scratch memory the kernel asks
    for, which none of ours does, and hands the rest on. The C function alone takes half the time.
    """
    run, last = compiled.run, (compiled.packed_metadata, *_NO_HOOKS)
    if triton.__version__.startswith("3.6.") and type(run).__name__ == "CudaLauncher":
        if run.global_scratch_size == 0 and run.profile_scratch_size == 0:
            fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *last)
            return run.launch, fixed
    return run, (compiled.function, *last)
