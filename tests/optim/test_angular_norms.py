"""The norms that angular optimizers keep: of sharded and pruned weights, and across a change of precision."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune

from normmatters.optim import Angular, AngularSGD, channel_norms, channels
from support.quick_interpreter import quicken


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
        # Shards take the plain path and whole weights the native kernels, which sum in another order.
        torch.testing.assert_close(shards.weight.full_tensor(), whole.weight, rtol=1e-13, atol=1e-15)
        with torch.no_grad():
            shards.weight.mul_(0)
        with pytest.raises(ValueError, match="neuron 0 has norm 0"):
            AngularSGD([{"params": [shards.weight], "dim": dim}], **recipe).step()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("kind", ["own", "nesterov", "sgd", "adamw"])
def test_a_pruned_neuron_stays_zero(kind, kernel, monkeypatch):
    """It has momentum and a gradient, but no direction; the others turn, and with numbers again so does it."""
    if kernel:
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter takes the place of a GPU")
        quicken()
    monkeypatch.setattr(channels, "BACKENDS", {"cpu": "normmatters.kernels.triton.rows"} if kernel else {})
    torch.manual_seed(0)
    weights = [nn.Parameter(w) for w in torch.randn(2, 4, 6)]
    norms = channel_norms(weights[0].detach())
    if kind in ("own", "nesterov"):
        optimizer = AngularSGD(weights, angle=0.1, momentum=0.9, nesterov=kind == "nesterov")
    else:
        inner = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
        optimizer = Angular(inner(weights, lr=0.1), angle=0.1)
    for step in range(5):
        if step == 1:
            with torch.no_grad():
                weights[0][2] = 0
        if step == 4:
            with torch.no_grad():
                weights[0][2] = torch.arange(1.0, 7.0)
        before = weights[0].detach().clone()
        for w in weights:
            w.grad = torch.randn_like(w)
        optimizer.step()
        pruned = step in (1, 2, 3)
        assert bool((weights[0][2] == 0).all()) == pruned
        kept = torch.tensor([0, 1, 3] if pruned else [0, 1, 2, 3])
        after = weights[0].detach()
        torch.testing.assert_close(channel_norms(after)[kept], norms[kept])
        turned = torch.nn.functional.cosine_similarity(before, after).acos()[kept]
        torch.testing.assert_close(turned, torch.full_like(turned, 0.1), rtol=1e-4, atol=0)


def test_pruned_by_a_mask_and_then_for_good():
    """What is behind the mask has a direction; when it is removed, zeros take its place."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    prune.ln_structured(layer, "weight", amount=2, n=2, dim=0)
    optimizer = AngularSGD([layer.weight_orig], angle=0.1)
    norms = channel_norms(layer.weight.detach())
    assert norms.count_nonzero() == 2
    for step in range(4):
        if step == 2:
            prune.remove(layer, "weight")
        optimizer.zero_grad()
        layer(torch.eye(6)).square().sum().backward()
        optimizer.step()
        layer(torch.eye(6))  # the mask's hook computes the weight
        torch.testing.assert_close(channel_norms(layer.weight.detach()), norms)


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
    monkeypatch.setitem(channels.BACKENDS, "cpu", "normmatters.kernels.triton.rows")
    if how == "load":
        state, weight = optimizer.state_dict(), nn.Parameter(weight.detach().float())
        optimizer = make(weight)
        optimizer.load_state_dict(state)
    else:
        weight.grad, weight.data = None, weight.data.float()
    weight.grad = torch.randn(4, 6)
    optimizer.step()
    torch.testing.assert_close(channel_norms(weight.detach()), norms, rtol=1e-6, atol=0)
