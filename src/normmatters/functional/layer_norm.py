"""Layer and RMS norm in every Lp norm, as the plain equation (F10)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from normmatters.functional.checks import check_layer_norm
from normmatters.functional.statistic import scale_and_divisor
from normmatters.norm import Norm, compute_dtype


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
    return layer_norm(input, normalized_shape, Norm(p, k, constant, eps), weight, bias)


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
    return layer_norm(input, normalized_shape, Norm(p, None, constant, eps), weight, centered=False)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    norm: Norm,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    centered: bool = True,
) -> Tensor:
    """Layer norm, or with ``centered=False`` RMS norm, which subtracts no mean.

    input: (..., *normalized_shape); weight and bias: normalized_shape.

    Example::

        >>> layer_norm(torch.tensor([1.0, 3.0]), [2], Norm(1, eps=0.0))
        tensor([-0.7979,  0.7979])
    """
    check_layer_norm(input, normalized_shape, norm, weight, bias)
    C = norm.scale_constant(math.prod(normalized_shape))
    x = input.to(compute_dtype(input.dtype))
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    if x.numel() > 0:
        y = x - x.mean(dims, keepdim=True) if centered else x
        x = y / scale_and_divisor(y, dims, norm, C, norm.epsilon(input.dtype))[1]
    if weight is not None:
        x = x * weight
    if bias is not None:
        x = x + bias
    return x.to(input.dtype)
