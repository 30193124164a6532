"""What a run takes from its process: a device, its share of the batch, random seeds and torch's global switches."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
from collections.abc import Iterator

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


@contextlib.contextmanager
def settings(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Seeds, threads and torch's global switches for this run; the caller's are put back, so runs can follow runs."""
    cuda = device.type == "cuda"
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    matmul = torch.get_float32_matmul_precision()
    cudnn = (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32)
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    states = checkpoint.random_state()
    random.seed(config.seed)
    np.random.seed(config.seed % (1 << 32))  # noqa: NPY002
    torch.manual_seed(config.seed)
    if config.runtime.threads is not None:
        torch.set_num_threads(config.runtime.threads)
    if not cuda:
        torch.use_deterministic_algorithms(config.runtime.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a test's aid, slow
    else:
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high" if config.precision.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.precision.tf32
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(matmul)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        if cuda:  # a CPU run leaves cuDNN's switches alone: a program may have locked them
            torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = cudnn
        checkpoint.set_random_state(states)


@contextlib.contextmanager
def first_process_first(shard: Shard) -> Iterator[None]:
    if shard.rank > 0:
        dist.barrier()
    yield
    if shard.world > 1 and shard.rank == 0:
        dist.barrier()
