"""A run's steps as CUDA graphs: recorded once for each shape, replayed with one launch."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Hashable, Iterator

import torch

from normmatters.lab.side_by_side.rwlock import gpu

_AHEAD = 4  # replays between two marks; at each the host waits until the device has reached the one before
_of_thread = threading.local()


class CudaGraphs:
    """Records a function's work on the device; ``replay`` does it again, on the same memory.

    A run has one graph for each ``key`` (the shapes of its batches). They share their memory, since no two of them run
    at a time, and draw random numbers from ``generator``: each replay continues where the last one, or an eager step,
    ended. The host may be up to twice ``ahead`` replays ahead, enough to keep the device busy. More would only make
    others wait: a run that begins waits four times for all the work that every run has launched before.
    """

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        # The default stream cannot be captured. Any other is a run's own, and so are then cuBLAS's workspaces, which
        # belong to a stream: two graphs that were captured on one stream must not run side by side.
        self._stream = torch.cuda.Stream(device) if current == default else current
        self._pool = torch.cuda.graph_pool_handle()
        self._generator, self.ahead = generator, _AHEAD
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._mark = torch.cuda.Event(blocking=True)
        self._count = 0

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        """What runs inside is not recorded, but prepares for that: it compiles kernels and tries out convolutions.

        One run at a time: the next one finds them ready, and no convolution is timed while another run computes.
        """
        current = torch.cuda.current_stream(self._stream.device)
        with gpu.exclusive():
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                yield
            current.wait_stream(self._stream)

    def record(self, key: Hashable, work: Callable[[], None]) -> None:
        """Record ``work``; nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: a thread that reads images ahead may pin memory meanwhile
        recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with gpu.exclusive(), no_collection():
            if self._generator is not None:
                graph.register_generator_state(self._generator)
            with recording:
                work()
        self._graphs[key] = graph

    def replay(self, key: Hashable) -> None:
        self._graphs[key].replay()
        self._count += 1
        if self._count % self.ahead == 0:
            self._mark.synchronize()  # the first time there is none, and nothing to wait for
            self._mark.record()

    def release(self) -> None:
        """Destroy the graphs while none is captured or runs; a device that fails here has raised an error before."""
        if self._graphs:
            with gpu.exclusive():
                with contextlib.suppress(RuntimeError):
                    torch.cuda.current_stream(self._stream.device).synchronize()
                    for graph in self._graphs.values():
                        graph.reset()
                self._graphs.clear()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collection may destroy the graph of a run that has ended, and free its memory: not now."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """This thread's stream, the same for all its runs: torch has 32 of them and hands them out in turn."""
    streams: dict[torch.device, torch.cuda.Stream] = _of_thread.__dict__.setdefault("streams", {})
    if device not in streams:
        with gpu.shared():
            streams[device] = torch.cuda.Stream(device)
    return streams[device]
