"""Symbolic trace of one block's own forward: its submodules are leaves, and what a trace would bake in is refused.

A trace records tensor operations; it silently loses whatever else ``forward`` does. Each check here finds one such loss
and raises :class:`Untraceable`, so that a rewritten forward is never a different function from the original.
"""

from __future__ import annotations

import functools
import gc
import inspect
import random
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from normmatters.surgery.in_place import changed_attribute
from normmatters.surgery.parts import has_own_call
from normmatters.surgery.value import Asked, Untraceable, Value, check_questions

_ALONE = threading.RLock()  # while it traces, torch.fx and `_recorded_reads` change nn.Module itself
_HOOKS = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}  # and more that no forward writes to

_QUESTIONS: tuple[tuple[Any, str], ...] = (
    *((torch, name) for name in ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled")),
    *((torch, "get_autocast_dtype"), (torch.jit, "is_tracing"), (torch.compiler, "is_compiling")),
    *((torch.distributed, name) for name in ("is_initialized", "get_world_size", "get_rank")),
)


@dataclass(frozen=True)
class Trace:
    """The graph of a block's forward, the settings that it read on the way, and what it calls.

    ``called`` are the modules that the block itself calls; what those call, if traced through, is not among them.
    """

    graph: fx.Graph
    guards: dict[str, Any]
    called: list[nn.Module]


def trace_block(block: nn.Module, training: bool, inline: set[nn.Module]) -> Trace:
    """Record ``block``'s forward in the given mode; modules in ``inline`` are traced through, all others are calls.

    The block is left as it was. Raises :class:`Untraceable`.
    """
    _check_forward(block)
    with (
        _ALONE,
        _mode(block, training),
        _unchanged(block),
        _no_random_numbers(block),
        _no_questions(),
        _recorded_reads(block) as reads,
        Asked() as asked,
    ):
        tracer = _BlockTracer(block, inline)
        try:
            graph = tracer.trace(block)
        except Untraceable:
            raise
        except Exception as error:  # whatever user code raises when it meets a symbolic value
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Untraceable(first_line) from error
    if tracer.values_are_kept():
        raise Untraceable("its forward keeps a value in an object of its own")
    if asked.anything:
        raise Untraceable("its forward asks for what a tensor holds, or for its device or dtype")
    if changed := changed_attribute(block, graph):  # which a norm may read, whose call may move
        raise Untraceable(f"its forward sets {changed} on the module")
    for node in graph.nodes:
        node.type = None  # annotations are not needed to run, and may name what cannot be pickled
    return Trace(graph, reads, tracer.called)


def _check_forward(block: nn.Module) -> None:
    forward = type(block).forward
    if "forward" in vars(block):
        raise Untraceable("its forward was replaced on the instance")
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        raise Untraceable("its forward is decorated or not a plain function")
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        # With a default, `if mask is None` would be decided while tracing.
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.default is not parameter.empty:
            raise Untraceable(f"its forward has the optional argument {parameter.name!r}")


class _BlockTracer(fx.Tracer):
    proxy_buffer_attributes = True  # as parameters are: the trace is to read them whenever it runs

    def __init__(self, block: nn.Module, inline: set[nn.Module]) -> None:
        super().__init__()
        self.forward = type(block).forward.__code__
        self.inline = inline
        self.modes = _modes()
        self.values: list[weakref.ref[fx.Proxy]] = []
        self.called: list[nn.Module] = []
        self.depth = 0

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self.inline

    def create_arg(self, a: Any) -> Any:
        # NumPy's float64 is one too, and would be written into the program by a name that is not known there.
        if issubclass(type(a), float):
            a = float(a)
        elif type(a) is OrderedDict:
            return self.create_node("call_function", OrderedDict, (self.create_arg(list(a.items())),), {})
        elif issubclass(type(a), (dict, list, tuple)) and not hasattr(a, "_fields"):  # named tuples are known to fx
            if type(a).__module__.split(".")[0] not in ("builtins", "torch"):
                raise Untraceable(f"its forward makes a {type(a).__name__}, which would become a plain one")
        return super().create_arg(a)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if has_own_call(m) and not isinstance(m, fx.GraphModule):
            raise Untraceable(f"{type(m).__name__} has a __call__ of its own")
        if self.depth == 0:
            self.called.append(m)
        self.depth += 1
        result = super().call_module(m, forward, args, kwargs)
        self.depth -= 1
        return result

    def proxy(self, node: fx.Node) -> fx.Proxy:
        value = Value(node, self)
        self.values.append(weakref.ref(value))
        return value

    def values_are_kept(self) -> bool:
        """Whether someone holds a symbolic value after the trace."""
        # Unpacking a value, or a function inside forward that calls itself, holds what it uses until it is collected:
        # most likely with the young objects, which takes no time.
        for generation in range(3):
            if all(value() is None for value in self.values):
                return False
            gc.collect(generation)
        return any(value() is not None for value in self.values)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        # `with torch.no_grad():` and the like leave no trace in the graph
        if _modes() != self.modes:
            raise Untraceable("its forward changes the gradient or autocast mode, or checkpoints activations")
        frame: FrameType | None = sys._getframe(1)
        frames = []
        while frame is not None and frame.f_code is not self.forward:
            frames.append(frame)
            frame = frame.f_back
        if frame is not None:  # otherwise it is an argument or the result
            for asking in (*frames, frame):
                check_questions(asking)
        node = super().create_node(*args, **kwargs)
        node.meta["method"] = self._method()
        return node

    def _method(self) -> str | None:
        """The method of the block that is at work, if it is one that others may call too; None is forward itself."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code is not self.forward:
            code = frame.f_code
            if code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is self.root:
                if not code.co_name.startswith("_") and code.co_name != "forward":
                    return code.co_name
            frame = frame.f_back
        return None


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        torch._C._autograd._top_saved_tensors_default_hooks(True),  # set by non-reentrant activation checkpointing
    )


@contextmanager
def _mode(block: nn.Module, training: bool) -> Iterator[None]:
    before = [(module, module.training) for module in block.modules()]
    try:
        for module, _ in before:
            module.training = training
        yield
    finally:
        for module, was in before:
            module.training = was


@contextmanager
def _unchanged(block: nn.Module) -> Iterator[None]:
    """Refuse a forward that stores something on the block, or on a module in it, and take it back."""
    before: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    containers: list[tuple[str, Any, Any]] = []
    seen: set[int] = set()
    tensors: list[tuple[str, Tensor, int, Tensor]] = []
    for path, module in block.named_modules():
        prefix = f"{path}." if path else ""
        before.append((prefix, vars(module), dict(vars(module))))
        for name in vars(module).keys() - _HOOKS:
            containers += _containers(prefix + name, _fields(vars(module)[name]), seen)
        for name, value in {**vars(module), **module._buffers}.items():
            if isinstance(value, Tensor) and not is_lazy(value) and not value.is_inference():
                tensors.append((prefix + name, value, value._version, value.detach().clone()))
    changed: set[str] = set()
    try:
        yield
    finally:
        for prefix, attributes, values in before:
            names = attributes.keys() | values.keys()
            changed |= {prefix + name for name in names if attributes.get(name) is not values.get(name)}
            attributes.clear()
            attributes.update(values)
        for name, container, contents in containers:
            if _identities(_contents(container)) != _identities(contents):
                changed.add(name)
                container.clear()
                container.update(contents) if isinstance(container, (dict, set)) else container.extend(contents)
        for name, tensor, version, value in tensors:
            if tensor._version != version:
                changed.add(name)
                tensor.detach().copy_(value)
    if any(name.startswith("_tensor_constant") for name in changed):  # where torch.fx puts what it cannot name
        raise Untraceable("its forward makes a tensor that does not come from its input")
    if changed:
        raise Untraceable(f"its forward sets {', '.join(sorted(changed))} on the module")


def _fields(value: Any) -> Any:
    """The attributes of an object that is none of PyTorch's or Python's (a meter, a config); any other value itself."""
    home = type(value).__module__.split(".")[0]
    fields = getattr(value, "__dict__", None)
    return fields if home not in ("torch", "builtins") and isinstance(fields, dict) else value


def _containers(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """The container and all those in it that were not ``seen`` before, each with its contents."""
    if not isinstance(value, (list, dict, set, tuple, deque)) or id(value) in seen:
        return
    seen.add(id(value))
    if not isinstance(value, tuple):
        yield name, value, _contents(value)
    for item in value.values() if isinstance(value, dict) else value:
        yield from _containers(name, item, seen)


def _contents(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _identities(contents: Any) -> list[Any]:
    if isinstance(contents, dict):
        return [(key, id(value)) for key, value in contents.items()]
    return [id(value) for value in contents]


@contextmanager
def _no_random_numbers(block: nn.Module) -> Iterator[None]:
    """Refuse a forward that draws random numbers outside the graph (stochastic depth by a Python `if`)."""
    sources: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (random.getstate, random.setstate),
        (torch.get_rng_state, torch.set_rng_state),
        *(source for module in block.modules() for value in vars(module).values() for source in _drawn_from(value)),
    ]
    if torch.cuda.is_initialized():
        sources.append((torch.cuda.get_rng_state, torch.cuda.set_rng_state))
    if "numpy" in sys.modules:
        sources.append((sys.modules["numpy"].random.get_state, sys.modules["numpy"].random.set_state))
    before = [get() for get, _ in sources]
    drawn = False
    try:
        yield
    finally:
        for (get, set_), state in zip(sources, before):
            if not _same(get(), state):
                drawn = True
                set_(state)
    if drawn:
        raise Untraceable("its forward draws random numbers outside the graph")


def _drawn_from(value: Any) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to get and set the state of a generator of random numbers (Python, PyTorch, NumPy); nothing for others."""
    kind = type(value).__name__
    if type(value) is random.Random:  # SystemRandom has no state
        yield value.getstate, value.setstate
    elif isinstance(value, torch.Generator) or kind == "RandomState":
        yield value.get_state, value.set_state
    elif kind == "Generator" and hasattr(value, "bit_generator"):
        bits = value.bit_generator
        yield lambda: bits.state, lambda state: setattr(bits, "state", state)


@contextmanager
def _no_questions() -> Iterator[None]:
    """Refuse a forward that asks for what it runs in, a mode or a process group: one answer would hold for all."""
    thread = threading.get_ident()
    questions = [(home, name, getattr(home, name)) for home, name in _QUESTIONS if hasattr(home, name)]

    def asked(home: Any, name: str, answer: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        asker = str(sys._getframe(1).f_globals.get("__name__"))
        if threading.get_ident() == thread and asker.split(".")[0] != "torch" and asker != __name__:
            raise Untraceable(f"its forward asks {home.__name__}.{name}()")
        return answer(*arguments, **named)

    try:
        for question in questions:
            setattr(*question[:2], functools.partial(asked, *question))
        yield
    finally:
        for question in questions:
            setattr(*question)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return _same(tuple(a.values()), tuple(b.values()))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a.tolist() == b.tolist() if hasattr(a, "tolist") else a == b)


_PLAIN = (
    *(bool, int, float, str, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.memory_format),
)


def setting(value: Any) -> Any:
    """A plain value or a function as it is, a tuple or frozenset of such for what holds them, ``...`` for others."""
    if value is None or type(value) in _PLAIN or isinstance(value, Enum):
        return value
    if isinstance(value, functools.partial):
        value = (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        value = value.items()
    elif isinstance(value, (set, frozenset)):
        return frozenset([setting(item) for item in value])
    elif not isinstance(value, (tuple, list)):
        return ...
    return tuple([setting(item) for item in value])


@contextmanager
def _recorded_reads(block: nn.Module) -> Iterator[dict[str, Any]]:
    """Collect the settings that forward reads, by their paths: branches on them are decided while tracing.

    They are the block's own attributes and those of its modules, be they None or not there at all, and which modules
    a container holds. What it computes from them is of no matter.
    """
    prefixes = {id(module): f"{path}." if path else "" for path, module in block.named_modules()}
    not_set = {*vars(nn.Module), *vars(nn.Module())} - {"training", "_modules"}
    reads: dict[str, Any] = {}
    missed: dict[str, tuple[nn.Module, str]] = {}
    thread = threading.get_ident()

    def __getattribute__(self: nn.Module, name: str) -> Any:
        path = prefixes.get(id(self), "") + name
        asked = id(self) in prefixes and name not in not_set and path != "training" and threading.get_ident() == thread
        try:
            value = super(nn.Module, self).__getattribute__(name)
        except AttributeError:  # registered, and found by __getattr__, but perhaps as None; or not there
            if asked:
                missed[path] = self, name
            raise
        if asked and setting(value) is not ... and inspect.getattr_static(self, name, ...) is value:
            if name != "_modules" or not _fx_asks(sys._getframe(1)):
                reads[path] = setting(value)
        return value

    # On the class of all, as torch.fx has it for the time of a trace: forward may ask a module for its own class.
    nn.Module.__getattribute__ = __getattribute__  # type: ignore[method-assign, assignment]
    try:
        yield reads
    finally:
        del nn.Module.__getattribute__
    reads |= {path: None for path, (owner, name) in missed.items() if getattr(owner, name, None) is None}


def _fx_asks(frame: FrameType | None) -> bool:
    """Whether torch.fx looks through the modules, be it by way of ``named_modules``."""
    while frame is not None and frame.f_globals.get("__name__") == nn.Module.__module__:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.fx.")
