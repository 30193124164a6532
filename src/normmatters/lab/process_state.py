"""What a run takes from its process: a device, its share of the batch, random seeds and torch's global switches."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
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


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    torch.manual_seed(seed)


@contextlib.contextmanager
def torch_settings(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Threads and torch's global switches for this run; the caller's, and its random state, are put back at the end."""
    before, random_state = _current(device.type == "cuda"), checkpoint.random_state()
    _apply(wanted_settings(config, device))
    try:
        yield
    finally:
        _apply(before)
        checkpoint.set_random_state(random_state)


def wanted_settings(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """What :func:`torch_settings` sets."""
    wanted: dict[str, Any] = {"threads": config.runtime.threads or torch.get_num_threads()}
    if device.type == "cuda":
        tf32 = config.precision.tf32
        return wanted | {"benchmark": True, "matmul": "high" if tf32 else "highest", "allow_tf32": tf32}
    # filling uninitialized memory is a test's aid, and slow
    return wanted | {"deterministic": config.runtime.deterministic, "fill": False}


def _current(cuda: bool) -> dict[str, Any]:
    switches: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "matmul": torch.get_float32_matmul_precision(),
    }
    if cuda:  # a CPU run leaves cuDNN's switches alone: a program may have locked them
        switches |= {"benchmark": torch.backends.cudnn.benchmark, "allow_tf32": torch.backends.cudnn.allow_tf32}
    return switches


def _apply(switches: dict[str, Any]) -> None:
    torch.set_num_threads(switches["threads"])
    if "deterministic" in switches:
        torch.use_deterministic_algorithms(switches["deterministic"])
        torch.utils.deterministic.fill_uninitialized_memory = switches["fill"]  # type: ignore[attr-defined]
    if "matmul" in switches:
        torch.set_float32_matmul_precision(switches["matmul"])
    if "benchmark" in switches:
        torch.backends.cudnn.benchmark = switches["benchmark"]
        torch.backends.cudnn.allow_tf32 = switches["allow_tf32"]


@contextlib.contextmanager
def first_process_first(shard: Shard) -> Iterator[None]:
    """The first process does what is inside before the others."""
    if shard.rank > 0:
        dist.barrier()
    yield
    if shard.world > 1 and shard.rank == 0:
        dist.barrier()
