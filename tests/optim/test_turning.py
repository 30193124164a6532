"""The norms that angular optimizers keep: of sharded weights, and across a change of precision."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from normmatters.optim import Angular, AngularSGD, channel_norms, multi_tensor
from quick_interpreter import quicken


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("kind", ["own", "sgd"])
def test_sharded_weights_turn_as_whole_ones(kind, dim):
    """fully_shard's DTensors know few operations; one process has them all."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        whole = nn.Linear(5, 4, dtype=torch.float64)
        shards = fully_shard(copy.deepcopy(whole), mesh=init_device_mesh("cpu", (1,)))
        for layer in (whole, shards):
            groups = [{"params": [layer.weight], "dim": dim}, {"params": [layer.bias], "angular": False}]
            recipe = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
            optimizer = AngularSGD(groups, **recipe) if kind == "own" else Angular(torch.optim.SGD(groups, **recipe))
            for t in range(3):
                optimizer.zero_grad()
                layer(torch.eye(5, dtype=torch.float64)).sub(t).square().sum().backward()
                optimizer.step()
        assert torch.equal(shards.weight.full_tensor(), whole.weight)
        with torch.no_grad():
            shards.weight.mul_(0)
        with pytest.raises(ValueError, match="neuron 0 has norm 0"):
            AngularSGD([{"params": [shards.weight], "dim": dim}], **recipe).step()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["load", "convert"])
@pytest.mark.parametrize("wrap", [False, True])
def test_norms_of_a_double_run_are_not_read_as_floats(wrap, how, monkeypatch):
    """The kernel takes float32 norms by their address: those of a run that was in float64 must be converted."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter takes the place of a GPU")
    quicken()

    def make(p: Tensor) -> torch.optim.Optimizer:
        if wrap:
            return Angular(torch.optim.SGD([p], lr=0.1), angle=0.1)
        return AngularSGD([p], angle=0.1, momentum=0.0)

    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    optimizer = make(weight)
    weight.grad = torch.randn(4, 6, dtype=torch.float64)
    optimizer.step()
    norms = channel_norms(weight.detach()).float()
    monkeypatch.setattr(multi_tensor, "_LAUNCH_ON", ("cpu",))
    if how == "load":
        state, weight = optimizer.state_dict(), nn.Parameter(weight.detach().float())
        optimizer = make(weight)
        optimizer.load_state_dict(state)
    else:
        weight.grad, weight.data = None, weight.data.float()
    weight.grad = torch.randn(4, 6)
    optimizer.step()
    torch.testing.assert_close(channel_norms(weight.detach()), norms, rtol=1e-6, atol=0)
