"""How the hand-derived batch norm walks over its tensors: a few samples at a time, which stay in the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Elements a thread works on at a time: a few such float32 buffers fit its share of the cache, and calls are amortized.
CHUNK = 1 << 20
# A channel of at most this many pixels is too short a loop to be fast.
FEW_PIXELS = 256


def samples(x: Tensor) -> int:
    """How many samples at a time fit the cache; on other devices the whole batch, where launches cost more."""
    total = x.shape[0]
    if x.device.type != "cpu":
        return total
    count = min(total, math.ceil(x.numel() / (CHUNK * torch.get_num_threads())))
    return math.ceil(total / count)  # pieces of equal size


def pieces(x: Tensor, *tensors: Tensor, backwards: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """A few samples at a time of ``x`` and the tensors of its shape.

    A pass that goes backwards begins with what the pass before it has left in the cache.
    """
    step, end = samples(x), x.shape[0]
    if step >= end:
        yield x, *tensors
    else:
        starts = range(0, end, step)
        for start in reversed(starts) if backwards else starts:
            yield tuple([t[start : start + step] for t in (x, *tensors)])


def scratch(x: Tensor, dtype: torch.dtype, unused: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Room for any piece of ``x``, given a piece. Written again and again, it stays in the cache.

    It is taken from ``unused``, a tensor of x's shape that is to be written later, if that has the dtype.
    """
    if unused is not None and unused.dtype == dtype:
        room = unused[: samples(x)]
    else:
        room = torch.empty_like(x[: samples(x)], dtype=dtype)
    return lambda piece: room if piece.shape[0] == room.shape[0] else room[: piece.shape[0]]


def per_channel(t: Tensor, like: Tensor) -> Tensor:
    """``t``, (C,), in a shape that broadcasts to ``like``, (N, C, ...)."""
    t = t.view([1, -1] + [1] * (like.dim() - 2))
    if like.stride(1) != 1 and like.device.type == "cpu" and like.shape[2:].numel() <= FEW_PIXELS:
        t = t.expand(1, *like.shape[1:]).contiguous()  # one long loop over all channels' pixels
    return t


def affine(x: Tensor, scale: Tensor, shift: Tensor, out: Tensor) -> Tensor:
    """x·scale + shift in ``out``, for scale and shift of :func:`per_channel`."""
    if x.stride(1) != 1 and x.device.type == "cpu" and scale.numel() == x.shape[1]:
        # A loop is over one channel's pixels: torch vectorizes it if one operand is a single number, not if two are.
        return torch.mul(x, scale, out=out).add_(shift)
    return torch.addcmul(shift, x, scale, out=out)
