"""The report as Markdown, for a README: the claims, then a table a figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from urllib.parse import quote

from normmatters.lab.report.collect import Collection, Result, describe, differences
from normmatters.lab.report.html import charts, experiments_of, facts
from normmatters.lab.report.judge import Verdict

__all__ = ["markdown", "row"]


def markdown(collection: Collection, verdicts: Sequence[Verdict], not_run: str = "") -> str:
    """The report as Markdown; images are links into ``figures/`` beside it, ``not_run`` stands below the claims."""
    count = Counter(v.verdict for v in verdicts)
    lines = ["# Norm matters, measured", ""]
    lines += [" · ".join(f"{k}: {v}" for k, v in facts(collection).items()), ""]
    lines += [
        f"**{count['holds']} claims hold, {count['fails']} do not, {count['open']} cannot be told from these runs.**",
        "",
    ]
    if verdicts:
        lines += ["| | Claim | Measured | Rule |", "|---|---|---|---|"]
        lines += [row(v.mark, f"{v.text} ({v.claim.check})", v.measured, v.claim.rule_text) for v in verdicts]
    lines += ["", not_run] if not_run else []
    for e in experiments_of(collection):
        results = collection.of(e.name)
        lines += ["", f"## {e.title}: {e.topic}", ""]
        changed = differences(results.values())
        if changed:
            text = "; ".join(f"{what}: {here} instead of {paper}" if here else what for what, here, paper in changed)
            lines += [f"Not the paper's setting. {text}.", ""]
        for i, (panel, _) in enumerate(charts(e, collection)):
            lines += [f"![{e.title}: {panel.title}](figures/{quote(e.name)}-{i}.svg)", ""]
        lines += ["| Cell | Paper | Here | Seeds | Data and network |", "|---|---:|---:|---:|---|"]
        lines += [_result(results[name]) for name in e.rows if name in results]
    if collection.unfinished or collection.foreign:
        lines += ["", "## Not finished", ""]
        lines += [f"- {path}: its config.json is no run's" for path in collection.foreign]
        reasons = ((r, (r.error or {}).get("message", "stopped")) for r in collection.unfinished)
        lines += [f"- {r.cell_id}, seed {r.seed}: {_one_line(reason)}" for r, reason in reasons]
    return "\n".join(lines) + "\n"


def _result(result: Result) -> str:
    words, here = describe(result.config), result.text(result.cell.paper.metric)
    setting = f"{words['network']} on {words['data']}"
    return row(result.cell.label, result.paper_text, here, f"{len(result.done)}", setting)


def row(*cells: str) -> str:
    """One line of a table."""
    return (
        "|"
        + "|".join(f" {text} ".replace("  ", " ") for c in cells for text in [_one_line(c).replace("|", "\\|")])
        + "|"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
