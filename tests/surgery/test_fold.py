"""fold: the same outputs and input gradients with every norm inside the layer in front, or a reason why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import normmatters as nm
from normmatters.nn.batchnorm_act import LpBatchNormAct2d
from support.models import Bottleneck, ResNet, vgg_bn

NORMS: dict[str, Callable[..., nn.Module]] = {
    "l1": nm.L1BatchNorm2d,
    "lp": lambda c, **options: nm.LpBatchNorm2d(c, p=3.0, **options),
    "linf": nm.LInfBatchNorm2d,
    "topk": nm.TopKBatchNorm2d,
    "range": nm.RangeBatchNorm2d,
    "mean": nm.MeanOnlyBatchNorm2d,
    "sync": nm.SyncLpBatchNorm,
    "torch": nn.BatchNorm2d,
}


def trained(model: nn.Module, *shape: int) -> nn.Module:
    """In float64, with statistics and affine parameters that are not the initial ones; in evaluation."""
    model = model.double()
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            for parameter in module.parameters(recurse=False):
                nn.init.uniform_(parameter, -1.5, 1.5, generator=generator)
    for _ in range(3):
        model(2 * torch.randn(*shape, dtype=torch.float64, generator=generator) + 1)
    return model.eval()


def output_and_gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    output = model(x)
    output.sin().sum().backward()
    assert x.grad is not None
    return output.detach(), x.grad


def check_folds(model: nn.Module, x: Tensor, layers: int) -> nn.Module:
    """All norms go; outputs and the input's gradient stay."""
    expected = output_and_gradient(model, x)
    report = nm.ConversionReport()
    folded = nm.fold(model, inplace=False, report=report)
    assert len(report.converted) == layers
    assert not report.skipped
    assert not any(isinstance(module, nn.modules.batchnorm._NormBase) for module in folded.modules())
    torch.testing.assert_close(output_and_gradient(folded, x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output_and_gradient(model, x), expected, rtol=0, atol=0)  # a copy was folded
    return folded


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm(norm: str) -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 5, 3, groups=1, bias=False), NORMS[norm](5)), 4, 3, 6, 6)
    folded = check_folds(model, torch.randn(2, 3, 6, 6, dtype=torch.float64), 1)
    assert [type(module).__name__ for module in folded] == ["Conv2d", "Identity"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv1d(4, 6, 3, groups=2), nm.L1BatchNorm1d, (5, 4, 7)),
        (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), nm.L1BatchNorm2d, (3, 4, 5, 5)),
        (nn.Conv3d(2, 3, 2), nm.L1BatchNorm3d, (3, 2, 4, 4, 4)),
        (nn.ConvTranspose1d(4, 6, 3, bias=False), nm.L1BatchNorm1d, (5, 4, 7)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), nm.L1BatchNorm2d, (3, 4, 5, 5)),
        (nn.Linear(4, 6), nm.L1BatchNorm1d, (8, 4)),
        (nn.Linear(4, 6, bias=False), lambda c: nm.L1BatchNorm1d(c, affine=False), (8, 4)),
        (nn.Linear(4, 6), lambda c: nm.L1BatchNorm1d(c, act="relu"), (8, 4)),
    ],
)
def test_every_layer(layer: nn.Module, norm: Any, shape: tuple[int, ...]) -> None:
    check_folds(trained(nn.Sequential(layer, norm(6 if shape[1] == 4 else 3)), *shape), _input(shape), 1)


def _input(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("make", [ResNet, lambda: ResNet(Bottleneck), vgg_bn], ids=["basic", "bottleneck", "vgg"])
@pytest.mark.parametrize("norm", ["l1", "topk", None])
def test_models_converted_fused_and_with_weight_norm(make: Callable[[], nn.Module], norm: str | None) -> None:
    model: nn.Module = make().double()
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    if norm is not None:
        nm.apply_weight_norm(model)
        model = nm.convert(model, norm)
    check_folds(trained(model, 4, 3, 8, 8), _input((2, 3, 8, 8)), norms)


class HandFused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.bn1, self.bn2 = nm.L1BatchNorm2d(3, act="relu"), nm.L1BatchNorm2d(3, act="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.bn1(self.conv1(x))), residual=x)


def test_norms_with_an_activation_and_a_residual_leave_those_behind() -> None:
    folded = check_folds(trained(HandFused(), 4, 3, 6, 6), _input((2, 3, 6, 6)), 2)
    assert [type(folded.bn1).__name__, type(folded.bn2).__name__] == ["ReLU", "AddReLU"]


def test_any_activation_behind_a_norm_is_left_behind() -> None:
    norm = LpBatchNormAct2d(5, p=1)
    norm.drop, norm.activation = nn.Identity(), nn.SiLU()
    folded = check_folds(trained(nn.Sequential(nn.Conv2d(3, 5, 3), norm), 4, 3, 6, 6), _input((2, 3, 6, 6)), 1)
    assert [type(module).__name__ for module in folded] == ["Conv2d", "SiLU"]  # type: ignore[attr-defined]


class Twice(nn.Module):
    """One convolution, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nm.L1BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(self.conv(x)))


class Branch(Twice):
    """The convolution's output is used beside the norm."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.bn(y) + y


class Twofold(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) if x.sum() > 0 else self.conv(x)


class Unreadable(Twice):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.bn(self.conv(x))
        except ValueError:
            return x


class OneByOne(nn.Module):
    """Calls the modules of a Sequential with something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 3, 1), nm.L1BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.features[1](self.features[0](x).relu())


def with_hook() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nm.L1BatchNorm2d(3))
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    return model


class MyConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def hooked_sequential() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nm.L1BatchNorm2d(3))
    model.register_forward_hook(lambda *_: None)
    return model


def shared_norm() -> nn.Module:
    norm = nm.L1BatchNorm2d(3)
    return nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.Conv2d(3, 3, 1), norm)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Twice, "used at several places"),
        (Branch, "is used again"),
        (Twofold, "used at several places"),
        (Unreadable, "Unreadable.forward cannot be read"),
        (OneByOne, "used at several places"),
        (with_hook, "hooks see"),
        (hooked_sequential, "the Sequential that it is in has hooks"),
        (lambda: nn.Sequential(MyConv(3, 3, 1), nm.L1BatchNorm2d(3)), "MyConv is a subclass"),
        (lambda: nn.Sequential(nm.L1BatchNorm2d(3), nn.Conv2d(3, 3, 1)), "no layer in front of it"),
        (lambda: nn.Sequential(spectral_norm(nn.Conv2d(3, 3, 1)), nm.L1BatchNorm2d(3)), "is parametrized"),
        (lambda: nn.Sequential(nn.ConvTranspose2d(3, 6, 1, groups=3), nm.L1BatchNorm2d(6)), "no slices"),
        (shared_norm, "used at several places"),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)), "no running stat"),
    ],
)
def test_what_cannot_be_folded_stays_and_says_why(make: Callable[[], nn.Module], reason: str) -> None:
    model = trained(make(), 4, 3, 5, 5)
    x = _input((2, 3, 5, 5))
    expected = output_and_gradient(model, x)
    report = nm.ConversionReport()
    folded = nm.fold(model, report=report)
    assert reason in report.skipped[0].note
    assert not report.converted
    torch.testing.assert_close(output_and_gradient(folded, x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:to_torch kept modules")
def test_a_norm_of_ours_without_statistics_stays() -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 3, 1), nm.L1BatchNorm2d(3, track_running_stats=False)), 4, 3, 5, 5)
    x = _input((2, 3, 5, 5))
    expected = output_and_gradient(model, x)
    report = nm.ConversionReport()
    torch.testing.assert_close(output_and_gradient(nm.fold(model, report=report), x), expected)
    assert [change.name for change in report.skipped] == ["1"]


def test_a_linear_layers_norm_refuses_other_channels_than_were_folded() -> None:
    """Behind (N, 6, 6) a batch norm's channels are dimension 1, a linear layer's outputs dimension 2."""
    model = nm.fold(nn.Sequential(nn.Linear(4, 6), nm.L1BatchNorm1d(6)).eval())
    assert model(torch.randn(3, 4)).shape == (3, 6)
    with pytest.raises(ValueError, match="got 3D"):
        model(torch.randn(3, 6, 4))


def test_a_tied_weight_is_left_to_the_other_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nm.L1BatchNorm2d(3), nn.Conv2d(3, 3, 1))
    model[2].weight = model[0].weight
    folded = check_folds(trained(model, 4, 3, 5, 5), _input((2, 3, 5, 5)), 1)
    assert folded[0].weight is not folded[2].weight  # type: ignore[index]


def test_in_place_and_wrong_input() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nm.L1BatchNorm2d(3))
    before = model[0].weight
    with pytest.raises(ValueError, match="1 is training: eval"):
        nm.fold(model)
    with pytest.raises(TypeError, match="report must be a ConversionReport to fill"):
        nm.fold(model.eval(), report=True)  # type: ignore[arg-type]
    assert model[0].weight is before
    assert isinstance(model[1], nm.L1BatchNorm2d)
    assert nm.fold(model.eval()) is model
    assert model[0].weight is not before
    with pytest.raises(TypeError, match="got list"):
        nm.fold([model])  # type: ignore[arg-type]
    assert type(nm.fold(nm.L1BatchNorm2d(3).eval())) is nn.BatchNorm2d


class Holds(nn.Module):
    """Calls a part of its backbone in a way that its forward does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
        self.held = {"first": self.backbone[0]}

    def forward(self, x: Tensor) -> Tensor:
        return self.held["first"](self.backbone(x))


def test_outputs_are_checked_for_an_example() -> None:
    model = trained(Holds(), 4, 3, 5, 5)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="example_input"):
        nm.fold(model, example_input=_input((2, 3, 5, 5)))
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    plain = trained(vgg_bn().double(), 4, 3, 8, 8)
    assert nm.fold(plain, example_input=(_input((2, 3, 8, 8)),)) is plain
    assert type(plain[0][1]) is nn.Identity
