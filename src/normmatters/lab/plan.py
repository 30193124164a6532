"""Which runs an experiment takes, in order, each with its config, folder and place. Nothing runs here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from normmatters.lab import config as _config
from normmatters.lab.cells import PRESETS, load_cell, load_cells
from normmatters.lab.config import TEXT, DataName, RunConfig, run_path
from normmatters.lab.execution import find_device
from normmatters.lab.memory import check_memory
from normmatters.lab.recorded_runs import published_file, read_published
from normmatters.lab.run_folder import RunFolder, read_metrics
from normmatters.lab.schema import check_name

State = Literal["waiting", "running", "done", "failed", "skipped"]


@dataclass
class PlannedRun:
    """One run of a plan, and how far it is. ``needs`` is the folder of the run whose norms it follows."""

    id: str
    config: RunConfig
    folder: Path
    needs: Path | None = None
    state: State = "waiting"
    reason: str = ""
    norms_lost: bool = False  # it has finished, but what another run needs of it is gone
    published: Path | None = None  # the file that stands for it where it is done and has no folder

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def epochs(self) -> int:
        return self.config.optim.epochs

    @property
    def has_norms(self) -> bool:
        return (self.folder / "norms.safetensors").is_file()

    def progress(self) -> tuple[int, dict[str, Any]]:
        """The epochs done so far, and the last one's metrics."""
        rows = read_metrics(self.folder / "metrics.jsonl")
        return len(rows), rows[-1] if rows else {}


def make_plan(
    experiments: Iterable[str],
    preset: str,
    out: str | Path,
    *,
    seeds: int = 1,
    overrides: Iterable[str] = (),
    data: str | None = None,
    published: str | Path | None = None,
) -> list[PlannedRun]:
    """All runs of the experiments (or cells: ``fig1/wd_on``), each once, those that others need first.

    Finished ones are marked ``done``, and so are those that ``publish`` has written below ``published``, unless a run
    that is still to be made needs their recorded norms, which are not published. ``data`` replaces the set of images
    (or of text) by another one of its kind. A folder or file of a run of other settings is an error: nothing is
    overwritten and nothing is mixed.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    check_name("preset", preset, PRESETS)
    if data is not None:
        check_name("data set", data, get_args(DataName))
    experiments, out, overrides = list(experiments), Path(out), list(overrides)
    for name in experiments:
        if "/" in name and preset not in (only := load_cell(name).only):
            raise ValueError(f"{name} is not run at the preset {preset}: try {', '.join(only)}")
    wanted = list(dict.fromkeys(cell.source for cell in load_cells(experiments) if preset in cell.only))
    if not wanted:
        raise ValueError(f"no cell of {', '.join(experiments)} is run at the preset {preset}: try short, cifar or full")
    runs: dict[Path, PlannedRun] = {}

    def add(id: str, seed: int, needed_by: tuple[str, ...] = ()) -> PlannedRun:
        if id in needed_by:
            raise ValueError(f"optim.reference: {id} would wait for itself ({' -> '.join((*needed_by, id))})")
        config = load_cell(id).config(preset, seed, overrides)
        if config.seed != seed and seeds > 1:
            raise ValueError(f"seed={config.seed} leaves one run of each cell, not {seeds}: give it with --seeds 1")
        if data is not None and (data in TEXT) == (config.data.name in TEXT):
            config = replace(config, data=replace(config.data, name=data, dir=None))  # type: ignore[arg-type]
        needs = None
        if config.optim.reference is not None:
            reference = load_cell(f"{config.experiment}/{config.optim.reference}").source
            other, form = add(reference, seed, (*needed_by, id)), config.optim.correction
            if (record := other.config.runtime.record) not in ("step", form):  # not when the reference has been trained
                problem = f"{id} needs the norms of every {form} of {reference}, whose runtime.record is {record!r}"
                raise ValueError(f"{problem}: try --set runtime.record={form}")
            needs = other.folder
        folder = run_path(out, config)
        run = runs.setdefault(folder, PlannedRun(id, config, folder, needs))
        if run.id != id:
            raise ValueError(f"{run.id} and {id} would both run in {folder}: leave experiment and cell as they are")
        return run

    for seed in range(seeds):  # one seed of everything before the next: a stopped plan leaves whole figures
        for id in wanted:
            add(id, seed)
    plan = list(runs.values())
    if data is not None and all((data in TEXT) != (run.config.data.name in TEXT) for run in plan):
        kind = "text" if data in TEXT else "images"
        raise ValueError(f"data: {data!r} is {kind}, which no cell of {', '.join(experiments)} is trained on")
    for run in plan:
        _check_folder(run)
    if published is not None:
        _skip_published(plan, Path(published))
    needed = {run.needs for run in plan if run.state == "waiting"}
    for run in plan:
        if run.state == "done" and run.folder in needed and not run.published and not run.has_norms:
            run.norms_lost = (run.folder / "summary.json").is_file()
            run.state = "waiting" if run.norms_lost else "done"
    return plan


def _check_folder(run: PlannedRun) -> None:
    """Mark a run that has ended; refuse a folder of another one."""
    folder = RunFolder(run.folder)
    if problem := folder.conflict(run.config):
        raise ValueError(f"{run.folder} {problem}; remove it or choose another --out")
    if (run.folder / "config.json").exists() and folder.ended():
        run.state = "done"


def _skip_published(plan: list[PlannedRun], results: Path) -> None:
    waiting = [run for run in plan if run.state == "waiting"]
    for run in waiting:
        file = published_file(results, run.config)
        if not file.exists():
            continue
        if differs := _config.differences(read_published(file).config, run.config):
            raise ValueError(f"{file}: a published run of other settings ({', '.join(differs)}); leave it out")
        run.published = file
    needed = {run.needs for run in waiting if run.published is None}
    for run in waiting:
        if run.published is not None and run.folder not in needed:
            run.state = "done"


def place(plan: list[PlannedRun], device: str, jobs: int | None) -> int:
    """Give every waiting run its device and its threads. Returns how many runs train at the same time.

    Sums round by the number of threads. So on a CPU each run has one, whatever ``jobs`` is and the machine has, and
    a run that has begun keeps its number. On a GPU the host's threads change no number.

    Raises:
        ValueError: the device cannot be used, or its memory is too small for so many runs.
    """
    device = str(find_device(plan[0].config.runtime.device if device == "auto" else device))
    cuda = device.startswith("cuda")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    side_by_side = min(jobs or (1 if cuda else cores), len(plan))
    waiting = [run for run in plan if run.state == "waiting"]
    workers = min(side_by_side, max(len(waiting), 1))
    check_memory([run.config for run in waiting], workers, device)
    for run in waiting:
        threads = run.config.runtime.threads or RunFolder(run.folder).threads()
        threads = threads or (max(1, cores // side_by_side) if cuda else 1)
        runtime = replace(run.config.runtime, device=device, threads=threads, side_by_side=workers)
        run.config = replace(run.config, runtime=runtime)
    return workers
