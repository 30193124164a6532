"""The squared scale s² = (C·statistic)² of deviations, in plain PyTorch. A :class:`Norm` says which statistic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normmatters.norm import Norm


def scale_and_divisor(centered: Tensor, dims: list[int], norm: Norm, C: float, eps: float) -> tuple[Tensor, Tensor]:
    """s² and D = √(s² + eps) of ``centered`` over ``dims``, which stay with size 1. Not for mean-only.

    D does not overflow where s² does, but in L2, which has to square.
    """
    if norm.kind == "l2":
        squared = C * C * centered.square().mean(dims, keepdim=True)  # no root of it alone: infinite slope at 0
        return squared, (squared + eps).sqrt()
    s = C * statistic(centered, dims, norm)
    return s.square(), hypotenuse(s, eps)


def hypotenuse(s: Tensor, eps: float) -> Tensor:
    """√(s² + eps), also where s² overflows."""
    if torch.compiler.is_exporting():  # ONNX has no hypot
        size = s.detach().clamp(min=1)
        return size * ((s / size).square() + eps / size.square()).sqrt()
    return torch.hypot(s, s.new_full((), math.sqrt(eps)))


def statistic(centered: Tensor, dims: list[int], norm: Norm) -> Tensor:
    """The statistic of ``centered`` over ``dims``, which stay with size 1: s = C·statistic. Not for mean-only."""
    if norm.kind == "l2":
        return centered.square().mean(dims, keepdim=True).sqrt()
    if norm.kind == "range":
        return centered.amax(dims, keepdim=True) - centered.amin(dims, keepdim=True)
    size = centered.abs()
    if norm.kind == "l1":
        return size.mean(dims, keepdim=True)
    if norm.kind == "linf":
        return size.amax(dims, keepdim=True)
    if norm.kind == "topk":
        assert norm.k is not None
        return _top_k_mean(size, dims, norm.k)
    return _power_mean(size, dims, float(norm.p))


def _top_k_mean(x: Tensor, dims: list[int], k: int) -> Tensor:
    """Mean of the k largest elements of ``x`` over ``dims`` (F7)."""
    others = [d for d in range(x.dim()) if d not in dims]
    rows = x.permute(others + dims).flatten(len(others))
    shape = [1 if d in dims else x.shape[d] for d in range(x.dim())]
    return rows.topk(k, dim=-1, sorted=False).values.mean(-1).reshape(shape)


def _power_mean(x: Tensor, dims: list[int], p: float) -> Tensor:
    """(mean x^p)^(1/p) for x >= 0, finite for any p and with gradient 0 where all of x is 0."""
    top = x.detach().amax(dims, keepdim=True)
    top = torch.where(top == 0, torch.ones_like(top), top)  # relative to the largest, x^p cannot overflow
    mean = (x / top).pow(p).mean(dims, keepdim=True)
    flat = mean == 0
    return torch.where(flat, mean, torch.where(flat, torch.ones_like(mean), mean).pow(1 / p)) * top
