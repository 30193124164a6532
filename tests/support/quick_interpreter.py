"""Triton's interpreter without its needless work, which takes half of the time of the kernels' tests.

Nothing that a kernel computes, or is refused for, changes, but for the order of a sum. What is left out:

- the language is patched once a launch, not again for every function that a kernel calls: it is patched there already;
- of every sum and product of int32, the same in int64 and its comparison: a check that debug mode makes, which is off;
- a new dictionary of all types for every look at one, and a new type for every shape;
- a call for every number of what `tl.reduce` reduces by a function: halves are added to halves, as a GPU does.

It rests on names of Triton's own. Where a version has others, its interpreter is left as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np


@functools.cache
def quicken() -> None:
    """Leave the needless work out in this process."""
    try:
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
        type_of = _by_name(interpreter._get_np_dtype)
        patch = _once_a_launch(interpreter._patch_lang, interpreter.tl)
        shapes = _by_lengths(interpreter.tl.core._type_for_tuple_values, interpreter.tl.constexpr)
        reduce = _by_halves(interpreter.ReduceOps.generic_reduce)
    except (ImportError, AttributeError, TypeError):
        return
    builder.options, interpreter._get_np_dtype, interpreter._patch_lang = options, type_of, patch
    interpreter.tl.core._type_for_tuple_values, interpreter.ReduceOps.generic_reduce = shapes, reduce


def _by_name(type_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``type_of``, looked up once for each type of numbers. A block's is that of its elements."""
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = type_of(dtype)
        return known[name]

    return look_up


def _by_lengths(type_of: Callable[..., Any], constexpr: type) -> Callable[..., Any]:
    """``type_of`` a tuple, found once for each tuple of integers. Most are shapes, of which there are few."""
    known: dict[tuple[int, ...], Any] = {}

    def look_up(values: Any, fields: Any = None) -> Any:
        lengths = []
        for value in values:
            length = value.value if type(value) is constexpr else value
            if fields is not None or type(length) is not int:
                return type_of(values, fields)
            lengths.append(length)
        key = tuple(lengths)
        if key not in known:
            known[key] = type_of(values)
        return known[key]

    return look_up


def _once_a_launch(patch: Callable[[Any], Any], tl: ModuleType) -> Callable[[Any], Any]:
    """``patch``, but of a function that a kernel calls only if it sees a module that is not patched yet.

    Triton restores the language after a launch, and never after a call inside.
    """
    patched: set[int] = set()

    @functools.cache
    def seen_from(fn: Any) -> frozenset[int]:
        return frozenset(map(id, fn.__globals__.values())) & {id(tl), id(tl.core)}

    def patch_once(fn: Any) -> Any:
        if patched and seen_from(fn) <= patched:
            return None
        launched, scope = not patched, patch(fn)
        patched.update(seen_from(fn))
        if launched:
            restore = scope.restore
            scope.restore = lambda: (restore(), patched.clear())
        return scope

    return patch_once


def _by_halves(one_by_one: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``ReduceOps.generic_reduce``, but along one dimension, whose length is a power of two, by halves."""

    def reduce(self: Any, tensors: tuple[Any, ...]) -> Any:
        if self.axis is None or self.keep_dims:
            return one_by_one(self, tensors)
        dtypes = [t.dtype for t in tensors]
        parts = [np.moveaxis(t.handle.data, self.axis, 0) for t in tensors]
        while len(parts[0]) > 1:
            half = len(parts[0]) // 2
            first, second = (
                [self.to_tensor(p[side], t) for p, t in zip(parts, dtypes)] for side in (slice(half), slice(half, None))
            )
            found = self.combine_fn.fn(*first, *second)
            parts = [t.handle.data for t in (found if isinstance(found, tuple) else (found,))]
        return [self.to_tensor(p[0], t) for p, t in zip(parts, dtypes)]

    return reduce
