"""One training step: eagerly, compiled, or replayed from a CUDA graph. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from normmatters import precision
from normmatters.lab.capture import all_at_once
from normmatters.lab.config import PrecisionConfig
from normmatters.lab.gate import gpu
from normmatters.lab.graph import CudaGraph
from normmatters.lab.objective import Objective
from normmatters.lab.regimes import Regime

_DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16}
WARM_UP = 3  # eager steps before a capture: they are steps of the run, so that nothing has to be undone


class Arithmetic:
    """The contexts in which a forward pass runs: autocast, and the norms' own arithmetic (Fig. 3)."""

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.amp = _DTYPE.get(config.amp)

    @contextlib.contextmanager
    def __call__(self) -> Any:  # type: ignore[misc]
        config = self.config
        with contextlib.ExitStack() as stack:
            if self.amp is not None:
                # no cache: a graph must hold the casts of the weights, not their first result
                stack.enter_context(torch.autocast(self.device.type, self.amp, cache_enabled=False))
            if config.arithmetic is not None:
                stack.enter_context(precision.arithmetic(config.arithmetic, accumulate=config.accumulate or "fp32"))
            yield


class Stepper:
    """Forward, backward and optimizer step on a batch; ``sums`` adds up what the objective measures.

    With ``graph`` the first steps run eagerly; then one step is captured with fixed input buffers, and every later one
    is a copy into them and a replay. The optimizer's step is part of the graph where it can be
    (``Regime.capturable``); otherwise it follows eagerly, which every mode and recording works with.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        regime: Regime,
        arithmetic: Arithmetic,
        scaler: torch.amp.GradScaler | None,
        *,
        clip_norm: float | None,
        graph: CudaGraph | None,
    ) -> None:
        self.model, self.objective, self.regime, self.arithmetic = model, objective, regime, arithmetic
        self.scaler, self.clip_norm = scaler, clip_norm
        self.device = next(model.parameters()).device
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self._graph = graph
        self._inputs: tuple[Tensor, ...] | None = None  # of the captured step
        self._warm = 0

    def __call__(self, batch: Any, step: int) -> None:
        """Take step number ``step`` (from 0, over all epochs)."""
        gpu.pause()
        self.regime.before_step(step)
        if self._graph is None:
            self._forward_backward(batch)
            self._optimizer_step()
        elif self._warm < WARM_UP:
            self._warm += 1
            with self._graph.warm_up():
                self._forward_backward(batch)
                self._optimizer_step()
        else:
            self._replay(self._graph, batch)

    def release(self) -> None:
        """No step comes after this."""
        if self._graph is not None:
            self._graph.release()

    def _forward_backward(self, batch: Any) -> None:
        self.regime.optimizer.zero_grad(set_to_none=True)
        with self.arithmetic():
            loss, sums = self.objective.measure(self.model, batch, smooth=True)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.sums.add_(sums)

    def _optimizer_step(self) -> None:
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

    def _replay(self, graph: CudaGraph, batch: tuple[Tensor, ...]) -> None:
        inside = self.regime.capturable
        fresh = self._inputs is None
        if self._inputs is None:
            self._inputs = tuple(t.clone(memory_format=torch.preserve_format) for t in batch)
            graph.record(self._captured_step)
        else:
            for place, value in zip(self._inputs, batch):
                place.copy_(value, non_blocking=True)
        graph.replay()
        if not inside:
            self._optimizer_step()
        elif not fresh and self.regime.recorder is not None:
            self.regime.recorder.step()  # the optimizer's hook ran when it was captured, but a replay runs none

    def _captured_step(self) -> None:
        with all_at_once(self.model, self.arithmetic.amp):
            self._forward_backward(self._inputs)
        if self.regime.capturable:
            self._optimizer_step()
