"""`Norm` says which normalization; `RunningStats` holds the buffers that a training step updates.

Every layer of the library speaks these two values, from the modules down to the kernels. What a user may write for
``p``, ``k`` and ``constant`` is parsed and checked here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from normmatters.constants import gaussian_scale

Kind = Literal["l1", "l2", "lp", "linf", "topk", "range", "mean"]

#: The names that :func:`Norm.named` takes, with the ``p`` they stand for.
NAMES: dict[str, float | str] = {"l1": 1, "l2": 2, "linf": math.inf, "topk": math.inf, "range": "range"}


@dataclasses.dataclass(frozen=True)
class Norm:
    """Which normalization: divide by √(s² + eps) with s = C·statistic(x − μ). Checked when it is built; hashable.

    The constant C makes s an estimate of the standard deviation of Gaussian data (F5-F9), so that all kinds are
    interchangeable. What follows the normalization (a residual, a ReLU) belongs to the call, not to the norm.

    Args:
        p: 1, 2, any float ≥ 1, ``math.inf``, ``"range"``, or ``"mean"`` (subtract the mean only: no scale, eps is 0).
        k: with ``p=math.inf``, average the k largest deviations: Top(k) (F7).
        constant: ``"exact"`` (F8), ``"paper"``, ``"none"`` (C = 1), or a positive number that multiplies the exact one.
        eps: added to s²; None is the epsilon of the dtype that is computed in.
        memory: ``"exact"``, or ``"lean"`` to save less for the backward pass where a kernel can.

    Example::

        >>> Norm(1).kind, Norm(math.inf, k=10).kind, Norm(1.5).kind
        ('l1', 'topk', 'lp')
        >>> round(Norm(1).scale_constant(64), 4)
        1.2533
    """

    p: float | str = 1
    k: int | None = None
    constant: str | float = "exact"
    eps: float | None = 1e-5
    memory: str = "exact"
    kind: Kind = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _kind(self.p, self.k))
        _check_constant(self.constant)
        check_memory(self.memory)
        if self.kind == "mean":
            object.__setattr__(self, "eps", 0.0)
        elif self.eps is not None:
            check_eps(self.eps)
        if self.kind != "mean" and self.constant == "paper":
            self.scale_constant(self.k or 2)  # refuses a kind for which the paper gives no constant

    @classmethod
    def named(
        cls, name: str | float, *, k: int = 10, constant: str | float = "exact", memory: str = "exact",
        argument: str = "norm",
    ) -> Norm:  # fmt: skip
        """The norm for ``"l1"``, ``"l2"``, ``"linf"``, ``"topk"``, ``"range"``, or a number p ≥ 1.

        ``k`` counts for ``"topk"`` alone. ``argument`` is how errors call the name.
        """
        if isinstance(name, bool) or not isinstance(name, (str, int, float)):
            raise TypeError(f"{argument} must be a string or a number p >= 1, got {type(name).__name__}")
        if isinstance(name, str) and name not in NAMES:
            names = ", ".join(map(repr, NAMES))
            close = difflib.get_close_matches(name.lower().replace("_", ""), NAMES, 1, 0.4)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            if name.startswith("mean"):
                hint = "; mean-only batch norm has no weight to carry over: build the model with MeanOnlyBatchNorm"
            raise ValueError(f"{argument} must be one of {names} or a number p >= 1, got {name!r}{hint}")
        p = NAMES[name] if isinstance(name, str) else name
        return cls(p, k if name == "topk" else None, constant, memory=memory)

    def scale_constant(self, n: int) -> float:
        """The number C of s = C·statistic over ``n`` elements (F5-F9)."""
        if torch.compiler.is_compiling():  # the compiler would look into the cache anyway, and warn of it
            return _scale_constant(self.p, n, self.k, self.constant)
        return _cached_scale_constant(self.p, n, self.k, self.constant)

    def epsilon(self, dtype: torch.dtype) -> float:
        """eps, for inputs of ``dtype``."""
        return torch.finfo(compute_dtype(dtype)).eps if self.eps is None else self.eps

    @property
    def selected(self) -> int:
        """How many elements per channel make the statistic: k for Top(k), 1 for L∞, 2 for range, 0 where all do."""
        return {"linf": 1, "topk": self.k or 0, "range": 2}.get(self.kind, 0)


class RunningStats(NamedTuple):
    """The buffers that a batch norm updates in training, and by how much. None: there is no such buffer.

    ``mean`` and ``var`` are (C,). ``num_batches`` is one integer, raised by one. ``momentum`` is the weight of this
    batch.
    """

    mean: Tensor | None = None
    var: Tensor | None = None
    num_batches: Tensor | None = None
    momentum: float | Tensor = 0.1

    def update(self, norm: Norm, mean: Tensor, squared: Tensor | None, n: int | Tensor) -> None:
        """Move ``mean`` and ``var`` towards a batch's mean μ and squared scale s², in place.

        As PyTorch does for the variance, s² is stored times n/(n−1): deviations from the sample mean are √(1−1/n) too
        small on average, in the L1 norm as in the L2 norm (F5). The range does not contain the mean and needs no
        correction. Mean-only batch norm leaves ``var`` alone.

        Args:
            norm: says which statistic s is made of.
            mean, squared: (C,), the batch's μ and s²; ``squared`` is None for mean-only.
            n: number of elements per channel; a tensor where the host does not know it.
        """
        with torch.no_grad():
            if self.mean is not None:
                _move(self.mean, mean, self.momentum)
            if self.var is not None and squared is not None:
                _move(self.var, squared if norm.kind == "range" else squared * (n / (n - 1)), self.momentum)


def _move(running: Tensor, batch: Tensor, momentum: float | Tensor) -> None:
    # Not `lerp_`, which takes a difference: an infinite variance, which half precision may have, must arrive as such.
    # In the batch's dtype, so that a half-precision buffer is rounded once; in one write, which may fail as a whole.
    running.copy_(running.to(batch.dtype) * (1 - momentum) + batch * momentum)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that statistics of ``dtype`` inputs are computed and kept in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_act(act: str | None) -> None:
    """Raise unless ``act`` is None or ``"relu"``."""
    if act is not None and act != "relu":
        raise ValueError(f"act must be None or 'relu', got {act!r}")


def check_memory(memory: str) -> None:
    """Raise unless ``memory`` is ``"exact"`` or ``"lean"``."""
    if memory not in ("exact", "lean"):
        raise ValueError(f"memory must be 'exact' or 'lean', got {memory!r}")


def check_eps(eps: float) -> None:
    """Raise unless ``eps`` is a number that can be added to a squared scale: NaN, too, would make every output NaN."""
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must not be negative, infinite or NaN, got {eps}")


def _kind(p: float | str, k: int | None) -> Kind:
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


def _check_constant(constant: str | float) -> None:
    if isinstance(constant, str):
        if constant not in ("exact", "paper", "none"):
            raise ValueError(f"constant must be 'exact', 'paper', 'none' or a positive number, got {constant!r}")
    elif isinstance(constant, bool) or not isinstance(constant, (int, float)):
        raise TypeError(f"constant must be 'exact', 'paper', 'none' or a positive number, got {constant!r}")
    elif not 0 < constant < math.inf:
        raise ValueError(f"a constant that multiplies the exact one must be positive and finite, got {constant!r}")


def _scale_constant(p: float | str, n: int, k: int | None, constant: str | float) -> float:
    if p == "mean" or constant == "none":
        return 1.0
    # L1, L2 and Lp average over all elements, so their constant does not depend on n. Not passing n on keeps the
    # batch size symbolic under torch.compile. The others are extremes of n >= 2 numbers; one number deviates by 0.
    average = not isinstance(p, str) and p != math.inf
    count = 2 if average else max(int(n), 2)
    multiplier = 1.0 if isinstance(constant, str) else float(constant)
    if torch.compiler.is_compiling() and not isinstance(p, str):
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        p = guard_scalar(p)  # a float that was another one when the same code was compiled before is symbolic
    return multiplier * gaussian_scale(p, count, k, "paper" if constant == "paper" else "exact")  # type: ignore[arg-type]


_cached_scale_constant = functools.lru_cache(typed=True)(_scale_constant)
#: ``Norm(p, k, constant, eps, memory)`` from a cache. typed: True is no p, but equals 1.
cached_norm = functools.lru_cache(typed=True)(Norm)


def norm_of(p: float | str, k: int | None, constant: str | float, eps: float | None, memory: str = "exact") -> Norm:
    """``Norm(p, k, constant, eps, memory)`` from a cache: a module, whose attributes may change, calls this often."""
    if torch.compiler.is_compiling():  # traced as it stands; the compiler warns of caches
        return Norm(p, k, constant, eps, memory)
    return cached_norm(p, k, constant, eps, memory)
