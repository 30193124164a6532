"""Batch norm modules in every norm of the paper; drop-ins for ``torch.nn.BatchNorm1d/2d/3d`` with the same state."""

from __future__ import annotations

import math
from typing import Any

import torch

from normmatters.nn.batchnorm_base import LpBatchNorm


class LpBatchNorm1d(LpBatchNorm):
    """Batch norm in the Lp norm over (N, C) or (N, C, L) inputs; see :class:`LpBatchNorm2d`.

    >>> LpBatchNorm1d(4, p=1.5)(torch.randn(8, 4)).shape
    torch.Size([8, 4])
    """

    _ranks = (2, 3)


class LpBatchNorm2d(LpBatchNorm):
    """Batch norm in the Lp norm over (N, C, H, W) inputs: act((x − μ)/√(s² + eps)·weight + bias + residual).

    s = C·statistic(x − μ), with C such that s estimates the standard deviation of Gaussian data (F5-F9). p = 2 is
    ``torch.nn.BatchNorm2d``. The state, its meaning and evaluation are ``torch.nn.BatchNorm2d``'s for every p;
    ``running_var`` averages s²·n/(n−1), the unbiased variance for p = 2 and its counterpart for the others.

    Args:
        num_features: number of channels C.
        p: 1, 2, any float ≥ 1, ``math.inf``, ``"range"`` or ``"mean"``.
        eps: added to s².
        momentum: weight of a batch in the running statistics; None for a cumulative average.
        affine: learn weight and bias.
        track_running_stats: keep running statistics for evaluation.
        bias: with ``affine``, learn the bias.
        k: with ``p=math.inf``, the mean of the k largest deviations (F7).
        constant: ``"exact"``, ``"paper"``, ``"none"``, or a positive number that multiplies the exact constant.
        act: None or ``"relu"``, applied in the same pass.
        memory: ``"exact"``, or ``"lean"`` to keep less for the backward pass where a kernel can.

    Shape:
        input, residual and output: (N, C, H, W)

    Example::

        >>> bn = LpBatchNorm2d(16, p=1.5, act="relu")
        >>> x = torch.randn(8, 16, 4, 4)
        >>> bn(x, residual=x).shape
        torch.Size([8, 16, 4, 4])
    """

    _ranks = (4,)


class LpBatchNorm3d(LpBatchNorm):
    """Batch norm in the Lp norm over (N, C, D, H, W) inputs; see :class:`LpBatchNorm2d`.

    >>> LpBatchNorm3d(4, p=1.5)(torch.randn(2, 4, 3, 3, 3)).shape
    torch.Size([2, 4, 3, 3, 3])
    """

    _ranks = (5,)


class _FixedBatchNorm(LpBatchNorm):
    """A batch norm whose class names the statistic; the arguments are ``torch.nn.BatchNorm``'s, in its order."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        bias: bool = True,
        constant: str | float = "exact",
        act: str | None = None,
        memory: str = "exact",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            self._default_p,
            eps,
            momentum,
            affine,
            track_running_stats,
            bias=bias,
            constant=constant,
            act=act,
            memory=memory,
            device=device,
            dtype=dtype,
        )


class L1BatchNorm1d(_FixedBatchNorm, LpBatchNorm1d):
    """L1 batch norm (F5) over (N, C) or (N, C, L) inputs; see :class:`L1BatchNorm2d`.

    >>> L1BatchNorm1d(4)(torch.randn(8, 4)).shape
    torch.Size([8, 4])
    """


class L1BatchNorm2d(_FixedBatchNorm, LpBatchNorm2d):
    """L1 batch norm (F5) over (N, C, H, W) inputs: divides by √(π/2)·mean|x − μ|, no squares and no root of a sum.

    ``running_var`` averages the square of that scale times n/(n−1): under a Gaussian the scale estimates σ√(1−1/n), as
    the biased standard deviation does, so it is unbiased in the same sense as ``torch.nn.BatchNorm2d``'s. Arguments as
    in ``torch.nn.BatchNorm2d``; then ``constant``, ``act`` and ``memory`` as in :class:`LpBatchNorm2d`.

    Example::

        >>> bn = L1BatchNorm2d(16, act="relu")
        >>> bn(torch.randn(8, 16, 4, 4)).shape
        torch.Size([8, 16, 4, 4])
    """


class L1BatchNorm3d(_FixedBatchNorm, LpBatchNorm3d):
    """L1 batch norm (F5) over (N, C, D, H, W) inputs; see :class:`L1BatchNorm2d`.

    >>> L1BatchNorm3d(4)(torch.randn(2, 4, 3, 3, 3)).shape
    torch.Size([2, 4, 3, 3, 3])
    """


class LInfBatchNorm1d(_FixedBatchNorm, LpBatchNorm1d):
    """L∞ batch norm (F6) over (N, C) or (N, C, L) inputs; see :class:`LInfBatchNorm2d`.

    >>> LInfBatchNorm1d(4)(torch.randn(8, 4)).shape
    torch.Size([8, 4])
    """

    _default_p = math.inf


class LInfBatchNorm2d(_FixedBatchNorm, LpBatchNorm2d):
    """L∞ batch norm (F6) over (N, C, H, W) inputs: divides by C_∞(n)·max|x − μ|.

    Arguments as in ``torch.nn.BatchNorm2d``; then ``constant``, ``act`` and ``memory`` as in :class:`LpBatchNorm2d`.

    Example::

        >>> LInfBatchNorm2d(16)(torch.randn(8, 16, 4, 4)).shape
        torch.Size([8, 16, 4, 4])
    """

    _default_p = math.inf


class LInfBatchNorm3d(_FixedBatchNorm, LpBatchNorm3d):
    """L∞ batch norm (F6) over (N, C, D, H, W) inputs; see :class:`LInfBatchNorm2d`.

    >>> LInfBatchNorm3d(4)(torch.randn(2, 4, 3, 3, 3)).shape
    torch.Size([2, 4, 3, 3, 3])
    """

    _default_p = math.inf


class RangeBatchNorm1d(_FixedBatchNorm, LpBatchNorm1d):
    """Range batch norm over (N, C) or (N, C, L) inputs; see :class:`RangeBatchNorm2d`.

    >>> RangeBatchNorm1d(4)(torch.randn(8, 4)).shape
    torch.Size([8, 4])
    """

    _default_p = "range"


class RangeBatchNorm2d(_FixedBatchNorm, LpBatchNorm2d):
    """Range batch norm over (N, C, H, W) inputs: divides by C(n)·(max x − min x).

    ``running_var`` averages the scale's square as it is: the range does not contain the sample mean. Arguments as in
    ``torch.nn.BatchNorm2d``; then ``constant``, ``act`` and ``memory`` as in :class:`LpBatchNorm2d`.

    Example::

        >>> RangeBatchNorm2d(16)(torch.randn(8, 16, 4, 4)).shape
        torch.Size([8, 16, 4, 4])
    """

    _default_p = "range"


class RangeBatchNorm3d(_FixedBatchNorm, LpBatchNorm3d):
    """Range batch norm over (N, C, D, H, W) inputs; see :class:`RangeBatchNorm2d`.

    >>> RangeBatchNorm3d(4)(torch.randn(2, 4, 3, 3, 3)).shape
    torch.Size([2, 4, 3, 3, 3])
    """

    _default_p = "range"


class _TopKBatchNorm(LpBatchNorm):
    _default_p = math.inf
    _default_k = 10

    def __init__(
        self,
        num_features: int,
        k: int = 10,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        bias: bool = True,
        constant: str | float = "exact",
        act: str | None = None,
        memory: str = "exact",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            math.inf,
            eps,
            momentum,
            affine,
            track_running_stats,
            bias=bias,
            k=k,
            constant=constant,
            act=act,
            memory=memory,
            device=device,
            dtype=dtype,
        )


class TopKBatchNorm1d(_TopKBatchNorm, LpBatchNorm1d):
    """Top(k) batch norm (F7) over (N, C) or (N, C, L) inputs; see :class:`TopKBatchNorm2d`.

    >>> TopKBatchNorm1d(4, k=3)(torch.randn(8, 4)).shape
    torch.Size([8, 4])
    """


class TopKBatchNorm2d(_TopKBatchNorm, LpBatchNorm2d):
    """Top(k) batch norm (F7) over (N, C, H, W) inputs: divides by C·(mean of the k largest |x − μ|).

    Args:
        num_features: number of channels C.
        k: how many deviations to average; at most the N·H·W values of a channel.
        others: as in :class:`LpBatchNorm2d`.

    Example::

        >>> TopKBatchNorm2d(16, k=10)(torch.randn(8, 16, 4, 4)).shape
        torch.Size([8, 16, 4, 4])
    """


class TopKBatchNorm3d(_TopKBatchNorm, LpBatchNorm3d):
    """Top(k) batch norm (F7) over (N, C, D, H, W) inputs; see :class:`TopKBatchNorm2d`.

    >>> TopKBatchNorm3d(4, k=3)(torch.randn(2, 4, 3, 3, 3)).shape
    torch.Size([2, 4, 3, 3, 3])
    """


class _MeanOnlyBatchNorm(LpBatchNorm):
    _default_p = "mean"

    def __init__(
        self,
        num_features: int,
        *,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        act: str | None = None,
        memory: str = "exact",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            "mean",
            0.0,
            momentum,
            affine,
            track_running_stats,
            act=act,
            memory=memory,
            device=device,
            dtype=dtype,
        )


class MeanOnlyBatchNorm1d(_MeanOnlyBatchNorm, LpBatchNorm1d):
    """Mean-only batch norm (F15) over (N, C) or (N, C, L) inputs; see :class:`MeanOnlyBatchNorm2d`.

    >>> MeanOnlyBatchNorm1d(4)(torch.randn(8, 4)).shape
    torch.Size([8, 4])
    """


class MeanOnlyBatchNorm2d(_MeanOnlyBatchNorm, LpBatchNorm2d):
    """Mean-only batch norm (F15) over (N, C, H, W) inputs: x − μ + bias; the partner of weight norm.

    There is no weight; eps is 0 and ``running_var`` stays 1, so that evaluation is still exactly a batch norm.

    Args:
        num_features: number of channels C.
        momentum, affine, track_running_stats: as in ``torch.nn.BatchNorm2d``; ``affine`` learns the bias alone.
        act, memory: as in :class:`LpBatchNorm2d`.

    Example::

        >>> MeanOnlyBatchNorm2d(16)(torch.randn(8, 16, 4, 4)).shape
        torch.Size([8, 16, 4, 4])
    """


class MeanOnlyBatchNorm3d(_MeanOnlyBatchNorm, LpBatchNorm3d):
    """Mean-only batch norm (F15) over (N, C, D, H, W) inputs; see :class:`MeanOnlyBatchNorm2d`.

    >>> MeanOnlyBatchNorm3d(4)(torch.randn(2, 4, 3, 3, 3)).shape
    torch.Size([2, 4, 3, 3, 3])
    """
