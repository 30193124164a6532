"""Normalized weights computed together over whole training steps: what one leaves behind, checkpoints, CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from normmatters.weight_norm import apply_weight_norm
from support.weight_norm_cases import DEVICE

BATCH = torch.linspace(-2, 2, 2 * 3 * 36).sin().view(2, 3, 6, 6).to(DEVICE)


class Net(nn.Module):
    """A convnet with a part that may be checkpointed, and may be used a second time outside the checkpoint."""

    def __init__(self, reentrant: bool | None = None, *, twice: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Tanh(), nn.Conv2d(8, 8, 1))
        self.head = nn.Linear(8 * 16, 5)
        self.reentrant, self.twice = reentrant, twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        x = self.body(x) if self.twice else x
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


def net(
    kind: Literal["bounded", "classic"], reentrant: bool | None = None, *, fused: bool = True, twice: bool = False
) -> Net:
    torch.manual_seed(1)
    model = Net(reentrant, twice=twice).to(DEVICE)
    apply_weight_norm(model, kind=kind, fused=fused)
    return model


def loss_of(call: Callable[[Tensor], Tensor], autocast: torch.dtype | None = None) -> Tensor:
    # Without its cache, which would keep casts beyond a step that is captured.
    with torch.autocast(DEVICE, autocast or torch.bfloat16, enabled=autocast is not None, cache_enabled=False):
        return call(BATCH).float().square().sum()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len([*model.parameters()])
    return found


def same(ours: list[Tensor], reference: list[Tensor], bound: float = 1e-5) -> None:
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=bound * max(float(b.abs().max()), 1e-3))


# What is left of a step -----------------------------------------------------------------------------------------------


def collectors(model: nn.Module) -> list:
    """The nodes that collect the parameters' gradients: those of a graph that is still there, else new ones."""
    return [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nothing_of_a_step_outlives_it(compiled, kind, weight_norm_calls):
    """Nodes that collect gradients belong to a stream: kept ones would bind every step to the first one's."""
    torch._dynamo.reset()
    model = net(kind)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    # An eager step is among them, as there is one where what is compiled is checked.
    for one in (call, model, call, call):
        loss = loss_of(one)
        for node in collectors(model):
            node.metadata["step"] = True
        assert all("step" in node.metadata for node in collectors(model))  # the graph holds them
        loss.backward()
        model.zero_grad()
        del loss, node
        assert not any("step" in node.metadata for node in collectors(model))
    assert weight_norm_calls == ["forward", "backward"] * (1 if compiled else 4)


def test_nothing_of_a_pass_without_a_backward_pass_is_left(kind, weight_norm_calls):
    model = net(kind)
    gc.disable()  # no cycle keeps it either
    try:
        y = model(BATCH)
        for node in collectors(model):
            node.metadata["pass"] = True
        del y, node
        assert not any("pass" in node.metadata for node in collectors(model))
    finally:
        gc.enable()


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [None, torch.float16])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, autocast, kind, weight_norm_calls):
    """What runs again in the backward pass computes its weights again, and saves what it saved before."""
    model, plain = net(kind, reentrant), net(kind, fused=False)
    losses = [loss_of(model, autocast), loss_of(plain, autocast)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6 if autocast is None else 1e-2, atol=0)
    same(gradients(model), gradients(plain), 1e-5 if autocast is None else 2e-2)
    # The two layers of the part; only a reentrant one has a backward pass of its own.
    assert weight_norm_calls == ["forward"] * 3 + ["backward"] * (3 if reentrant else 1)


@pytest.mark.parametrize("autocast", [None, torch.float16])
def test_a_frozen_part_is_checkpointed(autocast, kind, weight_norm_calls):
    model, plain = net(kind, False), net(kind, fused=False)
    for one in (model, plain):
        one.body.requires_grad_(False)
        loss_of(one, autocast).backward()
    found = [[p.grad for p in one.parameters() if p.requires_grad] for one in (model, plain)]
    same(*found, 1e-5 if autocast is None else 2e-2)
    assert weight_norm_calls == ["forward", "forward", "backward"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_used_in_a_checkpoint_and_outside(reentrant, kind, weight_norm_calls):
    model, plain = net(kind, reentrant, twice=True), net(kind, fused=False, twice=True)
    for one in (model, plain):
        loss_of(one).backward()
    same(gradients(model), gradients(plain))


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
def test_checkpointed_passes_side_by_side(order, kind, weight_norm_calls):
    """Whichever graph goes first, the other's part still runs again as it ran; nor does looking at a weight matter."""
    model, plain = net(kind, False), net(kind, fused=False)
    for one in (model, plain):
        losses = [loss_of(one), 3 * loss_of(lambda x, one=one: one(-x))]
        assert one.body[0].weight.requires_grad
        for loss in losses[::order]:
            loss.backward()
    same(gradients(model), gradients(plain))
    assert weight_norm_calls == ["forward"] * 2 + ["forward", "forward", "backward"] * 2


def test_a_checkpointed_part_called_alone(kind, weight_norm_calls):
    """It computed its own weights, and does so again, also after a pass of the model."""
    model, plain = net(kind), net(kind, fused=False)
    x = torch.ones(2, 8, 4, 4, device=DEVICE)
    for one in (model, plain):
        loss_of(one).backward()
        with torch.no_grad():
            for p in one.parameters():
                p.mul_(2)
        checkpoint(one.body, x, use_reentrant=False).square().sum().backward()
    same(gradients(model), gradients(plain))
    assert weight_norm_calls == ["forward", "backward"]


# CUDA graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_captured_after_steps_on_the_default_stream(compiled, autocast, kind, weight_norm_calls):
    """As the benchmark does it: a check of what is compiled against what is not, steps, and then the capture."""
    torch._dynamo.reset()
    models = net(kind), net(kind)
    functions = [torch.compile(m, fullgraph=True, dynamic=False) if compiled else m for m in models]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in models]

    def update(i: int) -> Tensor:
        loss = loss_of(functions[i], autocast)
        loss.backward()
        optimizers[i].step()
        optimizers[i].zero_grad(set_to_none=True)
        return loss.detach()

    for i, model in enumerate(models):
        loss_of(model, autocast).backward()  # not compiled, whatever the steps are
        model.zero_grad(set_to_none=True)
        for _ in range(3):
            update(i)
    weight_norm_calls.clear()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        update(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = update(0)
        assert bool(weight_norm_calls) == (not compiled)
        weight_norm_calls.clear()
        losses = []
        for _ in range(4):
            graph.replay()
            losses.append(captured.clone())
        assert not weight_norm_calls
    torch.cuda.synchronize()
    update(1)
    expected = [update(1) for _ in range(4)]
    bound = 1e-4 if autocast is None else 2e-2
    same(losses, expected, bound)
    same([p.detach() for p in models[0].parameters()], [p.detach() for p in models[1].parameters()], bound)
