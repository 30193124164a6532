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
  millions of elements. All statistics use this same tree: where L2 fails, its squares failed, not our sum. With
  ``sums="running"`` each is one running sum instead, as a plain loop would have it. Signs and ties are counted by
  integer counters, without rounding.
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
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from normmatters.kernels import emulation
from normmatters.norm import Norm, RunningStats
from normmatters.precision.normalize import Arithmetic
from normmatters.precision.rounding import FORMATS, STORAGE

F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["Arithmetic", "active", "arithmetic", "batch_norm", "layer_norm", "rms_norm"]


def arithmetic(
    dtype: str | torch.dtype,
    accumulate: str | torch.dtype = "fp32",
    sums: Literal["tree", "running"] = "tree",
) -> _Context:
    """Compute this library's batch, layer and RMS norms in ``dtype``, with sums in ``accumulate``.

    A context manager, which as ``torch.autocast``'s may be entered again and again, and a decorator (generators and
    coroutines are refused: their bodies run after the call). It acts on norms whose forward runs inside it, in this
    thread (or task); their backward keeps to it wherever it runs. Under activation checkpointing the forward runs again
    during the backward: pass it on by ``checkpoint(..., context_fn=lambda: (nullcontext(), arithmetic(...)))``.

    Args:
        dtype: ``"fp16"``, ``"bf16"``, ``"fp32"``, or for storage in fp8 with fp16 arithmetic ``"e4m3"``, ``"e5m2"``;
            or the torch dtype.
        accumulate: ``"fp16"``, ``"bf16"`` or ``"fp32"``, or the torch dtype.
        sums: ``"tree"`` for means by pairwise averaging, ``"running"`` for one running sum over all numbers, one after
            the other, which can overflow and stagnate. On a CPU it is slow in bf16.

    Example::

        >>> bn = LpBatchNorm2d(64, p=1)
        >>> with arithmetic("fp16", accumulate="fp16"):
        ...     y = bn(torch.randn(8, 64, 4, 4))
    """
    accumulator = _format("accumulate", accumulate, FORMATS)
    if sums not in ("tree", "running"):
        raise ValueError(f"sums must be 'tree' or 'running', got {sums!r}")
    storage = _format("dtype", dtype, FORMATS | STORAGE)
    if storage in STORAGE.values():
        return _Context(Arithmetic(torch.float16, accumulator, storage, torch.float8_e5m2, sums))
    return _Context(Arithmetic(storage, accumulator, storage, storage, sums))


def active() -> Arithmetic | None:
    """The arithmetic in force here, or None for PyTorch's own.

    >>> active() is None
    True
    """
    return emulation.active()  # type: ignore[return-value]


class _Context(contextlib.ContextDecorator):
    """What :func:`arithmetic` returns. It stores nothing while entered, so threads and steps can share it."""

    def __init__(self, setting: Arithmetic) -> None:
        self.setting = setting

    def __call__(self, func: F) -> F:
        if inspect.isgeneratorfunction(func) or inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
            kind = "a generator or coroutine, whose body runs after the call"
            raise TypeError(f"{func.__name__} is {kind}: enter the arithmetic inside it")
        return super().__call__(func)

    def __enter__(self) -> Arithmetic:
        emulation.enter(self.setting)
        return self.setting

    def __exit__(self, *_: object) -> None:
        emulation.leave(self.setting)


def _format(name: str, value: str | torch.dtype, allowed: dict[str, torch.dtype]) -> torch.dtype:
    dtype = allowed.get(value) if isinstance(value, str) else value
    if dtype is None or dtype not in allowed.values():
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))} or its torch dtype, got {value!r}")
    return dtype


# The three normalizations, with the signatures of `functional`.


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
    running = RunningStats(running_mean, running_var, None, momentum)
    norm = Norm(p, k, constant, eps)
    return _required().batch_norm(input, norm, weight, bias, running, training, residual=residual, act=act)


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
    return _required().layer_norm(input, normalized_shape, Norm(p, k, constant, eps), weight, bias)


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
    norm = Norm(p, None, constant, eps)
    return _required().layer_norm(input, normalized_shape, norm, weight, None, centered=False)


def _required() -> Arithmetic:
    setting = active()
    if setting is None:
        raise RuntimeError("no arithmetic is active: call this inside `with precision.arithmetic(...)`")
    return setting
