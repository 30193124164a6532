"""Dropout from a generator of the run's own: runs that share a process then draw what they would draw alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Dropout", "draw_from"]


class Dropout(nn.Module):
    """``x`` with elements set to zero with probability ``p``, the others divided by 1 − p; any shape.

    ``generator`` is of the device of ``x``. Where it is None, torch's own is drawn from, as ``nn.Dropout`` does: which
    ``torch.compile`` needs.

    >>> drop = Dropout(0.5)
    >>> draw_from(drop, torch.Generator().manual_seed(0))
    >>> sorted(set(drop(torch.ones(100)).tolist()))
    [0.0, 2.0]
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"model.dropout must be in [0, 1), got {p!r}")
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
