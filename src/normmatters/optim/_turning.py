"""What `AngularSGD` and `Angular` ask of the weights they turn, and the norms they keep."""

from __future__ import annotations

import math
from collections.abc import Container

from torch import Tensor

from normmatters.optim._common import Group, host_known, host_value, is_capturing, parameter_label, whole
from normmatters.optim._rows import channel_norms


def check_angle(angle: float | Tensor) -> None:
    """Raise unless the angle is a turn of less than a right angle. Reads no device."""
    if host_known(angle) and not 0 <= host_value(angle) < math.pi / 2:
        raise ValueError(f"the angle a step must be in [0, π/2) radians, got {host_value(angle)}")


def check_turnable(index: int, group: Group) -> None:
    """Raise if a parameter of the group has no neurons with a direction, by its shape. Reads no device."""
    dim = group["dim"]
    for i, p in enumerate(group["params"]):
        if dim is not None and not (isinstance(dim, int) and -p.ndim <= dim < p.ndim):
            raise ValueError(f"dim {dim} is no dimension of {parameter_label(index, group, i)}")
        if p.is_complex():
            raise ValueError(f"{parameter_label(index, group, i)} is complex: only real weights have angles here")
        if p.numel() < 2 * (1 if dim is None else p.shape[dim]):
            raise ValueError(
                f"{parameter_label(index, group, i)} has fewer than two numbers a neuron, so it has no direction to "
                "turn: put it in a group with angular=False"
            )


def first_norms(index: int, group: Group, known: Container[Tensor]) -> dict[Tensor, Tensor]:
    """The norms of every neuron of the parameters that step for the first time: those that will be kept.

    Waits for the device, once in a run. Raises on a neuron of norm zero, which has no direction: if it was left so by
    mistake it would never learn. Later it may well be pruned.
    """
    found: dict[Tensor, Tensor] = {}
    for i, p in enumerate(group["params"]):
        if p.grad is None or p in known:
            continue
        if is_capturing():
            label = parameter_label(index, group, i)
            raise ValueError(f"{label} takes its first step inside a CUDA graph: take one step before the capture")
        norm = channel_norms(p.detach(), group["dim"])
        values = whole(norm)
        bad = ((values == 0) | ~values.isfinite()).nonzero().flatten().tolist()
        if bad:
            label, value = parameter_label(index, group, i), values[bad[0]].item()
            raise ValueError(
                f"{label}: neuron {bad[0]} has norm {value:g}; {len(bad)} of its {norm.numel()} neurons have no "
                "direction. Initialise them, or put it in a group with angular=False; if they are pruned, keep the "
                "mask of torch.nn.utils.prune, behind which they have one"
            )
        found[p] = norm
    return found
