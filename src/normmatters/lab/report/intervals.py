"""How sure a difference between two cells is: 95 % intervals by Student's t over seeds.

>>> difference({0: 90.0, 1: 91.0, 2: 92.0}, {0: 89.0, 1: 90.5, 2: 90.5}).text()
'±1.24, 3 paired seeds'
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SEEDS_NEEDED = 3


@dataclass(frozen=True)
class Interval:
    """A mean and the half-width ``e`` of its 95 % interval, None with too few seeds; ``noise`` says which it is."""

    mean: float
    e: float | None
    noise: str

    def text(self, digits: int = 2) -> str:
        return self.noise if self.e is None else f"±{self.e:.{digits}f}, {self.noise}"


def t_quantile(df: float) -> float:
    """The 97.5 % quantile of Student's t.

    >>> round(t_quantile(2), 3), round(t_quantile(4), 3)
    (4.303, 2.776)
    """
    from scipy.special import stdtrit  # comes with scikit-learn; imported late, as it takes a while

    return float(stdtrit(df, 0.975))


def mean_interval(values: Sequence[float], noise: str) -> Interval:
    """Of one number per seed."""
    n = len(values)
    if n < SEEDS_NEEDED:
        return Interval(statistics.fmean(values), None, _too_few(n))
    e = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Interval(statistics.fmean(values), e, noise)


def difference(a: Mapping[int, float], b: Mapping[int, float]) -> Interval:
    """Of mean a − mean b, both by seed: paired where the seeds are the same, else by Welch's test."""
    mean = statistics.fmean(a.values()) - statistics.fmean(b.values())
    if a.keys() == b.keys():
        paired = mean_interval([a[seed] - b[seed] for seed in a], f"{len(a)} paired seeds")
        return Interval(mean, paired.e, paired.noise)
    if min(len(a), len(b)) < SEEDS_NEEDED:
        return Interval(mean, None, _too_few(min(len(a), len(b))))
    parts = [(statistics.variance(x.values()) / len(x), len(x) - 1) for x in (a, b)]
    total = sum(part for part, _ in parts)
    if total == 0:
        return Interval(mean, 0.0, f"{len(a)} and {len(b)} seeds")
    df = total**2 / sum(part**2 / free for part, free in parts)
    return Interval(mean, t_quantile(df) * math.sqrt(total), f"{len(a)} and {len(b)} seeds")


def _too_few(n: int) -> str:
    return f"no interval from {n} seed{'s' if n > 1 else ''}"
