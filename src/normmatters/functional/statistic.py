"""The scale statistics of the paper: which one ``p`` and ``k`` name, their constant, and the squared scale they give.

Every normalization here divides by √(s² + eps) with s = C·statistic(x − μ). The constant C makes s an estimate of the
standard deviation for Gaussian data (F5-F9), so that all kinds are interchangeable.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from normmatters.constants import gaussian_scale

Kind = Literal["l1", "l2", "lp", "linf", "topk", "range", "mean"]


def statistic_kind(p: float | str, k: int | None = None) -> Kind:
    """Name the statistic that ``p`` and ``k`` ask for.

    Args:
        p: 1, 2, any float ≥ 1, ``math.inf``, ``"range"``, or ``"mean"`` (mean-only: no scale).
        k: with ``p=math.inf``, average the k largest deviations: Top(k).

    Example::

        >>> statistic_kind(1), statistic_kind(math.inf, 10), statistic_kind(1.5)
        ('l1', 'topk', 'lp')
    """
    if isinstance(p, str):
        if k is not None:
            raise ValueError(f"k={k!r} means Top(k) and needs p=math.inf, got p={p!r}")
        if p == "range":
            return "range"
        if p == "mean":
            return "mean"
        raise ValueError(f"p must be a number >= 1, math.inf, 'range' or 'mean', got {p!r}")
    if isinstance(p, bool) or not isinstance(p, (int, float)):
        raise TypeError(f"p must be a number >= 1, math.inf, 'range' or 'mean', got {p!r}")
    if not p >= 1:  # also refuses nan
        raise ValueError(f"p must be at least 1, got {p!r}")
    if k is not None:
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"k must be an int or None, got {k!r}")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if p != math.inf:
            raise ValueError(f"k={k} means Top(k) and needs p=math.inf, got p={p!r}")
        return "topk"
    if p == 1:
        return "l1"
    if p == 2:
        return "l2"
    return "linf" if p == math.inf else "lp"


def check_constant(constant: str | float) -> None:
    """Raise unless ``constant`` is ``"exact"``, ``"paper"``, ``"none"`` or a positive finite multiplier."""
    if isinstance(constant, str):
        if constant not in ("exact", "paper", "none"):
            raise ValueError(f"constant must be 'exact', 'paper', 'none' or a positive number, got {constant!r}")
    elif isinstance(constant, bool) or not isinstance(constant, (int, float)):
        raise TypeError(f"constant must be 'exact', 'paper', 'none' or a positive number, got {constant!r}")
    elif not 0 < constant < math.inf:
        raise ValueError(f"a constant that multiplies the exact one must be positive and finite, got {constant!r}")


def scale_constant(p: float | str, n: int, k: int | None = None, constant: str | float = "exact") -> float:
    """Resolve the ``constant`` argument to the number C of s = C·statistic (F5-F9).

    Args:
        p: as in :func:`statistic_kind`.
        n: how many elements each statistic is taken over (batch × pixels for batch norm).
        k: as in :func:`statistic_kind`.
        constant: ``"exact"``, ``"paper"``, ``"none"`` (C = 1), or a positive number that multiplies the exact one.

    Example::

        >>> round(scale_constant(1, 64), 4), round(scale_constant(1, 64, constant=4.0), 4)
        (1.2533, 5.0133)
    """
    kind = statistic_kind(p, k)
    check_constant(constant)
    if kind == "mean" or constant == "none":
        return 1.0
    # L1, L2 and Lp average over all elements, so their constant does not depend on n. Not passing n on keeps the
    # batch size symbolic under torch.compile. The others are extremes of n >= 2 numbers; one number deviates by 0.
    count = 2 if kind in ("l1", "l2", "lp") else max(int(n), 2)
    multiplier = 1.0 if isinstance(constant, str) else float(constant)
    if torch.compiler.is_compiling() and not isinstance(p, str):
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        p = guard_scalar(p)  # a float that was another one when the same code was compiled before is symbolic
    return multiplier * gaussian_scale(p, count, k, "paper" if constant == "paper" else "exact")  # type: ignore[arg-type]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that statistics of ``dtype`` inputs are computed and kept in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def squared_scale(centered: Tensor, dims: list[int], kind: Kind, p: float | str, k: int | None, C: float) -> Tensor:
    """s² = (C·statistic)² of ``centered`` over ``dims``, which are kept with size 1. Mean-only has no scale."""
    if kind == "l2":
        return C * C * centered.square().mean(dims, keepdim=True)  # no root: its slope is infinite at 0
    if kind == "range":
        statistic = centered.amax(dims, keepdim=True) - centered.amin(dims, keepdim=True)
    elif kind == "l1":
        statistic = centered.abs().mean(dims, keepdim=True)
    elif kind == "linf":
        statistic = centered.abs().amax(dims, keepdim=True)
    elif kind == "topk":
        assert k is not None
        statistic = _top_k_mean(centered.abs(), dims, k)
    else:
        statistic = _power_mean(centered.abs(), dims, float(p))
    return (C * statistic).square()


def _top_k_mean(x: Tensor, dims: list[int], k: int) -> Tensor:
    """Mean of the k largest elements of ``x`` over ``dims`` (F7)."""
    kept = [d for d in range(x.dim()) if d not in dims]
    rows = x.permute(kept + dims).flatten(len(kept))
    shape = [1 if d in dims else x.shape[d] for d in range(x.dim())]
    return rows.topk(k, dim=-1, sorted=False).values.mean(-1).reshape(shape)


def _power_mean(x: Tensor, dims: list[int], p: float) -> Tensor:
    """(mean x^p)^(1/p) for x >= 0, finite for any p and with gradient 0 where all of x is 0."""
    top = x.detach().amax(dims, keepdim=True)
    top = torch.where(top == 0, torch.ones_like(top), top)  # relative to the largest, x^p cannot overflow
    mean = (x / top).pow(p).mean(dims, keepdim=True)
    flat = mean == 0
    return torch.where(flat, mean, torch.where(flat, torch.ones_like(mean), mean).pow(1 / p)) * top
