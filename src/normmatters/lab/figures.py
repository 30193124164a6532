"""The figures and tables of the paper, and those that we add: ``experiments/figures.toml`` as values.

``[[experiment]]`` and ``[[picture]]`` are drawn; ``[[table]]`` are the tables in docs/results.md that have no verdicts.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any

from normmatters.lab.cells import folder, matching
from normmatters.lab.schema import build


@dataclass(frozen=True)
class Panel:
    """One set of axes. ``metric`` is a quantity of ``recorded_runs.METRICS``; ``cells`` are names in the experiment, or
    patterns such as "lr_*" for those of a grid; ``see`` says in one sentence what to look for.

    A panel shows the metric of each epoch. ``against`` names a number of the cells, such as "model.constant", or a
    product, "optim.lr × optim.weight_decay": it then shows the metric in the end, a point per cell. ``lines`` are the
    labels of the lines; each joins equally many of ``cells``, in their order. With ``map`` each line is a row of a map.
    ``labels`` are what the cells are called here, where that is not their own labels.
    """

    title: str
    cells: tuple[str, ...]
    metric: str = "error"
    see: str = ""
    against: str = ""
    lines: tuple[str, ...] = ()
    map: bool = False
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.map and not self.against:
            raise ValueError(f"{self.title}: a map is against a number of its cells")
        if bool(self.against) != bool(self.lines) or (self.lines and len(self.cells) % len(self.lines)):
            raise ValueError(f"{self.title}: against needs lines that divide the {len(self.cells)} cells evenly")

    @property
    def slots(self) -> dict[str, int]:
        """Which colour and dash a cell has here: those of its place, or of its line."""
        cells_of_one = len(self.cells) // len(self.lines) if self.lines else 1
        return {name: place // cells_of_one for place, name in enumerate(self.cells)}


@dataclass(frozen=True)
class Experiment:
    """One figure or table. ``shows`` says in one or two sentences what the paper shows with it."""

    name: str
    title: str
    topic: str
    shows: str
    panels: tuple[Panel, ...] = ()
    rows: tuple[str, ...] = ()

    @property
    def slots(self) -> dict[str, int]:
        """Which colour and dash a cell has in the panels."""
        return {name: slot for panel in self.panels for name, slot in panel.slots.items()}


@dataclass(frozen=True)
class Row:
    """One row of a table: the mean of a metric over the seeds of each cell, with ``each`` the single seeds too.

    With ``target`` it is the epoch at which each seed reached that value. ``cells`` are the row's own, if it has any.
    """

    label: str
    metric: str = "accuracy"
    digits: int | None = None
    each: bool = False
    target: float | None = None
    cells: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """Cells of one preset by column. ``corner`` heads the labels of the rows."""

    name: str
    preset: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    corner: str = ""
    cells: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells or self.cells) != len(self.columns):
                raise ValueError(f"table {self.name}, {row.label}: expected a cell for each of {self.columns}")


def _load() -> tuple[tuple[Experiment, ...], tuple[tuple[str, Panel], ...], dict[str, Table]]:
    path = folder() / "figures.toml"
    tables = tomllib.loads(path.read_text(encoding="utf-8"))

    def names(experiment: str, cells: list[str]) -> list[str]:
        return [id.partition("/")[2] for cell in cells for id in matching(f"{experiment}/{cell}")]

    def panel(experiment: str, table: dict[str, Any]) -> Panel:
        built: Panel = build(Panel, table | {"cells": names(experiment, table["cells"])}, "panels.", str(path))
        return built

    experiments = []
    for table in tables["experiment"]:
        name = table["name"]
        panels = tuple(panel(name, one) for one in table.get("panels", []))
        table |= {"panels": panels, "rows": names(name, table.get("rows", []))}
        experiments.append(build(Experiment, table, "experiment.", str(path)))
    picture = tuple((name := one.pop("experiment"), panel(name, one)) for one in tables["picture"])
    built = []
    for table in tables["table"]:
        rows = tuple(build(Row, row, "rows.", str(path)) for row in table["rows"])
        built.append(build(Table, table | {"rows": rows}, "table.", str(path)))
    return tuple(experiments), picture, {table.name: table for table in built}


EXPERIMENTS, PICTURE, TABLES = _load()
"""The experiments; the panels of README's picture, each with the name of its experiment; the tables by name."""
