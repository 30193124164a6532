"""torch.func: per-sample gradients, ensembles and functional calls, through every norm and weight norm."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import normmatters as nm

LAYER_NORMS: dict[str, Callable[[], nn.Module]] = {
    "l1": lambda: nm.L1LayerNorm(6),
    "p = 3": lambda: nm.LpLayerNorm(6, p=3.0),
    "linf": lambda: nm.LpLayerNorm(6, p=math.inf),
    "top 2": lambda: nm.LpLayerNorm(6, p=math.inf, k=2),
    "range": lambda: nm.LpLayerNorm(6, p="range"),
    "rms": lambda: nm.L1RMSNorm(6),
}
BATCH_NORMS: dict[str, Callable[..., nn.Module]] = {
    "l1": nm.L1BatchNorm1d,
    "p = 3": lambda c, **options: nm.LpBatchNorm1d(c, p=3.0, **options),
    "linf": nm.LInfBatchNorm1d,
    "top 2": lambda c, **options: nm.TopKBatchNorm1d(c, k=2, **options),
    "range": nm.RangeBatchNorm1d,
    "mean": nm.MeanOnlyBatchNorm1d,
    "sync": nm.SyncLpBatchNorm,
}
WEIGHT_NORMS: dict[str, dict[str, Any]] = {
    "p = 2": {},
    "p = 1": {"p": 1},
    "p = inf": {"p": math.inf},
    "top 2": {"p": math.inf, "k": 2},
}


def network(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 2)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(5, n, dtype=torch.float64, generator=generator) for n in (4, 2))  # type: ignore[return-value]


def check_per_sample_gradients(model: nn.Module, rtol: float = 1e-11, atol: float = 1e-12) -> None:
    """vmap(grad) gives every sample's own gradient, as a loop over samples does."""
    x, y = (tensor.to(next(model.parameters())) for tensor in data())
    buffers = dict(model.named_buffers())

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(model, (parameters, buffers), (x[None],))[0] - y).square().sum()

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    for i in range(len(x)):
        model.zero_grad()
        (model(x[i : i + 1])[0] - y[i]).square().sum().backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        one = {name: gradient[i] for name, gradient in gradients.items()}
        torch.testing.assert_close(one, expected, rtol=rtol, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", LAYER_NORMS)
def test_per_sample_gradients_on_a_gpu(norm: str) -> None:
    """The transform takes the equation, the loop the kernel: they differ by rounding."""
    model: Any = network(LAYER_NORMS[norm]()).to("cuda", torch.float32)
    nm.bounded_weight_norm(model[0])
    check_per_sample_gradients(model, 1e-3, 1e-4)


@pytest.mark.parametrize("norm", LAYER_NORMS)
def test_per_sample_gradients_through_layer_norm(norm: str) -> None:
    check_per_sample_gradients(network(LAYER_NORMS[norm]()))


@pytest.mark.parametrize("act", [None, "relu"])
@pytest.mark.parametrize("norm", BATCH_NORMS)
def test_per_sample_gradients_through_batch_norm_in_evaluation(norm: str, act: str | None) -> None:
    model = network(BATCH_NORMS[norm](6, act=act))
    model(data()[0] + 1)
    check_per_sample_gradients(model.eval())


@pytest.mark.parametrize("make", [nm.bounded_weight_norm, nm.classic_weight_norm])
@pytest.mark.parametrize("options", WEIGHT_NORMS)
def test_per_sample_gradients_through_weight_norm(make: Any, options: str) -> None:
    model: Any = network(nn.Tanh())
    for layer in (model[0], model[2]):
        make(layer, **WEIGHT_NORMS[options])
    check_per_sample_gradients(model)


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("norm", BATCH_NORMS)
def test_an_ensemble_trains_as_its_members_do(norm: str, tracked: bool) -> None:
    """Outputs, gradients and running statistics of three models at once, in training mode."""
    x, y = data()
    models = [network(BATCH_NORMS[norm](6, track_running_stats=tracked)) for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    parameters = {name: parameter.detach() for name, parameter in parameters.items()}
    skeleton = copy.deepcopy(models[0]).to("meta")

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return (functional_call(skeleton, (parameters, buffers), (x,)) - y).square().sum()

    gradients = vmap(grad(loss))(parameters, buffers)
    for i, model in enumerate(models):
        (model(x) - y).square().sum().backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        one = {name: gradient[i] for name, gradient in gradients.items()}
        torch.testing.assert_close(one, expected, rtol=1e-11, atol=1e-11)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[name][i], buffer, rtol=1e-12, atol=1e-12)


def test_functional_call_leaves_the_module_alone() -> None:
    model = nm.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    state = {name: value.clone() for name, value in other.state_dict().items()}
    torch.testing.assert_close(functional_call(model, state, (x,)), other(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["1.running_var"], other[1].running_var, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
