"""Graphs without a GPU: what is recorded is done at each replay, into the places that were fixed when it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normmatters.lab import step, trainer


class FakeGraphs:
    """In the place of ``CudaGraphs``. As there, a recording leaves gradients that hold nothing yet, and a replay writes
    into them and runs no Python: ``p.grad`` stays whatever it is."""

    recorded: list[Any] = []  # the keys, of all runs

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.work: dict[Any, Callable[[], None]] = {}
        self.gradients: dict[Any, list[Tensor]] = {}

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        with step.gpu.alone():
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
        with step.gpu.alone():
            self.work.clear()


def use_fake_graphs(monkeypatch: pytest.MonkeyPatch, kind: type[FakeGraphs] = FakeGraphs) -> None:
    """Let runs with ``runtime.compile=cudagraph`` take their steps from ``kind``, on any device."""
    plain = trainer.Stepper

    def stepper(model: nn.Module, *args: Any, graphs: Any, **options: Any) -> step.Stepper:
        if graphs is not None:
            graphs.parameters = list(model.parameters())
        return plain(model, *args, graphs=graphs, **options)

    FakeGraphs.recorded = []
    monkeypatch.setattr(trainer, "step_graphs", lambda device, generator: kind())
    monkeypatch.setattr(trainer, "Stepper", stepper)
