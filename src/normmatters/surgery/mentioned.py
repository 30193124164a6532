"""What code may use that cannot be traced, or that nobody asked to trace: by the names that it looks up."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from normmatters.nn.replace import held_beside

_ROWS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def mentioned(block: nn.Module) -> set[nn.Module]:
    """The modules in ``block`` that its forward, or a method which that one names, may use one by one.

    ``self.encoder.bn`` names one module; on another variable (``encoder.bn``) all modules at such a path are meant.
    Who looks into a Sequential, and does not call it, may call what is in it; so may who has modules in a list or dict.
    """
    modules = {f".{path}": module for path, module in block.named_modules(remove_duplicate=False)}
    found = {module for attributes, _, module in held_beside(block) if attributes is vars(block)}
    for codes in _methods(block, "forward").values():
        for path, own, called in _lookups(codes):
            meant = _named(modules, path, own)
            looks_into = not (called and meant)
            while path and not meant:  # a weight of it, or its children()
                path = path.rpartition(".")[0]
                meant = [modules[path]] if path in modules else []
            found.update(meant)
            if looks_into:
                found.update(child for row in meant if isinstance(row, _ROWS) for child in row.children())
    return found


def called_elsewhere(block: nn.Module) -> Iterator[set[nn.Module]]:
    """The modules in ``block`` that it calls in each of its public methods that are no part of its forward."""
    modules = {f".{path}": module for path, module in block.named_modules(remove_duplicate=False)}
    known = _methods(block, "forward", own=True)  # another module may have a method of this name too
    names = {name for cls in type(block).__mro__ for name in vars(cls)}
    for name in names - known.keys():
        if not name.startswith("_") and not hasattr(nn.Module, name):
            codes = [code for codes in _methods(block, name, private=True).values() for code in codes]
            calls = [_named(modules, path, own) for path, own, called in _lookups(codes) if called]
            yield {module for meant in calls for module in meant}


def _named(modules: dict[str, nn.Module], path: str, own: bool) -> list[nn.Module]:
    if own:
        return [modules[path]] if path in modules else []
    return [module for at, module in modules.items() if at.endswith(path)]


def _methods(block: nn.Module, name: str, *, private: bool = False, own: bool = False) -> dict[str, list[CodeType]]:
    """The code of the method ``name`` and of all methods of the user's that it leads to, or ``private`` ones alone.

    It may lead to any that it names, or, if ``own``, to those that it looks up on the block itself.
    """
    found: dict[str, list[CodeType]] = {}
    names = [name]
    while names:
        name = names.pop()
        codes = found[name] = []
        for attributes in (vars(block), *map(vars, type(block).__mro__)):
            function: Any = attributes.get(name)
            if isinstance(function, property):
                function = function.fget
            if callable(function) or isinstance(function, (staticmethod, classmethod)):
                function = inspect.unwrap(function)  # type: ignore[arg-type]
            function = getattr(function, "__func__", function)
            if isinstance(function, FunctionType) and str(function.__module__).split(".")[0] != "torch":
                here = [*_with_inner(function.__code__)]
                codes += here
                if not any(name in code.co_names for code in here):  # nor another one's of this name: `super().forward`
                    break
        selves = {code.co_varnames[0] for code in codes if code.co_varnames}
        asked = {other for code in codes for other in (_of(selves, code) if own else code.co_names)}
        others = {other for other in asked if other.startswith("_") or not private}
        names += others - found.keys() - {*names}
    return {name: codes for name, codes in found.items() if codes}


def _of(selves: set[str], code: CodeType) -> Iterable[str]:
    """What is looked up on these variables; behind a ``super()`` that is not known, and may be any name."""
    if "super" in code.co_names:
        return code.co_names
    return [names[0] for start, names, _ in _looked_up(code) if selves.intersection(start)]


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _lookups(codes: list[CodeType]) -> Iterator[tuple[str, bool, bool]]:
    """(".name.name", whether of the block itself, whether called) of each ``variable.name.name`` and ``[...].name``."""
    for code in codes:
        for start, names, called in _looked_up(code):
            yield "." + ".".join(names), start == code.co_varnames[:1], called


@functools.lru_cache(4096)
def _looked_up(code: CodeType) -> list[tuple[tuple[str, ...], list[str], bool]]:
    found = []
    start: tuple[str, ...] | None = None
    names: list[str] = []
    called, before = False, ""
    tensors = set() if "getattr" in code.co_names else {*code.co_varnames[1:]}  # given, or results of calls and sums
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(step.argval)
            called = step.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and bool((step.arg or 0) & 1))
        elif step.opname != "EXTENDED_ARG":
            if names and start is not None:
                found.append((start, names, called))
            names = []
            variable = step.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
            start = (str(step.argval),) if variable else () if step.opname == "BINARY_SUBSCR" else None
            if step.opname.startswith("STORE_FAST") and not before.startswith(("CALL", "BINARY_OP")):
                tensors.discard(step.argval)
        before = step.opname
    return [each for each in found if not (tensors.intersection(each[0]) and hasattr(Tensor, each[1][0]))]
