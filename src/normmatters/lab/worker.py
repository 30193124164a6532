"""What runs a run: a process of its own, or a thread with a stream of its own where runs share a GPU.

A GPU takes turns between processes: two small networks in two processes take twice the time of one. In one process
their CUDA graphs run on the device side by side, and the host's part of a step is a replay, so threads do. What needs
more of the host (eager or compiled steps) gets a process, and so does what draws from torch's own random state while it
trains, which is compiled dropout.
"""

from __future__ import annotations

import contextlib
import gc
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
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, TextIO

from normmatters.lab import config as _config
from normmatters.lab.config import TEXT, RunConfig

__all__ = ["Worker", "Workers", "shares_a_process"]

_PATIENCE_S = 30  # for a folder that another process is about to leave


class Worker(Protocol):
    """One run that was started; ``in_thread``: in this process; ``error``: the kind and message of what ended it.

    The error does not come by way of the run's folder: a full or read-only disk is the error.
    """

    in_thread: bool

    @property
    def running(self) -> bool: ...
    def error(self) -> dict[str, str]: ...
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
            return _Thread(self._pool.submit(_run_in_thread, config, folder, self.data_dir, stopped), stopped)
        told, telling = self._context.Pipe(duplex=False)
        arguments = (_config.to_dict(config), str(folder), self.data_dir, telling)
        process = self._context.Process(target=_run_in_process, args=arguments, daemon=True)  # type: ignore[attr-defined]
        # Ctrl-C is ours to handle; a server that is still importing would answer it with its traceback. (The tracker of
        # resources comes first: to start it unblocks the signal.)
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        except EOFError:
            what = "the server of this command's processes was killed while a run was started (out of memory?)"
            raise OSError(f"{what}: the same command goes on") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            telling.close()  # here: when the process has gone, nothing more can come
        return _Process(process, told, folder)

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

    def __init__(self, process: BaseProcess, told: Connection, folder: Path) -> None:
        self.process, self.told, self.folder = process, told, folder

    @property
    def running(self) -> bool:
        return self.process.exitcode is None

    def error(self) -> dict[str, str]:
        with contextlib.suppress(EOFError):  # it was killed
            if self.told.poll():
                told: dict[str, str] = self.told.recv()
                return told
        code = self.process.exitcode
        how = f"exit code {code}; see {self.folder / 'log.txt'}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name} (out of memory?)"
        return {"kind": "killed", "message": how}

    def stop(self) -> None:
        self.process.terminate()

    def wait(self) -> None:
        self.process.join(5)
        if self.running:
            self.process.kill()


class _Thread:
    in_thread = True

    def __init__(self, future: Future[dict[str, str]], stopped: threading.Event) -> None:
        self.future, self.stopped = future, stopped

    @property
    def running(self) -> bool:
        return not self.future.done()

    def error(self) -> dict[str, str]:
        return self.future.result() or {"kind": "killed", "message": "it ended without a result"}

    def stop(self) -> None:
        self.stopped.set()

    def wait(self) -> None:
        with contextlib.suppress(BaseException):  # it is gone, whatever it says
            self.future.result(30)


class _Stopped(BaseException):
    """Ends a thread's run as Ctrl-C would: no error of the run's, so no ``Exception``."""


def _run_in_thread(config: RunConfig, folder: Path, data_dir: str | None, stopped: threading.Event) -> dict[str, str]:
    """What the run failed with; empty where it did not."""
    import torch

    from normmatters.lab.gate import gpu
    from normmatters.lab.graph import own_stream
    from normmatters.lab.runlog import why

    def check(_: dict[str, Any]) -> None:
        if stopped.is_set():
            raise _Stopped

    own: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if config.runtime.device.startswith("cuda"):
        own = torch.cuda.stream(own_stream(torch.device(config.runtime.device)))
    try:
        with own:
            _train(config, folder, data_dir, progress=check)
        return {}
    except Exception as error:
        with contextlib.suppress(OSError), (folder / "log.txt").open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
        return why(error)
    finally:
        with gpu.together():
            gc.collect()  # the run's memory, which the next run may need


def _run_in_process(table: dict[str, Any], folder: str, data_dir: str | None, telling: Connection) -> None:
    """Silent on the terminal, gone when the parent is."""
    from normmatters.lab.runlog import why

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it ends us
    _die_with_parent()
    path = Path(folder)
    with _log(path) as log:
        sys.stdout = sys.stderr = log
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            _train(_config.from_dict(table, str(path)), path, data_dir)
        except Exception as error:
            telling.send(why(error))
            with contextlib.suppress(OSError):  # the disk may be full
                traceback.print_exc()
            sys.exit(1)


def _log(folder: Path) -> TextIO:
    try:
        return (folder / "log.txt").open("a", encoding="utf-8", buffering=1)
    except OSError:  # of which the run itself will say more
        return open(os.devnull, "w", encoding="utf-8")


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
