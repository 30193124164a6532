"""Backward passes that can be differentiated only once, and say so to whoever asks for more."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MESSAGE = (
    "this backward pass is written by hand and can be differentiated only once; "
    "for second derivatives use normmatters.functional.lp_batch_norm, lp_layer_norm, lp_rms_norm or bounded_weight"
)


class DifferentiatedTwice(torch.autograd.Function):
    """Identity in its first argument, a gradient, whose backward pass says why there is none.

    The other arguments are what the gradient is computed from. It must hang on them: what leads nowhere is passed by.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(_MESSAGE)


class _Held:
    """A node's context that hands out its saved tensors twice: activation checkpointing does so a single time."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For a node's backward pass: its results may be used where gradients are recorded, and not differentiated.

    PyTorch's of this name makes results that lead nowhere, so only ``.backward()`` notices: ``torch.autograd.grad``
    goes the ways that lead to what it is asked for, and a Hessian would silently lack the node's part.

    The node's first argument is its input, and the first tensor that it saves is that, or comes of it. Where it saved
    none, no result can lead there, and recording is refused at once; unless none depends on the input: ``ctx.linear``.
    """

    @functools.wraps(backward)
    def either(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.is_grad_enabled():  # as nearly always: it costs nothing there
            return backward(ctx, *gradients)
        held = _Held(ctx)
        saved = held.saved_tensors
        known = [t for t in (*gradients, *saved) if t is not None and t.requires_grad]
        if ctx.needs_input_grad[0] and not getattr(ctx, "linear", False) and not any(t is saved[0] for t in known):
            raise RuntimeError(_MESSAGE)
        with torch.no_grad():
            found = backward(held, *gradients)
        return tuple([t if t is None else DifferentiatedTwice.apply(t, *known) for t in found])

    return either
