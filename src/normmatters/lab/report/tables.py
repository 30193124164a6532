"""Numbers beside the claims in docs/results.md: tables of cells, and what a benchmark says of a claim.

What they show is data: ``[[table]]`` of ``experiments/figures.toml``, ``benchmarks`` of ``experiments/claims.toml``.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

from normmatters.lab.claims import BenchmarkClaim
from normmatters.lab.figures import Row, Table
from normmatters.lab.recorded_runs import METRICS
from normmatters.lab.report.collect import Collection, Result
from normmatters.lab.report.judge import Kind, first_epoch
from normmatters.lab.report.pages import row

_UNITS = {"graph_ms": ("ms", 1.0), "after_forward_bytes": ("GiB", 2.0**-30)}


def table(table: Table, collection: Collection) -> list[str]:
    """Its lines in Markdown, from the runs of its preset."""
    lines = [row(table.corner, *table.columns), "|---" + "|---:" * len(table.columns) + "|"]
    for line in table.rows:
        results = [collection.results.get(cell) for cell in line.cells or table.cells]
        lines.append(row(line.label, *(_text(line, result) for result in results)))
    return lines


def _text(line: Row, result: Result | None) -> str:
    if result is None or not result.done:
        return "not run"
    metric = METRICS[line.metric]
    if line.target is not None:
        epochs = [first_epoch(run, metric, line.target) for run in result.done]
        return ", ".join("never" if epoch is None else f"{epoch:.1f}" for epoch in epochs)
    if result.diverged:
        return result.divergence
    digits = metric.digits if line.digits is None else line.digits
    values = [f"{value:.{digits}f}" for value in result.by_seed(line.metric).values()]
    if not values:
        return "–"
    mean = f"{fmean(result.by_seed(line.metric).values()):.{digits}f}"
    return f"{mean} ({', '.join(values)})" if line.each and len(values) > 1 else mean


def judge_benchmark(claim: BenchmarkClaim, folder: Path) -> tuple[Kind, str]:
    """The verdict, and the two numbers with what goes if a becomes b; ``folder`` has the benchmarks' files."""
    path = folder / f"{claim.bench}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    chosen = [r for r in rows if r["status"] == "ok" and all(r[key] == value for key, value in claim.where.items())]
    found = {r["variant"]: r[claim.field] for r in chosen if r.get(claim.field) is not None}
    if not {claim.a, claim.b} <= found.keys():
        return "open", "not measured"
    unit, factor = _UNITS[claim.field]
    share = 1 - found[claim.b] / found[claim.a]
    a, b = (f"{found[name] * factor:.1f}" for name in (claim.a, claim.b))
    return "holds" if share >= claim.share else "fails", f"{a} with, {b} {unit} without: {100 * share:.0f} % less"
