"""A step as a CUDA graph: recorded once, replayed with one launch."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

import torch

from normmatters.lab.gate import gpu

__all__ = ["CudaGraph", "own_stream", "step_graph"]

_AHEAD = 32  # replays between the marks at which the host waits until the device has reached the mark before
_mine = threading.local()


class CudaGraph:
    """Records a function's work on the device; ``replay`` does it again, on the same memory.

    The host may be up to 64 replays ahead, enough to keep the device busy. More would only make others wait: who
    captures a graph waits for all work that was launched before.
    """

    def __init__(self, device: torch.device) -> None:
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        # The default stream cannot be captured. Any other is a run's own, and so are then cuBLAS's workspaces, which
        # belong to a stream: two graphs that were captured on one stream must not run side by side.
        self._stream = torch.cuda.Stream(device) if current == default else current
        self._graph: torch.cuda.CUDAGraph | None = None
        self._mark = torch.cuda.Event(blocking=True)
        self._count = 0

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        """What runs inside is not recorded, but prepares for it: it compiles kernels and tries out convolutions.

        One run at a time: the next finds them ready, and none of them is timed beside another.
        """
        current = torch.cuda.current_stream(self._stream.device)
        with gpu.alone():
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                yield
            current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> None:
        """Record ``work``, which does nothing by that."""
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: a thread that reads images ahead may go on to pin memory
        recording = torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local")
        with gpu.alone(), _no_collection(), recording:
            work()

    def replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()
        self._count += 1
        if self._count % _AHEAD == 0:
            self._mark.synchronize()  # the first time there is none, and nothing to wait for
            self._mark.record()

    def release(self) -> None:
        """Destroy the graph while none is captured and nothing of it runs; a device that fails has said so before."""
        if self._graph is not None:
            with gpu.alone(), contextlib.suppress(RuntimeError):
                torch.cuda.current_stream(self._stream.device).synchronize()
                self._graph.reset()
            self._graph = None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collection may destroy the graph of a run that has ended, and free its memory: not now."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def step_graph(wanted: bool, device: torch.device) -> CudaGraph | None:
    """A graph for a run's steps; None where they are to be taken eagerly."""
    return CudaGraph(device) if wanted and device.type == "cuda" else None


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """This thread's stream, the same for all its runs: torch has 32 of them and hands them out in turn."""
    streams: dict[torch.device, torch.cuda.Stream] = _mine.__dict__.setdefault("streams", {})
    if device not in streams:
        with gpu.together():
            streams[device] = torch.cuda.Stream(device)
    return streams[device]
