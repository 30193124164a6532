"""Graphs without a GPU: what is recorded is done at each replay, into the places that were fixed when it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normmatters.lab.config import RunConfig
from normmatters.lab.plan import PlannedRun
from normmatters.lab.processes import train_when_free
from normmatters.lab.run import RunResult, train
from normmatters.lab.runner import Launcher, Runner
from normmatters.lab.side_by_side.execution import GraphExecution
from normmatters.lab.side_by_side.rwlock import gpu
from normmatters.lab.side_by_side.threads import Threads
from normmatters.lab.steps import Evaluation, Stepper


class FakeGraphs:
    """In the place of ``CudaGraphs``. As there, a recording leaves gradients that hold nothing yet, and a replay writes
    into them and runs no Python: ``p.grad`` stays whatever it is."""

    recorded: list[Any] = []  # the keys, of all runs

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        self.parameters: list[nn.Parameter] = []
        self.work: dict[Any, Callable[[], None]] = {}
        self.gradients: dict[Any, list[Tensor]] = {}

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        with gpu.exclusive():
            yield

    def record(self, key: Any, work: Callable[[], None]) -> None:
        assert key not in self.work
        self.work[key] = work
        self.gradients[key] = [torch.full_like(p, torch.nan) for p in self.parameters]
        for p, grad in zip(self.parameters, self.gradients[key]):
            p.grad = grad
        FakeGraphs.recorded.append(key)

    def replay(self, key: Any) -> None:
        before = [p.grad for p in self.parameters]
        self.work[key]()
        for p, place, grad in zip(self.parameters, self.gradients[key], before):
            assert p.grad is not None
            place.copy_(p.grad)
            p.grad = grad

    def release(self) -> None:
        with gpu.exclusive():
            self.work.clear()


class FakeExecution(GraphExecution):
    """Steps from graphs of ``kind``, on any device; ``capturable``: whether the optimizer's step is in them."""

    def __init__(self, kind: type[FakeGraphs] = FakeGraphs, capturable: bool | None = None) -> None:
        super().__init__(self._make)  # type: ignore[arg-type]
        self._kind, self._capturable = kind, capturable

    def _make(self, device: torch.device, generator: torch.Generator | None) -> FakeGraphs:
        self.graphs = self._kind(device, generator)
        return self.graphs

    def prepare(
        self, stepper: Stepper, evaluation: Evaluation, data: Any, generator: torch.Generator | None
    ) -> tuple[Stepper, Evaluation]:
        prepared = super().prepare(stepper, evaluation, data, generator)
        self.graphs.parameters = list(stepper.model.parameters())
        if self._capturable is not None:
            stepper.regime.capturable = self._capturable
        return prepared


def train_with_fakes(config: RunConfig, folder: str | Path, *args: Any, **options: Any) -> RunResult:
    """``train``, with fake graphs where the config asks for graphs."""
    execution = FakeExecution() if config.runtime.compile == "cudagraph" else None
    return train(config, folder, *args, **{"execution": execution, **options})


class ThreadRunner(Runner):
    """Every run is a thread, whatever its device; ``train`` is called as ``train_when_free`` is."""

    def __init__(
        self,
        plan: list[PlannedRun],
        *,
        workers: int,
        train: Callable[..., Any] = train_when_free,
        processes: Launcher | None = None,
    ) -> None:
        super().__init__(plan, workers=workers, threads=Threads(workers, None, train), processes=processes)

    def shares_a_process(self, config: RunConfig) -> bool:
        return True
