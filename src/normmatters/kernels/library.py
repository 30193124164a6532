"""What the operators of this package share: the library they stand in, how one is registered, and where kernels run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("normmatters", "FRAGMENT")


def register(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Give the operator ``normmatters::name``, defined in `LIBRARY`, its kernel and its shapes."""
    LIBRARY.impl(name, kernel, "CUDA")
    LIBRARY.impl(name, kernel, "CPU")  # through Triton's interpreter
    torch.library.register_fake(f"normmatters::{name}", fake, lib=LIBRARY)


def needs_operators() -> bool:
    """Whether a compiler or a dispatch mode watches, which must see operators; eager mode goes a shorter way."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def any_requires_grad(*tensors: Tensor | None) -> bool:
    """Whether one of them requires a gradient (a loop: `any` of a generator takes twice as long)."""
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def as_gradient_of(parameter: Tensor | None, gradient: Tensor) -> Tensor | None:
    """``gradient`` in the parameter's dtype (``to`` takes its time even where there is nothing to do)."""
    if parameter is None or gradient.dtype is parameter.dtype:
        return None if parameter is None else gradient
    return gradient.to(parameter.dtype)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's, which costs some microseconds, only where gradients are recorded: ``create_graph=True``."""
    recorded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def either(ctx: Any, *gradients: Tensor | None) -> Any:
        return (recorded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return either


_HERE = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels run on the current device; switching to the one that is current already would cost time."""
    # Not `current_device()`: there is a tensor on the device, so CUDA needs no looking after.
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        return torch.cuda.device(device)
    return _HERE
