"""What the docstrings say: every public name has one, with shapes and an example, and every example runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import normmatters as nm
from support import public_api

MODULES = ["normmatters", *sorted(info.name for info in pkgutil.walk_packages(nm.__path__, "normmatters."))]
# `__main__` would run the command, and the native libraries that a build leaves there are no modules.
MODULES = [name for name in MODULES if not name.endswith("__main__") and ".native_" not in name]
PUBLIC = sorted(
    {id(value): (name, value) for name, value in public_api.values() if not inspect.ismodule(value)}.values()
)
DOCUMENTED = [(name, value) for name, value in PUBLIC if inspect.isclass(value) or inspect.isfunction(value)]

# An optimizer takes parameters of every shape, and numbers that may be tensors.
_NO_SHAPE = ("params", "parameters", "lr", "angle")

# A shape is (N, C, ...) or [channels], or is said in words.
_SHAPE = re.compile(r"\([A-Z.][\w ,.*·]*\)|\[[\w, .]+\]|\bshapes?\b")


def _module(name: str) -> ModuleType:
    importlib.import_module(name)
    return sys.modules[name]  # `normmatters.convert` as an attribute is the function


def _takes_tensors(value: Any) -> bool:
    """Whether a tensor of some shape comes in."""
    calls = [value.__init__, getattr(value, "forward", None)] if inspect.isclass(value) else [value]
    found = [p for call in calls if callable(call) for p in inspect.signature(call).parameters.values()]
    return any("Tensor" in str(p.annotation) and p.name not in _NO_SHAPE for p in found)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = _module(name)
    # At hand, beside what the module itself has: torch, nn, nm, and all public names.
    names = {name: getattr(home, name) for home in (nm.optim, nm) for name in home.__all__}
    names |= {"torch": torch, "nn": nn, "nm": nm} | vars(module)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS, verbose=False)
    said: list[str] = []
    for case in doctest.DocTestFinder(exclude_empty=True).find(module, name, globs=names):
        if 'device="cuda"' in (case.docstring or "") and not torch.cuda.is_available():
            continue
        torch.manual_seed(0)
        runner.run(case, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


@pytest.mark.parametrize(("name", "value"), DOCUMENTED, ids=[name for name, _ in DOCUMENTED])
def test_a_public_name_is_documented(name: str, value: Any) -> None:
    text = value.__doc__ or ""  # not inspect.getdoc: a subclass's own, not what it inherits
    assert text, f"{name} has no docstring"
    assert ">>>" in text, f"the docstring of {name} has no example"
    assert "+SKIP" not in text, f"an example of {name} is not run"
    if _takes_tensors(value):
        assert _SHAPE.search(text), f"the docstring of {name} says no shape, such as (N, C, ...)"


def test_the_checks_can_fail() -> None:
    def takes(x: torch.Tensor) -> None:
        """Takes it."""

    assert _takes_tensors(takes)
    assert not _SHAPE.search(takes.__doc__ or "")
    assert _SHAPE.search("input: (N, C, ...)")
    assert not _takes_tensors(lambda n: n)
