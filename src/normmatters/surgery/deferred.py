"""What a rewritten ``forward`` calls: norms that wait for what follows them, and run together with it where they can.

A converted norm stays a norm and a ReLU stays a ReLU. :mod:`normmatters.surgery.rewrite` sends the calls of a
``forward`` through a :class:`Fusion`. A call of one of our norms then gives a :class:`Deferred`. A ReLU, an add or a
max pool that gets it decides what to do by what it is handed *now*; everything else gets the norm's output.

Why the result is that of the code as written:

- A deferred norm has one holder. The rewriter lets a variable hand it on only where nobody reads the variable again;
  every other read runs the norm and gives its output.
- It waits only while nothing runs that could change or see what it depends on. Convolutions, norms and their like are
  known to read their input and to write nothing else. Before any other call, all that is pending runs, in order.
- Modules with hooks, with a ``forward`` of their own or with a compiled call are called as they are. So is all that
  follows a norm where a subclass of ``Tensor`` or a mode may give PyTorch's functions another meaning.
- Where a ``forward`` raises, the norms that it has called run before the error goes on.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.modules.utils import _pair
from torch.overrides import _get_current_function_mode_stack, has_torch_function_unary
from torch.utils._device import DeviceContext

from normmatters.nn import twin
from normmatters.nn.batchnorm import LpBatchNorm2d
from normmatters.nn.batchnorm_base import LpBatchNorm

RELUS = (F.relu, torch.relu, F.relu_, torch.relu_)
_SCALARS = {bool, int, float, str, type(None)}
# Modules that read their input and write nothing but their own buffers, each with the forward that is known to do so.
# Exactly these classes: a subclass may do more. A ReLU may also write to its input.
_KNOWN = {
    kind: kind.forward
    for kind in (
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear),
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.Identity, nn.Flatten, nn.ReLU),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d),
    )
}
_GETATTRIBUTE, _GETATTR = object.__getattribute__, nn.Module.__getattr__


class Deferred:
    """A norm that was called and waits: for its residual, its ReLU and its max pool.

    ``in_place``: the add is written as one into the norm's output. ``value`` is the output, once it is computed.
    """

    __slots__ = ("in_place", "input", "norm", "pooled", "relu", "residual", "value")

    def __init__(self, norm: Any, input: Tensor) -> None:
        self.norm = norm
        self.input: Any = input
        self.residual: Any = None  # a tensor, or another deferred norm
        self.in_place = False
        self.relu = False
        self.pooled = False
        self.value: Any = None


class _Through(torch.autograd.Function):
    """The values of one tensor with the history of another."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, link: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, g


class Fusion:
    """The deferred norms of one call of a rewritten ``forward``.

    A block in a Sequential may be handed its ``input`` with the ``link`` of the norm that made it. Its second use of
    that input sends its gradient through the link, so that it is added inside that norm's backward pass (see
    :meth:`~normmatters.nn.batchnorm_base.LpBatchNorm.forward_linked`). With ``linked`` it gives its own output a link.
    """

    __slots__ = ("input", "link", "linked", "output", "output_link", "pending", "uses")

    def __init__(self, input: Tensor | None = None, link: Tensor | None = None, linked: bool = False) -> None:
        self.pending: list[Deferred] = []
        self.input, self.link, self.linked = input, link, linked
        self.uses = 0
        self.output: Any = None  # the last fused output, and its link
        self.output_link: Tensor | None = None

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """What a rewritten function returns. If it raises, the norms that it has called run all the same."""
        try:
            return function(self, *args, **kwargs)
        except Exception:
            self.flush()
            raise

    def call(self, f: Any, x: Any, /, *args: Any, **kwargs: Any) -> Any:
        """``f(x, *args, **kwargs)``; where ``x`` waits, nobody else holds it."""
        waits = type(x) is Deferred
        if waits and x.value is not None:
            x, waits = x.value, False
        kind = type(f)
        if waits and not isinstance(f, nn.Module):
            if is_relu_function(f) and not args and (not kwargs or list(kwargs) == ["inplace"]) and not x.relu:
                x.relu = True
                return x
        elif not args and not kwargs and (waits or isinstance(x, Tensor)):
            if kind in _KNOWN:
                if kind.forward is _KNOWN[kind] and ((not self.pending and self.link is None) or is_plain(f)):
                    if waits and self._takes_over(x, kind, f):
                        return x
                    if kind is not nn.ReLU or not f.inplace:
                        x = self.force(x) if waits else x
                        return f(x if self.link is None else self._through_link(x))
            elif isinstance(f, LpBatchNorm):
                if f.act is None and kind.forward is LpBatchNorm.forward and is_plain(f):
                    return self._defer(f, self.force(x) if waits else x)
            elif isinstance(f, nn.Sequential):
                if kind.forward is nn.Sequential.forward and is_iterated_plainly(f) and is_plain(f):
                    return self.sequence(f, x)
        if waits:
            x = self.force(x)
        self.flush()
        return f(x, *args, **kwargs)

    def _takes_over(self, x: Deferred, kind: type, f: Any) -> bool:
        """Whether what the known module ``f`` does to ``x`` is done with the norm, or is nothing."""
        if kind is nn.ReLU:
            taken, x.relu = not x.relu, True
            return taken
        if kind is nn.MaxPool2d and _takes_pool(x, f):
            x.pooled = True
            return True
        return kind is nn.Identity

    def now(self, f: Any) -> Any:
        """``f`` itself, about to be called: whatever is pending runs before."""
        self.flush()
        return f

    def attr(self, owner: Any, name: str) -> Any:
        """``owner.name``. What is neither a module nor a plain setting may depend on a pending norm: that runs."""
        if isinstance(owner, nn.Module):
            cls = type(owner)
            # As Python and nn.Module look it up, but at once: that takes nn.Module several times as long.
            if _has_usual_lookup(cls) and not hasattr(cls, name):
                attributes = owner.__dict__
                if name in attributes:
                    if type(attributes[name]) in _SCALARS:
                        return attributes[name]
                elif name in attributes["_modules"]:
                    return attributes["_modules"][name]
        if self.pending:
            self.flush()
        return getattr(owner, name)

    def method(self, owner: Any, name: str) -> Any:
        """``owner.name``, a method about to be called; its rewritten form if it still is the one that was rewritten."""
        self.flush()
        cls: Any = type(owner)
        methods = getattr(cls, "fusion_methods", {})
        if name in methods and name not in owner.__dict__:
            original, rewritten = methods[name]
            if getattr(cls, name) is original:
                return functools.partial(Fusion().run, rewritten, owner)
        return getattr(owner, name)

    def relu(self, x: Any, name: str) -> Any:
        """``x.relu()`` or ``x.relu_()``, by its name."""
        if type(x) is Deferred and x.value is None and not x.relu:
            x.relu = True
            return x
        x = self.force(x)
        self.flush()
        return getattr(x, name)()

    def add(self, x: Any, y: Any, name: str = "+") -> Any:
        """``x + y``, ``x += y``, ``x.add(y)`` or ``x.add_(y)``, by its name."""
        in_place = name in ("+=", "add_")
        if type(x) is Deferred and _takes_residual(x):
            waits = type(y) is Deferred and _takes_residual(y)
            if not waits:
                y = self.force(y)
            if _alike(x.input, y.input if waits else y):
                if waits:
                    self.pending.remove(y)
                x.residual, x.in_place = y, in_place
                return x
        elif type(y) is Deferred and not in_place and _takes_residual(y):
            value = self.force(x)
            if _alike(y.input, value):
                y.residual = value
                return y
        x, y = self.force(x), self.force(y)
        if self.pending or name != "+":
            self.flush()
        if name == "+":
            return x + y
        return operator.iadd(x, y) if name == "+=" else getattr(x, name)(y)

    def force(self, x: Any) -> Any:
        """``x``, or the output of the norm that it stands for."""
        if type(x) is not Deferred:
            return x
        if x.value is None:
            self.pending.remove(x)
            self._run(x)
        return x.value

    def flush(self) -> None:
        """Run all that is pending. What comes next may write to any tensor, so links are not used any more."""
        self.link = self.output_link = None
        while self.pending:
            self.force(self.pending[0])

    def done(self, value: Any) -> Any:
        """What ``forward`` returns."""
        value = self.force(value)
        if self.pending:
            self.flush()
        return value

    def sequence(self, modules: nn.Sequential, x: Any) -> Any:
        """What ``nn.Sequential`` does; fused blocks hand their output on with its link."""
        blocks: list[Any] = list(modules._modules.values())
        link = None
        for block, following in zip(blocks, [*blocks[1:], None]):
            fused = _links(block)
            # Asked of None, torch 2.11's compiler would give up the graph.
            wanted = fused and following is not None and hasattr(type(following), "fusion_takes_link")
            if link is not None or wanted:
                x = self.force(x)
                x = x if self.link is None else self._through_link(x)
                self.flush()
                x, link = run_linked(block, x, link, wanted) if fused else (block(x), None)
            else:
                x = self.call(block, x)
        return x

    def _defer(self, norm: LpBatchNorm, input: Tensor) -> Any:
        if has_torch_function_unary(input) and _means_something_else(input):
            self.flush()
            return norm(input)
        for other in self.pending:
            while isinstance(other, Deferred):
                if other.norm is norm or other.norm.running_mean is norm.running_mean is not None:
                    self.flush()  # its statistics move first
                    break
                other = other.residual
        deferred = Deferred(norm, input if self.link is None else self._through_link(input))
        self.pending.append(deferred)
        return deferred

    def _through_link(self, x: Tensor) -> Tensor:
        if x is self.input:
            self.uses += 1
            if self.uses == 2:
                return _Through.apply(x.detach(), self.link)  # type: ignore[no-any-return]
        return x

    def _run(self, d: Deferred) -> None:
        norm, input, residual = d.norm, d.input, d.residual
        link = None
        if not d.relu:
            value = norm(input)
            if residual is not None:
                residual = self._output(residual)
                value = operator.iadd(value, residual) if d.in_place else value + residual
        elif residual is None:
            value, link = norm.forward_linked(input, linked=False, relu=True, pooled=d.pooled)
        elif type(residual) is Deferred and twin.twin_fits(norm, input, residual.norm, residual.input):
            value, link = twin.twin_batch_norm(norm, input, residual.norm, residual.input, linked=self.linked)
            residual.value = residual.input = False  # it has no output of its own
        else:
            residual = self._output(residual)
            came_with = self.link if residual is self.input else None
            value, link = norm.forward_linked(input, residual, came_with, self.linked, relu=True)
        d.value, self.output, self.output_link = value, value, link
        d.input = d.residual = None

    def _output(self, x: Any) -> Any:
        """The residual, which is not in the list of what is pending."""
        if type(x) is Deferred and x.value is None:
            self._run(x)
        return x.value if type(x) is Deferred else x


def run_linked(block: Any, x: Tensor, link: Tensor | None, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """The output of a fused block and, if ``wanted`` and there is one, its link; ``link`` came with ``x``."""
    fusion = Fusion(x, link, wanted)
    value = fusion.run(block.fusion_forward, block, x)
    return value, fusion.output_link if fusion.output is value else None


def _links(block: Any) -> bool:
    """Whether the block has a rewritten forward that may be run in place of a call, in training."""
    cls = type(block)
    return (
        hasattr(cls, "fusion_takes_link")
        and block.training
        and cls.own_class.forward is cls.fusion_original
        and is_plain(block)
    )


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module is its class's forward, and unobserved."""
    own = module.__dict__  # read here at once: this is asked for each module of a call
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or module._compiled_call_impl is not None
        or type(module).__call__ is not nn.Module.__call__
        or _has_any_global_hook()
    )


def _has_usual_lookup(cls: type[nn.Module]) -> bool:
    """Whether attributes of the class's modules are found as those of any module."""
    return cls.__getattribute__ is _GETATTRIBUTE and cls.__getattr__ is _GETATTR


# To the compiler of torch 2.11, a method of `object` is never the same one.
_has_usual_lookup._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_relu_function(f: Any) -> bool:
    """Whether it is one of PyTorch's functions for a ReLU."""
    for relu in RELUS:  # noqa: SIM110 (`any` of a generator takes three times as long)
        if f is relu:
            return True
    return False


def _means_something_else(x: Tensor) -> bool:
    """Whether a subclass, or a mode other than a default device, may give PyTorch's functions another meaning."""
    if type(x) is not Tensor and type(x).__torch_function__ is not torch._C._disabled_torch_function_impl:
        return True
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def is_iterated_plainly(modules: nn.Sequential) -> bool:
    """Whether a loop over the Sequential gives its modules."""
    return type(modules).__iter__ is nn.Sequential.__iter__


def is_pool(pool: nn.MaxPool2d) -> bool:
    """Whether it is the one max pool that a norm can take over: 3×3 windows, stride 2, padding 1."""
    return not (pool.return_indices or pool.ceil_mode) and (
        _pair(pool.kernel_size) == (3, 3)
        and _pair(pool.stride) == (2, 2)
        and _pair(pool.padding) == _pair(pool.dilation) == (1, 1)
    )


def _takes_residual(d: Deferred) -> bool:
    return d.value is None and d.residual is None and not d.relu


def _takes_pool(d: Deferred, pool: nn.MaxPool2d) -> bool:
    norm = d.norm
    fits = d.relu and not d.pooled and d.residual is None and isinstance(norm, LpBatchNorm2d) and norm.p == 1
    return fits and is_pool(pool)


def _alike(input: Tensor, residual: Any) -> bool:
    # An add may broadcast or promote where the fused operation must not.
    return (
        isinstance(residual, Tensor)
        and residual.shape == input.shape
        and residual.dtype is input.dtype
        and not (has_torch_function_unary(residual) and _means_something_else(residual))
    )
