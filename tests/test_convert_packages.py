"""The real networks of torchvision and timm, where these are installed."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from models import step
from normmatters.convert import ConversionReport, convert, to_torch

CASES = [  # package, model, batch norms, how many of them fuse
    ("torchvision", "resnet18", 20, 17),
    ("torchvision", "resnet50", 53, 49),
    ("torchvision", "vgg11_bn", 8, 8),
    ("torchvision", "regnet_y_400mf", None, None),
    ("torchvision", "densenet121", None, None),  # asks for the type of its input
    ("torchvision", "mobilenet_v2", None, None),  # ReLU6
    ("timm", "resnet18", 20, 17),
    ("timm", "resnet50", 53, 49),
    ("timm", "regnety_002", None, None),
]


def build(package: str, name: str) -> nn.Module:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    torch.manual_seed(0)
    if package == "torchvision":
        import torchvision  # type: ignore[import-not-found]

        return torchvision.models.get_model(name, weights=None, num_classes=7)
    import timm  # type: ignore[import-not-found]

    return timm.create_model(name, pretrained=False, num_classes=7)


@pytest.mark.parametrize(("package", "name", "norms", "fused"), CASES)
def test_same_function(package: str, name: str, norms: int | None, fused: int | None) -> None:
    original: Any = build(package, name).double()
    model = copy.deepcopy(original)
    report = ConversionReport()
    assert convert(model, "l2", report=report) is model
    assert isinstance(model, type(original))
    if norms is not None:
        assert (len(report.converted), len(report.fused), len(report.skipped)) == (norms, fused, 0)
    assert model.state_dict().keys() == original.state_dict().keys()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    for training in (True, False):
        for mine, other in zip(step(model.train(training), x), step(original.train(training), x)):
            assert_close(mine, other, rtol=1e-6, atol=1e-8)
    to_torch(model)
    assert model.state_dict().keys() == original.state_dict().keys()
    if "BatchNormAct2d" not in {change.before for change in report.changes}:  # these come back as BatchNormReLU2d
        assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]
    assert_close(model.eval()(x), original.eval()(x), rtol=1e-6, atol=1e-8)
