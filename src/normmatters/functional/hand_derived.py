"""Training batch norm with the backward pass derived by hand: fast on a CPU, and without full-size intermediates.

With D = √(s² + eps), x̂ = (x − μ)/D, s = C·T(x − μ) and g the gradient of the output (0 where the ReLU is closed):

    dγ = Σ g·x̂,    dβ = Σ g,    dx = γ/D · [g − mean g − (Σ g·x̂)·(C²T/D)·(u − mean u)],    u = ∂T/∂(x − μ)

where u is sign(x−μ)/n for L1 (F16), (x−μ)/(nT) for L2, sign(x−μ)·(|x−μ|/T)^(p−1)/n for Lp, and for L∞, Top(k) and range
it is not 0 only at the extremes, whose positions the forward pass keeps. Beside x and the output, which the
neighbouring layers hold anyway, only numbers per channel are saved. The passes run over a few samples at a time, so
that what they write in between stays in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normmatters.functional.batch_norm import lp_batch_norm, update_running_statistics
from normmatters.functional.channel_sums import (
    added,
    channel_mean,
    extremes,
    index,
    mean_deviation,
    power_mean,
    weighted_sums,
)
from normmatters.functional.checks import check_batch_norm
from normmatters.functional.pieces import affine, per_channel, pieces, scratch
from normmatters.functional.statistic import Kind, compute_dtype, scale_constant, statistic_kind
from normmatters.functional.torch_batch_norm import TINY, torch_batch_norm
from normmatters.kernels.double_backward import DifferentiatedTwice


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    p: float | str = 1,
    k: int | None = None,
    constant: str | float = "exact",
    act: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`~normmatters.functional.lp_batch_norm`, in training with the hand-derived backward pass.

    For p = 2 that is torch's own batch norm, which then computes it. The plain equation serves evaluation and the empty
    batch, the compiler, which fuses it by itself, and what does not take an ``autograd.Function`` (:func:`plain_only`).
    """
    if not training or input.numel() == 0 or torch.compiler.is_compiling() or plain_only():
        return lp_batch_norm(
            input,
            running_mean,
            running_var,
            weight,
            bias,
            training,
            momentum,
            eps,
            p=p,
            k=k,
            constant=constant,
            act=act,
            residual=residual,
        )
    kind = statistic_kind(p, k)
    check_batch_norm(
        input, running_mean, running_var, weight, bias, training, eps, kind=kind, k=k, act=act, residual=residual
    )
    n = input.numel() // input.shape[1]
    C = scale_constant(p, n, k, constant)
    if kind == "l2" and C == 1 and _torch_computes(input, running_mean, running_var, weight, bias, momentum):
        y = torch_batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
        if residual is not None:
            y += residual
        return y.relu_() if act == "relu" else y
    y, mean, squared = batch_norm_train(input, weight, bias, residual, eps, kind=kind, p=p, k=k, C=C, act=act)
    update_running_statistics(running_mean, running_var, mean, squared, n, momentum, kind=kind)
    return y


def plain_only() -> bool:
    """Whether operators alone are understood: by ``torch.func``, forward-mode differentiation, ``torch.jit.trace``."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


# The compiler is in the same transforms while it traces, and guards them.
plain_only._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _torch_computes(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | Tensor,
) -> bool:
    """Whether torch's own batch norm, which is L2's, gives the same: in half precision it rounds before the ReLU."""
    dtypes = {t.dtype for t in (input, running_mean, running_var, weight, bias) if t is not None}
    return (
        dtypes == {compute_dtype(input.dtype)}
        and (running_mean is None) == (running_var is None)
        and isinstance(momentum, (int, float))
    )


def batch_norm_train(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    *,
    kind: Kind,
    p: float | str,
    k: int | None,
    C: float,
    act: str | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Batch norm by the batch's own statistics; the equation of :func:`~normmatters.functional.lp_batch_norm`.

    Inputs are trusted: the caller has checked them. Running statistics are the caller's to update. Differentiable once.

    Args:
        input: (N, C, ...), not empty.
        weight, bias: (C,) or None.
        residual: same shape as input, or None.
        eps: added to s².
        kind, p, k: the statistic; ``kind`` is ``statistic_kind(p, k)``.
        C: the constant, of ``scale_constant``.
        act: None or ``"relu"``.

    Returns:
        The output, and the batch's μ and s², (C,) each in float32 (float64 for float64); s² is None for mean-only.

    Example::

        >>> x = torch.randn(8, 3, 4, 4)
        >>> y, mean, squared = batch_norm_train(x, None, None, None, 1e-5, kind="l1", p=1, k=None, C=1.25, act="relu")
        >>> y.shape, mean.shape
        (torch.Size([8, 3, 4, 4]), torch.Size([3]))
    """
    power = float(p) if kind == "lp" else 0.0
    largest = 1 if k is None else k
    output, mean, squared = _BatchNormTrain.apply(input, weight, bias, residual, eps, kind, power, largest, C, act)
    return output, mean, None if kind == "mean" else squared


class _BatchNormTrain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        kind: Kind,
        p: float,
        k: int,
        C: float,
        act: str | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean = channel_mean(input, compute_dtype(input.dtype))
        output = torch.empty_like(input)
        above = positions = slopes = None
        if kind == "l1":
            s, above = mean_deviation(input, mean, C, scratch(input, mean.dtype, output))
        elif kind in ("l2", "lp"):
            s = C * power_mean(input, mean, kind, p)
        elif kind == "mean":
            s = torch.ones_like(mean)
        else:
            statistic, positions, slopes = extremes(input, mean, kind, k)
            s = C * statistic
        squared = s.square()
        if kind == "mean":
            eps = 0.0  # no scale: D = 1
        inverse = (squared + max(eps, TINY)).rsqrt()

        _normalize(input, mean, inverse, weight, bias, residual, act, output)
        x = None if kind == "mean" else input  # a shift is linear: its gradient needs no input
        y = output if act == "relu" else None
        ctx.save_for_backward(x, y, weight, mean, s, inverse, above, positions, slopes)
        ctx.settings = (kind, p, C)
        ctx.mark_non_differentiable(mean, squared)
        ctx.set_materialize_grads(False)
        return output, mean, squared

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 10
        saved = ctx.saved_tensors  # once: activation checkpointing hands them out a single time
        x, _, weight, *_ = saved
        many = torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad)
        with torch.no_grad():
            if many and x is not None:
                found = _backward_of_many(grad, saved, *ctx.settings)
            else:
                found = _backward(grad, saved, ctx.needs_input_grad, *ctx.settings)
        grads = [g if needed else None for g, needed in zip(found, ctx.needs_input_grad)]
        if torch.is_grad_enabled():  # create_graph=True: the gradients may be used, not differentiated
            grads = [g if g is None else DifferentiatedTwice.apply(g, grad, x, weight) for g in grads]
        return (*grads, None, None, None, None, None, None)


def _normalize(
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str | None,
    y: Tensor,
) -> None:
    """act((x − μ)/D·weight + bias + residual) in ``y``, rounded to its dtype once."""
    weight, bias = (t if t is None else t.to(mean.dtype) for t in (weight, bias))
    scale = inverse if weight is None else inverse * weight
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    scale, shift = per_channel(scale, x), per_channel(shift, x)
    for part, out, *rest in pieces(x, y, *([] if residual is None else [residual])):
        wide = out if out.dtype == mean.dtype else torch.empty_like(out, dtype=mean.dtype)
        part = part.to(mean.dtype)
        if rest:
            torch.addcmul(rest[0].to(mean.dtype), part, scale, out=wide).add_(shift)
        else:
            affine(part, scale, shift, wide)
        if act == "relu":
            wide.relu_()
        if wide is not out:
            out.copy_(wide)


def _backward(
    grad: Tensor,
    saved: tuple[Any, ...],
    needed: Sequence[bool],
    kind: Kind,
    p: float,
    C: float,
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight, bias and residual; autograd casts them to their dtypes."""
    x, output, weight, mean, s, inverse, above, positions, slopes = saved
    if kind == "mean":
        masked = grad if output is None else torch.ops.aten.threshold_backward(grad, output, 0)
        sum_g = masked.sum([d for d in range(grad.dim()) if d != 1], dtype=mean.dtype)
        dx = (masked - per_channel(sum_g * (grad.shape[1] / grad.numel()), grad)).to(grad.dtype)
        return dx, None, sum_g, masked
    dx = torch.empty_like(x)
    masked = grad
    if output is not None:
        # The masked gradient goes where dx will be, unless the residual's gradient, which it is, must outlive it.
        masked = torch.empty_like(x) if needed[3] else dx
    mu = per_channel(mean, x)
    dense = kind in ("l1", "l2", "lp")
    # Room for u. The last pass goes backwards: dx's first samples, which may be the room, are written last.
    room = scratch(x, mean.dtype, None if masked is dx else dx)
    dims = [d for d in range(x.dim()) if d != 1]
    sums: list[tuple[Tensor, ...]] = []
    for part, g, arrived, out in pieces(x, masked, grad, grad if output is None else output):
        if output is not None:
            torch.ops.aten.threshold_backward.grad_input(arrived, out, 0, grad_input=g)
        part = part.to(mean.dtype)
        sums.append(weighted_sums(g.to(mean.dtype), part, mean, inverse))
        if kind in ("l2", "lp") and needed[0]:
            sums[-1] += (_direction(part, mu, s, kind, p, C, out=room(part)).sum(dims),)
    sum_gx, sum_g, *directions = added(sums)

    n = x.numel() // x.shape[1]
    a = inverse if weight is None else weight * inverse
    if needed[0]:
        # dx = a·g + slope·u + shift
        slope = _slope(a, inverse, sum_gx, s, n, kind, C)
        (sum_u,) = directions or [above if kind == "l1" else slopes.sum(1)]
        shift = torch.addcmul(slope * sum_u, a, sum_g).mul_(-1 / n)
        shift, scale, along = (per_channel(t, x) for t in (shift, a, slope))
        for part, g, out in pieces(x, masked, dx, backwards=True):
            rest = shift
            if dense:
                u = _direction(part.to(mean.dtype), mu, s, kind, p, C, out=room(part))
                rest = affine(u, along, shift, out=u)
            if out.dtype == mean.dtype:
                torch.addcmul(rest, g, scale, out=out)
            else:
                out.copy_(torch.addcmul(rest, g.to(mean.dtype), scale))
        if positions is not None:
            at_extremes = slope.unsqueeze(1) * slopes
            dx.index_put_(index(x, positions), at_extremes.to(dx.dtype), accumulate=True)
    return dx, None if weight is None else sum_gx, sum_g, masked


def _backward_of_many(
    grad: Tensor, saved: tuple[Any, ...], kind: Kind, p: float, C: float
) -> tuple[Tensor | None, ...]:
    """:func:`_backward` for a batch of gradients (``vmap``, ``is_grads_batched=True``), which no ``out=`` can take."""
    x, output, weight, mean, s, inverse, _, positions, slopes = saved
    masked = grad if output is None else torch.ops.aten.threshold_backward(grad, output, 0)
    g, wide, mu = masked.to(mean.dtype), x.to(mean.dtype), per_channel(mean, x)
    u = torch.zeros_like(wide)
    if positions is None:
        u = _direction(wide, mu, s, kind, p, C, out=u)
    else:
        u.index_put_(index(x, positions), slopes, accumulate=True)
    dims = [d for d in range(x.dim()) if d != 1]
    sum_gx, sum_g = (g * ((wide - mu) * per_channel(inverse, x))).sum(dims), g.sum(dims)
    n = x.numel() // x.shape[1]
    a = inverse if weight is None else weight * inverse
    slope = _slope(a, inverse, sum_gx, s, n, kind, C)
    shift = (slope * u.sum(dims) + a * sum_g) * (-1 / n)
    dx = g * per_channel(a, x) + u * per_channel(slope, x) + per_channel(shift, x)
    return dx.to(x.dtype), None if weight is None else sum_gx, sum_g, masked


def _slope(a: Tensor, inverse: Tensor, sum_gx: Tensor, s: Tensor, n: int, kind: Kind, C: float) -> Tensor:
    """The factor of u in dx, for the u of :func:`_direction`, or that of the extremes."""
    factor = -C * (2 / n if kind == "l1" else 1 / n if kind in ("l2", "lp") else 1)
    return a * inverse * sum_gx * factor * (C if kind == "l2" else s)


def _direction(x: Tensor, mu: Tensor, s: Tensor, kind: Kind, p: float, C: float, out: Tensor) -> Tensor:
    """u of the dense norms in ``out``, up to a factor, which ``_backward`` gives to its slope, and a constant.

    For L1 it is [x ≥ μ], the sign up to a factor 2 and a constant, that u − mean u removes: one pass, no subtraction.
    """
    if kind == "l1":
        return torch.ge(x, mu, out=out)
    c = torch.sub(x, mu, out=out)
    if kind == "l2":
        return c
    T = torch.where(s == 0, torch.ones_like(s), s / C)
    return torch.copysign((c / per_channel(T, x)).abs_().pow_(p - 1), c, out=out)
