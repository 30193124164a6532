"""The page: one HTML file that needs nothing else. Layout, colours and script are in ``page.html``; this fills it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib import resources
from string import Template
from urllib.parse import quote

from normmatters.lab.paper import EXPERIMENTS, Experiment, Panel
from normmatters.lab.report.collect import METRICS, Collection, Result, describe, differences
from normmatters.lab.report.figures import DARK, LIGHT, Chart, Series, legend_key, svg
from normmatters.lab.report.intervals import mean_interval
from normmatters.lab.report.judge import MARKS, Kind, Verdict

__all__ = ["charts", "experiments_of", "page", "slots"]

_WORDS = {"holds": "✓ holds", "fails": "✗ fails", "open": "– open"}
_DARK_PAGE = (
    "--page:#0d1117; --soft:#161b22; --text:#e6edf3; --dim:#9aa5b1; --line:#30363d; --grid:#21262d; --link:#6cb6ff; "
    "--good:#56d68a; --good-bg:#12301f; --bad:#ff8f85; --bad-bg:#3b1715; --open:#aab4bf; --open-bg:#21262d; "
    "--note:#eac54f; --note-bg:#2b2410;"
)
_RULES = (
    "± is a 95 % interval by Student’s t over seeds, paired where both cells have the same seeds. A claim holds or "
    "fails only if its whole interval does. With fewer than three seeds it stays open, unless the loss is not finite "
    "or the closest runs are apart by ten standard errors of the validation set. Margins stay those of the first rules."
)
_EMBEDDED = (
    "<b>Small networks on embedded data.</b> These runs take minutes and show how each experiment works. They cannot "
    "show every effect of the paper; <code>--preset cifar</code> has its own data and regime."
)


def page(collection: Collection, verdicts: Sequence[Verdict], not_run: str = "", command: str = "") -> str:
    """The whole report as one HTML string: figures first, then everything else, folded."""
    sections = experiments_of(collection)
    links = [f'<li><a href="#{escape(e.name)}">{escape(e.title)}{_score(e, verdicts)}</a></li>' for e in sections]
    body = [*(_section(e, collection, verdicts) for e in sections), _claims(sections, verdicts, not_run)]
    links.append('<li><a href="#claims">All claims</a></li>')
    if collection.unfinished or collection.foreign:
        body.append(_unfinished(collection))
        links.append('<li><a href="#unfinished">Not finished</a></li>')
    with resources.files("normmatters.lab.report").joinpath("page.html").open(encoding="utf-8") as file:
        template = Template(file.read())
    return template.substitute(
        title="Norm matters, measured",
        light=_slots(LIGHT),
        dark_page=_DARK_PAGE + _slots(DARK),
        toc="\n".join(links),
        lead="The figures and tables of “Norm matters” (Hoffer, Banner, Golan, Soudry, 2018), drawn from these runs. "
        "◀ marks the paper’s final number.",
        tally=_tally(verdicts),
        facts="\n".join(f"<li>{escape(k)} <b>{escape(v)}</b></li>" for k, v in facts(collection).items()),
        notice=f'<p class="note">{_EMBEDDED}</p>' if _embedded(collection) else "",
        body="\n".join(body),
        footer=_footer(command),
    )


def _embedded(collection: Collection) -> bool:
    return any(run.config["data"]["name"] in ("digits", "numbers") for run in collection.runs)


def facts(collection: Collection) -> dict[str, str]:
    """What the whole report rests on: how many runs, on which data, where, and how long."""

    def all_of(key: str) -> str:
        return ", ".join(dict.fromkeys(str(r.environment[key]) for r in collection.runs if r.environment.get(key)))

    data = dict.fromkeys(describe(r.config)["data"] for r in collection.runs)
    seeds = sorted({r.seed for r in collection.runs})
    seconds = sum(float(row.get("seconds") or 0) for r in collection.runs for row in r.metrics)
    found = {
        "Runs": f"{len([r for r in collection.runs if r.finished or r.diverged])} of {len(collection.runs)}",
        "Seeds": f"{len(seeds)}",
        "Data": ", ".join(data),
        "Device": all_of("device"),
        "torch": all_of("torch"),
        "Training time": f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min",
    }
    return {k: v for k, v in found.items() if v}


def experiments_of(collection: Collection) -> list[Experiment]:
    """The paper's experiments that have results, then one made up for each experiment of the user's own.

    A cell of the user's own in one of the paper's experiments comes after its cells, in a panel of its own.
    """
    known = {e.name: e for e in EXPERIMENTS}
    found = []
    for name in collection.experiments:
        results = collection.of(name)
        one = known.get(name, Experiment(name, name, "Your own runs", ""))
        own = [cell for cell in results if cell not in one.rows]
        text = tuple(c for c in own if results[c].config["data"]["name"] in ("text", "numbers"))
        image = tuple(c for c in own if c not in text)
        whose = " (your own)" if one.rows else ""
        panels = [Panel(f"Validation error{whose}", image)] if image else []
        panels += [Panel(f"Validation perplexity{whose}", text, "ppl")] if text else []
        found.append(replace(one, panels=(*one.panels, *panels), rows=(*one.rows, *own)))
    return found


def charts(experiment: Experiment, collection: Collection) -> list[tuple[Panel, Chart]]:
    """The panels that have something to draw which no panel before them has drawn."""
    results, found = collection.of(experiment.name), []
    drawn: set[tuple[str, str]] = set()
    for panel in experiment.panels:
        metric = METRICS[panel.metric]
        curves = {(panel.metric + panel.against, name) for name in panel.cells if name in results}
        series = _lines(panel, results) if panel.against else _curves(panel, results)
        title = panel.title + _stand_in(panel, [results[n] for n in panel.cells if n in results])
        chart = Chart(title, metric.label, series, metric.log, metric.unit, panel.against and _AXES[panel.against])
        if chart.drawable and not curves <= drawn:
            found.append((panel, chart))
            drawn |= curves
    return found


_AXES = {"model.constant": "factor on the constant"}


def _curves(panel: Panel, results: dict[str, Result]) -> tuple[Series, ...]:
    """A cell each, by epoch."""
    return tuple(
        Series(r.cell.label, tuple(r.curve(panel.metric)), slot, r.diverged, _papers_end(r, panel.metric))
        for name, slot in panel.slots.items()
        if (r := results.get(name)) is not None
    )


def _lines(panel: Panel, results: dict[str, Result]) -> tuple[Series, ...]:
    """A point for each cell that did not diverge: where it ended, with the interval over its seeds."""
    section, _, key = panel.against.partition(".")
    points: dict[int, list[tuple[float, float, float, float]]] = {slot: [] for slot in range(len(panel.lines))}
    for name, slot in panel.slots.items():
        result = results.get(name)
        values = [] if result is None or result.diverged else list(result.by_seed(panel.metric).values())
        if result is not None and values:
            x = float(getattr(getattr(result.cell.config(), section), key))
            ends = mean_interval(values, "")
            low, high = (min(values), max(values)) if ends.e is None else (ends.mean - ends.e, ends.mean + ends.e)
            points[slot].append((x, ends.mean, low, high))
    return tuple(Series(label, tuple(sorted(points[slot])), slot) for slot, label in enumerate(panel.lines))


def _papers_end(result: Result, metric: str) -> float | None:
    """The paper's final number in the units of this metric, where it has one."""
    paper = result.cell.paper
    if paper.value is None or paper.metric != ("accuracy" if metric == "error" else metric):
        return None
    return 100 - paper.value if metric == "error" else paper.value


def _stand_in(panel: Panel, results: Sequence[Result]) -> str:
    """A panel that is named after a network says which one stood in for it."""
    here = {describe(r.config)["network"] for r in results}
    changed = any(what == "network" for what, _, _ in differences(results))
    return f" (here {', '.join(sorted(here))})" if changed and panel.title.startswith(("ResNet", "Transformer")) else ""


def slots(experiment: Experiment) -> dict[str, int]:
    """Which colour and dash a cell has in its panels."""
    return {name: slot for panel in experiment.panels for name, slot in panel.slots.items()}


def _slots(colors: Sequence[str]) -> str:
    return " ".join(f"--s{i}:{c};" for i, c in enumerate(colors))


def _score(experiment: Experiment, verdicts: Sequence[Verdict]) -> str:
    own = Counter(v.verdict for v in verdicts if v.claim.experiment == experiment.name)
    css = {"holds": "good", "fails": "bad", "open": ""}
    marks = [f'<i class="{css[kind]}">{own[kind]}{mark}</i>' for kind, mark in MARKS.items() if own[kind]]
    return f' <span class="score">{" ".join(marks)}</span>' if marks else ""


def _tally(verdicts: Sequence[Verdict]) -> str:
    count = Counter(v.verdict for v in verdicts)
    words: dict[Kind, str] = {"holds": "hold", "fails": "do not", "open": "open"}
    chips = (f'<a class="chip {kind}" href="#claims">{count[kind]} {word}</a>' for kind, word in words.items())
    return f'<p class="badges">Claims: {" ".join(chips)}</p>' if verdicts else ""


def _badges(verdicts: Sequence[Verdict], name: str) -> str:
    """A small badge per claim that is decided, and one for all that are open."""
    decided = [v for v in verdicts if v.verdict != "open"]
    chips = [
        f'<li class="chip {v.verdict}" title="{escape(v.measured)}">{v.mark} {escape(v.text)}</li>' for v in decided
    ]
    if left := len(verdicts) - len(decided):
        chips.append(f'<li class="chip open"><a href="#{escape(name)}-claims">{left} open</a></li>')
    return f'<ul class="badges">{"".join(chips)}</ul>' if chips else ""


def _claims(sections: Sequence[Experiment], verdicts: Sequence[Verdict], not_run: str) -> str:
    """Every claim with its rule, folded."""
    rows = []
    for e in sections:
        own = [v for v in verdicts if v.claim.experiment == e.name]
        if own:
            link = f'<a href="#{escape(e.name)}">{escape(e.title)} · {escape(e.topic)}</a>'
            rows.append(f'<tr class="group"><td colspan="4">{link}</td></tr>')
            rows += [_claim_row(v) for v in own]
    table = f'<table class="stack claims">{_CLAIM_HEAD}<tbody>{"".join(rows)}</tbody></table>' if rows else ""
    rest = f'<p class="shows dim">{_code(not_run)}</p>' if not_run else ""
    body = f'<p class="shows dim">{_RULES}</p>{table}{rest}'
    folded = f"<details><summary>The table, and how a claim is judged</summary>{body}</details>"
    return f'<section id="claims"><h2>All claims{_anchor("claims")}</h2>{folded}</section>'


_CLAIM_HEAD = "<thead><tr><th>Claim</th><th>Verdict</th><th>Measured</th><th>Rule</th></tr></thead>"


def _claim_row(v: Verdict) -> str:
    return (
        f'<tr><td>{escape(v.text)} <span class="dim">({v.claim.check})</span>{_sub(v.caveats)}</td>'
        f'<td class="verdict"><span class="chip {v.verdict}">{_WORDS[v.verdict]}</span></td>'
        f'<td class="measured">{escape(v.measured)}</td><td class="rule dim">{escape(v.claim.rule_text)}</td></tr>'
    )


def _anchor(name: str) -> str:
    return f'<a class="anchor" href="#{escape(name)}" aria-label="Link to this section">#</a>'


def _section(e: Experiment, collection: Collection, verdicts: Sequence[Verdict]) -> str:
    """Figures and badges in sight; numbers, claims and settings folded."""
    results = collection.of(e.name)
    own = [v for v in verdicts if v.claim.experiment == e.name]
    panels, numbers = _panels(e, collection), _differences(results) + _table(e, results)
    parts = [
        f'<section id="{escape(e.name)}"><h2><small>{escape(e.title)}</small>{escape(e.topic)}{_anchor(e.name)}</h2>'
    ]
    if e.shows:
        parts.append(f'<p class="shows"><b>The paper.</b> {_code(e.shows)}</p>')
    parts += [panels, _badges(own, e.name)]
    parts.append(f"<details{'' if panels else ' open'}><summary>Numbers</summary>{numbers}</details>")
    if own:
        table = f'<table class="stack claims">{_CLAIM_HEAD}<tbody>{"".join(map(_claim_row, own))}</tbody></table>'
        parts.append(f'<details id="{escape(e.name)}-claims"><summary>Claims</summary>{table}</details>')
    return "".join([*parts, _regimes(results), "</section>"])


def _code(text: str) -> str:
    pieces = escape(text).split("`")
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(pieces))


def _differences(results: dict[str, Result]) -> str:
    if not any(r.cell.table or r.cell.same_as for r in results.values()):
        return ""
    found: dict[str, list[str]] = {}
    for what, here, paper in differences(results.values()):
        found.setdefault(what, []).extend([f"{here} instead of {paper}"] if here else [])
    seeds = sorted({len(r.done) for r in results.values()} - {0})
    seed_text = "no finished run yet"
    if seeds:
        seed_text = (
            f"{' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seed{'s' if seeds != [1] else ''} each"
        )
    if not found:
        return f'<div class="note plain"><b>The paper’s own setting</b>, {seed_text}.</div>'
    items = "".join(
        f"<li>{escape(what.capitalize() if texts else what)}{escape(': ' * bool(texts) + '; '.join(texts))}</li>"
        for what, texts in found.items()
    )
    return f'<div class="note"><b>Not the paper’s setting</b>: {seed_text}.<ul>{items}</ul></div>'


def _panels(e: Experiment, collection: Collection) -> str:
    drawn = charts(e, collection)
    if not drawn:
        return ""
    shared = len({tuple((s.label, s.slot) for s in chart.series) for _, chart in drawn}) == 1
    figures = []
    for i, (panel, chart) in enumerate(drawn):
        name = f"{e.name}-{i}"
        data = f"data:text/csv;charset=utf-8,{quote(chart.csv())}"
        link = f'<a download="{escape(name)}.csv" href="{data}">CSV</a>'
        drawing = f"<figcaption>{escape(chart.title)}</figcaption>{svg(chart, id=name)}"
        legend = "" if shared else _legend(chart)
        whose = "In the published runs: " if panel.see and _embedded(collection) else ""
        see = f'<p class="see">{whose}{escape(panel.see)} {link}</p>'
        figures.append(f"<figure{'' if shared else ' data-group'}>{drawing}{legend}{see}</figure>")
    if shared:  # beside an odd panel there is room for the one legend; else it goes below the panels
        figures.append(_legend(drawn[0][1], "beside" if len(drawn) % 2 else "below"))
    return f'<div class="panels"{" data-group" if shared else ""}>{"".join(figures)}</div>'


def _legend(chart: Chart, place: str = "below") -> str:
    items = (
        f'<li><button type="button" data-slot="{s.slot}" aria-pressed="true">'
        f"{legend_key(s.slot)}{escape(s.label)}</button></li>"
        for s in chart.series
    )
    return f'<ul class="legend {place}">{"".join(items)}</ul>'


def _table(e: Experiment, results: dict[str, Result]) -> str:
    """The cells with the paper's number and ours. A setting that all rows share is said once, in the head."""
    rows = {name: results[name] for name in e.rows if name in results}
    slot, costs = slots(e), e.name == "speed"
    theirs = {r.cell.paper.setting for r in rows.values()}
    ours = {name: _setting(r) for name, r in rows.items()}
    ours_once, theirs_once = len(set(ours.values())) == 1, len(theirs) == 1
    columns = ("Seconds per epoch", "Peak memory") if costs else ("Paper", "Here")
    subs = ("", "") if costs else (next(iter(theirs)) if theirs_once else "", "")
    if ours_once and rows:
        subs = (subs[0], next(iter(ours.values())))
    head = "".join(f'<th class="num">{h}{_sub(sub)}</th>' for h, sub in zip(columns, subs, strict=True))
    body = []
    for name, r in rows.items():
        key = legend_key(slot[name]) if name in slot else ""
        if costs:
            cells = _cell(r, "seconds", columns[0]) + _cell(r, "memory", columns[1])
        else:
            cells = _paper(r, not theirs_once) + _cell(r, r.cell.paper.metric, "Here", "" if ours_once else ours[name])
        body.append(
            f'<tr><td>{key}{escape(r.cell.label)}</td>{cells}<td class="num" data-name="Seeds">{len(r.done)}</td></tr>'
        )
    return (
        f'<table class="stack"><thead><tr><th>Cell</th>{head}<th class="num">Seeds</th></tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _setting(r: Result) -> str:
    words = describe(r.config)
    return f"{words['network']}, {words['data']}"


def _sub(text: str) -> str:
    return f'<span class="sub">{escape(text)}</span>' if text else ""


def _paper(r: Result, with_setting: bool) -> str:
    paper = r.cell.paper
    note = paper.note if paper.value is not None else ""
    setting = _sub(paper.setting) if with_setting else ""
    return f'<td class="num" data-name="Paper">{escape(r.paper_text)}{_sub(note)}{setting}</td>'


def _cell(r: Result, name: str, head: str, setting: str = "") -> str:
    return f'<td class="num" data-name="{escape(head)}"><b>{escape(r.text(name))}</b>{_sub(setting)}</td>'


def _regimes(results: dict[str, Result]) -> str:
    """The settings of every cell, those that are the same in all of them said once."""
    count = Counter(r.cell.label for r in results.values())
    described = {  # Figure 2 has an "L2" of each network
        r.cell.label if count[r.cell.label] == 1 else f"{r.cell.label} ({name})": {**describe(r.config), **_special(r)}
        for name, r in results.items()
    }
    if not described:
        return ""
    keys = list(dict.fromkeys(k for words in described.values() for k in words))
    rows = []
    for key in keys:
        values = {label: words.get(key, "–") for label, words in described.items()}
        same = len(set(values.values())) == 1
        text = (
            next(iter(values.values())) if same else "; ".join(f"{label}: {value}" for label, value in values.items())
        )
        rows.append(f"<tr><td>{escape(key.capitalize())}</td><td>{escape(text)}</td></tr>")
    return f'<details><summary>Settings</summary><div class="scroll"><table>{"".join(rows)}</table></div></details>'


def _special(r: Result) -> dict[str, str]:
    model, optim, precision = r.config["model"], r.config["optim"], r.config["precision"]
    found = {"norm": f"{model['norm']}, constant {model['constant']}", "weight norm": str(model["weight_norm"])}
    if optim["mode"] != "wd_on":
        found["weight-decay mode"] = str(optim["mode"])
    if precision["arithmetic"]:
        found["batch norm arithmetic"] = f"{precision['arithmetic']}, sums in {precision['accumulate'] or 'fp32'}"
    return found


def _unfinished(collection: Collection) -> str:
    items = [f"<li><b>{escape(str(path))}</b>: its config.json is no run's</li>" for path in collection.foreign]
    for run in collection.unfinished:
        reason = str(
            (run.error or {}).get("message") or f"stopped after {len(run.metrics)} epochs; the same command resumes it"
        )
        items.append(f"<li><b>{escape(run.cell_id)}, seed {run.seed}</b>: <code>{escape(reason)}</code></li>")
    head = f'<section id="unfinished"><h2>Not finished{_anchor("unfinished")}</h2>'
    return f'{head}<div class="note err"><ul>{"".join(items)}</ul></div></section>'


def _footer(command: str) -> str:
    made = f"<p>Made by</p><pre><code>{escape(command)}</code></pre>" if command else ""
    text = "A band around a line spans the seeds; a dot ends it; ◀ is the paper’s final number."
    return f"{made}<p>normmatters on Python {platform.python_version()}. {text}</p>"
