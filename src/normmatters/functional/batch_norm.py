"""Batch norm in every Lp norm of the paper, as the plain equation (F5-F9, F15)."""

from __future__ import annotations

import torch
from torch import Tensor

from normmatters.functional.checks import check_batch_norm
from normmatters.functional.statistic import (
    Kind,
    check_constant,
    compute_dtype,
    scale_constant,
    squared_scale,
    statistic_kind,
)
from normmatters.functional.torch_batch_norm import torch_batch_norm


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
            :func:`update_running_statistics`).
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
    kind = statistic_kind(p, k)
    check_constant(constant)
    check_batch_norm(
        input, running_mean, running_var, weight, bias, training, eps, kind=kind, k=k, act=act, residual=residual
    )
    if not training:
        if kind == "mean":
            assert running_mean is not None  # checked above
            running_var, eps = torch.ones_like(running_mean), 0.0
        y = torch_batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
    elif input.numel() == 0:
        y = _affine(input, weight, bias)  # as PyTorch: nothing to normalize, statistics untouched
    else:
        n = input.numel() // input.shape[1]
        C = scale_constant(p, n, k, constant)
        x = input.to(compute_dtype(input.dtype))
        dims = [d for d in range(x.dim()) if d != 1]
        mean = x.mean(dims, keepdim=True)
        y = x - mean
        squared = None
        if kind != "mean":
            squared = squared_scale(y, dims, kind, p, k, C)
            y = y / (squared + eps).sqrt()
            squared = squared.flatten()
        update_running_statistics(running_mean, running_var, mean.flatten(), squared, n, momentum, kind=kind)
        y = _affine(y, weight, bias)
    if residual is not None:
        y = y + residual
    if act == "relu":
        y = y.relu()
    return y.to(input.dtype)


@torch.no_grad()
def update_running_statistics(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    squared: Tensor | None,
    n: int | Tensor,
    momentum: float | Tensor,
    *,
    kind: Kind,
) -> None:
    """Move the running statistics towards a batch's mean and squared scale, in place.

    The one place where running statistics change. As PyTorch does for the variance, the squared scale is stored times
    n/(n−1): deviations from the sample mean are √(1−1/n) too small on average, in the L1 norm as in the L2 norm (F5).
    The range does not contain the mean and needs no correction. Mean-only batch norm leaves ``running_var`` alone.

    Args:
        running_mean, running_var: (C,) or None.
        mean, squared: (C,), the batch's μ and s²; ``squared`` is None for mean-only.
        n: number of elements per channel; a tensor where the host does not know it.
        momentum: weight of this batch.
        kind: the statistic.
    """
    if running_mean is not None:
        _move(running_mean, mean, momentum)
    if running_var is not None and squared is not None:
        _move(running_var, squared if kind == "range" else squared * (n / (n - 1)), momentum)


def _move(running: Tensor, batch: Tensor, momentum: float | Tensor) -> None:
    # Not `lerp_`, which takes a difference: an infinite variance, which half precision may have, must arrive as such.
    # In the batch's dtype, so that a half-precision buffer is rounded once; in one write, which may fail as a whole.
    running.copy_(running.to(batch.dtype) * (1 - momentum) + batch * momentum)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = [1, -1] + [1] * (x.dim() - 2)
    if weight is not None:
        x = x * weight.view(shape)
    if bias is not None:
        x = x + bias.view(shape)
    return x
