"""A training step, and the measurement of a validation set. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normmatters import precision
from normmatters.lab.config import PrecisionConfig
from normmatters.lab.objective import Objective
from normmatters.lab.regimes import Regime

_DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Arithmetic:
    """The contexts in which a forward pass runs: autocast, and the norms' own arithmetic (Fig. 3)."""

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.autocast_dtype = _DTYPE.get(config.amp)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:  # type: ignore[misc]
        config = self.config
        with contextlib.ExitStack() as stack:
            if self.autocast_dtype is not None:
                # no cache: a graph must hold the casts of the weights, not their first result
                stack.enter_context(torch.autocast(self.device.type, self.autocast_dtype, cache_enabled=False))
            if config.arithmetic is not None:
                own = precision.arithmetic(config.arithmetic, config.accumulate or "fp32", config.sums)
                stack.enter_context(own)
            yield


@dataclass(eq=False)
class Stepper:
    """Forward, backward and optimizer step on a batch; ``sums`` adds up what the objective measures."""

    model: nn.Module
    objective: Objective
    regime: Regime
    arithmetic: Arithmetic
    scaler: torch.amp.GradScaler | None
    clip_norm: float | None

    def __post_init__(self) -> None:
        self.sums = _sums(self.model)

    def __call__(self, batch: Any, step: int) -> None:
        """Take step number ``step`` (from 0, over all epochs)."""
        self.regime.before_step(step)
        self.forward_backward(batch)
        self.optimizer_step()

    def forward_backward(self, batch: Any) -> None:
        self.regime.optimizer.zero_grad(set_to_none=True)
        with self.arithmetic():
            loss, sums = self.objective.measure(self.model, batch, smooth=True)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.sums.add_(sums)

    def optimizer_step(self) -> None:
        optimizer, scaler = self.regime.optimizer, self.scaler
        if self.clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@dataclass(eq=False)
class Evaluation:
    """What the objective measures on batches in evaluation mode, added up. ``before_batch`` is called before each."""

    model: nn.Module
    objective: Objective
    arithmetic: Arithmetic
    before_batch: Callable[[], None]

    def __post_init__(self) -> None:
        self.sums = _sums(self.model)

    @torch.no_grad()
    def __call__(self, batches: Iterable[Any]) -> Tensor:
        self.model.eval()
        self.sums.zero_()
        for batch in batches:
            self.before_batch()
            self.measure(batch)
        return self.sums

    def measure(self, batch: Any) -> None:
        with self.arithmetic():
            self.sums.add_(self.objective.measure(self.model, batch, smooth=False)[1])


def _sums(model: nn.Module) -> Tensor:
    return torch.zeros(3, dtype=torch.float64, device=next(model.parameters()).device)
