"""The pages keep their promises: a card for every method, a place for every formula, a test for every workflow."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import normmatters as nm
from normmatters.lab.claims import CLAIMS
from support.markdown_pages import ROOT, links, read
from support.site_scripts import site_module

DOCS = ROOT / "docs"


def _rows(text: str, first: str) -> list[list[str]]:
    """Cells of those table rows whose first cell matches; ``\\|`` is no border."""
    rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if re.match(first, row[0].strip())]


# Cards


def _methods() -> dict[str, list[str]]:
    """Each method of the table of methods, with the pages it links to."""
    rows = _rows(read(DOCS / "methods.md"), r"(?!Method|-)")
    return {row[0]: links("|".join(row)) for row in rows}


@pytest.mark.parametrize("method", _methods(), ids=lambda method: re.sub(r"\]\(.*?\)|\[", "", method))
def test_every_method_has_a_card(method: str) -> None:
    pages = _methods()[method]
    assert len(pages) == 1, f"{method!r} must link to its card"
    card = read(DOCS / pages[0])
    for part in ("What", "When", "Cost", "Where it fails"):
        assert f"**{part}.**" in card, f"{pages[0]} does not say: {part}"
    assert "```python" in card
    assert re.search(r"^!\[[^\]]+\]\([./]*img/\w+\.png\)$", card, re.MULTILINE), f"{pages[0]} has no picture"


def test_every_card_is_in_the_table_of_the_front_page() -> None:
    front = set(links(read(DOCS / "index.md")))
    pages = {*DOCS.rglob("*.md")} - {*(DOCS / "recipes").glob("*.md")}
    cards = [page for page in pages if "**Where it fails.**" in read(page)]
    assert len(cards) > 12
    assert {page.relative_to(DOCS).as_posix() for page in cards} <= front


# The paper in code


def test_paper_map_has_every_formula_and_experiment() -> None:
    page = read(DOCS / "paper-map.md")
    formulas, experiments = _rows(page, r"\[F\d+\]"), _rows(page, r"E\d+$")
    assert [re.findall(r"F\d+", row[0])[0] for row in formulas] == [f"F{i}" for i in range(1, 17)]
    assert [row[0] for row in experiments] == [f"E{i}" for i in range(1, 13)]
    for row in formulas:  # an equation, a function and a module
        assert all(row[1:4]), row
        for cell in row[2:4]:
            assert "`" in cell or cell == "every norm", row
    # Formulas lead to every experiment, and an experiment to the runs that its claims are judged by.
    assert set(re.findall(r"\[(E\d+)\]", "".join(row[4] for row in formulas))) == {row[0] for row in experiments}
    for row in experiments:
        folders = {Path(link).name for link in links(row[2])}
        assert folders == {claim.experiment for claim in CLAIMS if claim.check == row[0]}, row
        assert all(list((ROOT / "experiments" / folder).glob("*.toml")) for folder in folders)
    linked = {Path(link).name for link in links(page) if "experiments/" in link}
    assert linked == {path.name for path in (ROOT / "experiments").iterdir() if path.is_dir()}


@pytest.mark.parametrize("number", range(1, 17))
def test_each_formula_is_cited_where_it_is_computed(number: int) -> None:
    """Of the modules that define what the map names, one at least cites the formula's number."""
    (row,) = _rows(read(DOCS / "paper-map.md"), rf"\[F{number}\]")
    sources = set()
    for dotted in re.findall(r"`((?:nm|normmatters)\.[\w.]+)`", row[2] + row[3]):
        value, *rest = nm, *dotted.split(".")[1:]
        for part in rest:
            value = getattr(value, part, None) or importlib.import_module(f"{value.__name__}.{part}")
        sources.add(Path(importlib.import_module(value.__module__).__file__ or ""))
    cited = "".join(read(path) for path in sources)
    ranges = re.findall(r"\bF(\d+)-F(\d+)\b", cited)
    numbers = {int(n) for n in re.findall(r"\bF(\d+)\b", cited)}
    numbers |= {n for first, last in ranges for n in range(int(first), int(last) + 1)}
    assert number in numbers, f"none of {sorted(map(str, sources))} cites F{number}"


# Workflows


matrix = site_module("matrix")


@pytest.mark.parametrize("row", matrix.rows(), ids=lambda row: row["workflow"])
def test_every_workflow_names_tests_that_there_are(row: dict[str, object]) -> None:
    assert set(row) == {"workflow", "works", "recipe", "tests"}
    assert all(row.values()), row
    assert (DOCS / "recipes" / str(row["recipe"])).is_file()
    for node in row["tests"]:  # type: ignore[attr-defined]
        path, _, function = node.partition("::")
        assert (ROOT / path).is_file(), f"{node}: no such file"
        assert Path(path).name.startswith("test_"), node
        defined = [x.name for x in ast.walk(ast.parse(read(ROOT / path))) if isinstance(x, ast.FunctionDef)]
        assert any(n.startswith("test_") for n in defined), node
        if function:
            assert function in defined, f"{node}: no such test"


@pytest.mark.parametrize("page", matrix.PAGES)
def test_table_of_workflows_is_up_to_date(page: str) -> None:
    text = read(ROOT / page)
    assert "<!-- workflows -->" in text
    assert matrix.fill(text, page) == text, "run: python docs/_site/matrix.py"


def test_every_recipe_is_in_the_matrix() -> None:
    recipes = {page.name for page in (DOCS / "recipes").glob("*.md")} - {"index.md"}
    assert recipes == {row["recipe"] for row in matrix.rows()}


# API pages


def test_api_pages_show_every_public_name() -> None:
    shown: set[str] = set()
    for page in (DOCS / "api").glob("*.md"):
        for module in re.findall(r"<!-- every name of ([\w.]+) -->", read(page)):
            shown |= {module, *(f"{module}.{name}" for name in importlib.import_module(module).__all__)}
    modules = {
        f"normmatters.{public}" for public in ("optim", "functional", "constants", "precision", "migrate", "doctor")
    }
    assert modules <= shown
    tails = {dotted.rpartition(".")[2] for dotted in shown}
    assert set(nm.__all__) - {"__version__"} <= tails
    pages = {page.name for page in (DOCS / "api").glob("*.md")} - {"index.md"}
    assert pages <= set(links(read(DOCS / "api" / "index.md")))
