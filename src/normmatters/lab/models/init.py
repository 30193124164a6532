"""The initialisation: He's normal one by fan-out, as in the authors' code."""

from __future__ import annotations

import math

from torch import nn

from normmatters.lab.norms import NormFactory
from normmatters.nn.activations import TReLU


def init_weights(model: nn.Module, norm: NormFactory) -> None:
    """He-normal convolutions, and a classifier that starts near zero, so that the first loss is log(classes).

    Where no norm restores the scale, it is kept by the weights: by fan-in, and with the gain that undoes what the
    activation and the mean-only norm leave of the variance, ½(1 − 1/π) for a ReLU (F15).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            if norm.rescales:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            else:
                fan_in = module.weight[0].numel()
                nn.init.normal_(module.weight, std=_gain(norm) / math.sqrt(fan_in))
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)


def _gain(norm: NormFactory) -> float:
    if norm.activation == "trelu":
        return 1.0
    return math.sqrt(2) if norm.name == "none" else 1 / TReLU.STD
