"""Steps and validation replayed from CUDA graphs: one graph for each shape of batches, with fixed input buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normmatters.lab.side_by_side.fewer_launches import fewer_launches
from normmatters.lab.side_by_side.graphs import CudaGraphs
from normmatters.lab.steps import Evaluation, Stepper

Shapes = tuple[torch.Size, ...]
WARM_UP = 3  # eager steps before a capture: they are steps of the run, so that nothing has to be undone


class GraphStepper(Stepper):
    """Takes the steps of ``eager`` by graphs.

    The first steps run eagerly, and so does the first one with batches of a new shape; then one step of each shape is
    captured, and every later one is a copy into its buffers and a replay. The optimizer's step is part of the graph
    where it can be (``Regime.capturable``); otherwise it follows eagerly, which every mode and recording works with.
    """

    def __init__(self, eager: Stepper, graphs: CudaGraphs, pause: Callable[[], None]) -> None:
        super().__init__(**{part.name: getattr(eager, part.name) for part in fields(eager)})
        self._pause = pause
        self._steps = _Replays(graphs, "step", self._captured_step)
        self._gradients: dict[Shapes, list[tuple[nn.Parameter, Tensor | None]]] = {}  # of graphs without an optimizer
        self._eager_steps = 0

    def __call__(self, batch: Any, step: int) -> None:
        self._pause()
        self.regime.before_step(step)
        if self._steps.is_new(batch) or self._eager_steps < WARM_UP:
            self._eager_steps += 1
            with self._steps.graphs.warm_up():
                self.forward_backward(batch)
                self.optimizer_step()
            return
        captured_now = self._steps(batch)
        if self.regime.capturable:
            if not captured_now and self.regime.recorder is not None:
                self.regime.recorder.step()  # the optimizer's hook ran when it was captured, but a replay runs none
            return
        shapes = _shapes(batch)
        if captured_now:
            self._gradients[shapes] = [(p, p.grad) for p in self.model.parameters()]
        for p, grad in self._gradients[shapes]:  # another graph's, or an eager step's, may be in their place
            p.grad = grad
        self.optimizer_step()

    def _captured_step(self, inputs: Any) -> None:
        with fewer_launches(self.model, self.arithmetic.autocast_dtype):
            self.forward_backward(inputs)
        if self.regime.capturable:
            self.optimizer_step()


class GraphEvaluation(Evaluation):
    """Measures what ``eager`` does, by graphs.

    The layers of a small network take longer to launch than to run: launched one by one a ResNet-56's validation on
    CIFAR-10 takes four times as long, and all of it is time in which the threads of other runs wait for Python.
    """

    def __init__(self, eager: Evaluation, graphs: CudaGraphs) -> None:
        super().__init__(**{part.name: getattr(eager, part.name) for part in fields(eager)})
        self._replays = _Replays(graphs, "evaluation", super().measure)

    def measure(self, batch: Any) -> None:
        if self._replays.is_new(batch):
            with self._replays.graphs.warm_up():
                super().measure(batch)
        else:
            self._replays(batch)


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
        """Do the work; whether it was captured for that."""
        shapes = _shapes(batch)
        key, capture = (self._name, shapes), shapes not in self._inputs
        if capture:
            inputs = pytree.tree_map_only(Tensor, lambda t: t.clone(memory_format=torch.preserve_format), batch)
            self.graphs.record(key, lambda: self._work(inputs))
            self._inputs[shapes] = inputs
        else:
            for place, value in zip(self._inputs[shapes], batch):
                if isinstance(place, Tensor):
                    place.copy_(value, non_blocking=True)
        self.graphs.replay(key)
        return capture


def _shapes(batch: Any) -> Shapes:
    return tuple(part.shape for part in batch if isinstance(part, Tensor))
