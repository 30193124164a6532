"""Two added L1 batch norms as PyTorch operators, ``torch.ops.normmatters.twin_batch_norm_*``, and as one eager node.

As for one norm (:mod:`normmatters.kernels.ops`): an operator for the whole forward pass, and one for its gradient.
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
from normmatters.kernels.ops import _dense, _format, _link, eager_link
from normmatters.kernels.triton import batch_norm_statistics
from normmatters.kernels.triton import twin_batch_norm as kernels
from normmatters.kernels.triton.layout import memory_format, view_of
from normmatters.kernels.triton.twin_batch_norm import Normed

LIBRARY.define(
    "twin_batch_norm_forward(Tensor x1, Tensor? weight1, Tensor? bias1, Tensor x2, Tensor? weight2, Tensor? bias2, "
    "Tensor(a!)? running_mean1, Tensor(b!)? running_var1, Tensor(c!)? batches1, float momentum1, float eps1, "
    "float constant1, Tensor(d!)? running_mean2, Tensor(e!)? running_var2, Tensor(f!)? batches2, float momentum2, "
    "float eps2, float constant2, bool lean, bool save, bool linked) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "twin_batch_norm_backward(Tensor g, Tensor? link, Tensor x1, Tensor x2, Tensor code, Tensor statistics1, "
    "Tensor statistics2, Tensor? weight1, Tensor? weight2, float constant1, float constant2, bool lean, "
    "bool channels_last) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward(
    x1: Tensor,
    weight1: Tensor | None,
    bias1: Tensor | None,
    x2: Tensor,
    weight2: Tensor | None,
    bias2: Tensor | None,
    running_mean1: Tensor | None,
    running_var1: Tensor | None,
    batches1: Tensor | None,
    momentum1: float,
    eps1: float,
    constant1: float,
    running_mean2: Tensor | None,
    running_var2: Tensor | None,
    batches2: Tensor | None,
    momentum2: float,
    eps2: float,
    constant2: float,
    lean: bool,
    save: bool,
    linked: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, its codes (empty unless ``save``), both statistics; moves the running ones and counts the batch."""
    x1 = _dense(x1)
    x2 = x2.contiguous(memory_format=memory_format(x1))
    # The shortcut's first: it was written last, and what is still in the cache of it is read from there.
    statistics2, _ = batch_norm_statistics.statistics(
        x2, running_mean2, running_var2, momentum2, eps2, "l1", 0, constant2, batches2
    )
    statistics1, _ = batch_norm_statistics.statistics(
        x1, running_mean1, running_var1, momentum1, eps1, "l1", 0, constant1, batches1
    )
    first, second = Normed(weight1, bias1, statistics1), Normed(weight2, bias2, statistics2)
    z, code = kernels.normalize(x1, first, x2, second, lean=lean, save=save)
    return z, code, statistics1, statistics2


def _operator(x1: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """:func:`_forward` and the link as an operator, which has a tensor for every output, be it an empty one."""
    z, code, *statistics = _forward(x1, *arguments)
    *_, linked = arguments
    return z, code, _link(z) if linked else z.new_empty(0), *statistics


def _fake_forward(x1: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *_, lean, save, linked = arguments
    z = torch.empty_like(x1, memory_format=memory_format(x1))
    shape, dtype = kernels.code_shape(view_of(z), lean=lean, save=save)
    statistics = (x1.new_empty((3, x1.shape[1]), dtype=torch.float32) for _ in range(2))
    return z, x1.new_empty(shape, dtype=dtype), _link(z) if linked else x1.new_empty(0), *statistics


def _backward(
    g: Tensor,
    link: Tensor | None,
    x1: Tensor,
    x2: Tensor,
    code: Tensor,
    statistics1: Tensor,
    statistics2: Tensor,
    weight1: Tensor | None,
    weight2: Tensor | None,
    constant1: float,
    constant2: float,
    lean: bool,
    channels_last: bool,
) -> kernels.Gradients:
    layout = _format(g, channels_last)
    dense = g.contiguous(memory_format=layout)
    x1, x2 = (dense if x is g else x.contiguous(memory_format=layout) for x in (x1, x2))  # as in `ops`
    if link is not None:
        link = link.contiguous(memory_format=layout)
    first, second = Normed(weight1, None, statistics1), Normed(weight2, None, statistics2)
    return kernels.gradient(dense, link, x1, x2, code, first, second, constant1, constant2, lean=lean)


def _fake_backward(g: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *_, channels_last = arguments
    layout, channels = _format(g, channels_last), g.shape[1]
    one = (torch.empty_like(g, memory_format=layout), *(g.new_empty(channels, dtype=torch.float32) for _ in range(2)))
    return (*one, *(torch.empty_like(t) for t in one))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """What the backward pass keeps: the inputs (exact), or codes alone (lean)."""
    x1, weight1, bias1, x2, weight2, bias2, *_, constant1, _, _, _, _, _, constant2, lean, _, linked = inputs
    _, code, *statistics = output
    layout = memory_format(x1)
    kept = (None, None) if lean else (_dense(x1), x2.contiguous(memory_format=layout))
    ctx.save_for_backward(*kept, code, *statistics, weight1, weight2)
    ctx.linked = linked
    ctx.dtypes = [None if t is None else t.dtype for t in (x1, weight1, bias1, x2, weight2, bias2)]
    ctx.arguments = (constant1, constant2, lean, layout is not torch.contiguous_format)


def _input_gradients(ctx: Any, g: Tensor, link: Tensor | None, backward: Any) -> tuple[Tensor | None, ...]:
    """Gradients of both norms' x, γ and β, by ``backward``: the kernels, or the operator for them."""
    x1, x2, *others = ctx.saved_tensors
    found = backward(
        g, link if ctx.linked else None, g if x1 is None else x1, g if x2 is None else x2, *others, *ctx.arguments
    )
    return tuple(map(in_dtype, found, ctx.dtypes))


def _register() -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        z, code, _, *statistics = output
        ctx.mark_non_differentiable(*statistics)
        _save(ctx, inputs, (z, code, *statistics))

    def backward(ctx: Any, g: Tensor, _code: Any, link: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *_input_gradients(ctx, g, link, torch.ops.normmatters.twin_batch_norm_backward), *[None] * 15

    register("twin_batch_norm_forward", _operator, _fake_forward)
    register("twin_batch_norm_backward", _backward, _fake_backward)
    register_gradient("twin_batch_norm_forward", save, backward)


_register()


class _TwinBatchNorm(torch.autograd.Function):
    """The eager node."""

    @staticmethod
    def forward(  # few arguments: PyTorch looks at each of them, tensor or not
        ctx: Any,
        x1: Tensor,
        weight1: Tensor | None,
        bias1: Tensor | None,
        x2: Tensor,
        weight2: Tensor | None,
        bias2: Tensor | None,
        options: tuple[Any, ...],
    ) -> Tensor | tuple[Tensor, Tensor]:
        inputs = (x1, weight1, bias1, x2, weight2, bias2, *options)
        output = _forward(*inputs)
        *_, save, linked = options
        if save:
            _save(ctx, inputs, output)
        z = output[0]
        return (z, eager_link(z)) if linked else z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, link: Tensor | None = None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_input_gradients(ctx, g, link, _backward), None


def twin_batch_norm(first: Any, second: Any, *, linked: bool) -> tuple[Tensor, Tensor | None]:
    """:func:`normmatters.kernels.dispatch.twin_batch_norm`, which has checked the arguments."""
    x1 = _dense(first.input)  # as in `ops`
    x2 = second.input.contiguous(memory_format=memory_format(x1))
    tensors: list[Tensor | None] = []
    options: list[Any] = []
    for x, (_, norm, weight, bias, running) in ((x1, first), (x2, second)):
        tensors += [x, *(None if t is None else t.contiguous() for t in (weight, bias))]
        constant = norm.scale_constant(int(x.numel() // x.shape[1]))
        options += [running.mean, running.var, running.num_batches, running.momentum, norm.eps, constant]
    save = torch.is_grad_enabled() and any_requires_grad(*tensors)
    linked = linked and save
    options += [first.norm.memory == "lean", save, linked]
    if not needs_operators():
        with on_device(x1.device):
            out = _TwinBatchNorm.apply(*tensors, tuple(options))
        return out if linked else (out, None)
    z, _, link, *_ = torch.ops.normmatters.twin_batch_norm_forward(*tensors, *options)
    return z, link if linked else None
