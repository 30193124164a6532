"""What a run takes from its process: a device, its share of the batch, random seeds and torch's global switches."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import threading
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


# Runs may share a process, a thread each. One at a time is set up: a model is initialised from torch's own random
# state, and a checkpoint sets it. After that none draws from it: dropout has a generator of its run's own.
# A run takes this before it enters the gate (``gate.py``), never inside it.
setting_up = threading.Lock()


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    torch.manual_seed(seed)


_switches_lock = threading.Lock()
_in_use: list[dict[str, Any]] = []  # the switches of every run that is going on in this process
_before: dict[str, Any] = {}  # the caller's


@contextlib.contextmanager
def settings(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Threads and torch's global switches for this run; the caller's, and its random state, are put back at the end.

    Of runs that share the process the first sets and the last puts back, so all must want the same.
    """
    wanted = _wanted(config, device)
    with _switches_lock:
        if _in_use and wanted != _in_use[0]:
            raise ValueError(f"runs in one process must agree on {wanted}, another one has {_in_use[0]}")
        if not _in_use:
            _before.update(switches=_current(device.type == "cuda"), random=checkpoint.random_state())
            _apply(wanted)
        _in_use.append(wanted)
    try:
        yield
    finally:
        with _switches_lock:
            _in_use.remove(wanted)
            if not _in_use:
                _apply(_before.pop("switches"))
                checkpoint.set_random_state(_before.pop("random"))


def _wanted(config: RunConfig, device: torch.device) -> dict[str, Any]:
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
    if shard.rank > 0:
        dist.barrier()
    yield
    if shard.world > 1 and shard.rank == 0:
        dist.barrier()
