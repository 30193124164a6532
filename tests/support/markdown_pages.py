"""The Markdown pages of the project: which there are, and their code, headings and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_FOLDERS = ("docs", "examples", "experiments", "results", "tests")
PAGES = [*sorted(ROOT.glob("*.md")), *(page for folder in _FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]

_FENCE = re.compile(r"^( *)(```+|~~~+)([^\n]*)\n(.*?)^\1\2[ \t]*$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")


@dataclass(frozen=True)
class Block:
    """Fenced code: its language as written, its text, and how many lines of the page come before it."""

    language: str
    code: str
    line: int


def name(page: Path) -> str:
    """For test ids."""
    return page.relative_to(ROOT).as_posix()


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    return [
        Block((fence[3].split() or [""])[0], fence[4], text[: fence.start(4)].count("\n"))
        for fence in _FENCE.finditer(text)
    ]


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def spans(text: str) -> list[str]:
    """Inline code."""
    return _SPAN.findall(without_blocks(text))


def links(text: str) -> list[str]:
    """Targets of links and pictures outside code."""
    return _LINK.findall(_SPAN.sub("`code`", without_blocks(text)))


def anchors(text: str) -> set[str]:
    """What ``#...`` may name: headings in the form that code hosts give them, and explicit ids."""
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading) for heading in _HEADING.findall(without_blocks(text))]
    slugs = {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}
    return slugs | set(re.findall(r"(?:id|name)=\"([^\"]+)\"", text))


def run_blocks(page: Path) -> list[dict[str, Any]]:
    """Run the Python blocks of a page one after the other in one namespace; what each left behind."""
    names: dict[str, Any] = {"__name__": "__main__"}
    after = []
    for block in blocks(read(page)):
        if block.language == "python":
            # So many empty lines make a traceback name the line of the page.
            exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
            after.append(dict(names))
    return after
