"""Every normalization passes here: check the arguments, choose a backend, call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normmatters.functional.batch_norm import batch_norm as plain_batch_norm
from normmatters.functional.checks import check_batch_norm, check_layer_norm
from normmatters.functional.layer_norm import layer_norm as plain_layer_norm
from normmatters.kernels import backends, emulation, hand_derived
from normmatters.kernels.backends import (
    Backend,
    batch_norm_backend,
    has_no_memory,
    layer_norm_backend,
    log_fallback,
    why_not_pooled,
)
from normmatters.norm import Norm, RunningStats

__all__ = [
    "Backend",
    "NormedInput",
    "batch_norm",
    "batch_norm_backend",
    "layer_norm",
    "layer_norm_backend",
    "linked_batch_norm",
    "max_pool",
    "pooled_batch_norm",
    "rms_norm",
    "twin_batch_norm",
]


def batch_norm(
    input: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStats,
    training: bool,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """Batch norm of any kind; see :func:`normmatters.functional.lp_batch_norm` for the equation.

    input and residual: (N, C, ...); weight and bias: (C,).

    Example::

        >>> batch_norm(torch.tensor([[1.0], [3.0]]), Norm(eps=0.0), None, None, RunningStats(), True, act="relu")
        tensor([[0.0000],
                [0.7979]])
    """
    return linked_batch_norm(input, norm, weight, bias, running, training, residual=residual, act=act)[0]


def linked_batch_norm(
    input: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStats,
    training: bool,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
    link: Tensor | None = None,
    linked: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`batch_norm`, and a link to its output if ``linked``, or None.

    ``link`` is what the batch norm that made ``residual`` returned with it. Only the kernels have links (see
    :mod:`normmatters.kernels.triton.batch_norm.operator`): elsewhere ``link`` is ignored, and autograd adds the
    residual's gradient.

    Example::

        >>> x = torch.tensor([[1.0], [3.0]])
        >>> output, link = linked_batch_norm(x, Norm(), None, None, RunningStats(), True, linked=True)
        >>> link is None  # on a CPU
        True
    """
    check_batch_norm(input, norm, weight, bias, running, training, residual=residual, act=act)
    backend = batch_norm_backend(input, norm, training=training)
    if isinstance(running.momentum, Tensor) and not backend.reason and torch.compiler.is_compiling():
        backend = Backend("plain", "the kernels take a momentum that is a number")  # in eager mode they read it
    if backend is backends.TRITON:
        import normmatters.kernels.triton.batch_norm.operator as kernels  # found in half the time that `from` takes

        _check_plain(running.mean, running.var, weight, bias, residual)
        if residual is not None and residual.dtype != input.dtype:
            residual, link = residual.to(input.dtype), None
        in_kernel = _counted_by_kernel(running, input)
        pair = kernels.batch_norm(
            input, norm, weight, bias, in_kernel, residual=residual, act=act, link=link, linked=linked
        )  # fmt: skip
        _count_after_kernel(running, in_kernel)
        return pair
    if backend is backends.NATIVE and _are_plain(running.mean, running.var, weight, bias, residual):
        from normmatters.kernels.cpu.batch_norm import batch_norm as native

        output = native(input, norm, weight, bias, running, residual=residual, act=act)
        if running.num_batches is not None:
            running.num_batches.add_(1)
        return output, None
    if training:
        log_fallback("batch norm", backend, input)
    if backend.name == "plain":
        output = plain_batch_norm(input, norm, weight, bias, running, training, residual=residual, act=act)
    elif backend.name == "arithmetic":
        arithmetic = emulation.active()
        assert arithmetic is not None
        output = arithmetic.batch_norm(input, norm, weight, bias, running, training, residual=residual, act=act)
    else:
        output = hand_derived.batch_norm(input, norm, weight, bias, running, residual=residual, act=act)
    if running.num_batches is not None:
        running.num_batches.add_(1)
    return output, None


def pooled_batch_norm(
    input: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStats,
    training: bool,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """:func:`batch_norm`, then a max pool over 3×3 windows with stride 2 and padding 1; in one where kernels can.

    input: (N, C, H, W); output: (N, C, ⌈H/2⌉, ⌈W/2⌉).
    In one, the x that won each window and a byte with it are saved for the backward pass, whatever ``norm.memory`` is,
    and its gradients are right to rounding.

    Example::

        >>> x = torch.arange(8.0).view(2, 1, 2, 2)
        >>> pooled_batch_norm(x, Norm(eps=0.0), None, None, RunningStats(), True, act="relu").flatten()
        tensor([0.0000, 1.3963])
    """
    serves = batch_norm_backend(input, norm, training=training) is backends.TRITON
    if residual is None and serves and not isinstance(running.momentum, Tensor):
        reason = why_not_pooled(input, norm, act)
        if not reason:
            from normmatters.kernels.triton.batch_norm.pooled import pooled_batch_norm as kernel

            check_batch_norm(input, norm, weight, bias, running, training, act=act)
            _check_plain(running.mean, running.var, weight, bias)
            in_kernel = _counted_by_kernel(running, input)
            output = kernel(input, norm, weight, bias, in_kernel)
            _count_after_kernel(running, in_kernel)
            return output
        log_fallback("max pool after a batch norm", Backend("plain", reason), input)
    return max_pool(batch_norm(input, norm, weight, bias, running, training, residual=residual, act=act))


class NormedInput(NamedTuple):
    """An input, the norm that it goes through and its parameters: one side of :func:`twin_batch_norm`.

    ``input`` is (N, C, ...), ``weight`` and ``bias`` are (C,).

    >>> NormedInput(torch.ones(2, 3), Norm.named("l1"), None, None, RunningStats()).norm.kind
    'l1'
    """

    input: Tensor
    norm: Norm
    weight: Tensor | None
    bias: Tensor | None
    running: RunningStats


def twin_batch_norm(first: NormedInput, second: NormedInput, *, linked: bool = False) -> tuple[Tensor, Tensor | None]:
    """relu(norm₁(x₁) + norm₂(x₂)) in training, and the link to it if ``linked``, or None.

    For two L1 norms with the same ``memory``, on tensors (N, C, H, W) of one shape, layout and dtype that the kernels
    serve.

    Example::

        >>> weight, bias = torch.ones(2, 8, device="cuda")
        >>> x = torch.randn(4, 8, 6, 6, device="cuda")
        >>> one = NormedInput(x, Norm.named("l1"), weight, bias, RunningStats())
        >>> twin_batch_norm(one, one)[0].shape
        torch.Size([4, 8, 6, 6])
    """
    if isinstance(first.running.momentum, Tensor) or isinstance(second.running.momentum, Tensor):
        residual = batch_norm(*second, training=True)
        return linked_batch_norm(*first, training=True, residual=residual, act="relu", linked=linked)

    from normmatters.kernels.triton.batch_norm.twin import twin_batch_norm as kernel

    in_kernel = []
    for one in (first, second):
        check_batch_norm(*one, training=True)
        _check_plain(one.running.mean, one.running.var, one.weight, one.bias)
        in_kernel.append(one._replace(running=_counted_by_kernel(one.running, one.input)))
    pair = kernel(*in_kernel, linked=linked)
    for one, counted in zip((first, second), in_kernel):
        _count_after_kernel(one.running, counted.running)
    return pair


def max_pool(input: Tensor) -> Tensor:
    """The pool of :func:`pooled_batch_norm` alone.

    input: (N, C, H, W).

    Example::

        >>> max_pool(torch.arange(9.0).view(1, 1, 3, 3)).flatten()
        tensor([4., 5., 7., 8.])
    """
    return F.max_pool2d(input, 3, 2, 1)


_PLAIN_TENSORS = (Tensor, nn.Parameter)


def _check_plain(*tensors: Tensor | None) -> None:
    """Raise where a kernel would be handed no memory: that breaks the GPU for the whole process."""
    if not _are_plain(*tensors):
        (name, *_) = [type(tensor).__name__ for tensor in tensors if not _are_plain(tensor)]
        raise TypeError(f"the input is a plain Tensor, so all others must be, got a {name}")


def _are_plain(*tensors: Tensor | None) -> bool:
    """Whether each tensor is None or has memory that a kernel can read."""
    for tensor in tensors:
        if tensor is not None and type(tensor) not in _PLAIN_TENSORS and has_no_memory(tensor):
            return False
    return True


def _counted_by_kernel(running: RunningStats, input: Tensor) -> RunningStats:
    """``running`` without a number of batches that the kernel cannot raise; a launch of its own would take longer."""
    count = running.num_batches
    if count is None or (count.dtype == torch.int64 and count.device == input.device):
        return running
    return running._replace(num_batches=None)


def _count_after_kernel(running: RunningStats, in_kernel: RunningStats) -> None:
    if running.num_batches is not in_kernel.num_batches and running.num_batches is not None:
        running.num_batches.add_(1)


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
    if backend.name in ("triton", "cpu"):
        check_layer_norm(input, normalized_shape, norm, weight, bias)
        _check_plain(weight, bias)
        kernels: Any
        if backend.name == "triton":
            from normmatters.kernels.triton import layer_norm as kernels
        else:
            from normmatters.kernels.cpu import layer_norm as kernels
        output: Tensor = kernels.layer_norm(input, normalized_shape, norm, weight, bias, centered=centered)
        return output
    arithmetic = emulation.active()
    if arithmetic is not None:
        return arithmetic.layer_norm(input, normalized_shape, norm, weight, bias, centered=centered)
    log_fallback("layer norm" if centered else "RMS norm", backend, input)
    return plain_layer_norm(input, normalized_shape, norm, weight, bias, centered=centered)


def rms_norm(input: Tensor, normalized_shape: Sequence[int], norm: Norm, weight: Tensor | None = None) -> Tensor:
    """RMS norm; see :func:`normmatters.functional.lp_rms_norm`.

    input: (..., *normalized_shape); weight: normalized_shape.

    Example::

        >>> rms_norm(torch.tensor([2.0, -2.0]), [2], Norm(1, eps=0.0))
        tensor([ 0.7979, -0.7979])
    """
    return layer_norm(input, normalized_shape, norm, weight, centered=False)
