"""Run folders to a page: ``collect`` reads them, ``judge`` holds them against the paper, the rest draws and writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from normmatters.lab.cells import experiment_names
from normmatters.lab.files import write_atomic
from normmatters.lab.report.charts import svg
from normmatters.lab.report.collect import Collection, collect
from normmatters.lab.report.judge import Verdict, judge_all, not_run
from normmatters.lab.report.pages import html, markdown
from normmatters.lab.report.sections import Section, sections_of

__all__ = ["Collection", "Report", "Verdict", "collect", "draw", "judge_all", "write_report"]

_FIGURE = re.compile(r"(\w+)-\d+\.svg")


@dataclass(frozen=True)
class Report:
    """What was written (``html``, ``markdown``, ``figures``), and what it shows."""

    html: Path
    markdown: Path
    figures: tuple[Path, ...]
    sections: tuple[Section, ...]
    verdicts: tuple[Verdict, ...]
    not_run: str
    collection: Collection


def write_report(
    runs: Iterable[str | Path], out: str | Path, *, command: str = "", progress: Callable[[str], None] | None = None
) -> Report:
    """Turn the run folders below ``runs`` into ``out/report.html``, ``out/report.md`` and ``out/figures/*``.

    Everything is read before anything is written, and each file is replaced in one step; the paper's figures of an
    earlier report that this one does not have are removed. ``progress`` is as in :func:`collect`.

    >>> write_report(["runs/quick"], "runs/quick/report").html        # doctest: +SKIP
    PosixPath('runs/quick/report/report.html')
    """
    return draw(collect(runs, progress), out, command=command)


def draw(collection: Collection, out: str | Path, *, command: str = "") -> Report:
    """:func:`write_report` of runs that have been read."""
    verdicts, missing = judge_all(collection), not_run(collection)
    sections = sections_of(collection, verdicts)
    folder = Path(out) / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    figures: list[Path] = []
    for section in sections:
        for i, (_, chart) in enumerate(section.charts):
            name = f"{section.experiment.name}-{i}"
            figures.append(_write(folder / f"{name}.svg", svg(chart, standalone=True, id=name).encode()))
    page = _write(Path(out) / "report.html", html(collection, sections, verdicts, missing, command).encode())
    text = _write(Path(out) / "report.md", markdown(collection, sections, verdicts, missing).encode())
    names = experiment_names()
    for path in folder.iterdir():  # there may be pictures of the user's own among them
        ours = _FIGURE.fullmatch(path.name)
        if path not in figures and ours and ours[1] in names:
            path.unlink()
    return Report(page, text, tuple(figures), tuple(sections), tuple(verdicts), missing, collection)


def _write(path: Path, data: bytes) -> Path:
    write_atomic(path, data)
    return path
