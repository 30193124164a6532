"""What a forward that cannot be traced may use: by the names that its code looks up."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from normmatters.nn.replace import held_beside

_ROWS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def mentioned(block: nn.Module) -> set[nn.Module]:
    """The modules in ``block`` that its forward, or a method which that one names, may use one by one.

    ``self.encoder.bn`` names one module; on another variable (``encoder.bn``) all modules at such a path are meant.
    Who looks into a Sequential, and does not call it, may call what is in it; so may who has modules in a list or dict.
    """
    modules = {f".{path}": module for path, module in block.named_modules(remove_duplicate=False)}
    found = {module for attributes, _, module in held_beside(block) if attributes is vars(block)}
    for code in _codes(block):
        for start, names, called in _lookups(code):
            path = "." + ".".join(names)
            own = start == code.co_varnames[:1]
            meant = [module for at, module in modules.items() if at == path or (not own and at.endswith(path))]
            looks_into = not (called and meant)
            while path and not meant:  # a weight of it, or its children()
                path = path.rpartition(".")[0]
                meant = [modules[path]] if path in modules else []
            found.update(meant)
            if looks_into:
                found.update(child for row in meant if isinstance(row, _ROWS) for child in row.children())
    return found


def _codes(block: nn.Module) -> Iterator[CodeType]:
    """The code of ``forward``, and of all methods of the user's classes that it, or one of these, names."""
    names, seen = ["forward"], {"forward"}
    while names:
        name = names.pop()
        for attributes in (vars(block), *map(vars, type(block).__mro__)):
            function: Any = attributes.get(name)
            if callable(function) or isinstance(function, (staticmethod, classmethod)):
                function = inspect.unwrap(function)  # type: ignore[arg-type]
            function = getattr(function, "__func__", function)
            if isinstance(function, FunctionType) and str(function.__module__).split(".")[0] != "torch":
                codes = [*_with_inner(function.__code__)]
                yield from codes
                inside = {found for code in codes for found in code.co_names}
                names += inside - seen
                seen |= inside
                if name not in inside:  # and asks not for another one's of this name: `super().forward`
                    break


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _lookups(code: CodeType) -> Iterator[tuple[tuple[str, ...], list[str], bool]]:
    """(variable, names, whether called) of each ``variable.name.name``; without a variable behind ``[...]``."""
    start: tuple[str, ...] | None = None
    names: list[str] = []
    called = False
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(step.argval)
            called = step.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and bool((step.arg or 0) & 1))
        elif step.opname not in ("EXTENDED_ARG", "CACHE"):
            if names and start is not None:
                yield start, names, called
            names = []
            variable = step.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
            start = (str(step.argval),) if variable else () if step.opname == "BINARY_SUBSCR" else None
