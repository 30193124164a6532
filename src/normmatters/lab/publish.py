"""Results to keep: finished runs as one small file each, and the pages that are drawn from them.

``publish`` turns run folders into ``results/PRESET/EXPERIMENT/CELL/seedN.run.jsonl``: config, environment with the
commit, every epoch's metrics to six digits, and the summary; no weights. ``redraw`` makes a report of every preset from
these files alone, an overview in ``results/README.md``, and the part of the project's README between two marks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from normmatters.lab import config as _config
from normmatters.lab.experiments import PRESETS
from normmatters.lab.report import Report, collect, write_report
from normmatters.lab.report.collect import METRICS, PUBLISHED, Result, Run, describe, read_published
from normmatters.lab.report.html import experiments_of
from normmatters.lab.runlog import write_atomic

__all__ = ["publish", "redraw"]

BEGIN, END = "<!-- results: written by `make report` -->", "<!-- end of results -->"
_DIGITS = 6
_ENVIRONMENT = ("time", "normmatters", "python", "torch", "cuda", "device", "world_size", "commit")


def publish(runs: Iterable[str | Path], out: str | Path) -> list[Path]:
    """Write every finished (or diverged) run below ``runs`` to ``out``; the files that were written or replaced.

    Raises:
        ValueError: ``out`` holds a run of the same cell and seed with other settings. Nothing is written then.
    """
    out = Path(out)
    chosen = [run for run in collect(runs).runs if run.finished or run.diverged]
    files = {run.path: out / run.cell_id / f"seed{run.seed}{PUBLISHED}" for run in chosen}
    for run in chosen:
        file = files[run.path]
        if file.exists() and (old := _hash(read_published(file))) != _hash(run):
            raise ValueError(f"{file} holds a run of other settings ({old}) than {run.path} ({_hash(run)}): remove it")
    for run in chosen:
        file = files[run.path]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, _lines(run).encode())
    return sorted(files.values())


def _hash(run: Run) -> str:
    return _config.config_hash(_config.from_dict(run.config, str(run.path)))


def _lines(run: Run) -> str:
    environment = {k: run.environment[k] for k in _ENVIRONMENT if run.environment.get(k) is not None}
    end: dict[str, Any] = {"summary": run.summary}
    if run.error is not None:
        end = {"error": {k: v for k, v in run.error.items() if k in ("kind", "message", "metrics")}}
    rows = [{k: v for k, v in row.items() if k != "time_per_step"} for row in run.metrics]  # seconds / steps
    return "".join(
        json.dumps(_rounded(record), ensure_ascii=False) + "\n"
        for record in ({"config": run.config}, {"environment": environment}, *rows, end)
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value


def redraw(results: str | Path, readme: str | Path | None = None) -> list[Report]:
    """A report of every preset below ``results``, ``results/README.md``, and the marked part of ``readme``.

    Everything is read and checked before anything is written.
    """
    results = Path(results)
    presets = [name for name in PRESETS if any((results / name).rglob(f"*{PUBLISHED}"))]
    if not presets:
        raise ValueError(f"{results}: no published runs ({results}/PRESET/EXPERIMENT/CELL/seedN{PUBLISHED})")
    before, after = ("", "") if readme is None else _around(Path(readme))
    reports = [
        write_report([results / p], results / p / "report", command="make report", images=False) for p in presets
    ]
    named = list(zip(presets, reports))
    write_atomic(results / "README.md", "\n".join([_ABOUT, *(_overview(p, r) for p, r in named)]).encode())
    if readme is not None:
        write_atomic(Path(readme), (before + "\n".join(_claims(p, r) for p, r in named) + after).encode())
    return reports


def _around(readme: Path) -> tuple[str, str]:
    """What stands before and after the marked part."""
    text = readme.read_text(encoding="utf-8")
    begin, end = text.find(BEGIN), text.find(END)
    if not 0 <= begin < end:
        raise ValueError(f"{readme}: expected the marks {BEGIN} and {END}, in this order")
    return text[: begin + len(BEGIN)] + "\n", text[end:]


_ABOUT = f"""# Results

Written by `make report` from the files here, without a GPU. A run is one file,
`PRESET/EXPERIMENT/CELL/seedN{PUBLISHED}`: its config, the environment with the commit, each epoch's metrics, and the
summary. `normmatters publish RUNS` adds runs. [docs/results.md](../docs/results.md) says what they mean,
claim by claim. `bench/` has timings of the kernels.
"""

_PRESET = {
    "quick": "embedded data, a few minutes on a CPU",
    "short": "the regimes of `cifar` with fewer epochs, the learning rate's drops at the same fractions of them",
    "cifar": "CIFAR-10 in the paper's own regime; Tiny-ImageNet and Multi30k stand in for ImageNet and WMT14",
    "full": "the paper's own data and regime",
}


def _overview(preset: str, report: Report) -> str:
    """All cells of a preset in one table."""
    collection = report.collection
    lines = [f"## {preset}: {_PRESET[preset]}", "", f"[Figures and claims]({preset}/report/report.md)", ""]
    lines += ["| | Cell | Paper | Here | Seeds | Setting | Commit |", "|---|---|---:|---:|---:|---|---|"]
    for e in experiments_of(collection):
        results = collection.of(e.name)
        lines += [_cell(e.title, results[name]) for name in e.rows if name in results]
    return "\n".join(lines) + "\n"


def _cell(title: str, result: Result) -> str:
    paper, words = result.cell.paper, describe(result.config)
    metric = METRICS[paper.metric]
    unit = metric.unit or metric.label
    number = result.final(paper.metric)
    here = "diverged" if result.diverged else number.text(metric.digits, unit) if number else "–"
    value = f"{paper.value:g} {unit}" if paper.value is not None else paper.note or "–"
    setting = f"{words['network']} on {words['data']}, {words['epochs']} epochs, {words['precision']}"
    commits = sorted({str(run.environment.get("commit") or "unknown")[:7] for run in result.done})
    return (
        f"| {title} | {result.cell.label} | {value} | {here} | {len(result.done)} | {setting} | {', '.join(commits)} |"
    )


def _claims(preset: str, report: Report) -> str:
    """The claims that these runs can be asked about."""
    told = [v for v in report.verdicts if not v.measured.startswith("no finished run")]
    lines = [f"`{preset}`: {_PRESET[preset]}.", "", "| | Claim | Measured |", "|---|---|---|"]
    lines += [f"| {v.mark} | {v.claim.text} ({v.claim.check}) | {v.measured} |" for v in told]
    return "\n".join(lines) + "\n"
