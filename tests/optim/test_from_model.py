"""Optimizers made from a model and a batch: same path as the ordinary optimizer, with the groups found by a test."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normmatters.optim import (
    Angular,
    AngularSGD,
    CorrectedWeightDecay,
    WeightDecayFreeAdamW,
    WeightDecayFreeSGD,
    channel_norms,
)

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
ADAMW = {"lr": 3e-3, "weight_decay": 0.3}


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4, eps=1e-12),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 5, 2, bias=False),
        nn.BatchNorm2d(5, eps=1e-12),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(125, 3),
    )
    return nn.Sequential(*layers).double()


INVARIANT = ["0.weight", "3.weight"]
BATCH = torch.randn(16, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 8) -> Tensor:
    for t in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(BATCH), torch.arange(16).roll(t) % 3).backward()
        optimizer.step()
    return model(BATCH).detach()


def names(group: dict[str, Any]) -> list[str]:
    return group["param_names"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ours", "torchs", "options"),
    [(WeightDecayFreeSGD, torch.optim.SGD, SGD), (WeightDecayFreeAdamW, torch.optim.AdamW, ADAMW)],
)
def test_weight_decay_free_models_are_those_of_weight_decay(ours: Any, torchs: Any, options: dict[str, Any]) -> None:
    model, other, without = (convnet() for _ in range(3))
    output = train(model, optimizer := ours.from_model(model, BATCH, **options))
    torch.testing.assert_close(output, train(other, torchs(other.parameters(), **options)), rtol=1e-8, atol=1e-10)
    # Weight decay has an effect in these steps, so the agreement means something.
    plain = train(without, torchs(without.parameters(), **options | {"weight_decay": 0.0}))
    assert (output - plain).abs().max() > 1e-3
    free, ordinary = optimizer.param_groups
    assert (names(free), free["weight_decay_free"]) == (INVARIANT, True)
    assert not ordinary["weight_decay_free"]
    assert {*names(free), *names(ordinary)} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("kind", [WeightDecayFreeSGD, WeightDecayFreeAdamW, AngularSGD, Angular, CorrectedWeightDecay])
def test_vectors_may_have_no_decay(kind: Any) -> None:
    optimizer = kind.from_model(convnet(), BATCH, lr=0.01, weight_decay=0.02, decay_vectors=False)
    *_, weights, vectors = optimizer.param_groups
    assert (names(weights), weights["weight_decay"]) == (["7.weight"], 0.02)
    assert names(vectors) == ["1.weight", "1.bias", "4.weight", "4.bias", "7.bias"]
    assert vectors["weight_decay"] == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_angular_optimizers_keep_the_norms_of_invariant_weights_alone(wrapped: bool) -> None:
    model = convnet()
    before = copy.deepcopy(model)
    make: Any = Angular if wrapped else AngularSGD
    optimizer = make.from_model(model, BATCH, lr=0.05, weight_decay=0.01)
    assert [(names(group), group["dim"]) for group in optimizer.param_groups if group["angular"]] == [
        (["0.weight"], 0),
        (["3.weight"], 1),  # a transposed convolution
    ]
    train(model, optimizer)
    for index, dim in ((0, 0), (3, 1)):
        now, then = model[index].weight.detach(), before[index].weight.detach()  # type: ignore[operator]
        torch.testing.assert_close(channel_norms(now, dim), channel_norms(then, dim))
        assert not torch.equal(now, then)
    assert not torch.allclose(model[7].weight.norm(), before[7].weight.norm())  # type: ignore[operator]


def test_an_angle_needs_a_learning_rate_for_the_others() -> None:
    with pytest.raises(ValueError, match="other_lr"):
        AngularSGD.from_model(convnet(), BATCH, angle=0.01)
    optimizer = AngularSGD.from_model(convnet(), BATCH, angle=0.01, other_lr=0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01, 0.2]
    assert [group["lr"] for group in Angular.from_model(convnet(), BATCH, angle=0.01, lr=0.3).param_groups] == [0.3] * 3


@pytest.mark.parametrize("kind", [WeightDecayFreeSGD, AngularSGD, CorrectedWeightDecay])
def test_a_model_without_norms_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="model has no scale-invariant weights"):
        kind.from_model(nn.Linear(3, 4), torch.randn(8, 3), lr=0.1, weight_decay=0.01)
