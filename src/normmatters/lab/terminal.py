"""What a terminal shows while runs train: a bar for each, one for all of them with the time left. A log gets lines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from normmatters.lab.config import RunConfig
from normmatters.lab.plan import PlannedRun
from normmatters.lab.run import train
from normmatters.lab.run_folder import RunFolder, RunResult
from normmatters.lab.runner import Runner


def metric_text(row: Mapping[str, Any]) -> str:
    """An epoch's main number: perplexity or accuracy."""
    if row.get("val_ppl") is not None:
        return f"ppl {row['val_ppl']:.2f}"
    if row.get("val_acc") is not None:
        return f"{row['val_acc']:.2f} %"
    return ""


def _progress(console: Console, *columns: ProgressColumn) -> Progress:
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        *columns,
        *times,
        console=console,
        disable=not console.is_terminal,
    )


class RunsView:
    """Shows a plan at work: inside its ``progress``, call it with the ``Runner`` at each poll."""

    def __init__(self, console: Console, plan: list[PlannedRun]) -> None:
        self.console = console
        self.progress = _progress(console, MofNCompleteColumn(), TextColumn("{task.fields[metric]}", justify="right"))
        self._ended = {run.folder for run in plan if run.state == "done"}
        self._to_do = [run for run in plan if run.state != "done"]
        total = sum(run.epochs for run in self._to_do)
        self._all = self.progress.add_task("[bold]all epochs", total=total, metric="")
        self._tasks: dict[Path, TaskID] = {}
        self._messages = 0  # printed
        self._reasons: set[str] = set()

    def __call__(self, runner: Runner) -> None:
        for message in runner.messages[self._messages :]:
            self.console.print(f"[yellow]![/] {escape(message)}")
        self._messages = len(runner.messages)
        done = 0
        for run in self._to_do:
            if run.state == "running":
                epochs, row = run.progress()
                if run.folder not in self._tasks:
                    self._tasks[run.folder] = self.progress.add_task(_title(run), total=run.epochs, metric="")
                self.progress.update(self._tasks[run.folder], completed=epochs, metric=metric_text(row))
                done += epochs
            elif run.state != "waiting":
                done += run.epochs
                if run.folder not in self._ended:
                    self._show_end(run)
        self.progress.update(self._all, completed=done, metric=f"{len(self._ended)} of {len(runner.plan)} runs")

    def _show_end(self, run: PlannedRun) -> None:
        self._ended.add(run.folder)
        if run.folder in self._tasks:
            self.progress.remove_task(self._tasks.pop(run.folder))
        if run.state == "done":
            _, row = run.progress()
            diverged = RunFolder(run.folder).diverged()
            mark, text = ("[yellow]![/]", "diverged") if diverged else ("[green]✓[/]", metric_text(row))
            self.console.print(f"{mark} {_title(run)}[/]  {text}")
        else:
            reason = "for the same reason" if run.reason in self._reasons else escape(run.reason)
            self._reasons.add(run.reason)
            self.console.print(f"[red]✗[/] {_title(run)}[/]  {reason}", soft_wrap=True)


def _title(run: PlannedRun) -> str:
    return f"{run.id} [dim]seed {run.seed}"


def show_reasons(console: Console, failed: list[PlannedRun]) -> None:
    """Show each reason once: often all runs have the same, such as missing data."""
    for reason in dict.fromkeys(run.reason for run in failed):
        which = ", ".join(f"{run.id} seed {run.seed}" for run in failed if run.reason == reason)
        console.print(f"  [red]✗[/] {which}: {escape(reason)}", soft_wrap=True)


def train_with_progress(config: RunConfig, run_dir: Path, data_dir: Path | None, *, resume: bool = True) -> RunResult:
    """Train in ``run_dir`` and show how it goes; under torchrun only the first process prints."""
    console = Console(quiet=os.environ.get("RANK", "0") != "0", highlight=False)
    name = escape(f"{config.experiment}/{config.cell} seed {config.seed}")
    with _progress(console, TaskProgressColumn()) as bar:
        task = bar.add_task(name, total=None)

        def show(event: dict[str, Any]) -> None:
            bar.update(task, total=event.get("steps"), completed=event.get("step", 0))
            for message in event.get("messages", ()):
                console.print(f"[yellow]![/] {escape(message)}", soft_wrap=True)
            if "train_loss" in event:
                line = f"epoch {event['epoch']:>3} of {config.optim.epochs}  train loss {event['train_loss']:.4f}"
                console.print(f"{line}  {metric_text(event)}  [dim]{event['seconds']:.1f} s")

        result = train(config, run_dir, data_dir=data_dir, progress=show, resume=resume)
    if result.status == "finished":
        console.print(f"[green]✓[/] {name}: {metric_text(result.metrics)}")
    else:
        console.print(f"[red]✗[/] {name}: {escape(result.message)}")
    console.print(f"Run folder: {escape(str(run_dir))}", soft_wrap=True)
    return result
