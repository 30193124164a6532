"""What the paper claims, and what we do: ``experiments/claims.toml`` as values, each with the rule that judges it.

Every rule has three outcomes: the claim holds, fails, or stays open. ``gap`` is how much better a is than b; where less
is better (perplexity) the sign is turned. ``e`` is the half-width of a 95 % interval by Student's t over seeds; the
differences are taken seed by seed where both cells have the same seeds (see ``report/intervals.py``).

``equal``    holds if |gap| + e <= margin, fails if |gap| - e > margin
``near``     holds if gap - e >= -margin, fails if gap + e < -margin; better than b is never a failure
``better``   holds if gap - e > 0, fails if gap + e < 0
``follows``  the same with a ratio: the distance of a's training loss from b's, over the distance of c's from b's (mean
             |log| over the common epochs). Holds if the interval of the ratio is at most 1/2, fails if it is above
``departs``  the opposite of ``follows``: holds if the interval is above 1/2, or a's loss is not finite in every seed;
             fails if it is at most 1/2. Open if b's loss is not finite: then there is nothing to depart from
``collapses``  about the cells of a grid, whose pattern is a: the spread of their ends around the mean of those with the
             same learning rate × weight decay, over that around the mean of those with the same learning rate, or
             the same weight decay, whichever is less. A spread is a standard deviation, of the logarithm where the
             metric's axis is logarithmic. Holds if the interval of the ratio is at most 1/2, fails if it is above
``sooner``   the same with the epochs that b and a need to reach the error ``target``, or with the metric "loss" that
             training loss, interpolated between epochs in the logarithm: holds if the interval of b's over a's is at
             least ``margin``, fails if it is below
``diverges`` holds if a's loss is not finite in every seed, or if a ends at least ``margin`` points below b with e
             counted; fails if it ends less than that below b with e counted. Open if only some seeds are not finite
``cheaper``  a's epochs take less time, or its peak less memory, than b's. Judged on runs that had a GPU to themselves,
             all of one kind. Time holds if the middle half of a's epochs is below the middle half of b's

With fewer than three seeds of either cell there is no interval, and a claim stays open unless the effect is beyond any
doubt: the loss is not finite in every seed, or the closest seeds of the two cells are further beyond the border (0, or
the margin) than ten standard errors of a validation set of that size, or the claim is about cost (``cheaper``), whose
rule is about the epochs of one run. Of BLEU, perplexity and ratios nothing is beyond any doubt.

Margins are those of the first edition. The intervals came after the runs, and were not chosen by their outcome.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from normmatters.lab.cells import folder, load_cell, matching
from normmatters.lab.schema import build

Rule = Literal["better", "equal", "near", "follows", "departs", "collapses", "diverges", "sooner", "cheaper"]


@dataclass(frozen=True)
class Claim:
    """One claim about the cells ``a``, ``b`` and, to compare with, ``c``: ids such as ``fig1/wd_on``. With the rule
    ``collapses``, ``a`` is a pattern such as ``s2/lr_*``, and there is no b.

    ``check`` is the experiment's number in the list of the paper's, or "ours". ``written`` is when the claim got its
    cells and margin. ``also`` says what else differs between its cells, ``note`` what a reader must know.
    ``headline``: README shows this claim, one for each thing the paper says.
    """

    check: str
    text: str
    rule: Rule
    a: str
    b: str = ""
    margin: float = 0.0
    metric: str = "accuracy"
    c: str | None = None
    target: float | None = None
    written: str = ""
    also: str = ""
    note: str = ""
    headline: bool = False

    @property
    def experiment(self) -> str:
        return self.a.partition("/")[0]

    def __post_init__(self) -> None:
        if (self.rule == "collapses") != (not self.b):
            raise ValueError(f"{self.text}: rule {self.rule} with b = {self.b!r}; only collapses has none")

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """Its cells in the order in which the rule takes them."""
        return tuple(id for name in (self.a, self.b, self.c) if name for id in matching(name))

    @property
    def cells(self) -> set[str]:
        return {*self.ids}

    @property
    def caveats(self) -> str:
        """``also`` and ``note`` for a table, empty where there are none."""
        return " ".join(text for text in (f"Also differs: {self.also}." if self.also else "", self.note) if text)

    @property
    def rule_text(self) -> str:
        points = {"accuracy": "points", "bleu": "BLEU", "ppl": "ppl"}.get(self.metric, "")
        own, reference = (load_cell(cell).label if cell else "" for cell in (self.b, self.c))
        target = f"{self.target or 0:g}" + (" training loss" if self.metric == "loss" else " % error")
        cheaper = "seconds per epoch" if self.metric == "seconds" else "bytes at the peak"
        return {
            "better": "better by more than the interval",
            "equal": f"equal: at most {self.margin:g} {points} apart, interval included",
            "near": f"near: at most {self.margin:g} {points} worse, interval included",
            "follows": f"training loss at most half as far from {own}'s as {reference}'s is, interval included",
            "departs": f"training loss more than half as far from {own}'s as {reference}'s is, interval included",
            "collapses": "spread at the same product at most half of that at the same factor, interval included",
            "diverges": f"loss not finite, or at least {self.margin:g} {points} lost, interval included",
            "sooner": f"{target} in at most 1/{self.margin:g} of the epochs, interval included",
            "cheaper": f"fewer {cheaper}, alone on a GPU",
        }[self.rule]


@dataclass(frozen=True)
class BenchmarkClaim:
    """A claim about the rows ``where`` of ``results/bench/BENCH.json``: if the variant a becomes b, at least this share
    of ``field`` goes. These are medians of one benchmark: there are no seeds, and no interval."""

    check: str
    text: str
    bench: str
    where: Mapping[str, str]
    a: str
    b: str
    field: str
    share: float
    note: str = ""


def _load() -> tuple[tuple[Claim, ...], tuple[BenchmarkClaim, ...]]:
    path = folder() / "claims.toml"
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    claims = tuple(build(Claim, row, "claims.", str(path)) for row in tables["claims"])
    return claims, tuple(build(BenchmarkClaim, row, "benchmarks.", str(path)) for row in tables["benchmarks"])


CLAIMS, BENCHMARKS = _load()
