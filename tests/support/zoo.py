"""What the real networks of torchvision and timm have to show, shared by their tests."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from normmatters.surgery import ConversionReport, convert, to_torch
from support.models import step


def images() -> Tensor:
    return torch.randn(2, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def assert_same_function(original: nn.Module, counts: tuple[int, int] | None = None) -> None:
    """Converted to L2 it is the very same network, in training and in evaluation; and it comes back.

    ``counts`` are the norms to be converted and those to be fused.
    """
    model = copy.deepcopy(original)
    report = ConversionReport()
    assert convert(model, "l2", layer_norm="l2", report=report) is model
    assert isinstance(model, type(original))
    if counts is not None:
        assert (len(report.converted), len(report.fused), len(report.skipped)) == (*counts, 0)
    assert model.state_dict().keys() == original.state_dict().keys()
    for training in (True, False):
        for mine, other in zip(step(model.train(training), images()), step(original.train(training), images())):
            assert_close(mine, other, rtol=1e-6, atol=1e-8)
    to_torch(model)
    assert model.state_dict().keys() == original.state_dict().keys()
    if all(change.before.startswith("BatchNorm2") for change in report.changes):  # timm's own come back as ours
        assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]
    assert_close(model.eval()(images()), original.eval()(images()), rtol=1e-6, atol=1e-8)


def assert_same_step(one: nn.Module, other: nn.Module) -> None:
    """Equal outputs, gradients and statistics after a step in training mode, and the same keys."""
    for mine, theirs in zip(step(one.train(), images()), step(other.train(), images())):
        assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
    assert_close(one.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-8)
