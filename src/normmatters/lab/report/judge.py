"""Does each claim of the paper hold in these runs? The rules are stated in ``normmatters.lab.claims``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Literal

from normmatters.lab.cells import PRESETS, load_cell
from normmatters.lab.claims import CLAIMS, Claim, Rule
from normmatters.lab.recorded_runs import METRICS, Metric, Run
from normmatters.lab.report.collect import Collection, Result, differences
from normmatters.lab.report.intervals import SEEDS_NEEDED, Interval, difference, mean_interval

Kind = Literal["holds", "fails", "open"]
MARKS: dict[Kind, str] = {"holds": "✓", "fails": "✗", "open": "–"}
Outcome = tuple[Kind, str]
BEYOND_DOUBT = 10  # standard errors of the validation set: what too few seeds must be apart by, beyond the border
_MINUS = re.compile(r"(?<!\w)-(?=[\d ])")
_LAST_BIT = 1e-9  # a difference that is the margin itself in print must not fail on the last bit of a float


@dataclass(frozen=True)
class Verdict:
    """``open``: not finished, or closer than the runs can tell; ``measured`` says which, with the numbers.

    ``deviations`` names what these runs have that their cells no longer have, ``stand_in`` the network and the data
    that stood in for those of the claim.
    """

    claim: Claim
    verdict: Kind
    measured: str
    deviations: str = ""
    stand_in: str = ""

    @property
    def text(self) -> str:
        """The claim, with what stood in for its network."""
        return f"{self.claim.text} (here: {self.stand_in})" if self.stand_in else self.claim.text

    @property
    def caveats(self) -> str:
        """What a reader of the verdict must know; empty where there is nothing."""
        older = f"Older runs: {self.deviations}." if self.deviations else ""
        return " ".join(text for text in (older, self.claim.caveats) if text)

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
        configs = [(r.config, r.cell.config(preset)) for r in ours if preset in r.cell.only]
        alike = sum((c.data.name, c.optim.epochs) == (d.data.name, d.optim.epochs) for c, d in configs)
        return named, alike

    return PRESETS[PRESETS.index(max(PRESETS, key=matches)) :]


def judge(claim: Claim, collection: Collection) -> Verdict:
    """Judge one claim. A cell without a finished run leaves it open."""
    results = []
    for id in claim.ids:
        result = collection.results.get(id)
        if result is None or not result.done:
            return Verdict(claim, "open", f"no finished run of {id}")
        results.append(result)
    lengths = {result.cell.label: _trained(result) for result in results}
    if len({*lengths.values()}) > 1:  # such as one at another preset
        each = ", ".join(f"{label} on {how}" for label, how in lengths.items())
        return Verdict(claim, "open", f"not trained alike: {each}")
    verdict, measured = _RULES[claim.rule](claim, *results)
    return Verdict(claim, verdict, _MINUS.sub("−", measured), _deviations(results), _stand_in(claim, results))


def _trained(result: Result) -> str:
    """On what, and for how long: in every preset the same for all cells of a claim."""
    words = result.words
    return f"{words['data']} ({words['training examples']}), {words['epochs']} epochs of batches of {words['batch']}"


def _deviations(results: Sequence[Result]) -> str:
    """Settings of these runs that their cells no longer have: the cells were corrected after the runs."""
    texts = {f"{r.cell.label}: {text}": None for r in results for text in r.deviations}
    return "; ".join(texts)


def _stand_in(claim: Claim, results: Sequence[Result]) -> str:
    """Network and data, if the claim names a network and these runs had another; else empty."""
    if "ResNet" not in claim.text or not any(what == "network" for what, _, _ in differences(results)):
        return ""
    return ", ".join(dict.fromkeys(result.setting for result in results))


def _compare(claim: Claim, a: Result, b: Result) -> Outcome:
    """The rules ``equal``, ``near`` and ``better``."""
    metric = METRICS[claim.metric]
    if a.diverged or b.diverged:
        return _compare_diverged(claim, a, b)
    x, y = a.by_seed(claim.metric), b.by_seed(claim.metric)
    if not x or not y:
        return "open", f"no {metric.label} recorded"
    gap = difference(x, y)
    measured = f"{fmean(x.values()):.{metric.digits}f} - {fmean(y.values()):.{metric.digits}f} = "
    measured += f"{gap.mean:+.{metric.digits}f} ({gap.text(metric.digits)})"
    sign = -1.0 if metric.less_is_better else 1.0
    low, high = _bounds(gap, x, y, a.sampling_error(claim.metric), b.sampling_error(claim.metric))
    return compare(claim.rule, claim.margin, *sorted((sign * low, sign * high))), measured


def compare(rule: Rule, margin: float, low: float, high: float) -> Kind:
    """The verdict where the gap lies between ``low`` and ``high``; positive means that a is better."""
    if rule == "better":
        return "holds" if low > 0 else "fails" if high < 0 else "open"
    if rule == "near":
        return "holds" if low >= -margin - _LAST_BIT else "fails" if high < -margin - _LAST_BIT else "open"
    inside, outside = max(abs(low), abs(high)), 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return "holds" if inside <= margin + _LAST_BIT else "fails" if outside > margin + _LAST_BIT else "open"


def _bounds(
    gap: Interval, x: Mapping[int, float], y: Mapping[int, float], x_error: float | None, y_error: float | None
) -> tuple[float, float]:
    """The ends of the interval. With too few seeds they are so wide that nobody could doubt them (``lab/claims.py``).

    They are then the gaps of the closest and of the farthest two runs, and ten standard errors of the validation set.
    """
    if gap.e is not None:
        return gap.mean - gap.e, gap.mean + gap.e
    if x_error is None or y_error is None:
        return -math.inf, math.inf
    slack = BEYOND_DOUBT * math.hypot(x_error, y_error)
    return min(x.values()) - max(y.values()) - slack, max(x.values()) - min(y.values()) + slack


def _compare_diverged(claim: Claim, a: Result, b: Result) -> Outcome:
    worse = a if a.diverged else b
    measured = f"{worse.cell.label} {worse.divergence}"
    if a.diverged and b.diverged:
        return "open", f"{measured}; {b.cell.label} {b.divergence}"
    if not worse.all_diverged:
        return "open", measured
    if worse is b:  # a is better, and not equal
        return ("fails" if claim.rule == "equal" else "holds"), measured
    return "fails", measured


def _diverges(claim: Claim, a: Result, b: Result) -> Outcome:
    if ended := [len(run.metrics) for run in a.diverged]:
        which = f", in {len(ended)} of {len(a.done)} seeds" if len(ended) < len(a.done) else ""
        return ("open" if which else "holds"), f"loss not finite after {min(ended)} epochs{which}"
    x, y = a.by_seed(claim.metric), b.by_seed(claim.metric)
    if not x or not y or b.diverged:
        return "open", f"no {METRICS[claim.metric].label} recorded" if not b.diverged else f"{b.cell.label} diverged"
    lost = difference(y, x)
    low, high = _bounds(lost, y, x, b.sampling_error(claim.metric), a.sampling_error(claim.metric))
    measured = f"{fmean(x.values()):.2f}: {lost.mean:+.2f} points lost ({lost.text()})"
    return ("holds" if low >= claim.margin else "fails" if high < claim.margin else "open"), measured


def compare_ratio(ratios: Interval, border: float, above: bool) -> Kind:
    """Is a ratio, whose logarithm this is, at least (``above``) or at most ``border`` with its whole interval?"""
    if ratios.e is None:
        return "open"
    low, high = ratios.mean - ratios.e - math.log(border), ratios.mean + ratios.e - math.log(border)
    if not above:
        low, high = -high, -low
    return "holds" if low >= -_LAST_BIT else "fails" if high < -_LAST_BIT else "open"


def _times(ratios: Interval) -> str:
    """A mean of logarithms as a factor, with its interval."""
    if ratios.e is None:
        return f"×{math.exp(ratios.mean):.2f} ({ratios.noise})"
    low, high = math.exp(ratios.mean - ratios.e), math.exp(ratios.mean + ratios.e)
    return f"×{math.exp(ratios.mean):.2f} ({low:.2f} to {high:.2f}, {ratios.noise})"


def _sooner(claim: Claim, a: Result, b: Result) -> Outcome:
    metric, target = METRICS["loss" if claim.metric == "loss" else "error"], claim.target or 0.0
    first = [{run.seed: first_epoch(run, metric, target) for run in result.done} for result in (a, b)]
    reached = [[epoch for epoch in epochs.values() if epoch is not None] for epochs in first]
    reached_in = [f"epoch {fmean(epochs):.3g}" if epochs else "never" for epochs in reached]
    measured = f"{reached_in[0]} against {reached_in[1]}"
    if len(reached[0]) < len(first[0]):
        never = not reached[0] and len(reached[1]) == len(first[1])
        enough = min(len(epochs) for epochs in first) >= SEEDS_NEEDED
        return ("fails" if never and enough else "open"), f"{measured}, reached in {len(reached[0])} of {len(first[0])}"
    # A run of b that did not come there needs more epochs than it had: enough to hold, not to fail.
    late = {run.seed: first[1][run.seed] or len(run.metrics) for run in b.done}
    early = {seed: max(epoch or 1, 1) for seed, epoch in first[0].items()}
    ratios = difference(_logarithms(late), _logarithms(early))
    verdict = compare_ratio(ratios, claim.margin, above=True)
    if len(reached[1]) < len(first[1]):
        measured += f", reached in {len(reached[1])} of {len(first[1])}, so at least"
        verdict = "holds" if verdict == "holds" else "open"
    return verdict, f"{measured}: {_times(ratios)}"


def _logarithms(values: Mapping[int, float]) -> dict[int, float]:
    return {seed: math.log(value) for seed, value in values.items()}


def first_epoch(run: Run, metric: Metric, target: float) -> float | None:
    """When the metric first reached the target, interpolated between two epochs in its logarithm; None if it never did.

    Whole epochs would round alike in every seed, and equal seeds have an interval of width 0.
    """
    before: tuple[float, float] | None = None
    for row in run.metrics:
        if (value := metric.of(row)) is None:
            continue
        epoch, log = float(row["epoch"]), math.log(max(value, 1e-12))
        if value <= target:
            if before is None:
                return epoch
            part = (before[1] - math.log(max(target, 1e-12))) / (before[1] - log)
            return before[0] + part * (epoch - before[0])
        before = epoch, log
    return None


def _follows(claim: Claim, a: Result, b: Result, c: Result) -> Outcome:
    if a.diverged or b.diverged:
        worse = b if b.diverged else a
        return ("fails" if worse.all_diverged else "open"), f"{worse.cell.label} {worse.divergence}"
    runs = [{run.seed: run for run in result.done} for result in (a, b, c)]
    seeds = sorted(runs[0].keys() & runs[1].keys() & runs[2].keys())
    here = {s: _distance(runs[0][s], runs[1][s]) for s in seeds}
    other = {s: _distance(runs[2][s], runs[1][s]) for s in seeds}
    seeds = [s for s in seeds if here[s] is not None and other[s]]
    if not seeds:
        return "open", "no common seed or epoch"
    near, far = ([distances[s] or 0.0 for s in seeds] for distances in (here, other))
    ratios = mean_interval([math.log(max(n, 1e-6) / f) for n, f in zip(near, far)], f"{len(seeds)} paired seeds")
    measured = f"training loss apart by ×{math.exp(fmean(near)):.2f}, {c.cell.label} by ×{math.exp(fmean(far)):.2f}"
    return compare_ratio(ratios, 0.5, above=False), f"{measured}: of its distance {_times(ratios)}"


def _departs(claim: Claim, a: Result, b: Result, c: Result) -> Outcome:
    verdict, measured = _follows(claim, a, b, c)
    opposite: dict[Kind, Kind] = {"holds": "fails", "fails": "holds", "open": "open"}
    return "open" if b.diverged else opposite[verdict], measured


def _collapses(claim: Claim, *results: Result) -> Outcome:
    for result in results:
        if result.diverged:
            return "open", f"{result.cell.label} {result.divergence}"
    metric = METRICS[claim.metric]
    ends = [result.by_seed(claim.metric) for result in results]
    seeds = sorted(set.intersection(*({*by_seed} for by_seed in ends)))
    if not seeds:
        return "open", "no common seed"
    optims = [result.config.optim for result in results]
    factors = [(o.lr if o.invariant_lr is None else o.invariant_lr, o.weight_decay) for o in optims]
    groupings = [[f"{x:.6g}" for x in numbers] for numbers in ([lr * d for lr, d in factors], *zip(*factors))]
    spreads = []
    for seed in seeds:
        values = [math.log(max(end[seed], 1e-12)) if metric.log else end[seed] for end in ends]
        spreads.append([spread_in_groups(values, groups) for groups in groupings])
    logs = [math.log(max(product, 1e-12) / max(min(lr, decay), 1e-12)) for product, lr, decay in spreads]
    ratios = mean_interval(logs, f"{len(seeds)} seeds")
    product, lr, decay = (f"{fmean(values):.3g}" for values in zip(*spreads))
    measured = (
        f"standard deviation {product} at the same product, {lr} at the same learning rate, {decay} at the same decay"
    )
    return compare_ratio(ratios, 0.5, above=False), f"{measured}: {_times(ratios)}"


def spread_in_groups(values: Sequence[float], groups: Sequence[Hashable]) -> float:
    """The standard deviation around the mean of each value's group.

    >>> spread_in_groups([1.0, 7.0, 10.0, 10.0], ["a", "a", "b", "b"])  # the root of (9 + 9 + 0 + 0) / (4 - 2)
    3.0
    """
    members: dict[Hashable, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        members.setdefault(group, []).append(value)
    squares = sum((value - fmean(group)) ** 2 for group in members.values() for value in group)
    return math.sqrt(squares / (len(values) - len(members)))


def _distance(a: Run, b: Run) -> float | None:
    """Mean |log a − log b| of the training loss over the epochs that both have.

    Not the validation error: at a large step size it jumps with the lag of the running statistics.
    """
    # A loss can be 0 in float32, where each example's logit is ahead by 17 or more.
    curves = [
        {
            row["epoch"]: math.log(max(loss, 1e-12))
            for row in run.metrics
            if (loss := METRICS["loss"].of(row)) is not None
        }
        for run in (a, b)
    ]
    gaps = [abs(value - curves[1][epoch]) for epoch, value in curves[0].items() if epoch in curves[1]]
    return fmean(gaps) if gaps else None


def _cheaper(claim: Claim, a: Result, b: Result) -> Outcome:
    metric = METRICS[claim.metric]
    x, y = a.final(claim.metric), b.final(claim.metric)
    if x is None or y is None:
        return "open", f"no {metric.label} recorded"
    measured = f"{x:.2f} against {y:.2f} {metric.unit}"
    runs = (*a.done, *b.done)
    if not all(run.alone_on_gpu for run in runs):
        return "open", f"{measured}: not from runs that had a GPU to themselves"
    if len({(run.environment.get("device"), run.environment.get("world_size", 1)) for run in runs}) > 1:
        return "open", f"{measured}: not on the same device"
    if claim.metric != "seconds":  # a peak of memory does not vary from run to run
        return ("holds" if x < y else "fails"), measured
    ours, theirs = _middle_half(a), _middle_half(b)
    measured += f" (middle half of the epochs: {ours[0]:.2f} to {ours[1]:.2f}, {theirs[0]:.2f} to {theirs[1]:.2f})"
    return ("holds" if ours[1] < theirs[0] else "fails" if ours[0] > theirs[1] else "open"), measured


def _middle_half(result: Result) -> tuple[float, float]:
    """The quartiles of the seconds per epoch, over all runs."""
    seconds = [value for run in result.done for value in run.values(METRICS["seconds"])]
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return low, high


_RULES: Mapping[Rule, Callable[..., Outcome]] = {
    "equal": _compare,
    "near": _compare,
    "better": _compare,
    "diverges": _diverges,
    "sooner": _sooner,
    "follows": _follows,
    "departs": _departs,
    "collapses": _collapses,
    "cheaper": _cheaper,
}
