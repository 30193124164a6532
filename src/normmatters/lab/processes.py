"""Runs in processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

from normmatters.lab.config import RunConfig

_WAIT_FOR_FOLDER_S = 30  # for another process to leave the run's folder


class Processes:
    """Starts each run in a process of its own, which is silent on the terminal and ends when this one does."""

    def __init__(self, data_dir: str | Path | None) -> None:
        self.data_dir = data_dir
        # A fork of a server that has torch loaded starts in no time, and has no CUDA context to inherit.
        kind = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
        self.context = mp.get_context(kind)
        if kind == "forkserver":
            self.context.set_forkserver_preload(["normmatters.lab.run", "sklearn.datasets", "tokenizers"])

    def start(self, config: RunConfig, folder: Path) -> RunProcess:
        folder.mkdir(parents=True, exist_ok=True)
        receiver, sender = self.context.Pipe(duplex=False)
        arguments = (config, folder, self.data_dir, sender)
        process = self.context.Process(target=_run_in_process, args=arguments, daemon=True)  # type: ignore[attr-defined]
        # This process handles Ctrl-C. A fork server that is still importing would print a traceback, so it must not get
        # the signal. Starting the resource tracker unblocks the signal, so that comes first.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        except EOFError:
            what = "the server of this command's processes was killed while a run was started (out of memory?)"
            raise OSError(f"{what}: the same command resumes all runs") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            sender.close()  # our copy of it: once the process has ended, the receiver sees the end
        return RunProcess(process, receiver, folder)


class RunProcess:
    """A run that has been started in a process."""

    def __init__(self, process: BaseProcess, receiver: Connection, folder: Path) -> None:
        self._process, self._receiver, self._folder = process, receiver, folder

    @property
    def running(self) -> bool:
        return self._process.exitcode is None

    def error(self) -> dict[str, str]:
        with contextlib.suppress(EOFError):  # a killed process sends nothing
            if self._receiver.poll():
                error: dict[str, str] = self._receiver.recv()
                return error
        code = self._process.exitcode
        how = f"exit code {code}; see {self._folder / 'log.txt'}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name} (out of memory?)"
        return {"kind": "killed", "message": how}

    def stop(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        self._process.join(5)
        if self.running:
            self._process.kill()


def _run_in_process(config: RunConfig, folder: Path, data_dir: str | Path | None, sender: Connection) -> None:
    from normmatters.lab.errors import describe_error

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends this process
    _die_with_parent()
    with _log(folder) as log:
        sys.stdout = sys.stderr = log
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            train_when_free(config, folder, data_dir)
        except Exception as error:
            sender.send(describe_error(error))
            with contextlib.suppress(OSError):  # the disk may be full
                traceback.print_exc()
            sys.exit(1)


def _log(folder: Path) -> TextIO:
    try:
        return (folder / "log.txt").open("a", encoding="utf-8", buffering=1)
    except OSError:  # the run will meet the same error, and report it
        return open(os.devnull, "w", encoding="utf-8")


def train_when_free(
    config: RunConfig,
    folder: Path,
    data_dir: str | Path | None,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Train, after waiting for a folder that is busy: a run of a killed command may take a moment to end."""
    from normmatters.lab.errors import RunError
    from normmatters.lab.run import train

    limit = time.monotonic() + _WAIT_FOR_FOLDER_S
    while True:
        try:
            train(config, folder, data_dir=data_dir, progress=progress)
            return
        except RunError as error:
            if error.kind != "busy" or time.monotonic() > limit:
                raise
            time.sleep(0.2)


def _die_with_parent() -> None:
    """End this process when its parent ends: a killed parent cannot do it, and the next command needs the folder."""
    parent = mp.parent_process()
    if parent is not None:

        def watch() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
