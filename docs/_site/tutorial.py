"""Run the tutorial's blocks, write what they print and draw into the page, and make the notebook of the page.

Run: python docs/_site/tutorial.py
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
PAGE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"

# A block, and the place for its output: the text is what a figure shows, for those who cannot see it.
_STEP = re.compile(r"```python\n(.*?)```\n(?:<!-- output(?:: (.*?))? -->\n(.*?)<!-- end -->\n)?", re.DOTALL)
_TEXT = re.compile(r"```text\n(.*?)```\n", re.DOTALL)
_PICTURE = re.compile(r"!\[(.*?)\]\((.*?)\)\n")


@dataclass(frozen=True)
class Output:
    """What one block printed, and its figures as PNG."""

    text: str
    pictures: list[bytes]


def sources(page: str) -> list[str]:
    """The Python blocks."""
    return [step[1] for step in _STEP.finditer(page)]


def run(code: list[str]) -> tuple[list[Output], dict[str, Any]]:
    """Run blocks or cells one after the other in one namespace, as a notebook does: their outputs, and the namespace.

    Figures are those that pyplot holds after the block, and one that is the value of its last expression.
    """
    import matplotlib

    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    return [_run(block, names) for block in code], names


def _run(code: str, names: dict[str, Any]) -> Output:
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    printed = io.StringIO()
    statements = ast.parse(code).body
    last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(statements, []), str(PAGE), "exec"), names)
        value = eval(compile(ast.Expression(last.value), str(PAGE), "eval"), names) if last is not None else None
    figures = [plt.figure(number) for number in plt.get_fignums()]
    figures += [value] if isinstance(value, Figure) else []
    pictures = [_png(figure) for figure in figures]
    plt.close("all")
    return Output(printed.getvalue(), pictures)


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def fill(page: str, outputs: list[Output]) -> tuple[str, dict[str, bytes]]:
    """The page with these outputs after its blocks, and the files of its pictures by name."""
    pictures: dict[str, bytes] = {}
    left = iter(outputs)

    def filled(step: re.Match[str]) -> str:
        code, shows, has_place = step[1], step[2], step[3] is not None
        output = next(left)
        if not has_place and (output.text or output.pictures):
            raise ValueError(f"A block prints or draws, and the page has no place for it:\n{code}")
        if output.pictures and not shows:
            raise ValueError(f"A block draws, and its mark does not say what: <!-- output: … -->\n{code}")
        if not has_place:
            return step[0]
        written = f"```text\n{output.text}```\n" if output.text else ""
        for picture in output.pictures:
            name = f"img/tutorial-{len(pictures) + 1}.png"
            pictures[name] = picture
            written += f"![{shows}]({name})\n"
        mark = f"<!-- output: {shows} -->" if shows else "<!-- output -->"
        return f"```python\n{code}```\n{mark}\n{written}<!-- end -->\n"

    return _STEP.sub(filled, page), pictures


def notebook(page: str, folder: Path = DOCS) -> str:
    """The page as a notebook, with the outputs that the page shows. Its pictures are read from ``folder``."""
    cells: list[dict[str, Any]] = []
    end = 0
    for step in _STEP.finditer(page):
        cells += _markdown(page[end : step.start()], len(cells))
        end = step.end()
        outputs: list[dict[str, Any]] = []
        for text in _TEXT.findall(step[3] or ""):
            outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
        for shows, name in _PICTURE.findall(step[3] or ""):
            data = {"image/png": base64.b64encode((folder / name).read_bytes()).decode(), "text/plain": [shows]}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        count = sum(cell["cell_type"] == "code" for cell in cells) + 1
        cells.append(_cell("code", step[1], len(cells)) | {"execution_count": count, "outputs": outputs})
    cells += _markdown(page[end:], len(cells))
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _markdown(text: str, index: int) -> list[dict[str, Any]]:
    return [_cell("markdown", text, index)] if text.strip() else []


def _cell(kind: str, text: str, index: int) -> dict[str, Any]:
    source = text.strip().splitlines(keepends=True)
    return {"cell_type": kind, "id": f"cell-{index}", "metadata": {}, "source": source}


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)  # the sums' order, and so the last digits
    page = PAGE.read_text(encoding="utf-8")
    page, pictures = fill(page, run(sources(page))[0])
    PAGE.write_text(page, encoding="utf-8")
    for name, picture in pictures.items():
        (DOCS / name).write_bytes(picture)
    NOTEBOOK.write_text(notebook(page), encoding="utf-8")
