"""Published runs say what their folders said, and pages are redrawn from them alone."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from normmatters.lab.claims import BENCHMARKS, CLAIMS
from normmatters.lab.config import from_dict, run_path
from normmatters.lab.figures import TABLES, Row
from normmatters.lab.publish import END, SECTIONS, publish, redraw
from normmatters.lab.report import collect, judge_all
from normmatters.lab.report.intervals import difference
from normmatters.lab.report.tables import judge_benchmark, table
from normmatters.lab.run import train
from support.lab_runs import small_run
from support.markdown_pages import ROOT
from support.synthetic_runs import write_run


def test_a_published_run_is_the_run(tmp_path: Path) -> None:
    settings = {"epochs": 2, "lr": 2.0**-16}  # kept to the last digit: a setting is not a measurement
    config = small_run(experiment="mine", cell="one", seed=2, optim=settings)
    train(config, tmp_path / "runs" / "a")
    (file,) = publish([tmp_path / "runs"], tmp_path / "results" / "quick")
    assert file == tmp_path / "results" / "quick" / "mine" / "one" / "seed2.run.jsonl"
    (folder,), (kept,) = collect([tmp_path / "runs"]).runs, collect([tmp_path / "results"]).runs
    assert kept.config == folder.config == from_dict(json.loads((tmp_path / "runs" / "a" / "config.json").read_text()))
    assert (kept.cell_id, kept.seed, kept.finished) == ("mine/one", 2, True)
    assert kept.environment["torch"] == folder.environment["torch"]
    assert "platform" not in kept.environment  # of the machine, not of the result
    assert len(kept.metrics) == 2
    for ours, theirs in zip(kept.metrics, folder.metrics):
        assert ours == pytest.approx({k: v for k, v in theirs.items() if k != "time_per_step"}, rel=1e-5)
    assert file.stat().st_size < 5000
    assert publish([tmp_path / "runs"], tmp_path / "results" / "quick") == [file]  # again is no error


def test_what_did_not_finish_is_not_a_result(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "fig1/wd_on")
    write_run(tmp_path / "runs", "fig1/wd_off", finished=False)
    write_run(tmp_path / "runs", "fig3/l2_fp16", diverge=True)
    files = publish([tmp_path / "runs"], tmp_path / "kept")
    assert [f.parent.name for f in files] == ["wd_on", "l2_fp16"]
    assert collect([tmp_path / "kept"]).results["fig3/l2_fp16"].diverged


def test_what_is_not_a_result_of_this_preset_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "short", "fig1/wd_on", preset="short", finished=False)
    with pytest.raises(ValueError, match="none of the runs has finished, there are 1"):
        publish([tmp_path / "runs"], tmp_path / "results" / "short")
    write_run(tmp_path / "runs" / "short", "fig1/wd_off", preset="short")
    with pytest.raises(
        ValueError, match="wd_off/seed0 is of the preset short, not cifar: publish it with --preset short"
    ):
        publish([tmp_path / "runs" / "short" / "fig1"], tmp_path / "results" / "cifar")
    assert not (tmp_path / "results").exists()
    assert len(publish([tmp_path / "runs"], tmp_path / "results" / "short")) == 1
    # `normmatters train` puts no preset into a run's path: the settings tell
    write_run(tmp_path / "trained", "fig1/wd_on", preset="quick")
    with pytest.raises(ValueError, match="seed0 is of the preset quick, not cifar: publish it with --preset quick"):
        publish([tmp_path / "trained"], tmp_path / "results" / "cifar")
    assert len(publish([tmp_path / "trained"], tmp_path / "results" / "quick")) == 1


def test_other_settings_are_not_overwritten(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fig1/wd_on", preset="quick")
    write_run(tmp_path / "b", "fig1/wd_off", preset="cifar")
    write_run(tmp_path / "b", "fig1/wd_on", preset="cifar")
    (file,) = publish([tmp_path / "a"], tmp_path / "kept")
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"other settings than .*data\.name: "):
        publish([tmp_path / "b"], tmp_path / "kept")
    assert file.read_bytes() == before
    assert len(list((tmp_path / "kept").rglob("*.jsonl"))) == 1


def test_seeds_of_other_settings_are_not_put_beside_each_other(tmp_path: Path) -> None:
    """No page could be drawn from them any more."""
    write_run(tmp_path / "a", "fig1/wd_on", seed=0, preset="quick")
    write_run(tmp_path / "b", "fig1/wd_on", seed=1, preset="cifar")
    publish([tmp_path / "a"], tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"seed0.run.jsonl holds a run of other settings than .*seed1 \(data.name: dig"
    ):
        publish([tmp_path / "b"], tmp_path / "out")
    assert [f.name for f in tmp_path.glob("out/*/*/*")] == ["seed0.run.jsonl"]
    write_run(tmp_path / "c", "fig1/wd_on", seed=2, preset="quick")
    assert len(publish([tmp_path / "c"], tmp_path / "out")) == 1


def test_pages_are_redrawn_from_the_files_alone(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / "runs", "fig1/wd_on", seed=seed, final=0.905 + 0.001 * seed, preset="cifar")
    for seed in range(2):
        write_run(tmp_path / "runs", "fig1/wd_off", seed=seed, final=0.893 + 0.001 * seed, preset="cifar")
    for cell in ("supp1/resnet56_with_c", "fig1/corrected"):
        write_run(tmp_path / "others", cell, preset="short")
    results, readme = tmp_path / "results", tmp_path / "README.md"
    publish([tmp_path / "runs"], results / "cifar")
    publish([tmp_path / "others"], results / "short")
    shutil.rmtree(tmp_path / "runs")
    readme.write_text(f"# Project\n<!-- numbers: E1 -->\nold\n{END}\nmore\n<!-- numbers: E6 E8 -->{END}\n")
    reports = redraw(results, [readme])
    assert [r.html for r in reports] == [results / p / "report" / "report.html" for p in ("short", "cifar")]
    text = (results / "README.md").read_text()
    assert "| Figure 1 | WD on | 90.5 % | 90.60 ± 0.10 % | 3 | VGG11 on CIFAR-10, 80 epochs, bf16 autocast |" in text
    assert "67 epochs" in text
    claims = readme.read_text()
    assert claims.startswith("# Project\n<!-- numbers: E1 -->\n| |")
    assert claims.endswith(f"{END}\nmore\n<!-- numbers: E6 E8 -->\nNo runs of it are published.\n{END}\n")
    assert "old" not in claims
    measured = "90.60 − 89.35 = +1.25 (no interval from 2 seeds)"
    assert f"| – | Weight decay improves a network with batch norm (E1) | {measured} | 3 and 2 | `cifar` |" in claims
    assert "2 to 3 seeds each" in reports[1].html.read_text()
    assert "no finished run" not in claims
    assert claims.count("Weight decay improves") == 1
    assert "| – | Norm schedule ends where weight decay does (E1) | not run: `fig1/norm_schedule` | | |" in claims
    assert "| – | Step-size correction ends where weight decay does (E1) | not run at one preset | | |" in claims
    assert (results / "cifar" / "report" / "figures" / "fig1-0.svg").is_file()
    assert "none" in (results / "picture.svg").read_text()
    verdicts = {v.claim.text: v.verdict for v in judge_all(collect([results / "cifar"]))}
    assert verdicts["Weight decay improves a network with batch norm"] == "open"
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    redraw(results, [readme])
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_label_may_hold_any_sign(tmp_path: Path) -> None:
    """U+2028 and U+0085 end a line for Python, and the file was "not JSON"; a bar ended a cell of the tables."""
    folder = write_run(tmp_path / "runs", "fig1/wd_on")
    config = json.loads((folder / "config.json").read_text())
    label = "|w|\u2028\u0085‖w‖"
    (folder / "config.json").write_text(json.dumps(config | {"experiment": "mine", "label": label}))
    publish([tmp_path / "runs"], tmp_path / "results" / "quick")
    (run,) = collect([tmp_path / "results" / "quick"]).runs
    assert run.config.label == label
    redraw(tmp_path / "results")
    assert "| mine | \\|w\\|" in (tmp_path / "results" / "README.md").read_text()


@pytest.mark.parametrize("name", ["..", "../../elsewhere", "/etc", "a\\b", ""])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """A run folder, or a config, may be somebody else's."""
    folder = write_run(tmp_path / "runs", "fig1/wd_on")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"experiment": name}))
    with pytest.raises(ValueError, match="experiment names a folder"):
        publish([tmp_path / "runs"], tmp_path / "results" / "quick")
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    with pytest.raises(ValueError, match="cell names a folder"):
        run_path(tmp_path, from_dict(config | {"cell": name}))


def test_a_damaged_run_leaves_every_page_as_it_was(tmp_path: Path) -> None:
    """The presets before its own had been redrawn when it was told."""
    for preset in ("short", "cifar"):
        write_run(tmp_path / preset, "supp1/resnet56_with_c", preset=preset)
        publish([tmp_path / preset], tmp_path / "results" / preset)
    (file,) = (tmp_path / "results" / "cifar").rglob("*.run.jsonl")
    file.write_text("{")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        redraw(tmp_path / "results")
    assert {p.name for p in (tmp_path / "results").iterdir()} == {"short", "cifar"}
    assert not list((tmp_path / "results").rglob("report"))


def publish_l1(root: Path, gaps: dict[str, float]) -> Path:
    """Published runs of L1 that end so many points below L2's, by preset."""
    for preset, gap in gaps.items():
        for seed in range(3):
            write_run(root / preset, "table1/resnet56_bn", seed=seed, final=0.9 + seed / 1000, preset=preset)
            final = 0.9 - gap / 100 + seed / 1100
            write_run(root / preset, "supp1/resnet56_with_c", seed=seed, final=final, preset=preset)
        publish([root / preset], root / "results" / preset)
    page = root / "page.md"
    page.write_text(f"<!-- numbers: headlines -->{END}\n<!-- numbers: E9 -->{END}\n")
    redraw(root / "results", [page])
    return page


def test_a_headline_comes_once_from_its_longest_runs(tmp_path: Path) -> None:
    headlines, whole, _ = publish_l1(tmp_path, {"short": 1.0, "cifar": 3.0}).read_text().split(END)
    rows = [[line for line in part.splitlines() if "ResNet-56: L1 equals L2" in line] for part in (headlines, whole)]
    assert [len(lines) for lines in rows] == [1, 2]
    assert "= −3.0" in rows[0][0]
    assert "= −1.0" not in rows[0][0]
    assert "[ResNet-56: L1 equals L2](docs/results.md#e9-e10-l1-instead-of-l2)" in rows[0][0]
    assert "= −3.0" in rows[1][0]
    assert "= −1.0" in rows[1][1]
    assert "L2 in fp16 diverges, fp32 sums](docs/results.md#e3-batch-norm-in-half-precision) | not run |" in headlines


def test_a_headline_keeps_shorter_runs_that_disagree(tmp_path: Path) -> None:
    headlines, *_ = publish_l1(tmp_path, {"short": 3.0, "cifar": 0.0}).read_text().split(END)
    (line,) = [line for line in headlines.splitlines() if "ResNet-56: L1 equals L2" in line]
    assert line.startswith("| ✓, ✗ |")
    assert "; `short`: 87" in line
    assert line.endswith("| 3; 3 | `cifar`, `short` |")


def test_readme_has_at_most_twelve_rows_and_not_only_what_holds() -> None:
    """One for each thing the paper says: of Fig. 1 and Fig. 3 what is the point there, and every kind of network."""
    headlines = [claim for claim in CLAIMS if claim.headline]
    assert len(headlines) <= 12
    checks = {claim.check for claim in headlines}
    assert checks == {claim.check for claim in CLAIMS if claim.check.startswith("E")} - {"E4"}  # ResNet-50 has no runs
    assert ("E1", "equal") in {(claim.check, claim.rule) for claim in headlines}
    assert {claim.a for claim in headlines if claim.rule == "diverges"} == {"fig3/l2_fp16_acc32"}


def test_a_table_is_drawn_from_the_runs_of_its_preset(tmp_path: Path) -> None:
    """Means and single seeds; epochs to a target; a cell that was not run, and one that diverged."""
    for preset, add in (("short", 0.0), ("cifar", 0.05)):
        for seed in range(2):
            write_run(tmp_path / preset, "fig2/resnet18_l2", seed=seed, final=0.8 + add + seed / 100, preset=preset)
        write_run(tmp_path / preset, "fig2/resnet18_l1", final=0.75, preset=preset)
        write_run(tmp_path / preset, "fig2/resnet18_topk", diverge=True, preset=preset)
        publish([tmp_path / preset], tmp_path / "results" / preset)
    page = tmp_path / "page.md"
    page.write_text(f"<!-- numbers: table fig2 -->{END}\n<!-- numbers: table s4 -->{END}\n")
    redraw(tmp_path / "results", [page])
    _, head, _, accuracy, loss, *_ = page.read_text().splitlines()
    assert head == "| | L2 | L1 | Top(10) | L∞ | L∞, exact constant |"
    assert accuracy == ("| Validation accuracy, % | 80.50 (80.00, 81.00) | 75.00 | diverged | not run | not run |")
    assert loss.startswith("| Training loss | 0.11 | 0.11 | diverged |")
    assert "No runs of the preset small are published." in page.read_text()


def test_a_table_says_when_a_target_was_reached(tmp_path: Path) -> None:
    for seed, final in enumerate((0.7, 0.9)):
        folder = write_run(tmp_path / "short", "supp1/resnet56_with_c", seed=seed, preset="short", epochs=2)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows[0]["val_acc"], rows[1]["val_acc"] = 60.0, 100 * final  # 40 % error, then 10 %: 20 % is half way
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (line,) = [row for row in TABLES["constant_resnet56"].rows if row.target]
    (_, _, text) = table(replace(TABLES["constant_resnet56"], rows=(line,)), collect([tmp_path / "short"]))
    assert text == "| 20 % error after epoch | not run | not run | never, 1.5 | not run | not run | not run |"


def test_a_table_needs_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="table fig2, Training loss: expected a cell for each of"):
        replace(TABLES["fig2"], rows=(Row("Training loss", "loss", cells=("fig2/resnet18_l1",)),))


@pytest.mark.parametrize(
    ("without", "verdict", "says"),
    [
        (7.6, "holds", "10.0 with, 7.6 ms without: 24 % less"),
        (7.7, "fails", "10.0 with, 7.7 ms without: 23 % less"),
        (None, "open", "not measured"),
    ],
)
def test_a_benchmark_is_judged_by_what_goes(tmp_path: Path, without: float | None, verdict: str, says: str) -> None:
    """24 % or more of a step of 10 ms."""
    claim = next(c for c in BENCHMARKS if c.field == "graph_ms")
    rows = [{**claim.where, "variant": claim.a, "status": "ok", "graph_ms": 10.0}]
    rows += [{**claim.where, "variant": claim.b, "status": "ok", "graph_ms": without}]
    rows += [{**claim.where, "mode": "compiled", "variant": claim.b, "status": "ok", "graph_ms": 1.0}]
    (tmp_path / f"{claim.bench}.json").write_text(json.dumps({"rows": rows}))
    assert judge_benchmark(claim, tmp_path) == (verdict, says)
    assert judge_benchmark(claim, tmp_path / "nowhere") == ("open", "not measured")


def test_numbers_that_readme_says_by_hand_are_those_of_the_runs() -> None:
    """The head of README, the picture's caption, and the note of a claim; `make report` does not write these."""
    found = {id: result for id, result in collect([ROOT / "results" / "cifar"]).results.items() if result.done}
    readme = (ROOT / "README.md").read_text()
    ends = {name: found[f"fig1/{name}"].final("accuracy") or 0 for name in ("wd_on", "wd_off", "wd_free", "corrected")}
    (line,) = [line for line in readme.splitlines() if "with `WeightDecayFreeSGD`, " in line]
    assert re.findall(r"(\d\d\.\d\d) %", line) == [f"{ends[name]:.2f}" for name in ("wd_free", "wd_on", "wd_off")]
    assert f"costs {ends['wd_on'] - ends['wd_off']:.1f} points" in readme
    gap = difference(found["fig1/corrected"].by_seed("accuracy"), found["fig1/wd_on"].by_seed("accuracy"))
    assert f"ends {-gap.mean:.1f} points below it (±{gap.e:.1f})" in readme
    (claim,) = [claim for claim in CLAIMS if claim.text == "LSTM: bounded weight norm near layer norm"]
    assert f"it has {found['supp2/soft_ln'].final('bleu'):.1f} after 60 epochs" in claim.note


def test_headlines_link_to_sections_that_exist() -> None:
    text = (Path(__file__).parents[2] / "docs" / "results.md").read_text()
    for heading in text.splitlines():
        if heading.startswith("## E"):
            checks, _, _ = heading.removeprefix("## ").partition(":")
            slug = re.sub(r"[^\w\- ]", "", heading.removeprefix("## ").lower()).replace(" ", "-")
            assert [SECTIONS[check] for check in checks.split(", ")] == [slug] * len(checks.split(", "))


def test_each_section_opens_with_what_the_paper_says() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    sections = [part for part in text.split("\n## ")[1:] if re.match(r"[ES]\d", part)]
    assert len(sections) == 17
    for section in sections:
        opening = section.partition(END)[2].strip().partition("\n\n")[0]
        assert "paper" in opening or section.startswith(("S3", "S7")), section[:40]  # these two ask about E1


def test_claims_that_came_after_their_runs_are_listed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for cell, time in (("wd_on", "2026-11-15T19:55:47Z"), ("wd_off", "2026-11-15T19:55:47Z"), ("wd_free", "")):
        folder = write_run(tmp_path / "cifar", f"fig1/{cell}", preset="cifar")
        (folder / "environment.json").write_text(json.dumps({"time": time}))
    publish([tmp_path / "cifar"], tmp_path / "results" / "cifar")
    page.write_text(f"<!-- numbers: dates -->{END}\n")
    redraw(tmp_path / "results", [page])
    text = page.read_text()
    late = "| Weight-decay-free SGD ends where weight decay does (ours) (E1) | 2026-11-15 20:17 | 2026-11-15 19:55 |"
    assert late in text
    assert "| Weight decay improves" not in text


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        redraw(tmp_path / "nowhere")
    (tmp_path / "README.md").write_text("a project's")
    with pytest.raises(ValueError, match="no published runs below it"):
        redraw(tmp_path)
    assert (tmp_path / "README.md").read_text() == "a project's"
    write_run(tmp_path / "runs", "fig1/wd_on")
    (file,) = publish([tmp_path / "runs"], tmp_path / "quick")
    readme = tmp_path / "README.md"
    for text, message in (
        (f"{END}\n<!-- numbers: E1 -->\n", "expected parts between"),
        ("nothing", "expected parts between"),
        (f"<!-- numbers: E1 F7 -->{END}", "E1 F7"),
        (f"<!-- numbers: table s44 -->{END}", "table s44 -->; did you mean 's4'"),
    ):
        readme.write_text(text)
        with pytest.raises(ValueError, match=message):
            redraw(tmp_path, [readme])
        assert readme.read_text() == text
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=r"picture.png: expected a page of text"):
        redraw(tmp_path, [tmp_path / "picture.png"])
    assert not (tmp_path / "quick" / "report").exists()
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, "null"]))
    with pytest.raises(ValueError, match=f"line {len(lines) + 1}: expected a JSON object, got null"):
        collect([tmp_path / "quick"])
    file.write_text('{"config": {}}\n')
    with pytest.raises(ValueError, match="not the config of a run"):
        collect([tmp_path / "quick"])
    file.write_text("\n".join(lines[1:]))
    with pytest.raises(ValueError, match="it has no config"):
        collect([tmp_path / "quick"])
    file.write_text(lines[0][:50])
    with pytest.raises(ValueError, match="line 1: not JSON"):
        collect([tmp_path / "quick"])
    file.write_bytes(b'{"config": "\xff"}\n')
    with pytest.raises(ValueError, match=r"seed0.run.jsonl, line 1: not JSON: 'utf-8' codec"):
        collect([tmp_path / "quick"])


def test_the_projects_own_pages_are_what_redrawing_gives(tmp_path: Path) -> None:
    pages = ["README.md", "docs/results.md"]
    sources = [*(ROOT / "results").rglob("*.run.jsonl"), *(ROOT / "results" / "bench").glob("*.json")]
    for file in [*sources, *(ROOT / page for page in pages)]:
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    redraw(tmp_path / "results", [tmp_path / page for page in pages])
    for page in [*pages, "results/README.md"]:
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), f"{page}: run `make report`"
