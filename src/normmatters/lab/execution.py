"""How a run uses its process: alone, one step after the other. ``side_by_side`` has the other way."""

from __future__ import annotations

import contextlib

import torch

from normmatters.lab.config import RunConfig
from normmatters.lab.data import ImageData, TextData
from normmatters.lab.process_state import torch_settings
from normmatters.lab.steps import Evaluation, Stepper

__all__ = ["Execution", "execution_for"]

Context = contextlib.AbstractContextManager[None]


class Execution:
    """A run that has its process to itself, so that it need not wait for anybody. One object for each run."""

    uses_graphs = False

    def settings(self, config: RunConfig, device: torch.device) -> Context:
        """Torch's global switches as this run wants them; inside of it come the two below, in turn."""
        return torch_settings(config, device)

    def setting_up(self) -> Context:
        """While data are read and the model is built."""
        return contextlib.nullcontext()

    def training(self) -> Context:
        """While the run trains."""
        return contextlib.nullcontext()

    def pause(self) -> None:
        """Called wherever nothing is half done: another run may go first."""

    def prepare(
        self,
        stepper: Stepper,
        evaluation: Evaluation,
        data: ImageData | TextData,
        generator: torch.Generator | None,
    ) -> tuple[Stepper, Evaluation]:
        """What takes the steps and measures the validation set; ``generator`` is the one that dropout draws from."""
        return stepper, evaluation


def execution_for(config: RunConfig, device: torch.device, processes: int) -> Execution:
    """CUDA graphs where the config wants them and they can be had: on a GPU, in one process."""
    if config.runtime.compile == "cudagraph" and device.type == "cuda" and processes == 1:
        from normmatters.lab.side_by_side.execution import GraphExecution

        return GraphExecution()
    return Execution()
