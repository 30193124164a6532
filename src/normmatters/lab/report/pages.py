"""The report as one HTML page that needs nothing else, and as Markdown: Jinja templates, and what fills them."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from normmatters.lab.report.charts import DARK, LIGHT, legend_key, svg
from normmatters.lab.report.collect import Collection, Result
from normmatters.lab.report.judge import MARKS, Verdict
from normmatters.lab.report.sections import Section, facts


def html(
    collection: Collection, sections: Sequence[Section], verdicts: Sequence[Verdict], not_run: str, command: str
) -> str:
    """The page: figures first, then everything else, folded."""
    return _fill(
        "page.html",
        collection,
        sections=sections,
        verdicts=verdicts,
        not_run=not_run,
        command=command,
        embedded=any(run.config.data.name in ("digits", "numbers") for run in collection.runs),
        python=platform.python_version(),
        colors={"light": LIGHT, "dark": DARK},
        marks=MARKS,
        svg=lambda chart, id: Markup(svg(chart, id=id)),
        legend_key=lambda slot: Markup(legend_key(slot)),
        settings=_settings,
    )


def markdown(collection: Collection, sections: Sequence[Section], verdicts: Sequence[Verdict], not_run: str) -> str:
    """The Markdown, for a README; images are links into ``figures/`` beside it."""
    return _fill("page.md", collection, sections=sections, verdicts=verdicts, not_run=not_run, row=row)


def row(*cells: str) -> str:
    """One line of a Markdown table."""
    texts = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return "|" + "|".join(f" {text} " if text else " " for text in texts) + "|"


def _fill(template: str, collection: Collection, **values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=template.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    kinds = lambda verdicts: Counter(v.verdict for v in verdicts)  # noqa: E731
    environment.filters |= {"code": _code, "grouped": _grouped, "kinds": kinds}
    return environment.get_template(template).render(collection=collection, facts=facts(collection), **values)


def _code(text: str) -> Markup:
    """What stands between backticks, as code."""
    pieces = escape(text).split("`")
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else p for i, p in enumerate(pieces))


def _grouped(differences: Sequence[tuple[str, str, str]]) -> dict[str, list[str]]:
    """What differs from the paper, and how: empty where no setting says it."""
    grouped: dict[str, list[str]] = {}
    for what, here, paper in differences:
        grouped.setdefault(what, []).extend([f"{here} instead of {paper}"] if here else [])
    return grouped


def _settings(results: dict[str, Result]) -> dict[str, str]:
    """The settings of every cell, those that are the same in all of them said once."""
    count = Counter(r.cell.label for r in results.values())
    described = {  # Figure 2 has an "L2" of each network
        r.cell.label if count[r.cell.label] == 1 else f"{r.cell.label} ({name})": {**r.words, **_special(r)}
        for name, r in results.items()
    }
    settings = {}
    for key in dict.fromkeys(key for words in described.values() for key in words):
        values = {label: words.get(key, "–") for label, words in described.items()}
        each = "; ".join(f"{label}: {value}" for label, value in values.items())
        settings[key] = next(iter(values.values())) if len(set(values.values())) == 1 else each
    return settings


def _special(r: Result) -> dict[str, str]:
    model, optim, precision = r.config.model, r.config.optim, r.config.precision
    words = {"norm": f"{model.norm}, constant {model.constant}", "weight norm": model.weight_norm}
    if optim.mode != "wd_on":
        words["weight-decay mode"] = optim.mode
    if precision.arithmetic:
        words["batch norm arithmetic"] = f"{precision.arithmetic}, sums in {precision.accumulate or 'fp32'}"
    return words
