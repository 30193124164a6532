"""What runs a run: a process of its own, or a thread with a stream of its own where runs share a GPU.

A GPU takes turns between processes: two small networks in two processes take twice the time of one. In one process
their CUDA graphs run on the device side by side, and the host's part of a step is a replay, so threads do. What needs
more of the host (eager or compiled steps) gets a process, and so does what draws from torch's own random state while it
trains, which is compiled dropout.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from normmatters.lab import config as _config
from normmatters.lab.config import TEXT, RunConfig

__all__ = ["Worker", "Workers", "shares_a_process"]

_PATIENCE_S = 30  # for a folder that another process is about to leave


class Worker(Protocol):
    """One run that was started; ``in_thread``: in this process."""

    in_thread: bool

    @property
    def running(self) -> bool: ...
    def how_it_ended(self) -> str: ...
    def stop(self) -> None: ...
    def wait(self) -> None: ...


def shares_a_process(config: RunConfig, workers: int) -> bool:
    """Whether this run should be a thread, beside others of its kind."""
    cuda = config.runtime.device.startswith("cuda")
    return workers > 1 and cuda and config.runtime.compile == "cudagraph"


class Workers:
    """Starts runs, at most ``count`` at a time; ``threads`` says where, if it is not for the runs to say."""

    def __init__(self, count: int, data_dir: str | Path | None, threads: bool | None = None) -> None:
        self.count, self.threads = count, threads
        self.data_dir = str(data_dir) if data_dir else None
        self._pool: ThreadPoolExecutor | None = None
        # A fork of a server that has torch loaded starts in no time, and has no CUDA context to inherit.
        kind = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
        self._context = mp.get_context(kind)
        if kind == "forkserver":
            self._context.set_forkserver_preload(["normmatters.lab.trainer", "sklearn.datasets", "tokenizers"])

    def start(self, config: RunConfig, folder: Path, *, alone: bool = False) -> Worker:
        """``alone``: not in a thread, unless all runs are to be threads."""
        folder.mkdir(parents=True, exist_ok=True)
        in_thread = not alone and shares_a_process(config, self.count) if self.threads is None else self.threads
        compiled_dropout = config.data.name in TEXT and config.runtime.compile == "compile"
        if in_thread and not compiled_dropout:
            # The pool's threads stay from run to run, and with them what cuDNN found fastest.
            self._pool = self._pool or ThreadPoolExecutor(self.count, thread_name_prefix="run")
            stopped = threading.Event()
            return _Thread(self._pool.submit(_run_in_thread, config, folder, self.data_dir, stopped), stopped, folder)
        arguments = (_config.to_dict(config), str(folder), self.data_dir)
        process = self._context.Process(target=_run_in_process, args=arguments, daemon=True)  # type: ignore[attr-defined]
        # Ctrl-C is ours to handle; a server that is still importing would answer it with its traceback. (The tracker of
        # resources comes first: to start it unblocks the signal.)
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        except EOFError:
            told = "the server of this command's processes was killed while a run was started (out of memory?)"
            raise OSError(f"{told}: the same command goes on") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return _Process(process, folder)

    def stop(self, workers: Sequence[Worker]) -> None:
        """End all of them; what they had saved stays."""
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.wait()
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


class _Process:
    in_thread = False

    def __init__(self, process: BaseProcess, folder: Path) -> None:
        self.process, self.folder = process, folder

    @property
    def running(self) -> bool:
        return self.process.exitcode is None

    def how_it_ended(self) -> str:
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name} (out of memory?)"
        return f"exit code {code}; see {self.folder / 'log.txt'}"

    def stop(self) -> None:
        self.process.terminate()

    def wait(self) -> None:
        self.process.join(5)
        if self.running:
            self.process.kill()


class _Thread:
    in_thread = True

    def __init__(self, future: Future[None], stopped: threading.Event, folder: Path) -> None:
        self.future, self.stopped, self.folder = future, stopped, folder

    @property
    def running(self) -> bool:
        return not self.future.done()

    def how_it_ended(self) -> str:
        return f"{self.future.exception()!r}; see {self.folder / 'log.txt'}"

    def stop(self) -> None:
        self.stopped.set()

    def wait(self) -> None:
        with contextlib.suppress(BaseException):  # it is gone, whatever it says
            self.future.result(30)


class _Stopped(BaseException):
    """Ends a thread's run as Ctrl-C would: no error of the run's, so no ``Exception``."""


def _run_in_thread(config: RunConfig, folder: Path, data_dir: str | None, stopped: threading.Event) -> None:
    import torch

    from normmatters.lab.gate import gpu
    from normmatters.lab.graph import own_stream

    def check(_: dict[str, Any]) -> None:
        if stopped.is_set():
            raise _Stopped

    own: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if config.runtime.device.startswith("cuda"):
        own = torch.cuda.stream(own_stream(torch.device(config.runtime.device)))
    try:
        with own:
            _train(config, folder, data_dir, progress=check)
    except Exception as error:
        with contextlib.suppress(OSError), (folder / "log.txt").open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
        _tell(folder, error)
    finally:
        with gpu.together():
            gc.collect()  # the run's memory, which the next run may need


def _run_in_process(table: dict[str, Any], folder: str, data_dir: str | None) -> None:
    """Silent on the terminal, gone when the parent is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it ends us
    _die_with_parent()
    path = Path(folder)
    with (path / "log.txt").open("a", encoding="utf-8", buffering=1) as log:
        sys.stdout = sys.stderr = log
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            _train(_config.from_dict(table, str(path)), path, data_dir)
        except Exception as error:
            traceback.print_exc()
            _tell(path, error)
            sys.exit(1)


def _tell(folder: Path, error: Exception) -> None:
    """Write why it failed, if the run itself has not."""
    from normmatters.lab.runlog import read_json, why

    if not read_json(folder / "error.json"):
        with contextlib.suppress(OSError):
            (folder / "error.json").write_text(json.dumps(why(error)), encoding="utf-8")


def _train(config: RunConfig, folder: Path, data_dir: str | None, progress: Any = None) -> None:
    """Train; a folder that is busy is waited for, since a run of a killed command may take a moment to go."""
    from normmatters.lab.runlog import RunError
    from normmatters.lab.trainer import train

    limit = time.monotonic() + _PATIENCE_S
    while True:
        try:
            train(config, folder, data_dir=data_dir, progress=progress)
            return
        except RunError as error:
            if error.kind != "busy" or time.monotonic() > limit:
                raise
            time.sleep(0.2)


def _die_with_parent() -> None:
    """A parent that was killed cannot end its runs: each watches it and leaves the folder to the next command."""
    parent = mp.parent_process()
    if parent is not None:

        def watch() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
