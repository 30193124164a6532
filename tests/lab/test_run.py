"""The trainer: seeds decide every bit, modes act where they should, every way to end badly is told and leaves order."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normmatters.lab import files
from normmatters.lab.config import OptimConfig, RunConfig
from normmatters.lab.data import load_data
from normmatters.lab.errors import RunError
from normmatters.lab.files import read_json
from normmatters.lab.models import build_model
from normmatters.lab.objective import Classification
from normmatters.lab.regimes import _optimizer, build_regime, find_invariant, lr_factor
from normmatters.lab.run import train
from normmatters.lab.run_folder import RunFolder, RunResult
from normmatters.optim.recording import Recording
from support.lab_runs import rows, small_run


def test_a_run_learns_and_its_folder_tells_all(tmp_path: Path) -> None:
    config = small_run(data={"train_size": 1000}, optim={"epochs": 8, "milestones": [6]}, runtime={"tensorboard": True})
    events: list[dict[str, Any]] = []
    result = train(config, tmp_path / "run", progress=events.append)
    assert result.status == "finished"
    assert result.metrics["val_acc"] > 85
    folder = tmp_path / "run"
    history = rows(folder)
    assert [r["epoch"] for r in history] == list(range(1, 9))
    assert [r["step"] for r in history] == [20 * e for e in range(1, 9)]
    assert [r["lr"] for r in history] == pytest.approx([0.1] * 6 + [0.01] * 2)
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert [e["epoch"] for e in events if "val_acc" in e] == list(range(1, 9))
    assert read_json(folder / "summary.json") == result.metrics
    assert result.metrics["best_val_acc"] == max(r["val_acc"] for r in history)
    environment = read_json(folder / "environment.json")
    assert environment is not None
    assert environment["torch"] == torch.__version__
    assert any((folder / "tensorboard").iterdir())
    assert not (folder / "error.json").exists()
    assert [p.name for p in (folder / "checkpoints").glob("*.pt")] == ["epoch-000008.pt"]
    # the recorder's norms are those that the metrics average
    recording = Recording.load(folder / "norms.safetensors")
    assert recording.tested
    assert recording.metadata["cell"] == "default"
    mean = torch.cat([recording.at_epochs(n)[-1] for n in recording.names]).mean().item()
    assert mean == pytest.approx(history[-1]["norm"], rel=1e-6)


def test_seed_decides_every_bit(tmp_path: Path) -> None:
    train(small_run(), tmp_path / "a")
    torch.manual_seed(123)  # the caller's random state plays no part
    train(small_run(), tmp_path / "b")
    train(small_run(seed=1), tmp_path / "c")
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert rows(tmp_path / "a")[0] != rows(tmp_path / "c")[0]
    states = [torch.load(tmp_path / n / "checkpoints" / "epoch-000003.pt", weights_only=True) for n in "ab"]
    for key, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][key]), key


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    config = small_run(optim={"epochs": 1})
    first = train(config, tmp_path)
    stamp = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    again = train(config, tmp_path)
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == stamp
    assert again.metrics == first.metrics
    train(config, tmp_path, resume=False)
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns != stamp
    assert len(rows(tmp_path)) == 1


def test_the_callers_torch_settings_come_back(tmp_path: Path) -> None:
    torch.manual_seed(5)
    before, others = torch.get_rng_state(), (random.getstate(), np.random.get_state(legacy=False))  # noqa: NPY002
    threads = torch.get_num_threads()
    train(small_run(optim={"epochs": 1}, runtime={"threads": threads + 1}), tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert str((random.getstate(), np.random.get_state(legacy=False))) == str(others)  # noqa: NPY002  # no run uses them
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_modes_of_figure_1(tmp_path: Path) -> None:
    """Decay on, exact decay-free and corrected runs take the same path; decay off leaves it."""
    common = {"lr": 0.5, "weight_decay": 0.03, "epochs": 2, "milestones": [1], "momentum": 0.0}
    modes: dict[str, dict[str, Any]] = {
        "wd_on": {},
        "wd_free": {"mode": "wd_free"},
        "corrected": {"mode": "corrected", "reference": "wd_on", "correction": "step"},
        "norm_schedule": {"mode": "norm_schedule", "reference": "wd_on", "correction": "step"},
        "wd_off": {"mode": "wd_off"},
    }
    loss, norm, step = {}, {}, {}
    for name, options in modes.items():
        config = small_run(cell=name, optim={**common, **options}, runtime={"record": "step"})
        metrics = train(config, tmp_path / name / "seed0").metrics
        loss[name], norm[name], step[name] = (metrics[k] for k in ("train_loss", "norm", "effective_step"))
    for name in ("wd_free", "corrected", "norm_schedule"):
        assert loss[name] == pytest.approx(loss["wd_on"], rel=2e-4), name
        assert step[name] == pytest.approx(step["wd_on"], rel=2e-2), name
    assert abs(loss["wd_off"] - loss["wd_on"]) > 1e-3 * loss["wd_on"]
    assert norm["wd_off"] > norm["wd_on"]
    assert step["wd_off"] < 0.9 * step["wd_on"]
    assert norm["corrected"] > norm["wd_on"]
    assert norm["norm_schedule"] == pytest.approx(norm["wd_on"] * math.sqrt(10), rel=1e-2)  # F4
    with pytest.raises(ValueError, match="train it first, or use `normmatters reproduce`"):
        train(small_run(optim={"mode": "corrected", "reference": "absent"}), tmp_path / "x" / "seed0")


@pytest.mark.parametrize(("place", "run_dir"), [("corr", "seed0"), ("corr/seed0", "."), ("corr/x", "../seed0")])
def test_a_reference_is_found_from_anywhere(
    place: str, run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small_run(optim={"epochs": 1}), tmp_path / "wd_on" / "seed0")
    (tmp_path / place).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / place)
    train(small_run(optim={"epochs": 1, "mode": "corrected", "reference": "wd_on"}), run_dir)
    assert (tmp_path / "corr" / "seed0" / "summary.json").is_file()


def test_a_reference_that_does_not_fit_the_run_or_is_damaged_is_refused(tmp_path: Path) -> None:
    """Before the first step: the captured steps of a GPU would go on with the last row, and say nothing."""
    train(small_run(optim={"epochs": 1}), tmp_path / "wd_on")
    for mode in ("corrected", "norm_schedule"):
        config = small_run(optim={"epochs": 2, "mode": mode, "reference": "wd_on"})
        with pytest.raises(ValueError, match=r"optim.reference='wd_on': its norms were .* (\d+) steps, this run takes"):
            train(config, tmp_path / mode)
        assert not RunFolder(tmp_path / mode).has_results()
    for size in (25, 100):  # its step t would be another epoch's here
        other = small_run(data={"batch_size": size}, optim={"epochs": 1, "mode": "corrected", "reference": "wd_on"})
        with pytest.raises(ValueError, match=rf"'wd_on': its epochs have 6 steps, this run's {300 // size}"):
            train(other, tmp_path / "batches")
    norms = tmp_path / "wd_on" / "norms.safetensors"
    norms.write_bytes(norms.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"norms\.safetensors is no safetensors file, or not all of one"):
        train(config, tmp_path / "other")


def test_angular_keeps_every_norm(tmp_path: Path) -> None:
    for cell, options in (("recipe", {}), ("angle", {"angle": 0.02}), ("adamw", {"name": "adamw", "lr": 1e-3})):
        train(small_run(optim={"mode": "angular", "weight_decay": 0.05, **options}), tmp_path / cell)
        recording = Recording.load(tmp_path / cell / "norms.safetensors")
        for name in recording.names:
            norms = recording.norms[name]
            torch.testing.assert_close(norms[-1], norms[0], rtol=1e-4, atol=0)


def groups_of(config: RunConfig) -> dict[str, float]:
    data = load_data(config.data)
    model = build_model(config.model, data)
    example = Classification(data, 0.0, torch.device("cpu")).example(torch.device("cpu"))  # type: ignore[arg-type]
    regime = build_regime(config, model, 6, find_invariant(config, model, example))
    return {n: g["weight_decay"] for g in regime.optimizer.param_groups for n in g["param_names"]}


def test_what_decays() -> None:
    on = groups_of(small_run())
    assert on["features.0.weight"] == 5e-3
    assert on["classifier.weight"] == 5e-4
    assert on["classifier.bias"] == on["features.1.norm.weight"] == 0
    off = groups_of(small_run(optim={"mode": "wd_off"}))
    assert off["features.0.weight"] == 0
    assert off["classifier.weight"] == 5e-4
    every = groups_of(small_run(optim={"decay_norms": True, "last_layer_weight_decay": None}))
    assert set(every.values()) == {5e-3}
    free = {"model": {"weight_norm": "wn"}, "optim": {"gain_weight_decay": 1e-6}}
    wn = groups_of(small_run(**free))  # g, v, the classifier and vectors, each its own
    first, last = "features.0.parametrizations.weight", "classifier.weight"
    assert [wn[name] for name in (f"{first}.original0", f"{first}.original1", last)] == [1e-6, 5e-3, 5e-4]
    with pytest.raises(ValueError, match=r"optim\.gain_weight_decay"):
        small_run(optim={"gain_weight_decay": 1e-6})


def test_schedules() -> None:
    step = OptimConfig(milestones=(1, 2.5), gamma=0.1, epochs=4)
    assert [lr_factor(step, s, 10) for s in (0, 9, 10, 24, 25)] == [1, 1, 0.1, 0.1, 0.01]
    warm = OptimConfig(schedule="warmup_sqrt", warmup_steps=100)
    assert [lr_factor(warm, s, 10) for s in (0, 99, 399)] == [0.01, 1.0, 0.5]
    cosine = OptimConfig(schedule="cosine", epochs=2)
    assert lr_factor(cosine, 0, 10) == 1
    assert lr_factor(cosine, 10, 10) == pytest.approx(0.5)
    ramp = OptimConfig(schedule="constant", warmup_steps=4)
    assert [lr_factor(ramp, s, 10) for s in range(5)] == [0.25, 0.5, 0.75, 1, 1]


@pytest.mark.parametrize(
    "precision",
    [{"amp": "bf16"}, {"arithmetic": "fp16", "accumulate": "fp16"}],
    ids=["bf16", "fp16 arithmetic"],
)
def test_low_precision_trains_alike(tmp_path: Path, precision: dict[str, str]) -> None:
    full = train(small_run(optim={"epochs": 2}), tmp_path / "full").metrics
    low = train(small_run(optim={"epochs": 2}, precision=precision), tmp_path / "low").metrics
    assert low["train_loss"] != full["train_loss"]
    assert low["train_loss"] == pytest.approx(full["train_loss"], rel=0.15)


@pytest.mark.parametrize("scale", [128.0, 2.0**-16])
def test_units_decide_whether_l2_trains_in_fp16(tmp_path: Path, scale: float) -> None:
    """In fp32 they change nothing, and L1 in fp16 does not mind."""

    def run(norm: str, scale: float, accumulate: str | None) -> RunResult:
        model = {"norm": norm, "norm_input_scale": scale}
        precision = {"arithmetic": "fp16", "accumulate": accumulate} if accumulate else {}
        return train(
            small_run(optim={"epochs": 1}, model=model, precision=precision), tmp_path / f"{norm}_{accumulate}_{scale}"
        )

    def loss(*setting: Any) -> float:
        return run(*setting).metrics["train_loss"]  # type: ignore[no-any-return]

    for norm in ("l1", "l2"):
        assert loss(norm, scale, None) == loss(norm, 1.0, None)
    assert loss("l1", scale, "fp16") == pytest.approx(loss("l1", 1.0, None), rel=0.15)
    for accumulate in ("fp16", "fp32"):
        if scale > 1:  # every norm divides by infinity: only the classifier's bias is left
            assert loss("l2", scale, accumulate) > 0.95 * math.log(10)
        else:  # it divides by zero
            assert run("l2", scale, accumulate).status == "nan"


def test_fp16_with_a_scaler_and_clipping(tmp_path: Path) -> None:
    config = small_run(optim={"epochs": 1, "clip_norm": 1.0}, precision={"amp": "fp16"})
    assert train(config, tmp_path).metrics["train_loss"] < 3


@pytest.mark.parametrize("mode", ["wd_on", "wd_free"])
def test_an_epoch_whose_steps_all_overflow_is_an_epoch(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: scaler(device, init_scale=2.0**40))
    one_step = {"batch_size": 300, "train_size": 300, "val_size": 20}
    result = train(small_run(data=one_step, optim={"mode": mode}, precision={"amp": "fp16"}), tmp_path)
    assert result.status == "finished"
    assert len({r["norm"] for r in rows(tmp_path)}) == 1


@pytest.mark.parametrize("correction", ["epoch", "step"])
def test_a_reference_that_left_out_more_fp16_steps_lasts_to_the_end(
    correction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler = torch.amp.GradScaler
    half, record = {"amp": "fp16"}, {"record": correction, "device": "cpu"}
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: scaler(device, init_scale=2.0**23))
    train(small_run(precision=half, runtime=record), tmp_path / "wd_on")
    recording = Recording.load(tmp_path / "wd_on" / "norms.safetensors")
    assert 12 < recording.steps[-1] < 17  # of 18
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    for mode in ("corrected", "norm_schedule"):
        optim = {"mode": mode, "reference": "wd_on", "correction": correction}
        result = train(small_run(optim=optim, precision=half), tmp_path / mode)
        assert (result.status, result.metrics["epoch"]) == ("finished", 3)
    assert result.metrics["norm"] == pytest.approx(  # F4
        math.sqrt(10) * torch.cat([norms[-1] for norms in recording.norms.values()]).mean().item(), rel=1e-2
    )
    with pytest.raises(ValueError, match=r"norms were recorded for 1[3-6] steps, this run takes 24"):
        train(small_run(optim={**optim, "epochs": 4}, precision=half), tmp_path / "longer")


def test_clipping_and_label_smoothing_act(tmp_path: Path) -> None:
    plain = train(small_run(optim={"epochs": 1}), tmp_path / "a").metrics["train_loss"]
    clipped = train(small_run(optim={"epochs": 1, "clip_norm": 0.01}), tmp_path / "b").metrics["train_loss"]
    smooth = train(small_run(optim={"epochs": 1, "label_smoothing": 0.3}), tmp_path / "c").metrics["train_loss"]
    assert len({plain, clipped, smooth}) == 3


def test_nan_ends_with_a_result(tmp_path: Path) -> None:
    config = small_run(optim={"lr": 1e30})
    result = train(config, tmp_path)
    assert result.status == "nan"
    assert "NaN or infinite in epoch 1" in result.message
    error = read_json(tmp_path / "error.json")
    assert error is not None
    assert error["kind"] == "nan"
    assert not (tmp_path / "summary.json").exists()
    stamp = (tmp_path / "config.json").stat().st_mtime_ns
    again = train(config, tmp_path)
    assert (again.status, again.message) == ("nan", result.message)
    assert (tmp_path / "config.json").stat().st_mtime_ns == stamp


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_run()
    train(config, tmp_path / "whole")
    sync = os.fsync

    def fail_later(descriptor: int) -> None:
        if (tmp_path / "run" / "checkpoints" / "epoch-000002.pt").exists():  # in the midst of the second checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fail_later)
        with pytest.raises(RunError, match=r"no space left to write .* intact") as caught:
            train(config, tmp_path / "run")
    assert caught.value.kind == "disk_full"
    folder = tmp_path / "run"
    assert not list(folder.rglob("*.tmp"))
    assert (folder / "checkpoints" / "epoch-000001.sha256").is_file()
    train(config, folder)
    assert rows(folder) == rows(tmp_path / "whole")


def test_unwritable_folder_other_run_and_second_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunError, match="cannot write") as caught:
        train(small_run(), tmp_path / "file" / "run")
    assert caught.value.kind == "folder"

    finished = train(small_run(optim={"epochs": 1}), tmp_path / "run").metrics
    with pytest.raises(RunError, match=r"holds a run of other settings \(seed: 0 and 9\)"):
        train(small_run(optim={"epochs": 1}, seed=9), tmp_path / "run")
    assert read_json(tmp_path / "run" / "summary.json") == finished
    assert not (tmp_path / "run" / "error.json").exists()

    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process"):
            train(small_run(optim={"epochs": 1}), tmp_path / "run")


def test_a_file_system_without_locks_is_no_second_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: Any, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    assert train(small_run(optim={"epochs": 1}), tmp_path).status == "finished"


def test_beginning_afresh_throws_away_runs_only(tmp_path: Path) -> None:
    for name in ("checkpoints/mine.pt", "tensorboard/mine", "summary.json"):  # a project's own
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=r"batch_size is 5000"):
        train(small_run(data={"batch_size": 5000}), tmp_path, resume=False)
    assert (tmp_path / "summary.json").read_text() == (tmp_path / "tensorboard" / "mine").read_text() == "mine"
    train(small_run(optim={"epochs": 1}), tmp_path, resume=False)
    first = rows(tmp_path)
    train(small_run(optim={"epochs": 1}, seed=1), tmp_path, resume=False)
    assert rows(tmp_path) != first
    assert (tmp_path / "checkpoints" / "mine.pt").read_text() == "mine"


def test_a_fresh_run_that_cannot_be_set_up_leaves_the_old_one_as_it_was(tmp_path: Path) -> None:
    def text(vocab_size: int, **model: Any) -> RunConfig:
        data = {"name": "numbers", "train_size": 100, "val_size": 5, "vocab_size": vocab_size}
        return small_run(
            data=data,
            model={"name": "transformer", "norm": "l2", "layers": 1, "d_model": 8, **model},
            optim={"epochs": 1},
        )

    train(text(300, heads=2), tmp_path)
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    for failing in (
        small_run(data={"name": "tiny_imagenet", "dir": "absent"}),
        text(320, heads=3),  # which is found out after the data
    ):
        with pytest.raises(ValueError):
            train(failing, tmp_path, data_dir=tmp_path, resume=False)
        assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
    train(text(320, heads=2), tmp_path, resume=False)
    assert json.loads((tmp_path / "config.json").read_text())["data"]["vocab_size"] == 320
    assert len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]) == 320


def test_a_run_that_never_trained_leaves_its_folder_to_another(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"batch_size is 5000"):
        train(small_run(data={"batch_size": 5000}), tmp_path / "run")
    (tmp_path / "run" / "tokenizer.json").write_text("of the first one's text")
    assert train(small_run(optim={"epochs": 1}), tmp_path / "run").status == "finished"
    assert not (tmp_path / "run" / "tokenizer.json").exists()


def test_missing_data_is_told_in_the_folder_too(tmp_path: Path) -> None:
    config = small_run(data={"name": "tiny_imagenet", "dir": "absent"})
    with pytest.raises(ValueError, match="no image folder"):
        train(config, tmp_path / "run", data_dir=tmp_path)
    error = json.loads((tmp_path / "run" / "error.json").read_text())
    assert "no image folder" in error["message"]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="sees no GPU"):
            train(small_run(runtime={"device": "cuda"}), tmp_path / "gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("amp", ["none", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("optim", "model"),
    [
        ({}, {}),
        ({"mode": "wd_free"}, {}),
        ({"mode": "angular"}, {}),
        ({"mode": "norm_schedule"}, {}),
        ({"name": "adamw", "lr": 1e-3}, {}),
        ({}, {"weight_norm": "wn"}),
        ({}, {"weight_norm": "bwn"}),
    ],
    ids=["sgd", "wd_free", "angular", "norm_schedule", "adamw", "wn", "bwn"],
)
def test_cuda_graph_takes_the_eager_steps(
    tmp_path: Path, amp: str, optim: dict[str, Any], model: dict[str, Any]
) -> None:
    losses = []
    for mode in ("none", "cudagraph"):
        config = small_run(
            optim={"weight_decay": 5e-3, **optim},
            model={"norm": "native", **model},
            precision={"amp": amp, "tf32": False},
            runtime={"device": "cuda", "compile": mode},
        )
        train(config, tmp_path / mode)
        losses.append([r["train_loss"] for r in rows(tmp_path / mode)])
    assert losses[1] == pytest.approx(losses[0], rel=0.02 if amp != "none" else 2e-3)


@pytest.mark.gpu
def test_cuda_graph_run_resumes(tmp_path: Path) -> None:
    config = small_run(runtime={"device": "cuda", "compile": "cudagraph"})
    train(config, tmp_path / "whole")

    def stop(event: dict[str, Any]) -> None:
        if event.get("epoch") == 2 and "val_loss" in event:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "broken", progress=stop)
    train(config, tmp_path / "broken")
    whole, broken = rows(tmp_path / "whole"), rows(tmp_path / "broken")
    assert [r["train_loss"] for r in broken] == pytest.approx([r["train_loss"] for r in whole], rel=1e-2)


def test_a_first_step_that_overflows_leaves_no_momentum() -> None:
    """torch's fused SGD (on the CPU, too) leaves that step out, but keeps momenta that nothing has written."""
    torch.manual_seed(0)
    optim = OptimConfig(lr=0.1, momentum=0.9)
    weights = {}
    for device in ("cpu", "cuda"):  # the second one is fused
        weight = torch.nn.Parameter(torch.ones(1000))
        rubbish = torch.full((1000,), math.nan)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = _optimizer(optim, [{"params": [weight]}], torch.device(device), False)
        del rubbish  # its memory is the next one's
        for factor in (math.inf, 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        weights[device] = weight.detach()
    assert weights["cpu"][0] == pytest.approx(0.71)
    torch.testing.assert_close(weights["cuda"], weights["cpu"])
