"""The report's content, one section per experiment, for the page, the Markdown and the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from normmatters.lab.cells import load_cell
from normmatters.lab.config import TEXT
from normmatters.lab.figures import EXPERIMENTS, PICTURE, Experiment, Panel
from normmatters.lab.recorded_runs import METRICS
from normmatters.lab.report.charts import Chart, Series
from normmatters.lab.report.collect import Collection, Result, differences
from normmatters.lab.report.intervals import mean_interval
from normmatters.lab.report.judge import Verdict


@dataclass(frozen=True)
class Section:
    """One experiment: its results by cell, the charts of its panels, its claims, and where it is not as in the paper.

    ``differences`` are ``(what, here, in the paper)``, as in :func:`collect.differences`.
    """

    experiment: Experiment
    results: dict[str, Result]
    charts: list[tuple[Panel, Chart]]
    verdicts: list[Verdict]
    differences: list[tuple[str, str, str]]

    @property
    def rows(self) -> dict[str, Result]:
        """The results in the order of the experiment's table."""
        return {name: self.results[name] for name in self.experiment.rows if name in self.results}

    @property
    def one_legend(self) -> bool:
        """Whether all charts show the same cells."""
        return len({tuple((s.label, s.slot) for s in chart.series) for _, chart in self.charts}) == 1

    def not_run(self, panel: Panel) -> list[str]:
        """The labels of the panel's curves that have no runs here, though its caption may speak of them."""
        absent = [name for name in panel.cells if name not in self.results and not panel.lines]
        return [load_cell(f"{self.experiment.name}/{name}").label for name in absent]

    @property
    def seeds(self) -> str:
        """ "3 seeds each", or "2 to 3 seeds each"."""
        counts = sorted({len(result.done) for result in self.results.values()} - {0})
        if not counts:
            return "no finished run yet"
        return f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seed{'s' * (counts != [1])} each"


def sections_of(collection: Collection, verdicts: Sequence[Verdict]) -> list[Section]:
    """The paper's experiments that have results, then one made up for each experiment of the user's own."""
    known = {e.name: e for e in EXPERIMENTS}
    sections = []
    for name in collection.experiments:
        results = collection.of(name)
        experiment = _with_own_cells(known.get(name, Experiment(name, name, "Your own runs", "")), results)
        judged = [v for v in verdicts if v.claim.experiment == name]
        drawn = charts(experiment, results)
        sections.append(Section(experiment, results, drawn, judged, differences(results.values())))
    return sections


def _with_own_cells(experiment: Experiment, results: dict[str, Result]) -> Experiment:
    """Cells of the user's own come after the paper's, in panels of their own."""
    own = [cell for cell in results if cell not in experiment.rows]
    text = tuple(cell for cell in own if results[cell].config.data.name in TEXT)
    images = tuple(cell for cell in own if cell not in text)
    whose = " (your own)" if experiment.rows else ""
    panels = [Panel(f"Validation error{whose}", images)] if images else []
    panels += [Panel(f"Validation perplexity{whose}", text, "ppl")] if text else []
    return replace(experiment, panels=(*experiment.panels, *panels), rows=(*experiment.rows, *own))


def charts(experiment: Experiment, results: dict[str, Result]) -> list[tuple[Panel, Chart]]:
    """The panels that draw something which no panel before them has drawn."""
    panels = []
    drawn: set[tuple[str, str]] = set()
    for panel in experiment.panels:
        shown = {name: results[name] for name in panel.cells if name in results}
        curves = {(f"{panel.metric}{panel.against}{panel.map}", name) for name in shown}
        chart = _chart(panel, shown)
        if chart.drawable and not curves <= drawn:
            panels.append((panel, chart))
            drawn |= curves
    return panels


def picture_charts(collections: Sequence[Collection]) -> list[Chart]:
    """The charts of README's picture: each from the last of these collections that has something to draw there."""
    drawn = []
    for experiment, panel in PICTURE:
        for collection in reversed(collections):
            results = collection.of(experiment)
            chart = _chart(panel, {name: results[name] for name in panel.cells if name in results})
            if chart.drawable:
                drawn.append(chart)
                break
    return drawn


def _chart(panel: Panel, results: dict[str, Result]) -> Chart:
    metric = METRICS[panel.metric]
    series = _lines(panel, results) if panel.against else _curves(panel, results)
    title, axis = panel.title + _stand_in(panel, results), panel.against and _AXES[panel.against]
    return Chart(title, metric.label, series, metric.log, metric.unit, axis, panel.map)


_AXES = {
    "model.constant": "factor on the constant",
    "optim.weight_decay": "weight decay",
    "optim.invariant_lr × optim.weight_decay": "learning rate × weight decay",
}


def _curves(panel: Panel, results: dict[str, Result]) -> tuple[Series, ...]:
    """A cell each, by epoch."""
    metric, labels = panel.metric, dict(zip(panel.cells, panel.labels))
    return tuple(
        Series(
            labels.get(name, r.cell.label),
            tuple(r.curve(metric)),
            panel.slots[name],
            bool(r.diverged),
            _papers_end(r, metric),
        )
        for name, r in results.items()
    )


def _lines(panel: Panel, results: dict[str, Result]) -> tuple[Series, ...]:
    """A point for each cell that did not diverge: where it ended, with the interval over its seeds."""
    keys = [key.split(".") for key in panel.against.split(" × ")]
    points: dict[int, list[tuple[float, float, float, float]]] = {slot: [] for slot in range(len(panel.lines))}
    for name, result in results.items():
        values = [] if result.diverged else list(result.by_seed(panel.metric).values())
        if values:
            config = result.cell.config()
            x = math.prod(float(getattr(getattr(config, section), key)) for section, key in keys)
            ends = mean_interval(values, "")
            low, high = (min(values), max(values)) if ends.e is None else (ends.mean - ends.e, ends.mean + ends.e)
            x = float(f"{x:.6g}")  # of equal products
            points[panel.slots[name]].append((x, ends.mean, low, high))
    return tuple(Series(label, tuple(sorted(points[slot])), slot) for slot, label in enumerate(panel.lines))


def _papers_end(result: Result, metric: str) -> float | None:
    """The paper's final number in the units of this metric, where it has one."""
    paper = result.cell.paper
    if paper.value is None or paper.metric != ("accuracy" if metric == "error" else metric):
        return None
    return 100 - paper.value if metric == "error" else paper.value


def _stand_in(panel: Panel, results: dict[str, Result]) -> str:
    """A panel that is named after a network says which one stood in for it."""
    here = {result.words["network"] for result in results.values()}
    changed = any(what == "network" for what, _, _ in differences(results.values()))
    return f" (here {', '.join(sorted(here))})" if changed and panel.title.startswith(("ResNet", "Transformer")) else ""


def facts(collection: Collection) -> dict[str, str]:
    """The report's head: how many runs, on which data, where, and how long."""
    runs = collection.runs
    words = {result.runs[0].cell_id: result.words for result in collection.results.values()}

    def all_of(key: str) -> str:
        return ", ".join(dict.fromkeys(str(r.environment[key]) for r in runs if r.environment.get(key)))

    seconds = sum(float(row.get("seconds") or 0) for r in runs for row in r.metrics)
    table = {
        "Runs": f"{len(runs) - len(collection.unfinished)} of {len(runs)}",
        "Seeds": f"{len({r.seed for r in runs})}",
        "Data": ", ".join(dict.fromkeys(words[r.cell_id]["data"] for r in runs)),
        "Device": all_of("device"),
        "torch": all_of("torch"),
        "Training time": f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min",
    }
    return {k: v for k, v in table.items() if v}
