"""One training step: eagerly, compiled, or replayed from a CUDA graph. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from normmatters import precision
from normmatters.lab.capture import all_at_once
from normmatters.lab.config import PrecisionConfig
from normmatters.lab.objective import Objective
from normmatters.lab.regimes import Regime
from normmatters.lab.session import exclusive

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

    With ``graph`` the first steps run eagerly on a side stream; then one step is captured with fixed input buffers and
    every later one is a copy into them and a replay. The optimizer's step is part of the graph where it can be
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
        graph: bool,
    ) -> None:
        self.model, self.objective, self.regime, self.arithmetic = model, objective, regime, arithmetic
        self.scaler, self.clip_norm = scaler, clip_norm
        self.device = next(model.parameters()).device
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self._wanted = graph and self.device.type == "cuda"
        self._captured: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._warm = 0
        self._stream = torch.cuda.Stream() if self._wanted else None

    def __call__(self, batch: Any, step: int) -> None:
        """Take step number ``step`` (from 0, over all epochs)."""
        self.regime.before_step(step)
        if not self._wanted:
            self._forward_backward(batch)
            self._optimizer_step()
        elif self._captured is None and self._warm < WARM_UP:
            self._warm += 1
            assert self._stream is not None
            self._stream.wait_stream(torch.cuda.current_stream())
            # One run at a time compiles kernels and tries out convolutions: the next finds them ready.
            with exclusive, torch.cuda.stream(self._stream):
                self._forward_backward(batch)
                self._optimizer_step()
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            self._replay(batch)

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

    def _replay(self, batch: tuple[Tensor, ...]) -> None:
        inside = self.regime.capturable
        fresh = self._captured is None
        if self._captured is None:
            self._inputs = tuple(t.clone(memory_format=torch.preserve_format) for t in batch)
            self._captured = torch.cuda.CUDAGraph()
            # thread_local: the prefetching thread may pin memory, and other runs may launch, meanwhile
            with exclusive, torch.cuda.graph(self._captured, stream=self._stream, capture_error_mode="thread_local"):
                with all_at_once(self.model, self.arithmetic.amp):
                    self._forward_backward(self._inputs)
                if inside:
                    self._optimizer_step()
        else:
            for place, value in zip(self._inputs, batch):
                place.copy_(value, non_blocking=True)
        self._captured.replay()
        if not inside:
            self._optimizer_step()
        elif not fresh and self.regime.recorder is not None:
            self.regime.recorder.step()  # the optimizer's hook ran when it was captured, but a replay runs none
