"""Runs a plan: several runs at a time, nothing lost when one fails or all are stopped.

What is finished is skipped and what was stopped is resumed, so the same command is always the right one. The runner
prints nothing, so that a terminal, a log or a test can watch it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from normmatters.lab.config import RunConfig
from normmatters.lab.plan import PlannedRun, State
from normmatters.lab.processes import Processes
from normmatters.lab.run_folder import RunFolder


class Worker(Protocol):
    """One run that was started. ``error`` gives the kind and message of what ended it.

    The error does not come by way of the run's folder: a full or read-only disk may be the error.
    """

    @property
    def running(self) -> bool: ...
    def error(self) -> dict[str, str]: ...
    def stop(self) -> None: ...
    def wait(self) -> None: ...


class Launcher(Protocol):
    """Starts runs in one kind of place: processes, or threads of this process."""

    def start(self, config: RunConfig, folder: Path) -> Worker: ...


class Runner:
    """Runs a plan, at most ``workers`` runs at a time; ``on_poll`` is called a few times per second with the runner.

    A run gets a process of its own, or a thread where it shares a GPU with others (:meth:`shares_a_process`). A run
    that fails in a thread is tried again in a process. If it finishes there, threads were to blame, and every run that
    starts after it gets a process.

    >>> Runner(make_plan(["fig1"], "quick", "runs/quick"), workers=2).run()          # doctest: +SKIP
    """

    def __init__(
        self,
        plan: list[PlannedRun],
        *,
        workers: int = 1,
        data_dir: str | Path | None = None,
        processes: Launcher | None = None,
        threads: Launcher | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"jobs must be at least 1, got {workers}")
        self.plan, self.workers, self.data_dir = plan, workers, data_dir
        self.messages: list[str] = []  # decisions that the user should know of
        self._processes, self._threads = processes or Processes(data_dir), threads
        self._threads_work = True
        self._active: dict[Path, tuple[Worker, Launcher]] = {}
        self._retried: set[Path] = set()  # failed in a thread, and have a process now

    def of(self, state: State) -> list[PlannedRun]:
        return [run for run in self.plan if run.state == state]

    def run(self, on_poll: Callable[[Runner], None] | None = None, poll_s: float = 0.2) -> list[PlannedRun]:
        """Run all that is waiting. Returns the runs that failed or were skipped; Ctrl-C ends the runs first."""
        with _interrupts() as interrupted:
            try:
                while self.of("waiting") or self.of("running"):
                    if interrupted:
                        raise KeyboardInterrupt
                    self._collect()
                    self._start()
                    if on_poll is not None:
                        on_poll(self)
                    if self.of("running"):
                        time.sleep(poll_s)
            finally:
                self._stop()
        return self.of("failed") + self.of("skipped")

    def shares_a_process(self, config: RunConfig) -> bool:
        """Whether this run should be a thread, beside others of its kind.

        A GPU takes turns between processes: two small networks in two processes take twice the time of one. In one
        process their CUDA graphs run on the device side by side, and the host's part of a step is a replay. What needs
        more of the host (eager or compiled steps) gets a process.
        """
        cuda = config.runtime.device.startswith("cuda")
        return self.workers > 1 and cuda and config.runtime.compile == "cudagraph"

    def _start(self) -> None:
        state = {run.folder: run.state for run in self.plan}
        for run in self.of("waiting"):
            needed = state.get(run.needs, "done") if run.needs else "done"
            if needed in ("failed", "skipped"):
                run.state, run.reason = "skipped", f"its reference {run.needs} did not finish"
            elif needed == "done" and run.needs and RunFolder(run.needs).diverged():
                run.state, run.reason = "skipped", f"its reference {run.needs} diverged: there are no norms to follow"
            elif needed == "done" and len(self._active) < self.workers:
                if run.norms_lost:
                    self._note(run, "has finished, but its norms are lost: its last checkpoint gives them again")
                    (run.folder / "summary.json").unlink(missing_ok=True)
                    run.norms_lost = False
                launcher = self._launcher(run)
                self._active[run.folder] = launcher.start(run.config, run.folder), launcher
                run.state = "running"

    def _launcher(self, run: PlannedRun) -> Launcher:
        if not self._threads_work or run.folder in self._retried or not self.shares_a_process(run.config):
            return self._processes
        if self._threads is None:
            from normmatters.lab.side_by_side.threads import Threads

            self._threads = Threads(self.workers, self.data_dir)
        return self._threads

    def _collect(self) -> None:
        for run in self.of("running"):
            worker, launcher = self._active[run.folder]
            if worker.running:
                continue
            del self._active[run.folder]
            if RunFolder(run.folder).ended():
                run.state = "done"
                if run.folder in self._retried and self._threads_work:
                    self._threads_work = False
                    self._note(run, "finished in a process of its own: all runs from here on have one")
                continue
            error = worker.error()
            run.state, run.reason = "failed", error["message"]
            if launcher is self._threads and error["kind"] == "exception":
                self._retried.add(run.folder)
                failed = f"failed beside other runs ({run.reason.splitlines()[0]})"
                self._note(run, f"{failed}: it is tried again in a process of its own")
                run.state, run.reason = "waiting", ""

    def _note(self, run: PlannedRun, what: str) -> None:
        self.messages.append(f"{run.id} seed {run.seed} {what}")
        with contextlib.suppress(OSError), (run.folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(self.messages[-1] + "\n")

    def _stop(self) -> None:
        """End all runs; what they have saved stays."""
        workers = [worker for worker, _ in self._active.values()]
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.wait()
        for run in self.of("running"):
            run.state, run.reason = "waiting", "stopped"


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C raises as usual, and is noted: an exception inside a finalizer or a callback would be lost."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
