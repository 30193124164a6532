"""The public API as text, a name and signature a line: what `tests/support/api.txt` holds.

python tests/support/public_api.py    # writes tests/support/api.txt anew
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOMES = (
    "normmatters",
    "normmatters.constants",
    "normmatters.doctor",
    "normmatters.functional",
    "normmatters.kernels.dispatch",
    "normmatters.migrate",
    "normmatters.nn",
    "normmatters.optim",
    "normmatters.precision",
    "normmatters.surgery",
    "normmatters.weight_norm",
)
FILE = Path(__file__).with_name("api.txt")


def values() -> Iterator[tuple[str, Any]]:
    """Every public name with its value, home by home."""
    for home in HOMES:
        module = importlib.import_module(home)
        names = getattr(module, "__all__", None)
        if names is None:  # what the module itself defines
            names = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == home and n[0] != "_"]
        for name in sorted(names):
            yield f"{home}.{name}", getattr(module, name)


def _signature(value: Any) -> str:
    """As it is written: most annotations are strings, and a string's quotes are not part of them."""

    def written(annotation: Any) -> Any:
        return _Written(annotation) if isinstance(annotation, str) else annotation

    signature = inspect.signature(value)
    parameters = [p.replace(annotation=written(p.annotation)) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=written(signature.return_annotation)))
    text = re.sub(r"<class '([^']+)'>", r"\1", text)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


class _Written(str):
    def __repr__(self) -> str:
        return str(self)


def _members(value: type) -> Iterator[str]:
    """Public methods and properties that the class itself defines."""
    for name, member in sorted(vars(value).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, staticmethod | classmethod):
            yield f".{name}{_signature(member.__func__)}"
        elif inspect.isfunction(member):
            yield f".{name}{_signature(member)}"
        elif isinstance(member, property):
            yield f".{name}"


def lines() -> Iterator[str]:
    """The API, a line a name; what is there under several names is written out under the first."""
    first: dict[int, str] = {}
    for name, value in values():
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            yield name
        elif id(value) in first:
            yield f"{name} = {first[id(value)]}"
        else:
            first[id(value)] = name
            yield f"{name}{_signature(value)}"
            if inspect.isclass(value):
                yield from (f"    {member}" for member in _members(value))


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
