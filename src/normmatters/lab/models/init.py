"""Convolutions and their initialisation: He's normal one by fan-out, as in the authors' code."""

from __future__ import annotations

from torch import nn

from normmatters.lab.norms import NormFactory


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution with no bias, for the norm behind it brings one."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def init_weights(model: nn.Module, norm: NormFactory) -> None:
    """He-normal convolutions (by fan-in where no norm restores the scale); a classifier that starts near zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out" if norm.rescales else "fan_in", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
