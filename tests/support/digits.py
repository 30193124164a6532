"""A real small convnet with batch norm on scikit-learn's digits, in float64 with no eps: exactly scale invariant."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

_pixels, _labels = load_digits(return_X_y=True)
IMAGES = torch.tensor(_pixels / 8 - 1, dtype=torch.float64).view(-1, 1, 8, 8)
LABELS = torch.tensor(_labels)


def digit_net(width: int = 6, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, bias=False),
        nn.BatchNorm2d(width, eps=1e-300),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2, bias=False),
        nn.BatchNorm2d(width, eps=1e-300),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    ).double()


def split(net: nn.Sequential) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(scale-invariant weights, the rest)."""
    invariant = [net[0].weight, net[3].weight]
    return invariant, [p for p in net.parameters() if not any(p is q for q in invariant)]


def backward(net: nn.Module, batch: Tensor) -> Tensor:
    net.zero_grad()
    loss = nn.functional.cross_entropy(net(IMAGES[batch].to(next(net.parameters()).dtype)), LABELS[batch])
    loss.backward()
    return loss


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    lr: Callable[[int], float] | None = None,
    *,
    start: int = 0,
    batch_size: int = 32,
) -> None:
    """The same batches for the same step numbers, whatever came before."""
    for t in range(start, start + steps):
        generator = torch.Generator().manual_seed(t)
        backward(net, torch.randint(len(IMAGES), (batch_size,), generator=generator))
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr(t)
        optimizer.step()


def direction_error(a: list[nn.Parameter], b: list[nn.Parameter]) -> float:
    """The largest difference between the unit vectors of two lists of weights."""
    return max((x / x.norm() - y / y.norm()).abs().max().item() for x, y in zip(a, b))
