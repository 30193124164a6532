"""Time and memory of a forward and a backward pass."""

from __future__ import annotations

import ctypes
import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normmatters.kernels.cpu.memory import release_memory

Call = Callable[[], Any]

# Medians are over at least this many samples, and over more while a timing takes less than the budget.
_MIN_SAMPLES = 10
_BUDGET_S = 0.02

# Devices on which no graph is captured any more, and why: a capture failed there and could not be undone.
_spoiled: dict[torch.device, str] = {}


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call; ``ms`` is without the cost of launching if a CUDA graph could be captured.

    Medians on a GPU. On a CPU the fastest of many: what else the machine does can only add to a time.
    """

    ms: float
    eager_ms: float
    by: str

    @property
    def graph_ms(self) -> float | None:
        """``ms`` if it was measured with a graph."""
        return self.ms if self.by == "graph" else None

    @property
    def note(self) -> str:
        """Why a graph that was tried gave no time."""
        return "" if self.by in ("graph", "clock", "events") else f"timed by {self.by}"


def rotation(tensor_bytes: int, device: torch.device) -> int:
    """How many sets of tensors take turns, so that none is still in the L2 cache when its turn comes.

    At least four, where they are not huge: the start of a graph, some 10 µs, is shared by that many calls.
    """
    if device.type != "cuda":
        return 1
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * 2**20
    least = 4 if tensor_bytes < 2**30 else 1
    return min(max(least, math.ceil(2 * cache / tensor_bytes)), 32)


def time_calls(calls: Sequence[Call], device: torch.device, *, quick: bool = False, graph: bool = True) -> Timing:
    """Median time of one of ``calls``, which do the same work on different tensors and are run in turn.

    On a GPU run it inside :func:`side_stream`, with everything that the calls depend on: a CUDA graph is captured on
    the stream that autograd recorded. Without ``graph`` none is tried.
    """
    if device.type != "cuda":
        ms = _time_on_cpu(calls, quick)
        return Timing(ms, ms, "clock")
    for call in calls:  # compiles and tunes what is compiled or tuned on first use
        call()
    torch.cuda.synchronize(device)
    eager = _time_by_events(lambda: [call() for call in calls], quick) / len(calls)
    if not graph:
        return Timing(eager, eager, "events")
    reason = _spoiled.get(device)
    if reason is None:
        try:
            return Timing(_time_by_events(_capture(calls, device).replay, quick) / len(calls), eager, "graph")
        except RuntimeError as error:
            reason = _first_reason(error)
    return Timing(eager, eager, f"events, as no graph was captured: {reason}")


def _capture(calls: Sequence[Call], device: torch.device) -> torch.cuda.CUDAGraph:
    """One round of the calls as a graph, captured on the current stream. A capture that fails is undone."""
    gc.collect()  # cycles may hold nodes of autograd that were made on another stream
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(device)):
            # Results live until the end, else the next call would write to memory that is still in the cache.
            results = [call() for call in calls]
        del results
    except RuntimeError:
        try:
            _undo_capture(graph, pool, device)
        except RuntimeError as error:
            _spoiled[device] = f"an earlier capture failed and could not be undone: {one_line(error)}"
        raise
    return graph


def _undo_capture(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    """Do what PyTorch does at the end of a capture, and leaves out if the end fails; RuntimeError if it does not help.

    Without this the random generator would refuse to draw outside a capture, and the capture's memory would be lost.
    """
    torch.cuda.synchronize(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())  # the same numbers, but part of no capture
    ended = False
    with suppress(RuntimeError):  # raised by a graph that was not ended
        graph.pool()
        ended = True
    graph.reset()
    if not ended:
        for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with suppress(RuntimeError):  # the capture had not come that far
                end(index, pool)
    torch.rand(1, device=device)
    torch.cuda.synchronize(device)


def _first_reason(error: BaseException) -> str:
    """The first error: the end of a capture only says that there was one."""
    while error.__context__ is not None:
        error = error.__context__
    return one_line(error)


def one_line(error: BaseException) -> str:
    """The error's message in one line."""
    return " ".join(str(error).split())[:300] or "no message"


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A stream other than the default one, on which no CUDA graph can be captured."""
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.synchronize(device)
    return torch.cuda.stream(_stream(device))


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Always the same stream, since the allocator keeps each stream's memory apart."""
    return torch.cuda.Stream(device)


def _time_by_events(run: Call, quick: bool) -> float:
    def sample() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    sample()
    first = sample()
    count = 3 if quick else min(max(_MIN_SAMPLES, round(_BUDGET_S * 1e3 / max(first, 1e-3))), 200)
    return statistics.median(sample() for _ in range(count))


def _time_on_cpu(calls: Sequence[Call], quick: bool) -> float:
    def sample() -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) * 1e3 / len(calls)

    sample()
    return min(sample() for _ in range(3 if quick else 30))


def wake(device: torch.device) -> None:
    """Work until the clocks of a GPU are up: after it idled, its first tenths of a second are slow."""
    if device.type != "cuda":
        return
    source = torch.ones(2**24, device=device)
    target = torch.empty_like(source)
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        for _ in range(100):
            torch.neg(source, out=target)
        torch.cuda.synchronize(device)


def memory_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second read and written by an elementwise kernel on ``size`` bytes.

    Not by ``copy_``: between equal tensors that is left to the driver, which on large GPUs copies more slowly.
    """
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    wake(device)
    with side_stream(device):
        ms = time_calls([lambda: torch.neg(source, out=target)], device).ms
    return 2 * size / (ms * 1e-3)


@dataclass(frozen=True)
class Memory:
    """Bytes saved for backward, without the output and the parameters, counted in two ways; and the peak.

    ``saved`` counts the storages that autograd holds, the input among them if it is one. ``allocated`` is what the
    forward pass added to the allocated memory, less the output: it cannot see that an input is held, but sees
    everything else. ``peak`` is the most that forward and backward added. The last two are None on a CPU.
    """

    saved: int
    allocated: int | None
    peak: int | None


def peak_memory(call: Callable[[], Any]) -> int | None:
    """The most bytes that the process grew by during ``call``, C++'s own among them; None where Linux is not there.

    Whole pages are counted, and only memory that is used for the first time: what is free goes back to the system
    before.
    """
    try:
        call()  # what is allocated once and for all
        release_memory()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _resident("VmRSS")
        call()
        return _resident("VmHWM") - before
    except (OSError, AttributeError):
        return None


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def memory(forward: Callable[[], Tensor], backward: Callable[[Tensor], Any], free: Iterable[Tensor]) -> Memory:
    """Memory of one forward and backward pass; ``free`` are tensors that exist anyway, such as parameters."""
    held: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        output = forward()
    for tensor in [output, *free]:
        held.pop(tensor.untyped_storage().data_ptr(), None)
    saved = sum(held.values())
    if output.device.type != "cuda":
        backward(output)
        return Memory(saved, None, None)
    device = output.device
    del output
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    output = forward()
    allocated = torch.cuda.memory_allocated(device) - before - output.untyped_storage().nbytes()
    grads = backward(output)
    peak = torch.cuda.max_memory_allocated(device) - before
    del output, grads
    return Memory(saved, allocated, peak)
