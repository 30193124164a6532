"""Docstrings as Markdown: ``>>>`` examples, quotations to it, become code, and Sphinx's roles names."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_HEADING = re.compile(r"(?m)^([ \t]*)(Example|Examples)::?\n(?:[ \t]*\n)?")
_DOCTEST = re.compile(r"(?m)^([ \t]*)>>> .*(?:\n\1\S.*)*(?:\n(?:[ \t]*\n)?\1(?:>>>|\.\.\.).*(?:\n\1\S.*)*)*")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?(?:[\w.]*\.)?(\w+)`")


class Markdown(Extension):
    """Rewrite every docstring before it is parsed."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """``text`` with each run of doctest lines between fences, indented as it was, and roles as plain code."""
    text = _ROLE.sub(r"`\1`", _HEADING.sub(r"\1Example:\n", text))
    return _DOCTEST.sub(lambda match: f"{match[1]}```pycon\n{match[0]}\n{match[1]}```", text)
