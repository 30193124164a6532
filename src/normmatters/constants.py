"""Gaussian-matching constants: C such that C · statistic ≈ σ for n independent normal values (F5–F9).

The statistics, over the n values reduced for one channel, x − μ written as z:

==============  ================================  =======================================  =======================
norm            statistic                         exact C                                  paper's C
==============  ================================  =======================================  =======================
Lp, p < ∞       (mean |z|^p)^(1/p)                (E|z|^p)^(−1/p), for any n (F9)          √(π/2) at p = 1 (F5)
L∞              max |z|                           1 / E max |z| (F8)                       F6
Top(k)          mean of the k largest |z|         1 / E Top(k) (F8)                        F7
range           max z − min z                     1 / E range                              none
==============  ================================  =======================================  =======================
"""

import math
import operator
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist
from typing import Literal, SupportsIndex, get_args

__all__ = ["ConstantMethod", "NormOrder", "gaussian_scale"]

NormOrder = float | Literal["range"]
ConstantMethod = Literal["exact", "paper"]

# Beyond this the normal tail underflows a double. No order statistic of any countable sample lives there.
_TAIL_LIMIT = 37.0
# The density of the threshold is cut where it has fallen by exp(-45) ≈ 3e-20 from its peak.
_LOG_CUT = 45.0
# Simpson's rule on an analytic peak: 1024 intervals leave an error below 1e-9 relative (see tests/test_constants.py).
_INTERVALS = 1024
# From this many on, the k largest values end so near to a quantile of the distribution that 1e-9 relative is exact.
_MANY = 10**10


def gaussian_scale(p: NormOrder, n: SupportsIndex, k: SupportsIndex | None = None, method: str = "exact") -> float:
    """The constant C for which C · statistic estimates σ of a normal sample.

    Args:
        p: norm order: a number ≥ 1, ``math.inf`` or ``"range"``.
        n: how many values the statistic reduces (batch × pixels for batch norm), at least 2.
        k: with ``p=math.inf``, Top(k): the mean of the k largest magnitudes, 1 ≤ k ≤ n. ``k=1`` is L∞, ``k=n`` is L1.
        method: ``"exact"`` (F8, F9; better than 1e-6 relative) or ``"paper"`` (F5–F7 as printed). The paper prints
            nothing for range and for p other than 1, 2 and ∞: these raise ``ValueError``.

    The values are taken about the true mean; with the sample mean the scale is smaller by √(1 − 1/n) (F5), just as
    the biased standard deviation is. The paper's L∞ constant is 38 % (n = 32) to 47 % (n = 1e6) too large.

    Example:
        >>> round(gaussian_scale(1, 128), 4), round(gaussian_scale(math.inf, 128), 4)
        (1.2533, 0.3537)
    """
    p, n, k = _checked(p, n, k)
    if method not in get_args(ConstantMethod):
        raise ValueError(f"method must be 'exact' or 'paper', got {method!r}")
    return _paper_scale(p, n, k) if method == "paper" else _exact_scale(p, n, k)


def _checked(p: NormOrder, n: SupportsIndex, k: SupportsIndex | None) -> tuple[NormOrder, int, int | None]:
    if isinstance(p, str):
        if p != "range":
            raise ValueError(f"p must be a number >= 1, math.inf or 'range', got {p!r}")
    elif isinstance(p, bool) or not isinstance(p, int | float):
        raise TypeError(f"p must be a number >= 1, math.inf or 'range', got {p!r} of type {type(p).__name__}")
    elif not p >= 1:  # written so that NaN fails too
        raise ValueError(f"p must be at least 1, got {p}")
    n = _integer("n", n)
    if n < 2:
        raise ValueError(f"n must be at least 2 (one value has no scale), got {n}")
    if k is None:
        return p, n, None
    k = _integer("k", k)
    if p != math.inf:
        raise ValueError(f"k means Top(k) and needs p = math.inf, got p = {p!r} with k = {k}")
    if not 1 <= k <= n:
        raise ValueError(f"k must lie in 1..n = {n}, got {k}")
    return p, n, k


def _integer(name: str, value: SupportsIndex) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}") from None


def _paper_scale(p: NormOrder, n: int, k: int | None) -> float:
    """F5–F7 exactly as printed."""
    c_l1 = math.sqrt(math.pi / 2)
    if p == 1:
        return c_l1
    if p == 2:
        return 1.0
    if p != math.inf:
        raise ValueError(f"the paper gives no constant for p = {p!r}; use method='exact'")
    c_inf = (1 + math.sqrt(math.pi * math.log(4))) / (2 * math.sqrt(2 * math.log(n)))
    return c_inf + (c_l1 - c_inf) * ((k or 1) - 1) / (n - 1)


def _exact_scale(p: NormOrder, n: int, k: int | None) -> float:
    return _cached_exact_scale(p, n, k)


# torch.compile should see a number here, not trace a thousand steps of quadrature. This is all that
# torch.compiler.assume_constant_result does, but for importing the whole compiler (a second) with this file.
_exact_scale._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def _cached_exact_scale(p: NormOrder, n: int, k: int | None) -> float:
    if isinstance(p, str):  # E range = E max − E min = 2 E max
        return 1 / (2 * _mean_of_largest(1, n, absolute=False))
    if p == math.inf:
        return 1 / _mean_of_largest(k or 1, n, absolute=True)
    if p == 1:
        return math.sqrt(math.pi / 2)
    if p == 2:
        return 1.0
    log_moment = p / 2 * math.log(2) + math.lgamma((p + 1) / 2) - math.log(math.pi) / 2  # log E|z|^p, F9
    return math.exp(-log_moment / p)


def _mean_of_largest(k: int, n: int, *, absolute: bool) -> float:
    """E[mean of the k largest of n normal values], or of their magnitudes (F8).

    F8 is (n/k) ∫ x p(x) BinomCDF(k−1; n−1, q(x)) dx with density p and tail q = ∫ₓ^∞ p. For a normal the
    antiderivative of −x p(x) is p(x) itself, and the binomial CDF, as a function of x, is the CDF of the k-th largest
    of n−1 values. Integrating by parts turns F8 into

        (n/k) · E[p(X)],   X = the k-th largest of n−1 values, with density f ∝ p · q^(k−1) · (1−q)^(n−k−1).

    f is log-concave, so one peak holds all of it, whatever n and k; and dividing by its own numeric integral avoids
    the binomial coefficient, whose logarithm loses digits at n = 1e9.
    """
    peak_density = math.sqrt((2 if absolute else 0.5) / math.pi)  # p(0)
    if k == n:  # nothing is left out: the threshold X is the infimum of the support
        return peak_density if absolute else 0.0
    if k >= _MANY:  # X is its quantile, where q(x) = k/n, to within 1/k; the peak is too narrow to find otherwise
        quantile = NormalDist().inv_cdf(k / n / 2 if absolute else k / n)
        return n / k * peak_density * math.exp(-quantile * quantile / 2)

    def log_f(x: float) -> float:
        tail, below = _tails(x, absolute)
        log_f = -x * x / 2
        if k > 1:
            log_f += (k - 1) * math.log(tail)
        if n - k > 1:
            log_f += (n - k - 1) * (math.log1p(-tail) if tail < 0.5 else math.log(below) if below > 0 else -math.inf)
        return log_f

    low, high = (0.0 if absolute else -_TAIL_LIMIT), _TAIL_LIMIT
    mode = _argmax_of_concave(log_f, low, high)
    top = log_f(mode)
    a, b = (_crossing(log_f, top - _LOG_CUT, mode, end) for end in (low, high))
    step = (b - a) / _INTERVALS
    mass = weighted = 0.0
    for i in range(_INTERVALS + 1):
        x = a + i * step
        simpson = 1 if i in (0, _INTERVALS) else 2 + 2 * (i % 2)
        f = simpson * math.exp(log_f(x) - top)
        mass += f
        weighted += f * math.exp(-x * x / 2)
    return n / k * peak_density * weighted / mass


def _tails(x: float, absolute: bool) -> tuple[float, float]:
    """P(> x) and P(≤ x) for |z| or z, each with full relative precision."""
    x /= math.sqrt(2)
    return (math.erfc(x), math.erf(x)) if absolute else (math.erfc(x) / 2, math.erfc(-x) / 2)


def _argmax_of_concave(function: Callable[[float], float], low: float, high: float) -> float:
    """Golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(60):  # ratio**60 · 74 < 1e-10: far below the narrowest peak, 1e-5 wide at n = 1e9
        if at_left > at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def _crossing(function: Callable[[float], float], level: float, inside: float, outside: float) -> float:
    """Where a function that is above ``level`` at ``inside`` falls below it towards ``outside`` (or ``outside``)."""
    if function(outside) > level:
        return outside
    for _ in range(60):
        middle = (inside + outside) / 2
        if function(middle) > level:
            inside = middle
        else:
            outside = middle
    return outside
