"""A run whose steps are CUDA graphs, beside others of its kind in one process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from normmatters.lab.config import RunConfig
from normmatters.lab.data import ImageData, TextData
from normmatters.lab.execution import Execution, torch_settings, wanted_settings
from normmatters.lab.side_by_side.graph_steps import GraphEvaluation, GraphStepper
from normmatters.lab.side_by_side.graphs import CudaGraphs
from normmatters.lab.side_by_side.rwlock import gpu
from normmatters.lab.side_by_side.small_conv import use_small_convolutions
from normmatters.lab.steps import Evaluation, Stepper

# Runs in one process are set up one at a time: a model is initialised from torch's own random state, and a checkpoint
# sets it. After that none draws from it, since dropout has a generator of its run's own. A run takes this lock before
# it enters ``gpu``, never inside it.
_setting_up = threading.Lock()


class GraphExecution(Execution):
    """``make_graphs(device, generator)`` gives what records and replays."""

    uses_graphs = True

    def __init__(self, make_graphs: Callable[[torch.device, torch.Generator | None], CudaGraphs] = CudaGraphs) -> None:
        self._make_graphs = make_graphs
        self._graphs: CudaGraphs | None = None

    def settings(self, config: RunConfig, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return _shared_settings.use(config, device)

    @contextlib.contextmanager
    def setting_up(self) -> Iterator[None]:
        with _setting_up, gpu.shared():
            yield

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        with gpu.shared():
            try:
                yield
            finally:
                if self._graphs is not None:
                    self._graphs.release()

    def pause(self) -> None:
        gpu.pause()

    def prepare(
        self, stepper: Stepper, evaluation: Evaluation, data: ImageData | TextData, generator: torch.Generator | None
    ) -> tuple[Stepper, Evaluation]:
        use_small_convolutions(stepper.model)
        graphs = self._graphs = self._make_graphs(stepper.sums.device, generator)
        if isinstance(data, TextData):
            data.train.few_shapes()
        else:  # a validation set of text has about as many shapes as batches
            evaluation = GraphEvaluation(evaluation, graphs)
        return GraphStepper(stepper, graphs, self.pause), evaluation


class _SharedSettings:
    """Torch's global switches for all runs of the process: the first sets them, the last puts them back."""

    def __init__(self) -> None:
        self._lock, self._runs = threading.Lock(), 0
        self._wanted: dict[str, Any] = {}
        self._restore = contextlib.ExitStack()

    @contextlib.contextmanager
    def use(self, config: RunConfig, device: torch.device) -> Iterator[None]:
        wanted = wanted_settings(config, device)
        with self._lock:
            if self._runs and wanted != self._wanted:
                raise ValueError(f"runs in one process must agree on {wanted}, another one has {self._wanted}")
            if not self._runs:
                self._restore.enter_context(torch_settings(config, device))
                self._wanted = wanted
            self._runs += 1
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    self._restore.close()


_shared_settings = _SharedSettings()
