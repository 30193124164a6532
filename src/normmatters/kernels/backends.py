"""Chooses the backend of each normalization: fused Triton kernels, the hand-derived gradient, or the plain equation.

:func:`batch_norm_backend` and :func:`layer_norm_backend` say which one serves a call, and why not a faster one. When a
call on a GPU falls back, the same sentence is logged once (logger ``normmatters.kernels``, level INFO).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from normmatters.functional.checks import check_memory
from normmatters.functional.hand_derived import plain_only
from normmatters.functional.statistic import Kind, statistic_kind
from normmatters.kernels import emulation
from normmatters.kernels.operators import needs_operators
from normmatters.norm import Norm

logger = logging.getLogger("normmatters.kernels")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Backend(NamedTuple):
    """``name`` is ``"triton"``, ``"hand-derived"``, ``"plain"`` or ``"arithmetic"``; ``reason`` says why not faster.

    >>> Backend("plain", "in evaluation the module is torch's own batch norm").name
    'plain'
    """

    name: str
    reason: str


def find_triton() -> str:
    """Why no kernel can run in this process at all; empty if it can."""
    if os.environ.get("NORMMATTERS_KERNELS", "1") == "0":
        return "kernels are switched off by NORMMATTERS_KERNELS=0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return ""


TRITON_MISSING = find_triton()
# Triton's interpreter (TRITON_INTERPRET=1) runs the kernels on a CPU, thousands of times slower than the equations do:
# the kernels' own tests ask for it, and nothing else should get it for having the variable set.
INTERPRETED = os.environ.get("NORMMATTERS_KERNELS") == "interpret"


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a kernel finds nothing behind the tensor's address: a subclass that answers operators by itself.

    Where kernels are called as operators, one that is no wrapper (``FakeTensor``) answers those.
    """
    return is_traceable_wrapper_subclass(tensor) or (
        not needs_operators() and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    )


def why_not_triton(input: Tensor) -> str:
    if TRITON_MISSING:
        return TRITON_MISSING
    if not input.is_cuda and not (INTERPRETED and input.device.type == "cpu"):
        return f"the input is on {input.device.type}, and the kernels run on CUDA devices"
    if input.dtype not in _DTYPES:
        return f"the kernels take float16, bfloat16 and float32, the input is {input.dtype}"
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


_TRITON = Backend("triton", "")


def batch_norm_backend(
    input: Tensor, *, training: bool = True, p: float | str = 1, k: int | None = None, memory: str = "exact"
) -> Backend:
    """Which backend serves a batch norm of ``input``, (N, C, ...), and why not a faster one.

    Example::

        >>> batch_norm_backend(torch.randn(8, 3, 4, 4), p=1).name
        'hand-derived'
    """
    return chosen_for_batch_norm(input, training, p, k, memory)[0]


def chosen_for_batch_norm(
    input: Tensor, training: bool, p: float | str, k: int | None, memory: str
) -> tuple[Backend, Kind | None]:
    """The backend, and if it is the kernels the kind of statistic, else None."""
    check_memory(memory)
    if emulation.active() is not None:
        return Backend("arithmetic", "normmatters.precision.arithmetic is active"), None
    if not training:
        return Backend("plain", "in evaluation the module is torch's own batch norm"), None
    reason = why_not_triton(input)
    if reason:  # the hand-derived gradient has plain tensors, positions of extremes, which a DTensor does not mix with
        wrapper = type(input) is not Tensor and has_no_memory(input)
        return Backend("plain" if wrapper else "hand-derived", reason), None
    kind = statistic_kind(p, k)
    reason = _why_not_batch_norm_kernel(input, kind, k)
    return (Backend("hand-derived", reason), None) if reason else (_TRITON, kind)


def _why_not_batch_norm_kernel(input: Tensor, kind: str, k: int | None) -> str:
    if input.numel() > 2**29 and input.dim() >= 2:
        reason = _why_too_large(input)
        if reason:
            return reason
    if kind in ("l1", "l2", "mean"):
        return ""
    from normmatters.kernels.triton import batch_norm_statistics as kernels
    from normmatters.kernels.triton.layout import memory_format

    if kind == "lp":
        return "there are kernels for p = 1, 2, inf, Top(k), range and mean-only, not for a general p"
    if kind == "topk" and k is not None and k > kernels.MAX_K:
        return f"the Top(k) kernel takes k <= {kernels.MAX_K}, got k={k}"
    if input.dim() >= 2:
        contiguous = memory_format(input) is torch.contiguous_format  # or will be, by a copy
        groups = _groups(_sizes(input), contiguous, input.element_size(), k or 1)
        if groups > kernels.MAX_GROUPS:
            return f"{groups} groups a channel are more than the {kernels.MAX_GROUPS} that the selection kernel holds"
    return ""


def _why_too_large(input: Tensor) -> str:
    from normmatters.kernels.triton.layout import MAX_COLS, MAX_ROWS, memory_format

    channel, image = input.numel() // input.shape[1], input.numel() // input.shape[0]
    if channel > MAX_ROWS:
        return f"the kernels take at most {MAX_ROWS} values a channel, not {channel}"
    if image > MAX_COLS and memory_format(input) is torch.contiguous_format:
        return f"the kernels take at most {MAX_COLS} values an image that is not channels last, not {image}"
    return ""


def _sizes(input: Tensor) -> tuple[int, ...]:
    """The shape in numbers: to the compiler, a size that was another one before is a symbol."""
    if not torch.compiler.is_compiling():
        return tuple(map(int, input.shape))
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return tuple([guard_scalar(size) for size in input.shape])  # type: ignore[misc]


def _groups(shape: tuple[int, ...], contiguous: bool, itemsize: int, k: int) -> int:
    """Groups a channel of an input of this shape."""
    from normmatters.kernels.triton import batch_norm_statistics as kernels
    from normmatters.kernels.triton.layout import _view

    return kernels.groups_of(_view(shape, contiguous), itemsize, k)


# To the compiler a number: it would look into the caches behind it, and warn of each.
_groups._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_not_pooled(input: Tensor, kind: str, act: str | None) -> str:
    if kind != "l1" or act != "relu":
        return "the pool is a part of L1 batch norm with a ReLU only"
    if input.dim() != 4 or not input.is_contiguous(memory_format=torch.channels_last):
        return "the pool is a part of the kernels for channels_last inputs only"
    return ""


def layer_norm_backend(input: Tensor, normalized_shape: Sequence[int], norm: Norm) -> Backend:
    """Which backend serves a layer norm or RMS norm of ``input``, (..., *normalized_shape), and why not a faster one.

    Example::

        >>> layer_norm_backend(torch.randn(8, 16), [16], Norm(1)).reason
        'the input is on cpu, and the kernels run on CUDA devices'
    """
    if emulation.active() is not None:
        return Backend("arithmetic", "normmatters.precision.arithmetic is active")
    reason = why_not_triton(input)
    if not reason:
        from normmatters.kernels.triton import layer_norm

        reason = layer_norm.why_not(input, normalized_shape, norm)
    return Backend("plain", reason) if reason else _TRITON


@functools.lru_cache(1024)
def log_once(message: str) -> None:
    logger.info(message)


def say(what: str, backend: Backend, input: Tensor) -> None:
    if backend.reason and input.is_cuda and not torch.compiler.is_compiling():
        log_once(f"{what} falls back to {backend.name}: {backend.reason}")
