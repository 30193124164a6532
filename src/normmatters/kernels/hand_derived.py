"""Batch norm in training on any device in PyTorch operators, with the backward pass derived by hand.

It is fast on a CPU and makes no full-size intermediates. With D = √(s² + eps), x̂ = (x − μ)/D, s = C·T(x − μ) and g the
gradient of the output (0 where the ReLU is closed):

    dγ = Σ g·x̂,    dβ = Σ g,    dx = γ/D · [g − mean g − (Σ g·x̂)·(C²T/D)·(u − mean u)],    u = ∂T/∂(x − μ)

where u is sign(x−μ)/n for L1 (F16), (x−μ)/(nT) for L2, sign(x−μ)·(|x−μ|/T)^(p−1)/n for Lp. For L∞, Top(k) and range it
is not 0 only at the extremes, whose positions the forward pass saves. Beside x and the output, which the neighbouring
layers hold anyway, only numbers per channel are saved. Each pass takes a few samples at a time (a *chunk*), so that
what it writes in between stays in the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from normmatters.functional.torch_batch_norm import TINY, hides_layout, torch_batch_norm
from normmatters.kernels.double_backward import DifferentiatedTwice
from normmatters.norm import Norm, RunningStats

# Elements that a thread works on at a time: a few such float32 buffers fit its share of the cache, and one call does
# enough work to be worth its overhead.
CHUNK = 1 << 20
# A channel of at most this many pixels is too short a loop to be fast.
FEW_PIXELS = 256


def batch_norm(
    input: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStats,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """:func:`~normmatters.functional.lp_batch_norm` in training; the arguments are checked, the input is not empty.

    For p = 2 that is torch's own batch norm, which then computes it.
    """
    n = input.numel() // input.shape[1]
    C = norm.scale_constant(n)
    if norm.kind == "l2" and C == 1 and _torch_computes(input, weight, bias, running):
        assert norm.eps is not None
        y = torch_batch_norm(
            input, running.mean, running.var, weight, bias, True, float(running.momentum), norm.eps
        )  # fmt: skip
        if residual is not None:
            y += residual
        return y.relu_() if act == "relu" else y
    output, mean, squared = _BatchNorm.apply(input, weight, bias, residual, norm, C, act)
    running.update(norm, mean, None if norm.kind == "mean" else squared, n)
    return output  # type: ignore[no-any-return]


def _torch_computes(input: Tensor, weight: Tensor | None, bias: Tensor | None, running: RunningStats) -> bool:
    """Whether torch's own batch norm, which is L2's, gives the same: in half precision it rounds before the ReLU."""
    dtypes = {t.dtype for t in (input, running.mean, running.var, weight, bias) if t is not None}
    return (
        dtypes == {_wide(input.dtype)}
        and (running.mean is None) == (running.var is None)
        and isinstance(running.momentum, (int, float))
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: :func:`normmatters.norm.compute_dtype`."""
    return dtype if dtype is torch.float64 else torch.float32


# --- Autograd ---


class _BatchNorm(torch.autograd.Function):
    """The output, μ and s²; the last two are not differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        norm: Norm,
        C: float,
        act: str | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind, eps = norm.kind, norm.eps
        assert eps is not None
        mean = _channel_mean(input, _wide(input.dtype))
        output = torch.empty_like(input)
        above = positions = slopes = None
        if kind == "l1":
            s, above = _mean_deviation(input, mean, C, _scratch(input, mean.dtype, output))
        elif kind in ("l2", "lp"):
            s = C * _power_mean(input, mean, norm)
        elif kind == "mean":
            s = torch.ones_like(mean)
        else:
            statistic, positions, slopes = _extremes(input, mean, norm)
            s = C * statistic
        # Not √(s² + eps): s² overflows long before s.
        inverse = torch.hypot(s, s.new_full((), math.sqrt(max(eps, TINY)))).reciprocal_()

        _normalize(input, mean, inverse, weight, bias, residual, act, output)
        x = None if kind == "mean" else input  # a shift is linear: its gradient needs no input
        y = output if act == "relu" else None
        ctx.save_for_backward(x, y, weight, mean, s, inverse, above, positions, slopes)
        ctx.settings = (norm, C)
        squared = s.square()
        ctx.mark_non_differentiable(mean, squared)
        ctx.set_materialize_grads(False)
        return output, mean, squared

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        saved = ctx.saved_tensors  # once: activation checkpointing hands them out a single time
        x, _, weight, *_ = saved
        many = torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad)
        with torch.no_grad():
            if many and x is not None:
                computed = _gradients_of_many(grad, saved, *ctx.settings)
            else:
                computed = _gradients(grad, saved, ctx.needs_input_grad, *ctx.settings)
        grads = [g if needed else None for g, needed in zip(computed, ctx.needs_input_grad)]
        if torch.is_grad_enabled():  # create_graph=True: the gradients may be used, not differentiated
            grads = [g if g is None else DifferentiatedTwice.apply(g, grad, x, weight) for g in grads]
        return (*grads, None, None, None)


# --- The forward pass ---


def _channel_mean(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean of each channel: first of each sample's pixels, which is faster than all at once, and more exact."""
    n = x.numel() // x.shape[1]
    if x.dim() > 2:
        x = x.sum(list(range(2, x.dim())), dtype=dtype)
    return x.sum(0, dtype=dtype).div_(n)


def _mean_deviation(
    x: Tensor, mean: Tensor, C: float, scratch: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """s for L1, C·mean |x−μ| of each channel, and how many elements are not below μ, which the backward pass needs.

    With σ = [x ≥ μ] − ½ these are 2C/n·Σ σ·(x−μ) and Σ σ + n/2: one pass for both. Σ[x ≥ μ](x−μ) alone, half of Σ|x−μ|,
    would do if μ had no rounding; the two signs cancel its rounding.
    """
    n = x.numel() // x.shape[1]
    mu, factor = _per_channel(mean, x), torch.full_like(mean, 2 * C / n)
    scale, balance = _added(
        [
            _weighted_sums(torch.ge(part, mu, out=scratch(part)).sub_(0.5), part.to(mean.dtype), mean, factor)
            for (part,) in _chunks(x, backwards=True)
        ]
    )
    return scale, balance.add_(n / 2)


def _power_mean(x: Tensor, mean: Tensor, norm: Norm, relative: bool = False) -> Tensor:
    """T for L2 and Lp: (mean |x−μ|^p)^(1/p) of each channel."""
    dims = [d for d in range(x.dim()) if d != 1]
    p = float(norm.p)
    mu = _per_channel(mean, x)
    total = torch.zeros_like(mean)
    top = None
    if relative or norm.kind == "lp":  # relative to the largest deviation, no power overflows
        top = torch.maximum(x.amax(dims).to(mean) - mean, mean - x.amin(dims).to(mean))
        top = torch.where(top == 0, torch.ones_like(top), top)
    room = _scratch(x, mean.dtype)
    for (part,) in _chunks(x):
        c = torch.sub(part, mu, out=room(part))
        if top is None:
            c = c.square_()
        else:
            c = c.abs_().div_(_per_channel(top, x)).pow_(p)
        total += c.sum(dims)
    average = total / (x.numel() // x.shape[1])
    if top is not None:
        return average.pow(1 / p) * top
    if x.device.type == "cpu" and not total.isfinite().all():  # on a GPU the host would have to wait for the answer
        return _power_mean(x, mean, norm, relative=True)
    return average.sqrt()


def _extremes(x: Tensor, mean: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """T for L∞, Top(k) and range, where in its channel each extreme is, (C, m), and its ∂T/∂(x − μ)."""
    rank = norm.k or 1
    values, positions = [], []
    offset = 0
    for (part,) in _chunks(x):
        c = (part - _per_channel(mean, x)).transpose(0, 1).flatten(1)
        ends = (c, -c) if norm.kind == "range" else (c.abs(),)
        largest = [end.topk(min(rank, c.shape[1]), dim=1) for end in ends]
        values.append(torch.stack([t.values for t in largest], 1))  # (C, ends, rank)
        positions.append(torch.stack([t.indices for t in largest], 1) + offset)
        offset += c.shape[1]
    top, chosen = torch.cat(values, 2).topk(rank, dim=2)
    position = torch.cat(positions, 2).gather(2, chosen).flatten(1)
    if norm.kind == "range":
        slope = (1.0 - 2.0 * torch.arange(2, device=x.device)).to(top).expand_as(position)  # +1, −1
    else:
        slope = (x[_index(x, position)] - mean.unsqueeze(1)).sign() / rank
    return top.mean(2).sum(1), position, slope


def _index(x: Tensor, position: Tensor) -> tuple[Tensor, ...]:
    """Index of ``x`` for positions, (C, m), that count the samples and pixels of a channel.

    Numbers of the host come in as operands, never as a tensor: copying one is forbidden while a CUDA graph is captured,
    and ``torch.unravel_index`` does it.
    """
    channel = torch.arange(x.shape[1], device=x.device).unsqueeze(1)
    pixel: list[Tensor] = []
    for size in reversed(x.shape[2:]):
        pixel.insert(0, position % size)
        position = position // size
    return (position, channel, *pixel)


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
    scale, shift = _per_channel(scale, x), _per_channel(shift, x)
    for part, out, *rest in _chunks(x, y, *([] if residual is None else [residual])):
        wide = out if out.dtype == mean.dtype else torch.empty_like(out, dtype=mean.dtype)
        part = part.to(mean.dtype)
        if rest:
            torch.addcmul(rest[0].to(mean.dtype), part, scale, out=wide).add_(shift)
        else:
            _affine(part, scale, shift, wide)
        if act == "relu":
            wide.relu_()
        if wide is not out:
            out.copy_(wide)


# --- The backward pass ---


def _gradients(
    grad: Tensor, saved: tuple[Any, ...], needed: Sequence[bool], norm: Norm, C: float
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight, bias and residual; autograd casts them to their dtypes."""
    x, output, weight, mean, s, inverse, above, positions, slopes = saved
    if norm.kind == "mean":
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
    dense = norm.kind in ("l1", "l2", "lp")
    # Room for u. The last pass goes backwards: dx's first samples, which may be the room, are written last.
    room = _scratch(x, mean.dtype, None if masked is dx else dx)
    dims = [d for d in range(x.dim()) if d != 1]
    sums: list[tuple[Tensor, ...]] = []
    for part, g, arrived, out in _chunks(x, masked, grad, grad if output is None else output):
        if output is not None:
            torch.ops.aten.threshold_backward.grad_input(arrived, out, 0, grad_input=g)
        part = part.to(mean.dtype)
        sums.append(_weighted_sums(g.to(mean.dtype), part, mean, inverse))
        if norm.kind in ("l2", "lp") and needed[0]:
            sums[-1] += (_direction(part, mu, s, norm, C, out=room(part)).sum(dims),)
    sum_gx, sum_g, *directions = _added(sums)

    n = x.numel() // x.shape[1]
    a = inverse if weight is None else weight * inverse
    if needed[0]:
        # dx = a·g + slope·u + shift
        slope = _slope(a, inverse, sum_gx, s, n, norm, C)
        (sum_u,) = directions or [above if norm.kind == "l1" else slopes.sum(1)]
        shift = torch.addcmul(slope * sum_u, a, sum_g).mul_(-1 / n)
        shift, scale, along = (_per_channel(t, x) for t in (shift, a, slope))
        for part, g, out in _chunks(x, masked, dx, backwards=True):
            rest = shift
            if dense:
                u = _direction(part.to(mean.dtype), mu, s, norm, C, out=room(part))
                rest = _affine(u, along, shift, out=u)
            if out.dtype == mean.dtype:
                torch.addcmul(rest, g, scale, out=out)
            else:
                out.copy_(torch.addcmul(rest, g.to(mean.dtype), scale))
        if positions is not None:
            at_extremes = slope.unsqueeze(1) * slopes
            dx.index_put_(_index(x, positions), at_extremes.to(dx.dtype), accumulate=True)
    return dx, None if weight is None else sum_gx, sum_g, masked


def _gradients_of_many(grad: Tensor, saved: tuple[Any, ...], norm: Norm, C: float) -> tuple[Tensor | None, ...]:
    """:func:`_gradients` for a batch of gradients (``vmap``, ``is_grads_batched=True``), which no ``out=`` can take."""
    x, output, weight, mean, s, inverse, _, positions, slopes = saved
    masked = grad if output is None else torch.ops.aten.threshold_backward(grad, output, 0)
    g, wide, mu = masked.to(mean.dtype), x.to(mean.dtype), _per_channel(mean, x)
    u = torch.zeros_like(wide)
    if positions is None:
        u = _direction(wide, mu, s, norm, C, out=u)
    else:
        u.index_put_(_index(x, positions), slopes, accumulate=True)
    dims = [d for d in range(x.dim()) if d != 1]
    sum_gx, sum_g = (g * ((wide - mu) * _per_channel(inverse, x))).sum(dims), g.sum(dims)
    n = x.numel() // x.shape[1]
    a = inverse if weight is None else weight * inverse
    slope = _slope(a, inverse, sum_gx, s, n, norm, C)
    shift = (slope * u.sum(dims) + a * sum_g) * (-1 / n)
    dx = g * _per_channel(a, x) + u * _per_channel(slope, x) + _per_channel(shift, x)
    return dx.to(x.dtype), None if weight is None else sum_gx, sum_g, masked


def _slope(a: Tensor, inverse: Tensor, sum_gx: Tensor, s: Tensor, n: int, norm: Norm, C: float) -> Tensor:
    """The factor of u in dx, for the u of :func:`_direction`, or that of the extremes."""
    factor = -C * (2 / n if norm.kind == "l1" else 1 / n if norm.kind in ("l2", "lp") else 1)
    return inverse * (C if norm.kind == "l2" else s) * a * sum_gx * factor  # s/D first, which is about 1


def _direction(x: Tensor, mu: Tensor, s: Tensor, norm: Norm, C: float, out: Tensor) -> Tensor:
    """u of the dense norms in ``out``, up to a factor, which ``_slope`` includes, and a constant.

    For L1 it is [x ≥ μ], the sign up to a factor 2 and a constant, that u − mean u removes: one pass, no subtraction.
    """
    if norm.kind == "l1":
        return torch.ge(x, mu, out=out)
    c = torch.sub(x, mu, out=out)
    if norm.kind == "l2":
        return c
    T = torch.where(s == 0, torch.ones_like(s), s / C)
    return torch.copysign((c / _per_channel(T, x)).abs_().pow_(float(norm.p) - 1), c, out=out)


# --- Passes over a few samples at a time ---


def _samples_per_chunk(x: Tensor) -> int:
    """How many samples at a time fit the cache; on other devices the whole batch, where launches cost more."""
    total = x.shape[0]
    if x.device.type != "cpu":
        return total
    count = min(total, math.ceil(x.numel() / (CHUNK * torch.get_num_threads())))
    return math.ceil(total / count)  # chunks of equal size


def _chunks(x: Tensor, *tensors: Tensor, backwards: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """A few samples at a time of ``x`` and the tensors of its shape.

    A pass that goes backwards begins with what the pass before it has left in the cache.
    """
    step, end = _samples_per_chunk(x), x.shape[0]
    if step >= end:
        yield x, *tensors
    else:
        starts = range(0, end, step)
        for start in reversed(starts) if backwards else starts:
            yield tuple([t[start : start + step] for t in (x, *tensors)])


def _scratch(x: Tensor, dtype: torch.dtype, unused: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Room for any chunk of ``x``, given a chunk. Written again and again, it stays in the cache.

    It is taken from ``unused``, a tensor of x's shape that is to be written later, if that has the dtype.
    """
    if unused is not None and unused.dtype == dtype:
        room = unused[: _samples_per_chunk(x)]
    else:
        room = torch.empty_like(x[: _samples_per_chunk(x)], dtype=dtype)
    return lambda chunk: room if chunk.shape[0] == room.shape[0] else room[: chunk.shape[0]]


def _weighted_sums(w: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Σ w·(x−μ)/D and Σ w of each channel: two sums that torch's batch norm takes in one pass for its backward."""
    if w.stride() != x.stride() and hides_layout(x):
        w, x = w.flatten(2), x.flatten(2)  # three dimensions have one layout only
    weight = inverse  # only the input's gradient uses it, which is not asked for; on a GPU there must be one
    _, moments, sums = torch.ops.aten.native_batch_norm_backward.default(
        w, x, weight, None, None, mean, inverse, True, 0.0, [False, True, True]
    )
    return moments, sums


def _added(sums: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """The sums of all chunks, added one by one."""
    return [functools.reduce(torch.add, parts) for parts in zip(*sums)]


def _per_channel(t: Tensor, like: Tensor) -> Tensor:
    """``t``, (C,), in a shape that broadcasts to ``like``, (N, C, ...)."""
    t = t.view([1, -1] + [1] * (like.dim() - 2))
    if like.stride(1) != 1 and like.device.type == "cpu" and like.shape[2:].numel() <= FEW_PIXELS:
        t = t.expand(1, *like.shape[1:]).contiguous()  # one long loop over all channels' pixels
    return t


def _affine(x: Tensor, scale: Tensor, shift: Tensor, out: Tensor) -> Tensor:
    """x·scale + shift in ``out``, for scale and shift of :func:`_per_channel`."""
    if x.stride(1) != 1 and x.device.type == "cpu" and scale.numel() == x.shape[1]:
        # A loop is over one channel's pixels: torch vectorizes it if one operand is a single number, not if two are.
        return torch.mul(x, scale, out=out).add_(shift)
    return torch.addcmul(shift, x, scale, out=out)
