"""Normalization computed as low-precision hardware would: every intermediate rounded, sums in a tree (F5, E3).

The paper's argument for L1 is arithmetic: squares leave the range of fp16 (65504 down to 6e-8) long before the data
does, so a batch norm without squares trains in pure fp16. :func:`arithmetic` makes that visible in ordinary training::

    with nm.precision.arithmetic("fp16", accumulate="fp16"):
        loss = criterion(model(x), y)          # every norm of this library, forward ...
    loss.backward()                            # ... and backward, in the arithmetic of the forward

What is computed how:

- **Elements.** Each operation on elements (subtract, square, multiply, divide ...) is correctly rounded to ``dtype``:
  float32 holds the exact result closely enough that rounding it again to fp16 or bf16 cannot differ. CPU and GPU
  agree to the bit.
- **Sums** are means by pairwise averaging: each node of a binary tree is (a + b)/2, rounded once to ``accumulate``.
  Halving on the way keeps every partial result within the range of the data, so an fp16 accumulator holds a mean over
  millions of elements. All statistics use this same tree: where L2 fails, its squares failed, not our sum. Signs and
  ties are counted by integer counters, without rounding.
- **Scalars of a channel** (constant, eps, root) are computed in ``accumulate`` and rounded to ``dtype`` where they meet
  elements. L2 is √(s² + eps), as everywhere. The other norms have no squares to begin with, and form the same number as
  m·√(1 + (l/m)²), where m is the larger and l the smaller of s and √eps: nothing in it can overflow, and only
  what no longer matters underflows.
- **State** stays state: running statistics are updated, and in eval mode turned into a scale, in float32; parameters
  are rounded to ``dtype`` where they are used, and their gradients leave as mean × n in their own dtype.
- **fp8** (``"e4m3"``, ``"e5m2"``) is a storage format. Input, residual, output and what is kept for the backward are
  rounded to it (saturating, as GPU conversions do); the arithmetic between is fp16. Gradients are stored as e5m2 for
  both, since e4m3 ends at 0.002.

Gradients below 6e-8 vanish in fp16 as they do on hardware: scale the loss, as with any fp16 training.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it imports the compiler only when called
from torch.autograd.function import once_differentiable

from normmatters import functional
from normmatters.functional.batch_norm import update_running_statistics
from normmatters.functional.checks import check_batch_norm, check_layer_norm
from normmatters.functional.statistic import Kind, compute_dtype, scale_constant, statistic_kind
from normmatters.kernels.triton.layout import memory_format

__all__ = ["Arithmetic", "active", "arithmetic", "batch_norm", "layer_norm", "rms_norm"]

_FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_STORAGE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Arithmetic:
    """What is rounded to which format.

    >>> with arithmetic("fp16", accumulate="fp32") as setting:
    ...     setting.dtype, setting.accumulate
    (torch.float16, torch.float32)
    """

    dtype: torch.dtype  # results of operations on elements
    accumulate: torch.dtype  # partial sums, and the scalars of a channel
    storage: torch.dtype  # activations between operations
    gradient: torch.dtype  # gradients between operations


_current: ContextVar[Arithmetic | None] = ContextVar("normmatters_arithmetic", default=None)
# torch.compile cannot trace a ContextVar but guards on a global: 0 here keeps an ordinary compiled model whole, and
# entering a context anywhere makes it look again.
_open_contexts = 0
_lock = threading.Lock()


def arithmetic(
    dtype: str | torch.dtype, accumulate: str | torch.dtype = "fp32"
) -> contextlib._GeneratorContextManager[Arithmetic]:
    """Compute this library's batch, layer and RMS norms in ``dtype``, with sums in ``accumulate``.

    A context manager, and a decorator. It acts on the norms whose forward runs inside it, in this thread (or task);
    their backward keeps to it wherever it runs. Under activation checkpointing the forward runs again during the
    backward: pass it on by ``checkpoint(..., context_fn=lambda: (nullcontext(), arithmetic(...)))``.

    Args:
        dtype: ``"fp16"``, ``"bf16"``, ``"fp32"``, or for storage in fp8 with fp16 arithmetic ``"e4m3"``, ``"e5m2"``;
            or the torch dtype.
        accumulate: ``"fp16"``, ``"bf16"`` or ``"fp32"``, or the torch dtype.

    Example::

        >>> bn = LpBatchNorm2d(64, p=1)
        >>> with arithmetic("fp16", accumulate="fp16"):
        ...     y = bn(torch.randn(8, 64, 4, 4))
    """
    accumulator = _format("accumulate", accumulate, _FORMATS)
    storage = _format("dtype", dtype, _FORMATS | _STORAGE)
    if storage in _STORAGE.values():
        return _using(Arithmetic(torch.float16, accumulator, storage, torch.float8_e5m2))
    return _using(Arithmetic(storage, accumulator, storage, storage))


def active() -> Arithmetic | None:
    """The arithmetic in force here, or None for PyTorch's own.

    >>> active() is None
    True
    """
    return _current.get() if _open_contexts else None


@contextlib.contextmanager
def _using(setting: Arithmetic) -> Iterator[Arithmetic]:
    global _open_contexts
    with _lock:
        _open_contexts += 1
    token = _current.set(setting)
    try:
        yield setting
    finally:
        _current.reset(token)
        with _lock:
            _open_contexts -= 1


def _format(name: str, value: str | torch.dtype, allowed: dict[str, torch.dtype]) -> torch.dtype:
    dtype = allowed.get(value) if isinstance(value, str) else value
    if dtype is None or dtype not in allowed.values():
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))} or its torch dtype, got {value!r}")
    return dtype


# --- The three normalizations, with the signatures of `functional` ---

_F = TypeVar("_F", bound=Callable[..., Any])


def _eager(function: _F) -> _F:
    # A compiled graph would drop the round trips through fp16, which are the point here.
    return _disable_dynamo(function)  # type: ignore[return-value]


@_eager
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    p: float | str = 1,
    k: int | None = None,
    constant: str | float = "exact",
    act: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`normmatters.functional.lp_batch_norm` in the active arithmetic. p: 1, 2, inf, ``"range"``, ``"mean"``.

    input and residual: (N, C, ...); the other tensors: (C,).

    >>> with arithmetic("fp16"):
    ...     batch_norm(torch.tensor([[1.0], [3.0]]), training=True)
    tensor([[-0.7983],
            [ 0.7983]])
    """
    kind = _supported_kind(p, k)
    n = input.numel() // max(input.shape[1], 1) if input.dim() > 1 else 0
    C = scale_constant(p, n, k, constant)
    check_batch_norm(
        input, running_mean, running_var, weight, bias, training, eps, kind=kind, k=k, act=act, residual=residual
    )
    if input.numel() == 0:  # nothing to round
        return functional.lp_batch_norm(
            input,
            running_mean,
            running_var,
            weight,
            bias,
            training,
            momentum,
            eps,
            p=p,
            k=k,
            act=act,
            residual=residual,
        )
    rule = _Rule(_required(), kind, k or 1, C, 0.0 if kind == "mean" else eps, relu=act == "relu")
    fixed = None
    if not training:
        assert running_mean is not None  # checked above
        fixed = _running_scale(running_mean, running_var, rule)

    def rows(x: Tensor | None) -> Tensor | None:  # (N, C, ...) -> (C, n)
        return None if x is None else x.transpose(0, 1).reshape(x.shape[1], -1)

    def column(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, None]

    y: Tensor
    y, mean, scale = _Normalize.apply(rows(input), column(weight), column(bias), rows(residual), fixed, rule)
    if training:
        squared = None if kind == "mean" else scale.flatten().square()
        update_running_statistics(running_mean, running_var, mean.flatten(), squared, n, momentum, kind=kind)
    shape = input.shape
    y = y.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return y.contiguous(memory_format=memory_format(input))


@_eager
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    p: float | str = 1,
    k: int | None = None,
    constant: str | float = "exact",
) -> Tensor:
    """:func:`normmatters.functional.lp_layer_norm` in the active arithmetic. p: 1, 2, inf or ``"range"``.

    input: (..., *normalized_shape); weight and bias: normalized_shape.

    >>> with arithmetic("fp16"):
    ...     layer_norm(torch.tensor([1.0, 3.0]), [2])
    tensor([-0.7983,  0.7983])
    """
    return _layer_norm(input, normalized_shape, weight, bias, eps, p, k, constant, center=True)


@_eager
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    p: float = 1,
    constant: str | float = "exact",
) -> Tensor:
    """:func:`normmatters.functional.lp_rms_norm` in the active arithmetic. p: 1, 2 or inf.

    input: (..., *normalized_shape); weight: normalized_shape.

    >>> with arithmetic("fp16"):
    ...     rms_norm(torch.tensor([2.0, -2.0]), [2])
    tensor([ 0.7983, -0.7983])
    """
    if isinstance(p, str):
        raise ValueError(f"p of an RMS norm must be 1, 2 or math.inf here, got {p!r}")
    eps = torch.finfo(compute_dtype(input.dtype)).eps if eps is None else eps
    return _layer_norm(input, normalized_shape, weight, None, eps, p, None, constant, center=False)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    p: float | str,
    k: int | None,
    constant: str | float,
    *,
    center: bool,
) -> Tensor:
    kind = _supported_kind(p, k)
    n = math.prod(normalized_shape)
    C = scale_constant(p, n, k, constant)
    check_layer_norm(input, normalized_shape, weight, bias, eps, kind=kind, k=k)
    rule = _Rule(_required(), kind, k or 1, C, eps, center=center, weight_dim=1)
    weight, bias = (None if x is None else x.reshape(1, n) for x in (weight, bias))
    rows = input.reshape(input.numel() // max(n, 1), n)
    y: Tensor = _Normalize.apply(rows, weight, bias, None, None, rule)[0]
    return y.reshape(input.shape)


def _supported_kind(p: float | str, k: int | None) -> Kind:
    kind = statistic_kind(p, k)
    if kind == "lp":
        raise ValueError(f"precision.arithmetic supports p = 1, 2, math.inf, 'range' and 'mean', got p = {p!r}")
    return kind


def _required() -> Arithmetic:
    setting = active()
    if setting is None:
        raise RuntimeError("no arithmetic is active: call this inside `with precision.arithmetic(...)`")
    return setting


def _running_scale(mean: Tensor, var: Tensor | None, rule: _Rule) -> tuple[Tensor, Tensor]:
    scale = torch.ones_like(mean) if var is None or rule.kind == "mean" else (var.float() + rule.eps).sqrt()
    return mean.float()[:, None], scale.float()[:, None]


# --- The arithmetic. Tensors are float32 that hold values of the rounded formats. ---


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the nearest values of ``dtype``: to infinity beyond fp16 and bf16, to the largest number beyond fp8."""
    if dtype == torch.float32:
        return x
    if dtype in _STORAGE.values():
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype).float()


@lru_cache(maxsize=4096)
def _rounded(value: float, dtype: torch.dtype) -> float:
    """A constant in ``dtype``."""
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


def _divide(x: Tensor, divisor: float) -> Tensor:
    """x/divisor, rounded once: by a number, CUDA would multiply with the rounded reciprocal."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def _split_count(n: int, dtype: torch.dtype) -> tuple[float, int]:
    """n as f·2^m with f in (1/2, 1] rounded to ``dtype``: an fp16 scalar cannot hold n = 1e5, but can hold f."""
    power = (n - 1).bit_length()
    return _rounded(n / 2**power, dtype), 2**power


def _tree_mean(x: Tensor, dim: int, accumulate: torch.dtype) -> Tensor:
    """Mean over ``dim`` (kept, size 1) by a tree of averages (a + b)/2, each rounded to ``accumulate``.

    n is padded with zeros to a power of two 2^m, which gives Σx/2^m; one division by n/2^m ends it.
    """
    n = x.shape[dim]
    if n == 0:
        return x.sum(dim, keepdim=True)
    x = _round(x, accumulate)
    while (size := x.shape[dim]) > 1:
        pairs = size // 2
        left, right = x.narrow(dim, 0, size - pairs), x.narrow(dim, size - pairs, pairs)
        if size % 2:
            left = left.clone()
            left.narrow(dim, 0, pairs).add_(right)
        else:
            left = left + right
        x = _round(left.mul_(0.5), accumulate)
    fraction, _ = _split_count(n, accumulate)
    return x if fraction == 1 else _round(_divide(x, fraction), accumulate)


@dataclass(frozen=True)
class _Rule:
    """Which normalization, in which arithmetic."""

    arithmetic: Arithmetic
    kind: Kind
    k: int  # 1 for L∞, which is Top(1)
    C: float
    eps: float
    center: bool = True  # subtract the mean
    weight_dim: int = 0  # of (rows, n), the dimension that weight and bias run along
    relu: bool = False

    def scales(self, x: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        """s and √(s² + eps) of every row, in the accumulator's format. x, deviation: (rows, n)."""
        dtype, acc = self.arithmetic.dtype, self.arithmetic.accumulate
        C = _rounded(self.C, acc)
        if self.kind == "mean":
            one = deviation.new_ones(deviation.shape[0], 1)
            return one, one
        if self.kind == "l2":
            variance = _tree_mean(_round(deviation * deviation, dtype), 1, acc)
            if C != 1:
                variance = _round(variance * _rounded(C * C, acc), acc)
            return _round(variance.sqrt(), acc), _round(_round(variance + _rounded(self.eps, acc), acc).sqrt(), acc)
        if self.kind == "l1":
            statistic = _tree_mean(deviation.abs(), 1, acc)
        elif self.kind == "range":
            statistic = _round(_round(x.amax(1, keepdim=True) - x.amin(1, keepdim=True), dtype), acc)
        else:
            statistic = _tree_mean(deviation.abs().topk(self.k, 1).values, 1, acc)
        s = _round(statistic * C, acc)
        return s, _hypotenuse(s, _rounded(math.sqrt(self.eps), acc), acc)

    def slope(self, x: Tensor, deviation: Tensor, x_hat: Tensor) -> tuple[Tensor, Tensor, bool]:
        """e, its sum over the row, and whether the statistic is a mean over all: its slope is then e/n, otherwise e.

        Where elements tie for the extreme they share its gradient, so that no order of elements matters.
        """
        dtype, acc = self.arithmetic.dtype, self.arithmetic.accumulate
        if self.kind == "l2":
            return x_hat, x_hat.new_zeros(x_hat.shape[0], 1), True
        sign = deviation.sign()
        if self.kind == "l1":
            return sign, sign.sum(1, keepdim=True), True
        if self.kind == "range":
            ends = [(x == end).float() for end in (x.amax(1, keepdim=True), x.amin(1, keepdim=True))]
            high, low = (_round(end / end.sum(1, keepdim=True), dtype) for end in ends)
            return high - low, sign.new_zeros(sign.shape[0], 1), False
        size = deviation.abs()
        threshold = size.topk(self.k, 1).values[:, -1:]
        inside, tied = (size > threshold).float(), (size == threshold).float()
        share = _round((self.k - inside.sum(1, keepdim=True)) / tied.sum(1, keepdim=True), dtype)
        inside, tied = inside * sign, tied * sign
        total = _round(_divide(inside.sum(1, keepdim=True) + share * tied.sum(1, keepdim=True), self.k), acc)
        return _round(_divide(inside + share * tied, self.k), dtype), total, False


def _hypotenuse(s: Tensor, root_eps: float, acc: torch.dtype) -> Tensor:
    """√(s² + eps) as m·√(1 + (l/m)²) with m = max(s, √eps), l = min(s, √eps): no square of s."""
    if root_eps == 0:
        return s
    large, small = s.clamp(min=root_eps), s.clamp(max=root_eps)
    ratio = _round(small / large, acc)
    root = _round(_round(_round(ratio * ratio, acc) + 1, acc).sqrt(), acc)
    return _round(large * root, acc)


class _Normalize(torch.autograd.Function):
    """y = relu((x − μ)/D·weight + bias + residual) over the rows of (rows, n), with D = √(s² + eps)."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        fixed: tuple[Tensor, Tensor] | None,
        rule: _Rule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, acc, storage = rule.arithmetic.dtype, rule.arithmetic.accumulate, rule.arithmetic.storage
        x = _round(input.float(), storage)
        if fixed is not None:
            mean, D = fixed
            s = D
            deviation = _round(x - _round(mean, dtype), dtype)
        else:
            mean = _tree_mean(x, 1, acc) if rule.center else x.new_zeros(x.shape[0], 1)
            deviation = _round(x - _round(mean, dtype), dtype) if rule.center else x
            s, D = rule.scales(x, deviation)
        y = deviation if rule.kind == "mean" else _round(deviation / _round(D, dtype), dtype)
        if weight is not None:
            y = _round(y * _round(weight.float(), dtype), dtype)
        if bias is not None:
            y = _round(y + _round(bias.float(), dtype), dtype)
        if residual is not None:
            y = _round(y + _round(residual.float(), storage), dtype)
        if rule.relu:
            y = y.relu()
        output = _round(y, storage).to(input.dtype)
        ctx.save_for_backward(x.to(storage), weight, mean, s, D, output if rule.relu else None)
        ctx.rule, ctx.fixed, ctx.input_dtype = rule, fixed is not None, input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.mark_non_differentiable(mean, s)
        return output, mean, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """dx = (ĝ − mean ĝ − (s/D)·C·A·(e − mean e))/D, with ĝ = g·weight, A = mean(ĝ·x̂), e the statistic's slope."""
        rule: _Rule = ctx.rule
        dtype, acc, store = rule.arithmetic.dtype, rule.arithmetic.accumulate, rule.arithmetic.gradient
        saved, weight, mean, s, D, output = ctx.saved_tensors
        x, n = saved.float(), saved.shape[1]
        g = _round(grad.float(), store)
        if output is not None:
            g = g.masked_fill(output <= 0, 0.0)
        deviation = _round(x - _round(mean, dtype), dtype) if rule.center or ctx.fixed else x
        D_element = _round(D, dtype)
        x_hat = deviation if rule.kind == "mean" else _round(deviation / D_element, dtype)

        g_hat = g if weight is None else _round(g * _round(weight.float(), dtype), dtype)
        g_x = _round(g * x_hat, dtype)
        over_weight = 1 - rule.weight_dim  # the dimension that the parameters' gradients sum over
        sums = _tree_mean(torch.stack([g, g_x]), 1 + over_weight, acc)
        if rule.weight_dim == 0:  # a row has one weight, which leaves its means as a factor
            means = sums if weight is None else _round(sums * _round(weight.float(), acc), acc)
        else:
            means = _tree_mean(torch.stack([g_hat, _round(g_hat * x_hat, dtype)]), 2, acc)

        dx = g_hat
        if not ctx.fixed:
            shift = means[0] if rule.center else None
            if rule.kind != "mean":
                slope, total, averaged = rule.slope(x, deviation, x_hat)
                factor = _round(means[1] * _rounded(rule.C if rule.kind != "l2" else rule.C**2, acc), acc)
                if rule.kind != "l2":  # for L2, (s/D)·∂s/∂x is x̂/n: s cancels
                    factor = _round(factor * _round(s / D, acc), acc)
                fraction, power = _split_count(n, acc)
                if rule.center:
                    total = _round(_divide(total, n), acc) if averaged else total
                    shift = _round(means[0] - _round(factor * total, acc), acc)
                if not averaged:
                    factor = _round(factor * fraction * power, acc)
                term = _round(_round(factor, dtype) * slope, dtype)
            if shift is not None:
                dx = _round(dx - _round(shift, dtype), dtype)
            if rule.kind != "mean":
                dx = _round(dx - term, dtype)
        if rule.kind != "mean":
            dx = _round(dx / D_element, dtype)
        count = x.shape[over_weight]
        return (
            _round(dx, store).to(ctx.input_dtype),
            None if weight is None else (sums[1] * count).to(weight.dtype),
            None if ctx.bias_dtype is None else (sums[0] * count).to(ctx.bias_dtype),
            None if ctx.residual_dtype is None else g.to(ctx.residual_dtype),
            None,
            None,
        )
