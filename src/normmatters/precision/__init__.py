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
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it imports the compiler only when called

from normmatters.functional.batch_norm import batch_norm as plain_batch_norm
from normmatters.functional.checks import check_batch_norm, check_layer_norm
from normmatters.kernels import backends
from normmatters.kernels.triton.layout import memory_format
from normmatters.norm import Norm, RunningStats, compute_dtype
from normmatters.precision.normalize import Normalize, Rule
from normmatters.precision.rounding import FORMATS, STORAGE

F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["Arithmetic", "active", "arithmetic", "batch_norm", "layer_norm", "rms_norm"]


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


# The settings entered in this thread or task and not left yet; the last one is in force.
_entered: ContextVar[tuple[Arithmetic, ...]] = ContextVar("normmatters_arithmetic", default=())
# torch.compile cannot trace a ContextVar but guards on a global: 0 here keeps an ordinary compiled model whole, and
# entering a context anywhere makes it look again.
_open_contexts = 0
_lock = threading.Lock()


def arithmetic(dtype: str | torch.dtype, accumulate: str | torch.dtype = "fp32") -> _Context:
    """Compute this library's batch, layer and RMS norms in ``dtype``, with sums in ``accumulate``.

    A context manager, which as ``torch.autocast``'s may be entered again and again, and a decorator (generators and
    coroutines are refused: their bodies run after the call). It acts on norms whose forward runs inside it, in this
    thread (or task); their backward keeps to it wherever it runs. Under activation checkpointing the forward runs again
    during the backward: pass it on by ``checkpoint(..., context_fn=lambda: (nullcontext(), arithmetic(...)))``.

    Args:
        dtype: ``"fp16"``, ``"bf16"``, ``"fp32"``, or for storage in fp8 with fp16 arithmetic ``"e4m3"``, ``"e5m2"``;
            or the torch dtype.
        accumulate: ``"fp16"``, ``"bf16"`` or ``"fp32"``, or the torch dtype.

    Example::

        >>> bn = LpBatchNorm2d(64, p=1)
        >>> with arithmetic("fp16", accumulate="fp16"):
        ...     y = bn(torch.randn(8, 64, 4, 4))
    """
    accumulator = _format("accumulate", accumulate, FORMATS)
    storage = _format("dtype", dtype, FORMATS | STORAGE)
    if storage in STORAGE.values():
        return _Context(Arithmetic(torch.float16, accumulator, storage, torch.float8_e5m2))
    return _Context(Arithmetic(storage, accumulator, storage, storage))


def active() -> Arithmetic | None:
    """The arithmetic in force here, or None for PyTorch's own.

    >>> active() is None
    True
    """
    entered = _entered.get() if _open_contexts else ()
    return entered[-1] if entered else None


class _Context(contextlib.ContextDecorator):
    """What :func:`arithmetic` returns. It keeps nothing of its own while entered, so threads and steps can share it."""

    def __init__(self, setting: Arithmetic) -> None:
        self.setting = setting

    def __call__(self, func: F) -> F:
        if inspect.isgeneratorfunction(func) or inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(f"the body of {func.__name__} runs after the call: enter the arithmetic inside of it")
        return super().__call__(func)

    def __enter__(self) -> Arithmetic:
        global _open_contexts
        with _lock:
            _open_contexts += 1
            backends.emulation = _EMULATION
        _entered.set((*_entered.get(), self.setting))
        return self.setting

    def __exit__(self, *_: object) -> None:
        global _open_contexts
        with _lock:  # whoever leaves
            _open_contexts -= 1
            if _open_contexts == 0:
                backends.emulation = None
        entered = _entered.get()
        if entered[-1:] != (self.setting,):
            raise ValueError(
                "an arithmetic must be left by the thread or task that entered it, the last one entered first"
            )
        _entered.set(entered[:-1])


def _format(name: str, value: str | torch.dtype, allowed: dict[str, torch.dtype]) -> torch.dtype:
    dtype = allowed.get(value) if isinstance(value, str) else value
    if dtype is None or dtype not in allowed.values():
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))} or its torch dtype, got {value!r}")
    return dtype


# --- The three normalizations, with the signatures of `functional` ---

# None is compiled: a graph would drop the round trips through fp16, which are the point here.


@_disable_dynamo
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
    running = RunningStats(running_mean, running_var, momentum=momentum)
    return _batch_norm(input, Norm(p, k, constant, eps), weight, bias, running, training, residual=residual, act=act)


@_disable_dynamo
def _batch_norm(
    input: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStats,
    training: bool,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    _check_supported(norm)
    check_batch_norm(input, norm, weight, bias, running, training, residual=residual, act=act)
    if input.numel() == 0:  # nothing to round
        return plain_batch_norm(input, norm, weight, bias, running, training, residual=residual, act=act)
    n = input.numel() // input.shape[1]
    C = norm.scale_constant(n) if training else 1.0  # for fixed statistics n may be less than k
    rule = Rule(_required(), norm.kind, norm.k or 1, C, norm.epsilon(input.dtype), relu=act == "relu")
    fixed = None
    if not training:
        assert running.mean is not None  # checked above
        fixed = _running_scale(running.mean, running.var, rule)

    def rows(x: Tensor | None) -> Tensor | None:  # (N, C, ...) -> (C, n)
        return None if x is None else x.transpose(0, 1).reshape(x.shape[1], -1)

    def column(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, None]

    y: Tensor
    y, mean, scale = Normalize.apply(rows(input), column(weight), column(bias), rows(residual), fixed, rule)
    if training:
        squared = None if norm.kind == "mean" else scale.flatten().square()
        running.update(norm, mean.flatten(), squared, n)
    shape = input.shape
    y = y.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return y.contiguous(memory_format=memory_format(input))


@_disable_dynamo
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


@_disable_dynamo
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
    norm = Norm(p, k, constant)
    _check_supported(norm)
    kind = norm.kind
    check_layer_norm(input, normalized_shape, weight, bias, eps, kind=kind, k=k)
    n = math.prod(normalized_shape)
    C = norm.scale_constant(n)
    rule = Rule(_required(), kind, k or 1, C, eps, center=center, weight_dim=1)
    weight, bias = (None if x is None else x.reshape(1, n) for x in (weight, bias))
    rows = input.reshape(input.numel() // max(n, 1), n)
    y: Tensor = Normalize.apply(rows, weight, bias, None, None, rule)[0]
    return y.reshape(input.shape)


def _check_supported(norm: Norm) -> None:
    if norm.kind == "lp":
        raise ValueError(f"precision.arithmetic supports p = 1, 2, math.inf, 'range' and 'mean', got p = {norm.p!r}")


def _required() -> Arithmetic:
    setting = active()
    if setting is None:
        raise RuntimeError("no arithmetic is active: call this inside `with precision.arithmetic(...)`")
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "precision.arithmetic does not go through the transforms of torch.func (vmap, grad, jvp): take gradients "
            "by backward() or torch.autograd.grad here, or leave the arithmetic"
        )
    return setting


class _Emulation:
    """What :mod:`normmatters.kernels.dispatch` calls while an arithmetic is in force."""

    active = staticmethod(active)
    batch_norm = staticmethod(_batch_norm)
    layer_norm = staticmethod(layer_norm)
    rms_norm = staticmethod(rms_norm)


_EMULATION = _Emulation()


def _running_scale(mean: Tensor, var: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    scale = torch.ones_like(mean) if var is None or rule.kind == "mean" else (var.float() + rule.eps).sqrt()
    return mean.float()[:, None], scale.float()[:, None]
