"""Which claims the runs bear out: every rule, on runs whose answer is known."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from normmatters.lab import config
from normmatters.lab.cells import PRESETS, load_cell
from normmatters.lab.claims import CLAIMS, Claim, Rule
from normmatters.lab.norms import NormFactory
from normmatters.lab.report import collect, judge_all, write_report
from normmatters.lab.report.intervals import Interval, difference, t_quantile
from normmatters.lab.report.judge import BEYOND_DOUBT, compare, compare_ratio, judge
from support.synthetic_runs import write_run

EQUAL = Claim("E2", "equal", "equal", "fig2/resnet18_l1", "fig2/resnet18_l2", 0.3)
NEAR = Claim("E2", "near", "near", "fig2/resnet18_l1", "fig2/resnet18_l2", 0.3)
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
    assert result.final("accuracy") == pytest.approx(92.0)
    assert result.text("accuracy") == f"92.00 ± {math.sqrt((4 + 1 + 9) / 2):.2f} %"
    last = result.curve("error")[-1]
    assert last == pytest.approx((6, 8.0, 5.0, 10.0))


@pytest.mark.parametrize(
    ("rule", "low", "high", "verdict"),
    [
        ("equal", -0.3, 0.3, "holds"),  # the margin itself
        ("equal", -0.31, 0.2, "open"),
        ("equal", 0.29, 0.31, "open"),
        ("equal", 0.31, 0.5, "fails"),
        ("equal", -0.5, -0.31, "fails"),
        ("equal", -0.31, 0.31, "open"),
        ("near", -0.3, 9.0, "holds"),  # better is never a failure
        ("near", 5.0, 9.0, "holds"),
        ("near", -0.31, 9.0, "open"),
        ("near", -9.0, -0.3, "open"),
        ("near", -9.0, -0.31, "fails"),
        ("better", 0.01, 0.5, "holds"),
        ("better", 0.0, 0.5, "open"),
        ("better", -0.5, 0.0, "open"),
        ("better", -0.5, -0.01, "fails"),
    ],
)
def test_each_rule_at_its_borders(rule: Rule, low: float, high: float, verdict: str) -> None:
    assert compare(rule, 0.3, low, high) == verdict


@pytest.mark.parametrize(
    ("mean", "e", "above", "verdict"),
    [
        (2.2, 1.1, True, "holds"),
        (2.19, 1.1, True, "open"),
        (1.8, 1.1, True, "fails"),
        (1.0, None, True, "open"),
        (1.8, 1.1, False, "holds"),
        (1.9, 1.1, False, "open"),
        (2.3, 1.1, False, "fails"),
    ],
)
def test_a_ratio_at_its_borders(mean: float, e: float | None, above: bool, verdict: str) -> None:
    """The interval is from mean ÷ e to mean × e, the border 2."""
    ratios = Interval(math.log(mean), None if e is None else math.log(e), "")
    assert compare_ratio(ratios, 2.0, above=above) == verdict


def test_an_interval_is_students() -> None:
    a, b = {0: 90.0, 1: 91.0, 2: 92.0}, {0: 89.0, 1: 90.5, 2: 90.5}
    paired = difference(a, b)
    assert paired.mean == pytest.approx(1.0)
    assert paired.e == pytest.approx(4.302653 * 0.5 / math.sqrt(3), rel=1e-6)
    assert paired.noise == "3 paired seeds"
    other = difference(a, {3: 89.0, 4: 90.5, 5: 90.5, 6: 90.0})  # Welch's: other seeds, and another number of them
    variances = 1.0 / 3, 0.5 / 4
    df = sum(variances) ** 2 / (variances[0] ** 2 / 2 + variances[1] ** 2 / 3)
    assert other.e == pytest.approx(t_quantile(df) * math.sqrt(sum(variances)))
    assert other.noise == "3 and 4 seeds"
    assert difference({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.0}).e is None
    assert difference(a, {0: 1.0}).noise == "no interval from 1 seed"


HALF = 4.302653 * 0.001 / math.sqrt(3)  # of the interval of three differences that are 0.001 apart, as a share


@pytest.mark.parametrize(
    ("claim", "gap", "verdict"),
    [
        (EQUAL, 0.003 - HALF - 1e-4, "holds"),
        (EQUAL, 0.003 - HALF + 1e-4, "open"),
        (EQUAL, -0.003 - HALF + 1e-4, "open"),
        (EQUAL, -0.003 - HALF - 1e-4, "fails"),
        (EQUAL, 0.003 + HALF + 1e-4, "fails"),
        (NEAR, 0.003 + HALF + 1e-4, "holds"),
        (NEAR, -0.003 + HALF + 1e-4, "holds"),
        (NEAR, -0.003 + HALF - 1e-4, "open"),
        (NEAR, -0.003 - HALF - 1e-4, "fails"),
        (BETTER, HALF + 1e-4, "holds"),
        (BETTER, HALF - 1e-4, "open"),
        (BETTER, -HALF + 1e-4, "open"),
        (BETTER, -HALF - 1e-4, "fails"),
    ],
)
def test_verdicts_from_three_seeds(tmp_path: Path, claim: Claim, gap: float, verdict: str) -> None:
    for seed, off in enumerate((-0.001, 0.0, 0.001)):
        write_run(tmp_path, claim.a, seed=seed, final=0.9 + 0.01 * seed + gap + off)
        write_run(tmp_path, claim.b, seed=seed, final=0.9 + 0.01 * seed)  # a hard and an easy seed are so for both
    found = judge(claim, collect([tmp_path]))
    assert found.verdict == verdict
    assert found.measured.endswith("(±0.25, 3 paired seeds)")


def test_less_perplexity_is_better(tmp_path: Path) -> None:
    claim = Claim("E10", "near", "near", "table2/transformer_l1", "table2/transformer_l2", 0.1, "ppl")
    for off, verdict in ((-1.0, "holds"), (1.0, "fails")):
        root = tmp_path / verdict
        for seed in range(3):
            write_run(root, claim.a, seed=seed, ppl=6.0 + off + 0.01 * seed)
            write_run(root, claim.b, seed=seed, ppl=6.0)
        assert judge(claim, collect([root])).verdict == verdict


@pytest.mark.parametrize("seeds", [1, 2])
def test_too_few_seeds_tell_what_nobody_could_doubt(tmp_path: Path, seeds: int) -> None:
    """Ten standard errors of a validation set of 1297 images, from the closest two runs."""
    error = 100 * math.sqrt(0.9 * 0.1 / 1297)
    far = BEYOND_DOUBT * math.hypot(error, error) / 100
    for name, gap in (("near", 0.5 * far), ("far", 2 * far)):
        for seed in range(seeds):
            write_run(tmp_path / name, BETTER.a, seed=seed, final=0.9)
            write_run(tmp_path / name, BETTER.b, seed=seed, final=0.9 - gap)
    assert judge(BETTER, collect([tmp_path / "near"])).verdict == "open"
    found = judge(BETTER, collect([tmp_path / "far"]))
    assert found.verdict == "holds"
    assert f"no interval from {seeds} seed" in found.measured


def test_of_bleu_too_few_seeds_tell_nothing(tmp_path: Path) -> None:
    claim = Claim("E6", "near", "near", "supp2/bwn", "supp2/ln", 0.8, "bleu")
    for seed in range(3):
        for cell, bleu in (("supp2/bwn", 20.0), ("supp2/ln", 30.0)):
            write_run(tmp_path, cell, seed=seed, bleu=bleu + 0.1 * seed)
        verdict = judge(claim, collect([tmp_path]))
        assert verdict.verdict == ("open" if seed < 2 else "fails")
    assert verdict.measured == "20.1 − 30.1 = −10.0 (±0.0, 3 paired seeds)"


def test_runs_of_a_cell_that_has_changed_since_are_marked(tmp_path: Path) -> None:
    for cell in ("table1/resnet56_bwn", "table1/resnet56_bn"):
        folder = write_run(tmp_path, cell, preset="short")
        if cell.endswith("bwn"):
            table = json.loads((folder / "config.json").read_text())
            table["optim"]["last_layer_weight_decay"] = None
            (folder / "config.json").write_text(json.dumps(table))
    claim = next(c for c in CLAIMS if (c.a, c.b) == ("table1/resnet56_bwn", "table1/resnet56_bn"))
    found = judge(claim, collect([tmp_path]))
    assert found.deviations == "ResNet-56, bounded weight norm: weight decay of classifier 0 instead of 0.0001"
    assert found.caveats == f"Older runs: {found.deviations}. Also differs: {claim.also}."


# Settings that say one thing together.
TOGETHER: list[set[str]] = [
    {"model.norm", "model.constant", "model.memory"},
    {"model.layer_norm", "model.weight_norm", "model.constant", "model.rho"},
    {"model.weight_norm", "optim.gain_weight_decay"},
    {"model.project", "optim.weight_decay"},
    {"optim.mode", "optim.reference"},
    {"optim.mode", "optim.angle_power"},
    {"model.init_scale", "optim.invariant_lr", "optim.weight_decay"},
    {"precision.arithmetic", "precision.accumulate", "precision.sums", "model.norm_input_scale"},
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
def test_a_claim_compares_cells_with_one_difference_or_says_what_else_differs(claim: Claim) -> None:
    for other in filter(None, (claim.b, claim.c)):
        pair = [load_cell(cell).config() for cell in (claim.a, other)]
        keys = {text.partition(":")[0] for text in config.differences(*pair)} - {"experiment", "cell"}
        if len({NormFactory(run.model).initial_weights for run in pair}) > 1:
            keys.add("initial weights")  # they follow from the norm, and are a difference all the same
            assert "initial weights" in claim.also, claim.text
        if "optim.last_layer_weight_decay" in keys and len({_classifier_decay(run) for run in pair}) == 1:
            keys.remove("optim.last_layer_weight_decay")
        one = len(keys) == 1 or any(keys <= group for group in TOGETHER)
        assert one != bool(claim.also), (claim.text, keys)


def _classifier_decay(run: config.RunConfig) -> float:
    own = run.optim.last_layer_weight_decay
    return run.optim.weight_decay if own is None else own


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
    write_run(tmp_path, "fig3/l2_fp16", diverge=True)
    for seed in range(3):
        write_run(tmp_path, "fig3/l2_fp32", seed=seed, final=0.9)
        write_run(tmp_path, "fig3/l2_fp16_acc32", seed=seed, final=0.89 + 0.001 * seed)
    runs = collect([tmp_path])
    verdicts = {v.claim.a: v for v in judge_all(runs) if v.claim.rule == "diverges"}
    assert verdicts["fig3/l2_fp16"].verdict == "holds"
    assert verdicts["fig3/l2_fp16_acc32"].verdict == "fails"
    assert "+0.90 points lost (±0.25, 3 paired seeds)" in verdicts["fig3/l2_fp16_acc32"].measured
    assert not runs.unfinished
    page = write_report([tmp_path], tmp_path / "out").html.read_text()
    assert "<b>diverged</b>" in page


@pytest.mark.parametrize(("lost", "verdict"), [(5.26, "holds"), (5.24, "open"), (4.76, "open"), (4.74, "fails")])
def test_a_loss_of_accuracy_is_divergence_beyond_its_interval(tmp_path: Path, lost: float, verdict: str) -> None:
    claim = next(c for c in CLAIMS if c.rule == "diverges")
    for seed, off in enumerate((-0.1, 0.0, 0.1)):
        write_run(tmp_path, claim.b, seed=seed, final=0.9)
        write_run(tmp_path, claim.a, seed=seed, final=0.9 - (lost + off) / 100)
    assert judge(claim, collect([tmp_path])).verdict == verdict


def test_a_seed_that_did_not_diverge_is_said(tmp_path: Path) -> None:
    claim = next(c for c in CLAIMS if c.rule == "diverges")
    write_run(tmp_path, claim.b)
    write_run(tmp_path, claim.a, seed=0, epochs=9)
    write_run(tmp_path, claim.a, seed=1, diverge=True)
    found = judge(claim, collect([tmp_path]))
    assert (found.verdict, found.measured) == ("open", "loss not finite after 5 epochs, in 1 of 2 seeds")


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
    assert (verdict.verdict, verdict.measured) == ("open", "WD off diverged in 1 of 3 seeds")
    assert runs.results["fig1/wd_off"].text("accuracy") == "diverged in 1 of 3 seeds"


def test_following_is_judged_over_the_whole_course(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path, "fig1/wd_on", seed=seed, speed=2)
        write_run(tmp_path, "fig1/wd_off", seed=seed, speed=1)
        write_run(tmp_path, "fig1/corrected", seed=seed, speed=1.9 + 0.01 * seed)
        write_run(tmp_path, "fig1/norm_schedule", seed=seed, speed=1.05 + 0.01 * seed)
    found = {v.claim.a: v for v in judge_all(collect([tmp_path])) if v.claim.rule == "follows"}
    assert {a: v.verdict for a, v in found.items()} == {"fig1/corrected": "holds", "fig1/norm_schedule": "fails"}
    assert ", WD off by ×" in found["fig1/corrected"].measured


def test_a_loss_of_zero_can_be_followed(tmp_path: Path) -> None:
    for cell, seed in itertools.product(("wd_on", "corrected", "wd_off"), range(3)):
        folder = write_run(tmp_path, f"fig1/{cell}", seed=seed)
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


DEPARTS = Claim("S3", "departs", "departs", "fig1/corrected", "fig1/wd_on", c="fig1/wd_off")


@pytest.mark.parametrize(
    ("speeds", "verdict"),
    [
        ((1.44, 1.45, 1.46), "fails"),  # at 1.394 it is half as far as WD off
        ((1.33, 1.34, 1.35), "holds"),
        ((1.39, 1.40, 1.41), "open"),
        ((9.0, 9.1, 9.2), "holds"),  # to the other side
    ],
)
def test_departing_is_the_opposite_of_following(tmp_path: Path, speeds: tuple[float, ...], verdict: str) -> None:
    for seed, speed in enumerate(speeds):
        write_run(tmp_path, "fig1/wd_on", seed=seed, speed=2)
        write_run(tmp_path, "fig1/wd_off", seed=seed, speed=1)
        write_run(tmp_path, "fig1/corrected", seed=seed, speed=speed)
    runs = collect([tmp_path])
    opposite = {"holds": "fails", "fails": "holds", "open": "open"}[verdict]
    assert judge(DEPARTS, runs).verdict == verdict
    assert judge(replace(DEPARTS, rule="follows"), runs).verdict == opposite


@pytest.mark.parametrize(
    ("corrected", "wd_on", "verdict"),
    [(3, 0, "holds"), (1, 0, "open"), (0, 3, "open"), (3, 3, "open")],  # in how many of three seeds each diverges
)
def test_who_diverges_departs_from_who_does_not(tmp_path: Path, corrected: int, wd_on: int, verdict: str) -> None:
    for seed in range(3):
        write_run(tmp_path, "fig1/wd_on", seed=seed, diverge=seed < wd_on)
        write_run(tmp_path, "fig1/wd_off", seed=seed, speed=0.5)
        write_run(tmp_path, "fig1/corrected", seed=seed, diverge=seed < corrected)
    assert judge(DEPARTS, collect([tmp_path])).verdict == verdict


COLLAPSES = Claim("S2", "collapses", "collapses", "s2/lr_*")


def _grid(root: Path, own: Sequence[float], seeds: int = 3) -> Path:
    """All cells of S2's grid. An accuracy falls by 2 points with each doubling of the product, and beside it a cell has
    ``own`` of each seed, in points, if its learning rate is among the larger ones of its product, else as much less."""
    cells = [load_cell(id) for id in COLLAPSES.ids]
    optims = {cell.id: cell.config("small").optim for cell in cells}
    products = {id: math.log2((o.invariant_lr or 0) * o.weight_decay / 2e-4) for id, o in optims.items()}
    places = {id: math.log2((o.invariant_lr or 0) ** 2 / o.weight_decay / 5) for id, o in optims.items()}
    for seed, (id, product) in itertools.product(range(seeds), products.items()):
        middle = statistics.fmean(places[other] for other, p in products.items() if round(p) == round(product))
        off = own[seed] * ((places[id] > middle + 1e-6) - (places[id] < middle - 1e-6))
        write_run(root, id, preset="small", seed=seed, final=(70 - 2 * product + off) / 100)
    return root


def test_a_grid_collapses_if_its_spread_at_a_product_is_half_or_less(tmp_path: Path) -> None:
    # With points of ``own`` as o, the variance at a product is 5/4 o², at a weight decay, where o works against the
    # product, 10 - 4 o + 3/5 o²: a quarter of it at o = 1.12.
    for name, own, verdict in (
        ("none", (0.0, 0.0, 0.0), "holds"),
        ("inside", (1.11, 1.11, 1.11), "holds"),
        ("around", (1.0, 1.12, 1.24), "open"),
        ("outside", (1.13, 1.13, 1.13), "fails"),
    ):
        found = judge(COLLAPSES, collect([_grid(tmp_path / name, own)]))
        assert (found.verdict, name) == (verdict, name)
    assert "3.16 at the same learning rate" in judge(COLLAPSES, collect([tmp_path / "none"])).measured
    assert judge(COLLAPSES, collect([_grid(tmp_path / "two", (0.0, 0.0), seeds=2)])).verdict == "open"


def test_a_grid_is_judged_by_its_nearer_factor(tmp_path: Path) -> None:
    """Accuracy that goes with the learning rate alone is not explained by the product."""
    for id in COLLAPSES.ids:
        lr = load_cell(id).config("small").optim.invariant_lr or 0
        for seed in range(3):
            write_run(tmp_path, id, preset="small", seed=seed, final=0.7 + 0.01 * math.log2(lr / 0.1))
    found = judge(COLLAPSES, collect([tmp_path]))
    assert found.verdict == "fails"
    assert " 0 at the same learning rate" in found.measured


def test_a_grid_with_a_cell_that_diverged_or_is_missing_is_open(tmp_path: Path) -> None:
    _grid(tmp_path, (0.0, 0.0, 0.0))
    folder = tmp_path / "s2" / "lr_0.4_wd_0.008" / "seed1"
    (folder / "summary.json").unlink()
    (folder / "error.json").write_text(json.dumps({"kind": "nan", "message": "loss is nan"}))
    found = judge(COLLAPSES, collect([tmp_path]))
    assert (found.verdict, found.measured) == ("open", "η 0.4, λ 0.008 diverged in 1 of 3 seeds")
    shutil.rmtree(folder.parent)
    assert not [v for v in judge_all(collect([tmp_path])) if v.claim.rule == "collapses"]


def test_only_a_grid_is_judged_without_a_second_cell() -> None:
    for rule, b in (("collapses", "fig1/wd_on"), ("equal", "")):
        with pytest.raises(ValueError, match="only collapses has none"):
            replace(EQUAL, rule=rule, b=b)


def test_l1s_gap_is_judged_from_the_runs_of_other_figures(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path, "table1/resnet56_bn", preset="short", seed=seed, speed=2)
        write_run(tmp_path, "supp1/resnet56_with_c", preset="short", seed=seed, speed=1)
        write_run(tmp_path, "l1_gap/l1_quieter", preset="short", seed=seed, speed=1.9)
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
    report = write_report([tmp_path], tmp_path / "out")
    shown = {v.claim.a: v.measured for v in report.verdicts}
    # What did not finish stays in sight. fig2 has four claims more, fig4 seven; supp1, table2 and lean share cells
    # with them, but were not asked for.
    assert set(shown) == {"fig2/resnet18_l1", "fig2/resnet18_topk"}
    assert shown["fig2/resnet18_topk"] == "no finished run of fig2/resnet18_topk"
    how = {
        "quick": "`normmatters reproduce fig2 fig4 --preset quick` and `normmatters reproduce fig4 --preset short`",
        "cifar": "`normmatters reproduce fig2 fig4 --preset cifar`",
    }
    said = f"11 more claims are about cells that were not run here; these are run by {how[preset]}."
    assert report.not_run == said
    assert report.not_run in report.markdown.read_text()
    assert report.not_run.replace("`", "") in re.sub("</?code>", "", report.html.read_text())
    assert "**0 claims hold, 0 do not, 2 cannot be told from these runs.**" in report.markdown.read_text()


@pytest.mark.parametrize("preset", ["short", "cifar"])
def test_the_command_for_what_is_left_is_of_the_folders_preset(tmp_path: Path, preset: str) -> None:
    """Fig. 1 is the same run at both."""
    write_run(tmp_path / preset, "fig1/wd_on", preset=preset)
    report = write_report([tmp_path / preset], tmp_path / "out")
    assert report.not_run.endswith(f"`normmatters reproduce fig1 --preset {preset}`.")


SOONER = next(c for c in CLAIMS if c.rule == "sooner")


def _reach(root: Path, cell: str, epochs: list[int], trained: int = 40) -> None:
    """Runs that come to 20 % error at the end of these epochs, one per seed; 0 is never."""
    for seed, first in enumerate(epochs):
        folder = write_run(root, cell, seed=seed, epochs=trained)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row["val_acc"] = 80.0 if first and row["epoch"] >= first else 50.0
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("with_c", "without_c", "verdict"),
    [
        ([10, 10, 10], [20, 20, 20], "holds"),  # the margin itself
        ([10, 10, 10], [19, 19, 19], "fails"),
        ([10, 10, 10], [24, 22, 23], "holds"),
        ([10, 10, 10], [18, 24, 20], "open"),  # its interval holds 2
        ([10, 10], [30, 30], "open"),  # two seeds
        ([10, 10, 10], [0, 30, 30], "holds"),  # one was not there in 40: it takes more
        ([19, 19, 19], [0, 38, 38], "open"),  # and here that is not enough, nor too little
        ([0, 0, 0], [20, 20, 20], "fails"),
        ([0, 20, 20], [20, 20, 20], "open"),
    ],
)
def test_reaching_an_error_sooner(tmp_path: Path, with_c: list[int], without_c: list[int], verdict: str) -> None:
    _reach(tmp_path, SOONER.a, with_c)
    _reach(tmp_path, SOONER.b, without_c)
    assert judge(SOONER, collect([tmp_path])).verdict == verdict


def test_reaching_a_training_loss_sooner(tmp_path: Path) -> None:
    claim = next(c for c in CLAIMS if c.rule == "sooner" and c.metric == "loss")
    for cell, first in ((claim.a, 4), (claim.b, 6)):
        for seed in range(3):
            folder = write_run(tmp_path, cell, preset="small", seed=seed, epochs=8)
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for row in rows:  # the validation error says the opposite
                row |= {"train_loss": 0.9 if row["epoch"] >= first else 2.0, "val_acc": 95.0 if first == 6 else 10.0}
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdict = judge(claim, collect([tmp_path]))
    assert (verdict.verdict, verdict.measured[:26]) == ("holds", "epoch 4 against epoch 6: ×")
    assert "0.9 training loss in at most 1/1.25 of the epochs" in claim.rule_text


def test_between_two_epochs_the_logarithm_is_interpolated(tmp_path: Path) -> None:
    """Whole epochs are alike in all seeds, and had an interval of width 0."""
    claim = next(c for c in CLAIMS if c.rule == "sooner" and c.metric == "loss")
    for cell, crossing in ((claim.a, (3.5, 3.5, 3.5)), (claim.b, (4.25, 4.5, 4.75))):
        for seed, at in enumerate(crossing):
            folder = write_run(tmp_path, cell, preset="small", seed=seed, epochs=8)
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for row in rows:  # a straight line in the logarithm
                row["train_loss"] = 0.9 * 2 ** (at - row["epoch"])
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ratios = [math.log(at / 3.5) for at in (4.25, 4.5, 4.75)]
    mean, e = statistics.fmean(ratios), 4.302653 * statistics.stdev(ratios) / math.sqrt(3)
    interval = f"({math.exp(mean - e):.2f} to {math.exp(mean + e):.2f}, 3 paired seeds)"
    found = judge(claim, collect([tmp_path]))
    assert found.measured == f"epoch 3.5 against epoch 4.5: ×{math.exp(mean):.2f} {interval}"
    assert found.verdict == "open"  # 1.25 lies in it


def test_an_error_that_was_reached_in_the_first_epoch(tmp_path: Path) -> None:
    """There is nothing before it to interpolate from."""
    _reach(tmp_path, SOONER.a, [1, 1, 1])
    _reach(tmp_path, SOONER.b, [2, 2, 2])
    assert judge(SOONER, collect([tmp_path])).measured.startswith("epoch 1 against epoch 2: ×2.00")


def test_epochs_are_told_with_their_spread(tmp_path: Path) -> None:
    _reach(tmp_path, SOONER.a, [10, 10, 10])
    _reach(tmp_path, SOONER.b, [24, 22, 23])
    assert judge(SOONER, collect([tmp_path])).measured == (
        "epoch 10 against epoch 23: ×2.30 (2.06 to 2.56, 3 paired seeds)"
    )


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
