"""Runs as threads of this process, each with a stream of its own on the GPU that they share."""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from normmatters.lab.config import RunConfig
from normmatters.lab.errors import describe_error
from normmatters.lab.processes import train_when_free
from normmatters.lab.side_by_side.graphs import own_stream
from normmatters.lab.side_by_side.rwlock import gpu


class Threads:
    """Starts runs in ``count`` threads. A thread takes run after run, and keeps cuDNN's choice of algorithms."""

    def __init__(self, count: int, data_dir: str | Path | None, train: Callable[..., None] = train_when_free) -> None:
        self.data_dir, self._train = data_dir, train
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="run")

    def start(self, config: RunConfig, folder: Path) -> RunThread:
        folder.mkdir(parents=True, exist_ok=True)
        stopped = threading.Event()
        return RunThread(self._pool.submit(self._run, config, folder, stopped), stopped)

    def _run(self, config: RunConfig, folder: Path, stopped: threading.Event) -> dict[str, str]:
        """What the run failed with; empty where it did not."""

        def check(_: dict[str, Any]) -> None:
            if stopped.is_set():
                raise _Stopped

        own: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if config.runtime.device.startswith("cuda"):
            own = torch.cuda.stream(own_stream(torch.device(config.runtime.device)))
        try:
            with own:
                self._train(config, folder, self.data_dir, progress=check)
            return {}
        except Exception as error:
            with contextlib.suppress(OSError), (folder / "log.txt").open("a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
            return describe_error(error)
        finally:
            with gpu.shared():
                gc.collect()  # the run's memory, which the next run may need


class RunThread:
    """A run that has been started in a thread."""

    def __init__(self, future: Future[dict[str, str]], stopped: threading.Event) -> None:
        self._future, self._stopped = future, stopped

    @property
    def running(self) -> bool:
        return not self._future.done()

    def error(self) -> dict[str, str]:
        return self._future.result() or {"kind": "killed", "message": "it ended without a result"}

    def stop(self) -> None:
        self._stopped.set()

    def wait(self) -> None:
        with contextlib.suppress(BaseException):  # it has ended, whatever it raises
            self._future.result(30)


class _Stopped(BaseException):
    """Ends a thread's run, as Ctrl-C would. The run has made no error, so this is no ``Exception``."""
