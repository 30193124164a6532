"""Chooses the backend of each normalization: fused Triton kernels, the hand-derived gradient, or the plain equation.

:func:`batch_norm_backend` and :func:`layer_norm_backend` say which one serves a call, and why not a faster one. When a
call on a GPU falls back, the same sentence is logged once (logger ``normmatters.kernels``, level INFO). When the native
library is missing on a CPU, that is (level WARNING).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from normmatters.kernels import emulation
from normmatters.kernels.cpu import DTYPES, warn_if_missing
from normmatters.kernels.cpu import why_not as why_not_library
from normmatters.kernels.memory_format import memory_format
from normmatters.kernels.operators import needs_operators
from normmatters.norm import Norm

logger = logging.getLogger("normmatters.kernels")

_L1 = Norm()
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Backend(NamedTuple):
    """``name`` is ``"triton"``, ``"cpu"``, ``"hand-derived"``, ``"plain"`` or ``"arithmetic"``.

    ``reason`` says why no faster one serves.

    >>> Backend("plain", "in evaluation the module is torch's own batch norm").name
    'plain'
    """

    name: str
    reason: str


def _switched_off() -> str:
    off = os.environ.get("NORMMATTERS_KERNELS", "1") == "0"
    return "kernels are switched off by NORMMATTERS_KERNELS=0" if off else ""


def find_triton() -> str:
    """Why no kernel can run in this process at all; empty if it can."""
    if _switched_off():
        return _switched_off()
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return ""


TRITON_MISSING = find_triton()
#: Why there are no native CPU kernels in this process; empty if there are.
NATIVE_MISSING = _switched_off() or why_not_library()
# Triton's interpreter (TRITON_INTERPRET=1) runs the kernels on a CPU, thousands of times slower than the equations do:
# the kernels' own tests ask for it, and nothing else should get it for having the variable set.
INTERPRETED = os.environ.get("NORMMATTERS_KERNELS") == "interpret"
_as_if_on_gpu: ContextVar[bool] = ContextVar("normmatters_as_if_on_gpu", default=False)


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a kernel finds nothing at the tensor's address: a subclass that answers operators by itself.

    Where kernels are called as operators, one that is no wrapper (``FakeTensor``) answers those.
    """
    return is_traceable_wrapper_subclass(tensor) or (
        not needs_operators() and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    )


def plain_only() -> bool:
    """Whether operators alone are understood: by ``torch.func``, forward-mode differentiation, ``torch.jit.trace``."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


# The compiler is in the same transforms while it traces, and guards them.
plain_only._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def as_if_on_gpu() -> Iterator[None]:
    """Choose backends in this thread for tensors on the CPU as for tensors on a GPU.

    For fake tensors, which kernels answer by shapes and dtypes and are not launched on.
    """
    token = _as_if_on_gpu.set(True)
    try:
        yield
    finally:
        _as_if_on_gpu.reset(token)


def _runs_kernels(device: torch.device) -> bool:
    if device.type == "cuda":
        return True
    # The compiler cannot trace a context variable, and never has to.
    return device.type == "cpu" and (INTERPRETED or (not torch.compiler.is_compiling() and _as_if_on_gpu.get()))


def why_not_triton(input: Tensor) -> str:
    """Why no kernel can take ``input``; empty if one can."""
    if TRITON_MISSING:
        return TRITON_MISSING
    if not (input.is_cuda or _runs_kernels(input.device)):
        return f"the input is on {input.device.type}, and the kernels run on CUDA devices"
    if input.dtype not in _DTYPES:
        return f"the kernels take float16, bfloat16 and float32, the input is {input.dtype}"
    return _why_no_kernel(input)


def why_not_native(input: Tensor) -> str:
    """Why no native CPU kernel can take this input; empty if one can."""
    if input.device.type != "cpu":
        return f"the input is on {input.device.type}, and the native kernels run on a CPU"
    if INTERPRETED:
        return "NORMMATTERS_KERNELS=interpret asks for Triton's interpreter"
    if NATIVE_MISSING:
        return NATIVE_MISSING
    if input.dtype not in DTYPES:
        return f"the native kernels take float16, bfloat16, float32 and float64, the input is {input.dtype}"
    return _why_no_kernel(input)


def _why_no_kernel(input: Tensor) -> str:
    """What kernels of either kind cannot take."""
    if type(input) is not Tensor and has_no_memory(input):
        return f"a {type(input).__name__} has no memory of its own"
    if input.numel() == 0:
        return "the input is empty"
    # The flag itself: up to torch 2.11, `is_exporting()` is also true inside torch.compile (pytorch/pytorch#176347).
    if getattr(torch.compiler, "_is_exporting_flag", False):
        return "exported programs are to run without this library"
    if plain_only():
        return "torch.func transforms, forward-mode differentiation and torch.jit.trace need the plain equation"
    return ""


TRITON = Backend("triton", "")
NATIVE = Backend("cpu", "")
_EMULATED = Backend("arithmetic", "normmatters.precision.arithmetic is active")


def batch_norm_backend(input: Tensor, norm: Norm = _L1, *, training: bool = True) -> Backend:
    """Which backend serves a batch norm of ``input``, (N, C, ...), and why not a faster one.

    A backend is a function of ``(input, norm, weight, bias, running, residual=, act=)``, a row of the table in
    :mod:`normmatters.kernels.dispatch`, and a question here: why can it not serve this call?

    Example::

        >>> batch_norm_backend(torch.randn(8, 3, 4, 4)).name in ("cpu", "hand-derived")  # with and without a compiler
        True
    """
    if emulation.open_contexts and emulation.active() is not None:
        return _EMULATED
    if not training:
        return Backend("plain", "in evaluation the module is torch's own batch norm")
    if not (input.is_cuda or _runs_kernels(input.device)) and input.device.type == "cpu":
        reason = why_not_native(input)
        if not reason:
            return NATIVE
    else:
        reason = why_not_triton(input) or why_not_batch_norm_kernel(input, norm)
        if not reason:
            return TRITON
    return Backend("hand-derived" if _takes_hand_derived(input) else "plain", reason)


def _takes_hand_derived(input: Tensor) -> bool:
    """Whether the gradient written by hand serves ``input``; where not, autograd differentiates the plain equation.

    The compiler fuses the equation by itself. The gradient has plain tensors, positions of extremes, which a DTensor
    does not mix with.
    """
    return not (
        input.numel() == 0
        or torch.compiler.is_compiling()
        or plain_only()
        or (type(input) is not Tensor and has_no_memory(input))
    )


def why_not_batch_norm_kernel(input: Tensor, norm: Norm) -> str:
    if input.numel() > 2**29 and input.dim() >= 2:
        reason = why_too_large(input)
        if reason:
            return reason
    if norm.kind in ("l1", "l2", "mean"):
        return ""
    from normmatters.kernels.triton.batch_norm import select

    if norm.kind == "lp":
        return "there are kernels for p = 1, 2, inf, Top(k), range and mean-only, not for a general p"
    if norm.k is not None and norm.k > select.MAX_K:
        return f"the Top(k) kernel takes k <= {select.MAX_K}, got k={norm.k}"
    if input.dim() >= 2:
        contiguous = memory_format(input) is torch.contiguous_format  # or will be, by a copy
        groups = _groups(_sizes(input), contiguous, input.element_size(), norm.k or 1)
        if groups > select.MAX_GROUPS:
            return f"{groups} groups per channel are more than the {select.MAX_GROUPS} that the selection kernel holds"
    return ""


def why_too_large(input: Tensor) -> str:
    from normmatters.kernels.triton.batch_norm.layout import MAX_COLS, MAX_ROWS

    channel, image = input.numel() // input.shape[1], input.numel() // input.shape[0]
    if channel > MAX_ROWS:
        return f"the kernels take at most {MAX_ROWS} values per channel, not {channel}"
    if image > MAX_COLS and memory_format(input) is torch.contiguous_format:
        return f"the kernels take at most {MAX_COLS} values per image that is not channels last, not {image}"
    return ""


def _sizes(input: Tensor) -> tuple[int, ...]:
    """The shape in numbers: to the compiler, a size that was another one before is a symbol."""
    if not torch.compiler.is_compiling():
        return tuple(map(int, input.shape))
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return tuple([guard_scalar(size) for size in input.shape])  # type: ignore[misc]


def _groups(shape: tuple[int, ...], contiguous: bool, itemsize: int, k: int) -> int:
    """Groups per channel of an input of this shape."""
    from normmatters.kernels.triton.batch_norm import select
    from normmatters.kernels.triton.batch_norm.layout import view_of_shape

    return select.groups_of(view_of_shape(shape, contiguous), itemsize, k)


# To the compiler a number: it would look into the caches that it reads, and warn of each.
_groups._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_not_pooled(input: Tensor, norm: Norm, act: str | None) -> str:
    """Why the kernels cannot add the max pool to a batch norm that they serve; empty if they can."""
    if norm.kind != "l1" or act != "relu":
        return "the pool is a part of L1 batch norm with a ReLU only"
    if input.dim() != 4 or not input.is_contiguous(memory_format=torch.channels_last):
        return "the pool is a part of the kernels for channels_last inputs only"
    return ""


def layer_norm_backend(input: Tensor, normalized_shape: Sequence[int], norm: Norm) -> Backend:
    """Which backend serves a layer norm or RMS norm of ``input``, (..., *normalized_shape), and why not a faster one.

    Example::

        >>> layer_norm_backend(torch.randn(8, 16), [16], Norm("range")).name
        'plain'
    """
    if emulation.open_contexts and emulation.active() is not None:
        return _EMULATED
    if input.device.type == "cpu" and not _runs_kernels(input.device):
        reason = why_not_native(input)
        if not reason:
            from normmatters.kernels.cpu import layer_norm as native

            reason = native.why_not(input, normalized_shape, norm)
        return Backend("plain", reason) if reason else NATIVE
    reason = why_not_triton(input)
    if not reason:
        from normmatters.kernels.triton import layer_norm

        reason = layer_norm.why_not(input, normalized_shape, norm)
    return Backend("plain", reason) if reason else TRITON


@functools.lru_cache(1024)
def log_once(message: str) -> None:
    logger.info(message)


def log_fallback(what: str, backend: Backend, input: Tensor) -> None:
    """Log once that ``what`` is not done by kernels on a GPU, and why. On a CPU warn once if the library is missing."""
    if not backend.reason or torch.compiler.is_compiling():
        return
    if input.is_cuda:
        log_once(f"{what} falls back to {backend.name}: {backend.reason}")
    elif backend.reason == why_not_library():
        warn_if_missing()
