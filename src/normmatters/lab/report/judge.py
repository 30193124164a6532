"""Does each claim of the paper hold in these runs? The rules are stated in ``normmatters.lab.claims``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from normmatters.lab.claims import CLAIMS, Claim
from normmatters.lab.experiments import PRESETS, load_cell
from normmatters.lab.report.collect import METRICS, Collection, Number, Result, describe

__all__ = ["MARKS", "Kind", "Verdict", "judge", "judge_all", "not_run"]

Kind = Literal["holds", "fails", "open"]
MARKS: dict[Kind, str] = {"holds": "✓", "fails": "✗", "open": "–"}


@dataclass(frozen=True)
class Verdict:
    """``open``: not finished, or closer than the runs can tell; ``measured`` says which, with the numbers."""

    claim: Claim
    verdict: Kind
    measured: str

    @property
    def mark(self) -> str:
        return MARKS[self.verdict]


def judge_all(collection: Collection) -> list[Verdict]:
    """Every claim whose cells all have runs here; one that did not finish leaves its claims open."""
    return [judge(claim, collection) for claim in CLAIMS if claim.cells <= collection.results.keys()]


def not_run(collection: Collection) -> str:
    """How many claims of these experiments are about cells without a run here, and what runs them; empty if none."""
    commands: dict[str, list[str]] = {}
    presets, shown = _presets_from(collection), collection.experiments
    for claim in CLAIMS:
        if claim.experiment in shown and not claim.cells <= collection.results.keys():
            runs_it = [p for p in presets if all(p in load_cell(id).only for id in claim.cells)]
            commands.setdefault((runs_it or PRESETS)[0], []).append(claim.experiment)
    if not commands:
        return ""
    count = sum(map(len, commands.values()))
    what = "1 more claim is" if count == 1 else f"{count} more claims are"
    how = [f"`normmatters reproduce {' '.join(dict.fromkeys(e))} --preset {p}`" for p, e in commands.items()]
    return f"{what} about cells that were not run here; these are run by {' and '.join(how)}."


def _presets_from(collection: Collection) -> tuple[str, ...]:
    """The preset that most of these runs are of, and those with more data."""

    def matches(preset: str) -> tuple[int, int]:
        """By the name of the folder above the experiments, where it is one; else by data and epochs."""
        ours = [r for r in collection.results.values() if r.cell.table]  # a run of the user's own has no cell file
        named = sum(preset in run.path.parts[:-3][-1:] for r in ours for run in r.runs)
        configs = [(r.config, r.cell.config(preset)) for r in ours]
        alike = sum((c["data"]["name"], c["optim"]["epochs"]) == (d.data.name, d.optim.epochs) for c, d in configs)
        return named, alike

    return PRESETS[PRESETS.index(max(PRESETS, key=matches)) :]


def judge(claim: Claim, collection: Collection) -> Verdict:
    """Judge one claim. A cell without a finished run leaves it open."""
    a, b = collection.results.get(claim.a), collection.results.get(claim.b)
    if a is None or not a.done:
        return Verdict(claim, "open", f"no finished run of {claim.a}")
    if b is None or not b.done:
        return Verdict(claim, "open", f"no finished run of {claim.b}")
    trained = {cell: _trained(collection.results[cell]) for cell in sorted(claim.cells & collection.results.keys())}
    if len({*trained.values()}) > 1:  # such as one at another preset
        told = ", ".join(f"{load_cell(cell).label} on {how}" for cell, how in trained.items())
        return Verdict(claim, "open", f"not trained alike: {told}")
    if claim.rule == "diverges":
        return _diverges(claim, a, b)
    if claim.rule == "sooner":
        return _sooner(claim, a, b)
    if claim.rule == "follows":
        return _follows(claim, a, b, collection.results.get(claim.c or ""))
    if claim.rule == "cheaper":
        return _cheaper(claim, a, b)
    if a.diverged or b.diverged:
        holds = claim.rule == "better" and not a.diverged
        return Verdict(claim, "holds" if holds else "fails", _who(a, b))
    x, y = a.final(claim.metric), b.final(claim.metric)
    if x is None or y is None:
        return Verdict(claim, "open", f"no {METRICS[claim.metric].label} recorded")
    gap, noise = x.mean - y.mean, _noise(x, y)
    digits = METRICS[claim.metric].digits
    known = "noise not known" if noise is None else f"noise {noise:.{digits}f}"
    measured = f"{x.mean:.{digits}f} − {y.mean:.{digits}f} = {gap:+.{digits}f} ({known})".replace("-", "−")
    if noise is None:
        return Verdict(claim, "open", measured)
    verdict: Kind
    if claim.rule == "better":
        verdict = "holds" if gap > noise else "fails" if gap < -noise else "open"
    else:
        over = abs(gap) - claim.margin
        # A difference that is the margin itself in print must not fail on the last bit of a float.
        verdict = "holds" if over <= 1e-9 else "fails" if over > noise else "open"
    return Verdict(claim, verdict, measured)


def _trained(result: Result) -> str:
    """On what, and for how long: in every preset the same for all cells of a claim."""
    words = describe(result.config)
    return f"{words['data']} ({words['training examples']}), {words['epochs']} epochs of batches of {words['batch']}"


def _who(a: Result, b: Result) -> str:
    one = b if b.diverged else a
    return f"{one.cell.label} {one.divergence}"


def _noise(x: Number, y: Number) -> float | None:
    """Two standard errors of the difference; None where one seed's number tells nothing about its own."""
    return None if x.se is None or y.se is None else 2 * math.hypot(x.se, y.se)


def _diverges(claim: Claim, a: Result, b: Result) -> Verdict:
    if a.diverged:
        ended = [len(run.metrics) for run in a.done if run.diverged]
        which = f", in {len(ended)} of {len(a.done)} seeds" if len(ended) < len(a.done) else ""
        return Verdict(claim, "holds", f"loss not finite after {min(ended)} epochs{which}")
    x, y = a.final(claim.metric), b.final(claim.metric)
    if x is None or y is None:
        return Verdict(claim, "open", "no accuracy recorded")
    lost = y.mean - x.mean
    return Verdict(
        claim, "holds" if lost >= claim.margin else "fails", f"{x.mean:.2f}: {lost:+.2f} points lost".replace("-", "−")
    )


def _sooner(claim: Claim, a: Result, b: Result) -> Verdict:
    target = claim.target or 0.0
    first = [next((e for e, mean, *_ in r.curve("error") if mean <= target), None) for r in (a, b)]
    if first[0] is None:
        end = a.final("error")
        reached = f"only {end.mean:.2f} % reached" if end else "no error recorded"
        return Verdict(claim, "fails" if first[1] is not None else "open", reached)
    if first[1] is None:
        trained = max((epoch for epoch, *_ in b.curve("error")), default=0)
        known = b.diverged or first[0] * claim.margin <= trained  # else it might have come there in time
        return Verdict(claim, "holds" if known else "open", f"epoch {first[0]:g}, without it not in {trained:g}")
    ratio = first[1] / max(first[0], 1)
    return Verdict(claim, "holds" if ratio >= claim.margin else "fails", f"epoch {first[0]:g} against {first[1]:g}")


def _follows(claim: Claim, a: Result, b: Result, c: Result | None) -> Verdict:
    if c is None or not c.done:
        return Verdict(claim, "open", f"no finished run of {claim.c}")
    if a.diverged or b.diverged:
        return Verdict(claim, "fails", _who(a, b))
    here, other = _gap(a, b), _gap(c, b)
    if here is None or other is None:
        return Verdict(claim, "open", "no common epochs")
    text = f"training loss apart by ×{math.exp(here):.2f}, {c.cell.label} by ×{math.exp(other):.2f}"
    return Verdict(claim, "holds" if here <= other / 2 else "fails", text)


def _gap(a: Result, b: Result) -> float | None:
    """Mean |log a − log b| of the training loss over the epochs that both have, averaged over seeds first.

    Not the validation error: at a large step size it jumps with the lag of the running statistics.
    """
    # a loss can be 0 in float32, where each example's logit is ahead by 17 or more
    curves = [{epoch: math.log(max(mean, 1e-12)) for epoch, mean, *_ in r.curve("loss")} for r in (a, b)]
    gaps = [abs(value - curves[1][epoch]) for epoch, value in curves[0].items() if epoch in curves[1]]
    return sum(gaps) / len(gaps) if gaps else None


def _cheaper(claim: Claim, a: Result, b: Result) -> Verdict:
    metric = METRICS[claim.metric]
    x, y = a.final(claim.metric), b.final(claim.metric)
    if x is None or y is None:
        return Verdict(claim, "open", f"no {metric.label} recorded")
    measured = f"{x.mean:.2f} against {y.mean:.2f} {metric.unit}"
    runs = (*a.done, *b.done)
    if not all(run.alone_on_gpu for run in runs):
        return Verdict(claim, "open", f"{measured}: not from runs that had a GPU to themselves")
    if len({(run.environment.get("device"), run.environment.get("world_size", 1)) for run in runs}) > 1:
        return Verdict(claim, "open", f"{measured}: not on the same device")
    return Verdict(claim, "holds" if x.mean < y.mean else "fails", measured)
