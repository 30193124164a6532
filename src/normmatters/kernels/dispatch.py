"""Chooses the backend of each normalization: the fused kernels where they apply, the plain equation elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from normmatters import functional, precision


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    p: float | str = 1,
    k: int | None = None,
    constant: str | float = "exact",
    act: str | None = None,
    residual: Tensor | None = None,
    memory: str = "exact",
) -> Tensor:
    """Batch norm of any kind; see :func:`normmatters.functional.lp_batch_norm` for the equation."""
    if precision.active() is not None:
        return precision.batch_norm(
            input,
            running_mean,
            running_var,
            weight,
            bias,
            training,
            momentum,
            eps,
            p=p,
            k=k,
            constant=constant,
            act=act,
            residual=residual,
        )
    return functional.lp_batch_norm(
        input,
        running_mean,
        running_var,
        weight,
        bias,
        training,
        momentum,
        eps,
        p=p,
        k=k,
        constant=constant,
        act=act,
        residual=residual,
    )


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    p: float | str = 1,
    k: int | None = None,
    constant: str | float = "exact",
) -> Tensor:
    """Layer norm of any kind; see :func:`normmatters.functional.lp_layer_norm`."""
    if precision.active() is not None:
        return precision.layer_norm(input, normalized_shape, weight, bias, eps, p=p, k=k, constant=constant)
    return functional.lp_layer_norm(input, normalized_shape, weight, bias, eps, p=p, k=k, constant=constant)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    *,
    p: float = 1,
    constant: str | float = "exact",
) -> Tensor:
    """RMS norm of any kind; see :func:`normmatters.functional.lp_rms_norm`."""
    if precision.active() is not None:
        return precision.rms_norm(input, normalized_shape, weight, eps, p=p, constant=constant)
    return functional.lp_rms_norm(input, normalized_shape, weight, eps, p=p, constant=constant)
