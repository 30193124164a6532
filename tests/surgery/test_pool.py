"""The max pool after a norm and its ReLU: which ones run together with an L1 norm, and that nothing changes."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from normmatters.nn import LpBatchNorm2d
from normmatters.nn.sync import convert_sync_batchnorm
from normmatters.surgery import ConversionReport, convert, fold, to_torch
from support.blocks import Block
from support.models import BasicBlock, ResNet, TimmResNet

TAKEN = "relu + max pool"


def stem(pool: nn.Module | None = None, *between: nn.Module) -> nn.Sequential:
    pool = nn.MaxPool2d(3, 2, 1) if pool is None else pool
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), *between, pool)


class Stem(Block):
    """A norm, a ReLU and a pool as modules; what a subclass does in between."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.relu(self.bn(self.conv(x))))


class FunctionalReLU(Stem):
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(F.relu(self.bn(self.conv(x))))


class PoolFunction(Stem):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.relu(self.bn(self.conv(x))), 3, 2, 1)


class ReluIsUsedAgain(Stem):
    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.conv(x)))
        return self.pool(y).mean() + y


class FeaturesBeforePool(Stem):
    """As timm's ResNet.forward_intermediates: a method that forward does not call."""

    def features(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        return self.relu(x)


class PoolIsUsedAgain(Stem):
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.pool(self.relu(self.bn(self.conv(x)))))


class PoolHasTwoNames(Stem):
    def __init__(self) -> None:
        super().__init__()
        self.alias = self.pool


class TrainingOnly(Stem):
    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.conv(x)))
        return self.pool(y) if self.training else self.pool(y * 2)


class AddFirst(Stem):
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.relu(self.bn(self.conv(x)) + x))


class SharedPool(nn.Module):
    """The pool behind the stem is called by another module too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()
        self.pool = self.stem.pool

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.stem(x))


def fusion_of(model: nn.Module, norm: Any = "l1", **options: Any) -> dict[str, str]:
    """What each norm took over, once the converted model has shown itself to be the unfused one's function."""
    torch.manual_seed(0)
    model = model.double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    keys = list(model.state_dict())
    report = ConversionReport()
    unfused = convert(copy.deepcopy(model), norm, fuse=False)
    fused = convert(model, norm, report=report, **options)
    assert list(fused.state_dict()) == keys
    for twin in (fused, pickle.loads(pickle.dumps(fused)), copy.deepcopy(fused)):
        same_function(twin, copy.deepcopy(unfused))
    return {change.name: change.fused for change in report.changes}


def same_function(model: nn.Module, other: nn.Module) -> None:
    x = torch.randn(3, 3, 12, 8, dtype=torch.float64).to(memory_format=torch.channels_last)
    for training in (True, False):
        results = []
        for each in (model, other):
            data = x.clone().requires_grad_()
            each.train(training).zero_grad()
            torch.manual_seed(3)  # of a dropout
            output = each(data)
            (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
            results.append((output.detach(), data.grad, [p.grad for p in each.parameters()], each.state_dict()))
        assert_close(*results, rtol=1e-9, atol=1e-11)


# What is taken over --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "norm"),
    [
        (lambda: ResNet(BasicBlock), "bn1"),
        (TimmResNet, "bn1"),
        (Stem, "bn"),
        (FunctionalReLU, "bn"),
        (stem, "1"),
        (lambda: stem(None, nn.Identity()), "1"),
        (lambda: stem(nn.MaxPool2d((3, 3), (2, 2), (1, 1))), "1"),
        (lambda: nn.Sequential(stem(), nn.Conv2d(4, 2, 1)), "0.1"),
    ],
    ids=["torchvision", "timm", "modules", "function", "sequential", "identity", "pairs", "nested"],
)
def test_taken_over(model, norm):
    converted = model()
    fusion = fusion_of(converted)
    assert fusion[norm] == TAKEN
    assert list(fusion.values()).count(TAKEN) == 1
    assert any(type(module) is nn.MaxPool2d for module in converted.modules())
    assert pooled_calls(converted) == 1


def pooled_calls(model: Any) -> int:
    """How often a norm is asked to pool as well."""
    seen: list[bool] = []
    for norm in (module for module in model.modules() if isinstance(module, LpBatchNorm2d)):

        def forward_linked(*args: Any, forward: Any = norm.forward_linked, pooled: bool = False, **options: Any) -> Any:
            seen.append(pooled)
            return forward(*args, pooled=pooled, **options)

        norm.forward_linked = forward_linked
    model(torch.randn(2, 3, 12, 8, dtype=torch.float64))
    return sum(seen)


# What is not ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2),
        nn.MaxPool2d(3, 1, 1),
        nn.MaxPool2d((3, 2), 2, 1),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.MaxPool2d(3, 2, 1, dilation=2),
        nn.AvgPool2d(3, 2, 1),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.MaxPool2d(3, 2, 1)),
    ],
    ids=str,
)
def test_other_pools_stay(pool):
    model = stem(pool)
    assert fusion_of(model) == {"1": "relu"}
    assert pooled_calls(model) == 0


def test_a_pool_that_gives_indices_stays():
    model = convert(stem(nn.MaxPool2d(3, 2, 1, return_indices=True)), "l1")
    output, indices = model(torch.randn(2, 3, 8, 8))
    assert (output.shape, indices.dtype) == ((2, 4, 4, 4), torch.int64)


@pytest.mark.parametrize(
    ("model", "fused", "calls"),
    [
        (PoolFunction, "relu", 0),
        (ReluIsUsedAgain, "relu", 0),
        (AddFirst, "add + relu", 0),
        (PoolIsUsedAgain, TAKEN, 1),
        (PoolHasTwoNames, TAKEN, 1),
        (TrainingOnly, "relu", 0),
        (FeaturesBeforePool, TAKEN, 1),
    ],
)
def test_pools_with_another_use(model, fused, calls):
    converted = model()
    assert fusion_of(converted) == {"bn": fused}
    if isinstance(converted, FeaturesBeforePool):
        x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        assert_close(converted.features(x).shape, x.shape)
    assert pooled_calls(converted) == calls


def test_a_pool_that_another_module_calls():
    assert fusion_of(SharedPool()) == {"stem.bn": TAKEN}


@pytest.mark.parametrize("norm", ["l2", "linf", 1.5])
def test_other_norms_leave_the_pool(norm):
    assert fusion_of(stem(), norm) == {"1": "relu"}


def test_hooks_on_the_pool_keep_it():
    model = stem()
    seen: list[torch.Size] = []
    model[3].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    convert(model, "l1")
    model(torch.randn(2, 3, 8, 8))
    assert seen == [(2, 4, 8, 8)]
    hooked = Stem().double()
    hooked.pool.register_forward_pre_hook(lambda module, inputs: None)
    assert pooled_calls(convert(hooked, "l1")) == 0


def test_without_fusion_all_stay():
    assert pooled_calls(convert(stem().double(), "l1", fuse=False)) == 0


# And back ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: ResNet(BasicBlock), FunctionalReLU, stem], ids=["resnet", "block", "stem"])
def test_back(make):
    model = make().double()
    settings = [repr(module) for module in model.modules() if isinstance(module, nn.MaxPool2d)]
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    model(x)
    expected = copy.deepcopy(model).eval()(x)
    classes = [type(module) for module in model.modules()]
    back = to_torch(convert(model, "l1")).eval()
    assert [type(module) for module in back.modules()] == classes
    assert [repr(module) for module in back.modules() if isinstance(module, nn.MaxPool2d)] == settings
    assert_close(back(x), expected, rtol=1e-12, atol=1e-12)


def test_back_and_there_again():
    model = convert(to_torch(convert(stem().double(), "l1")), "l1")
    assert pooled_calls(model) == 1


def test_a_hook_on_the_norm_does_not_cost_the_pool():
    """It is put there after the conversion, and to_torch finds the pool by its placeholder all the same."""
    model = convert(stem(), "l1").eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    model[1].register_forward_hook(lambda module, inputs, output: None)
    assert_close(to_torch(model)(x), expected)


def test_a_pool_of_ones_own_is_no_concern_of_the_way_back():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    model[0].pool = nn.MaxPool2d(2)  # a name that anyone may use
    report = ConversionReport()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_torch(convert(model, "l1"), report=report)
    assert [change.name for change in report.changes] == ["1"]


def test_folded():
    model = convert(stem().double(), "l1")
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    model(x)
    expected = model.eval()(x)
    folded = fold(model)
    assert [type(module).__name__ for module in folded] == ["Conv2d", "Identity", "ReLU", "MaxPool2d"]
    assert_close(folded(x), expected, rtol=1e-10, atol=1e-12)


def test_synchronized_norms_keep_the_pool():
    model = convert(stem().double(), "l1")
    synced = convert_sync_batchnorm(copy.deepcopy(model))
    assert type(synced[1]).__name__ == "SyncLpBatchNorm"
    same_function(synced, model)
