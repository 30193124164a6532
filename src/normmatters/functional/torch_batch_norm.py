"""Torch's own batch norm, and where its gradients are wrong on a CPU: in memory layouts that strides do not show."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

#: Instead of eps = 0, which torch 2.11 refuses: added to any scale's square that is not 0 it changes nothing.
TINY = torch.finfo(torch.float32).tiny


def torch_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """:func:`torch.nn.functional.batch_norm` with right gradients for every layout (see :func:`hides_layout`).

    In evaluation its backward pass reads the running statistics, which a training step in between may have moved: it
    gets copies.

    input: (N, C, ...); the other tensors: (C,).
    """
    if not training and _is_recorded(input, weight, bias):
        running_mean, running_var = (None if t is None else t.clone() for t in (running_mean, running_var))
    y = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, max(eps, TINY))
    if y.requires_grad and hides_layout(input):
        y.register_hook(partial(_with_strides, strides=input.stride()))
    return y


def _is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd keeps a call for its backward pass. To who traces it, it is to stay PyTorch's one operator."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and any(t is not None and t.requires_grad and not t.is_inference() for t in tensors)
    )


def hides_layout(x: Tensor) -> bool:
    """Whether torch may take x, (N, C, ...), and a gradient for equally laid out, though one is in channels_last.

    It judges by all strides, but those of dimensions of size 1 mean nothing. After ``y.squeeze(-1).transpose(1, 2)``
    the gradient of a y of (N, C, L, 1) is in channels_last and does not look it; it is then read in the wrong order
    (torch 2.13, on a CPU). A gradient that has the very strides of x is not mistaken; nor is an x that is not dense.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return (
        x.dim() in formats
        and x.device.type == "cpu"
        and (x.shape[0] == 1 or 1 in x.shape[2:])
        and x.shape[2:].numel() > 1
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and (x.is_contiguous() or x.is_contiguous(memory_format=formats[x.dim()]))
    )


def _with_strides(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    if gradient.stride() == strides:
        return gradient
    return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)
