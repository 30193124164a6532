"""What several networks share: convolutions, dropout, initialisation, and what a translator offers."""

from __future__ import annotations

import abc
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normmatters.lab.norms import NormFactory


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution with no bias, since the norm that follows it brings one."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Dropout(nn.Module):
    """``x`` with elements set to zero with probability ``p``, the others divided by 1 − p; any shape.

    Random numbers come from ``generator``, on the device of ``x``; from torch's own if it is None, as
    ``torch.compile`` needs.

    >>> drop = Dropout(0.5)
    >>> draw_from(drop, torch.Generator().manual_seed(0))
    >>> sorted(set(drop(torch.ones(100)).tolist()))
    [0.0, 2.0]
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.generator is None:
            return F.dropout(x, self.p)
        # On a CPU, bernoulli_ takes three times as long, a fifth of a Transformer's step.
        keep = torch.empty_like(x, dtype=torch.float32).uniform_(generator=self.generator) < 1 - self.p
        return x * keep * (1 / (1 - self.p))  # the factor last: half precision would round it

    def extra_repr(self) -> str:
        return f"p={self.p}"


def draw_from(model: nn.Module, generator: torch.Generator | None) -> None:
    """Let every dropout of ``model`` draw from ``generator``."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.generator = generator


def init_weights(model: nn.Module, norm: NormFactory) -> None:
    """He-normal convolutions, and a classifier that starts near zero, so that the first loss is log(classes).

    Where no norm restores the scale, the weights keep it: by fan-in, with ``norm.gain``. ``norm.initial_weights`` says
    it in words, for the report.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            if norm.rescales:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                with torch.no_grad():
                    module.weight.mul_(norm.config.init_scale)  # a norm follows each of these
            else:
                nn.init.normal_(module.weight, std=norm.gain / math.sqrt(module.weight[0].numel()))
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)


class Translator(nn.Module, abc.ABC):
    """``model(source, target_in)`` gives logits (n, T, V). For decoding one token at a time: ``begin(source)`` gives a
    state, ``step(tokens, state)`` the next logits (n, V) and the next state. Every tensor of a state has n rows.
    """

    classifier: nn.Module

    @abc.abstractmethod
    def begin(self, source: Tensor) -> dict[str, Any]: ...

    @abc.abstractmethod
    def step(self, tokens: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]: ...
