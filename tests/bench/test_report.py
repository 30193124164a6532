"""Tables from JSON, in the marked places of a file; and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normmatters.bench import cpu, report, roofline

ENVIRONMENT = {
    "device": "Some GPU",
    "threads": 1,
    "torch": "2.11.0",
    "cuda": "12.8",
    "triton": "3.6.0",
    "python": "3.12.1",
    "commit": "abc",
    "date": "2026-01-02T03:04:05+00:00",
}


def _row(variant: str, fwd: float, bwd: float, ratio: float, **more: Any) -> dict[str, Any]:
    return {
        "dtype": "fp16",
        "layout": "cl",
        "form": "relu",
        "size": "256x64x56x56",
        "variant": variant,
        "ours": variant.startswith("l1"),
        "status": "ok",
        "note": "",
        "tensor_bytes": 102_760_448,
        "fwd_ms": fwd,
        "bwd_ms": bwd,
        "saved_share": 1.0,
        "peak_bytes": None,
        "ratio": ratio,
        **more,
    }


@pytest.fixture
def results(tmp_path: Path) -> Path:
    wrong = {**_row("l1", 0, 0, 0), "status": "WRONG", "note": "dx is off | by 3"}
    for key in ("fwd_ms", "bwd_ms", "saved_share", "ratio"):
        del wrong[key]
    rows = [
        _row("native", 0.2, 0.3, 1.0),
        _row("l1_lean", 0.1, 0.15, 0.5, saved_share=0.125),
        _row("l1_lean", 0.1, 0.15, 0.5, dtype="bf16"),
        wrong,
    ]
    data = {"bench": "layers", "environment": ENVIRONMENT, "memory_bandwidth": 4.2e12, "rows": rows}
    (tmp_path / "layers.json").write_text(json.dumps(data))
    return tmp_path


def test_markdown_shows_numbers_and_for_a_wrong_row_the_reason_alone(results: Path) -> None:
    lines = report.markdown(json.loads((results / "layers.json").read_text())).splitlines()
    assert lines[0] == (
        "| dtype | layout | form | shape | variant | fwd ms | bwd ms | passes fwd | passes bwd "
        "| faster than native | kept ÷ x |"  # no column that is empty in every row
    )
    assert lines[1] == "|---|---|---|---|---|--:|--:|--:|--:|--:|--:|"
    assert lines[3] == "| fp16 | cl | relu | 256x64x56x56 | l1_lean | 0.100 | 0.150 | 4.1 | 6.1 | 2.00× | 0.12 |"
    assert lines[5] == "| fp16 | cl | relu | 256x64x56x56 | l1 | WRONG: dx is off \\| by 3 |  |  |  |  |  |"
    assert lines[-1] == (
        "<sub>Some GPU, torch 2.11.0, triton 3.6.0, memory 4.20 TB/s, commit abc, 2026-01-02. "
        "Each row was checked against float64 first.</sub>"
    )


def test_a_table_does_not_claim_a_check_that_its_rows_did_not_have(results: Path) -> None:
    data = json.loads((results / "layers.json").read_text())
    assert "checked against float64" in report.markdown(data)
    data["rows"][0]["error"] = None  # as of a whole step with weight norm
    assert "checked" not in report.markdown(data)


def test_passes_follow_from_the_times_and_the_files_own_bandwidth(results: Path) -> None:
    data = json.loads((results / "layers.json").read_text())
    data["rows"][1] |= {"fwd_passes": 99.0, "bwd_passes": 99.0}
    assert "99" not in report.markdown(data)
    data["memory_bandwidth"] *= 2
    assert "| 0.100 | 0.150 | 8.2 | 12.3 |" in report.markdown(data)
    del data["memory_bandwidth"]  # a file from before bandwidth was measured as it is now
    assert "passes" not in report.markdown(data)
    with pytest.raises(ValueError, match="nothing of the memory's bandwidth"):
        roofline.draw(data, results / "none.svg")


def test_rows_that_a_run_did_not_reach_are_no_error(results: Path) -> None:
    data = json.loads((results / "layers.json").read_text())
    assert report.markdown(data, ["l2"]).startswith("No rows of it were measured.\n")
    assert report.markdown(data, ["l2", "l1_lean", "fp16"]).count("| l1_lean |") == 1
    data["rows"] = data["rows"][3:]  # nothing but a failure
    assert "| l1 | WRONG: dx is off" in report.markdown(data)
    data["rows"] = [{"variant": "layers", "ours": True, "status": "failed", "note": "MemoryError: full"}]
    assert "| layers | failed: MemoryError: full |" in report.markdown(data)
    data["rows"] = []
    assert report.markdown(data).endswith("first.</sub>")


def test_filling_a_file_keeps_the_rest_and_changes_nothing_the_second_time(results: Path) -> None:
    readme = results / "README.md"
    readme.write_text(
        "# Title\n<!-- bench:layers fp16 l1_lean native -->\nold\n<!-- /bench -->\nbetween\n"
        "<!-- bench:layers -->\n<!-- /bench -->\nend\n"
    )
    report.main([str(readme), "--results", str(results)])
    once = readme.read_text()
    report.main([str(readme), "--results", str(results)])
    assert readme.read_text() == once
    assert once.startswith("# Title\n<!-- bench:layers fp16 l1_lean native -->\n| dtype")
    assert once.endswith("<!-- /bench -->\nend\n")
    assert "old" not in once
    first, second = once.split("between")
    assert first.count("| l1_lean |") == 1
    assert second.count("| l1_lean |") == 2
    assert "bf16" not in first


def test_the_summary_has_the_mean_and_the_worst_of_each_kind_of_row(results: Path) -> None:
    l1 = {"part": "batch_norm", "form": "relu", "dtype": "fp32"}
    rows = [
        _row("native", 1, 1, 1.0, **l1),
        _row("l1", 1, 1, 0.4, **l1),
        _row("l1", 1, 1, 0.9, **l1),
        _row("l1", 1, 1, 5.0, **{**l1, "part": "linear"}),
        {**_row("l1", 1, 1, 9.0, **l1), "status": "WRONG"},
        _row("l1_lean", 1, 1, 0.8, part="step", memory_ratio=0.58),
    ]
    (results / "cpu.json").write_text(json.dumps({"bench": "cpu", "environment": ENVIRONMENT, "rows": rows}))
    filled = report.fill("<!-- bench:cpu summary -->\n<!-- /bench -->", results).splitlines()
    (line,) = filled[3:-1]  # kinds that were not measured have no place
    cells = ["L1 BN+ReLU, fp32", "0.60", "0.90", "ResNet-18 step, lean", "0.80 (memory 0.58)", "0.80"]
    assert [cell.strip() for cell in line.strip("|").split("|")] == cells


def test_the_headlines_are_a_part_of_the_summary() -> None:
    rows = [
        _row("l1", 1, 1, 0.4, part="batch_norm", form="relu", dtype="fp32"),
        _row("NormRecorder", 1, 1, 1.6, part="optimizer"),
    ]
    assert "NormRecorder" in cpu.summary(rows)
    assert "NormRecorder" not in cpu.summary(rows, whole=False)
    assert "L1 BN+ReLU, fp32" in cpu.summary(rows, whole=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- bench:layers -->\nno end", "not closed"),
        ("<!-- bench:layers fp15 -->\n<!-- /bench -->", "no row is called 'fp15'"),
        ("<!-- bench:resnet50 -->\n<!-- /bench -->", "run `normmatters bench resnet50` first"),
    ],
)
def test_a_section_that_cannot_be_filled_is_an_error(results: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report.fill(text, results)


def test_the_command_tells_what_it_cannot_fill_and_writes_nothing(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads((results / "layers.json").read_text())
    (results / "cpu.json").write_text(json.dumps({**data, "bench": "cpu", "smoke": True}))
    (results / "damaged.json").write_text("{")
    good, page = results / "good.md", results / "page.md"
    good.write_text("<!-- bench:layers -->\n<!-- /bench -->")
    for name, message in (("cpu", "whose times mean nothing"), ("damaged", "Expecting property name")):
        page.write_text(f"<!-- bench:{name} -->\n<!-- /bench -->")
        with pytest.raises(SystemExit) as stopped:
            report.main([str(good), str(page), "--results", str(results)])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    assert good.read_text() == "<!-- bench:layers -->\n<!-- /bench -->"


def test_a_disk_that_is_full_leaves_the_page_as_it_was(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = results / "page.md"
    page.write_text("<!-- bench:layers -->\n<!-- /bench -->")

    def full(path: Path, text: str, **kwargs: str) -> None:
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SystemExit):
        report.main([str(page), "--results", str(results)])
    assert page.read_text() == "<!-- bench:layers -->\n<!-- /bench -->"


def test_a_printed_row_lines_up_with_its_head(results: Path) -> None:
    rows = json.loads((results / "layers.json").read_text())["rows"]
    head = report.text_header("layers")
    ok, wrong = report.text_row("layers", rows[1]), report.text_row("layers", rows[3])
    assert ok[: head.index("fwd ms") + 6].endswith("0.100")
    assert ok[: head.index("kept ÷ x") + 8].endswith("0.12")
    assert wrong.endswith("WRONG: dx is off | by 3")
    noted = report.text_row("layers", {**rows[1], "note": "no graph"})
    assert noted.startswith(ok)
    assert noted.endswith("  (no graph)")


def test_the_command_tells_what_it_cannot_draw(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads((results / "layers.json").read_text())
    other = [{key: value for key, value in row.items() if key != "layout"} for row in data["rows"]]
    (results / "layernorm.json").write_text(json.dumps({**data, "rows": other}))
    for name, message in (("absent", "No such file"), ("layernorm", "no rows of fp16, cl, relu to draw")):
        with pytest.raises(SystemExit) as stopped:
            roofline.main([str(results / f"{name}.json"), str(results / "x.svg")])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_picture_has_ours_the_peers_and_the_copy_line(results: Path, suffix: str) -> None:
    path = results / "img" / f"roofline.{suffix}"
    roofline.main([str(results / "layers.json"), str(path)])
    drawn = path.read_bytes()
    assert drawn.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in drawn
    with pytest.raises(ValueError, match="no rows of fp32, cl, relu"):
        roofline.draw(json.loads((results / "layers.json").read_text()), path, dtype="fp32")
