"""Frozen dataclasses from nested tables: types are checked, an unknown key is an error that names the one meant."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_name(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise ValueError on a name of no known thing of this kind, with the one that was probably meant."""
    if name not in (known := list(known)):
        raise ValueError(f"no {kind} {name!r}{suggest(name, known)}")


def suggest(word: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: what was probably meant, or all that there is."""
    known = list(known)
    return meant(word, known) or f"; there are: {', '.join(known)}"


def meant(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def build(cls: type, table: Any, prefix: str, origin: str) -> Any:
    """``cls`` from a table. ``prefix`` is the table's place in its file, ``origin`` begins every error."""
    values = convert(cls, table, prefix, origin)
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None


def convert(cls: type, table: Any, prefix: str, origin: str) -> dict[str, Any]:
    """The arguments of ``cls`` that ``table`` has, checked and converted."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{origin}: [{prefix.rstrip('.')}] must be a table, got {table!r}")
    hints, values = _hints(cls), dict[str, Any]()
    for key, value in table.items():
        if key not in hints:
            inner = [f"{name}.{key}" for name, hint in hints.items() if key in _hints(hint)]
            near = suggest(prefix + key, [prefix + name for name in hints])
            near = f"; did you mean {inner[0]!r}?" if inner else near
            raise ValueError(f"{origin}: unknown key {prefix + key!r}{near}")
        if dataclasses.is_dataclass(hints[key]):
            values[key] = build(hints[key], value, f"{prefix}{key}.", origin)
        else:
            values[key] = _convert(value, hints[key], prefix + key, origin)
    return values


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}


_NO = object()


def _convert(value: Any, hint: Any, key: str, origin: str) -> Any:
    result = _match(value, hint)
    if result is _NO:
        options = [a for a in _flatten(hint) if isinstance(a, str)]
        kind = {tuple: "a list of", Mapping: "tables named"}.get(get_origin(hint), "one of")  # type: ignore[arg-type]
        expected = f"{kind} {', '.join(options)}" if options else _describe(hint)
        words = [value] if isinstance(value, str) else value if isinstance(value, list | Mapping) else []
        unknown = [word for word in words if isinstance(word, str) and word not in options]
        near = meant(unknown[0], options) if unknown else ""
        raise ValueError(f"{origin}: {key} must be {expected}, got {value!r}{near}")
    return result


def _match(value: Any, hint: Any) -> Any:
    """The value as the hint wants it, or ``_NO``. bool is not an int here, an int is a float, a list is a tuple."""
    kind = get_origin(hint)
    if kind in (Union, types.UnionType):
        for option in get_args(hint):
            if (match := _match(value, option)) is not _NO:
                return match
        return _NO
    if kind is Literal:
        return value if value in get_args(hint) else _NO
    if kind is tuple:
        if not isinstance(value, list | tuple):
            return _NO
        items = tuple(_match(v, get_args(hint)[0]) for v in value)
        return _NO if any(i is _NO for i in items) else items
    if kind is Mapping:
        if not isinstance(value, Mapping):
            return _NO
        table = {_match(k, get_args(hint)[0]): _match(v, get_args(hint)[1]) for k, v in value.items()}
        return _NO if any(i is _NO for i in chain(table, table.values())) else table
    if hint is Any:
        return value
    if hint is type(None):
        return None if value is None else _NO
    if hint is float:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else _NO
    if hint is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _NO
    return value if isinstance(value, hint) else _NO


def _flatten(hint: Any) -> list[Any]:
    return [b for a in get_args(hint) for b in (_flatten(a) if get_origin(a) else [a])]


_KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", type(None): "nothing"}


def _describe(hint: Any) -> str:
    """What a user may write, in words: "a number", "a whole number or nothing"."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_describe, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a list, each of it {_describe(get_args(hint)[0])}"
    return "a table" if get_origin(hint) is Mapping else _KINDS[hint]
