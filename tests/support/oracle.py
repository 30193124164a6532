"""The formulas of the paper, written a second time: one channel at a time, in float64, with no code of the library."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: (p, k) of every kind of statistic.
KINDS: list[tuple[float | str, int | None]] = [
    (1, None),
    (2, None),
    (1.5, None),
    (3.0, None),
    (math.inf, None),
    (math.inf, 3),
    ("range", None),
    ("mean", None),
]
SCALED_KINDS = KINDS[:-1]


def statistic(deviations: Tensor, p: float | str, k: int | None) -> Tensor:
    """The statistic of a vector of deviations from its mean, without a constant."""
    if p == "range":
        return deviations.max() - deviations.min()
    assert not isinstance(p, str)
    largest_first = deviations.abs().sort(descending=True).values
    if k is not None:
        return largest_first[:k].sum() / k
    if p == math.inf:
        return largest_first[0]
    return (largest_first**p).mean() ** (1 / p)


def constant_l1() -> float:
    return math.sqrt(math.pi / 2)  # F5


def constant_lp(p: float) -> float:
    return (2 ** (p / 2) * math.gamma((p + 1) / 2) / math.sqrt(math.pi)) ** (-1 / p)  # F9


def constant_linf(n: int) -> float:
    return (1 + math.sqrt(math.pi * math.log(4))) / (2 * math.sqrt(2 * math.log(n)))  # F6, as printed


def constant_topk(n: int, k: int) -> float:
    return constant_linf(n) + (constant_l1() - constant_linf(n)) * (k - 1) / (n - 1)  # F7, as printed


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    p: float | str,
    k: int | None,
    C: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, mean and squared scale of each channel of (N, C, ...)."""
    x = x.double()
    output, means, squares = torch.empty_like(x), [], []
    for channel in range(x.shape[1]):
        values = x[:, channel].reshape(-1)
        mean = values.sum() / values.numel()
        square = torch.ones_like(mean) if p == "mean" else (C * statistic(values - mean, p, k)) ** 2
        y = (values - mean) / (1.0 if p == "mean" else (square + eps) ** 0.5)
        if weight is not None:
            y = y * weight[channel].double()
        if bias is not None:
            y = y + bias[channel].double()
        output[:, channel] = y.reshape(x[:, channel].shape)
        means.append(mean)
        squares.append(square)
    return output, torch.stack(means), torch.stack(squares)
