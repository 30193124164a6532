"""Results to keep: finished runs as one small file each, and the pages that are drawn from them.

``publish`` turns run folders into ``results/PRESET/EXPERIMENT/CELL/seedN.run.jsonl``: config, environment with the
commit, every epoch's metrics to six digits, and the summary; no weights. ``redraw`` makes a report of every preset from
these files alone, an overview in ``results/README.md``, and the numbers between marks in other pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from normmatters.lab import config as _config
from normmatters.lab.cells import PRESETS, load_cell
from normmatters.lab.claims import BENCHMARKS, CLAIMS, BenchmarkClaim, Claim
from normmatters.lab.figures import TABLES, Table
from normmatters.lab.files import write_atomic
from normmatters.lab.recorded_runs import PUBLISHED, Run, published_file, read_published
from normmatters.lab.report import Report, collect, draw
from normmatters.lab.report.charts import picture
from normmatters.lab.report.collect import Collection, Result
from normmatters.lab.report.judge import MARKS, Verdict
from normmatters.lab.report.pages import row
from normmatters.lab.report.sections import picture_charts
from normmatters.lab.report.tables import judge_benchmark, table
from normmatters.lab.schema import suggest

END = "<!-- end of numbers -->"
_MARKED = re.compile(rf"<!-- numbers: ([\w ]+?) -->.*?{END}", re.DOTALL)
_DIGITS = 6
_ENVIRONMENT = ("time", "normmatters", "python", "torch", "cuda", "device", "world_size", "commit")


def publish(runs: Iterable[str | Path], out: str | Path) -> list[Path]:
    """Write every finished (or diverged) run below ``runs`` to ``out``; the files that were written or replaced.

    Raises:
        ValueError: none has finished; a run is of another preset than ``out`` is named after; or ``out`` holds a run of
            the same cell with other settings, of any seed. Nothing is written then.
    """
    out, every_run = Path(out), collect(runs).runs
    chosen = [run for run in every_run if run.finished or run.diverged]
    if not chosen:
        raise ValueError(f"none of the runs has finished, there are {len(every_run)}")
    for run in chosen:
        presets = _presets_of(run)
        if presets and out.name in PRESETS and out.name not in presets:
            preset = " or ".join(presets)
            raise ValueError(f"{run.path} is of the preset {preset}, not {out.name}: publish it with --preset {preset}")
    files = {run.path: published_file(out, run.config) for run in chosen}
    kept = {
        folder: [(file, read_published(file).config) for file in sorted(folder.glob(f"*{PUBLISHED}"))]
        for folder in {file.parent for file in files.values()}
    }
    for run in chosen:
        for file, config in kept[files[run.path].parent]:
            if differs := _config.differences(replace(config, seed=run.seed), run.config):
                conflict = f"{file} holds a run of other settings than {run.path} ({', '.join(differs)})"
                raise ValueError(f"{conflict}: remove it")
    for run in chosen:
        file = files[run.path]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, _lines(run).encode())
    return sorted(files.values())


def _presets_of(run: Run) -> list[str]:
    """By the name of the folder above its experiment, else by its settings; none for settings that no preset has."""
    folder = "".join(run.path.resolve().parts[:-3][-1:])
    if folder in PRESETS:
        return [folder]
    try:
        cell = load_cell(run.cell_id)
    except ValueError:  # of the user's own
        return []
    return [preset for preset in PRESETS if not _config.differences(cell.config(preset, run.seed), run.config)]


def _lines(run: Run) -> str:
    environment = {k: run.environment[k] for k in _ENVIRONMENT if run.environment.get(k) is not None}
    end: dict[str, Any] = {"summary": run.summary}
    if run.error is not None:
        end = {"error": {k: v for k, v in run.error.items() if k in ("kind", "message", "metrics")}}
    rows = [{k: v for k, v in row.items() if k != "time_per_step"} for row in run.metrics]  # seconds / steps
    # Only what was measured is rounded: a setting such as 2⁻¹⁶ must be what it was.
    records = (
        {"config": _config.to_dict(run.config)},
        {"environment": environment},
        *map(_rounded, rows),
        _rounded(end),
    )
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value


def redraw(results: str | Path, pages: Iterable[str | Path] = ()) -> list[Report]:
    """A report of every preset below ``results``, ``results/README.md``, ``results/picture.svg`` for README, and the
    marked parts of ``pages``.

    A marked part is what stands between ``<!-- numbers: E1 E7 -->`` and ``<!-- end of numbers -->``: the claims of the
    named checks, and what the benchmarks in ``results/bench`` say of them. ``table NAME`` is a table of
    ``experiments/figures.toml``. ``headlines`` alone lists one claim for each thing the paper says, from its longest
    runs; shorter ones stay in its row if their verdict is another. ``dates`` alone lists the claims that were written
    after the first run of one of their cells. Everything is read and checked before anything is written.
    """
    results = Path(results)
    if not results.is_dir():
        raise ValueError(f"{results}: no such folder")
    presets = [name for name in PRESETS if any((results / name).rglob(f"*{PUBLISHED}"))]
    if not presets:  # and another README.md may be there
        raise ValueError(f"{results}: no published runs below it; `normmatters publish RUNS` adds some")
    texts = {Path(page): _parts(Path(page)) for page in pages}
    read = {preset: collect([results / preset]) for preset in presets}
    reports = [draw(runs, results / p / "report", command="make report") for p, runs in read.items()]
    named = list(zip(presets, reports))
    if drawn := picture_charts([report.collection for report in reports]):
        write_atomic(results / "picture.svg", picture(drawn).encode())
    write_atomic(results / "README.md", "\n".join([_ABOUT, *(_overview(p, r) for p, r in named)]).encode())
    for page, parts in texts.items():
        filled = [part if i % 2 == 0 else _numbers(part, named, results) for i, part in enumerate(parts)]
        write_atomic(page, "".join(filled).encode())
    return reports


def _parts(page: Path) -> list[str]:
    """The page cut at its marked parts; every second one is the words of such a part."""
    try:
        text = page.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{page}: expected a page of text: {error}") from None
    parts = _MARKED.split(text)
    checks = {"headlines", "dates", *(claim.check for claim in CLAIMS)}
    for words in parts[1::2]:
        asked = words.split()
        known = set(TABLES) if asked[0] == "table" else checks
        for word in asked[asked[0] == "table" :]:
            if word not in known:
                raise ValueError(f"{page}: <!-- numbers: {words} -->{suggest(word, sorted(known))}")
    if len(parts) == 1 or "".join(parts[::2]).count("<!-- numbers:"):
        raise ValueError(f"{page}: expected parts between <!-- numbers: E1 --> and {END}")
    return parts


_ABOUT = f"""# Results

Written by `make report` from the files here, without a GPU. A run is one file,
`PRESET/EXPERIMENT/CELL/seedN{PUBLISHED}`: its config, the environment with the commit, each epoch's metrics, and the
summary. `normmatters publish RUNS` adds runs. [docs/results.md](../docs/results.md) says what they mean,
claim by claim. `bench/` has timings of the kernels.
"""

_PRESET = {
    "quick": "embedded data, a few minutes on a CPU",
    "small": "CIFAR-10 with small networks and few epochs, for questions that the paper leaves open",
    "short": "the regimes of `cifar` with fewer epochs, the learning rate's drops at the same fractions of them",
    "cifar": "CIFAR-10 in the paper's own regime; Tiny-ImageNet and Multi30k stand in for ImageNet and WMT14",
    "full": "the paper's own data and regime",
}


def _overview(preset: str, report: Report) -> str:
    """All cells of a preset in one table."""
    lines = [f"## {preset}: {_PRESET[preset]}", "", f"[Figures and claims]({preset}/report/report.md)", ""]
    lines += ["| | Cell | Paper | Here | Seeds | Setting | Commit |", "|---|---|---:|---:|---:|---|---|"]
    for section in report.sections:
        lines += [_cell(section.experiment.title, result) for result in section.rows.values()]
    return "\n".join(lines) + "\n"


def _cell(title: str, result: Result) -> str:
    here = result.text(result.cell.paper.metric)
    setting = f"{result.setting}, {result.words['epochs']} epochs, {result.words['precision']}"
    commits = sorted({str(run.environment.get("commit") or "unknown")[:7] for run in result.done})
    seeds = str(len(result.done))
    return row(title, result.cell.label, result.paper_text, here, seeds, setting, ", ".join(commits))


def _numbers(words: str, reports: Sequence[tuple[str, Report]], results: Path) -> str:
    """What stands in the marked part of a page that asks for ``words``, with its marks."""
    first, *others = words.split()
    if first == "table":
        collections = {preset: report.collection for preset, report in reports}
        lines = [line for name in others for line in _table(TABLES[name], collections)]
    elif words in ("headlines", "dates"):
        lines = _headlines(reports) if words == "headlines" else _dates(reports)
    else:
        lines = _claims([first, *others], reports, results / "bench")
    return "\n".join([f"<!-- numbers: {words} -->", *lines, END])


def _table(asked: Table, collections: Mapping[str, Collection]) -> list[str]:
    runs = collections.get(asked.preset)
    return table(asked, runs) if runs else [f"No runs of the preset {asked.preset} are published."]


def _claims(checks: list[str], reports: Sequence[tuple[str, Report]], benchmarks: Path) -> list[str]:
    """What the runs and the benchmarks say about the claims of the named checks.

    Those that no runs are about come last: a reader must see what was not tried, too.
    """
    lines, seen = list[list[str]](), set[Claim]()
    for preset, report in reversed(reports):  # the longest runs first
        for v in _judged(report):
            if v.claim.check in checks:
                seen.add(v.claim)
                lines.append([v.mark, _claim(v.claim, v.caveats), v.measured, _seeds(report, v.claim), f"`{preset}`"])
    for measure in BENCHMARKS:
        if measure.check in checks:
            verdict, measured = judge_benchmark(measure, benchmarks)
            lines.append([MARKS[verdict], _claim(measure, measure.note), measured, "", "`bench`"])
    run = {id for _, report in reports for id, result in report.collection.results.items() if result.done}
    for claim in CLAIMS:
        if claim.check in checks and claim not in seen:
            missing = ", ".join(f"`{id}`" for id in sorted(claim.cells - run))
            why = f"not run: {missing}" if missing else "not run at one preset"
            lines.append([MARKS["open"], _claim(claim, claim.caveats), why, "", ""])
    if not seen and not any(measure.check in checks for measure in BENCHMARKS):
        return ["No runs of it are published."]
    return ["| | Claim | Measured | Seeds | Preset |", "|---|---|---|---:|---|", *(row(*cells) for cells in lines)]


def _judged(report: Report) -> list[Verdict]:
    return [v for v in report.verdicts if not v.measured.startswith("no finished run")]


def _seeds(report: Report, claim: Claim) -> str:
    """How many seeds the cells that are compared have; "3 and 2" where they differ."""
    compared = (claim.a, claim.b) if claim.b else claim.ids
    counts = dict.fromkeys(len(report.collection.results[cell].done) for cell in compared)
    return " and ".join(map(str, counts))


def _headlines(reports: Sequence[tuple[str, Report]]) -> list[str]:
    """One row for each thing the paper says, with a link to the section of docs/results.md that explains it."""
    verdicts: dict[Claim, list[tuple[str, Report, Verdict]]] = {claim: [] for claim in CLAIMS if claim.headline}
    for preset, report in reversed(reports):  # the longest runs first
        for v in _judged(report):
            others = verdicts.get(v.claim)
            if others is not None and v.verdict not in [other.verdict for _, _, other in others]:
                others.append((preset, report, v))
    rows = list[str]()
    for claim, judged in verdicts.items():
        text = f"[{claim.text}](docs/results.md#{SECTIONS[claim.check]})"
        if not judged:
            rows.append(row(MARKS["open"], text, "not run", "", ""))
            continue
        dagger = " †" if any(v.caveats for _, _, v in judged) else ""
        measured = [v.measured if i == 0 else f"`{preset}`: {v.measured}" for i, (preset, _, v) in enumerate(judged)]
        seeds = [_seeds(report, claim) for _, report, _ in judged]
        presets, marks = [f"`{preset}`" for preset, _, _ in judged], [v.mark for _, _, v in judged]
        rows.append(row(", ".join(marks), text + dagger, "; ".join(measured), "; ".join(seeds), ", ".join(presets)))
    lines = ["| | The paper says | Measured | Seeds | Preset |", "|---|---|---|---:|---|", *rows]
    if any("†" in line for line in rows):
        lines += ["", "† The link says what else differs between these runs, or what to know about the rule."]
    return lines


#: The sections of docs/results.md, by the check that each explains.
SECTIONS = {
    "E1": "e1-weight-decay-is-a-step-size",
    "E2": "e2-l1-l-and-top10-batch-norm",
    "E3": "e3-batch-norm-in-half-precision",
    "E4": "e4-weight-norm-on-resnet-50",
    "E5": "e5-the-constant-matters",
    "E6": "e6-e8-bounded-weight-norm-for-translation",
    "E7": "e7-e11-weight-norm-on-resnet-56",
    "E8": "e6-e8-bounded-weight-norm-for-translation",
    "E9": "e9-e10-l1-instead-of-l2",
    "E10": "e9-e10-l1-instead-of-l2",
    "E11": "e7-e11-weight-norm-on-resnet-56",
    "E12": "e12-time-and-memory",
}


def _claim(claim: Claim | BenchmarkClaim, caveats: str) -> str:
    return f"{claim.text} ({claim.check})" + (f" *{caveats}*" if caveats else "")


def _dates(reports: Sequence[tuple[str, Report]]) -> list[str]:
    """A table of the claims that are younger than the first run of one of their cells."""
    first: dict[str, str] = {}
    for _, report in reports:
        for id, result in report.collection.results.items():
            times = [str(run.environment.get("time") or "") for run in result.done]
            first[id] = min([*filter(None, times), first.get(id, "~")])
    rows, before = list[str](), 0
    for claim in CLAIMS:
        runs = min((first[id] for id in claim.cells if id in first), default="~").replace("T", " ")[:16]
        if runs[0] != "~" and claim.written < runs:
            before += 1
        elif runs[0] != "~":
            rows.append(row(f"{claim.text} ({claim.check})", claim.written, runs))
    intro = (
        f"{before} claims had their cells and margins before any run of these cells. These came after the first one:"
    )
    return [intro, "", "| Claim | Written (UTC) | First published run of its cells |", "|---|---|---|", *rows]
