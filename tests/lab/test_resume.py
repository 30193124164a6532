"""Nothing is lost: runs that are killed, interrupted or find a checkpoint damaged end as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from normmatters.lab import checkpoint
from normmatters.lab.config import to_json
from normmatters.lab.errors import RunError
from normmatters.lab.files import read_json
from normmatters.lab.regimes import Regime, _optimizer
from normmatters.lab.run import train
from support.lab_runs import rows, small_run

MODES: dict[str, dict[str, Any]] = {
    "step": {"runtime": {"record": "step"}},
    "wd_free": {"optim": {"mode": "wd_free"}},
    "wd_follows_lr": {"optim": {"mode": "wd_follows_lr"}},
    "corrected": {"optim": {"mode": "corrected", "reference": "wd_on"}},
    "norm_schedule": {"optim": {"mode": "norm_schedule", "reference": "wd_on"}},
    "norms_of_the_lr": {"optim": {"mode": "norm_schedule"}},
    "angular": {"optim": {"mode": "angular"}},
    "adamw": {"optim": {"name": "adamw", "lr": 1e-3}},
    "bwn": {"model": {"weight_norm": "bwn"}},
    "fp16": {"precision": {"amp": "fp16"}},
    "dropout": {
        "data": {"name": "numbers", "vocab_size": 100, "tokens": 400, "train_size": 100, "val_size": 10},
        "model": {"name": "lstm", "d_model": 16, "layers": 1, "norm": "l2"},
        "optim": {"name": "adam", "lr": 1e-3},
        "runtime": {"bleu": "none"},
    },
}


def with_checkpoints(sections: dict[str, Any]) -> dict[str, Any]:
    return {**sections, "runtime": {"checkpoint_seconds": 0.0, "device": "cpu", **sections.get("runtime", {})}}


class Stop(Exception):
    pass


def interrupt_after(epoch: int) -> Any:
    def progress(event: dict[str, Any]) -> None:
        if event.get("epoch") == epoch and "val_loss" in event:
            raise Stop

    return progress


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return bool(a == b)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of cells with the recorded run ``wd_on``."""
    folder = tmp_path_factory.mktemp("cells")
    train(small_run(cell="wd_on"), folder / "wd_on")
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_interrupted_runs_end_the_same(mode: str, reference: Path) -> None:
    """Interrupted in the third epoch, with the metrics ahead of the checkpoint; the last state is equal bit by bit."""
    config = small_run(cell=mode, **with_checkpoints(MODES[mode]))
    whole, broken = reference / mode, reference / f"{mode}_broken"
    train(config, whole)
    with pytest.raises(Stop):
        train(config, broken, progress=interrupt_after(2))
    assert len(rows(broken)) == 2
    assert checkpoint.epochs(broken / "checkpoints")[-1][0] == 1
    train(config, broken)
    assert rows(broken) == rows(whole)
    states = [checkpoint.load(folder / "checkpoints")[0] for folder in (whole, broken)]
    assert states[0] is not None
    assert states[1] is not None
    for key in ("model", "regime", "scaler", "random", "dropout"):
        assert equal(states[0][key], states[1][key]), key
    assert equal(*(load_file(folder / "norms.safetensors") for folder in (whole, broken)))
    assert not (broken / "error.json").exists()


@pytest.mark.parametrize("optim", [{}, {"name": "adam"}, {"mode": "wd_free"}, {"mode": "angular"}], ids=str)
def test_a_state_moves_between_eager_and_captured_steps(optim: dict[str, Any]) -> None:
    """As from a CPU to a GPU: a learning rate that came as a number would stay in the graph for ever."""
    config = small_run(optim={"milestones": [1], "epochs": 2, "weight_decay": 5e-3, **optim}).optim

    def regime(capture: bool) -> Regime:
        torch.manual_seed(0)
        weight, cpu = torch.nn.Parameter(torch.randn(4, 8)), torch.device("cpu")
        group = {"params": [("w", weight)], "weight_decay": 5e-3, "weight_decay_free": True, "angular": True}
        return Regime(_optimizer(config, [group], cpu, capture), config, 5, None, None, {}, capture)

    eager, captured = regime(False), regime(True)
    captured.load_state_dict(eager.state_dict())
    captured.before_step(5)  # behind the milestone
    (group,) = captured.optimizer.param_groups
    assert isinstance(group["lr"], torch.Tensor)
    assert group["lr"].item() == pytest.approx(0.1 * config.lr)
    assert group.get("capturable", True)

    eager.load_state_dict(captured.state_dict())
    (group,) = eager.optimizer.param_groups
    assert group["lr"] == pytest.approx(0.1 * config.lr)
    assert isinstance(group["lr"], float)
    torch.nn.functional.normalize(group["params"][0], dim=1)[0, 0].backward()
    eager.optimizer.step()  # torch's Adam refuses capturable=True on a CPU


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    """Two kills, each at a random moment; then the same command finishes the run as if there had been none."""
    config = small_run(optim={"epochs": 12, "milestones": [6]}, runtime={"record": "step", "threads": 1})
    (tmp_path / "run.json").write_text(to_json(config))
    program = (
        "import json, sys; from normmatters.lab.config import from_dict; from normmatters.lab.run import train; "
        "train(from_dict(json.load(open(sys.argv[1]))), sys.argv[2])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run.json"), str(tmp_path / "killed")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    generator = random.Random(time.time_ns())  # other moments every time: any failure is a real one
    metrics = tmp_path / "killed" / "metrics.jsonl"

    def lines() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    for goal in (2, 6):
        process = subprocess.Popen(command, env=environment)
        give_up = time.monotonic() + 120
        while lines() < goal and process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "killed" / "summary.json").exists()
    train(config, tmp_path / "killed")
    train(config, tmp_path / "whole")
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert equal(*(load_file(tmp_path / name / "norms.safetensors") for name in ("killed", "whole")))


def damage(kind: str, path: Path) -> None:
    data = path.read_bytes()
    if kind == "flipped":
        path.write_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
    elif kind == "truncated":
        path.write_bytes(data[:-100])
    elif kind == "no text":
        path.with_suffix(".sha256").write_bytes(b"\xff\x00")
    else:
        path.with_suffix(".sha256").unlink()


@pytest.mark.parametrize("kind", ["flipped", "truncated", "no checksum", "no text"])
def test_damaged_checkpoint_falls_back(tmp_path: Path, kind: str) -> None:
    config = small_run()
    train(config, tmp_path / "whole")
    with pytest.raises(Stop):
        train(config, tmp_path / "run", progress=interrupt_after(3))
    newest = checkpoint.epochs(tmp_path / "run" / "checkpoints")[-1]
    assert newest[0] == 2
    damage(kind, newest[1])
    strays = [tmp_path / "run" / ".summary.json.17.tmp", newest[1].with_name(".epoch-000003.pt.17.tmp")]
    for stray in strays:
        stray.write_bytes(b"cut off")
    result = train(config, tmp_path / "run")
    assert not any(stray.exists() for stray in strays)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert "checkpoint of epoch 2" in result.metrics["messages"][0]


def test_all_checkpoints_damaged_begins_again(tmp_path: Path) -> None:
    config = small_run()
    train(config, tmp_path / "whole")
    with pytest.raises(Stop):
        train(config, tmp_path / "run", progress=interrupt_after(3))
    for _, path in checkpoint.epochs(tmp_path / "run" / "checkpoints"):
        damage("truncated", path)
    result = train(config, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert len(result.metrics["messages"]) == 2


def test_checkpoints_keep_the_last_ones_and_load_without_pickle(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        checkpoint.save(tmp_path, epoch, {"epoch": epoch, "weights": torch.arange(3)}, keep=2)
    assert [e for e, _ in checkpoint.epochs(tmp_path)] == [2, 3]
    state, damaged = checkpoint.load(tmp_path)
    assert state is not None
    assert state["epoch"] == 3
    assert damaged == []

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("false",)

    checkpoint.save(tmp_path, 4, {"epoch": Evil()})
    with pytest.raises(RunError, match=r"epoch-000004\.pt has its checksum, but .*--fresh"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_checkpoint_takes_no_good_ones_place(tmp_path: Path, keep: int) -> None:
    """A kill may leave epoch 20 without its checksum; the run then goes on from 10, and may next save at 15."""
    checkpoint.save(tmp_path, 10, {"epoch": 10})
    damage("no checksum", checkpoint.save(tmp_path, 20, {"epoch": 20}))
    checkpoint.save(tmp_path, 15, {"epoch": 15}, keep)
    state, damaged = checkpoint.load(tmp_path)
    assert state is not None
    assert state["epoch"] == 15
    assert damaged == []
    assert [e for e, _ in checkpoint.epochs(tmp_path)] == [10, 15][-keep:]


def test_the_last_checkpoint_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed just before it ended has no other one to fall back on."""
    done = train(small_run(), tmp_path).metrics
    (tmp_path / "summary.json").unlink()

    def killed(path: Path, data: bytes) -> None:
        raise Stop

    monkeypatch.setattr(checkpoint, "write_atomic", killed)
    assert train(small_run(), tmp_path).metrics == done
    assert checkpoint.load(tmp_path / "checkpoints")[1] == []


def test_a_checkpoint_of_something_else_is_told(tmp_path: Path) -> None:
    for number, foreign in enumerate(({"weights": 1}, {"config": "another"}, [1])):
        (tmp_path / str(number) / "checkpoints").mkdir(parents=True)
        checkpoint.save(tmp_path / str(number) / "checkpoints", 1, foreign)  # type: ignore[arg-type]
        with pytest.raises(RunError, match="of another config"):
            train(small_run(), tmp_path / str(number))


def test_a_run_does_not_go_on_with_more_data_than_it_began_with(tmp_path: Path) -> None:
    config = small_run(data={"name": "imagefolder", "dir": "mine", "batch_size": 10})
    generator = np.random.default_rng(0)

    def write(count: int) -> None:
        (tmp_path / "mine").mkdir(exist_ok=True)
        for split in ("train", "val"):
            np.save(tmp_path / "mine" / f"{split}_x.npy", generator.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8))
            np.save(tmp_path / "mine" / f"{split}_y.npy", np.arange(count) % 3)

    write(30)
    with pytest.raises(Stop):
        train(config, tmp_path / "run", data_dir=tmp_path, progress=interrupt_after(2))
    write(50)
    states = checkpoint.epochs(tmp_path / "run" / "checkpoints")
    with pytest.raises(RunError, match=r"an epoch had 3 steps and has 5 now: the data are not those .*--fresh"):
        train(config, tmp_path / "run", data_dir=tmp_path)
    assert checkpoint.epochs(tmp_path / "run" / "checkpoints") == states
    assert len(rows(tmp_path / "run")) == 2
    write(30)
    assert train(config, tmp_path / "run", data_dir=tmp_path).status == "finished"


def test_random_state_round_trip() -> None:
    state = checkpoint.random_state()
    first = torch.rand(1).item()
    checkpoint.set_random_state(state)
    assert torch.rand(1).item() == first


def test_a_run_that_has_begun_keeps_its_threads(tmp_path: Path) -> None:
    """On others its sums would round differently: half of the run would have other numbers."""
    config = small_run(runtime={"threads": 2})
    with pytest.raises(Stop):
        train(config, tmp_path, progress=interrupt_after(2))
    with pytest.raises(RunError, match=r"began with 2 threads.*with 1: --set runtime\.threads=2 resumes it"):
        train(small_run(runtime={"threads": 1}), tmp_path)
    assert train(small_run(), tmp_path).status == "finished"  # as none are asked for
    assert read_json(tmp_path / "config.json")["runtime"]["threads"] == 2  # type: ignore[index]
    assert read_json(tmp_path / "environment.json")["threads"] == 2  # type: ignore[index]


@pytest.mark.parametrize(
    "change", [{"model": {}}, {"rows": "[]"}, {"rows": "{"}, {"regime": 3}, {"epoch": "two"}], ids=str
)
def test_a_checkpoint_of_wrong_content_is_one_sentence(change: dict[str, Any], tmp_path: Path) -> None:
    config = small_run()
    with pytest.raises(Stop):
        train(config, tmp_path, progress=interrupt_after(2))
    folder = tmp_path / "checkpoints"
    state, _ = checkpoint.load(folder)
    checkpoint.save(folder, 2, {**state, **change})  # type: ignore[dict-item]
    with pytest.raises(RunError, match=r"last checkpoint .* does not fit this run .*--fresh"):
        train(config, tmp_path)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(RunError, match=r"cannot write .*\.lock"):
        train(small_run(), tmp_path / "run")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_checkpoint_whose_writing_was_stopped_does_not_sound_damaged(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"epoch": 1})
    checkpoint.save(tmp_path, 2, {"epoch": 2})
    (tmp_path / "epoch-000002.sha256").unlink()
    state, messages = checkpoint.load(tmp_path)
    assert state == {"epoch": 1}
    assert messages == ["checkpoint of epoch 2: the run was stopped while it was written"]
