"""What the optimizers here share: how a parameter is named in an error, and checks made before any state changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]


def parameter_label(group_index: int, group: Group, index: int) -> str:
    """``"'conv1.weight' (parameter 0 of group 1, shape (8, 1, 3, 3))"``: names a parameter in an error message."""
    place = f"parameter {index} of group {group_index}, shape {tuple(group['params'][index].shape)}"
    names = group.get("param_names")
    return f"'{names[index]}' ({place})" if names else place


def host_value(value: float | Tensor) -> float:
    """A number that may live in a tensor, as a Python float (waits for the device when it lives on one)."""
    return value.item() if isinstance(value, Tensor) else value


def host_known(value: float | Tensor) -> bool:
    """Whether the number can be read without waiting for a device."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def check_number(name: str, value: float | Tensor, low: float = 0.0, below: float | None = None) -> None:
    """Raise unless ``value`` is a real number (or a one-element tensor of it) in [low, below)."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be a number or a tensor of one element, got shape {tuple(value.shape)}")
        if not host_known(value):
            return
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not low <= value or (below is not None and not value < below) or value == float("inf"):
        bound = f"in [{low:g}, {below:g})" if below is not None else f">= {low:g} and finite"
        raise ValueError(f"{name} must be {bound}, got {value}")


def check_dense_gradients(group_index: int, group: Group) -> None:
    """Raise on a sparse gradient, naming its parameter."""
    for i, p in enumerate(group["params"]):
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ValueError(
                f"{parameter_label(group_index, group, i)} has a {p.grad.layout} gradient; "
                "a direction needs the whole vector, so only dense gradients are supported"
            )


def is_capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
