"""A real small convnet with batch norm, and short deterministic training runs of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# F.batch_norm refuses eps = 0; in float64 this is the same: activations have variances around 1.
NO_EPS = 1e-60


def convnet(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Three weights behind batch norm (0, 3, 8 by index; a bias on the first) and a plain last layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6, eps=NO_EPS),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, groups=2, bias=False),
        nn.BatchNorm2d(8, eps=NO_EPS),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 12, bias=False),
        nn.BatchNorm1d(12, eps=NO_EPS),
        nn.ReLU(),
        nn.Linear(12, 4),
    ).to(dtype)


INVARIANT = ["0.weight", "3.weight", "8.weight"]


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A batch of 16 labelled 8x8 images: four noisy patterns, other noise at every step."""
    generator = torch.Generator().manual_seed(step)
    patterns = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    labels = torch.randint(0, 4, (16,), generator=generator)
    return (patterns[labels] + torch.randn(16, 1, 8, 8, generator=generator, dtype=torch.float64)).to(dtype), labels


def groups(model: nn.Module, decay: float, rest_decay: float = 5e-4) -> list[dict[str, Any]]:
    """Two parameter groups with names: the weights behind batch norm, and the rest."""
    named = dict(model.named_parameters())
    return [
        {"params": [(n, named[n]) for n in INVARIANT], "weight_decay": decay},
        {"params": [(n, p) for n, p in named.items() if n not in INVARIANT], "weight_decay": rest_decay},
    ]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, after: Callable[[int], None] | None = None
) -> None:
    """Run `steps`; `after(t)` is called at the end of each (a scheduler's place)."""
    dtype = next(model.parameters()).dtype
    for t in steps:
        images, labels = batch(t, dtype)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if after is not None:
            after(t)


def directions(model: nn.Module) -> Tensor:
    """Unit vectors of all channels behind batch norm, and the other parameters as they are, as one vector."""
    parts = []
    for name, p in model.named_parameters():
        p = p.detach()
        if name == "0.bias":  # batch norm subtracts it: it only decays
            continue
        parts.append((p.flatten(1) / p.flatten(1).norm(dim=1, keepdim=True) if name in INVARIANT else p).reshape(-1))
    return torch.cat(parts)
