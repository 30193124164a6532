"""A training step, and a look at the validation set: eagerly, compiled, or replayed from CUDA graphs.

Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normmatters import precision
from normmatters.lab.capture import all_at_once
from normmatters.lab.config import PrecisionConfig
from normmatters.lab.gate import gpu
from normmatters.lab.graph import CudaGraphs
from normmatters.lab.objective import Objective
from normmatters.lab.regimes import Regime

Shapes = tuple[torch.Size, ...]
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

    With ``graphs`` the first steps run eagerly, and so does the first one with batches of a new shape; then one step of
    each shape is captured with fixed input buffers, and every later one is a copy into them and a replay. The
    optimizer's step is part of the graph where it can be (``Regime.capturable``); otherwise it follows eagerly, which
    every mode and recording works with.
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
        graphs: CudaGraphs | None,
    ) -> None:
        self.model, self.objective, self.regime, self.arithmetic = model, objective, regime, arithmetic
        self.scaler, self.clip_norm = scaler, clip_norm
        self.device = next(model.parameters()).device
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self._steps = _Replays(graphs, "step", self._captured_step) if graphs is not None else None
        self._gradients: dict[Shapes, list[tuple[nn.Parameter, Tensor | None]]] = {}  # of graphs without an optimizer
        self._warm = 0

    def __call__(self, batch: Any, step: int) -> None:
        """Take step number ``step`` (from 0, over all epochs)."""
        gpu.pause()
        self.regime.before_step(step)
        if self._steps is None:
            self._forward_backward(batch)
            self._optimizer_step()
        elif self._steps.is_new(batch) or self._warm < WARM_UP:
            self._warm += 1
            with self._steps.graphs.warm_up():
                self._forward_backward(batch)
                self._optimizer_step()
        else:
            self._replay(self._steps, batch)

    def release(self) -> None:
        """No step comes after this."""
        if self._steps is not None:
            self._steps.graphs.release()

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

    def _replay(self, steps: _Replays, batch: Any) -> None:
        fresh = steps(batch)
        if self.regime.capturable:
            if not fresh and self.regime.recorder is not None:
                self.regime.recorder.step()  # the optimizer's hook ran when it was captured, but a replay runs none
            return
        shapes = _shapes(batch)
        if fresh:
            self._gradients[shapes] = [(p, p.grad) for p in self.model.parameters()]
        for p, grad in self._gradients[shapes]:  # another graph's, or an eager step's, may be in their place
            p.grad = grad
        self._optimizer_step()

    def _captured_step(self, inputs: Any) -> None:
        with all_at_once(self.model, self.arithmetic.amp):
            self._forward_backward(inputs)
        if self.regime.capturable:
            self._optimizer_step()


class Evaluation:
    """What the objective measures on batches in evaluation mode, added up. ``graphs`` as for :class:`Stepper`.

    The layers of a small network take longer to launch than to run: by hand a ResNet-56's validation on CIFAR-10 takes
    four times as long, and all of it is time in which the threads of other runs wait for Python.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, arithmetic: Arithmetic, graphs: CudaGraphs | None
    ) -> None:
        self.model, self.objective, self.arithmetic = model, objective, arithmetic
        self.sums = torch.zeros(3, dtype=torch.float64, device=next(model.parameters()).device)
        self._replays = _Replays(graphs, "evaluation", self._measure) if graphs is not None else None

    @torch.no_grad()
    def __call__(self, batches: Iterable[Any]) -> Tensor:
        self.model.eval()
        self.sums.zero_()
        for batch in batches:
            gpu.pause()
            if self._replays is None:
                self._measure(batch)
            elif self._replays.is_new(batch):
                with self._replays.graphs.warm_up():
                    self._measure(batch)
            else:
                self._replays(batch)
        return self.sums

    def _measure(self, batch: Any) -> None:
        with self.arithmetic():
            self.sums.add_(self.objective.measure(self.model, batch, smooth=False)[1])


class _Replays:
    """``work`` on a batch, from a graph for each shape of batches with fixed places for the batch's tensors."""

    def __init__(self, graphs: CudaGraphs, name: str, work: Callable[[Any], None]) -> None:
        self.graphs, self._name, self._work = graphs, name, work
        self._seen: set[Shapes] = set()
        self._inputs: dict[Shapes, Any] = {}

    def is_new(self, batch: Any) -> bool:
        """Whether this is the first batch of its shape, with which the work is to be done eagerly."""
        shapes = _shapes(batch)
        new = shapes not in self._seen
        self._seen.add(shapes)
        return new

    def __call__(self, batch: Any) -> bool:
        """Do the work; whether it was recorded for that."""
        shapes = _shapes(batch)
        key, fresh = (self._name, shapes), shapes not in self._inputs
        if fresh:
            inputs = pytree.tree_map_only(Tensor, lambda t: t.clone(memory_format=torch.preserve_format), batch)
            self.graphs.record(key, lambda: self._work(inputs))
            self._inputs[shapes] = inputs
        else:
            for place, value in zip(self._inputs[shapes], batch):
                if isinstance(place, Tensor):
                    place.copy_(value, non_blocking=True)
        self.graphs.replay(key)
        return fresh


def _shapes(batch: Any) -> Shapes:
    return tuple(part.shape for part in batch if isinstance(part, Tensor))
