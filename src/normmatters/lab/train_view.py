"""One run on a terminal: a bar with the time left, a line an epoch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from normmatters.lab.config import RunConfig
from normmatters.lab.progress import metric_text
from normmatters.lab.trainer import RunResult, train

__all__ = ["train_with_progress"]


def train_with_progress(config: RunConfig, run_dir: Path, data_dir: Path | None, *, resume: bool = True) -> RunResult:
    """Train in ``run_dir`` and say how it goes; under torchrun only the first process speaks."""
    first = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not first)
    name = f"{config.experiment}/{config.cell} seed {config.seed}"
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=32), TaskProgressColumn())
    bar = Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    with bar:
        task = bar.add_task(escape(name), total=None)

        def show(event: dict[str, Any]) -> None:
            bar.update(task, total=event.get("steps"), completed=event.get("step", 0))
            for message in event.get("messages", ()):
                console.print(f"[yellow]![/] {escape(message)}", highlight=False, soft_wrap=True)
            if "train_loss" in event:
                line = f"epoch {event['epoch']:>3} of {config.optim.epochs}  train loss {event['train_loss']:.4f}"
                console.print(f"{line}  {metric_text(event)}  [dim]{event['seconds']:.1f} s", highlight=False)

        result = train(config, run_dir, data_dir=data_dir, progress=show, resume=resume)
    if result.status == "finished":
        console.print(f"[green]✓[/] {escape(name)}: {metric_text(result.metrics)}", highlight=False)
    else:
        console.print(f"[red]✗[/] {escape(name)}: {escape(result.message)}", highlight=False)
    console.print(f"Run folder: {escape(str(run_dir))}", highlight=False, soft_wrap=True)
    return result
