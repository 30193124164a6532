"""How an operation with a gradient is registered: as an eager autograd node, and as operators for the compiler.

:class:`Operator` does all of it, for every backend. In eager mode the kernels are called from a
:class:`torch.autograd.Function`, since PyTorch's dispatcher takes longer to reach a Python operator and its autograd
formula than a small layer's kernels run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_type_hints

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

_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    int: "int",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}


def _schema(arguments: dict[str, Any], changes: Sequence[str], results: int) -> str:
    """The schema of an operator with these arguments, some of which it changes in place."""
    types = {name: _TYPES[annotation] for name, annotation in arguments.items()}
    for mark, name in zip("abcdefgh", changes, strict=False):
        types[name] = types[name].replace("Tensor", f"Tensor({mark}!)")
    return f"({', '.join(f'{type} {name}' for name, type in types.items())}) -> ({', '.join(['Tensor'] * results)})"


class Operator:
    """An operation with a gradient, ``torch.ops.normmatters.<name>_forward`` and ``_backward``, and its eager node.

    The operators' arguments follow from the functions' annotations. The kernels run on the device of the first
    argument, a tensor.

    Args:
        name: of the operators.
        options: a NamedTuple; its fields follow the tensors among the forward operator's arguments. With ``links`` it
            has a field ``linked``: whether the operation returns a link after its output (see
            :mod:`normmatters.kernels.triton.batch_norm.operator`).
        forward: ``(*tensors, options) -> (output, ...)``, launches kernels. A result may be None.
        save: ``(ctx, tensors, options, results)``, saves for the backward pass what it needs of them.
        backward: ``(g, ...)``, launches kernels. A result may be None.
        gradients: ``(ctx, backward, g, link)``, the gradient of each tensor, by calling ``backward``, which is the
            function or the operator. ``link`` is the gradient that came through the link, or None.
        fake_forward, fake_backward: the same as ``forward`` and ``backward`` from shapes and dtypes alone. Left out
            where those do nothing but allocate and launch by :class:`~normmatters.kernels.triton.launch.Launches`.
        twice: ``(ctx, g)``, the gradient of each tensor where it is to be differentiated in turn; an error without.
        changes: the options that are changed in place.
        links: whether the operation can return a link.
    """

    def __init__(
        self,
        name: str,
        *,
        options: type[Any],
        forward: Callable[..., tuple[Any, ...]],
        save: Callable[..., None],
        backward: Callable[..., tuple[Any, ...]],
        gradients: Callable[..., tuple[Any, ...]],
        fake_forward: Callable[..., tuple[Any, ...]] | None = None,
        fake_backward: Callable[..., tuple[Any, ...]] | None = None,
        twice: Callable[..., tuple[Any, ...]] | None = None,
        changes: Sequence[str] = (),
        links: bool = False,
    ) -> None:
        *tensor_names, _ = inspect.signature(forward).parameters
        tensors, of_forward, of_backward = len(tensor_names), get_type_hints(forward), get_type_hints(backward)
        arguments = {name: of_forward[name] for name in tensor_names} | get_type_hints(options)
        results = [len(get_args(hints.pop("return"))) for hints in (of_forward, of_backward)]
        LIBRARY.define(f"{name}_forward" + _schema(arguments, changes, results[0] + links))
        LIBRARY.define(f"{name}_backward" + _schema(of_backward, (), results[1]))
        self.links = links
        self.forward_operator = getattr(torch.ops.normmatters, f"{name}_forward")
        backward_operator = getattr(torch.ops.normmatters, f"{name}_backward")

        def flat(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
            def call(*arguments: Any) -> tuple[Any, ...]:
                chosen = options(*arguments[tensors:])
                output, *others = function(*arguments[:tensors], chosen)
                link = [output.new_zeros(1).expand(output.shape) if chosen.linked else None] if links else []
                return output, *link, *others

            return call

        def save_flat(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
            others = results[1 + links :]
            ctx.mark_non_differentiable(*[t for t in others if t.is_floating_point()])  # of integers autograd knows
            save(ctx, inputs[:tensors], options(*inputs[tensors:]), (results[0], *others))

        def flat_gradients(ctx: Any, g: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
            computed = gradients(ctx, backward_operator, g, others[0] if links else None)
            return *computed, *[None] * (len(ctx.needs_input_grad) - 1 - tensors)

        _register(f"{name}_backward", backward, fake_backward or backward)
        kernel = _register(f"{name}_forward", flat(forward), flat(fake_forward or forward))
        changed = [i for i, argument in enumerate(arguments) if argument in changes]
        _register_gradient(f"{name}_forward", kernel, changed, save_flat, flat_gradients)

        def node_forward(ctx: Any, *arguments: Any) -> Any:  # few arguments: PyTorch looks at each, tensor or not
            *given, chosen = arguments
            results = forward(*arguments)
            save(ctx, given, chosen, results)
            output = results[0]
            # A link without the kernel that would set its number, which nobody reads.
            linked = links and chosen.linked
            return (output, output.new_empty_strided(output.shape, (0,) * output.dim())) if linked else output

        @once_differentiable
        def node_backward(ctx: Any, g: Tensor, link: Tensor | None = None) -> Any:
            if g.is_neg() or g._is_zerotensor():
                g = g.clone()
            return *gradients(ctx, backward, g, link), None

        def node_backward_twice(ctx: Any, g: Tensor) -> Any:
            return (*twice(ctx, g), None) if twice and torch.is_grad_enabled() else node_backward(ctx, g)

        methods = {"forward": node_forward, "backward": node_backward_twice if twice else node_backward}
        statics = {method: staticmethod(function) for method, function in methods.items()}
        node: Any = type(name.title().replace("_", ""), (torch.autograd.Function,), statics)  # named for profilers
        # Not `Function.apply`, which looks for transforms by `torch.func`: under those no kernel runs (`plain_only`).
        self._with_grad = super(torch.autograd.Function, node).apply  # type: ignore[misc]
        self._without_grad = lambda *arguments: forward(*arguments)[0]

    def __call__(self, *arguments: Any, needs_grad: bool) -> Any:
        """The output for ``(*tensors, options)``, or the output and its link if the options say so.

        ``needs_grad``: there will be a backward pass.
        """
        *tensors, options = arguments
        if needs_operators():
            results = self.forward_operator(*tensors, *options)
            return results[:2] if self.links and options.linked else results[0]
        try:  # without a call for each: small layers feel it
            tensors = [t if t is None or (t.data_ptr() and not t.is_neg()) else _in_memory(t) for t in tensors]
        except RuntimeError:  # one has left a transform
            tensors = [t if t is None else _in_memory(t) for t in tensors]
        compute = self._with_grad if needs_grad else self._without_grad
        # Not `current_device()`: there is a tensor on the device, so CUDA needs no looking after.
        if not tensors[0].is_cuda or tensors[0].get_device() == torch._C._cuda_getDevice():
            output = compute(*tensors, options)
        else:
            with torch.cuda.device(tensors[0].device):
                output = compute(*tensors, options)
        return output


def _register(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Give the operator ``normmatters::name`` its kernel, which is returned, and its shapes."""

    def kernel(first: Tensor, *others: Any) -> Any:
        with on_device(first.device):
            return _without_none(function(first, *others))

    LIBRARY.impl(name, kernel, "CUDA")
    LIBRARY.impl(name, kernel, "CPU")  # also through Triton's interpreter
    torch.library.register_fake(f"normmatters::{name}", lambda *arguments: _without_none(fake(*arguments)), lib=LIBRARY)
    return kernel


def _register_gradient(
    name: str,
    kernel: Callable[..., Any],
    changed: list[int],
    save: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., tuple[Any, ...]],
) -> None:
    """Give a registered operator its gradient: ``save(ctx, inputs, output)``, then ``backward(ctx, *gradients)``.

    `torch.library.register_autograd` refuses operators that change an argument in place, as a batch norm changes its
    running statistics. PyTorch's own operators of that kind have what is written here: a kernel for autograd, and one
    that counts the change. It is also quicker: a compiled graph calls its operators on plain tensors with nothing to
    differentiate, and then the kernel is called at once, and not by way of the dispatcher.
    """
    operator = getattr(torch.ops.normmatters, name).default

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


def _in_memory(tensor: Tensor) -> Tensor:
    """The tensor with its values where its address says.

    One that has left a transform is unwrapped, as `Function.apply` does. The memory of a negative view has the other
    sign, and zeros that take no memory (of forward-mode differentiation) have no address: PyTorch's own operators get
    copies of them as well.
    """
    tensor = torch._C._functorch.unwrap_if_dead(tensor)
    return tensor.clone() if tensor.is_neg() or not tensor.data_ptr() else tensor


def _without_none(results: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """An operator has a tensor for every result: an empty one where there is none."""
    return tuple([results[0].new_empty(0) if t is None else t for t in results])


def needs_operators() -> bool:
    """Whether a compiler or a dispatch mode watches, which must see operators; eager mode takes a shorter way."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether there will be a backward pass to one of them."""
    return torch.is_grad_enabled() and any_requires_grad(*tensors)


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
