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

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normmatters.kernels.operators import Operator, any_requires_grad, in_dtype, needs_grad
from normmatters.kernels.triton.batch_norm.gradient import gradient
from normmatters.kernels.triton.batch_norm.layout import (
    Affine,
    Moved,
    Statistic,
    Variant,
    affine_of,
    dense,
    empty,
    memory_format,
    moved_of,
    sizes_of,
    statistic_of,
    stored_format,
    view_of_shape,
)
from normmatters.kernels.triton.batch_norm.normalize import Saved, normalize_launch, saved_shapes
from normmatters.kernels.triton.batch_norm.statistics import (
    StatisticsPlan,
    put_back,
    statistics_plan,
    statistics_tensors,
)
from normmatters.kernels.triton.batch_norm.tiles import KINDS
from normmatters.kernels.triton.launch import Launches, cached_plan
from normmatters.norm import Norm, RunningStats


class Options(NamedTuple):
    """What a forward pass is called with beside its tensors. ``save``: there will be a backward pass."""

    running_mean: Tensor | None
    running_var: Tensor | None
    batches: Tensor | None
    momentum: float
    kind: str
    k: int
    constant: float
    eps: float
    relu: bool
    lean: bool
    save: bool
    linked: bool


class ForwardPlan(NamedTuple):
    """The launches of a forward pass at one shape, and what they leave."""

    launches: Launches
    statistics: StatisticsPlan
    saved: Saved


@cached_plan
def _forward_plan(
    sizes: tuple[int, ...],
    contiguous: bool,
    dtype: torch.dtype,
    affine: Affine,
    moved: Moved,
    residual: bool,
    statistic: Statistic,
    relu: bool,
    lean: bool,
    save: bool,
) -> ForwardPlan:
    view = view_of_shape(sizes, contiguous)
    variant = Variant(statistic.kind, statistic.selected, relu, residual, lean)
    plan = statistics_plan(view, dtype, statistic, moved, alone=False)
    values = {
        **statistic.values(view),
        **(Moved() if plan.whole else moved).values,
        "KIND": KINDS[statistic.kind],
        "FINALIZE": not plan.whole,
    }
    normalize = normalize_launch(view, dtype, affine, variant, values, save)
    return ForwardPlan(
        Launches(*plan.launches.launches, normalize), plan, saved_shapes(view, dtype.itemsize, variant, save=save)
    )


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
    if residual is not None:
        residual = residual.contiguous(memory_format=memory_format(x))
    mean, var, batches, momentum, kind, k, constant, eps, relu, lean, save, _ = options
    running = RunningStats(mean, var, batches, momentum)
    launches, statistics, saved = _forward_plan(
        sizes_of(x), x.is_contiguous(), x.dtype, affine_of(weight, bias), moved_of(running), residual is not None,
        Statistic(kind, k, constant, eps), relu, lean, save,
    )  # fmt: skip
    tensors = statistics_tensors(statistics, x, running)
    stats = tensors["stats_ptr"]
    tensors["weight_ptr"] = stats if weight is None else weight
    tensors["bias_ptr"] = stats if bias is None else bias
    tensors["residual_ptr"] = x if residual is None else residual
    tensors["z_ptr"] = z = torch.empty_like(x)
    tensors["code_ptr"] = code = empty(x, *saved.code, dtype=saved.code_dtype)
    tensors["count_ptr"] = count = empty(x, *saved.counts, dtype=saved.count_dtype)
    launches(tensors, (momentum,))
    put_back(running, tensors)
    return z, code, count, stats, tensors["index_ptr"] if statistics.selected else None


def _save(ctx: Any, tensors: tuple[Any, ...], options: Options, results: Results) -> None:
    """Save x (exact), the output (lean), or codes alone (lean, where nobody else saves the output)."""
    x, weight, bias, residual, link = tensors
    z, code, count, stats, index = results
    relu, lean = options.relu, options.lean
    variant = Variant(options.kind, 0 if index is None else index.shape[0], relu, residual is not None, lean)
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
    ctx.arguments = (*variant, options.constant, need_dresidual, channels_last)


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
    return gradient(
        dense_g, link, saved, code, count, stats, index, weight, bias, variant, constant, need_dresidual=need_dresidual
    )


_batch_norm = Operator(
    "batch_norm",
    options=Options,
    forward=_forward,
    save=_save,
    backward=_backward,
    gradients=_gradients,
    changes=("running_mean", "running_var", "batches"),
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
    x = dense(x)  # here, where autograd sees a copy made: what the node saves then leads to the input
    weight, bias = weight if weight is None else weight.contiguous(), bias if bias is None else bias.contiguous()
    save = needs_grad(x, weight, bias, residual, link)
    linked = linked and save
    statistic = statistic_of(norm, int(x.numel() // x.shape[1]))
    lean = norm.memory == "lean" and statistic.kind == "l1"  # the other statistics' gradients need the input itself
    mean, var, batches, momentum = running
    options = Options(mean, var, batches, float(momentum), *statistic, act == "relu", lean, save, linked)
    out = _batch_norm(x, weight, bias, residual, link, options, needs_grad=save)
    return out if linked else (out, None)
