"""What the operators of this package share: the library they stand in, how one is registered, and where kernels run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("normmatters", "FRAGMENT")


def register(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Give the operator ``normmatters::name``, defined in `LIBRARY`, its kernel and its shapes."""
    LIBRARY.impl(name, kernel, "CUDA")
    LIBRARY.impl(name, kernel, "CPU")  # through Triton's interpreter
    torch.library.register_fake(f"normmatters::{name}", fake, lib=LIBRARY)


def needs_operators() -> bool:
    """Whether a compiler or a dispatch mode watches, which must see operators; eager mode goes a shorter way."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels run on the current device; switching to the one that is current already would cost time."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()
