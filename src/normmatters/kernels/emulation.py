"""A hook: while an emulated arithmetic is active, it computes every norm in place of the backends.

:mod:`normmatters.precision` enters its settings here. This package only asks which one is active.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from normmatters.norm import Norm, RunningStats


class EmulatedArithmetic(Protocol):
    """What can compute the norms instead."""

    def batch_norm(
        self,
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
        """input: (N, C, ...). Moves the running mean and variance in training; the caller counts the batch."""

    def layer_norm(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        norm: Norm,
        weight: Tensor | None,
        bias: Tensor | None,
        *,
        centered: bool = True,
    ) -> Tensor:
        """input: (..., *normalized_shape). With ``centered=False`` the RMS norm."""


# Those entered in this thread or task and not left yet. The last one is active.
_entered: ContextVar[tuple[EmulatedArithmetic, ...]] = ContextVar("normmatters_arithmetic", default=())
#: How many are entered and not left, in all threads and tasks. Callers ask for it first: if it is 0, none is active.
#: torch.compile cannot trace a ContextVar but guards on a global: 0 here keeps an ordinary compiled model in one graph,
#: and entering an arithmetic anywhere makes the compiler look again.
open_contexts = 0
_lock = threading.Lock()


def active() -> EmulatedArithmetic | None:
    """The arithmetic that is active in this thread or task, or None for PyTorch's own.

    >>> active() is None
    True
    """
    entered = _entered.get() if open_contexts else ()
    return entered[-1] if entered else None


def enter(arithmetic: EmulatedArithmetic) -> None:
    """Make ``arithmetic`` the active one of this thread or task, until :func:`leave`."""
    global open_contexts
    with _lock:
        open_contexts += 1
    _entered.set((*_entered.get(), arithmetic))


def leave(arithmetic: EmulatedArithmetic) -> None:
    """Return to the arithmetic before; a ``ValueError`` if ``arithmetic`` is not the active one here."""
    global open_contexts
    with _lock:
        open_contexts -= 1
    entered = _entered.get()
    if entered[-1:] != (arithmetic,):
        raise ValueError("an arithmetic must be left by the thread or task that entered it, the last one entered first")
    _entered.set(entered[:-1])
