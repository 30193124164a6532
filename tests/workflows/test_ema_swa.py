"""Averages of models (EMA, SWA) and the statistics that they need."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import normmatters as nm


def batches(count: int = 3, channels: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, channels, 6, 6, dtype=torch.float64, generator=generator) + i for i in range(count)]


def network() -> nn.Sequential:
    """Converted and fused, with bounded weight norm: all that averaging must cope with."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    model: Any = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 2)).double()
    nm.bounded_weight_norm(model[0])
    return nm.convert(model)


@pytest.mark.parametrize("count", [1, 4])
def test_l2_equals_torchs_update_bn(count: int) -> None:
    theirs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3))
    theirs = theirs.double().eval()
    ours = nm.convert(copy.deepcopy(theirs), "l2")
    swa_utils.update_bn(batches(count), theirs)
    nm.update_bn([(x, "label") for x in batches(count)], ours)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-12)
    for module in ours.modules():
        assert not module.training
        assert getattr(module, "momentum", 0.1) == 0.1


def test_statistics_are_the_mean_over_the_batches_for_both_kinds_of_norm() -> None:
    model = nn.ModuleList([nm.L1BatchNorm2d(3), nn.BatchNorm2d(3), nm.MeanOnlyBatchNorm2d(3)]).double()
    model.forward = lambda x: [norm(x) for norm in model]  # type: ignore[method-assign]
    for norm in model:
        norm(torch.randn(4, 3, 6, 6, dtype=torch.float64))  # to be forgotten
    nm.update_bn(batches(), model)
    rows = [x.movedim(1, -1).reshape(-1, 3) for x in batches()]
    mean = torch.stack([row.mean(0) for row in rows]).mean(0)
    n = len(rows[0])
    squared = [(math.sqrt(math.pi / 2) * (row - row.mean(0)).abs().mean(0)).square() * n / (n - 1) for row in rows]
    for norm in model:
        torch.testing.assert_close(norm.running_mean, mean, rtol=1e-12, atol=1e-12)
        assert norm.num_batches_tracked == 3
    torch.testing.assert_close(model[0].running_var, torch.stack(squared).mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model[1].running_var, torch.stack([row.var(0) for row in rows]).mean(0))
    assert (model[2].running_var == 1).all()


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_an_averaged_model(kind: str) -> None:
    """Parameters are the averages, statistics those of the averaged model itself, and the model goes on training."""
    model = network()
    options = {} if kind == "swa" else {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.75)}
    averaged = swa_utils.AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for x in batches(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
        history.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    expected = history[0]
    for i, later in enumerate(history[1:], 2):
        weight = 1 / i if kind == "swa" else 0.25
        expected = {name: value + weight * (later[name] - value) for name, value in expected.items()}
    torch.testing.assert_close(dict(averaged.module.named_parameters()), expected, rtol=1e-12, atol=1e-12)

    before = copy.deepcopy(model.state_dict())
    nm.update_bn(batches(5), averaged.eval())
    fresh = network()
    fresh.load_state_dict(expected, strict=False)
    for norm in (fresh[1], fresh[4]):
        norm.momentum = None
    with torch.no_grad():
        for x in batches(5):
            fresh(x)
    x = batches(7)[-1]
    torch.testing.assert_close(averaged(x), fresh.eval()(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)  # the average is a copy
    assert not averaged.training
    assert model.training


def test_modes_and_momenta_come_back_whatever_happens() -> None:
    model = network()
    model[1].eval()  # frozen, while the rest trains
    model[4].momentum = 0.3
    modes = [module.training for module in model.modules()]

    def failing() -> Any:
        yield batches(1)[0]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        nm.update_bn(failing(), model)
    assert [module.training for module in model.modules()] == modes
    assert [model[1].momentum, model[4].momentum] == [0.1, 0.3]
    nm.update_bn(batches(2), model)
    assert [module.training for module in model.modules()] == modes
    assert [model[1].num_batches_tracked, model[4].num_batches_tracked] == [2, 2]  # frozen ones too, as in torch


class Frozen(nn.Module):
    """Keeps the statistics of its backbone, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.BatchNorm2d(3), nm.L1BatchNorm2d(3)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]


def test_norms_that_never_train_keep_their_statistics() -> None:
    model = Frozen().double()
    model.backbone.running_mean.fill_(0.5)  # type: ignore[union-attr]
    nm.update_bn(batches(2), model)
    assert model.backbone.running_mean.tolist() == [0.5] * 3  # type: ignore[union-attr]
    assert [model.backbone.num_batches_tracked, model.head.num_batches_tracked] == [0, 2]


def test_nothing_to_do_and_wrong_input() -> None:
    model = network()
    model(batches(1)[0])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="at least one batch"):
        nm.update_bn([], model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got list"):
        nm.update_bn(batches(), [model])  # type: ignore[arg-type]
    nm.update_bn(iter(()), nn.Linear(2, 2))  # no batch norm: the loader is not read
    nm.update_bn(iter(()), nm.L1BatchNorm2d(3, track_running_stats=False))


def test_inputs_are_moved() -> None:
    class Elsewhere:
        def to(self, device: str) -> Tensor:
            assert device == "cpu"
            return batches(1)[0]

    model = network()
    nm.update_bn([Elsewhere()], model, device="cpu")
    assert model[1].num_batches_tracked == 1


@pytest.mark.gpu
def test_statistics_on_a_gpu() -> None:
    """Inputs on the host, the model on the device, its norms by the kernels."""
    model, on_device = network().float(), network().float().cuda()
    nm.update_bn([x.float() for x in batches()], model)
    nm.update_bn([x.float() for x in batches()], on_device, device="cuda")
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(on_device.get_buffer(name).cpu(), buffer, rtol=1e-3, atol=1e-4)
