"""The symbolic tensor of a trace, which refuses questions that it would answer for itself and not for the tensor."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from normmatters.surgery.in_place import OPERATORS

TYPE = "its forward asks for the type of a value"


class Untraceable(Exception):
    """The block's forward cannot be recorded as a graph without changing what it does; says why."""


class Value(fx.Proxy):
    """A symbolic tensor that refuses ``isinstance`` and ``hasattr``, and to have an attribute set.

    The answer would be about the proxy, not about the tensor; and what is set on the one, the other never hears of.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        frame = sys._getframe(1)
        while frame.f_back is not None and (_name(frame) == "abc" or frame.f_code is torch.is_tensor.__code__):
            frame = frame.f_back
        if _name(frame).split(".")[0] != "torch":
            raise Untraceable(TYPE)
        return Value

    def __getattr__(self, name: str) -> Any:
        frame = sys._getframe(1)
        called = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")  # hasattr, getattr
        if called and not hasattr(Tensor, name) and _name(frame).split(".")[0] != "torch":
            raise Untraceable(f"its forward asks whether a value has {name!r}")
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise Untraceable(f"its forward sets {name!r} of a value")
        super().__setattr__(name, value)


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _in_place(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


# A Proxy knows no `x += y`: Python would make it `x = x + y`, and other names of x would keep the old value.
for _operator in OPERATORS:
    setattr(Value, f"__{_operator.__name__}__", _in_place(_operator))


class Asked(TorchFunctionMode):
    """Notes whether anything is asked of tensors alone: what they hold, their devices and dtypes may change.

    The module's parameters and buffers are symbolic themselves; tensors are those of a plain attribute (``self.step``),
    of ``self.parameters()``, and new ones.
    """

    anything = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {type(leaf) for leaf in tree_leaves((args, kwargs))}
        if Value not in given and any(issubclass(kind, Tensor) for kind in given):
            self.anything = True
        return func(*args, **(kwargs or {}))


def check_questions(frame: FrameType) -> None:
    """Refuse a function that asks its variables what no object can be made to answer: ``x is None``, ``type(x)``.

    A value that the block computes is a tensor, but one that it is given may well be None. Nor is there a ``with`` in a
    graph, which may change nothing while tracing (autocast that is off already), or a ``try``.
    """
    if _name(frame).split(".")[0] == "torch" and not frame.f_code.co_name.startswith("decorate_"):  # by a context
        return
    if _guarded(frame.f_code):
        raise Untraceable("its forward has a `with` or a `try`, which a graph has not")
    for name, question in _asked(frame.f_code):
        value = frame.f_locals.get(name)
        if type(value) is Value and question == "type":
            raise Untraceable(TYPE)
        if type(value) is Value and value.node.op == "placeholder":
            raise Untraceable(f"its forward asks whether {name!r} is None")


@functools.lru_cache(1024)
def _guarded(code: CodeType) -> bool:
    """Whether a function does something when an error occurs: a ``with`` or a ``try``."""
    return any(step.opname == "PUSH_EXC_INFO" for step in dis.get_instructions(code))


@functools.lru_cache(1024)
def _asked(code: CodeType) -> set[tuple[str, str]]:
    """The variables of a function that it compares to None, and those whose type it asks for."""
    found = set()
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for before, step, *behind in zip([steps[0], *steps], steps, steps[1:], [*steps[2:], steps[-1]]):
        if step.opname in ("LOAD_FAST", "LOAD_DEREF"):
            if behind[0].opname.endswith("_NONE") or (behind[0].argval is None and behind[1].opname == "IS_OP"):
                found.add((step.argval, "None"))
            if before.opname == "LOAD_GLOBAL" and before.argval == "type":
                found.add((step.argval, "type"))
    return found
