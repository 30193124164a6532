"""From experiments to finished runs: plan them, run several side by side, lose nothing when one fails or all stop.

A run is a process of its own. What is finished is skipped, what was stopped goes on, so the same command is always the
right one. ``plan`` decides, ``Runner`` runs; neither prints, so that a terminal, a log or a test can watch.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from normmatters.lab import config as _config
from normmatters.lab.config import RunConfig
from normmatters.lab.experiments import load_cell, load_cells
from normmatters.lab.memory import check_memory

__all__ = ["Job", "Runner", "check_memory", "plan", "run_folder"]

State = Literal["waiting", "running", "done", "failed", "skipped"]
_TEXT = ("text", "numbers")


@dataclass
class Job:
    """One run of the plan and what has become of it."""

    id: str
    config: RunConfig
    folder: Path
    needs: Path | None = None
    state: State = "waiting"
    reason: str = ""
    started: float = 0.0
    process: BaseProcess | None = field(default=None, repr=False)

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def epochs(self) -> int:
        return self.config.optim.epochs

    def progress(self) -> tuple[int, dict[str, Any]]:
        """Epochs done so far and the last one's metrics, as the run's own log says."""
        try:
            lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
        except OSError:
            return 0, {}
        for line in reversed(lines):
            with contextlib.suppress(ValueError):  # a line that is just being written
                return len(lines), json.loads(line)
        return 0, {}


def run_folder(out: Path, config: RunConfig) -> Path:
    """``out/experiment/cell/seedN``: where ``reference`` finds its neighbour."""
    return out / config.experiment / config.cell / f"seed{config.seed}"


def plan(
    experiments: Iterable[str],
    preset: str,
    out: str | Path,
    *,
    seeds: int = 1,
    overrides: Iterable[str] = (),
    data: str | None = None,
) -> list[Job]:
    """All runs of the experiments, each once, those that others need first. Finished ones are marked ``done``.

    ``data`` replaces the set of images (or of text) by another one of its kind. A folder that holds a run of other
    settings is an error: nothing is overwritten and nothing is mixed.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    out, overrides = Path(out), list(overrides)
    wanted = list(dict.fromkeys(cell.source for cell in load_cells(experiments)))
    jobs: dict[Path, Job] = {}

    def add(id: str, seed: int) -> Job:
        config = load_cell(id).config(preset, seed, overrides)
        if data is not None and (data in _TEXT) == (config.data.name in _TEXT):
            config = _config.apply_overrides(config, [f"data.name={data}", "data.dir=null"])
        needs = None
        if config.optim.reference is not None:
            needs = add(f"{config.experiment}/{config.optim.reference}", seed).folder
        folder = run_folder(out, config)
        return jobs.setdefault(folder, Job(id, config, folder, needs))

    for seed in range(seeds):  # one seed of everything before the next: a stopped plan leaves whole figures
        for id in wanted:
            add(id, seed)
    for job in jobs.values():
        _check_folder(job)
    return list(jobs.values())


def _check_folder(job: Job) -> None:
    file = job.folder / "config.json"
    if not file.exists():
        return
    try:
        found = _config.from_dict(json.loads(file.read_text(encoding="utf-8")), str(file))
    except ValueError as error:
        told = f"holds a run that cannot be read ({error})"
        raise ValueError(f"{job.folder}: {told}; remove it or choose another --out") from None
    if _config.config_hash(found) != _config.config_hash(job.config):
        differs = ", ".join(_differing(found, job.config))
        raise ValueError(f"{job.folder}: holds a run of other settings ({differs}); remove it or choose another --out")
    if _ended(job.folder):
        job.state = "done"


def _ended(folder: Path) -> bool:
    """Finished, or diverged, which is a result too: it would diverge again."""
    return (folder / "summary.json").exists() or _read(folder / "error.json").get("kind") == "nan"


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _differing(a: RunConfig, b: RunConfig) -> list[str]:
    left, right = _config.to_dict(a), _config.to_dict(b)
    names = []
    for key, value in left.items():
        if isinstance(value, dict):
            names += [f"{key}.{k}: {v} and {right[key][k]}" for k, v in value.items() if right[key][k] != v]
        elif right[key] != value:
            names.append(f"{key}: {value} and {right[key]}")
    return [n for n in names if not n.startswith(("label", "runtime.device", "runtime.threads"))]


class Runner:
    """Runs a plan, at most ``workers`` runs at a time; ``on_poll`` is called a few times a second with the runner.

    >>> Runner(plan(["fig1"], "quick", "runs/quick"), workers=2).run()          # doctest: +SKIP
    """

    def __init__(self, jobs: list[Job], *, workers: int = 1, data_dir: str | Path | None = None) -> None:
        if workers < 1:
            raise ValueError(f"jobs must be at least 1, got {workers}")
        self.jobs, self.workers, self.data_dir = jobs, workers, data_dir
        # A fork of a server that has torch loaded starts in no time, and has no CUDA context to inherit.
        kind = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
        self._context = mp.get_context(kind)
        if kind == "forkserver":
            self._context.set_forkserver_preload(["normmatters.lab.trainer", "sklearn.datasets", "tokenizers"])

    def of(self, state: State) -> list[Job]:
        return [job for job in self.jobs if job.state == state]

    def run(self, on_poll: Callable[[Runner], None] | None = None, poll_s: float = 0.2) -> list[Job]:
        """Run all that is waiting. Returns the jobs that failed or were skipped; Ctrl-C ends the runs first."""
        try:
            while self.of("waiting") or self.of("running"):
                self._collect()
                self._start()
                if on_poll is not None:
                    on_poll(self)
                if self.of("running"):
                    time.sleep(poll_s)
        finally:
            self._stop()
        return self.of("failed") + self.of("skipped")

    def _start(self) -> None:
        state = {job.folder: job.state for job in self.jobs}
        for job in self.of("waiting"):
            needed = state.get(job.needs, "done") if job.needs else "done"
            if needed in ("failed", "skipped"):
                job.state, job.reason = "skipped", f"its reference {job.needs} did not finish"
            elif needed == "done" and len(self.of("running")) < self.workers:
                job.folder.mkdir(parents=True, exist_ok=True)
                arguments = (_config.to_dict(job.config), str(job.folder), self.data_dir and str(self.data_dir))
                process = self._context.Process(target=_run, args=arguments, daemon=True)  # type: ignore[attr-defined]
                process.start()
                job.process, job.state, job.started = process, "running", time.monotonic()

    def _collect(self) -> None:
        for job in self.of("running"):
            assert job.process is not None
            if job.process.exitcode is None:
                continue
            if _ended(job.folder):
                job.state = "done"
            else:
                job.state, job.reason = "failed", _reason(job)

    def _stop(self) -> None:
        running = [job for job in self.of("running") if job.process is not None]
        for job in running:
            job.process.terminate()  # type: ignore[union-attr]
        for job in running:
            job.process.join(5)  # type: ignore[union-attr]
            if job.process.exitcode is None:  # type: ignore[union-attr]
                job.process.kill()  # type: ignore[union-attr]
            job.state, job.reason = "waiting", "stopped"


def _reason(job: Job) -> str:
    """Why a run failed: what it said itself, else how its process ended."""
    if message := _read(job.folder / "error.json").get("message"):
        return str(message)
    code = job.process.exitcode if job.process else None
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name} (out of memory?)"
    return f"exit code {code}; see {job.folder / 'log.txt'}"


def _run(table: dict[str, Any], folder: str, data_dir: str | None) -> None:
    """The process of one run: silent on the terminal, gone when its parent is."""
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
            if not _read(path / "error.json"):
                told = {"type": type(error).__name__, "message": str(error) or type(error).__name__}
                with contextlib.suppress(OSError):
                    (path / "error.json").write_text(json.dumps(told), encoding="utf-8")
            sys.exit(1)


def _train(config: RunConfig, folder: Path, data_dir: str | None, patience_s: float = 30) -> None:
    """Train; a folder that is busy is waited for, since a run of a killed command may take a moment to go."""
    from normmatters.lab.runlog import RunError
    from normmatters.lab.trainer import train

    limit = time.monotonic() + patience_s
    while True:
        try:
            train(config, folder, data_dir=data_dir)
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
