"""The README, the cards and the other papers of the project: their code runs, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.main import get_command

import normmatters as nm
from normmatters import bench
from normmatters.bench import report
from normmatters.cli import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CARDS = [ROOT / "docs" / f"{name}.md" for name in ("batch_norm", "layer_norm", "weight_norm", "convert", "precision")]
PAPERS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

_PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _run(path: Path) -> list[dict[str, Any]]:
    """Run the Python blocks of a page one after the other; what each left behind."""
    text = path.read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    after = []
    for block in _PYTHON.finditer(text):
        lines_before = text[: block.start(1)].count("\n")  # so that a traceback names the line of the page
        exec(compile("\n" * lines_before + block[1], str(path), "exec"), names)
        after.append(dict(names))
    return after


def test_readme_code_does_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    convert, train, _ = _run(README)
    printed = capsys.readouterr().out
    assert "1 converted, 1 fused, 0 skipped" in printed
    assert [type(module) for module in convert["model"]] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Flatten, nn.Linear]
    assert convert["model"][1].num_batches_tracked == 2  # the statistics came with it both ways
    assert all(parameter.grad is not None for parameter in convert["model"].parameters())
    norms = train["recorder"].recording().norms["0.weight"]
    assert (norms[-1] > norms[0]).all()  # without weight decay norms can only grow
    assert {name for name, _ in train["net"].named_parameters()} - set(train["invariant"]["param_names"]) == {
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
    }
    in_l1, in_l2 = (float(number) for number in re.findall(r"tensor\(([\d.]+),", printed))
    assert in_l1 == pytest.approx(1, abs=0.005)
    assert in_l2 == 0


@pytest.mark.parametrize("card", CARDS, ids=_name)
def test_code_of_a_card_runs(card: Path) -> None:
    (names,) = _run(card)
    for value in names.values():
        if isinstance(value, torch.Tensor):
            assert value.isfinite().all()


@pytest.mark.parametrize("page", PAPERS, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http", "#"))]
    assert [link for link in links if not (page.parent / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("page", PAPERS, ids=_name)
def test_public_names_exist(page: Path) -> None:
    missing = []
    for name in set(re.findall(r"\bnm((?:\.\w+)+)", page.read_text(encoding="utf-8"))):
        value: Any = nm
        for part in name[1:].split("."):
            value = getattr(value, part, None)
        if value is None:
            missing.append(f"nm{name}")
    assert missing == []


@pytest.mark.parametrize("page", PAPERS, ids=_name)
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = get_command(app).commands  # type: ignore[attr-defined]
    text = _PYTHON.sub("", text)
    code = "\n".join(block or span for block, span in re.findall(r"^```\n(.*?)^```|`([^`\n]+)`", text, re.M | re.S))
    assert set(re.findall(r"\bmake ([a-z]+)", code)) <= targets
    assert set(re.findall(r"(?:^|[\s/])normmatters ([a-z]+)", code)) <= set(commands)


def test_benchmark_tables_ask_for_rows_that_there_are() -> None:
    marks = re.findall(r"<!-- bench:(\w+)((?: [\w.]+)*) -->\n", README.read_text(encoding="utf-8"))
    assert {name for name, _ in marks} <= set(bench.NAMES)
    for name, words in marks:
        axes, _ = bench._bench(name)
        assert set(words.split()) <= {word for column in axes.values() for word in column}
    results = ROOT / "results" / "bench"
    for name, _ in marks:
        assert (results / f"{name}.json").is_file(), f"the table of {name} has no results to be filled from"
    text = README.read_text(encoding="utf-8")
    assert report.fill(text, results) == text, "run `python -m normmatters.bench.report README.md`"
