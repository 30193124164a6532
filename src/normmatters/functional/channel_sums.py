"""The statistics of each channel, and the sums of its gradients, over all samples and pixels.

For the hand-derived batch norm: outside autograd, with what its backward pass needs beside the value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from normmatters.functional.pieces import per_channel, pieces, scratch
from normmatters.functional.statistic import Kind
from normmatters.functional.torch_batch_norm import hides_layout


def channel_mean(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean of each channel: first of each sample's pixels, which is faster than all at once, and more exact."""
    n = x.numel() // x.shape[1]
    if x.dim() > 2:
        x = x.sum(list(range(2, x.dim())), dtype=dtype)
    return x.sum(0, dtype=dtype).div_(n)


def weighted_sums(w: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Σ w·(x−μ)/D and Σ w of each channel: two sums that torch's batch norm takes in one pass for its backward."""
    if w.stride() != x.stride() and hides_layout(x):
        w, x = w.flatten(2), x.flatten(2)  # three dimensions have one layout only
    weight = inverse  # enters the input's gradient only, which is not asked for; on a GPU there must be one
    _, moments, sums = torch.ops.aten.native_batch_norm_backward.default(
        w, x, weight, None, None, mean, inverse, True, 0.0, [False, True, True]
    )
    return moments, sums


def added(sums: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """The sums of all pieces, added one by one."""
    return [functools.reduce(torch.add, parts) for parts in zip(*sums)]


def mean_deviation(x: Tensor, mean: Tensor, C: float, room: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """s for L1, C·mean |x−μ| of each channel, and how many elements are not below μ, which the backward pass needs.

    With σ = [x ≥ μ] − ½ these are 2C/n·Σ σ·(x−μ) and Σ σ + n/2: one pass for both. Σ[x ≥ μ](x−μ) alone, half of Σ|x−μ|,
    would do if μ had no rounding; the two signs cancel its rounding. ``room`` is :func:`scratch`'s.
    """
    n = x.numel() // x.shape[1]
    mu, factor = per_channel(mean, x), torch.full_like(mean, 2 * C / n)
    scale, balance = added(
        weighted_sums(torch.ge(part, mu, out=room(part)).sub_(0.5), part.to(mean.dtype), mean, factor)
        for (part,) in pieces(x, backwards=True)
    )
    return scale, balance.add_(n / 2)


def power_mean(x: Tensor, mean: Tensor, kind: Kind, p: float) -> Tensor:
    """T for L2 and Lp: (mean |x−μ|^p)^(1/p) of each channel."""
    dims = [d for d in range(x.dim()) if d != 1]
    mu = per_channel(mean, x)
    total = torch.zeros_like(mean)
    top = None
    if kind == "lp":  # relative to the largest deviation, no power overflows
        top = torch.maximum(x.amax(dims).to(mean) - mean, mean - x.amin(dims).to(mean))
        top = torch.where(top == 0, torch.ones_like(top), top)
    room = scratch(x, mean.dtype)
    for (part,) in pieces(x):
        c = torch.sub(part, mu, out=room(part))
        if top is None:
            c = c.square_()
        else:
            c = c.abs_().div_(per_channel(top, x)).pow_(p)
        total += c.sum(dims)
    average = total / (x.numel() // x.shape[1])
    return average.sqrt() if top is None else average.pow(1 / p) * top


def extremes(x: Tensor, mean: Tensor, kind: Kind, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """T for L∞ (k = 1), Top(k) and range, where in its channel each extreme is, (C, m), and its ∂T/∂(x − μ)."""
    rank = 1 if kind == "range" else k
    values, positions = [], []
    offset = 0
    for (part,) in pieces(x):
        c = (part - per_channel(mean, x)).transpose(0, 1).flatten(1)
        ends = (c, -c) if kind == "range" else (c.abs(),)
        found = [end.topk(min(rank, c.shape[1]), dim=1) for end in ends]
        values.append(torch.stack([f.values for f in found], 1))  # (C, ends, rank)
        positions.append(torch.stack([f.indices for f in found], 1) + offset)
        offset += c.shape[1]
    largest, chosen = torch.cat(values, 2).topk(rank, dim=2)
    position = torch.cat(positions, 2).gather(2, chosen).flatten(1)
    if kind == "range":
        slope = (1.0 - 2.0 * torch.arange(2, device=x.device)).to(largest).expand_as(position)  # +1, −1
    else:
        slope = (x[index(x, position)] - mean.unsqueeze(1)).sign() / rank
    return largest.mean(2).sum(1), position, slope


def index(x: Tensor, position: Tensor) -> tuple[Tensor, ...]:
    """Index of ``x`` for positions, (C, m), that count the samples and pixels of a channel.

    Numbers of the host come in as operands, never as a tensor: copying one is forbidden while a CUDA graph is captured,
    and ``torch.unravel_index`` does it.
    """
    channel = torch.arange(x.shape[1], device=x.device).unsqueeze(1)
    pixel: list[Tensor] = []
    for size in reversed(x.shape[2:]):
        pixel.insert(0, position % size)
        position = position // size
    return (position, channel, *pixel)
