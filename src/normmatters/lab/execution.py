"""How a run uses its process: a device, a share of the batch, torch's global switches, and what takes the steps.

Here a run has the process for itself. :mod:`~normmatters.lab.side_by_side` has runs that share one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from normmatters.lab import checkpoint
from normmatters.lab.config import RunConfig
from normmatters.lab.data import ImageData, Shard, TextData
from normmatters.lab.steps import Evaluation, Stepper

Context = contextlib.AbstractContextManager[None]


def find_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is the first GPU where there is one. ValueError if it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: this torch sees no GPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r}: there are {torch.cuda.device_count()} GPUs")
    return device


def process_group(config: RunConfig) -> tuple[torch.device, Shard]:
    """This process's device and share of the work; the first run joins torchrun's group, which lasts for all runs."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = find_device(config.runtime.device)
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0")) if world > 1 else (device.index or 0)
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
    return device, Shard(rank, world)


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# Torch's global switches: how each is read and set.
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "fill": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "allow_tf32": _attribute(torch.backends.cudnn, "allow_tf32"),
}


def wanted_settings(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """The switches that this run sets. A CPU run leaves cuDNN's alone: a program may have locked them."""
    wanted: dict[str, Any] = {"threads": config.runtime.threads or torch.get_num_threads()}
    if device.type == "cuda":
        tf32 = config.precision.tf32
        return wanted | {"benchmark": True, "matmul": "high" if tf32 else "highest", "allow_tf32": tf32}
    # filling uninitialized memory is a test's aid, and slow
    return wanted | {"deterministic": config.runtime.deterministic, "fill": False}


@contextlib.contextmanager
def torch_settings(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Set torch's switches for this run. The caller's, and its random state, are put back at the end."""
    wanted, random_state = wanted_settings(config, device), checkpoint.random_state()
    before = {name: _SWITCHES[name][0]() for name in wanted}
    try:
        for name, value in wanted.items():
            _SWITCHES[name][1](value)
        yield
    finally:
        for name, value in before.items():
            _SWITCHES[name][1](value)
        checkpoint.set_random_state(random_state)


@contextlib.contextmanager
def first_process_first(shard: Shard) -> Iterator[None]:
    """The first process does what is inside before the others."""
    if shard.rank > 0:
        dist.barrier()
    yield
    if shard.world > 1 and shard.rank == 0:
        dist.barrier()


def from_first_process(value: Any, shard: Shard) -> Any:
    """The first process's value, in all of them."""
    if shard.world == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


class Execution:
    """A run that has its process to itself, and waits for no other run. Each run has an object of its own."""

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
        """Called between pieces of work: another run may go first."""

    def prepare(
        self, stepper: Stepper, evaluation: Evaluation, data: ImageData | TextData, generator: torch.Generator | None
    ) -> tuple[Stepper, Evaluation]:
        """What takes the steps and measures the validation set; ``generator`` is the one that dropout draws from."""
        return stepper, evaluation


def execution_for(config: RunConfig, device: torch.device, processes: int) -> Execution:
    """CUDA graphs where the config wants them and they can be had: on a GPU, in one process."""
    if config.runtime.compile == "cudagraph" and device.type == "cuda" and processes == 1:
        from normmatters.lab.side_by_side.execution import GraphExecution

        return GraphExecution()
    return Execution()
