"""Configs: from TOML and from tables, every mistake an error that names what was meant."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from normmatters.lab.cells import load_file
from normmatters.lab.config import RunConfig, config_hash, from_dict, merge, overrides_table, to_dict

TOML = """
experiment = "fig1"
cell = "wd_on"
label = 'WD "on" – η/‖w‖²'
[optim]
milestones = [20, 40]
betas = [0.9, 0.98]
weight_decay = 5e-4
last_layer_weight_decay = 1e-3
[model]
name = "vgg11"
constant = 0.25
[data]
name = "cifar10"
augment = false
"""
FULL = {
    "experiment": "fig1",
    "cell": "wd_on",
    "label": 'WD "on" – η/‖w‖²',
    "optim": {"milestones": [20, 40], "betas": [0.9, 0.98], "weight_decay": 5e-4, "last_layer_weight_decay": 1e-3},
    "model": {"name": "vgg11", "constant": 0.25},
    "data": {"name": "cifar10", "augment": False},
}


def load(path: Path) -> RunConfig:
    return load_file(path).config()


def test_toml_and_tables(tmp_path: Path) -> None:
    config = from_dict(FULL)
    path = tmp_path / "run.toml"
    for encoding in ("utf-8", "utf-8-sig"):  # as Windows' editors save it
        path.write_text(TOML, encoding=encoding)
        assert load(path) == config
    assert from_dict(to_dict(config)) == config
    assert config.optim.milestones == (20.0, 40.0)
    assert config.data.augment is False


def test_extends_takes_what_is_not_said(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('[optim]\nlr = 0.5\nepochs = 7\n[model]\nnorm = "l1"\n')
    (tmp_path / "run.toml").write_text('extends = "base.toml"\n[optim]\nepochs = 3\n')
    config = load(tmp_path / "run.toml")
    assert (config.optim.lr, config.optim.epochs, config.model.norm) == (0.5, 3, "l1")
    (tmp_path / "base.toml").write_text('extends = "run.toml"\n')
    with pytest.raises(ValueError, match="extends itself"):
        load(tmp_path / "run.toml")
    (tmp_path / "base.toml").unlink()
    with pytest.raises(ValueError, match=r"base.toml: no such config file, which .*run.toml extends"):
        load(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"optim": {"learning_rat": 1.0}}, "unknown key 'optim.learning_rat'"),
        ({"model": {"nrom": "l1"}}, "unknown key 'model.nrom'; did you mean 'model.norm'"),
        ({"modle": {}}, "did you mean 'model'"),
        ({"model": {"name": "resnet57"}}, "did you mean 'resnet56'"),
        ({"model": 3}, r"\[model\] must be a table"),
        ({"optim": {"epochs": 1.5}}, "optim.epochs must be a whole number, got 1.5"),
        ({"optim": {"epochs": True}}, "optim.epochs must be a whole number, got True"),
        ({"optim": {"lr": -1}}, "optim.lr must be a positive number"),
        ({"optim": {"milestones": [3, 1]}}, "rising order"),
        ({"optim": {"mode": "corrected"}}, "optim.reference"),
        ({"optim": {"mode": "wd_free"}}, "weight_decay must be positive"),
        ({"model": {"norm": "lp"}}, "model.p"),
        ({"model": {"p": 1.5}}, "model.p must be unset with norm l2: it is lp's, got 1.5"),  # it would be L2
        ({"optim": {"angle": 0.1}}, "optim.angle must be unset but with mode angular, got 0.1"),
        ({"optim": {"mode": "corrected", "reference": ""}}, "optim.reference must be the cell .*, got ''"),
        ({"model": {"constant": "precise"}}, "model.constant"),
        ({"model": {"norm_input_scale": 100}}, "model.norm_input_scale must be a power of two from .*, got 100.0"),
        ({"model": {"norm_input_scale": -2}}, "model.norm_input_scale must be a power of two"),
        ({"model": {"norm_input_scale": 2.0**33}}, "model.norm_input_scale must be a power of two"),
        ({"model": {"norm_input_scale": math.inf}}, "model.norm_input_scale must be a power of two"),
        ({"model": {"norm_input_scale": 2, "weight_norm": "wn"}}, "1 where no batch norm divides by a scale, got 2.0"),
        ({"precision": {"sums": "running"}}, "precision.sums must be tree without precision.arithmetic, got 'running'"),
        ({"model": {"project": True}}, "model.project must be false without a bounded weight norm, got True"),
        ({"model": {"project": True, "weight_norm": "wn"}}, "model.project must be false without a bounded"),
        ({"model": {"gamma": "frozen", "weight_norm": "bwn"}}, "model.gamma must be free where no batch norm divides"),
        (
            {"model": {"gamma": "frozen", "zero_init_residual": True}},
            "model.gamma must be free with zero_init_residual",
        ),
        ({"model": {"norm_input_scale": 2, "norm": "mean_only"}}, "1 where no batch norm divides"),
        ({"model": {"norm_input_scale": 2, "name": "lstm"}, "data": {"name": "numbers"}}, "1 where no batch norm"),
        ({"model": {"name": "lstm"}}, "a model for images"),
        (
            {"model": {"attention": "scaled"}},
            "model.attention must be dot in networks other than an LSTM, got 'scaled'",
        ),
        ({"model": {"layer_norm": "l1"}}, "model.layer_norm must be l2 with small_cnn, whose norms model.norm says"),
        (
            {"model": {"name": "transformer", "norm": "l1"}, "data": {"name": "numbers"}},  # it would be L2
            "model.norm must be l2 with transformer, whose norms model.layer_norm says, got 'l1'",
        ),
        ({"model": {"activation": "trelu", "name": "resnet8"}}, "model.name must be small_cnn or vgg11"),
        ({"optim": {"milestones": [math.inf]}}, "optim.milestones must be epochs in rising order"),
        ({"optim": {"milestones": [-1]}}, "optim.milestones must be epochs in rising order"),
        ({"optim": {"warmup_steps": -5}}, "optim.warmup_steps must be zero or more, got -5"),  # the loss would rise
        ({"optim": {"clip_norm": -1}}, "optim.clip_norm must be a positive number, got -1.0"),  # and here
        ({"optim": {"clip_norm": math.nan}}, "optim.clip_norm must be a positive number, got nan"),
        ({"optim": {"angle": 0}}, "optim.angle must be a positive number, got 0.0"),
        ({"optim": {"last_layer_weight_decay": -1}}, "optim.last_layer_weight_decay must be zero or more, got -1.0"),
        ({"optim": {"weight_decay": math.inf}}, "optim.weight_decay must be zero or more, got inf"),
        ({"model": {"width": math.inf}}, "model.width must be a positive number, got inf"),
        ({"model": {"heads": 0}}, "model.heads must be at least 1, got 0"),
        ({"model": {"dropout": 1}}, r"model.dropout must be in \[0, 1\), got 1.0"),
        ({"data": {"vocab_size": -1}}, "data.vocab_size must be at least 1, got -1"),
        ({"runtime": {"checkpoint_seconds": math.nan}}, "runtime.checkpoint_seconds must be zero or more, got nan"),
        ({"runtime": {"length_penalty": math.inf}}, "runtime.length_penalty must be finite, got inf"),
        ({"seed": 2**63}, "seed must be a whole number of 64 bits"),
        ({"data": {"augment": "mirror"}}, "data.augment"),
        ({"data": {"val_size": 0}}, "data.val_size must be at least 1, got 0"),
        ({"data": {"train_size": -1}}, "data.train_size must be at least 1, got -1"),
        ({"runtime": {"threads": -1}}, "runtime.threads must be at least 1, got -1"),
        ({"model": {"norm": "native"}, "precision": {"arithmetic": "fp16"}}, "precision.arithmetic"),
        ({"model": {"norm": "none"}, "precision": {"arithmetic": "fp16"}}, "precision.arithmetic"),
        (
            {"data": {"name": "numbers"}, "model": {"name": "lstm"}, "precision": {"arithmetic": "fp16"}},
            "model.layer_norm must be one of ours: precision.arithmetic is theirs, got 'l2'",
        ),
        ({"precision": {"accumulate": "fp16"}}, "precision.accumulate must be unset without precision.arithmetic"),
    ],
)
def test_bad_values_say_what_was_expected(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_dict(table)


def apply_overrides(config: RunConfig, overrides: list[str]) -> RunConfig:
    return from_dict(merge(to_dict(config), overrides_table(overrides)))


def test_overrides() -> None:
    config = apply_overrides(
        from_dict(FULL),
        ["optim.lr=.05", "model.norm=l1", "optim.milestones=[1, 2.5]", "optim.last_layer_weight_decay=null", "seed=3"],
    )
    assert (config.optim.lr, config.model.norm, config.seed) == (0.05, "l1", 3)
    assert config.optim.milestones == (1.0, 2.5)
    assert config.optim.last_layer_weight_decay is None
    table = apply_overrides(config, ["optim={lr = 0.2, gamma = 0.5}"])  # as `extends` and presets take one
    assert table == apply_overrides(config, ["optim.lr=0.2", "optim.gamma=0.5"]) != config
    for bad, message in [
        ("optim.lr", "expected key=value"),
        ("optim.rl=1", "did you mean 'optim.lr'"),
        ("optm.lr=1", "did you mean 'optim'"),
        ("optim.lr=fast", "optim.lr must be a number, got 'fast'"),
    ]:
        with pytest.raises(ValueError, match=message):
            apply_overrides(config, [bad])


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such config file"):
        load(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("[optim\n")
    with pytest.raises(ValueError, match="not valid TOML"):
        load(tmp_path / "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xe5\xff")
    with pytest.raises(ValueError, match=r"bytes\.toml: not valid TOML"):
        load(tmp_path / "bytes.toml")
    with pytest.raises(ValueError, match=f"{tmp_path}: cannot be read: Is a directory"):
        load(tmp_path)


def test_hash_sees_what_decides_the_numbers() -> None:
    base = RunConfig()
    same = apply_overrides(
        base, ["label=x", "runtime.device=cuda", "runtime.threads=2", "runtime.checkpoint_seconds=0"]
    )
    assert config_hash(same) == config_hash(base)
    others = {config_hash(apply_overrides(base, [o])) for o in ("seed=1", "optim.lr=.2", "runtime.compile=compile")}
    assert len(others | {config_hash(base)}) == 4
    assert config_hash(base) == "cffc865ea81e"  # of the published runs: a younger setting counts only where it is used
    assert config_hash(apply_overrides(base, ["model.norm_input_scale=2"])) not in others | {config_hash(base)}
    assert config_hash(apply_overrides(base, ["model.gamma=frozen"])) not in others | {config_hash(base)}
    half = apply_overrides(base, ["precision.arithmetic=fp16"])
    assert config_hash(apply_overrides(half, ["precision.sums=running"])) != config_hash(half)
    bounded = apply_overrides(base, ["model.weight_norm=bwn"])
    assert config_hash(apply_overrides(bounded, ["model.project=true"])) != config_hash(bounded)
    text = from_dict({"data": {"name": "numbers"}, "model": {"name": "lstm"}})
    hashes = [config_hash(apply_overrides(text, [f"runtime.compile={c}"])) for c in ("none", "cudagraph", "compile")]
    assert config_hash(apply_overrides(text, ["model.attention=scaled"])) not in hashes
    assert hashes[0] == hashes[1] != hashes[2]  # runs of text from before there were graphs for them stay valid
