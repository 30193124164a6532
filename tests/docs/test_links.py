"""Links of every page lead somewhere, anchors too; names of the library that a page mentions exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import normmatters as nm
from support.markdown_pages import PAGES, ROOT, anchors, links, name, read


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in links(read(page)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        found = path.exists() and path.is_relative_to(ROOT)
        if not found or (anchor and path.suffix == ".md" and anchor not in anchors(read(path))):
            dead.append(link)
    assert dead == []


def test_a_dead_anchor_is_found() -> None:
    text = "# L∞ and `Top(k)`: [a](b.md)\n```\n# no heading\n```\n[x](#here) `[y](z)`"
    assert anchors(text) == {"l-and-topk-a"}
    assert links(text) == ["b.md", "#here"]


def _resolve(dotted: str) -> Any:
    """The object of a dotted name that begins with ``nm`` or ``normmatters``; None if there is none."""
    parts = dotted.split(".")[1:]
    value, path = nm, "normmatters"
    for part in parts:
        path += f".{part}"
        found = getattr(value, part, None)
        if found is None:
            try:
                found = importlib.import_module(path)
            except ModuleNotFoundError:
                return None
        value = found
    return value


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_public_names_exist(page: Path) -> None:
    text = read(page)
    named = set(re.findall(r"\bnm(?:\.[A-Za-z_]\w*)+", text))
    named |= set(re.findall(r"(?<![/\w.-])normmatters(?:\.[A-Za-z_]\w*)+(?!/|\.\w)", text))
    assert sorted(dotted for dotted in named if _resolve(dotted) is None) == []
