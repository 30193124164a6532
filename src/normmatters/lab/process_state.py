"""What a run takes from its process: a device, its share of the batch, and torch's global switches."""

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
from normmatters.lab.data import Shard


def process_group(config: RunConfig) -> tuple[torch.device, Shard]:
    """This process's device and share of the work; the first run joins torchrun's group, which lasts for all runs."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    name = config.runtime.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"runtime.device={config.runtime.device!r}, but this torch sees no GPU")
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0")) if world > 1 else (device.index or 0)
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
    return device, Shard(rank, world)


def _cudnn_switch(name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    cudnn = torch.backends.cudnn
    return lambda: getattr(cudnn, name), lambda value: setattr(cudnn, name, value)


_deterministic: Any = torch.utils.deterministic
# Torch's global switches: how each is read and set.
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "fill": (
        lambda: _deterministic.fill_uninitialized_memory,
        lambda value: setattr(_deterministic, "fill_uninitialized_memory", value),
    ),
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "benchmark": _cudnn_switch("benchmark"),
    "allow_tf32": _cudnn_switch("allow_tf32"),
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
