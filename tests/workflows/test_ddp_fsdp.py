"""DDP and FSDP2 in two processes, as the recipe's script starts them, against one process with the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import normmatters as nm

SCRIPT = Path(__file__).parents[2] / "examples" / "distributed" / "train.py"


def test_two_processes_are_one_with_the_whole_batch(tmp_path: Path) -> None:
    """L1 batch norm over both, bounded weight norm, weight-decay-free SGD with momentum; four steps in float64."""
    out = tmp_path / "states.pt"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(SCRIPT), str(out)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    states: dict[str, dict[str, Tensor]] = torch.load(out, weights_only=True)

    one = states["one process"]
    norms = one.pop("norms")
    assert set(one) >= {"0.weight", "1.running_var", "3.parametrizations.weight.original", "7.bias"}
    torch.testing.assert_close(states["ddp"].pop("norms"), norms, rtol=1e-6, atol=0)
    for strategy in ("ddp", "fsdp"):
        torch.testing.assert_close(states[strategy], one, rtol=1e-12, atol=1e-13)

    # The reference did learn, and the recorder saw it: before the first of four steps, and after each.
    torch.manual_seed(0)
    initial = nn.Conv2d(1, 8, 3, bias=False, dtype=torch.float64).weight.detach()
    assert (one["0.weight"] - initial).norm() > 0.05 * initial.norm()
    assert one["1.num_batches_tracked"] == 4
    assert norms.shape == (5, 8)
    ends = torch.stack([weight.flatten(1).norm(dim=1) for weight in (initial, one["0.weight"])])
    torch.testing.assert_close(norms[[0, -1]], ends.to(norms.dtype), rtol=1e-6, atol=0)


def test_a_recorder_refuses_shards() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(4, 3), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"'weight' must be a whole weight, got shards"):
            nm.optim.NormRecorder(model)
    finally:
        dist.destroy_process_group()
