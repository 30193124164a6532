"""The report on run folders whose numbers are known: what is shown, how claims are judged, how a browser sees it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import warnings
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from synthetic_runs import write_all, write_run

from normmatters.lab.claims import CLAIMS, Claim
from normmatters.lab.config import to_json
from normmatters.lab.experiments import PRESETS, load_cell
from normmatters.lab.paper import EXPERIMENTS
from normmatters.lab.report import collect, judge_all, write_report
from normmatters.lab.report.collect import describe, differences
from normmatters.lab.report.figures import Chart, Series, legend_key, png, svg
from normmatters.lab.report.html import charts, slots
from normmatters.lab.report.judge import judge

EQUAL = Claim("E2", "equal", "equal", "fig2/resnet18_l1", "fig2/resnet18_l2", 0.3)
BETTER = Claim("E2", "better", "better", "fig2/resnet18_l1", "fig2/resnet18_l2")


def _pair(root: Path, a: float, b: float, seeds: int = 1, spread: float = 0.0) -> Path:
    for seed in range(seeds):
        off = spread * (seed - (seeds - 1) / 2)
        write_run(root, "fig2/resnet18_l1", seed=seed, final=a + off)
        write_run(root, "fig2/resnet18_l2", seed=seed, final=b + off)
    return root


def test_mean_and_deviation_over_seeds(tmp_path: Path) -> None:
    for seed, final in enumerate((0.90, 0.91, 0.95)):
        write_run(tmp_path, "fig1/wd_on", seed=seed, final=final)
    result = collect([tmp_path]).results["fig1/wd_on"]
    number = result.final("accuracy")
    assert number is not None
    assert number.mean == pytest.approx(92.0)
    assert number.sd == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert number.se == pytest.approx(number.sd / math.sqrt(3))
    assert number.text(2, "%") == "92.00 ± 2.65 %"
    last = result.curve("error")[-1]
    assert last == pytest.approx((6, 8.0, 5.0, 10.0))


def test_one_seed_has_the_noise_of_its_validation_set(tmp_path: Path) -> None:
    write_run(tmp_path, "fig1/wd_on", final=0.9)
    number = collect([tmp_path]).results["fig1/wd_on"].final("accuracy")
    assert number is not None
    assert number.sd is None
    assert number.se == pytest.approx(100 * math.sqrt(0.9 * 0.1 / 1297))  # of 1797, 500 are trained on


@pytest.mark.parametrize(
    ("claim", "a", "b", "verdict"),
    [
        (EQUAL, 0.902, 0.900, "holds"),
        (EQUAL, 0.903, 0.900, "holds"),  # the margin itself
        (EQUAL, 0.920, 0.900, "open"),  # beyond the margin, within the noise of 1297 images (2.2 points)
        (EQUAL, 0.950, 0.900, "fails"),
        (BETTER, 0.950, 0.900, "holds"),
        (BETTER, 0.910, 0.900, "open"),
        (BETTER, 0.850, 0.900, "fails"),
    ],
)
def test_verdicts_from_one_seed(tmp_path: Path, claim: Claim, a: float, b: float, verdict: str) -> None:
    found = judge(claim, collect([_pair(tmp_path, a, b)]))
    assert found.verdict == verdict
    assert f"{100 * a:.2f} − {100 * b:.2f}" in found.measured


def test_one_seeds_bleu_tells_nothing(tmp_path: Path) -> None:
    claim = Claim("E6", "near", "equal", "supp2/bwn", "supp2/ln", 0.8, "bleu")
    for cell, bleu in (("supp2/bwn", 20.0), ("supp2/ln", 30.0)):
        write_run(tmp_path, cell, bleu=bleu)
    verdict = judge(claim, collect([tmp_path]))
    assert (verdict.verdict, verdict.measured) == ("open", "20.0 − 30.0 = −10.0 (noise not known)")
    for cell, bleu in (("supp2/bwn", 20.2), ("supp2/ln", 30.2)):
        write_run(tmp_path, cell, seed=1, bleu=bleu)
    two = collect([tmp_path])
    assert judge(claim, two).verdict == "fails"
    number = two.results["supp2/ln"].final("bleu")
    assert number is not None
    assert number.se == number.sd  # as the page says
    page = write_report([tmp_path], tmp_path / "out", images=False).html.read_text()
    assert "of BLEU and perplexity the deviation of two seeds stands for it, and of one seed's it is not known" in page


def test_more_seeds_tell_more(tmp_path: Path) -> None:
    runs = collect([_pair(tmp_path, 0.92, 0.90, seeds=4, spread=0.001)])
    assert judge(EQUAL, runs).verdict == "fails"
    assert judge(BETTER, runs).verdict == "holds"


def test_runs_of_two_presets_are_not_compared(tmp_path: Path) -> None:
    """A network on CIFAR-10 was found worse than one on digits."""
    write_run(tmp_path, "fig2/resnet18_l1", preset="cifar", final=0.5)
    write_run(tmp_path, "fig2/resnet18_l2", preset="quick", final=0.9)
    found = judge(EQUAL, collect([tmp_path]))
    assert found.verdict == "open"
    assert found.measured.startswith("not trained alike: L1 on Tiny-ImageNet (200 classes, 64×64) (all), 100 epochs")
    for claim in CLAIMS:  # whose cells are trained alike in every preset
        for preset in PRESETS:
            runs = [load_cell(cell).config(preset) for cell in claim.cells]
            assert len({(run.data, run.optim.epochs) for run in runs}) == 1


def test_divergence_is_a_result(tmp_path: Path) -> None:
    write_run(tmp_path, "fig3/l2_fp32", final=0.9)
    write_run(tmp_path, "fig3/l2_fp16", diverge=True)
    write_run(tmp_path, "fig3/l2_fp16_acc32", final=0.89)
    runs = collect([tmp_path])
    verdicts = {v.claim.a: v for v in judge_all(runs) if v.claim.rule == "diverges"}
    assert verdicts["fig3/l2_fp16"].verdict == "holds"
    assert verdicts["fig3/l2_fp16_acc32"].verdict == "fails"
    assert "+1.00 points" in verdicts["fig3/l2_fp16_acc32"].measured
    assert not runs.unfinished
    page = write_report([tmp_path], tmp_path / "out", images=False).html.read_text()
    assert "<b>diverged</b>" in page


def test_a_seed_that_did_not_diverge_is_said(tmp_path: Path) -> None:
    claim = next(c for c in CLAIMS if c.rule == "diverges")
    write_run(tmp_path, claim.b)
    write_run(tmp_path, claim.a, seed=0, epochs=9)
    write_run(tmp_path, claim.a, seed=1, diverge=True)
    measured = judge(claim, collect([tmp_path])).measured
    assert measured == "loss not finite after 5 epochs, in 1 of 2 seeds"


def test_a_validation_loss_that_is_no_number_is_divergence_too(tmp_path: Path) -> None:
    write_run(tmp_path, "fig1/wd_on", final=0.9)
    folder = write_run(tmp_path, "fig1/corrected", final=0.9)
    *rows, last = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*rows, json.dumps(json.loads(last) | {"val_loss": None})]) + "\n")
    claim = Claim("E1", "ends there", "equal", "fig1/corrected", "fig1/wd_on", 0.3)
    verdict = judge(claim, collect([tmp_path]))
    assert (verdict.verdict, verdict.measured) == ("fails", "WD off, step-size correction diverged")


def test_a_run_that_goes_on_has_not_diverged_yet(tmp_path: Path) -> None:
    """Its validation loss may come back."""
    folder = write_run(tmp_path, "fig1/wd_on", finished=False)
    *rows, last = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*rows, json.dumps(json.loads(last) | {"val_loss": None})]) + "\n")
    runs = collect([tmp_path])
    assert len(runs.unfinished) == 1
    assert not runs.results["fig1/wd_on"].done


def test_one_seed_that_diverged_is_not_all_of_them(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path, "fig1/wd_on", seed=seed)
        write_run(tmp_path, "fig1/wd_off", seed=seed, diverge=seed == 1)
    runs = collect([tmp_path])
    verdict = judge(next(c for c in CLAIMS if c.a == "fig1/wd_on"), runs)
    assert (verdict.verdict, verdict.measured) == ("holds", "WD off diverged in 1 of 3 seeds")
    assert runs.results["fig1/wd_off"].text("accuracy") == "diverged in 1 of 3 seeds"


def test_following_is_judged_over_the_whole_course(tmp_path: Path) -> None:
    write_run(tmp_path, "fig1/wd_on", final=0.9, speed=2)
    write_run(tmp_path, "fig1/wd_off", final=0.9, speed=1)
    write_run(tmp_path, "fig1/corrected", final=0.9, speed=1.9)
    write_run(tmp_path, "fig1/norm_schedule", final=0.9, speed=1.05)
    found = {v.claim.a: v for v in judge_all(collect([tmp_path])) if v.claim.rule == "follows"}
    assert {a: v.verdict for a, v in found.items()} == {"fig1/corrected": "holds", "fig1/norm_schedule": "fails"}
    assert ", WD off by ×" in found["fig1/corrected"].measured


def test_l1s_gap_is_judged_from_the_runs_of_other_figures(tmp_path: Path) -> None:
    write_run(tmp_path, "table1/resnet56_bn", preset="short", final=0.9, speed=2)
    write_run(tmp_path, "supp1/resnet56_with_c", preset="short", final=0.9, speed=1)
    write_run(tmp_path, "l1_gap/l1_quieter", preset="short", final=0.9, speed=1.9)
    found = {v.claim.a: v for v in judge_all(collect([tmp_path])) if v.claim.rule == "follows"}
    assert {a: v.verdict for a, v in found.items()} == {"l1_gap/l1_quieter": "holds"}
    assert ", L1 by ×" in found["l1_gap/l1_quieter"].measured


@pytest.mark.parametrize("preset", ["quick", "cifar"])
def test_claims_about_cells_that_were_not_run_are_counted_and_not_listed(tmp_path: Path, preset: str) -> None:
    """With a command that runs them: of the preset of these runs, or, where it leaves a cell out, of the next one."""
    write_run(tmp_path, "fig2/resnet18_l1", preset=preset, final=0.90)
    write_run(tmp_path, "fig2/resnet18_l2", preset=preset, final=0.90)
    write_run(tmp_path, "fig2/resnet18_topk", preset=preset, finished=False)
    write_run(tmp_path, "fig4/wn", preset=preset, final=0.90)
    report = write_report([tmp_path], tmp_path / "out", images=False)
    shown = {v.claim.a: v.measured for v in report.verdicts}
    # What did not finish stays in sight. fig2 has four claims more, fig4 six; supp1, table2 and lean share cells
    # with them, but were not asked for.
    assert set(shown) == {"fig2/resnet18_l1", "fig2/resnet18_topk"}
    assert shown["fig2/resnet18_topk"] == "no finished run of fig2/resnet18_topk"
    how = {
        "quick": "`normmatters reproduce fig2 fig4 --preset quick` and `normmatters reproduce fig4 --preset short`",
        "cifar": "`normmatters reproduce fig2 fig4 --preset cifar`",
    }
    said = f"10 more claims are about cells that were not run here; these are run by {how[preset]}."
    assert report.not_run == said
    assert report.not_run in report.markdown.read_text()
    assert report.not_run.replace("`", "") in re.sub("</?code>", "", report.html.read_text())
    assert "**1 claims hold, 0 do not, 1 cannot be told from these runs.**" in report.markdown.read_text()


@pytest.mark.parametrize("preset", ["short", "cifar"])
def test_the_command_for_what_is_left_is_of_the_folders_preset(tmp_path: Path, preset: str) -> None:
    """Fig. 1 is the same run at both."""
    write_run(tmp_path / preset, "fig1/wd_on", preset=preset)
    report = write_report([tmp_path / preset], tmp_path / "out", images=False)
    assert report.not_run.endswith(f"`normmatters reproduce fig1 --preset {preset}`.")


def test_reaching_an_error_sooner(tmp_path: Path) -> None:
    write_run(tmp_path, "supp1/resnet56_with_c", final=0.95, speed=4, epochs=20)
    write_run(tmp_path, "supp1/resnet56_without_c", final=0.95, speed=1, epochs=20)
    claim = next(c for c in CLAIMS if c.rule == "sooner")
    found = judge(claim, collect([tmp_path]))
    first, second = map(int, re.findall(r"\d+", found.measured))
    assert found.verdict == "holds"
    assert second >= 2 * first


@pytest.mark.parametrize(("speed", "verdict"), [(4.0, "holds"), (0.75, "open")])
def test_what_was_not_reached_may_have_been_near(tmp_path: Path, speed: float, verdict: str) -> None:
    """Of an error that one run reached in epoch 16 of 20, and the other not, nothing says that it takes twice 16."""
    write_run(tmp_path, "supp1/resnet56_with_c", final=0.95, speed=speed, epochs=20)
    write_run(tmp_path, "supp1/resnet56_without_c", final=0.7, epochs=20)
    found = judge(next(c for c in CLAIMS if c.rule == "sooner"), collect([tmp_path]))
    assert found.verdict == verdict
    assert re.fullmatch(r"epoch \d+, without it not in 20", found.measured)


def test_cost_is_judged_on_a_gpu_only(tmp_path: Path) -> None:
    for device, factor in (("cpu", None), ("cuda", 2.0**30)):  # a peak of memory is known on a GPU only
        root = tmp_path / device
        for cell in ("l1", "l1_lean"):
            write_run(root, f"speed/{cell}", preset="short", device=device, seconds=1.0, memory=factor)
        write_run(root, "speed/native", preset="short", device=device, seconds=1.5, memory=factor and 2 * factor)
    claims = [c for c in CLAIMS if c.rule == "cheaper"]
    assert len(claims) == 3
    for claim in claims:
        assert judge(claim, collect([tmp_path / "cpu"])).verdict == "open"
        assert judge(claim, collect([tmp_path / "cuda"])).verdict == "holds"
    for claim in claims:  # another GPU is another time
        write_run(tmp_path / claim.text, claim.a, preset="short", device="a faster one", seconds=1.0, memory=2.0**30)
        verdict = judge(claim, collect([tmp_path / claim.text, tmp_path / "cuda" / "speed" / "native"]))
        assert verdict.verdict == "open"
        assert verdict.measured.endswith(": not on the same device")


def test_a_panel_with_nothing_of_its_own_is_not_drawn(tmp_path: Path) -> None:
    """A figure's references stand in each of its panels; one whose other cells have not run would show them again."""
    fig3 = next(e for e in EXPERIMENTS if e.name == "fig3")
    for cell in ("l2_fp32", "l1_fp32", "l1_fp16"):
        write_run(tmp_path, f"fig3/{cell}")
    assert [panel.title for panel, _ in charts(fig3, collect([tmp_path]))] == ["Validation error"]
    write_run(tmp_path, "fig3/l1_fp16_x128")
    assert [panel.title for panel, _ in charts(fig3, collect([tmp_path]))] == [
        "Validation error",
        "Inputs × 128 (ours)",
    ]
    fig1 = next(e for e in EXPERIMENTS if e.name == "fig1")
    write_run(tmp_path, "fig1/wd_on")
    drawn = [panel.metric for panel, _ in charts(fig1, collect([tmp_path]))]
    assert len(drawn) == len(set(drawn)) > 1  # the same cell, by another measure


def test_an_experiment_of_borrowed_cells_alone_is_not_shown(tmp_path: Path) -> None:
    """ResNet-56's L1 and L2 are in five experiments; only those that these runs were made for get a section."""
    for cell in ("table1/resnet56_bn", "supp1/resnet56_with_c"):
        write_run(tmp_path, cell, preset="cifar")
    assert set(collect([tmp_path]).experiments) == {"supp1", "table1", "table2"}  # Table 2 judges them
    write_run(tmp_path, "lean/resnet56_l1_lean", preset="cifar")
    lean = write_report([tmp_path], tmp_path / "report", images=False).markdown.read_text().partition("Lean memory")[2]
    assert "ResNet-56, L2" in lean


def test_figures_of_an_earlier_report_go(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "fig1/wd_on")
    folder = tmp_path / "out" / "figures"
    folder.mkdir(parents=True)
    for name in ("fig2-0.svg", "fig1-7.png", "mine.svg", "notes-1.txt", "photo-1.png"):
        (folder / name).write_text("old")
    report = write_report([tmp_path / "runs"], tmp_path / "out", images=False)
    kept = {"mine.svg", "notes-1.txt", "photo-1.png"}  # the user's own
    assert {p.name for p in folder.iterdir()} == kept | {p.name for p in report.figures}


def test_a_picture_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk left half a PNG in place of the last report's."""
    write_run(tmp_path / "runs", "fig1/wd_on")
    pictures = [p for p in write_report([tmp_path / "runs"], tmp_path / "out").figures if p.suffix == ".png"]
    before = [p.read_bytes() for p in pictures]
    assert all(data.startswith(b"\x89PNG") for data in before)
    (tmp_path / "runs/fig1/wd_on/seed0/metrics.jsonl").write_text('{"epoch": 1, "val_acc": 50.0}\n')

    def full(path: Path, data: bytes) -> None:
        if path.suffix == ".png":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("normmatters.lab.report.write_atomic", full)
    with pytest.raises(OSError, match="No space"):
        write_report([tmp_path / "runs"], tmp_path / "out")
    assert [p.read_bytes() for p in pictures] == before


def test_what_differs_from_the_paper_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "quick", "fig1/wd_on")
    write_run(tmp_path / "cifar", "fig1/wd_on", preset="cifar")
    quick = differences(collect([tmp_path / "quick"]).results.values())
    assert ("data", "scikit-learn digits (8×8 grey images)", "CIFAR-10") in quick
    assert {what for what, _, _ in quick} >= {"data", "network", "epochs"}
    assert differences(collect([tmp_path / "cifar"]).results.values()) == [("precision", "bf16 autocast", "fp32")]
    write_run(tmp_path / "full", "fig1/wd_on", preset="full")
    assert differences(collect([tmp_path / "full"]).results.values()) == []
    page = write_report([tmp_path / "full"], tmp_path / "a", images=False).html.read_text()
    assert "The paper’s own setting" in page
    page = write_report([tmp_path / "quick"], tmp_path / "b", images=False).html.read_text()
    assert "scikit-learn digits (8×8 grey images) instead of CIFAR-10" in page
    assert ("augment", "none", "yes") in quick


def test_a_setting_of_the_users_is_not_called_the_papers(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fig1/wd_on", preset="full")
    changed = ["model.norm=l1", "optim.momentum=0.5", "optim.nesterov=true", "optim.clip_norm=2", "data.dir=/elsewhere"]
    (folder / "config.json").write_text(to_json(load_cell("fig1/wd_on").config("full", 0, changed)))
    assert differences(collect([tmp_path]).results.values()) == [
        ("norm", "l1", "l2"),
        ("momentum", "0.5", "0.9"),
        ("nesterov", "yes", "no"),
        ("clip norm", "2", "usual"),
    ]
    page = write_report([tmp_path], tmp_path / "out", images=False).html.read_text()
    assert "The paper’s own setting" not in page
    assert "Norm: l1 instead of l2" in page


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.ids: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key == "id" and value:
                self.ids.append(value)
            if key in ("href", "src") and value:
                if value.startswith("#"):
                    self.targets.add(value[1:])
                elif not value.startswith("data:"):
                    self.outside.append(value)


def test_the_page_stands_alone_and_says_the_numbers(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_all(runs)
    write_run(runs, "fig1/wd_on", seed=7, error="no space left: <disk>")
    report = write_report([runs], tmp_path / "out", command="normmatters reproduce all")
    page = report.html.read_text()
    links = _Links()
    links.feed(page)
    assert links.outside == []
    assert links.targets <= set(links.ids)
    assert len(links.ids) == len(set(links.ids))
    for number in ("90.5 %", "75.3 %", "21.2 BLEU", "5.1 perplexity", "26.5 BLEU", "67 %"):  # the paper's
        assert number in page, number
    ours = report.collection.results["table1/resnet56_bn"].final("accuracy")
    assert ours is not None
    assert f"{ours.mean:.2f} ± {ours.sd:.2f} %" in page
    for verdict in report.verdicts:
        assert verdict.claim.rule_text.replace("'", "&#x27;") in page
    assert "no space left: &lt;disk&gt;" in page
    assert "normmatters reproduce all" in page
    text = report.markdown.read_text()
    assert f"{ours.mean:.2f} ± {ours.sd:.2f} %" in text
    assert text.count("## ") == 14  # thirteen experiments and what did not finish
    names = {p.name for p in report.figures}
    assert {"fig1-0.svg", "fig1-0.png", "supp2-0.svg"} <= names
    for path in report.figures:
        assert path.stat().st_size > 1000
        assert f"figures/{path.with_suffix('.svg').name}" in text


def test_runs_of_your_own_get_a_section(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fig1/wd_on", final=0.97)
    config = json.loads((folder / "config.json").read_text())
    config |= {"experiment": "my runs", "cell": "try", "label": "My <try>"}
    (folder / "config.json").write_text(json.dumps(config))
    report = write_report([tmp_path], tmp_path / "out", images=False)
    page = report.html.read_text()
    assert 'id="my runs"' in page
    assert "(figures/my%20runs-0.svg)" in report.markdown.read_text()
    assert "My &lt;try&gt;" in page
    assert "97.00 %" in page
    assert report.verdicts == ()


def test_every_device_that_ran_is_named(tmp_path: Path) -> None:
    """The first run's was said to be that of the whole report."""
    for seed, device in enumerate(("cpu", "NVIDIA H200", "cpu")):
        write_run(tmp_path, "fig1/wd_on", seed=seed, device=device)
    report = write_report([tmp_path], tmp_path / "out", images=False)
    assert "Device: cpu, NVIDIA H200 · torch: 2.13.0 ·" in report.markdown.read_text()


def test_a_translation_of_your_own_is_measured_by_perplexity(tmp_path: Path) -> None:
    """It was by the share of right tokens, of which the table said only "%", beside a figure of perplexities."""
    folder = write_run(tmp_path, "supp2/ln", ppl=7.25)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"experiment": "mine", "label": "My LSTM"}))
    report = write_report([tmp_path], tmp_path / "out", images=False)
    assert "| My LSTM | – | 7.25 perplexity | 1 |" in report.markdown.read_text()
    assert "7.25 perplexity" in report.html.read_text()


def test_the_regimes_of_cells_with_the_same_label_are_all_told(tmp_path: Path) -> None:
    """Figure 2 has an "L2" of ResNet-18 and one of ResNet-50, whose network was said to be that of all."""
    for cell in ("resnet18_l2", "resnet50_l2"):
        write_run(tmp_path, f"fig2/{cell}", preset="full")
    page = write_report([tmp_path], tmp_path / "out", images=False).html.read_text()
    told = "L2 (resnet18_l2): ResNet-18; L2 (resnet50_l2): ResNet-50"
    assert f"<tr><td>Network</td><td>{told}</td></tr>" in page


def test_an_lstm_has_as_many_layers_as_it_is_said_to_have(tmp_path: Path) -> None:
    write_run(tmp_path, "supp2/ln")
    here = describe(collect([tmp_path]).results["supp2/ln"].config)["network"]
    assert here == "1-layer LSTM with attention (d_model 48)"  # "2-layer LSTM with attention (layers 1, ...)"
    full = json.loads(to_json(load_cell("supp2/ln").config("full")))
    assert describe(full)["network"] == "2-layer LSTM with attention"


def test_text_of_many_lines_is_one_in_markdown(tmp_path: Path) -> None:
    """A label of two lines ended its table, and an error's second line its list."""
    folder = write_run(tmp_path, "fig1/wd_on")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"experiment": "mine", "label": "two\nlines"}))
    write_run(tmp_path, "fig1/wd_off", error="out of memory\n# tried to allocate 2 GiB")
    text = write_report([tmp_path], tmp_path / "out", images=False).markdown.read_text()
    assert "| two lines | – |" in text
    assert "- fig1/wd_off, seed 0: out of memory # tried to allocate 2 GiB\n" in text


def test_an_experiment_may_be_called_anything(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fig1/wd_on")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"experiment": 'R&D "x" (1)'}))
    report = write_report([tmp_path], tmp_path / "out", images=False)
    for figure in report.figures:
        ElementTree.parse(figure)
    page = report.html.read_text()
    assert '<section id="R&amp;D &quot;x&quot; (1)">' in page
    assert 'clip-path="url(#clip-R-D--x---1--0)"' in page


def test_a_cell_of_your_own_in_one_of_the_papers_experiments_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path, "fig1/wd_on", final=0.9)
    folder = write_run(tmp_path, "fig1/wd_off", final=0.97)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"cell": "mine", "label": "My own"}))
    report = write_report([tmp_path], tmp_path / "out", images=False)
    assert "| My own | – | 97.00 % | 1 |" in report.markdown.read_text()
    page = report.html.read_text()
    assert "97.00 %" in page
    assert "Validation error (your own)" in page


def test_a_run_of_your_own_may_have_the_name_of_a_borrowed_cell(tmp_path: Path) -> None:
    """Table 2's ResNet-56 is Table 1's: a file of the user's with its name was counted, and shown nowhere."""
    folder = write_run(tmp_path, "table1/resnet56_bn", final=0.97)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"experiment": "table2", "cell": "resnet56_l2"}))
    report = write_report([tmp_path], tmp_path / "out", images=False)
    assert "| 97.00 % | 1 |" in report.markdown.read_text()


def test_runs_from_before_a_setting_was_there_are_runs_of_the_same_cell(tmp_path: Path) -> None:
    old, _ = (write_run(tmp_path, "fig1/wd_on", seed=seed) for seed in (0, 1))
    config = json.loads((old / "config.json").read_text())
    del config["model"]["rho"]
    (old / "config.json").write_text(json.dumps(config))
    assert len(collect([tmp_path]).results["fig1/wd_on"].runs) == 2
    config["model"]["width"] = 2.0
    (old / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="different settings"):
        collect([tmp_path])
    config["model"]["width"], config["runtime"]["beam"] = 1.0, 1  # another search, another BLEU
    (old / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="different settings"):
        collect([tmp_path])
    config["runtime"] |= {"beam": 4, "compile": "compile"}
    (old / "config.json").write_text(json.dumps(config))
    assert len(collect([tmp_path]).results["fig1/wd_on"].runs) == 2


def test_bad_folders_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no run folders"):
        collect([tmp_path / "empty"])
    write_run(tmp_path / "a", "fig1/wd_on")
    write_run(tmp_path / "b", "fig1/wd_on", seed=1, preset="cifar")
    with pytest.raises(ValueError, match="different settings"):
        collect([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "a" / "fig1" / "wd_on" / "seed0" / "summary.json").write_text("{broken")
    with pytest.raises(ValueError, match=r"summary\.json"):
        write_report([tmp_path / "a"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_run_is_one_seed_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "runs", "fig1/wd_on")
    write_run(tmp_path / "runs", "fig1/wd_on", seed=1)
    monkeypatch.chdir(tmp_path)
    assert len(collect(["runs", tmp_path / "runs" / "fig1"]).runs) == 2
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(ValueError, match=r"fig1/wd_on has seed 0 more than once \(.*copy"):
        collect(["runs", "copy"])


def test_a_loss_of_zero_can_be_followed(tmp_path: Path) -> None:
    for cell in ("wd_on", "corrected", "wd_off"):
        folder = write_run(tmp_path, f"fig1/{cell}")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows[-1]["train_loss"] = 1.0 if cell == "wd_off" else 0.0
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    claim = next(c for c in CLAIMS if c.rule == "follows" and c.a == "fig1/corrected")
    assert judge(claim, collect([tmp_path])).verdict == "holds"


def test_who_diverges_does_not_follow(tmp_path: Path) -> None:
    write_run(tmp_path, "fig1/wd_on")
    write_run(tmp_path, "fig1/wd_off", speed=0.5)
    write_run(tmp_path, "fig1/corrected", diverge=True)
    claim = next(c for c in CLAIMS if c.rule == "follows" and c.a == "fig1/corrected")
    verdict = judge(claim, collect([tmp_path]))
    assert (verdict.verdict, verdict.measured) == ("fails", "WD off, step-size correction diverged")


def test_images_of_your_own_are_not_imagenet(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fig2/resnet18_l2", preset="full")
    assert collect([tmp_path]).runs[0].val_examples == 50_000
    config = json.loads((folder / "config.json").read_text())
    config["data"]["dir"] = "/home/me/birds"
    (folder / "config.json").write_text(json.dumps(config))
    collection = collect([tmp_path])
    assert collection.runs[0].val_examples is None
    assert differences(collection.results.values()) == [("data", "birds", "ImageNet")]


@pytest.mark.parametrize(
    ("cell", "folder", "told"),
    [
        ("fig2/resnet18_l2", ".", "images"),  # what --data-dir names itself
        ("fig2/resnet18_l2", "imagenet/", "ImageNet"),
        ("supp2/ln", "wmt14/", "WMT14 de-en"),
        ("supp2/ln", ".", "parallel text de-en"),
        ("supp2/ln", None, "Multi30k de-en"),  # the usual folder
    ],
)
def test_a_data_set_is_called_by_its_folder(cell: str, folder: str | None, told: str) -> None:
    config = json.loads(to_json(load_cell(cell).config("full")))
    config["data"]["dir"] = folder
    assert describe(config)["data"] == told


def test_more_digits_than_there_are_leave_a_validation_set(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fig1/wd_on")
    config = json.loads((folder / "config.json").read_text())
    config["data"]["train_size"] = 5000
    (folder / "config.json").write_text(json.dumps(config))
    number = collect([tmp_path]).results["fig1/wd_on"].final("accuracy")
    assert number is not None
    assert number.se == pytest.approx(100 * math.sqrt(0.9 * 0.1 / 360))


@pytest.mark.parametrize(
    "line",
    [b'{"epoch": 7, "val_a', b"null\n", b'{"val_acc": 3.0}\n', b"\xff\xfe\n", b'{"epoch": NaN, "val_acc": 3.0}\n'],
)
def test_a_damaged_line_is_left_out(tmp_path: Path, line: bytes) -> None:
    folder = write_run(tmp_path, "fig1/wd_on", finished=False)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line)
    runs = collect([tmp_path])
    assert len(runs.unfinished) == 1
    assert [p[0] for p in runs.results["fig1/wd_on"].curve("error")] == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_that_lost_epochs_is_told(tmp_path: Path) -> None:
    """Its last line would be taken for the run's end, and the accuracy of that epoch for its result."""
    folder = write_run(tmp_path, "fig1/wd_on")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "epoch": 6}))
    assert len(collect([tmp_path]).runs[0].metrics) == 6
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:4]))
    with pytest.raises(ValueError, match=r"seed0: finished with 6 epochs, but 4 are left .* remove summary.json"):
        collect([tmp_path])


def test_a_run_that_diverged_does_not_squeeze_the_others(tmp_path: Path) -> None:
    """Beside a perplexity of 1e304 those of 5 and 20 were one line, at the foot of the figure."""
    write_run(tmp_path, "supp2/ln")
    folder = write_run(tmp_path, "supp2/bwn", diverge=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row | {"val_ppl": 1e304}) + "\n" for row in rows))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's, about an overflow
        report = write_report([tmp_path], tmp_path / "out")
    drawn = next(p for p in report.figures if p.name == "supp2-0.svg").read_text()
    assert re.findall(r'text-anchor="end">([^<]*)', drawn) == ["5", "10", "20"]
    assert "Bounded weight norm ends at 1e304" in drawn
    alone = Chart(
        "title", "ppl", (Series("a", ((1.0, 2e4, 2e4, 2e4), (2.0, 1e4, 1e4, 1e4)), 0, diverged=True),), log=True
    )
    assert ">1e4<" in svg(alone)  # which has a frame if it is the only one


def test_a_claim_says_what_it_is_about() -> None:
    """ "… with branches that start at 0" stood below a claim about another network: the one before had no runs."""
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS)
    assert not [claim.text for claim in CLAIMS if claim.text.startswith(("…", "So "))]


def test_a_cell_has_one_look_in_all_panels_and_in_the_table() -> None:
    """The table's key of bounded weight norm in an LSTM was the line of no norm at all."""
    for e in EXPERIMENTS:
        for panel in e.panels:
            assert {name: slots(e)[name] for name in panel.cells} == {name: i for i, name in enumerate(panel.cells)}


def test_no_two_lines_of_a_panel_look_alike() -> None:
    """The seventh had the first one's colour and dash."""
    most = max(len(panel.cells) for e in EXPERIMENTS for panel in e.panels)
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


def test_a_png_has_the_ticks_of_the_svg_and_its_label_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn = []
    plain = FigureCanvasAgg.print_png
    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda self, *args: (drawn.append(self), plain(self, *args)))
    points = tuple((float(e), y, y, y) for e, y in enumerate((65.0, 20.0, 9.0), 1))
    chart = Chart("t", "validation error", (Series("a", points, 0),), log=True, unit="%")
    assert png(chart).startswith(b"\x89PNG")
    (canvas,) = drawn
    (axes,) = canvas.figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels(which="both")]
    assert labels == ["10", "20", "50"]
    assert all(f">{label}</text>" in svg(chart) for label in labels)
    assert axes.yaxis.label.get_window_extent(canvas.get_renderer()).x0 >= 0


_CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
_PROBE = """<script>addEventListener("load", function () {
  var svg = document.querySelector("svg.chart"), box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 20}));
  document.querySelector(".legend button").click();
  var out = {wide: document.documentElement.scrollWidth, width: innerWidth, errors: window.errors,
    tip: document.querySelector(".tip").textContent, off: document.querySelectorAll(".series.off").length,
    back: getComputedStyle(document.body).backgroundColor};
  document.getElementById("theme").click();
  out.switched = getComputedStyle(document.body).backgroundColor;
  document.title = JSON.stringify(out);
});</script></body>"""


@pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it(tmp_path: Path, width: int) -> None:
    runs = tmp_path / "runs"
    write_all(runs, seeds=1)
    page = write_report([runs], tmp_path / "out", images=False).html
    text = page.read_text().replace(
        "<head>", "<head><script>window.errors=[];onerror=function(m){errors.push(m)}</script>"
    )
    # A window cannot be narrower than 500 px in Chromium; a frame can.
    (tmp_path / "probe.html").write_text(text.replace("</body>", _PROBE))
    frame = f'<iframe id="f" src="probe.html" style="width:{width}px;height:900px;border:0"></iframe>'
    wait = "f.onload=function(){setTimeout(function(){document.body.append(f.contentDocument.title)},300)}"
    (tmp_path / "frame.html").write_text(f"<body>{frame}<script>var f=document.getElementById('f');{wait}</script>")
    command = [str(_CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--virtual-time-budget=4000"]
    done = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "frame.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r"\{.*\}", done.stdout.split("</iframe>")[-1].split("</script>")[-1])
    assert found is not None, done.stdout[-500:]
    seen = json.loads(found[0].replace("&amp;", "&"))
    assert seen["errors"] == []
    assert seen["width"] == width
    assert seen["wide"] <= width  # no sideways scrolling
    assert "epoch" in seen["tip"]
    assert "%" in seen["tip"]
    assert seen["off"] >= 1
    assert seen["back"] != seen["switched"]
