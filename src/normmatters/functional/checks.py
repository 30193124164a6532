"""What the normalizations accept. Each check runs before any state changes and says what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normmatters.norm import Norm, RunningStats, check_act


def check_batch_norm(
    input: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStats,
    training: bool,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
) -> None:
    """Raise a ``ValueError`` or ``TypeError`` for anything that batch norm over dimension 1 cannot take.

    An empty batch passes, as in PyTorch.
    """
    if act is not None and act != "relu":
        check_act(act)
    _check_floating("input", input)
    if input.dim() < 2:
        raise ValueError(f"input must have a batch and a channel dimension, (N, C, ...), got shape {_shape(input)}")
    channels, device = input.shape[1], input.device
    for name, parameter in (
        ("running_mean", running.mean), ("running_var", running.var), ("weight", weight), ("bias", bias)
    ):  # fmt: skip
        if parameter is None:
            continue
        if parameter.shape != (channels,):
            raise ValueError(
                f"{name} must have shape ({channels},), one value for each channel of an input of shape "
                f"{_shape(input)}, got {_shape(parameter)}"
            )
        if parameter.device != device:
            raise ValueError(_elsewhere(name, parameter, device))
    if norm.kind == "mean" and weight is not None:
        raise ValueError("mean-only batch norm (p='mean') has no scale: weight must be None")
    if residual is not None:
        check_residual(residual, input)
    if not training:
        if running.mean is None or (running.var is None and norm.kind != "mean"):
            raise ValueError("running_mean and running_var are needed when not training, got None")
        return
    if input.numel() == 0:
        return
    n = input.numel() // channels
    if n == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {_shape(input)}")
    if norm.k is not None and norm.k > n:
        raise ValueError(
            f"Top(k) needs k <= the {n} values per channel of an input of shape {_shape(input)}, got k={norm.k}"
        )


def check_residual(residual: Tensor, input: Tensor) -> None:
    """Raise unless ``residual`` can be added to the normalized input."""
    _check_floating("residual", residual)
    if residual.shape != input.shape:
        raise ValueError(f"residual must have the input's shape {_shape(input)}, got {_shape(residual)}")
    if residual.device != input.device:
        raise ValueError(_elsewhere("residual", residual, input.device))


def check_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], norm: Norm, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Raise a ``ValueError`` or ``TypeError`` for anything that layer or RMS norm cannot take."""
    if norm.kind == "mean":
        raise ValueError("layer and RMS norm need a scale: p must not be 'mean'")
    _check_floating("input", input)
    shape = tuple(normalized_shape)
    if not shape or input.dim() < len(shape) or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(f"input must end in normalized_shape {shape}, which must not be empty, got {_shape(input)}")
    for name, parameter in {"weight": weight, "bias": bias}.items():
        if parameter is None:
            continue
        if tuple(parameter.shape) != shape:
            raise ValueError(f"{name} must have normalized_shape {shape}, got {_shape(parameter)}")
        if parameter.device != input.device:
            raise ValueError(_elsewhere(name, parameter, input.device))
    if norm.k is not None and norm.k > math.prod(shape):
        raise ValueError(f"Top(k) needs k <= the {math.prod(shape)} values of normalized_shape {shape}, got k={norm.k}")


def _check_floating(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must have a real floating-point dtype, got {tensor.dtype}")
    if tensor.dtype.itemsize == 1:  # torch computes nothing in fp8
        raise TypeError(f"{name} must have a floating-point dtype of 16 bits or more, got {tensor.dtype}")


def _elsewhere(name: str, tensor: Tensor, device: torch.device) -> str:
    return f"{name} must be on the input's device {device}, got one on {tensor.device}"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
