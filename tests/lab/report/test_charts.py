"""The figures of a report: which are drawn, and that they show the numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from normmatters.lab.figures import EXPERIMENTS, Panel
from normmatters.lab.report import collect, write_report
from normmatters.lab.report.charts import Chart, Series, legend_key, picture, svg
from normmatters.lab.report.sections import charts, picture_charts
from support.synthetic_runs import write_run


def test_a_panel_with_nothing_of_its_own_is_not_drawn(tmp_path: Path) -> None:
    """A figure's references stand in each of its panels; one whose other cells have not run would show them again."""
    fig3 = next(e for e in EXPERIMENTS if e.name == "fig3")
    for cell in ("l2_fp32", "l1_fp32", "l1_fp16"):
        write_run(tmp_path, f"fig3/{cell}")
    assert [panel.title for panel, _ in charts(fig3, collect([tmp_path]).of("fig3"))] == ["Validation error"]
    write_run(tmp_path, "fig3/l1_fp16_x128")
    assert [panel.title for panel, _ in charts(fig3, collect([tmp_path]).of("fig3"))] == [
        "Validation error",
        "Inputs × 128 (ours)",
    ]
    fig1 = next(e for e in EXPERIMENTS if e.name == "fig1")
    write_run(tmp_path, "fig1/wd_on")
    drawn = [panel.metric for panel, _ in charts(fig1, collect([tmp_path]).of("fig1"))]
    assert len(drawn) == len(set(drawn)) > 1  # the same cell, by another measure


def test_figures_of_an_earlier_report_go(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "fig1/wd_on")
    folder = tmp_path / "out" / "figures"
    folder.mkdir(parents=True)
    for name in ("fig2-0.svg", "fig1-7.svg", "mine.svg", "notes-1.txt", "photo-1.png"):
        (folder / name).write_text("old")
    report = write_report([tmp_path / "runs"], tmp_path / "out")
    kept = {"mine.svg", "notes-1.txt", "photo-1.png"}  # the user's own
    assert {p.name for p in folder.iterdir()} == kept | {p.name for p in report.figures}


def test_a_picture_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk left half a picture in place of the last report's."""
    write_run(tmp_path / "runs", "fig1/wd_on")
    pictures = write_report([tmp_path / "runs"], tmp_path / "out").figures
    before = [p.read_bytes() for p in pictures]
    assert before
    (tmp_path / "runs/fig1/wd_on/seed0/metrics.jsonl").write_text('{"epoch": 1, "val_acc": 50.0}\n')

    def full(path: Path, data: bytes) -> None:
        if path.suffix == ".svg":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("normmatters.lab.report.write_atomic", full)
    with pytest.raises(OSError, match="No space"):
        write_report([tmp_path / "runs"], tmp_path / "out")
    assert [p.read_bytes() for p in pictures] == before


def test_a_run_that_diverged_does_not_squeeze_the_others(tmp_path: Path) -> None:
    """Beside a perplexity of 1e304 those of 5 and 20 were one line, at the foot of the figure."""
    write_run(tmp_path, "supp2/ln")
    folder = write_run(tmp_path, "supp2/bwn", diverge=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row | {"val_ppl": 1e304}) + "\n" for row in rows))
    report = write_report([tmp_path], tmp_path / "out")
    drawn = next(p for p in report.figures if p.name == "supp2-0.svg").read_text()
    assert re.findall(r'text-anchor="end">([^<]*)', drawn) == ["5", "10", "20"]
    assert "Bounded weight norm ends at 1e304" in drawn
    alone = Chart(
        "title", "ppl", (Series("a", ((1.0, 2e4, 2e4, 2e4), (2.0, 1e4, 1e4, 1e4)), 0, diverged=True),), log=True
    )
    assert ">1e4<" in svg(alone)  # which has a frame if it is the only one


def test_a_cell_has_one_look_in_all_panels_and_in_the_table() -> None:
    """The table's key of bounded weight norm in an LSTM was the line of no norm at all."""
    for e in EXPERIMENTS:
        for panel in e.panels:
            assert {name: e.slots[name] for name in panel.cells} == panel.slots
            if not panel.against:
                assert panel.slots == {name: i for i, name in enumerate(panel.cells)}


def test_no_two_lines_of_a_panel_look_alike() -> None:
    """The seventh had the first one's colour and dash."""
    most = max(len(panel.cells) for e in EXPERIMENTS for panel in e.panels if not panel.against)
    assert most > 6
    for count in (most, 36):
        assert len({legend_key(slot) for slot in range(count)}) == count
    series = tuple(Series(f"run {i}", ((1.0, 5.0 + i, 5.0, 6.0), (2.0, 3.0 + i, 3.0, 4.0)), i) for i in range(most))
    drawn = svg(Chart("title", "error", series), standalone=True)
    lines = [re.sub(r'points="[^"]*"', "", line) for line in re.findall(r"<polyline[^>]*>", drawn)]
    assert len({*lines}) == most
    assert lines[:most] == lines[most:]  # each line and its key in the legend


def test_the_line_is_where_the_numbers_are() -> None:
    points = tuple((float(x), y, y, y) for x, y in ((1, 40.0), (2, 20.0), (3, 10.0)))
    chart = Chart("t", "error", (Series("a & b", points, 0),), log=True)
    text = svg(chart)
    line = re.search(r'<polyline points="([^"]+)"', text)
    assert line is not None
    found = [tuple(map(float, p.split(","))) for p in line[1].split()]
    steps_x = [b[0] - a[0] for a, b in zip(found, found[1:])]
    steps_y = [b[1] - a[1] for a, b in zip(found, found[1:])]
    assert steps_x[0] == pytest.approx(steps_x[1], abs=0.2)
    assert steps_y[0] == pytest.approx(steps_y[1], abs=0.2)  # halving is one step on a log axis
    assert steps_y[0] > 20
    assert "a &amp; b" in text
    assert "prefers-color-scheme:dark" in svg(chart, standalone=True)


def test_the_papers_number_has_a_mark_inside_the_frame() -> None:
    points = tuple((float(x), y, y, y) for x, y in ((1, 40.0), (2, 20.0)))
    chart = Chart("t", "error", (Series("a", points, 0, paper=5.0),), log=True)
    drawn = svg(chart)
    (mark,) = re.findall(r'd="M([\d.]+) ([\d.]+)l10 -5v10z"', drawn)
    lowest = max(float(p.split(",")[1]) for p in re.findall(r'<polyline points="([^"]+)"', drawn)[0].split())
    assert float(mark[1]) > lowest  # less error is further down
    assert "a in the paper: 5" in drawn


def test_nothing_is_blank_below_the_legend() -> None:
    points = tuple((float(x), y, y, y) for x, y in ((1, 40.0), (2, 20.0)))
    for count in (1, 6):
        series = tuple(Series(f"run {i}", points, i) for i in range(count))
        drawn = svg(Chart("t", "error", series), standalone=True)
        (height,) = re.findall(r'viewBox="0 -22 \d+ (\d+)"', drawn)
        last = max(int(y) for y in re.findall(r'<text x="\d+" y="(\d+)">run', drawn))
        assert 0 < int(height) - 22 - last < 12


def test_where_cells_ended_is_drawn_against_a_number_of_theirs(tmp_path: Path) -> None:
    for cell, accuracies in (("free_c_quarter", (0.5, 0.6, 0.7)), ("free_c_1", (0.8,) * 3), ("frozen_c_1", (0.7,) * 3)):
        for seed, final in enumerate(accuracies):
            write_run(tmp_path, f"s4/{cell}", preset="small", seed=seed, final=final)
    write_run(tmp_path, "s4/free_c_4", preset="small", diverge=True)  # which ended nowhere
    s4 = next(e for e in EXPERIMENTS if e.name == "s4")
    chart = next(chart for panel, chart in charts(s4, collect([tmp_path]).of("s4")) if panel.metric == "accuracy")
    free, frozen, silent = chart.series
    e = 4.302653 * 10 / 3**0.5
    assert free.points[0] == pytest.approx((0.25, 60, 60 - e, 60 + e))
    assert free.points[1] == pytest.approx((1, 80, 80, 80))
    assert (len(free.points), [x for x, *_ in frozen.points], silent.points) == (2, [1.0], ())
    drawn = svg(chart)
    assert (drawn.count("<circle"), "factor on the constant" in drawn, ">0.25</text>" in drawn) == (3, True, True)
    assert chart.csv().splitlines()[1].startswith("0.25,60,")
    assert {s4.slots[f"free_c_{name}"] for name in ("quarter", "1", "4")} == {0}
    assert s4.slots["silent_c_4"] == 2


def test_a_factor_is_as_far_from_the_next_on_a_logarithmic_axis() -> None:
    points = tuple((x, y, y - 1, y + 1) for x, y in ((0.5, 40.0), (1.0, 60.0), (2.0, 50.0)))
    chart = Chart("t", "accuracy", (Series("a", points, 0),), against="factor")
    found = [float(x) for x in re.findall(r'<circle cx="([^"]+)"', svg(chart))]
    assert found[1] - found[0] == pytest.approx(found[2] - found[1], abs=0.2)
    with pytest.raises(ValueError, match="lines that divide the 3 cells evenly"):
        Panel("t", ("a", "b", "c"), against="model.constant", lines=("x", "y"))


def _rows(accuracies: dict[str, dict[float, float]]) -> tuple[Series, ...]:
    rows = enumerate(accuracies.items())
    return tuple(Series(name, tuple((x, y, y - 1, y + 1) for x, y in row.items()), slot) for slot, (name, row) in rows)


def test_a_map_has_a_square_for_each_cell_where_it_belongs() -> None:
    rows = {"η 0.1": {0.5: 80.0, 1.0: 85.0}, "η 0.2": {0.5: 85.04, 1.0: 90.0}}
    chart = Chart("t", "accuracy", _rows(rows), unit="%", against="weight decay", map=True)
    for drawn in (svg(chart), svg(chart, standalone=True)):
        squares = re.findall(
            r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" style="fill:var\(--s0\);'
            r'fill-opacity:([\d.]+)"/><text[^>]*>([^<]*)<',
            drawn,
        )
        assert [text for *_, text in squares] == ["80.0", "85.0", "85.0", "90.0"]
        (x, y, width, height, light), middle, _, (right, top, _, _, dark) = (
            [*map(float, s)] for s in (r[:5] for r in squares)
        )
        assert (x + width, y) == pytest.approx((right, top + height), abs=0.2)  # the second row is on top
        assert (light, middle[4], dark) == (0.05, 0.275, 0.5)
        assert "<polyline" not in drawn
        assert all(f'text-anchor="end">{name}</text>' in drawn for name in rows)
    with pytest.raises(ValueError, match="a map is against a number of its cells"):
        Panel("t", ("a",), map=True)


def test_many_numbers_on_an_axis_have_few_ticks() -> None:
    xs = [1.25e-5 * 2**i for i in range(9)]
    chart = Chart("t", "accuracy", _rows({"a": dict.fromkeys(xs, 80.0)}), against="product")
    ticks = re.findall(r'text-anchor="middle">([\de.-]+)</text>', svg(chart))
    assert ticks == ["2e-5", "5e-5", "1e-4", "2e-4", "5e-4", "0.001", "0.002"]


def test_cells_of_one_product_are_at_one_place(tmp_path: Path) -> None:
    s2 = next(e for e in EXPERIMENTS if e.name == "s2")
    for cell in ("lr_0.1_wd_0.002", "lr_0.2_wd_0.001", "lr_0.025_wd_0.008"):
        write_run(tmp_path, f"s2/{cell}", preset="small")
    found = {panel.title: chart for panel, chart in charts(s2, collect([tmp_path]).of("s2"))}
    by_product = found["Accuracy against learning rate × weight decay"]
    assert {x for s in by_product.series for x, *_ in s.points} == {2e-4}
    assert [s.label for s in by_product.series if s.points] == ["η 0.025", "η 0.1", "η 0.2"]
    by_decay = found["Accuracy against the weight decay"]
    assert [x for s in by_decay.series for x, *_ in s.points] == [0.008, 0.002, 0.001]
    assert found["Map of the accuracy"].map


def test_the_picture_is_of_the_longest_runs_there_are(tmp_path: Path) -> None:
    assert picture_charts([]) == []
    for cell, final in (("wd_on", 0.9), ("wd_off", 0.88), ("corrected", 0.89), ("angular", 0.95)):
        write_run(tmp_path / "quick", f"fig1/{cell}", final=0.5)
        write_run(tmp_path / "cifar", f"fig1/{cell}", preset="cifar", final=final)
    for cell, final in (("lr_0.1_wd_0.002", 0.84), ("lr_0.2_wd_0.001", 0.85), ("lr_0.2_wd_0.002", 0.7)):
        write_run(tmp_path / "small", f"s2/{cell}", preset="small", final=final)
    collections = [collect([tmp_path / preset]) for preset in ("quick", "small", "cifar")]
    curves, *_ = found = picture_charts(collections)
    ends = {s.label: s.points[-1][1] for s in curves.series}
    assert ends == pytest.approx({"weight decay": 10, "none": 12, "none, step size corrected": 11})
    drawn = picture(found)
    ElementTree.fromstring(drawn)
    assert "weight decay: 10.0 %" in drawn
    assert drawn.count(">η 0.2</text>") == 1  # both charts have one legend
    assert "prefers-color-scheme:dark" in drawn
    # The same accuracy is at the same height in both, whatever else is there.
    heights = [re.findall(r'cy="([\d.]+)"', part) for part in drawn.split("<clipPath")[2:]]
    assert sorted(heights[0]) == sorted(heights[1])
    assert len(heights[0]) == 3
    assert picture_charts(collections[:1])[0].series[0].points[-1][1] == pytest.approx(50)


def test_the_start_of_a_pictures_curves_may_leave_the_frame() -> None:
    points = tuple((float(e), 9.0 + 80 / e**2, 0.0, 99.0) for e in range(1, 41))
    drawn = picture([Chart("t", "error", (Series("a", points, 0),), log=True)])
    heights = [float(p.split(",")[1]) for p in re.findall(r'<polyline points="([^"]+)"', drawn)[0].split()]
    assert heights[0] < 78  # above the frame
    assert 78 < heights[5] < heights[-1] < 300


def test_intervals_take_no_room_in_a_picture() -> None:
    drawn = picture([Chart("t", "accuracy", _rows({"a": {1.0: 80.0, 2.0: 80.2}}), against="factor")])
    low, high = (float(y) for y in re.findall(r'cy="([\d.]+)"', drawn))
    assert low - high > 150  # of 222, though the intervals are ±1
