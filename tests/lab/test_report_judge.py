"""Which claims the runs bear out: every rule, on runs whose answer is known."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from normmatters.lab.claims import CLAIMS, Claim
from normmatters.lab.experiments import PRESETS, load_cell
from normmatters.lab.report import collect, judge_all, write_report
from normmatters.lab.report.judge import judge
from support.synthetic_runs import write_run

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


def test_a_claim_says_what_it_is_about() -> None:
    """ "… with branches that start at 0" stood below a claim about another network: the one before had no runs."""
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS)
    assert not [claim.text for claim in CLAIMS if claim.text.startswith(("…", "So "))]
