"""What a terminal shows while runs go: a bar for each run, one for all of them with the time left. A log gets lines."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from normmatters.lab.reproduce import Job, Runner

__all__ = ["RunsView", "metric_text"]


def metric_text(row: dict[str, float]) -> str:
    """The number of an epoch that one looks at."""
    if row.get("val_ppl") is not None:
        return f"ppl {row['val_ppl']:.2f}"
    if row.get("val_acc") is not None:
        return f"{row['val_acc']:.2f} %"
    return ""


class RunsView:
    """Call it with the ``Runner`` at each poll."""

    def __init__(self, console: Console, jobs: list[Job]) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metric]}", justify="right"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._seen = {job.folder for job in jobs if job.state == "done"}
        left = [job for job in jobs if job.state != "done"]
        self._total = sum(job.epochs for job in left)
        self._left = left
        self._all = self.progress.add_task("[bold]all epochs", total=self._total, metric="")
        self._tasks: dict[str, TaskID] = {}
        self._told = 0  # messages
        self._reasons: set[str] = set()

    def __enter__(self) -> RunsView:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def __call__(self, runner: Runner) -> None:
        for message in runner.messages[self._told :]:
            self.console.print(f"[yellow]![/] {escape(message)}", highlight=False)
        self._told = len(runner.messages)
        done = 0
        for job in self._left:
            key = str(job.folder)
            if job.state == "running":
                epochs, row = job.progress()
                if key not in self._tasks:
                    name = f"{job.id} [dim]seed {job.seed}"
                    self._tasks[key] = self.progress.add_task(name, total=job.epochs, metric="")
                self.progress.update(self._tasks[key], completed=epochs, metric=metric_text(row))
                done += epochs
            elif job.state != "waiting":
                done += job.epochs
                if job.folder not in self._seen:
                    self._ended(job, key)
        self.progress.update(self._all, completed=done, metric=f"{len(self._seen)} of {len(runner.jobs)} runs")

    def _ended(self, job: Job, key: str) -> None:
        self._seen.add(job.folder)
        if key in self._tasks:
            self.progress.remove_task(self._tasks.pop(key))
        name = f"{job.id} [dim]seed {job.seed}[/]"
        if job.state == "done":
            _, row = job.progress()
            text = metric_text(row) if (job.folder / "summary.json").exists() else "diverged"
            self.console.print(f"[green]✓[/] {name}  {text}", highlight=False)
        else:
            reason = "for the same reason" if job.reason in self._reasons else escape(job.reason)
            self._reasons.add(job.reason)
            self.console.print(f"[red]✗[/] {name}  {reason}", highlight=False, soft_wrap=True)
