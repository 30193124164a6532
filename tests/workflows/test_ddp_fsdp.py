"""DDP and FSDP2 in two processes, as the recipe's script starts them, against one process with the whole batch."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import normmatters as nm
from normmatters.optim import _base

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


# Layer norm makes whole weights scale invariant, not their rows; and three rows are not two equal shards.
LAYERS = [nn.Linear(4, 3, bias=False), nn.LayerNorm(3), nn.Linear(3, 5, bias=False), nn.LayerNorm(5), nn.Linear(5, 2)]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "weight-decay-free SGD": lambda free, rest: nm.optim.WeightDecayFreeSGD(
        [{"params": free}, {"params": rest, "weight_decay_free": False}], lr=0.1, momentum=0.9, weight_decay=0.02
    ),
    "captured": lambda free, rest: nm.optim.WeightDecayFreeSGD(
        [{"params": free}, {"params": rest, "weight_decay_free": False}],
        lr=0.1,
        momentum=0.9,
        weight_decay=0.02,
        capturable=True,
    ),
    "weight-decay-free AdamW": lambda free, rest: nm.optim.WeightDecayFreeAdamW(
        [{"params": free}, {"params": rest, "weight_decay_free": False}], lr=0.01, weight_decay=0.5
    ),
    "multi-tensor AdamW": lambda free, rest: nm.optim.WeightDecayFreeAdamW(
        [{"params": free}, {"params": rest, "weight_decay_free": False}], lr=0.01, weight_decay=0.5, foreach=True
    ),
    "angular SGD": lambda free, rest: nm.optim.AngularSGD(
        [{"params": free}, {"params": rest, "angular": False}], lr=0.1, weight_decay=0.02, dim=None
    ),
    "angular": lambda free, rest: nm.optim.Angular(
        torch.optim.SGD([{"params": free}, {"params": rest, "angular": False}], lr=0.1, weight_decay=0.02), dim=None
    ),
}


def trained(name: str, shard: Callable[[Any], object] = lambda _: None, rank: int = 0, world: int = 1) -> list[Tensor]:
    """The weights after three steps, whole; ``shard`` gets the model first."""
    model = copy.deepcopy(nn.Sequential(*LAYERS)).double()
    shard(model)
    free = [model[0].weight, model[2].weight]
    optimizer = OPTIMIZERS[name](free, [p for p in model.parameters() if all(p is not q for q in free)])
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(x[rank::world]).sin().mean().backward()
        optimizer.step()
    return [_base.whole(p.detach()).clone() for p in model.parameters()]


def of_two(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    LAYERS[:] = torch.load(f"{folder}/layers.pt", weights_only=False)
    mesh = init_device_mesh("cpu", (2,))
    end = trained("weight-decay-free SGD", lambda model: fully_shard(model, mesh=mesh), rank, 2)
    layer = fully_shard(copy.deepcopy(LAYERS[0]), mesh=mesh)
    layer(torch.ones(1, 4)).square().sum().backward()
    message = ""
    try:
        nm.optim.WeightDecayFreeSGD(layer.parameters(), lr=0.1, weight_decay=0.1).step()
    except ValueError as error:
        message = str(error)
    torch.save((end, message), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_shards_of_two_processes_step_as_whole_weights(tmp_path: Path) -> None:
    """Also where they are of different sizes, and where only both together are orthogonal to the gradient."""
    torch.save(LAYERS, tmp_path / "layers.pt")
    mp.spawn(of_two, (str(tmp_path),), nprocs=2)
    ends, messages = zip(*(torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)))
    for end in ends:
        torch.testing.assert_close(end, trained("weight-decay-free SGD"), rtol=1e-12, atol=1e-13)
    assert "not scale invariant" in messages[0]
    assert messages[0] == messages[1]  # with each its own part one may go on, and wait for the other for ever


@pytest.mark.parametrize("default", [{"cuda"}, {"cpu"}], ids=["foreach", "as on a GPU"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_beside_whole_weights(name: str, default: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.optim takes them. Multi-tensor operations do not mix the two, and the fused kernel has no shards."""
    monkeypatch.setattr(_base, "FUSED_ON", default)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for parts in ([0, 3], [0, 1, 2, 3, 4]):
            sharded = trained(name, lambda model, parts=parts: [fully_shard(model[i], mesh=mesh) for i in parts])
            torch.testing.assert_close(sharded, trained(name), rtol=1e-12, atol=1e-13)
    finally:
        dist.destroy_process_group()
