"""The fused batch norm as PyTorch operators, ``torch.ops.normmatters.batch_norm_*``, and as one eager autograd node.

``batch_norm_forward`` is a whole forward pass: it takes the statistics of the batch, moves the running ones (the only
thing that is changed in place) and normalizes. Its autograd formula, ``batch_norm_backward``, is the gradient of the
whole, statistics included. ``torch.compile`` sees one operator each way, and no kernel comes between those of a layer,
which is what lets normalization begin before the statistics have ended.

A *link* is how a residual's gradient finds its way without being added to another one first. An output that goes on in
two ways gets two gradients, and autograd would add them before the backward pass sees the sum: three passes over
memory. So ``batch_norm_forward`` can hand out a second output, the link: shaped like z but one number in memory, and
nobody reads it. A later batch norm takes z as its residual together with the link, and sends the residual's gradient
back through that. The backward pass then gets both gradients, and adds them while it sums them.

In eager mode the same kernels are called from one :class:`torch.autograd.Function`: the dispatcher's way to a Python
operator and its autograd formula costs more time than launching all the kernels of a small layer.
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
from normmatters.kernels.triton import (
    batch_norm_gradient,
    batch_norm_normalize,
    batch_norm_small,
    batch_norm_statistics,
)
from normmatters.kernels.triton.batch_norm_plan import affine_of
from normmatters.kernels.triton.batch_norm_saved import inverts_output, kept, saved_shapes
from normmatters.kernels.triton.layout import memory_format, view_of
from normmatters.norm import Norm, RunningStats

LIBRARY.define(
    "batch_norm_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? link, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? batches, float momentum, float eps, str kind, "
    "int k, float constant, bool relu, bool lean, bool save, bool linked) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "batch_norm_backward(Tensor g, Tensor? link, Tensor saved, Tensor code, Tensor count, Tensor statistics, "
    "Tensor index, Tensor? weight, Tensor? bias, str kind, int k, float constant, bool relu, bool residual, "
    "bool lean, bool need_dresidual, bool channels_last) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=memory_format(x))


def _format(g: Tensor, channels_last: bool) -> torch.memory_format:
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last if g.dim() == 4 else torch.channels_last_3d


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    link: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    momentum: float,
    eps: float,
    kind: str,
    k: int,
    constant: float,
    relu: bool,
    lean: bool,
    save: bool,
    linked: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The output and what the backward pass needs; moves the running statistics and raises ``batches`` by one.

    For the backward pass: codes and counts (empty unless ``save``), (μ, 1/D, s/D) as [3, C], and the offsets of the
    extreme elements as [kept, C], or None where no element is kept.
    """
    x = _dense(x)
    if residual is not None:  # before the statistics, so that nothing is launched between them and what follows
        residual = residual.contiguous(memory_format=memory_format(x))
    running = (running_mean, running_var, momentum, eps, kind, k, constant, batches)
    index = None
    finalize = batch_norm_small.sums(x, *running)
    if finalize is None:
        statistics, index = batch_norm_statistics.statistics(x, *running)
    else:
        statistics = x.new_empty((3, x.shape[1]), dtype=torch.float32)
    z, code, count = batch_norm_normalize.normalize(
        x, weight, bias, residual, statistics, kind, relu=relu, lean=lean, save=save, early=True, finalize=finalize
    )
    return z, code, count, statistics, index


def _operator(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """:func:`_forward` and the link as an operator, which has a tensor for every output, be it an empty one."""
    z, code, count, statistics, index = _forward(x, *arguments)
    *_, linked = arguments
    return (
        z,
        code,
        count,
        _link(z) if linked else z.new_empty(0),
        statistics,
        z.new_empty((0, z.shape[1]), dtype=torch.int64) if index is None else index,
    )


def _link(z: Tensor) -> Tensor:
    return z.new_zeros(1).expand(z.shape)


def eager_link(z: Tensor) -> Tensor:
    """A link without the kernel that would set its number, which nobody reads."""
    return z.new_empty_strided(z.shape, (0,) * z.dim())


def _fake_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    *_, kind, k, _, relu, lean, save, linked = arguments
    z = torch.empty_like(x, memory_format=memory_format(x))
    saved = saved_shapes(
        view_of(z), z.element_size(), kind, relu=relu, residual=residual is not None, lean=lean, save=save
    )
    code = x.new_empty(saved.code, dtype=saved.code_dtype)
    count = x.new_empty(saved.counts, dtype=saved.count_dtype)
    channels = x.shape[1]
    statistics = x.new_empty((3, channels), dtype=torch.float32)
    index = x.new_empty((kept(kind, k), channels), dtype=torch.int64)
    return z, code, count, _link(z) if linked else x.new_empty(0), statistics, index


def _backward(g: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`_gradients` as an operator, which has a tensor for every output: an empty one where there is none."""
    dx, dweight, dbias, dresidual = _gradients(g, *arguments)
    return dx, dweight, dbias, g.new_empty(0) if dresidual is None else dresidual


def _gradients(
    g: Tensor,
    link: Tensor | None,
    saved: Tensor,
    code: Tensor,
    count: Tensor,
    statistics: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    k: int,
    constant: float,
    relu: bool,
    residual: bool,
    lean: bool,
    need_dresidual: bool,
    channels_last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    layout = _format(g, channels_last)
    dense = g.contiguous(memory_format=layout)
    # What was saved, too: hooks such as `save_on_cpu(pin_memory=True)` give it back with other strides.
    saved = dense if saved is g else saved.contiguous(memory_format=layout)
    if link is not None:
        link = link.contiguous(memory_format=layout)
    return batch_norm_gradient.gradient(
        dense, link, saved, code, count, statistics, index, weight, bias, kind, k, constant,
        relu=relu, residual=residual, lean=lean, need_dresidual=need_dresidual,
    )  # fmt: skip


def _fake_backward(g: Tensor, link: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, relu, _, _, need_dresidual, channels_last = arguments
    dx = torch.empty_like(g, memory_format=_format(g, channels_last))
    dweight = g.new_empty(g.shape[1], dtype=torch.float32)
    written = need_dresidual and (relu or link is not None)
    return dx, dweight, torch.empty_like(dweight), torch.empty_like(dx) if written else g.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """What the backward pass keeps: x (exact), the output (lean), or codes alone (lean, where nobody else keeps it)."""
    x, weight, bias, residual, link, *_, kind, k, constant, relu, lean, _, linked = inputs
    z, code, count, statistics, index = output
    saved = None
    if lean:
        saved = z if inverts_output(relu=relu, residual=residual is not None) else None
    elif kind != "mean":
        saved = _dense(x)
    else:
        ctx.linear = True
    ctx.save_for_backward(saved, code, count, statistics, index, weight, bias)
    need_dresidual = any_requires_grad(residual, link)
    channels_last = memory_format(x) is not torch.contiguous_format
    # Both of one norm's node: a residual changed since, be it in place, is of another, and the link would pass the
    # change by. So it might where the node stands for more, as a compiled graph's. Asked here, where a tracer's tensors
    # have nodes too.
    norm = None if link is None or residual is None else link.grad_fn
    ctx.linked, ctx.through_link = linked, getattr(norm, "linked", False) and residual.grad_fn is norm
    ctx.arguments = (kind, k, constant, relu, residual is not None, lean, need_dresidual, channels_last)


def _input_gradients(ctx: Any, g: Tensor, link: Tensor | None, backward: Any) -> tuple[Tensor | None, ...]:
    """Gradients of x, γ, β, the residual and the link, by ``backward``: the kernels, or the operator for them."""
    saved, code, count, statistics, index, weight, bias = ctx.saved_tensors
    _, _, _, relu, _, _, need_dresidual, _ = ctx.arguments
    link = link if ctx.linked else None
    dx, dweight, dbias, dresidual = backward(
        g, link, g if saved is None else saved, code, count, statistics, index, weight, bias, *ctx.arguments
    )
    if not (relu or ctx.linked):
        dresidual = g
    return (
        dx,
        *map(in_dtype, (dweight, dbias), affine_of(weight, bias)),
        dresidual if need_dresidual and not ctx.through_link else None,
        dresidual if need_dresidual and ctx.through_link else None,
    )


def _register() -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        z, code, count, _, statistics, index = output
        ctx.mark_non_differentiable(statistics)  # of integers autograd knows
        _save(ctx, inputs, (z, code, count, statistics, index))

    def backward(ctx: Any, g: Tensor, _code: Any, _count: Any, link: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *_input_gradients(ctx, g, link, torch.ops.normmatters.batch_norm_backward), *[None] * 12

    register("batch_norm_forward", _operator, _fake_forward)
    register("batch_norm_backward", _backward, _fake_backward)
    register_gradient("batch_norm_forward", save, backward)


_register()


class _BatchNorm(torch.autograd.Function):
    """The eager node: statistics and normalization forward, one gradient backward."""

    @staticmethod
    def forward(  # few arguments: PyTorch looks at each of them, tensor or not
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        link: Tensor | None,
        options: tuple[Any, ...],
    ) -> Tensor | tuple[Tensor, Tensor]:
        inputs = (x, weight, bias, residual, link, *options)
        output = _forward(*inputs)
        *_, save, linked = options
        if save:
            _save(ctx, inputs, output)
        z = output[0]
        return (z, eager_link(z)) if linked else z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, link: Tensor | None = None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_input_gradients(ctx, g, link, _gradients), None


def batch_norm(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStats,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
    link: Tensor | None = None,
    linked: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A batch norm in training, and its link if ``linked``; the dispatcher has checked the arguments."""
    constant = norm.scale_constant(int(x.numel() // x.shape[1]))
    x = _dense(x)  # here, where autograd sees a copy made: what the node saves then leads to the input
    weight, bias = weight if weight is None else weight.contiguous(), bias if bias is None else bias.contiguous()
    relu = act == "relu"
    lean = norm.memory == "lean" and norm.kind == "l1"  # the other statistics' gradients need the input itself
    save = torch.is_grad_enabled() and any_requires_grad(x, weight, bias, residual, link)
    linked = linked and save
    options = (
        running.mean, running.var, running.num_batches, running.momentum, norm.eps,
        norm.kind, norm.k or 0, constant, relu, lean, save, linked,
    )  # fmt: skip
    if not needs_operators():
        with on_device(x.device):
            out = _BatchNorm.apply(x, weight, bias, residual, link, options)
        return out if linked else (out, None)
    z, _, _, out, *_ = torch.ops.normmatters.batch_norm_forward(x, weight, bias, residual, link, *options)
    return z, out if linked else None
