"""A convnet and a transformer block with the norms of this library, for the tools that take any model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import normmatters as nm
from support.models import BasicBlock


class Attend(nn.Module):
    """Pre-norm transformer block, (N, L, width) to the same."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def convnet() -> nn.Sequential:
    """Input (N, 3, H, W); every batch norm is L1 and has its ReLU, one of them the residual add, merged into it."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    report = nm.ConversionReport()
    model = nm.convert(nn.Sequential(*stem, BasicBlock(4, 4), *head), "l1", report=report)
    assert [change.fused for change in report.changes] == ["relu", "relu", "add + relu"]
    assert isinstance(model, nn.Sequential)
    return model


def transformer() -> nn.Sequential:
    """Input (N, L, 8); every layer norm is L1, every matrix bounded."""
    torch.manual_seed(0)
    model = nm.convert(nn.Sequential(Attend(), nn.Flatten(), nn.LazyLinear(3)), layer_norm="l1")
    model(torch.zeros(1, 6, 8))
    assert len(nm.apply_weight_norm(model).applied) == 5
    assert isinstance(model, nn.Sequential)
    return model


MODELS = {"convnet": (convnet, (8, 3, 8, 8)), "transformer": (transformer, (8, 6, 8))}


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]
