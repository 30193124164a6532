"""Layer and RMS norm in every Lp norm, as the plain equation (F10)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normmatters.functional.checks import check_layer_norm
from normmatters.functional.statistic import compute_dtype, scale_constant, squared_scale, statistic_kind


def lp_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    p: float | str = 1,
    k: int | None = None,
    constant: str | float = "exact",
) -> Tensor:
    """(x − μ)/√(s² + eps)·weight + bias, with s = C·statistic(x − μ) over the last dimensions.

    The equation of batch norm over the features of one token (F10). Half-precision inputs are computed in float32.

    Args:
        input: (..., *normalized_shape), floating point.
        normalized_shape: the sizes of the normalized dimensions.
        weight, bias: ``normalized_shape`` or None.
        eps: added to s².
        p, k, constant: as in :func:`~normmatters.functional.lp_batch_norm`.

    Returns:
        Same shape and dtype as input.

    Example::

        >>> lp_layer_norm(torch.randn(2, 5, 16), (16,), p=1).shape
        torch.Size([2, 5, 16])
    """
    return _normalize(input, normalized_shape, weight, bias, eps, p, k, constant, subtract_mean=True)


def lp_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    p: float = 1,
    constant: str | float = "exact",
) -> Tensor:
    """x/√(s² + eps)·weight, with s = C·(mean |x|^p)^(1/p) over the last dimensions: no mean subtracted.

    Args:
        input: (..., *normalized_shape), floating point.
        normalized_shape: the sizes of the normalized dimensions.
        weight: ``normalized_shape`` or None.
        eps: added to s²; None is the epsilon of the dtype computed in, as in :func:`torch.nn.functional.rms_norm`.
        p: a number ≥ 1 or ``math.inf``.
        constant: as in :func:`~normmatters.functional.lp_batch_norm`.

    Returns:
        Same shape and dtype as input.

    Example::

        >>> lp_rms_norm(torch.randn(2, 5, 16), (16,), p=1).shape
        torch.Size([2, 5, 16])
    """
    if isinstance(p, str):
        raise ValueError(f"p of an RMS norm must be a number >= 1 or math.inf, got {p!r}")
    return _normalize(input, normalized_shape, weight, None, eps, p, None, constant, subtract_mean=False)


def _normalize(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    p: float | str,
    k: int | None,
    constant: str | float,
    *,
    subtract_mean: bool,
) -> Tensor:
    kind = statistic_kind(p, k)
    check_layer_norm(input, normalized_shape, weight, bias, 0.0 if eps is None else eps, kind=kind, k=k)
    C = scale_constant(p, math.prod(normalized_shape), k, constant)
    x = input.to(compute_dtype(input.dtype))
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    if x.numel() > 0:
        y = x - x.mean(dims, keepdim=True) if subtract_mean else x
        x = y / (squared_scale(y, dims, kind, p, k, C) + eps).sqrt()
    if weight is not None:
        x = x * weight
    if bias is not None:
        x = x + bias
    return x.to(input.dtype)
