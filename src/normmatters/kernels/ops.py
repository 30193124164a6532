"""The fused batch norm as PyTorch operators: ``torch.ops.normmatters.*``.

Training is two operators. ``batch_norm_statistics`` reads the input once, gives the batch's statistics and moves the
running ones (the only thing that is changed in place). ``batch_norm_apply`` normalizes; it is functional, and its
autograd formula is the gradient of the *whole* batch norm, statistics included, so the first one needs none.
Splitting them this way keeps the buffer update inside the kernel that has the numbers, and the differentiable operator
free of mutation, as ``torch.compile`` wants it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normmatters.kernels.triton import batch_norm as kernels
from normmatters.kernels.triton.layout import memory_format


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=memory_format(x))


def _format(g: Tensor, channels_last: bool) -> torch.memory_format:
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last if g.dim() == 4 else torch.channels_last_3d


@torch.library.custom_op("normmatters::batch_norm_statistics", mutates_args=("running_mean", "running_var"))
def batch_norm_statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    kind: str,
    k: int,
    constant: float,
) -> tuple[Tensor, Tensor]:
    """(μ, 1/D, s/D) as [3, C], and the offsets of the extreme elements as [kept, C]."""
    return kernels.statistics(_dense(x), running_mean, running_var, momentum, eps, kind, k, constant)


@batch_norm_statistics.register_fake
def _(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    kind: str,
    k: int,
    constant: float,
) -> tuple[Tensor, Tensor]:
    channels = x.shape[1]
    stats = x.new_empty((3, channels), dtype=torch.float32)
    return stats, x.new_empty((kernels.kept(kind, k), channels), dtype=torch.int64)


@torch.library.custom_op("normmatters::batch_norm_apply", mutates_args=())
def batch_norm_apply(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: Tensor,
    index: Tensor,
    kind: str,
    constant: float,
    relu: bool,
    lean: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the codes and counts that the backward pass needs (empty unless ``save``)."""
    x = _dense(x)
    if residual is not None:
        residual = residual.contiguous(memory_format=memory_format(x))
    return kernels.normalize(x, weight, bias, residual, statistics, kind, relu=relu, lean=lean, save=save)


@batch_norm_apply.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: Tensor,
    index: Tensor,
    kind: str,
    constant: float,
    relu: bool,
    lean: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    z = torch.empty_like(x, memory_format=memory_format(x))
    shape, bits, counts = kernels.saved_shapes(z, kind, relu=relu, residual=residual is not None, lean=lean)
    if not save:
        shape, bits, counts = (0, 0), 0, (0, 0)
    code = x.new_empty(shape, dtype=kernels.code_dtype(bits))
    return z, code, x.new_empty(counts, dtype=torch.int32)


@torch.library.custom_op("normmatters::batch_norm_backward", mutates_args=())
def batch_norm_backward(
    g: Tensor,
    saved: Tensor,
    code: Tensor,
    count: Tensor,
    statistics: Tensor,
    index: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    constant: float,
    relu: bool,
    residual: bool,
    lean: bool,
    need_dresidual: bool,
    channels_last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dγ, dβ, and the residual's gradient (empty where it is g itself)."""
    return kernels.gradient(
        g.contiguous(memory_format=_format(g, channels_last)), saved, code, count, statistics, index, weight, bias, kind, constant,
        relu=relu, residual=residual, lean=lean, need_dresidual=need_dresidual,
    )  # fmt: skip


@batch_norm_backward.register_fake
def _(
    g: Tensor,
    saved: Tensor,
    code: Tensor,
    count: Tensor,
    statistics: Tensor,
    index: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    constant: float,
    relu: bool,
    residual: bool,
    lean: bool,
    need_dresidual: bool,
    channels_last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx = torch.empty_like(g, memory_format=_format(g, channels_last))
    dweight = g.new_empty(g.shape[1], dtype=torch.float32)
    dresidual = torch.empty_like(dx) if need_dresidual and relu else g.new_empty(0)
    return dx, dweight, torch.empty_like(dweight), dresidual


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, residual, statistics, index, kind, constant, relu, lean, _ = inputs
    z, code, count = output
    ctx.channels_last = memory_format(x) is not torch.contiguous_format
    if lean:
        saved = None if residual is not None else z
    else:
        saved = None if kind == "mean" else _dense(x)
    ctx.save_for_backward(saved, code, count, statistics, index, weight, bias)
    ctx.arguments = (kind, constant, relu, residual is not None, lean)
    ctx.need_dresidual = residual is not None and residual.requires_grad


def _backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved, code, count, statistics, index, weight, bias = ctx.saved_tensors
    relu = ctx.arguments[2]
    dx, dweight, dbias, dresidual = batch_norm_backward(
        g, g if saved is None else saved, code, count, statistics, index, weight, bias,
        *ctx.arguments, ctx.need_dresidual, ctx.channels_last,
    )  # fmt: skip
    return (
        dx,
        None if weight is None else dweight.to(weight.dtype),
        None if bias is None else dbias.to(bias.dtype),
        (dresidual if relu else g) if ctx.need_dresidual else None,
        *[None] * 7,
    )


batch_norm_apply.register_autograd(_backward, setup_context=_setup_context)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    *,
    kind: str,
    k: int | None,
    constant: float,
    act: str | None,
    residual: Tensor | None,
    memory: str,
) -> Tensor:
    """A training step's batch norm through the two operators; arguments are checked by the dispatcher."""
    with torch.no_grad():
        statistics, index = batch_norm_statistics(
            x.detach(), running_mean, running_var, momentum, eps, kind, k or 0, constant
        )
    inputs = (x, weight, bias, residual)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    lean = memory == "lean" and kind == "l1"  # the other statistics' gradients need the input itself
    z, _, _ = batch_norm_apply(
        x, weight, bias, residual, statistics, index, kind, constant, act == "relu", lean, save
    )
    return z
