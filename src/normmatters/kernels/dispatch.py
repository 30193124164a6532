"""Chooses the backend of each normalization: fused Triton kernels, the hand-derived gradient, or the plain equation.

:func:`batch_norm_backend` and :func:`layer_norm_backend` say which one serves a call, and why not a faster one. When a
call on a GPU falls back, the same sentence is logged once (logger ``normmatters.kernels``, level INFO).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from normmatters import functional, precision
from normmatters.functional import hand_derived
from normmatters.functional.checks import check_batch_norm, check_layer_norm, check_memory
from normmatters.functional.statistic import Kind, check_constant, compute_dtype, scale_constant, statistic_kind

logger = logging.getLogger("normmatters.kernels")

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Backend(NamedTuple):
    """``name`` is ``"triton"``, ``"hand-derived"``, ``"plain"`` or ``"arithmetic"``; ``reason`` says why not faster.

    >>> Backend("plain", "in evaluation the module is torch's own batch norm").name
    'plain'
    """

    name: str
    reason: str


def _find_triton() -> str:
    """Why no kernel can run in this process at all; empty if it can."""
    if os.environ.get("NORMMATTERS_KERNELS", "1") == "0":
        return "kernels are switched off by NORMMATTERS_KERNELS=0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return ""


_TRITON_MISSING = _find_triton()
# Triton's interpreter (TRITON_INTERPRET=1) runs the kernels on a CPU, thousands of times slower than the equations do:
# the kernels' own tests ask for it, and nothing else should get it for having the variable set.
_INTERPRETED = os.environ.get("NORMMATTERS_KERNELS") == "interpret"


def _why_not_triton(input: Tensor) -> str:
    if _TRITON_MISSING:
        return _TRITON_MISSING
    if not input.is_cuda and not (_INTERPRETED and input.device.type == "cpu"):
        return f"the input is on {input.device.type}, and the kernels run on CUDA devices"
    if input.dtype not in _KERNEL_DTYPES:
        return f"the kernels take float16, bfloat16 and float32, the input is {input.dtype}"
    if type(input) is not Tensor and is_traceable_wrapper_subclass(input):
        return f"a {type(input).__name__} has no memory of its own"
    if input.numel() == 0:
        return "the input is empty"
    # The flag itself: up to torch 2.11, `is_exporting()` is also true inside torch.compile (pytorch/pytorch#176347).
    if getattr(torch.compiler, "_is_exporting_flag", False):
        return "exported programs are to run without this library"
    if not torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
            return "torch.func transforms and forward-mode differentiation need the plain equation"
    return ""


_TRITON = Backend("triton", "")


_cached_constant = functools.lru_cache(typed=True)(scale_constant)  # typed: True is no constant, but equals 1


def _constant(p: float | str, n: int, k: int | None, constant: str | float) -> float:
    """The constant from a cache, but not for the compiler: it would look into the cache anyway, and warn of it."""
    return (scale_constant if torch.compiler.is_compiling() else _cached_constant)(p, n, k, constant)


def batch_norm_backend(
    input: Tensor, *, training: bool = True, p: float | str = 1, k: int | None = None, memory: str = "exact"
) -> Backend:
    """Which backend serves a batch norm of ``input``, (N, C, ...), and why not a faster one.

    Example::

        >>> batch_norm_backend(torch.randn(8, 3, 4, 4), p=1).name
        'hand-derived'
    """
    return _batch_norm_backend(input, training, p, k, memory)[0]


def _batch_norm_backend(
    input: Tensor, training: bool, p: float | str, k: int | None, memory: str
) -> tuple[Backend, Kind | None]:
    """The backend, and if it is the kernels the kind of statistic, else None."""
    check_memory(memory)
    if precision.active() is not None:
        return Backend("arithmetic", "normmatters.precision.arithmetic is active"), None
    if not training:
        return Backend("plain", "in evaluation the module is torch's own batch norm"), None
    reason = _why_not_triton(input)
    if reason:
        return Backend("hand-derived", reason), None
    kind = statistic_kind(p, k)
    reason = _why_not_batch_norm_kernel(input, kind, k)
    return (Backend("hand-derived", reason), None) if reason else (_TRITON, kind)


def _why_not_batch_norm_kernel(input: Tensor, kind: str, k: int | None) -> str:
    if kind in ("l1", "l2", "mean"):
        return ""
    from normmatters.kernels.triton import batch_norm_statistics as kernels

    if kind == "lp":
        return "there are kernels for p = 1, 2, inf, Top(k), range and mean-only, not for a general p"
    if kind == "topk" and k is not None and k > kernels.MAX_K:
        return f"the Top(k) kernel takes k <= {kernels.MAX_K}, got k={k}"
    if input.dim() >= 2:
        groups = _groups(tuple(map(int, input.shape)), input.is_contiguous(), input.element_size(), k or 1)
        if groups > kernels.MAX_GROUPS:
            return f"{groups} groups a channel are more than the {kernels.MAX_GROUPS} that the selection kernel holds"
    return ""


def _groups(shape: tuple[int, ...], contiguous: bool, itemsize: int, k: int) -> int:
    """Groups a channel of an input of this shape."""
    from normmatters.kernels.triton import batch_norm_statistics as kernels
    from normmatters.kernels.triton.layout import _view

    return kernels.groups_of(_view(shape, contiguous), itemsize, k)


# To the compiler a number: it would look into the caches behind it, and warn of each.
_groups._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _why_not_pooled_kernel(input: Tensor, kind: str, act: str | None) -> str:
    if kind != "l1" or act != "relu":
        return "the pool is a part of L1 batch norm with a ReLU only"
    if input.dim() != 4 or not input.is_contiguous(memory_format=torch.channels_last):
        return "the pool is a part of the kernels for channels_last inputs only"
    return ""


def layer_norm_backend(
    input: Tensor, normalized_shape: Sequence[int], *, p: float | str = 1, k: int | None = None
) -> Backend:
    """Which backend serves a layer norm or RMS norm of ``input``, (..., *normalized_shape), and why not a faster one.

    Example::

        >>> layer_norm_backend(torch.randn(8, 16), [16]).reason
        'the input is on cpu, and the kernels run on CUDA devices'
    """
    if precision.active() is not None:
        return Backend("arithmetic", "normmatters.precision.arithmetic is active")
    reason = _why_not_triton(input)
    if not reason and statistic_kind(p, k) not in ("l1", "l2"):
        reason = "there are layer norm kernels for p = 1 and p = 2 only"
    if not reason:
        from normmatters.kernels import layer_norm_ops

        reason = layer_norm_ops.supported(input, normalized_shape) or ""
    return Backend("plain", reason) if reason else _TRITON


@functools.lru_cache(1024)
def _log_once(message: str) -> None:
    logger.info(message)


def _say(what: str, backend: Backend, input: Tensor) -> None:
    if backend.reason and input.is_cuda and not torch.compiler.is_compiling():
        _log_once(f"{what} falls back to {backend.name}: {backend.reason}")


def _check_devices(input: Tensor, *others: Tensor | None) -> None:
    """A kernel that is handed memory of another device spoils the GPU for the whole process: say so before."""
    device = input.device
    for other in others:
        if other is not None and other.device != device:
            raise ValueError(f"all tensors must be on the input's device {device}, got one on {other.device}")


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
    backend, kind = _batch_norm_backend(input, training, p, k, memory)
    if kind is not None:
        from normmatters.kernels.ops import batch_norm as kernel  # of the module itself: quicker than of the package

        check_batch_norm(
            input, running_mean, running_var, weight, bias, training, eps, kind=kind, k=k, act=act, residual=residual
        )
        _check_devices(input, running_mean, running_var, weight, bias, residual)
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
        _say("batch norm", backend, input)
    plain = precision.batch_norm if backend.name == "arithmetic" else hand_derived.batch_norm
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
    _, kind = _batch_norm_backend(input, training, p, k, memory)
    if kind is not None:
        reason = _why_not_pooled_kernel(input, kind, act)
        if not reason:
            from normmatters.kernels.pooled_ops import pooled_batch_norm as kernel

            check_batch_norm(input, *tensors, training, eps, kind=kind, k=k, act=act, residual=None)
            _check_devices(input, *tensors)
            C = _constant(p, int(input.numel() // input.shape[1]), k, constant)
            batches, late = _who_counts(num_batches_tracked, input)
            output = kernel(input, *tensors, momentum, eps, constant=C, batches=batches)
            _count(late)
            return output
        _say("max pool behind a batch norm", Backend("plain", reason), input)
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
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    p: float | str = 1,
    k: int | None = None,
    constant: str | float = "exact",
) -> Tensor:
    """Layer norm of any kind; see :func:`normmatters.functional.lp_layer_norm`.

    input: (..., *normalized_shape); weight and bias: normalized_shape.

    Example::

        >>> layer_norm(torch.tensor([1.0, 3.0]), [2], None, None, 0.0)
        tensor([-0.7979,  0.7979])
    """
    backend = layer_norm_backend(input, normalized_shape, p=p, k=k)
    if backend.name == "triton":
        return _layer_norm_kernel(input, normalized_shape, weight, bias, eps, p, k, constant, centered=True)
    if backend.name == "arithmetic":
        return precision.layer_norm(input, normalized_shape, weight, bias, eps, p=p, k=k, constant=constant)
    _say("layer norm", backend, input)
    return functional.lp_layer_norm(input, normalized_shape, weight, bias, eps, p=p, k=k, constant=constant)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    *,
    p: float = 1,
    constant: str | float = "exact",
) -> Tensor:
    """RMS norm of any kind; see :func:`normmatters.functional.lp_rms_norm`.

    input: (..., *normalized_shape); weight: normalized_shape.

    Example::

        >>> rms_norm(torch.tensor([2.0, -2.0]), [2], None, 0.0)
        tensor([ 0.7979, -0.7979])
    """
    backend = layer_norm_backend(input, normalized_shape, p=p)
    if backend.name == "triton":
        epsilon = torch.finfo(compute_dtype(input.dtype)).eps if eps is None else eps
        return _layer_norm_kernel(input, normalized_shape, weight, None, epsilon, p, None, constant, centered=False)
    if backend.name == "arithmetic":
        return precision.rms_norm(input, normalized_shape, weight, eps, p=p, constant=constant)
    _say("RMS norm", backend, input)
    return functional.lp_rms_norm(input, normalized_shape, weight, eps, p=p, constant=constant)


def _layer_norm_kernel(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    p: float | str,
    k: int | None,
    constant: str | float,
    *,
    centered: bool,
) -> Tensor:
    from normmatters.kernels import layer_norm_ops

    check_constant(constant)
    kind = statistic_kind(p, k)
    check_layer_norm(input, normalized_shape, weight, bias, eps, kind=kind, k=k)
    _check_devices(input, weight, bias)
    C = scale_constant(p, math.prod(normalized_shape), k, constant)
    return layer_norm_ops.layer_norm(
        input, normalized_shape, weight, bias, eps, kind=kind, constant=C, centered=centered
    )
