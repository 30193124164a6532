"""Copies, pickles, safetensors: every norm, weight norm and optimizer goes on as the one that it was taken from."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import normmatters as nm

RANKED = [f"{norm}BatchNorm{rank}d" for norm in ("Lp", "L1", "LInf", "TopK", "Range", "MeanOnly") for rank in (1, 2, 3)]


def batch_norm(name: str, act: str | None) -> nn.Module:
    """A batch norm of 4 channels, none of whose settings is the default, with a state that training has left."""
    options = {"act": act, "momentum": 0.3}
    if name.startswith("Lp"):
        options |= {"p": 3.0, "eps": 1e-3, "constant": 0.5}
    if name.startswith("TopK"):
        options |= {"k": 3, "constant": "paper"}
    return getattr(nm, name)(4, **options)


MODULES: dict[str, Callable[[], nn.Module]] = {
    **{f"{name} {act}": lambda name=name, act=act: batch_norm(name, act) for name in RANKED for act in (None, "relu")},
    "sync": lambda: nm.SyncLpBatchNorm(4, p="range", act="relu"),
    "lean": lambda: nm.L1BatchNorm2d(4, memory="lean"),
    "l1 layer norm": lambda: nm.L1LayerNorm(4, constant="none"),
    "top 2 layer norm": lambda: nm.LpLayerNorm(4, p=math.inf, k=2),
    "rms": lambda: nm.L1RMSNorm(4, eps=1e-3),
    "TReLU": nm.TReLU,
    "bounded": lambda: nm.bounded_weight_norm(nn.Linear(4, 4)),
    "bounded, p = 1": lambda: nm.bounded_weight_norm(nn.Linear(4, 4), p=1, rho=2.0),
    "bounded, top 2": lambda: nm.bounded_weight_norm(nn.Conv2d(4, 4, 1), p=math.inf, k=2),
    "bounded, dim = 1": lambda: nm.bounded_weight_norm(nn.Linear(4, 4), dim=1),
    "classic": lambda: nm.classic_weight_norm(nn.Linear(4, 4), p=math.inf),
    "converted": lambda: nm.convert(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), "topk", k=3),
    "folded": lambda: nm.fold(nn.Sequential(nn.Conv2d(4, 4, 1), nm.L1BatchNorm2d(4, act="relu")).eval()),
}


def input_of(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = [3, 4, 4, 4]
    if name.split()[0] in RANKED:
        shape = [3, 4, 5, 4, 4][: 2 + int(name.split()[0][-2])]
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def training_step(module: nn.Module, x: Tensor) -> dict[str, Any]:
    """Output, gradients and buffers of one step in the module's mode."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    output = module(x)
    (output * x.detach().cos()).sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"output": output.detach(), "dx": x.grad, **gradients, **{n: b.clone() for n, b in module.named_buffers()}}


def by_pickle(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def by_torch_save(module: Any) -> Any:
    """Of the test's own making, so that pickled code is no danger."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("name", MODULES)
def test_a_duplicate_is_equal_and_independent(name: str, duplicate: Callable[[Any], Any]) -> None:
    module, x = MODULES[name]().double(), input_of(name)
    training_step(module, x)  # so that the state is not the initial one
    other = duplicate(module)
    assert type(other).__name__ == type(module).__name__
    assert repr(other) == repr(module)
    assert other.training == module.training
    before = copy.deepcopy(module.state_dict())
    expected = training_step(copy.deepcopy(module), 2 * x)
    torch.testing.assert_close(training_step(other, 2 * x), expected, rtol=0, atol=0)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(other.eval()(x), duplicate(other)(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", MODULES)
def test_safetensors_round_trip(name: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    module, x = MODULES[name]().double(), input_of(name)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    training_step(module, x)
    safetensors.save_model(module, tmp_path / "model.safetensors")
    other = MODULES[name]().double().train(module.training)
    missing, unexpected = safetensors.load_model(other, tmp_path / "model.safetensors")
    assert not missing
    assert not unexpected
    torch.testing.assert_close(training_step(other, 2 * x), training_step(module, 2 * x), rtol=0, atol=0)


# Optimizers -----------------------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 5, 3, bias=False), nm.L1BatchNorm2d(5, act="relu")]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(20, 3)).double()


def groups(model: nn.Sequential, **rest: Any) -> list[dict[str, Any]]:
    first = ("0.weight", model[0].weight)
    return [{"params": [first]}, {"params": [p for p in model.named_parameters() if p[0] != "0.weight"], **rest}]


def run(model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(6, 4, 4, 4, dtype=torch.float64, generator=generator)).square().mean().backward()
        optimizer.step()


def correction(model: nn.Sequential) -> torch.optim.Optimizer:
    reference = network()
    sgd = torch.optim.SGD(groups(reference), lr=0.1, weight_decay=5e-3)
    recorder = nm.optim.NormRecorder({"0.weight": reference[0].weight}, sgd)
    for step in range(8):
        run(reference, sgd, range(step, step + 1))
        recorder.end_epoch()
    sgd, first = torch.optim.SGD(groups(model), lr=0.1), {"0.weight": model[0].weight}
    return nm.optim.StepSizeCorrection(sgd, recorder.recording(), first)


OPTIMIZERS: dict[str, Callable[[nn.Sequential], torch.optim.Optimizer]] = {
    "weight-decay-free SGD": lambda model: nm.optim.WeightDecayFreeSGD(
        groups(model, weight_decay_free=False), lr=0.1, momentum=0.9, weight_decay=5e-4
    ),
    "weight-decay-free AdamW": lambda model: nm.optim.WeightDecayFreeAdamW(
        groups(model, weight_decay_free=False), lr=1e-2, weight_decay=5e-2
    ),
    "angular SGD": lambda model: nm.optim.AngularSGD(groups(model, angular=False, lr=0.1), angle=0.05),
    "angular": lambda model: nm.optim.Angular(torch.optim.Adam(groups(model, angular=False), lr=0.01), 0.05),
    "correction": correction,
}


def by_state(model: nn.Sequential, optimizer: torch.optim.Optimizer, make: Any) -> tuple[Any, Any]:
    """Through a file that only tensors and numbers may come out of."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = network()
    other.load_state_dict(saved["model"])
    resumed = make(other)
    resumed.load_state_dict(saved["optimizer"])
    return other, resumed


def by_distributed_state(model: nn.Sequential, optimizer: torch.optim.Optimizer, make: Any) -> tuple[Any, Any]:
    """As distributed checkpoints do, which first let a fresh optimizer take a step with lr 0 to see its state."""
    saved = copy.deepcopy(get_state_dict(model, optimizer))
    other = network()
    resumed = make(other)
    set_state_dict(other, resumed, model_state_dict=saved[0], optim_state_dict=saved[1])
    return other, resumed


def test_wrappers_refuse_what_is_left_of_their_state_in_a_distributed_checkpoint() -> None:
    model = network()
    optimizer = OPTIMIZERS["angular"](model)
    run(model, optimizer, range(1))
    with pytest.raises(ValueError, match="not a state of Angular"):
        by_distributed_state(model, optimizer, OPTIMIZERS["angular"])


def test_a_flat_distributed_state_has_nothing_of_a_parameter_that_never_stepped() -> None:
    """But a place for what a fresh optimizer has of it."""
    pairs = []
    for _ in range(2):
        model = nn.ModuleDict({"net": network(), "unused": nn.Linear(3, 2, bias=False)})
        first, rest = groups(model["net"], angular=False, lr=0.1)
        first["params"] = [first["params"][0], ("unused", model["unused"].weight)]
        pairs.append((model, nm.optim.AngularSGD([first, rest], angle=0.05)))
    (model, optimizer), (other, resumed) = pairs
    run(model["net"], optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    set_state_dict(other, resumed, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
    run(other["net"], resumed, range(3, 6))
    run(model["net"], optimizer, range(3, 6))
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict", "distributed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_where_it_was(name: str, how: str) -> None:
    """A model and its optimizer, duplicated together after three steps, take the same next three."""
    if how == "distributed" and name in ("angular", "correction"):
        pytest.skip("wrappers have a key more, see above")
    model = network()
    optimizer = OPTIMIZERS[name](model)
    run(model, optimizer, range(3))
    if how in ("state_dict", "distributed"):
        other, duplicate = (by_state if how == "state_dict" else by_distributed_state)(
            model, optimizer, OPTIMIZERS[name]
        )
    else:
        other, duplicate = (copy.deepcopy if how == "deepcopy" else by_pickle)((model, optimizer))
    before = copy.deepcopy(model.state_dict())
    run(other, duplicate, range(3, 6))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    run(model, optimizer, range(3, 6))
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert not torch.equal(model[0].weight, before["0.weight"])
