"""Write the table of workflows into docs/recipes/index.md. Run: python docs/_site/matrix.py"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ("docs/recipes/index.md",)
_MARKED = re.compile(r"(<!-- workflows -->\n).*?(<!-- end -->)", re.DOTALL)


def rows() -> list[dict[str, Any]]:
    """Each with ``workflow``, ``works`` (in a few words), ``recipe`` (a page beside the table's file) and ``tests``."""
    found: list[dict[str, Any]] = tomllib.loads((ROOT / "docs/recipes/matrix.toml").read_text(encoding="utf-8"))["row"]
    return found


def table(page: str) -> str:
    """The table with links as they are in ``page``."""
    folder = posixpath.dirname(page) or "."
    lines = ["| Workflow | Works | Tested by |", "|---|---|---|"]
    for row in rows():
        recipe = posixpath.relpath(f"docs/recipes/{row['recipe']}", folder)
        tests = dict.fromkeys(test.partition("::")[0] for test in row["tests"])
        links = ", ".join(f"[`{Path(test).stem}`]({posixpath.relpath(test, folder)})" for test in tests)
        lines.append(f"| [{row['workflow']}]({recipe}) | {row['works']} | {links} |")
    return "\n".join(lines) + "\n"


def fill(text: str, page: str) -> str:
    """``text`` of a page with the table between its marks."""
    return _MARKED.sub(lambda match: match[1] + table(page) + match[2], text)


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(fill(path.read_text(encoding="utf-8"), page), encoding="utf-8")
