"""Normalizations by the backend that :mod:`normmatters.kernels.backends` chooses; checked, then computed."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normmatters import functional
from normmatters.functional import hand_derived
from normmatters.functional.checks import check_batch_norm, check_layer_norm
from normmatters.functional.layer_norm import layer_norm as plain_layer_norm
from normmatters.functional.statistic import scale_constant
from normmatters.kernels import emulation
from normmatters.kernels.backends import (
    Backend,
    batch_norm_backend,
    chosen_for_batch_norm,
    has_no_memory,
    layer_norm_backend,
    say,
    why_not_pooled,
)
from normmatters.norm import Norm, RunningStats

__all__ = [
    "Backend",
    "batch_norm",
    "batch_norm_backend",
    "layer_norm",
    "layer_norm_backend",
    "linked_batch_norm",
    "max_pool",
    "pooled_batch_norm",
    "rms_norm",
]

_cached_constant = functools.lru_cache(typed=True)(scale_constant)  # typed: True is no constant, but equals 1


def _constant(p: float | str, n: int, k: int | None, constant: str | float) -> float:
    """The constant from a cache, but not for the compiler: it would look into the cache anyway, and warn of it."""
    return (scale_constant if torch.compiler.is_compiling() else _cached_constant)(p, n, k, constant)


_PLAIN = (Tensor, nn.Parameter)
_WITHOUT_KERNELS = {
    "hand-derived": hand_derived.batch_norm,
    "plain": functional.lp_batch_norm,
}


def _check_plain(*tensors: Tensor | None) -> None:
    """A kernel that is handed no memory spoils the GPU for the whole process: say so before."""
    for tensor in tensors:
        if tensor is not None and type(tensor) not in _PLAIN and has_no_memory(tensor):
            raise TypeError(f"the input is a plain Tensor, so all others must be, got a {type(tensor).__name__}")


def _who_counts(num_batches_tracked: Tensor | None, input: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The number of batches for the kernel to raise, or, where it cannot, for :func:`_count` behind it."""
    if num_batches_tracked is None or (
        num_batches_tracked.dtype == torch.int64 and num_batches_tracked.device == input.device
    ):
        return num_batches_tracked, None
    return None, num_batches_tracked


def _count(num_batches_tracked: Tensor | None) -> None:
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    p: float | str = 1,
    k: int | None = None,
    constant: str | float = "exact",
    act: str | None = None,
    residual: Tensor | None = None,
    memory: str = "exact",
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    """Batch norm of any kind; see :func:`normmatters.functional.lp_batch_norm` for the equation.

    ``num_batches_tracked`` is raised by one, by the kernel where there is one: a launch of its own would take longer.

    input and residual: (N, C, ...); num_batches_tracked: (); the other tensors: (C,).

    Example::

        >>> batch_norm(torch.tensor([[1.0], [3.0]]), None, None, None, None, True, 0.1, 0.0, act="relu")
        tensor([[0.0000],
                [0.7979]])
    """
    return linked_batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps,
        p=p, k=k, constant=constant, act=act, residual=residual, memory=memory, num_batches_tracked=num_batches_tracked,
    )[0]  # fmt: skip


def linked_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    p: float | str = 1,
    k: int | None = None,
    constant: str | float = "exact",
    act: str | None = None,
    residual: Tensor | None = None,
    memory: str = "exact",
    link: Tensor | None = None,
    linked: bool = False,
    num_batches_tracked: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`batch_norm`, and a link to its output if ``linked`` (see :mod:`normmatters.kernels.ops`), or None.

    ``link`` is what the batch norm that made ``residual`` gave with it. Where no kernel runs there are no links: one
    that comes is left alone, and the residual's gradient goes the usual way.

    input and residual: (N, C, ...); num_batches_tracked: (); the other tensors: (C,).

    Example::

        >>> x = torch.tensor([[1.0], [3.0]])
        >>> output, link = linked_batch_norm(x, None, None, None, None, True, 0.1, 0.0, linked=True)
        >>> link is None  # on a CPU
        True
    """
    backend, kind = chosen_for_batch_norm(input, training, p, k, memory)
    if kind is not None:
        from normmatters.kernels.ops import batch_norm as kernel  # of the module itself: quicker than of the package

        check_batch_norm(
            input, running_mean, running_var, weight, bias, training, eps, kind=kind, k=k, act=act, residual=residual
        )
        _check_plain(running_mean, running_var, weight, bias, residual)
        C = _constant(p, int(input.numel() // input.shape[1]), k, constant)
        if residual is not None and residual.dtype != input.dtype:
            residual, link = residual.to(input.dtype), None
        batches, late = _who_counts(num_batches_tracked, input)
        output, link = kernel(
            input,
            running_mean,
            running_var,
            weight,
            bias,
            momentum,
            0.0 if kind == "mean" else eps,
            kind=kind,
            k=k,
            constant=C,
            act=act,
            residual=residual,
            memory=memory,
            link=link,
            linked=linked,
            batches=batches,
        )
        _count(late)
        return output, link
    if training:
        say("batch norm", backend, input)
    arithmetic = emulation.active()
    if arithmetic is not None:
        norm = Norm(p, k, constant, eps)
        running = RunningStats(running_mean, running_var, None, momentum)
        output = arithmetic.batch_norm(input, norm, weight, bias, running, training, residual=residual, act=act)
        _count(num_batches_tracked)
        return output, None
    plain = _WITHOUT_KERNELS[backend.name]
    output = plain(
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
    _count(num_batches_tracked)
    return output, None


def pooled_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    p: float | str = 1,
    k: int | None = None,
    constant: str | float = "exact",
    act: str | None = None,
    memory: str = "exact",
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    """:func:`batch_norm`, then a max pool over 3×3 windows with stride 2 and padding 1; in one where kernels can.

    input: (N, C, H, W); output: (N, C, ⌈H/2⌉, ⌈W/2⌉); num_batches_tracked: (); the other tensors: (C,).
    In one, the x that won each window and a byte with it are kept for the backward pass, whatever ``memory`` is, and
    its gradients are right to rounding.

    Example::

        >>> x = torch.arange(8.0).view(2, 1, 2, 2)
        >>> pooled_batch_norm(x, None, None, None, None, True, 0.1, 0.0, act="relu").flatten()
        tensor([0.0000, 1.3963])
    """
    tensors = (running_mean, running_var, weight, bias)
    _, kind = chosen_for_batch_norm(input, training, p, k, memory)
    if kind is not None:
        reason = why_not_pooled(input, kind, act)
        if not reason:
            from normmatters.kernels.pooled_ops import pooled_batch_norm as kernel

            check_batch_norm(input, *tensors, training, eps, kind=kind, k=k, act=act, residual=None)
            _check_plain(*tensors)
            C = _constant(p, int(input.numel() // input.shape[1]), k, constant)
            batches, late = _who_counts(num_batches_tracked, input)
            output = kernel(input, *tensors, momentum, eps, constant=C, batches=batches)
            _count(late)
            return output
        say("max pool behind a batch norm", Backend("plain", reason), input)
    output = batch_norm(
        input, *tensors, training, momentum, eps,
        p=p, k=k, constant=constant, act=act, memory=memory, num_batches_tracked=num_batches_tracked,
    )  # fmt: skip
    return max_pool(output)


def max_pool(input: Tensor) -> Tensor:
    """The pool of :func:`pooled_batch_norm` alone.

    input: (N, C, H, W).

    Example::

        >>> max_pool(torch.arange(9.0).view(1, 1, 3, 3)).flatten()
        tensor([4., 5., 7., 8.])
    """
    return F.max_pool2d(input, 3, 2, 1)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    norm: Norm,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    centered: bool = True,
) -> Tensor:
    """Layer norm, or with ``centered=False`` RMS norm; see :func:`normmatters.functional.lp_layer_norm`.

    input: (..., *normalized_shape); weight and bias: normalized_shape.

    Example::

        >>> layer_norm(torch.tensor([1.0, 3.0]), [2], Norm(1, eps=0.0))
        tensor([-0.7979,  0.7979])
    """
    backend = layer_norm_backend(input, normalized_shape, norm)
    if backend.name == "triton":
        from normmatters.kernels.triton import layer_norm as triton_layer_norm

        check_layer_norm(input, normalized_shape, norm, weight, bias)
        _check_plain(weight, bias)
        return triton_layer_norm.layer_norm(input, normalized_shape, norm, weight, bias, centered=centered)
    arithmetic = emulation.active()
    if arithmetic is not None:
        return arithmetic.layer_norm(input, normalized_shape, norm, weight, bias, centered=centered)
    say("layer norm" if centered else "RMS norm", backend, input)
    return plain_layer_norm(input, normalized_shape, norm, weight, bias, centered=centered)


def rms_norm(input: Tensor, normalized_shape: Sequence[int], norm: Norm, weight: Tensor | None = None) -> Tensor:
    """RMS norm; see :func:`normmatters.functional.lp_rms_norm`.

    input: (..., *normalized_shape); weight: normalized_shape.

    Example::

        >>> rms_norm(torch.tensor([2.0, -2.0]), [2], Norm(1, eps=0.0))
        tensor([ 0.7979, -0.7979])
    """
    return layer_norm(input, normalized_shape, norm, weight, centered=False)
