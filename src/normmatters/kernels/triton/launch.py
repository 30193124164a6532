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
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton import knobs

from normmatters.kernels import MAX_PLANS

_plans: list[Any] = []
_data_ptr = Tensor.data_ptr


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
    """A kernel at one shape.

    The kernel's tensors have names that end in ``_ptr`` and come first. ``values`` has its integers and compile-time
    constants by name, and may have more: kernels of one shape share most of them. The other parameters are numbers that
    change from call to call. A kernel with the parameter ``OVERLAP``, its last one, waits for the kernel before.

    Without ``contracts`` the compiler does not fuse a product and a sum, and each is rounded.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        values: Mapping[str, Any],
        *,
        num_warps: int = 4,
        maxnreg: int | None = None,
        contracts: bool = True,
    ) -> None:
        names = [*kernel.arg_names]
        self.kernel, self.grid = kernel, grid
        self.overlaps = names[-1] == "OVERLAP"
        self.tensors = [name for name in names if name.endswith("_ptr")]
        others = names[len(self.tensors) : len(names) - self.overlaps]
        self.numbers = [name for name in others if name not in values]
        first = others.index(self.numbers[0]) if self.numbers else 0
        before, after = others[:first], others[first + len(self.numbers) :]
        if [*self.tensors, *before, *self.numbers, *after] != names[: len(names) - self.overlaps]:
            raise TypeError(f"{kernel.__name__} takes {names}: its tensors first, and its numbers together")
        self.options = {"num_warps": num_warps, "maxnreg": maxnreg, "enable_fp_fusion": contracts}
        self.before = tuple(values[name] for name in before)
        self.named = {name: values[name] for name in after}
        # A compiled kernel does not look at constants, so OVERLAP may be anything.
        self.after = (*self.named.values(), *([None] if self.overlaps else []))
        self.compiled: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self._alone = Launches(self)

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[float] = ()) -> None:
        """Launch with the tensors and numbers in the order of the kernel's signature."""
        self._alone(dict(zip(self.tensors, tensors)), numbers)

    def by_triton(self, device: int, tensors: Mapping[str, Tensor], numbers: Sequence[float]) -> None:
        """Launch as Triton does, and keep the compiled kernel for the next time."""
        overlap = {"OVERLAP": can_overlap(device), "launch_pdl": can_overlap(device)} if self.overlaps else {}
        given = [tensors[name] for name in self.tensors]
        # As floats: for a momentum of 1, without a point, Triton would compile a kernel that knows no other.
        changing = map(float, numbers if self.numbers else ())
        compiled = self.kernel[self.grid](*given, *self.before, *changing, **self.named, **self.options, **overlap)
        if compiled is not None and not any(t.data_ptr() & 15 for t in given):  # the interpreter returns None
            self.compiled[device] = _launcher(compiled)


class Launches:
    """Kernels that are launched one after the other; what a launch needs beside its pointers is put together once."""

    def __init__(self, *launches: Launch) -> None:
        self.launches = launches
        self._ready: dict[int, list[Any]] = {}

    def __call__(self, tensors: Mapping[str, Tensor], numbers: Sequence[float] = ()) -> None:
        """Launch on the current stream of the tensors' device. Each kernel takes its own tensors, and all numbers.

        The tensors' names come in the same order each time, so that a kernel's own are found by their places. Fake and
        meta tensors have shapes and no memory: an operator's shapes are found with them, and nothing is launched.
        """
        first = next(iter(tensors.values()))
        if first.is_meta or (type(first) is not Tensor and isinstance(first, FakeTensor)):
            return
        device = first.get_device()
        ready = self._ready.get(device)
        if ready is not None and not _watched():
            # As integers: the launcher would ask the driver about each tensor's pointer.
            pointers = [*map(_data_ptr, tensors.values())]
            if not functools.reduce(operator.or_, pointers) & 15:
                stream = torch._C._cuda_getCurrentRawStream(device)
                for run, grid, fixed, own, before, changes, after in ready:
                    run(*grid, stream, *fixed, *own(pointers), *before, *(numbers if changes else ()), *after)
                return
        for one in self.launches:
            one.by_triton(device, tensors, numbers)
        if all(device in one.compiled for one in self.launches):
            self._ready[device] = [_ready(one, device, [*tensors]) for one in self.launches]


def _ready(one: Launch, device: int, names: list[str]) -> tuple[Any, ...]:
    """What :meth:`Launches.__call__` launches a kernel with, given the pointers of the tensors with these names."""
    run, fixed = one.compiled[device]
    places = [names.index(name) for name in one.tensors]
    own = operator.itemgetter(*places) if len(places) > 1 else operator.itemgetter(slice(places[0], places[0] + 1))
    return run, (*one.grid, 1), fixed, own, one.before, bool(one.numbers), one.after


def _watched() -> bool:
    """Whether somebody wants to know of every launch: a chain of hooks (empty if not), or a hook set in its place."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _launcher(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a compiled kernel, and its arguments between the stream and the kernel's own.

    Triton 3.6's launcher is a Python function around a C function: it allocates what scratch memory the kernel asks
    for, which none of ours does, and hands the rest on. The C function alone takes half the time.
    """
    # None in place of Triton's metadata for hooks, and of the two hooks: where there is one, Triton launches.
    run, last = compiled.run, (compiled.packed_metadata, None, None, None)
    if triton.__version__.startswith("3.6.") and type(run).__name__ == "CudaLauncher":
        if run.global_scratch_size == 0 and run.profile_scratch_size == 0:
            fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *last)
            return run.launch, fixed
    return run, (compiled.function, *last)
