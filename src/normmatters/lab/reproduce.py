"""From experiments to finished runs: plan them, run several side by side, lose nothing when one fails or all stop.

What is finished is skipped, what was stopped goes on, so the same command is always the right one. ``plan`` decides,
``Runner`` runs (``worker.py`` has the processes and threads); neither prints, so that a terminal, a log or a test can
watch.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from normmatters.lab import config as _config
from normmatters.lab.config import TEXT, RunConfig
from normmatters.lab.experiments import check_data, check_preset, load_cell, load_cells
from normmatters.lab.memory import check_memory
from normmatters.lab.report.collect import published_file, read_published
from normmatters.lab.runlog import RunFolder, has_results
from normmatters.lab.worker import Worker, Workers

__all__ = ["Job", "Runner", "check_memory", "plan", "run_folder"]

State = Literal["waiting", "running", "done", "failed", "skipped"]


@dataclass
class Job:
    """One run of the plan and what has become of it."""

    id: str
    config: RunConfig
    folder: Path
    needs: Path | None = None
    state: State = "waiting"
    reason: str = ""
    alone: bool = False  # it failed in a thread beside others
    published: Path | None = None  # the file that stands for it where it is done and has no folder
    worker: Worker | None = field(default=None, repr=False)

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
    return _config.cell_folder(out, config) / f"seed{config.seed}"


def plan(
    experiments: Iterable[str],
    preset: str,
    out: str | Path,
    *,
    seeds: int = 1,
    overrides: Iterable[str] = (),
    data: str | None = None,
    published: str | Path | None = None,
) -> list[Job]:
    """All runs of the experiments (or cells: ``fig1/wd_on``), each once, those that others need first.

    Finished ones are marked ``done``, and so are those that ``publish`` has written below ``published``, unless a run
    that is still to be made needs their recorded norms, which are not published. ``data`` replaces the set of images
    (or of text) by another one of its kind. A folder or file of a run of other settings is an error: nothing is
    overwritten and nothing is mixed.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    check_preset(preset)
    if data is not None:
        check_data(data)
    experiments, out, overrides = list(experiments), Path(out), list(overrides)
    for name in experiments:
        if "/" in name and preset not in (only := load_cell(name).only):
            raise ValueError(f"{name} is not run at the preset {preset}: try {', '.join(only)}")
    wanted = list(dict.fromkeys(cell.source for cell in load_cells(experiments) if preset in cell.only))
    if not wanted:
        raise ValueError(f"no cell of {', '.join(experiments)} is run at the preset {preset}: try short, cifar or full")
    jobs: dict[Path, Job] = {}

    def add(id: str, seed: int, asking: tuple[str, ...] = ()) -> Job:
        if id in asking:
            raise ValueError(f"optim.reference: {id} would wait for itself ({' -> '.join((*asking, id))})")
        config = load_cell(id).config(preset, seed, overrides)
        if config.seed != seed and seeds > 1:
            raise ValueError(f"seed={config.seed} leaves one run of each cell, not {seeds}: give it with --seeds 1")
        if data is not None and (data in TEXT) == (config.data.name in TEXT):
            config = _config.apply_overrides(config, [f"data.name={data}", "data.dir=null"])
        needs = None
        if config.optim.reference is not None:
            reference = load_cell(f"{config.experiment}/{config.optim.reference}").source
            other, form = add(reference, seed, (*asking, id)), config.optim.correction
            if (record := other.config.runtime.record) not in ("step", form):  # not when the reference has been trained
                told = f"{id} needs the norms of every {form} of {reference}, whose runtime.record is {record!r}"
                raise ValueError(f"{told}: try --set runtime.record={form}")
            needs = other.folder
        folder = run_folder(out, config)
        job = jobs.setdefault(folder, Job(id, config, folder, needs))
        if job.id != id:
            raise ValueError(f"{job.id} and {id} would both run in {folder}: leave experiment and cell as they are")
        return job

    for seed in range(seeds):  # one seed of everything before the next: a stopped plan leaves whole figures
        for id in wanted:
            add(id, seed)
    if data is not None and all((data in TEXT) != (job.config.data.name in TEXT) for job in jobs.values()):
        kind = "text" if data in TEXT else "images"
        raise ValueError(f"data: {data!r} is {kind}, which no cell of {', '.join(experiments)} is trained on")
    for job in jobs.values():
        _check_folder(job)
    if published is not None:
        _skip_published(list(jobs.values()), Path(published))
    return list(jobs.values())


def _skip_published(jobs: list[Job], results: Path) -> None:
    waiting = [job for job in jobs if job.state == "waiting"]
    for job in waiting:
        file = published_file(results, job.config)
        if not file.exists():
            continue
        if differs := _config.differences(read_published(file).settings, job.config):
            raise ValueError(f"{file}: a published run of other settings ({', '.join(differs)}); leave it out")
        job.published = file
    needed = {job.needs for job in waiting if job.published is None}
    for job in waiting:
        if job.published is not None and job.folder not in needed:
            job.state = "done"


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
        if not has_results(job.folder):
            return
        differs = ", ".join(_config.differences(found, job.config))
        raise ValueError(f"{job.folder}: holds a run of other settings ({differs}); remove it or choose another --out")
    if RunFolder(job.folder).ended():
        job.state = "done"


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C raises as ever, and is noted too: an exception that falls into a finalizer or a callback is lost."""
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


class Runner:
    """Runs a plan, at most ``workers`` runs at a time; ``on_poll`` is called a few times a second with the runner.

    ``threads``: whether runs share this process; None leaves it to each run (see ``worker.shares_a_process``), and a
    run that fails beside others is tried again in a process of its own. If it finishes there, threads were to blame,
    and every run that starts after it gets a process.

    >>> Runner(plan(["fig1"], "quick", "runs/quick"), workers=2).run()          # doctest: +SKIP
    """

    def __init__(
        self,
        jobs: list[Job],
        *,
        workers: int = 1,
        data_dir: str | Path | None = None,
        threads: bool | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"jobs must be at least 1, got {workers}")
        self.jobs, self.workers = jobs, workers
        self._workers = Workers(workers, data_dir, threads)
        self._may_fall_back = threads is None
        self.messages: list[str] = []  # what was decided on the way

    def of(self, state: State) -> list[Job]:
        return [job for job in self.jobs if job.state == state]

    def run(self, on_poll: Callable[[Runner], None] | None = None, poll_s: float = 0.2) -> list[Job]:
        """Run all that is waiting. Returns the jobs that failed or were skipped; Ctrl-C ends the runs first."""
        with _interrupts() as interrupted:
            self._run_all(interrupted, on_poll, poll_s)
        return self.of("failed") + self.of("skipped")

    def _run_all(self, interrupted: list[int], on_poll: Callable[[Runner], None] | None, poll_s: float) -> None:
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

    def _start(self) -> None:
        state = {job.folder: job.state for job in self.jobs}
        for job in self.of("waiting"):
            needed = state.get(job.needs, "done") if job.needs else "done"
            if needed in ("failed", "skipped"):
                job.state, job.reason = "skipped", f"its reference {job.needs} did not finish"
            elif needed == "done" and len(self.of("running")) < self.workers:
                job.worker = self._workers.start(job.config, job.folder, alone=job.alone)
                job.state = "running"

    def _collect(self) -> None:
        for job in self.of("running"):
            assert job.worker is not None
            if job.worker.running:
                continue
            if RunFolder(job.folder).ended():
                job.state = "done"
                if job.alone and self._workers.threads is None:
                    self._workers.threads = False
                    self._say(job, "finished in a process of its own: all runs from here on have one")
            else:
                error = job.worker.error()
                job.state, job.reason = "failed", error["message"]
                if job.worker.in_thread and self._may_fall_back and error["kind"] == "exception":
                    failed = f"failed beside other runs ({job.reason.splitlines()[0]})"
                    self._say(job, f"{failed}: it is tried again in a process of its own")
                    job.state, job.reason, job.alone = "waiting", "", True

    def _say(self, job: Job, what: str) -> None:
        self.messages.append(f"{job.id} seed {job.seed} {what}")
        with contextlib.suppress(OSError), (job.folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(self.messages[-1] + "\n")

    def _stop(self) -> None:
        running = [job for job in self.of("running") if job.worker is not None]
        self._workers.stop([job.worker for job in running if job.worker is not None])
        for job in running:
            job.state, job.reason = "waiting", "stopped"
