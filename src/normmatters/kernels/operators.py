"""What the operators of this package share: the library they stand in, how one is registered, and where kernels run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normmatters.kernels.double_backward import once_differentiable

LIBRARY = torch.library.Library("normmatters", "FRAGMENT")


def _keys(backend: str) -> tuple[int, int]:
    """What the dispatcher finds on plain tensors where nobody watches: with a key for mutation, and without."""
    found = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in (backend, f"Autograd{backend}")]
    plain = found[0] | found[1]
    return plain.raw_repr(), (plain | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)).raw_repr()


_PLAIN = frozenset((*_keys("CPU"), *_keys("CUDA")))


_kernels: dict[str, Callable[..., Any]] = {}


def register(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Give the operator ``normmatters::name``, defined in `LIBRARY`, its kernel and its shapes.

    The kernel runs on the device of the operator's first argument, a tensor.
    """

    def there(first: Tensor, *others: Any) -> Any:
        with on_device(first.device):
            return kernel(first, *others)

    _kernels[name] = there
    LIBRARY.impl(name, there, "CUDA")
    LIBRARY.impl(name, there, "CPU")  # through Triton's interpreter
    torch.library.register_fake(f"normmatters::{name}", fake, lib=LIBRARY)


def register_gradient(
    name: str,
    save: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., tuple[Any, ...]],
) -> None:
    """Give a registered operator its gradient: ``save(ctx, inputs, output)``, then ``backward(ctx, *gradients)``.

    `torch.library.register_autograd` refuses operators that change an argument in place, as a batch norm changes its
    running statistics. PyTorch's own operators of that kind have what is written here: a kernel for autograd, and one
    that counts the change. It is also quicker: a compiled graph calls its operators on plain tensors with nothing to
    differentiate, and then the kernel is called at once, and not by way of the dispatcher.
    """
    kernel, operator = _kernels[name], getattr(torch.ops.normmatters, name).default
    aliases = [argument.alias_info for argument in operator._schema.arguments]
    changed = [i for i, alias in enumerate(aliases) if alias is not None and alias.is_write]

    def count_changes(inputs: tuple[Any, ...]) -> None:
        torch.autograd.graph.increment_version([inputs[i] for i in changed if inputs[i] is not None])

    def below_autograd(keys: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            *inputs, keys = arguments
            output = below_autograd(keys, *inputs)
            save(ctx, tuple(inputs), output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            return *backward(ctx, *gradients), None

    def autograd(keys: Any, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return Node.apply(*inputs, keys)
        if keys.raw_repr() not in _PLAIN:
            return below_autograd(keys, *inputs)
        if changed:
            count_changes(inputs)
        return kernel(*inputs)

    def change(keys: Any, *inputs: Any) -> Any:
        count_changes(inputs)
        return operator.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *inputs)

    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    if changed:
        LIBRARY.impl(name, change, "ADInplaceOrView", with_keyset=True)


def needs_operators() -> bool:
    """Whether a compiler or a dispatch mode watches, which must see operators; eager mode goes a shorter way."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def any_requires_grad(*tensors: Tensor | None) -> bool:
    """Whether one of them requires a gradient (a loop: `any` of a generator takes twice as long)."""
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def in_dtype(gradient: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """``gradient`` in this dtype, None for none (``to`` takes its time even where there is nothing to do)."""
    if dtype is None or gradient.dtype is dtype:
        return None if dtype is None else gradient
    return gradient.to(dtype)


_HERE = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels run on the current device; switching to the one that is current already would cost time."""
    # Not `current_device()`: there is a tensor on the device, so CUDA needs no looking after.
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        return torch.cuda.device(device)
    return _HERE
