"""timm's networks: built with our norms by ``norm_layer=``, and converted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normmatters as nm
from normmatters.nn import L1LayerNorm2d
from support.zoo import assert_same_function, assert_same_step

timm = pytest.importorskip("timm", reason="timm, or torchvision, which it needs, is missing", exc_type=ImportError)

CASES: list[tuple[str, tuple[int, int] | None]] = [  # model, (norms, how many of them fuse)
    ("resnet18", (20, 17)),
    ("resnet50", (53, 49)),
    ("regnety_002", None),
    ("efficientnet_b0", (49, 0)),  # SiLU behind most of its batch norms
    ("convnext_atto", (17, 0)),  # layer norms over the channels of NCHW
    ("convnext_tiny", (23, 0)),  # and over the last dimension
]


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, num_classes=7, **options).double()


@pytest.mark.parametrize(("name", "counts"), CASES)
def test_same_function(name: str, counts: tuple[int, int] | None) -> None:
    assert_same_function(build(name), counts)


@pytest.mark.parametrize(("name", "norm_layer"), [("resnet18", nm.L1BatchNorm2d), ("convnext_atto", L1LayerNorm2d)])
def test_norm_layer_is_the_converted_model(name: str, norm_layer: type[nn.Module]) -> None:
    built, converted = build(name, norm_layer=norm_layer), build(name)
    nm.convert(converted, "l1", layer_norm="l1", fuse=False)
    kinds = {type(module) for module in built.modules() if isinstance(module, norm_layer)}
    assert kinds == {norm_layer}
    for module in converted.modules():
        if isinstance(module, L1LayerNorm2d):
            module.eps = 1e-5  # timm's default is 1e-6, which it gives to its own norms alone
    assert_same_step(built, converted)


def test_norm_layer_of_efficientnet_is_a_function() -> None:
    def norm_act(channels: int, apply_act: bool = True, inplace: bool = True, **options: Any) -> nn.Module:
        norm = nm.L1BatchNorm2d(channels, **options)
        return nn.Sequential(norm, nn.SiLU(inplace=inplace)) if apply_act else norm

    built, converted = build("efficientnet_b0", norm_layer=norm_act), nm.convert(build("efficientnet_b0"), "l1")
    assert sum(isinstance(module, nm.L1BatchNorm2d) for module in built.modules()) == 49
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)

    def run(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(1)
        output = model.train()(images)
        model.zero_grad()
        output.square().sum().backward()
        return output, [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(run(built), run(converted), rtol=1e-6, atol=1e-8)
    for mine, other in zip(built.buffers(), converted.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)
