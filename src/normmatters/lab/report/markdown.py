"""The report as Markdown, for a README: the claims, then a table a figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from urllib.parse import quote

from normmatters.lab.report.collect import Collection
from normmatters.lab.report.judge import Verdict
from normmatters.lab.report.sections import Section, facts

__all__ = ["markdown", "row"]


def markdown(
    collection: Collection, sections: Sequence[Section], verdicts: Sequence[Verdict], not_run: str = ""
) -> str:
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
    for section in sections:
        e = section.experiment
        lines += ["", f"## {e.title}: {e.topic}", ""]
        if changed := section.differences:
            text = "; ".join(f"{what}: {here} instead of {paper}" if here else what for what, here, paper in changed)
            lines += [f"Not the paper's setting. {text}.", ""]
        for i, (panel, _) in enumerate(section.charts):
            lines += [f"![{e.title}: {panel.title}](figures/{quote(e.name)}-{i}.svg)", ""]
        lines += ["| Cell | Paper | Here | Seeds | Data and network |", "|---|---:|---:|---:|---|"]
        for result in section.rows.values():
            here = result.text(result.cell.paper.metric)
            lines.append(row(result.cell.label, result.paper_text, here, str(len(result.done)), result.setting))
    if collection.unfinished or collection.foreign:
        lines += ["", "## Not finished", ""]
        lines += [f"- {path}: its config.json is no run's" for path in collection.foreign]
        reasons = ((r, (r.error or {}).get("message", "stopped")) for r in collection.unfinished)
        lines += [f"- {r.cell_id}, seed {r.seed}: {_one_line(reason)}" for r, reason in reasons]
    return "\n".join(lines) + "\n"


def row(*cells: str) -> str:
    """One line of a table."""
    return (
        "|"
        + "|".join(f" {text} ".replace("  ", " ") for c in cells for text in [_one_line(c).replace("|", "\\|")])
        + "|"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
