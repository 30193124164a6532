"""The tutorial: its notebook runs, and page and notebook show what running it prints and draws."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from support.markdown_pages import ROOT, blocks, read
from support.site_scripts import site_module

tutorial = site_module("tutorial")
PAGE, NOTEBOOK = ROOT / "docs" / "tutorial.md", ROOT / "docs" / "tutorial.ipynb"


@pytest.fixture(scope="module")
def ran() -> tuple[list[Any], dict[str, Any]]:
    """Outputs and namespace of the notebook's code cells, run once."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    cells = json.loads(read(NOTEBOOK))["cells"]
    return tutorial.run(["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"])


def test_the_notebook_is_that_of_the_page() -> None:
    assert read(NOTEBOOK) == tutorial.notebook(read(PAGE)), "run: python docs/_site/tutorial.py"


def test_the_notebook_has_the_format_of_one() -> None:
    """Version 4.5 of the format: which keys a cell has, and which an output."""
    whole = json.loads(read(NOTEBOOK))
    assert set(whole) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5)
    assert set(whole["metadata"]["kernelspec"]) == {"display_name", "language", "name"}
    names = [cell["id"] for cell in whole["cells"]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    keys = {"cell_type", "id", "metadata", "source"}
    for cell in whole["cells"]:
        lines = cell["source"]
        assert all(line.endswith("\n") and "\n" not in line[:-1] for line in lines[:-1])
        if cell["cell_type"] == "markdown":
            assert set(cell) == keys
            continue
        assert cell["cell_type"] == "code"
        assert set(cell) == keys | {"execution_count", "outputs"}
        for output in cell["outputs"]:
            stream = {"name", "output_type", "text"}
            display = {"data", "metadata", "output_type"}
            assert set(output) == {"stream": stream, "display_data": display}[output["output_type"]]


def test_the_page_shows_what_running_prints_and_draws(ran: tuple[list[Any], dict[str, Any]]) -> None:
    """Numbers may differ in their digits, since processors add in different orders; words and pictures may not."""
    page = read(PAGE)
    filled, pictures = tutorial.fill(page, ran[0])

    def without_digits(text: str) -> list[str]:
        return [re.sub(r" *\d+", "#", block.code) for block in blocks(text) if block.language == "text"]

    assert without_digits(filled) == without_digits(page)
    assert set(re.findall(r"!\[[^\]]+\]\((.+?)\)", page)) == set(pictures)
    for name, picture in pictures.items():
        committed = (ROOT / "docs" / name).read_bytes()
        assert committed[:24] == picture[:24], name  # the PNG's head: width and height


def test_what_the_tutorial_says_of_its_runs(ran: tuple[list[Any], dict[str, Any]]) -> None:
    names = ran[1]
    assert names["on_losses"] == names["l1_losses"]  # recording changes nothing
    formula = (2 * 0.1 * 5e-3 / 1.9) ** 0.5
    for angle in names["angles"].tolist():  # "nearly the same in all four"
        assert angle == pytest.approx(formula, rel=0.2)
    assert max(names["l1_errors"][-1], names["free_errors"][-1]) < 8

    def step(run: str) -> float:
        return names[run].effective_step_size("3.weight")[200:405].median().item()

    def norm(run: str) -> float:
        return names[run].norm("3.weight", layer=True)[-1].item()

    assert step("off") < 0.6 * step("on")
    assert step("free") == pytest.approx(step("on"), rel=0.2)
    assert norm("free") > 5 * norm("on")
    losses = {run: names[f"{run}_losses"] for run in ("on", "off", "free")}
    assert losses["off"][8] < 0.8 * losses["on"][8]  # lower before the learning rate falls,
    assert losses["free"][8] == pytest.approx(losses["on"][8], rel=0.25)
    drop = {run: curve[8] / curve[-1] for run, curve in losses.items()}
    assert drop["on"] > 1.5 * drop["off"]  # and less to gain when it does


def test_a_block_whose_output_has_no_place_is_an_error() -> None:
    page = "```python\nprint(1)\n```\n\nWords.\n\n```python\nx = 2\n```\n<!-- output -->\n<!-- end -->\n"
    one, two = tutorial.Output("1\n", []), tutorial.Output("", [])
    with pytest.raises(ValueError, match="no place"):
        tutorial.fill(page, [one, two])
    with pytest.raises(ValueError, match="does not say what"):
        tutorial.fill(page, [two, tutorial.Output("", [b"png"])])
    assert tutorial.fill(page, [two, one])[0].endswith("<!-- output -->\n```text\n1\n```\n<!-- end -->\n")


def test_blocks_run_as_cells_do() -> None:
    """One namespace for all, what each prints, and a figure that is the value of the last expression."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figure = "from matplotlib.figure import Figure\nFigure()\n"
    outputs, names = tutorial.run(["x = 1\n", "x += 1\nprint(x)\n", figure])
    assert [output.text for output in outputs] == ["", "2\n", ""]
    assert [len(output.pictures) for output in outputs] == [0, 0, 1]
    assert names["x"] == 2
