"""Batch norm, ReLU and max pool by the kernels and by PyTorch's pool behind the plain equation in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from normmatters.functional import lp_batch_norm
from normmatters.nn.batchnorm import L1BatchNorm2d
from support import called
from support.batch_norm_cases import DEVICE, EPS, MOMENTUM, Result, affine, compare


class PooledNorm(L1BatchNorm2d):
    """A norm whose every call pools."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        output: Tensor = self.forward_linked(input, residual, linked=False, pooled=True)[0]
        return output


def pooled(x: Tensor, weight, bias, g: Tensor, constant: str | float = "exact") -> Result:
    """By the kernels, through the dispatcher."""
    x, weight, bias = (None if t is None else t.detach().requires_grad_() for t in (x, weight, bias))
    running_mean, running_var = (torch.full(x.shape[1:2], v, device=x.device) for v in (0.5, 2.0))
    y = called.pooled_batch_norm(
        x, running_mean, running_var, weight, bias, True, MOMENTUM, EPS, constant=constant, act="relu"
    )
    assert type(y.grad_fn).__name__ == "PooledBatchNormBackward"  # not the pool on its own
    y.backward(g)
    return Result(
        y.detach(), running_mean, running_var, x.grad, *(t if t is None else t.grad for t in (weight, bias)), None
    )


def expected(x: Tensor, weight, bias, constant: str | float = "exact") -> tuple[Tensor, Tensor, Tensor]:
    """In float64: the whole output, the pooled one, and where in an image each of its elements comes from.

    Behind the ReLU all that is closed is equal, and which of it wins decides about nothing.
    """
    y = lp_batch_norm(
        *(None if t is None else t.double() for t in (x, None, None, weight, bias)), True, MOMENTUM, EPS,
        constant=constant, act="relu",
    )  # fmt: skip
    return y, *max_pool(y)


def max_pool(y: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's pool, and where in an image each of its elements comes from; channels last, but pooled as NCHW.

    Torch 2.11's channels-last kernel puts float64 behind an int32 for each thread, off its alignment where these are
    odd: one channel and one window end the CUDA context. A copy, as with one channel ``contiguous`` keeps the strides.
    """
    z, at = F.max_pool2d(y.clone(memory_format=torch.contiguous_format), 3, 2, 1, return_indices=True)
    return z.contiguous(memory_format=torch.channels_last), at


def spread(g: Tensor, at: Tensor, like: Tensor) -> Tensor:
    """The gradient of what was pooled: each window's gradient where its element came from."""
    whole = torch.zeros_like(like).flatten(2)
    whole.scatter_add_(2, at.flatten(2), g.to(like).flatten(2))
    return whole.view_as(like)


def check(x: Tensor, *, weight=None, bias=None, constant: str | float = "exact", pilot=None) -> Result:
    """Everything that a training step computes."""
    _, z, _ = expected(x, weight, bias, constant)
    g = off_the_fence(torch.randn(z.shape, device=x.device).to(x.dtype), x, weight, bias, constant)
    ours = pooled(x, weight, bias, g, constant)
    assert ours.y.dtype == ours.dx.dtype == x.dtype
    for tensor, shape in ((ours.y, z.shape), (ours.dx, x.shape)):
        assert tensor.shape == shape
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    compare_pooled(ours, x, weight=weight, bias=bias, g=g, constant=constant, pilot=pilot)
    return ours


def parameters(channels: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """γ of both signs."""
    weight, bias = affine("l1", channels, dtype).values()
    return {"weight": torch.where(torch.arange(channels, device=DEVICE) % 3 == 1, -weight, weight), "bias": bias}


def few_values(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """So few that nearly every window has several largest ones. No zeros: the mean is 0 now and then.

    |x − μ| has no derivative at x = μ; there either side's [x ≥ μ] is right, and dx is another.
    """
    x = torch.randint(-2, 2, shape, device=device)
    return (x + (x >= 0)).to(dtype, memory_format=torch.channels_last)


def off_the_fence(g: Tensor, x: Tensor, weight, bias, constant: str | float = "exact") -> Tensor:
    """``g``, but 0 where what won is so near 0 that rounding decides whether the ReLU lets ``g`` through."""
    y = lp_batch_norm(
        *(None if t is None else t.double() for t in (x, None, None, weight, bias)), True, MOMENTUM, EPS,
        constant=constant,
    )  # fmt: skip
    z, _ = max_pool(y)
    return torch.where((z.abs() < 2e-3 * y.abs().amax((0, 2, 3), keepdim=True)) & (z != 0), 0, g)


def compare_pooled(ours: Result, x: Tensor, *, weight, bias, g: Tensor, constant="exact", pilot=None):
    """Raise unless ``ours`` is what the equation and PyTorch's pool give.

    The gradient through the pool is that of the whole output at the places that won, so the bounds of the batch norm
    without a pool hold: its output is the reference's, but for what the kernels say about the elements that won.
    """
    y, _, at = expected(x, weight, bias, constant)
    seen = y.flatten(2).scatter(2, at.flatten(2), ours.y.double().flatten(2))
    assert torch.equal(seen.gather(2, at.flatten(2)), ours.y.double().flatten(2))  # one winner of several windows
    compare(
        replace(ours, y=seen.view_as(y)), x, "l1", weight=weight, bias=bias, residual=None, act="relu", memory="exact",
        constant=constant, g=spread(g, at, y), pilot=pilot,
    )  # fmt: skip
