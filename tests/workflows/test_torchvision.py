"""torchvision's networks, converted and fused; tests/test_convert.py has copies of their blocks, for every machine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from normmatters.surgery import ConversionReport, convert
from support.zoo import assert_same_function, assert_same_step, images

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed", exc_type=ImportError)

CASES: list[tuple[str, tuple[int, int] | None]] = [  # model, (batch norms, how many of them fuse)
    ("resnet18", (20, 17)),
    ("resnet50", (53, 49)),
    ("vgg11_bn", (8, 8)),
    ("regnet_y_400mf", None),
    ("densenet121", (121, 121)),
    ("mobilenet_v2", None),  # ReLU6
    ("convnext_tiny", (23, 0)),  # layer norms, channels first and last
]


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=7).double()
    if name.startswith("vgg"):  # its linear layers are 120 million weights, and none of our business
        model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, 7).double()
    return model


@pytest.mark.parametrize(("name", "counts"), CASES)
def test_same_function(name: str, counts: tuple[int, int] | None) -> None:
    assert_same_function(build(name), counts)


@pytest.mark.parametrize("name", ["resnet50", "vgg11_bn"])
def test_fused_in_l1(name: str) -> None:
    fused, unfused = build(name), build(name)
    report = ConversionReport()
    convert(fused, "l1", report=report)
    convert(unfused, "l1", fuse=False)
    assert len(report.fused) == {"resnet50": 49, "vgg11_bn": 8}[name]
    assert {change.after for change in report.changes} == {"L1BatchNorm2d"}
    assert_same_step(fused, unfused)
    assert_same_step(copy.deepcopy(fused), unfused)  # a copy is fused as well, and goes on from the same statistics


def test_feature_extraction() -> None:
    """By torchvision's own tracer: stages and layers are those of the network."""
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    original = build("resnet18")
    model = convert(copy.deepcopy(original), "l2")
    nodes = {"layer1": "1", "layer2.0": "2", "avgpool": "pool"}
    for training in (True, False):
        ours, theirs = (extraction.create_feature_extractor(net.train(training), nodes) for net in (model, original))
        for mine, other in zip(ours(images()).values(), theirs(images()).values(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)
    extracted = extraction.create_feature_extractor(model.eval(), ["layer1.0.relu"])  # no name is lost
    assert extracted(images())["layer1.0.relu"].shape == (2, 64, 16, 16)
