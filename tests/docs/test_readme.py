"""The README: its code does what it says there; and every page's benchmark tables are those of the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

from normmatters import bench
from normmatters.bench import report
from support.markdown_pages import PAGES, ROOT, name, read, run_blocks

README = ROOT / "README.md"


def test_readme_code_does_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    convert, train, _ = run_blocks(README)
    printed = capsys.readouterr().out
    assert "1 converted, 1 fused, 0 skipped" in printed
    assert [type(module) for module in convert["model"]] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Flatten, nn.Linear]
    assert convert["model"][1].num_batches_tracked == 2  # the statistics came with it both ways
    assert all(parameter.grad is not None for parameter in convert["model"].parameters())
    norms = train["recorder"].recording().norms["0.weight"]
    assert (norms[-1] > norms[0]).all()  # without weight decay norms can only grow
    free, ordinary = train["optimizer"].param_groups
    assert (free["param_names"], free["weight_decay_free"]) == (["0.weight"], True)
    assert (ordinary["param_names"], ordinary["weight_decay_free"]) == (
        ["1.weight", "1.bias", "3.weight", "3.bias"],
        False,
    )
    in_l1, in_l2 = (float(number) for number in re.findall(r"tensor\(([\d.]+),", printed))
    assert in_l1 == pytest.approx(1, abs=0.005)
    assert in_l2 == 0


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_placeholder_is_left(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", read(page), flags=re.DOTALL)
    assert not re.findall(r"\b[A-Z]+_[A-Z_]+\b|\bTODO\b|\bTBD\b", prose)


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- bench:" in read(page)], ids=name)
def test_benchmark_tables_are_those_of_the_results(page: Path) -> None:
    text, results = read(page), ROOT / "results" / "bench"
    for bench_name, words in re.findall(r"<!-- bench:(\w+)((?: [\w.]+)*) -->\n", text):
        assert bench_name in bench.NAMES
        axes = bench.axes_of(bench_name)
        assert set(words.split()) <= {word for column in axes.values() for word in column} | {"summary", "headlines"}
        assert (results / f"{bench_name}.json").is_file(), f"the table of {bench_name} has no results to be filled from"
    assert report.fill(text, results) == text, f"run `python -m normmatters.bench.report {name(page)}`"
