"""The fused batch norm: its forward and backward pass, as an eager autograd node and as operators for the compiler.

The forward operator is a whole forward pass: it computes the statistics of the batch, moves the running ones (the only
thing that is changed in place) and normalizes. The backward operator is the gradient of the whole, statistics included.
``torch.compile`` sees one operator each way, and no other kernel runs between those of a layer. That is what lets the
normalization begin before the statistics have ended.

A *link* lets a residual's gradient reach its norm without being added to another one first. An output that is used
twice gets two gradients, and autograd would add them before the backward pass sees the sum: three passes over memory.
So the forward pass can return a second output, the link: shaped like z but one number in memory, and nobody reads it.
A later batch norm takes z as its residual together with the link, and sends the residual's gradient back through that.
The backward pass then gets both gradients, and adds them while it sums them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normmatters.kernels.operators import Operator, any_requires_grad, in_dtype
from normmatters.kernels.triton.batch_norm import gradient, normalize, statistics
from normmatters.kernels.triton.batch_norm.layout import (
    Statistic,
    Variant,
    affine_of,
    dense,
    memory_format,
    statistic_of,
    stored_format,
    view_of,
)
from normmatters.norm import Norm, RunningStats


class Options(NamedTuple):
    """What a forward pass is called with beside its tensors."""

    statistic: Statistic
    running: RunningStats
    variant: Variant
    save: bool
    linked: bool

    def flat(self) -> tuple[Any, ...]:
        """As the arguments of the operator."""
        mean, var, batches, momentum = self.running
        kind, k, constant, eps = self.statistic
        relu, lean = self.variant.relu, self.variant.lean
        return mean, var, batches, momentum, eps, kind, k, constant, relu, lean, self.save, self.linked

    @classmethod
    def from_arguments(cls, *arguments: Any) -> Options:
        """From the operator's arguments: the tensors, then what :meth:`flat` gives."""
        _, _, _, residual, _, mean, var, batches, momentum, eps, kind, k, constant, relu, lean, save, linked = arguments
        statistic = Statistic(kind, k, constant, eps)
        variant = Variant(kind, statistic.selected, relu, residual is not None, lean)
        return cls(statistic, RunningStats(mean, var, batches, momentum), variant, save, linked)


Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    link: Tensor | None,
    options: Options,
) -> Results:
    """The output and what the backward pass needs; moves the running statistics and raises the number of batches.

    For the backward pass: codes and counts (empty unless ``options.save``), (μ, 1/D, s/D) as [3, C], and the offsets of
    the extreme elements as [selected, C], or None where none is selected.
    """
    x = dense(x)
    if residual is not None:  # before the statistics, so that nothing is launched between them and what follows
        residual = residual.contiguous(memory_format=memory_format(x))
    index = None
    sums = statistics.small_sums(x, options.statistic, options.running)
    if sums is None:
        stats, index = statistics.statistics(x, options.statistic, options.running)
    else:
        stats = x.new_empty((3, x.shape[1]), dtype=torch.float32)
    z, code, count = normalize.normalize(
        x, weight, bias, residual, stats, options.variant, save=options.save, early=True, sums=sums
    )
    return z, code, count, stats, index


def _fake_forward(x: Tensor, weight: Any, bias: Any, residual: Tensor | None, link: Any, options: Options) -> Results:
    z = torch.empty_like(x, memory_format=memory_format(x))
    saved = normalize.saved_shapes(view_of(z), z.element_size(), options.variant, save=options.save)
    code = x.new_empty(saved.code, dtype=saved.code_dtype)
    count = x.new_empty(saved.counts, dtype=saved.count_dtype)
    channels, selected = x.shape[1], options.statistic.selected
    index = x.new_empty((selected, channels), dtype=torch.int64) if selected else None
    return z, code, count, x.new_empty((3, channels), dtype=torch.float32), index


def _save(ctx: Any, tensors: tuple[Any, ...], options: Options, results: Results) -> None:
    """Save x (exact), the output (lean), or codes alone (lean, where nobody else saves the output)."""
    x, weight, bias, residual, link = tensors
    z, code, count, stats, index = results
    variant = options.variant
    saved = None
    if variant.lean:
        saved = z if variant.inverts_output else None
    elif variant.kind != "mean":
        saved = dense(x)
    else:
        ctx.linear = True
    ctx.save_for_backward(saved, code, count, stats, index, weight, bias)
    need_dresidual = any_requires_grad(residual, link)
    channels_last = memory_format(x) is not torch.contiguous_format
    # Use the link only if link and residual come from the same norm's autograd node. If the residual was modified
    # since, its grad_fn differs and the link would skip that change. A node that stands for more than one norm, as a
    # compiled graph's, has no `linked`. Decided here, since a tracer's tensors have nodes too.
    norm_node = None if link is None or residual is None else link.grad_fn
    ctx.linked = options.linked
    ctx.through_link = getattr(norm_node, "linked", False) and residual.grad_fn is norm_node
    ctx.arguments = (*variant, options.statistic.constant, need_dresidual, channels_last)


def _gradients(ctx: Any, backward: Callable[..., Any], g: Tensor, link: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of x, γ, β, the residual and the link."""
    saved, code, count, stats, index, weight, bias = ctx.saved_tensors
    _, _, relu, _, _, _, need_dresidual, _ = ctx.arguments
    link = link if ctx.linked else None
    dx, dweight, dbias, dresidual = backward(
        g, link, g if saved is None else saved, code, count, stats, index, weight, bias, *ctx.arguments
    )
    if not (relu or ctx.linked):
        dresidual = g
    return (
        dx,
        *map(in_dtype, (dweight, dbias), affine_of(weight, bias)),
        dresidual if need_dresidual and not ctx.through_link else None,
        dresidual if need_dresidual and ctx.through_link else None,
    )


def _backward(
    g: Tensor,
    link: Tensor | None,
    saved: Tensor,
    code: Tensor,
    count: Tensor,
    stats: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    selected: int,
    relu: bool,
    residual: bool,
    lean: bool,
    constant: float,
    need_dresidual: bool,
    channels_last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    layout = stored_format(g, channels_last)
    dense_g = g.contiguous(memory_format=layout)
    # What was saved, too: hooks such as `save_on_cpu(pin_memory=True)` give it back with other strides.
    saved = dense_g if saved is g else saved.contiguous(memory_format=layout)
    if link is not None:
        link = link.contiguous(memory_format=layout)
    variant = Variant(kind, selected, relu, residual, lean)
    return gradient.gradient(
        dense_g, link, saved, code, count, stats, index, weight, bias, variant, constant, need_dresidual=need_dresidual
    )


def _fake_backward(g: Tensor, link: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    *_, relu, _, _, _, need_dresidual, channels_last = arguments
    dx = torch.empty_like(g, memory_format=stored_format(g, channels_last))
    dweight = g.new_empty(g.shape[1], dtype=torch.float32)
    written = need_dresidual and (relu or link is not None)
    return dx, dweight, torch.empty_like(dweight), torch.empty_like(dx) if written else None


_batch_norm = Operator(
    "batch_norm",
    forward_schema=(
        "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? link, Tensor(a!)? running_mean, "
        "Tensor(b!)? running_var, Tensor(c!)? batches, float momentum, float eps, str kind, int k, float constant, "
        "bool relu, bool lean, bool save, bool linked) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    backward_schema=(
        "(Tensor g, Tensor? link, Tensor saved, Tensor code, Tensor count, Tensor stats, Tensor? index, "
        "Tensor? weight, Tensor? bias, str kind, int selected, bool relu, bool residual, bool lean, float constant, "
        "bool need_dresidual, bool channels_last) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    options=Options,
    forward=_forward,
    fake_forward=_fake_forward,
    save=_save,
    backward=_backward,
    fake_backward=_fake_backward,
    gradients=_gradients,
    links=True,
)


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
    n = int(x.numel() // x.shape[1])
    settings = _settings if torch.compiler.is_compiling() else _cached_settings
    statistic, variant = settings(norm, n, act == "relu", residual is not None)
    x = dense(x)  # here, where autograd sees a copy made: what the node saves then leads to the input
    weight, bias = weight if weight is None else weight.contiguous(), bias if bias is None else bias.contiguous()
    save = torch.is_grad_enabled() and any_requires_grad(x, weight, bias, residual, link)
    linked = linked and save
    out = _batch_norm(x, weight, bias, residual, link, Options(statistic, running, variant, save, linked))
    return out if linked else (out, None)


def _settings(norm: Norm, n: int, relu: bool, residual: bool) -> tuple[Statistic, Variant]:
    """The statistic over ``n`` elements per channel, and which code of the kernels runs."""
    statistic = statistic_of(norm, n)
    lean = norm.memory == "lean" and norm.kind == "l1"  # the other statistics' gradients need the input itself
    return statistic, Variant(norm.kind, statistic.selected, relu, residual, lean)


_cached_settings = functools.lru_cache(_settings)
