"""What fusion leaves in a model: placeholders for ReLUs that a norm took over, and blocks with a rewritten forward.

A rewritten block stays an instance of its class. Its class becomes a subclass with another ``forward`` (as
``torch.nn.utils.parametrize`` does), not a ``torch.fx.GraphModule``: so ``isinstance``, attributes, methods, hooks and
state_dict keys stay, submodules are looked up by attribute on every call, and undoing the fusion is assigning the class
back. The subclass is made at run time, so copying and pickling go by its source (:class:`Program`).
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx, nn


class FusedReLU(nn.Identity):
    """Stands where an ``nn.ReLU`` was before the norm in front of it took it over; does nothing.

    ``inplace`` is kept for the way back.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace


@dataclass(frozen=True)
class Program:
    """The source of a rewritten ``forward``, one for each mode of the block, with what is needed to run it.

    ``guards`` are the plain attributes of the block (flags, sizes, absent submodules) that the trace read and their
    values then: with others the original ``forward`` could have taken another way. ``norms`` are the paths of the norms
    that took over a ReLU.
    """

    train: str
    evaluate: str
    guards: tuple[tuple[str, Any], ...]
    norms: tuple[str, ...]
    modules: tuple[tuple[str, str], ...]  # Python modules cannot be pickled: kept by name
    objects: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, train: fx.Graph, evaluate: fx.Graph, guards: dict[str, Any], norms: list[str]) -> Program:
        """The program of two traced graphs of the same block."""
        codes = [graph.python_code(root_module="self") for graph in (train, evaluate)]
        names = {name: value for code in codes for name, value in code.globals.items()}
        used = sorted({name for code in codes for name in _compile(code.src, names).__code__.co_names} & set(names))
        return cls(
            codes[0].src,
            codes[1].src,
            tuple(sorted(guards.items())),
            tuple(sorted(norms)),
            tuple((name, names[name].__name__) for name in used if isinstance(names[name], ModuleType)),
            tuple((name, names[name]) for name in used if not isinstance(names[name], ModuleType)),
        )

    def functions(self) -> tuple[Any, Any]:
        """The two forward functions, for training and for evaluation."""
        names = {name: importlib.import_module(path) for name, path in self.modules} | dict(self.objects)
        train = _compile(self.train, names)
        return train, (train if self.train == self.evaluate else _compile(self.evaluate, names))


def _compile(source: str, names: dict[str, Any]) -> Any:
    scope = dict(names)
    exec(compile(source, "<normmatters.convert>", "exec"), scope)
    return scope["forward"]


class FusedBlock:
    """Mixin of every block whose ``forward`` was rewritten."""

    program: ClassVar[Program]
    unfused_class: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = cast(tuple[Any, ...], object.__reduce_ex__(self, protocol))
        return (new_block, (self.unfused_class, self.program), *state)


def new_block(base: Any, program: Program) -> Any:
    """An empty instance of the fused class; copying and unpickling fill in its state."""
    cls: Any = fused_class(base, program)
    return cls.__new__(cls)


@functools.cache
def fused_class(base: Any, program: Program) -> type[nn.Module]:
    """The subclass of ``base`` that runs ``program``. Blocks with the same program share it."""
    train, evaluate = program.functions()

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name, traced in program.guards:
            now = getattr(self, name)
            if now is not traced and now != traced:
                raise RuntimeError(
                    f"{base.__name__}.{name} is {now!r}, but was {traced!r} when normmatters.convert fused this block: "
                    "set it before converting, or convert with fuse=False"
                )
        return train(self, *args, **kwargs) if self.training else evaluate(self, *args, **kwargs)

    body = {
        "forward": forward,
        "program": program,
        "unfused_class": base,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
    }
    return type(f"Fused{base.__name__}", (FusedBlock, base), body)


def norm_add_relu(norm: Any, input: Tensor, residual: Tensor) -> Tensor:
    """relu(norm(input) + residual), in one operation where nothing is broadcast or promoted.

    The shapes are not known when a block is traced, and an add may broadcast where the fused operation must not.
    ``norm`` has ``act="relu"``.
    """
    if residual.shape == input.shape and residual.dtype == input.dtype:
        return norm(input, residual)  # type: ignore[no-any-return]
    act, norm.act = norm.act, None
    try:
        output = norm(input)
    finally:
        norm.act = act
    return torch.relu(output + residual)
