"""Every figure and table of the paper is there as files, each file loads at each preset, and mistakes are told."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.utils.parametrize import is_parametrized

from normmatters.lab.cells import PRESETS, experiment_names, load_cell, load_cells, load_file, matching
from normmatters.lab.claims import CLAIMS
from normmatters.lab.config import differences
from normmatters.lab.data import SETS
from normmatters.lab.data.numerals import LIMIT, english, german, splits
from normmatters.lab.figures import EXPERIMENTS
from normmatters.lab.models import build_image_model
from normmatters.lab.plan import make_plan


def test_every_cell_loads_at_every_preset() -> None:
    cells = load_cells()
    assert len({c.id for c in cells}) == len(cells) >= 50
    for cell in cells:
        for preset in PRESETS:
            config = cell.config(preset, seed=3)
            assert config.seed == 3
            assert f"{config.experiment}/{config.cell}" == cell.source
            if (usual := SETS[config.data.name].folder) and config.data.name != "text":  # not another set's folder
                assert config.data.dir in (None, usual)
            if preset == "quick" and preset in cell.only:
                assert config.data.name in ("digits", "numbers")


def test_the_paper_is_covered() -> None:
    beyond = {f"S{i}" for i in range(1, 9)}
    assert {claim.check for claim in CLAIMS} - beyond == {"ours", *(f"E{i}" for i in range(1, 13))}
    assert [e.name for e in EXPERIMENTS] == experiment_names()
    ids = {cell.id for cell in load_cells()}
    for e in EXPERIMENTS:
        used = {*e.rows, *(name for panel in e.panels for name in panel.cells)}
        assert {f"{e.name}/{name}" for name in used} == {id for id in ids if id.startswith(f"{e.name}/")}
    for claim in CLAIMS:
        assert claim.cells <= ids
        assert len(claim.ids) == len(claim.cells) >= 2


def test_the_body_is_the_papers_regime() -> None:
    fig1 = load_cell("fig1/wd_on").config("full")
    assert (fig1.data.name, fig1.model.name, fig1.data.batch_size) == ("cifar10", "vgg11", 128)
    assert (fig1.optim.lr, fig1.optim.weight_decay, fig1.optim.milestones, fig1.optim.epochs) == (
        0.1,
        5e-4,
        (20, 40, 60),
        80,
    )
    assert fig1.optim.last_layer_weight_decay == 5e-4
    bwn = load_cell("fig4/bwn").config("full")
    assert (bwn.optim.lr, bwn.optim.weight_decay, bwn.model.weight_norm) == (0.1, 0.0, "bwn")
    assert bwn.optim.last_layer_weight_decay == 1e-4
    transformer = load_cell("table1/transformer_ln").config("full").optim
    assert (transformer.betas, transformer.warmup_steps, transformer.label_smoothing) == ((0.9, 0.98), 4000, 0.1)
    half = load_cell("fig3/l2_fp16_acc32").config("cifar").precision
    assert (half.arithmetic, half.accumulate) == ("fp16", "fp32")


def test_weight_norm_on_resnets_begins_gently() -> None:
    cells = (
        "table1/resnet56_bwn",
        "table1/resnet56_wn",
        "lp_weight_norm/l1",
        "lp_weight_norm/l2",
        "lp_weight_norm/linf",
    )
    for name in cells:
        assert load_cell(name).config("short").optim.warmup_steps == 390  # an epoch
        assert load_cell(name).config("quick").optim.warmup_steps == 25  # an epoch too
    for name in ("fig4/bwn", "fig4/wn"):
        warmup = {preset: load_cell(name).config(preset).optim.warmup_steps for preset in ("full", "cifar", "quick")}
        assert warmup == {"full": 5004, "cifar": 390, "quick": 20}
    for name in ("table1/resnet56_bn", "fig4/bn"):
        assert load_cell(name).config("short").optim.warmup_steps == 0


@pytest.mark.parametrize("name", ["table1/resnet56_bwn", "lp_weight_norm/l1", "lp_weight_norm/linf"])
def test_bounded_weights_of_resnet56_keep_their_initial_scale(name: str) -> None:
    model = build_image_model(load_cell(name).config("full").model, channels=3, classes=10, size=32)
    ratios = [
        m.weight.norm() / m.parametrizations.weight.original.norm() for m in model.modules() if is_parametrized(m)
    ]
    assert len(ratios) == 57
    assert torch.stack(ratios).log().mean().exp().item() == pytest.approx(1, abs=0.02)


def test_short_is_cifar_with_fewer_epochs() -> None:
    for cell in load_cells():
        cifar, short = cell.config("cifar"), cell.config("short")
        scale = short.optim.epochs / cifar.optim.epochs
        assert 0.3 <= scale <= 1
        assert short.optim.milestones == pytest.approx([scale * m for m in cifar.optim.milestones], abs=0.5)
        same = replace(short.optim, epochs=cifar.optim.epochs, milestones=cifar.optim.milestones)
        assert replace(short, optim=same) == cifar
    assert load_cell("table1/resnet56_bn").config("short").optim.epochs == 67
    assert load_cell("fig1/wd_on").config("short").optim.epochs == 80


def test_cells_beyond_the_paper_stay_out_of_the_demo(tmp_path: Path) -> None:
    assert not [job for job in make_plan(["lean", "fig1"], "quick", tmp_path) if job.id.startswith("lean")]
    with pytest.raises(ValueError, match="no cell of lean is run at the preset quick"):
        make_plan(["lean"], "quick", tmp_path)
    assert "lean/resnet56_l1_lean" in {job.id for job in make_plan(["lean"], "short", tmp_path)}


def test_each_pair_of_l1s_gap_differs_in_its_norm_alone() -> None:
    for preset in ("short", "cifar", "full"):
        for change in ("", "_fp32", "_silent"):
            one, two = (load_cell(f"l1_gap/{norm}{change}").config(preset) for norm in ("l1", "l2"))
            assert (one.model.norm, two.model.norm) == ("l1", "l2")
            assert replace(one.model, norm="l2") == two.model
            assert (one.data, one.optim, one.precision, one.runtime) == (
                two.data,
                two.optim,
                two.precision,
                two.runtime,
            )
    l2 = load_cell("l1_gap/l2").config("short")
    changed = {name: load_cell(f"l1_gap/l2_{name}").config("short") for name in ("fp32", "silent")}
    fp32 = changed["fp32"].precision
    assert (l2.precision.amp, fp32.amp, fp32.tf32) == ("bf16", "none", False)
    assert replace(changed["silent"].model, zero_init_residual=False) == l2.model


def _changes(a: str, b: str, preset: str) -> set[str]:
    one, two = (load_cell(id).config(preset) for id in (a, b))
    return {text.partition(":")[0] for text in differences(one, two)} - {"cell"}


@pytest.mark.parametrize("preset", ["small", "quick"])
def test_cells_of_s1_differ_in_one_thing(preset: str) -> None:
    v, classifier = "optim.weight_decay", "optim.last_layer_weight_decay"
    pairs = {
        ("bwn_both", "bn"): {"model.weight_norm"},
        ("bwn_both", "bwn_v"): {classifier},
        ("bwn_classifier", "bwn"): {classifier},
        ("projected", "bwn_classifier"): {"model.project"},
        ("angular", "bwn_both"): {"optim.mode"},
        ("wn_both", "bwn_both"): {"model.weight_norm", "optim.gain_weight_decay"},  # a g, which does not decay
        ("wn", "bwn_classifier"): {"model.weight_norm", "optim.gain_weight_decay"},
    }
    for (a, b), expected in pairs.items():
        assert _changes(f"s1/{a}", f"s1/{b}", preset) == expected
    # The classifier's decay is by default that of all other weights: where v's is 0, it must be said.
    for a, b in (("bwn_both", "bwn_classifier"), ("bwn_v", "bwn")):
        assert _changes(f"s1/{a}", f"s1/{b}", preset) <= {v, classifier}
        decays = [load_cell(f"s1/{name}").config(preset).optim for name in (a, b)]
        last = {o.weight_decay if o.last_layer_weight_decay is None else o.last_layer_weight_decay for o in decays}
        assert (len(last), [o.weight_decay for o in decays]) == (1, [1e-3, 0.0])


def test_cells_of_s4_to_s6_differ_in_one_thing() -> None:
    factors = {"quarter": 0.25, "half": 0.5, "0_8": 0.8, "1": 1.0, "1_25": 1.25, "2": 2.0, "4": 4.0}
    for kind, change in (("free", set()), ("frozen", {"model.gamma"}), ("silent", {"model.zero_init_residual"})):
        assert _changes(f"s4/{kind}_c_1", "s4/free_c_1", "small") == change
        for name, factor in factors.items():
            assert _changes(f"s4/{kind}_c_{name}", f"s4/{kind}_c_1", "small") <= {"model.constant"}
            assert load_cell(f"s4/{kind}_c_{name}").config("small").model.constant == factor
    for norm in ("l2", "l1", "linf", "topk"):
        assert _changes(f"s6/{norm}_running", f"s6/{norm}_tree", "small") == {"precision.sums"}
        assert _changes(f"s6/{norm}_tree", f"s6/{norm}_fp32", "small") == {
            "precision.arithmetic",
            "precision.accumulate",
        }
        assert _changes(f"s6/{norm}_running", "s6/l2_running", "small") <= {"model.norm"}
    assert _changes("s5/bwn", "s5/bn", "small") == {"model.weight_norm"}
    assert _changes("s5/bwn_alone", "s5/bwn", "small") == {"model.norm"}
    assert _changes("s5/bwn_trelu", "s5/bwn_alone", "small") == {"model.activation"}


def test_cells_of_s2_differ_in_the_weights_before_a_norm_alone() -> None:
    etas, decays = (0.025, 0.05, 0.1, 0.2, 0.4), (0.0005, 0.001, 0.002, 0.004, 0.008)
    assert matching("s2/lr_*") == [f"s2/lr_{lr}_wd_{decay}" for lr in etas for decay in decays]
    products: dict[str, int] = {}
    for lr, decay in itertools.product(etas, decays):
        cell = load_cell(f"s2/lr_{lr}_wd_{decay}")
        assert cell.label == f"η {lr}, λ {decay}"
        for preset in PRESETS:
            optim = cell.config(preset).optim
            assert (optim.invariant_lr, optim.weight_decay) == (lr, decay)
        optim = cell.config("small").optim
        assert (optim.lr, optim.last_layer_weight_decay, optim.decay_norms) == (0.1, 5e-4, False)
        changes = _changes(cell.id, "s2/lr_0.1_wd_0.002", "small")
        assert changes <= {"optim.invariant_lr", "optim.weight_decay"}
        products[f"{lr * decay:.6g}"] = products.get(f"{lr * decay:.6g}", 0) + 1
    assert sorted(products.values()) == [1, 1, 2, 2, 3, 3, 4, 4, 5]  # diagonals
    assert not _changes("s2/scaled_1", "s2/lr_0.1_wd_0.002", "small")
    for control, cell_id, c in (("scaled_2", "lr_0.4_wd_0.0005", 2.0), ("scaled_half", "lr_0.025_wd_0.008", 0.5)):
        assert _changes(f"s2/{control}", f"s2/{cell_id}", "small") == {"model.init_scale"}
        scaled, middle = (load_cell(f"s2/{id}").config("small") for id in (control, "scaled_1"))
        assert scaled.model.init_scale == c
        # c is a power of two, so that rounding is the same: to the last bit
        assert scaled.optim.invariant_lr == c**2 * (middle.optim.invariant_lr or 0)
        assert scaled.optim.weight_decay == middle.optim.weight_decay / c**2


def test_cells_of_s3_and_s7_differ_in_one_thing() -> None:
    for mode in ("wd_on", "wd_off", "corrected", "norm_schedule", "wd_free"):
        follows = {"optim.reference"} if mode in ("corrected", "norm_schedule") else set()
        assert _changes(f"s3/bn_{mode}", f"s3/none_{mode}", "small") == {"model.norm"} | follows
        for norm in ("bn", "none"):
            own = set() if mode == "wd_on" else {"optim.mode"}
            assert _changes(f"s3/{norm}_{mode}", f"s3/{norm}_wd_on", "small") == own | follows
    assert _changes("s7/wd_follows_lr", "s7/wd_on", "small") == {"optim.mode"}
    assert _changes("s7/angle_sqrt10", "s7/wd_on", "small") == {"optim.mode"}
    assert _changes("s7/angle_10", "s7/angle_sqrt10", "small") == {"optim.angle_power"}


GRID = """
cell = "lr_{}_wd_{}"
label = "{} and {}"
[grid.optim]
lr = [0.1, 0.2]
weight_decay = [0.0, 1e-3, 2e-3]
[preset.quick.optim]
lr = 0.5
epochs = 3
"""


def test_a_file_may_be_a_grid_of_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "grid.toml").write_text(GRID)
    (tmp_path / "mine" / "other.toml").write_text("")
    monkeypatch.setattr("normmatters.lab.cells.folder", lambda: tmp_path)
    cells = load_cells(["mine"])
    assert [cell.id for cell in cells[:3]] == ["mine/lr_0.1_wd_0.0", "mine/lr_0.1_wd_0.001", "mine/lr_0.1_wd_0.002"]
    assert [cell.name for cell in cells[3:]] == [*(f"lr_0.2_wd_{d}" for d in ("0.0", "0.001", "0.002")), "other"]
    config = cells[4].config("quick")  # a preset changes the epochs, and not what makes the cell
    assert (config.optim.lr, config.optim.weight_decay, config.optim.epochs) == (0.2, 1e-3, 3)
    assert (config.experiment, config.cell, config.label) == ("mine", "lr_0.2_wd_0.001", "0.2 and 0.001")
    assert cells[4].config("quick", overrides=["optim.lr=0.3"]).optim.lr == 0.3
    assert matching("mine/lr_0.1_*") == [cell.id for cell in cells[:3]]
    with pytest.raises(ValueError, match="expected one cell, got a grid of 6"):
        load_file(tmp_path / "mine" / "grid.toml")


def test_cells_of_s8_differ_in_their_norm_alone() -> None:
    for network, norms in (("lstm", ("none", "bwn")), ("transformer", ("l1", "bwn"))):
        for norm in norms:
            changed = {"model.layer_norm", "model.weight_norm"} if norm == "bwn" else {"model.layer_norm"}
            assert _changes(f"s8/{network}_{norm}", f"s8/{network}_ln", "small") == changed
    # beside the published runs: the attention and the epochs; the text and the epochs
    epochs = {"optim.epochs", "optim.milestones"}
    for norm in ("ln", "none", "bwn"):
        one, two = load_cell(f"s8/lstm_{norm}").config("small"), load_cell(f"supp2/{norm}").config("cifar")
        assert {text.partition(":")[0] for text in differences(one, two)} - {"experiment", "cell"} == epochs | {
            "model.attention"
        }
    one, two = load_cell("s8/transformer_ln").config("small"), load_cell("table1/transformer_ln").config("cifar")
    other_text = {"data.dir", "data.val_split", "data.test_split"}
    assert {text.partition(":")[0] for text in differences(one, two)} - {"experiment", "cell"} == other_text | {
        "optim.epochs"
    }


def test_rules_about_the_training_loss_name_what_they_compare() -> None:
    rules = {claim.a: claim.rule_text for claim in CLAIMS if claim.rule == "follows"}
    assert "from WD on's as WD off's is" in rules["fig1/corrected"]
    assert "from L2's as L1's is" in rules["l1_gap/l1_quieter"]


def test_the_paper_has_no_number_for_what_is_ours() -> None:
    assert [cell.id for cell in load_cells() if "(ours)" in cell.label and cell.paper.value is not None] == []


def test_cells_of_one_figure_differ_only_where_they_should() -> None:
    on, off = (load_cell(f"fig1/{n}").config("quick") for n in ("wd_on", "wd_off"))
    assert (on.data, on.model, on.precision) == (off.data, off.model, off.precision)
    assert on.optim.mode != off.optim.mode
    assert on.optim.weight_decay == off.optim.weight_decay  # the mode decides where it acts


def test_a_number_printed_twice_is_one_run() -> None:
    again, first = load_cell("table2/resnet56_l2"), load_cell("table1/resnet56_bn")
    assert again.source == first.id
    assert again.config("cifar", 1) == first.config("cifar", 1)
    assert again.paper.value == first.paper.value == 93.03
    for cell in load_cells():
        assert load_cell(cell.source).same_as is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optim]\nmomentun = 0.9", "did you mean 'optim.momentum'"),
        ("[preset.quikc.optim]\nlr = 1.0", "did you mean 'quick'"),
        ("[preset.quick.model]\nnrom = 'l1'", "did you mean 'model.norm'"),
        ("only = ['quikc']", "did you mean 'quick'"),
        ("only = 'quick'", "only must be a list of quick, small, .*, got 'quick'"),
        ("[paper]\nvalu = 3", "did you mean 'paper.value'"),
        ("[paper]\nmetric = 'acuracy'", "did you mean 'accuracy'"),
        ("[paper]\nvalue = 'high'", "paper.value must be a number or nothing, got 'high'"),
        ("optim = 3", "must be a table"),
        ("seed = 1.5", "seed must be a whole number, got 1.5"),
        ("seed = [1]", r"seed must be a whole number, got \[1\]"),
        ("preset = 'quick'", "preset must be tables named quick, .*, got 'quick'"),
        ("preset.quick = 3", "preset must be tables named quick, .*, got {'quick': 3}"),
        ("same_as = 3", "same_as must be a text or nothing, got 3"),
        ("same_as = 'fig1/wd_on'\n[optim]\nlr = 3.0", r"same as fig1/wd_on, whose settings count: optim .* be ignored"),
        ("extends = 'twin.toml'\n[optim]\nlr = 3.0", "extends twin.toml, which is the same as fig1/wd_on: extend that"),
        ("only = [3]", r"only must be a list of .* got \[3\]"),
        ("grid = 3", r"lists of values, such as \[grid.optim\] lr = \[0.1, 0.2\], got grid = 3"),
        ("grid.optim.lr = 0.1", "lists of values, such as"),
        ("cell = 'a'\ngrid.optim.lr = [0.1]", "cell needs a {} for each of the grid's 1 settings, got 'a'"),
        ("cell = '{}'\ngrid.optim.lr = [0.1]", "label needs a {} for each of the grid's 1 settings, got None"),
        ("cell = '{}'\nlabel = '{}'\ngrid.optim.lr = ['x']", "optim.lr must be"),
        ("[optim", "not valid TOML"),
    ],
)
def test_mistakes_in_a_file_are_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cell.toml"
    path.write_text(text)
    (tmp_path / "twin.toml").write_text("same_as = 'fig1/wd_on'")
    with pytest.raises(ValueError, match=message):
        load_file(path)


def test_unknown_names_are_told() -> None:
    with pytest.raises(ValueError, match="did you mean 'fig1'"):
        load_cells(["figg1"])
    with pytest.raises(ValueError, match="did you mean 'wd_on'"):
        load_cell("fig1/wdon")
    with pytest.raises(ValueError, match="did you mean 'cifar'"):
        load_cell("fig1/wd_on").config("cifra")


def test_numerals_are_both_languages_own() -> None:
    known = {
        0: ("zero", "null"),
        1: ("one", "eins"),
        17: ("seventeen", "siebzehn"),
        21: ("twenty-one", "einundzwanzig"),
        101: ("one hundred one", "einhunderteins"),
        2041: ("two thousand forty-one", "zweitausendeinundvierzig"),
        9999: ("nine thousand nine hundred ninety-nine", "neuntausendneunhundertneunundneunzig"),
    }
    for number, words in known.items():
        assert (english(number), german(number)) == words
    for words in (english, german):
        assert len({words(n) for n in range(LIMIT)}) == LIMIT


def test_numeral_splits_are_disjoint_and_fixed() -> None:
    parts = splits()
    assert [len(parts[k][0]) for k in ("train", "val", "test")] == [8000, 1000, 1000]
    assert len({line for source, _ in parts.values() for line in source}) == LIMIT
    assert parts == splits()
