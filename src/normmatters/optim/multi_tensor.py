"""Row arithmetic over lists of weights: the one place where the angular optimizers touch the numbers.

`rotate_channels_` is the boundary: plain PyTorch for any tensor, one Triton launch for all float32 weights on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from normmatters.optim._rows import _reduced, _work_dtype

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def rotate_channel_(
    weight: Tensor, direction: Tensor, grad: Tensor, norm: Tensor, angle: float | Tensor, dim: int | None = 0
) -> None:
    """Turn every channel w of ``weight`` by ``angle`` away from its channel d of ``direction``, in place.

    w ← ρ(cos θ·ŵ − sin θ·d̂⊥), where d⊥ = d − ⟨d, ŵ⟩ŵ. The angle is exact and so is the new norm ρ. A channel with no
    gradient, or whose direction lies along w, keeps its direction.

    Args:
        weight, direction, grad: one shape.
        norm: ρ of every channel, `[weight.shape[dim]]`, or `[1]` for ``dim=None``.
        angle: θ in radians, a number or a 0-dim tensor.
        dim: channel dimension; None takes the whole tensor as one channel.

    >>> w = torch.tensor([[1.0, 0.0]])
    >>> rotate_channel_(w, torch.tensor([[5.0, 5.0]]), torch.ones(1, 2), torch.ones(1), 0.5235988)
    >>> w
    tensor([[ 0.8660, -0.5000]])
    """
    dims, dtype = _reduced(weight.ndim, dim), _work_dtype(weight)
    w, d = weight.to(dtype), direction.to(dtype)
    shape = [1] * weight.ndim
    if dim is not None:
        shape[dim] = -1
    length = torch.linalg.vector_norm(w, dim=dims, keepdim=True)
    along = (w * d).sum(dims, keepdim=True) / length.square()
    # Subtract first, square after: ‖d‖² − ⟨d, ŵ⟩² would lose the digits of a direction that is nearly along w.
    perpendicular = d - along * w
    size = torch.linalg.vector_norm(perpendicular, dim=dims, keepdim=True)
    rounding = 16 * torch.finfo(dtype).eps * torch.linalg.vector_norm(d, dim=dims, keepdim=True)
    turns = (grad != 0).any(dims, keepdim=True) & (size > rounding)
    theta = torch.where(turns, torch.as_tensor(angle, dtype=dtype, device=weight.device), 0.0)
    rho = norm.to(dtype).view(shape)
    size = torch.where(turns, size, 1.0)
    weight.copy_(theta.cos() * (rho / length) * w - theta.sin() * (rho / size) * perpendicular)


def rotate_channels_(
    weights: list[Tensor],
    directions: list[Tensor],
    grads: list[Tensor],
    norms: list[Tensor],
    angle: float | Tensor,
    dim: int | None,
    cache: dict[Any, Any],
) -> None:
    """`rotate_channel_` for lists of tensors; all that one launch can take go into one launch.

    ``cache`` belongs to the caller and keeps the angle's place on each device from step to step.
    """
    by_device: dict[torch.device, list[int]] = {}
    for i, weight in enumerate(weights):
        if dim == 0 and weight.is_cuda and _HAS_TRITON and _one_layout(weight, directions[i], grads[i]):
            by_device.setdefault(weight.device, []).append(i)
        else:
            rotate_channel_(weight, directions[i], grads[i], norms[i], angle, dim)
    for members in by_device.values():
        lists = ([xs[i] for i in members] for xs in (weights, directions, grads, norms))
        rotate_rows_triton_(*lists, angle=angle, cache=cache)


def rotate_rows_triton_(
    weights: list[Tensor],
    directions: list[Tensor],
    grads: list[Tensor],
    norms: list[Tensor],
    *,
    angle: float | Tensor,
    cache: dict[Any, Any],
) -> None:
    """The Triton launch, for float32 tensors of one device whose rows are dense and of one layout."""
    from normmatters.kernels.triton.rotate_rows import rotate_rows_  # triton is there only where GPUs are

    device = weights[0].device
    theta = cache.setdefault(device, torch.zeros((), device=device))
    if isinstance(angle, Tensor):
        theta.copy_(angle)
    else:
        theta.fill_(angle)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        rotate_rows_(weights, directions, grads, norms, theta)


def _one_layout(weight: Tensor, direction: Tensor, grad: Tensor) -> bool:
    """Whether all three are float32, strided alike, and each slice along dimension 0 fills one stretch of memory."""
    if not (weight.dtype == direction.dtype == grad.dtype == torch.float32) or weight.numel() == 0:
        return False
    if weight.is_contiguous() and direction.is_contiguous() and grad.is_contiguous():
        return True
    strides = weight.stride()
    if not (strides == direction.stride() == grad.stride()):
        return False
    # Any order inside the slice will do: a channels_last weight is dense in this sense.
    extent = 1 + sum((n - 1) * s for n, s in zip(weight.shape[1:], strides[1:]))
    return extent == strides[0] == weight.numel() // weight.shape[0]
