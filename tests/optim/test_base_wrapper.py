"""What every optimizer here owes to torch.optim: copies, and the hooks of saving and loading."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from normmatters.optim import (
    Angular,
    AngularSGD,
    NormRecorder,
    StepSizeCorrection,
    WeightDecayFreeAdamW,
    WeightDecayFreeSGD,
    scale_invariant_parameters,
)
from support.optim_nets import batch, convnet, groups, train


def angular(model: nn.Module) -> Optimizer:
    invariant, rest = groups(model, 1e-3)
    return Angular(SGD([invariant, rest | {"angular": False}], lr=0.1, momentum=0.9))


def corrected(model: nn.Module) -> Optimizer:
    twin = copy.deepcopy(model)
    reference = SGD(groups(twin, 1e-3), lr=0.1)
    recorder = NormRecorder(scale_invariant_parameters(twin, batch(0)[0]), reference)
    train(twin, reference, range(8))
    return StepSizeCorrection(SGD(groups(model, 0.0), lr=0.1), recorder.recording(), form="exact")


@pytest.mark.parametrize("make", [angular, corrected])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_steps_for_itself(make: Callable[[nn.Module], Optimizer], how: Callable[[Any], Any]) -> None:
    """Schedulers put a `step` of their own into the optimizer, and recorders hooks: both belong to the original."""
    model = convnet()
    optimizer = make(model)
    MultiStepLR(optimizer, [1])
    recorder = NormRecorder(scale_invariant_parameters(model, batch(0)[0]), optimizer)
    train(model, optimizer, range(2))
    twin, its_optimizer = how((model, optimizer))
    before = copy.deepcopy(model.state_dict())
    train(twin, its_optimizer, range(2, 4))
    assert recorder.steps == 2
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    train(model, optimizer, range(2, 4))
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in twin.state_dict().items())


@pytest.mark.parametrize("make", [angular, corrected])
def test_hooks_of_saving_and_loading_are_called(make: Callable[[nn.Module], Optimizer]) -> None:
    optimizer = make(convnet())
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda one: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda one, state: state | {"mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda one, state: calls.append(f"loading {state['mine']}"))
    optimizer.register_load_state_dict_pre_hook(lambda one, state: {k: v for k, v in state.items() if k != "mine"})
    optimizer.register_load_state_dict_post_hook(lambda one: calls.append("loaded"))
    state = optimizer.state_dict()
    assert state["mine"] == 1
    optimizer.load_state_dict(state)
    assert calls == ["before saving", "loading 1", "loaded"]


def by_name(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A pre-hook as torch's documentation advises, for a model whose parameters come in another order."""
    adapted = optimizer.state_dict()
    ids = {n: i for group in state["param_groups"] for n, i in zip(group["param_names"], group["params"])}
    for group in adapted["param_groups"]:
        for name, i in zip(group["param_names"], group["params"]):
            adapted["state"][i] = state["state"][ids[name]]
    return adapted


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: WeightDecayFreeSGD(groups, lr=0.1, momentum=0.9),
        lambda groups: WeightDecayFreeSGD(groups, lr=0.1, momentum=0.9, capturable=True),
        lambda groups: WeightDecayFreeAdamW(groups, lr=0.01),
        lambda groups: AngularSGD(groups, lr=0.1),
    ],
)
def test_a_hook_may_bring_the_state_into_another_order(make: Callable[[list[dict[str, Any]]], Optimizer]) -> None:
    def optimizer_of(model: nn.Module, order: int) -> Optimizer:
        invariant, rest = groups(model, 2e-2)
        own = {"angular": False, "lr": 0.1, "weight_decay_free": False}
        apart = [{"params": [pair], "weight_decay": 2e-2} for pair in invariant["params"]]  # each with its own α
        return make([*apart[::order], rest | own])

    model = convnet()
    optimizer = optimizer_of(model, 1)
    train(model, optimizer, range(3))
    model[8].requires_grad_(False)
    train(model, optimizer, range(3, 6))
    model[8].requires_grad_(True)
    resumed = copy.deepcopy(model)
    again = optimizer_of(resumed, -1)
    seen: list[Any] = []
    again.register_load_state_dict_pre_hook(by_name)
    again.register_load_state_dict_post_hook(lambda one: seen.append(copy.copy(one.state[resumed[8].weight])))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen[0].keys() == optimizer.state[model[8].weight].keys()
    for name in seen[0].keys() & {"alpha", "norm"}:
        assert torch.equal(torch.as_tensor(seen[0][name]), torch.as_tensor(optimizer.state[model[8].weight][name]))
    train(model, optimizer, range(6, 9))
    train(resumed, again, range(6, 9))
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in resumed.state_dict().items())
