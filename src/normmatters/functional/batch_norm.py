"""Batch norm in every Lp norm of the paper, as the plain equation (F5-F9, F15)."""

from __future__ import annotations

import torch
from torch import Tensor

from normmatters.functional.checks import check_batch_norm
from normmatters.functional.statistic import scale_and_divisor
from normmatters.functional.torch_batch_norm import torch_batch_norm
from normmatters.norm import Norm, RunningStats, compute_dtype


def lp_batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    p: float | str = 1,
    k: int | None = None,
    constant: str | float = "exact",
    act: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """act((x − μ)/√(s² + eps)·weight + bias + residual), with s = C·statistic(x − μ) over all but dimension 1.

    In training μ and s are the batch's, and the running statistics move towards them in place; otherwise they are the
    running statistics, and the result is :func:`torch.nn.functional.batch_norm`'s. Half-precision inputs are computed
    in float32. Differentiable to any order.

    Args:
        input: (N, C, ...), floating point.
        running_mean, running_var: (C,) or None. ``running_var`` holds s², times n/(n−1) (see
            :meth:`normmatters.norm.RunningStats.update`).
        weight, bias: (C,) or None.
        training: normalize by the batch's statistics.
        momentum: weight of this batch in the running statistics.
        eps: added to s².
        p: 1 (F5), 2, any float ≥ 1 (F9), ``math.inf`` (F6), ``"range"`` (largest minus smallest), or ``"mean"``
            (F15: subtract the mean only; ``weight`` must be None, and neither eps nor ``running_var`` is used).
        k: with ``p=math.inf``, the mean of the k largest deviations (F7).
        constant: ``"exact"`` (F8), ``"paper"``, ``"none"``, or a positive number that multiplies the exact constant.
        act: None or ``"relu"``.
        residual: same shape as input, added before the activation.

    Returns:
        Same shape and dtype as input.

    Example::

        >>> x = torch.randn(8, 3, 4, 4)
        >>> lp_batch_norm(x, training=True, p=1, act="relu").shape
        torch.Size([8, 3, 4, 4])
    """
    running = RunningStats(running_mean, running_var, momentum=momentum)
    return batch_norm(input, Norm(p, k, constant, eps), weight, bias, running, training, residual=residual, act=act)


def batch_norm(
    input: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStats,
    training: bool,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """:func:`lp_batch_norm` in the library's own words; ``running.num_batches`` is the caller's to raise."""
    check_batch_norm(input, norm, weight, bias, running, training, residual=residual, act=act)
    eps = norm.epsilon(input.dtype)
    if not training:
        var = running.var
        if norm.kind == "mean":
            assert running.mean is not None  # checked above
            var = torch.ones_like(running.mean)
        y = torch_batch_norm(input, running.mean, var, weight, bias, False, 0.0, eps)
    elif input.numel() == 0:
        y = _affine(input, weight, bias)  # as PyTorch: nothing to normalize, statistics untouched
    else:
        n = input.numel() // input.shape[1]
        x = input.to(compute_dtype(input.dtype))
        dims = [d for d in range(x.dim()) if d != 1]
        mean = x.mean(dims, keepdim=True)
        y = x - mean
        squared = None
        if norm.kind != "mean":
            squared, divisor = scale_and_divisor(y, dims, norm, norm.scale_constant(n), eps)
            y = y / divisor
            squared = squared.flatten()
        running.update(norm, mean.flatten(), squared, n)
        y = _affine(y, weight, bias)
    if residual is not None:
        y = y + residual
    if act == "relu":
        y = y.relu()
    return y.to(input.dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = [1, -1] + [1] * (x.dim() - 2)
    if weight is not None:
        x = x * weight.view(shape)
    if bias is not None:
        x = x + bias.view(shape)
    return x
