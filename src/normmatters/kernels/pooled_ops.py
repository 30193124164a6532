"""Batch norm, ReLU and max pool as operators, ``torch.ops.normmatters.pooled_batch_norm_*``, and as one eager node.

As in :mod:`normmatters.kernels.ops`: an operator for the whole forward pass, and one for its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normmatters.kernels.double_backward import once_differentiable
from normmatters.kernels.operators import (
    LIBRARY,
    any_requires_grad,
    in_dtype,
    needs_operators,
    on_device,
    register,
    register_gradient,
)
from normmatters.kernels.triton import batch_norm_statistics
from normmatters.kernels.triton import pooled_batch_norm as kernels
from normmatters.norm import Norm, RunningStats

LIBRARY.define(
    "pooled_batch_norm_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, Tensor(c!)? batches, float momentum, float eps, float constant, bool save) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "pooled_batch_norm_backward(Tensor g, Tensor winner, Tensor code, Tensor count, Tensor statistics, Tensor? weight, "
    "float constant, int height, int width) -> (Tensor, Tensor, Tensor)"
)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    momentum: float,
    eps: float,
    constant: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The pooled output, and what the backward pass needs: winners, codes, counts (empty unless ``save``), statistics.

    Moves the running statistics and raises ``batches`` by one.
    """
    x = _channels_last(x)
    statistics, _ = batch_norm_statistics.statistics(
        x, running_mean, running_var, momentum, eps, "l1", 0, constant, batches
    )
    return *kernels.normalize(x, weight, bias, statistics, save=save), statistics


def _fake_forward(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *_, save = arguments
    shape = kernels.shape_of(x)
    saved = kernels.saved_shapes(shape, x.element_size(), save=save)
    return (
        torch.empty(shape.pooled, dtype=x.dtype, device=x.device, memory_format=torch.channels_last),
        x.new_empty(saved.winner),
        x.new_empty(saved.code, dtype=torch.uint8),
        x.new_empty(saved.counts, dtype=saved.count_dtype),
        x.new_empty((3, x.shape[1]), dtype=torch.float32),
    )


def _backward(
    g: Tensor,
    winner: Tensor,
    code: Tensor,
    count: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    constant: float,
    height: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.gradient(_channels_last(g), winner, code, count, statistics, weight, constant, (height, width))


def _fake_backward(g: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, height, width = arguments
    shape = (*g.shape[:2], height, width)
    dx = torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
    dweight = g.new_empty(g.shape[1], dtype=torch.float32)
    return dx, dweight, torch.empty_like(dweight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, *_, constant, _ = inputs
    _, *saved = output
    ctx.save_for_backward(*saved, weight)
    ctx.arguments = (constant, int(x.shape[2]), int(x.shape[3]))
    ctx.bias_dtype = None if bias is None else bias.dtype


def _input_gradients(ctx: Any, g: Tensor, backward: Any) -> tuple[Tensor | None, ...]:
    """Gradients of x, γ and β by ``backward``: the kernels, or the operator for them."""
    *saved, weight = ctx.saved_tensors
    dx, dweight, dbias = backward(g, *saved, weight, *ctx.arguments)
    return (
        dx,
        in_dtype(dweight, None if weight is None else weight.dtype),
        in_dtype(dbias, ctx.bias_dtype),
    )


def _register() -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, winner, _, _, statistics = output
        ctx.mark_non_differentiable(winner, statistics)
        _save(ctx, inputs, output)

    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *_input_gradients(ctx, g, torch.ops.normmatters.pooled_batch_norm_backward), *[None] * 7

    register("pooled_batch_norm_forward", _forward, _fake_forward)
    register("pooled_batch_norm_backward", _backward, _fake_backward)
    register_gradient("pooled_batch_norm_forward", save, backward)


_register()


class _PooledBatchNorm(torch.autograd.Function):
    """The eager node: statistics and normalization forward, one gradient backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        options: tuple[Any, ...],
    ) -> Tensor:
        inputs = (x, weight, bias, *options)
        output = _forward(*inputs)
        *_, save = options
        if save:
            _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_input_gradients(ctx, g, _backward), None


def pooled_batch_norm(
    x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None, running: RunningStats
) -> Tensor:
    """L1 batch norm in training, ReLU and pool of a channels-last ``x``; the dispatcher has checked them."""
    constant = norm.scale_constant(int(x.numel() // x.shape[1]))
    weight, bias = weight if weight is None else weight.contiguous(), bias if bias is None else bias.contiguous()
    save = torch.is_grad_enabled() and any_requires_grad(x, weight, bias)
    options = (running.mean, running.var, running.num_batches, running.momentum, norm.eps, constant, save)
    if not needs_operators():
        with on_device(x.device):
            out: Tensor = _PooledBatchNorm.apply(x, weight, bias, options)
        return out
    z: Tensor = torch.ops.normmatters.pooled_batch_norm_forward(x, weight, bias, *options)[0]
    return z
