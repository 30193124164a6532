"""Training batch norm with the backward pass derived by hand: fast on a CPU, and without full-size intermediates.

With D = √(s² + eps), x̂ = (x − μ)/D, s = C·T(x − μ) and g the gradient of the output (0 where the ReLU is closed):

    dγ = Σ g·x̂,    dβ = Σ g,    dx = γ/D · [g − mean g − (Σ g·x̂)·(C²T/D)·(u − mean u)],    u = ∂T/∂(x − μ)

where u is sign(x−μ)/n for L1 (F16), (x−μ)/(nT) for L2, sign(x−μ)·(|x−μ|/T)^(p−1)/n for Lp, and for L∞, Top(k) and range
it is not 0 only at the extremes, whose positions the forward pass keeps. Beside x and the output, which the
neighbouring layers hold anyway, only numbers per channel are saved. The passes run over a few samples at a time, so
that what they write in between stays in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from normmatters.functional.batch_norm import TINY, lp_batch_norm, update_running_statistics
from normmatters.functional.checks import check_batch_norm
from normmatters.functional.statistic import Kind, check_constant, compute_dtype, scale_constant, statistic_kind

# Elements a thread works on at a time: a few such float32 buffers fit its share of the cache, and calls are amortized.
CHUNK = 1 << 19


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

    The plain equation serves evaluation and the empty batch, the compiler, which fuses it by itself, and what an
    ``autograd.Function`` does not support: ``torch.func`` and forward-mode differentiation.
    """
    if not training or input.numel() == 0 or _traced():
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
    check_constant(constant)
    check_batch_norm(
        input, running_mean, running_var, weight, bias, training, eps, kind=kind, k=k, act=act, residual=residual
    )
    n = input.numel() // input.shape[1]
    C = scale_constant(p, n, k, constant)
    y, mean, squared = batch_norm_train(input, weight, bias, residual, eps, kind=kind, p=p, k=k, C=C, act=act)
    update_running_statistics(running_mean, running_var, mean, squared, n, momentum, kind=kind)
    return y


def _traced() -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
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
        dims = [d for d in range(input.dim()) if d != 1]
        mean = input.mean(dims, dtype=compute_dtype(input.dtype))
        above = positions = slopes = None
        if kind == "l1":
            statistic, above = _mean_deviation(input, mean)
        elif kind in ("l2", "lp"):
            statistic = _average(input, mean, kind, p)
        elif kind == "mean":
            statistic = torch.ones_like(mean)
        else:
            statistic, positions, slopes = _extremes(input, mean, kind, k)
        squared = (C * statistic).square()
        if kind == "mean":
            eps = 0.0  # no scale: D = 1
        eps = max(eps, TINY)
        inverse = (squared + eps).rsqrt()

        output = _normalize(input, mean, squared, inverse, weight, bias, residual, eps, act)
        x = None if kind == "mean" else input  # a shift is linear: its gradient needs no input
        y = output if act == "relu" else None
        ctx.save_for_backward(x, y, weight, mean, statistic, inverse, above, positions, slopes)
        ctx.settings = (kind, p, C)
        ctx.mark_non_differentiable(mean, squared)
        ctx.set_materialize_grads(False)
        return output, mean, squared

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 10
        saved = ctx.saved_tensors  # once: activation checkpointing hands them out a single time
        input, _, weight, *_ = saved
        with torch.no_grad():
            found = _backward(grad, saved, ctx.needs_input_grad, *ctx.settings)
        grads = [g if needed else None for g, needed in zip(found, ctx.needs_input_grad)]
        if torch.is_grad_enabled():  # create_graph=True: the gradients may be used, not differentiated
            grads = [g if g is None else _DifferentiatedTwice.apply(g, grad, input, weight) for g in grads]
        return (*grads, None, None, None, None, None, None)


class _DifferentiatedTwice(torch.autograd.Function):
    """Identity in its first argument, whose backward pass says why there is none."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *_: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(
            "this batch norm's backward pass is hand-derived and can be differentiated only once; "
            "for second derivatives use normmatters.functional.lp_batch_norm"
        )


def _samples(x: Tensor) -> int:
    """How many samples at a time fit the cache; on other devices the whole batch, where launches cost more."""
    if x.device.type != "cpu":
        return x.shape[0]
    return max(1, CHUNK * torch.get_num_threads() * x.shape[0] // x.numel())


def _pieces(x: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few samples at a time of ``x`` and the tensors of its shape."""
    step, end = _samples(x), x.shape[0]
    if step >= end:
        yield x, *tensors
    else:
        for start in range(0, end, step):
            yield tuple([t[start : start + step] for t in (x, *tensors)])


def _scratch(x: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Room for any piece of ``x``, given a piece. Written again and again, it stays in the cache."""
    room = torch.empty_like(x[: _samples(x)], dtype=dtype)
    return lambda piece: room if piece.shape[0] == room.shape[0] else room[: piece.shape[0]]


def _per_channel(t: Tensor, like: Tensor) -> Tensor:
    return t.view([1, -1] + [1] * (like.dim() - 2))


def _weighted_sums(w: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Σ w·(x−μ)/D and Σ w of each channel: two sums that torch's batch norm takes in one pass for its backward."""
    weight = inverse  # enters the input's gradient only, which is not asked for; on a GPU there must be one
    _, moments, sums = torch.ops.aten.native_batch_norm_backward(
        w, x, weight, None, None, mean, inverse, True, 0.0, [False, True, True]
    )
    return moments, sums


def _added(sums: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """The sums of all pieces, added one by one."""
    return [functools.reduce(torch.add, pieces) for pieces in zip(*sums)]


def _mean_deviation(x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """T for L1, mean |x−μ| of each channel, and how many elements are not below μ, which the backward pass needs.

    With σ = [x ≥ μ] − ½ these are 2·Σ σ·(x−μ)/n and Σ σ + n/2: one pass for both. Σ[x ≥ μ](x−μ) alone, half of Σ|x−μ|,
    would do if μ had no rounding; the two signs cancel its rounding.
    """
    mu, one, scratch = _per_channel(mean, x), torch.ones_like(mean), _scratch(x, mean.dtype)
    deviation, balance = _added(
        _weighted_sums(torch.ge(part, mu, out=scratch(part)).sub_(0.5), part.to(mean.dtype), mean, one)
        for (part,) in _pieces(x)
    )
    n = x.numel() // x.shape[1]
    return deviation * (2 / n), balance + n / 2


def _average(x: Tensor, mean: Tensor, kind: Kind, p: float) -> Tensor:
    """T for L2 and Lp: (mean |x−μ|^p)^(1/p) of each channel."""
    dims = [d for d in range(x.dim()) if d != 1]
    mu = _per_channel(mean, x)
    total = torch.zeros_like(mean)
    top = None
    if kind == "lp":  # relative to the largest deviation, no power overflows
        top = torch.maximum(x.amax(dims).to(mean) - mean, mean - x.amin(dims).to(mean))
        top = torch.where(top == 0, torch.ones_like(top), top)
    scratch = _scratch(x, mean.dtype)
    for (part,) in _pieces(x):
        c = torch.sub(part, mu, out=scratch(part))
        if top is None:
            c = c.square_()
        else:
            c = c.abs_().div_(_per_channel(top, x)).pow_(p)
        total += c.sum(dims)
    average = total / (x.numel() // x.shape[1])
    return average.sqrt() if top is None else average.pow(1 / p) * top


def _extremes(x: Tensor, mean: Tensor, kind: Kind, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """T for L∞ (k = 1), Top(k) and range, where in its channel each extreme is, (C, m), and its ∂T/∂(x − μ)."""
    rank = 1 if kind == "range" else k
    values, positions = [], []
    offset = 0
    for (part,) in _pieces(x):
        c = (part - _per_channel(mean, x)).transpose(0, 1).flatten(1)
        ends = (c, -c) if kind == "range" else (c.abs(),)
        found = [end.topk(min(rank, c.shape[1]), dim=1) for end in ends]
        values.append(torch.stack([f.values for f in found], 1))  # (C, ends, rank)
        positions.append(torch.stack([f.indices for f in found], 1) + offset)
        offset += c.shape[1]
    largest, chosen = torch.cat(values, 2).topk(rank, dim=2)
    position = torch.cat(positions, 2).gather(2, chosen).flatten(1)
    if kind == "range":
        slope = largest.new_tensor([1.0, -1.0]).expand_as(position)
    else:
        slope = (x[_index(x, position)] - mean.unsqueeze(1)).sign() / rank
    return largest.mean(2).sum(1), position, slope


def _index(x: Tensor, position: Tensor) -> tuple[Tensor, ...]:
    """Index of ``x`` for positions, (C, m), that count the samples and pixels of a channel."""
    channel = torch.arange(x.shape[1], device=x.device).unsqueeze(1)
    sample, *pixel = torch.unravel_index(position, (x.shape[0], *x.shape[2:]))
    return (sample, channel, *pixel)


def _normalize(
    x: Tensor,
    mean: Tensor,
    squared: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    act: str | None,
) -> Tensor:
    """act((x − μ)/√(s² + eps)·weight + bias + residual), rounded to x's dtype once."""
    weight, bias = (t if t is None else t.to(mean.dtype) for t in (weight, bias))
    if x.dtype == mean.dtype and x.stride(1) != 1:
        y = F.batch_norm(x, mean, squared, weight, bias, False, 0.0, eps)  # with given statistics: one pass
        if residual is not None:
            y += residual
        return y.relu_() if act == "relu" else y
    # Channels last, this is faster; and half precision needs more digits until the end.
    scale = inverse if weight is None else inverse * weight
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    scale, shift = _per_channel(scale, x), _per_channel(shift, x)
    y = torch.empty_like(x)
    for part, out, *rest in _pieces(x, y, *([] if residual is None else [residual])):
        wide = out if out.dtype == mean.dtype else torch.empty_like(out, dtype=mean.dtype)
        torch.addcmul(shift, part.to(mean.dtype), scale, out=wide)
        for one in rest:
            wide += one
        if act == "relu":
            wide.relu_()
        if wide is not out:
            out.copy_(wide)
    return y


def _backward(
    grad: Tensor,
    saved: tuple[Any, ...],
    needed: Sequence[bool],
    kind: Kind,
    p: float,
    C: float,
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight, bias and residual; autograd casts them to their dtypes."""
    x, output, weight, mean, statistic, inverse, above, positions, slopes = saved
    if kind == "mean":
        masked = grad if output is None else torch.ops.aten.threshold_backward(grad, output, 0)
        sum_g = masked.sum([d for d in range(grad.dim()) if d != 1], dtype=mean.dtype)
        dx = (masked - _per_channel(sum_g * (grad.shape[1] / grad.numel()), grad)).to(grad.dtype)
        return dx, None, sum_g, masked
    dx = torch.empty_like(x)
    masked = grad
    if output is not None:
        # The masked gradient goes where dx will be, unless the residual's gradient, which it is, must outlive it.
        masked = torch.empty_like(x) if needed[3] else dx
    mu = _per_channel(mean, x)
    dense = kind in ("l1", "l2", "lp")
    scratch = _scratch(x, mean.dtype)
    dims = [d for d in range(x.dim()) if d != 1]
    sums: list[tuple[Tensor, ...]] = []
    for part, g, arrived, out in _pieces(x, masked, grad, grad if output is None else output):
        if output is not None:
            torch.ops.aten.threshold_backward.grad_input(arrived, out, 0, grad_input=g)
        part = part.to(mean.dtype)
        sums.append(_weighted_sums(g.to(mean.dtype), part, mean, inverse))
        if kind in ("l2", "lp") and needed[0]:
            sums[-1] += (_direction(part, mu, statistic, kind, p, out=scratch(part)).sum(dims),)
    sum_gx, sum_g, *directions = _added(sums)

    n = x.numel() // x.shape[1]
    a = inverse if weight is None else weight * inverse
    slope = a * inverse * sum_gx  # of u, below times T and constants
    if kind != "l2":
        slope *= statistic
    slope *= C * C * ((2 if kind == "l1" else 1) / n if dense else 1)
    if needed[0]:
        # dx = a·g + shift − u·slope
        (sum_u,) = directions or [above if kind == "l1" else slopes.sum(1)]
        shift = torch.addcmul(slope * sum_u, a, sum_g, value=-1) / n
        shift, scale, along = (_per_channel(t, x) for t in (shift, a, slope))
        for part, g, out in _pieces(x, masked, dx):
            rest = shift
            if dense:
                u = _direction(part.to(mean.dtype), mu, statistic, kind, p, out=scratch(part))
                rest = torch.addcmul(shift, u, along, value=-1, out=u)
            if out.dtype == mean.dtype:
                torch.addcmul(rest, g, scale, out=out)
            else:
                out.copy_(torch.addcmul(rest, g.to(mean.dtype), scale))
        if positions is not None:
            at_extremes = slope.unsqueeze(1) * slopes
            dx.index_put_(_index(x, positions), -at_extremes.to(dx.dtype), accumulate=True)
    return (
        dx,
        None if weight is None else sum_gx,
        sum_g,
        masked,
    )


def _direction(x: Tensor, mu: Tensor, statistic: Tensor, kind: Kind, p: float, out: Tensor) -> Tensor:
    """u of the dense norms, up to a factor per channel and a constant, in ``out``.

    For L1 it is [x ≥ μ], the sign up to a factor 2 and a constant, that u − mean u removes: one pass, no subtraction.
    """
    if kind == "l1":
        return torch.ge(x, mu, out=out)
    c = torch.sub(x, mu, out=out)
    if kind == "l2":
        return c
    T = torch.where(statistic == 0, torch.ones_like(statistic), statistic)
    return torch.copysign((c / _per_channel(T, x)).abs_().pow_(p - 1), c, out=out)
