"""How an operation with a gradient is registered: as an eager autograd node, and as operators for the compiler.

:class:`Operator` does all of it. In eager mode the kernels are called from a :class:`torch.autograd.Function`, since
PyTorch's dispatcher takes longer to reach a Python operator and its autograd formula than a small layer's kernels run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol

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


class Options(Protocol):
    """What an operation is called with beside its differentiable tensors."""

    @property
    def save(self) -> bool:
        """Whether there will be a backward pass."""

    @property
    def linked(self) -> bool:
        """Whether a link is returned with the output (see :mod:`normmatters.kernels.triton.batch_norm.operator`)."""

    def flat(self) -> tuple[Any, ...]:
        """As arguments of an operator: tensors, numbers and strings."""

    @classmethod
    def from_arguments(cls, *arguments: Any) -> Options:
        """From the forward operator's arguments: the tensors, then what :meth:`flat` gives."""


class Operator:
    """An operation with a gradient, ``torch.ops.normmatters.<name>_forward`` and ``_backward``, and its eager node.

    Args:
        name: of the operators.
        forward_schema, backward_schema: the operators' arguments and results. The forward operator takes the tensors,
            then the flat options. It returns the output, then a link if ``links``, then what else ``forward`` returns.
        options: the class of the options.
        forward: ``(*tensors, options) -> (output, ...)``, launches kernels. A result may be None.
        fake_forward: the same from shapes and dtypes alone.
        save: ``(ctx, tensors, options, results)``, saves for the backward pass what it needs of them.
        backward: ``(g, ...)``, launches kernels; takes the backward operator's arguments. A result may be None.
        fake_backward: the same from shapes and dtypes alone.
        gradients: ``(ctx, backward, g, link)``, the gradient of each tensor, by calling ``backward``, which is the
            function or the operator. ``link`` is the gradient that came through the link, or None.
        links: whether the operation can return a link.
    """

    def __init__(
        self,
        name: str,
        *,
        forward_schema: str,
        backward_schema: str,
        options: type[Any],
        forward: Callable[..., tuple[Any, ...]],
        fake_forward: Callable[..., tuple[Any, ...]],
        save: Callable[..., None],
        backward: Callable[..., tuple[Any, ...]],
        fake_backward: Callable[..., tuple[Any, ...]],
        gradients: Callable[..., tuple[Any, ...]],
        links: bool = False,
    ) -> None:
        LIBRARY.define(f"{name}_forward{forward_schema}")
        LIBRARY.define(f"{name}_backward{backward_schema}")
        self.forward_operator = getattr(torch.ops.normmatters, f"{name}_forward")
        self.backward_operator = getattr(torch.ops.normmatters, f"{name}_backward")
        tensors = len(inspect.signature(forward).parameters) - 1

        def unpacked(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Tensor, ...]]:
            def call(*arguments: Any) -> tuple[Tensor, ...]:
                chosen = options.from_arguments(*arguments)
                output, *others = function(*arguments[:tensors], chosen)
                link = [_link(output) if chosen.linked else None] if links else []
                return _without_none((output, *link, *others))

            return call

        register(f"{name}_forward", unpacked(forward), unpacked(fake_forward))
        register(
            f"{name}_backward",
            lambda *arguments: _without_none(backward(*arguments)),
            lambda *arguments: _without_none(fake_backward(*arguments)),
        )

        def save_operator(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
            others = results[2:] if links else results[1:]
            ctx.mark_non_differentiable(*[t for t in others if t.is_floating_point()])  # of integers autograd knows
            save(ctx, inputs[:tensors], options.from_arguments(*inputs), (results[0], *others))

        def operator_gradients(ctx: Any, g: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
            link = others[0] if links else None
            computed = gradients(ctx, self.backward_operator, g, link)
            return *computed, *[None] * (len(ctx.needs_input_grad) - 1 - tensors)

        register_gradient(f"{name}_forward", save_operator, operator_gradients)

        def node_forward(ctx: Any, *arguments: Any) -> Any:  # few arguments: PyTorch looks at each, tensor or not
            *given, chosen = arguments
            results = forward(*arguments)
            if chosen.save:
                save(ctx, given, chosen, results)
            output = results[0]
            return (output, _eager_link(output)) if chosen.linked else output

        @once_differentiable
        def node_backward(ctx: Any, g: Tensor, link: Tensor | None = None) -> Any:
            return *gradients(ctx, backward, g, link), None

        methods = {"forward": staticmethod(node_forward), "backward": staticmethod(node_backward)}
        node: Any = type(name.title().replace("_", ""), (torch.autograd.Function,), methods)  # named for profilers
        self._apply = node.apply

    def __call__(self, *arguments: Any) -> Any:
        """The output for ``(*tensors, options)``, or the output and its link if the options say so."""
        if not needs_operators():
            if is_on_current_device(arguments[0]):
                return self._apply(*arguments)
            with on_device(arguments[0].device):
                return self._apply(*arguments)
        *tensors, options = arguments
        output, *others = self.forward_operator(*tensors, *options.flat())
        return (output, others[0]) if options.linked else output


def _without_none(results: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """An operator has a tensor for every result: an empty one where there is none."""
    return tuple([results[0].new_empty(0) if t is None else t for t in results])


def _link(output: Tensor) -> Tensor:
    return output.new_zeros(1).expand(output.shape)


def _eager_link(output: Tensor) -> Tensor:
    """A link without the kernel that would set its number, which nobody reads."""
    return output.new_empty_strided(output.shape, (0,) * output.dim())


def needs_operators() -> bool:
    """Whether a compiler or a dispatch mode watches, which must see operators; eager mode takes a shorter way."""
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


def is_on_current_device(tensor: Tensor) -> bool:
    """Whether kernels run where ``tensor`` is: on the current device, or through Triton's interpreter on the CPU."""
    # Not `current_device()`: there is a tensor on the device, so CUDA needs no looking after.
    return not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels run on the current device; switching to the one that is current already would cost time."""
    # Not `current_device()`: there is a tensor on the device, so CUDA needs no looking after.
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        return torch.cuda.device(device)
    return _HERE
