"""The command as a user meets it: help that teaches, errors in one line, nothing slow before it is needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from normmatters import cli
from normmatters.lab.config import to_json
from normmatters.lab.plan import PlannedRun, make_plan
from normmatters.lab.runner import Runner
from normmatters.lab.terminal import RunsView, show_reasons
from support.synthetic_runs import write_run

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: starting another one for each error would take most of the time."""
    for key in ("COLUMNS", "NO_COLOR", "TERM"):
        monkeypatch.setenv(key, ENV[key])

    def call(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["normmatters", *words])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return call


@pytest.mark.parametrize("command", ["reproduce", "train", "report", "bench", "explain", "data prepare"])
def test_help_teaches_by_example(run: Run, command: str) -> None:
    done = run(*command.split(), "--help")
    assert done.returncode == 0
    assert "Examples" in done.stdout
    assert f"normmatters {command}" in done.stdout


def test_help_loads_nothing_slow() -> None:
    code = (
        "import sys; sys.argv = ['normmatters', '--help']\n"
        "from normmatters.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "slow = {'matplotlib', 'sklearn', 'normmatters.lab.run', 'normmatters.lab.report'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=ENV)
    assert done.returncode == 0, done.stderr
    assert "reproduce all" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reproduce", "fgi1"], "did you mean 'fig1'"),
        (["reproduce", "fig1", "--preset", "quik"], "did you mean 'quick'"),
        (["reproduce", "fig1", "--set", "optim.lrr=1"], "did you mean 'optim.lr'"),
        (["reproduce", "all", "fgi1"], "did you mean 'fig1'"),
        (["reproduce", "supp2", "--data", "cifar", "--out", "OUT"], "did you mean 'cifar10'"),
        (["reproduce", "fig1", "--device", "mps", "--out", "OUT"], "expected auto, cpu, cuda or cuda:N"),
        (["reproduce", "fig1", "--device", "gpu7", "--out", "OUT"], "expected auto, cpu, cuda or cuda:N"),
        (
            ["reproduce", "fig1", "--set", "lr=1", "--out", "OUT"],
            "--set lr=1: unknown key 'lr'; did you mean 'optim.lr'",
        ),
        (
            ["reproduce", "fig1", "--set", "optim.lr=fast", "--out", "OUT"],
            "--set optim.lr=fast: optim.lr must be a number",
        ),
        (
            ["reproduce", "fig1", "--set", "optim.lr=-1", "--out", "OUT"],
            "--set optim.lr=-1: optim.lr must be a positive",
        ),
        (["reproduce", "fig1", "--set", "optim.lr=" + "[" * 5000, "--out", "OUT"], "optim.lr must be a number"),
        (["reproduce", "fig1", "--data-dir", "nowhere", "--out", "OUT"], "--data-dir nowhere: no such folder"),
        (["reproduce", "fig1", "--out", "bad\udcff"], "expected a name in UTF-8"),
        (["train", "nowhere.toml"], "no such config file"),
        (["report", "nowhere"], "no such folder"),
        (["publish", "nowhere"], "no such folder"),
        (["publish", "--to", "nowhere"], "no such folder"),
        (["data", "prepare", "cifar"], "did you mean 'cifar10'"),
        (["bench", "laeyrs"], "laeyrs"),
        (["bench", "layers", "--smoke", "--device", "gpu7"], "expected the device cpu or cuda, got 'gpu7'"),
        (["explain", "--lr", "-1"], "lr"),
    ],
)
def test_an_error_is_one_line(run: Run, words: list[str], message: str, tmp_path: Path) -> None:
    done = run(*(str(tmp_path) if w == "OUT" else w for w in words))
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing half written


def test_more_jobs_than_memory_is_refused_before_anything_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normmatters.lab.memory.free_bytes", lambda device: 2**30)
    done = run("reproduce", "fig1", "--jobs", "4", "--device", "cpu", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "at most --jobs 2" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(run: Run) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        run("report", "nowhere", "--debug")


@pytest.mark.parametrize(
    ("with_decay", "mark", "difference"),
    [(0.88, "x ", "88.00 - 98.00 = -10.00"), (0.99, "+ ", "99.00 - 98.00 = +1.00")],
)
def test_a_terminal_without_unicode_stops_nothing_and_loses_no_sign(
    with_decay: float, mark: str, difference: str, tmp_path: Path
) -> None:
    for cell, final in (("wd_on", with_decay), ("wd_off", 0.98)):
        for seed in range(3):
            write_run(tmp_path / "runs", f"fig1/{cell}", final=final + seed * 1e-5, seed=seed)
    write_run(tmp_path / "runs", "fig1/corrected", final=with_decay)
    command = [sys.executable, "-m", "normmatters", "report", str(tmp_path / "runs"), "--out", str(tmp_path / "page")]
    env = {**ENV, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    decay = next(line for line in lines if "Weight decay improves" in line)
    assert decay.startswith(mark)
    assert difference in decay
    assert next(line for line in lines if "follows" in line).startswith("- ")


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('No module', name='typer')")
    command, env = [sys.executable, "-m", "normmatters", "--help"], {**ENV, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1
    assert "needs typer: run pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_torch_is_loaded_is_no_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a test run in the background ignores it
        "from normmatters_command import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=ENV)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""


def test_a_damaged_file_and_an_unwritable_place_are_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[optim]\nmomentun = 0.9\n")
    done = run("train", str(tmp_path / "bad.toml"))
    assert done.returncode == 2
    assert "did you mean 'optim.momentum'" in done.stderr
    (tmp_path / "file").write_text("")
    write_run(tmp_path / "runs", "fig1/wd_on")
    done = run("report", str(tmp_path / "runs"), "--out", str(tmp_path / "file" / "below"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_explain_and_report_print_their_numbers(run: Run, tmp_path: Path) -> None:
    done = run("explain", "--lr", "0.1", "--wd", "5e-4", "--momentum", "0.9")
    assert "0.007255 rad" in done.stdout  # sqrt(2 * 0.1 * 5e-4 / 1.9)
    write_run(tmp_path / "runs", "fig2/resnet18_l1", final=0.9)
    write_run(tmp_path / "runs", "fig2/resnet18_l2", final=0.901)
    done = run("report", str(tmp_path / "runs"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "90.00 − 90.10 = −0.10" in done.stdout
    assert str(tmp_path / "out" / "report.html") in done.stdout.replace("\n", "")


def test_train_runs_a_cell_and_goes_on(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        'experiment = "mine"\ncell = "try"\n[data]\ntrain_size = 200\n[optim]\nepochs = 3\n'
    )
    words = ["train", "mine.toml", "--set", "optim.epochs=1", "--set", "model.norm=l1", "--device", "cpu"]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "mine" / "try,optim.epochs=1,model.norm=l1" / "seed0"
    config = json.loads((folder / "config.json").read_text())
    assert (config["model"]["norm"], config["optim"]["epochs"]) == ("l1", 1)
    summary = json.loads((folder / "summary.json").read_text())
    assert f"{summary['val_acc']:.2f} %" in done.stdout
    again = run(*words)
    assert again.returncode == 0
    assert json.loads((folder / "summary.json").read_text()) == summary
    beside = run(*words, "--set", "optim.lr=0.2")
    assert beside.returncode == 0, beside.stderr  # in a folder of its own
    words += ["--out", str(folder)]
    other = run(*words, "--set", "optim.lr=0.3")
    assert other.returncode == 2
    said = "a run of other settings (optim.lr: 0.1 and 0.3): choose another folder, or throw it away (--fresh"
    assert said in other.stderr
    assert json.loads((folder / "summary.json").read_text()) == summary
    fresh = run(*words, "--set", "optim.lr=0.3", "--fresh")
    assert fresh.returncode == 0, fresh.stderr
    assert json.loads((folder / "config.json").read_text())["optim"]["lr"] == 0.3
    for _ in range(2):  # and when it is asked for again
        diverged = run(*words, "--set", "optim.epochs=2", "--set", "optim.lr=1e38", "--out", "diverged")
        assert diverged.returncode == 1
        assert "NaN or infinite in epoch 2" in diverged.stdout


def test_train_names_a_run_after_its_place_and_says_what_went_otherwise(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = '[data]\ntrain_size = 200\n[optim]\nepochs = 2\n[runtime]\ncompile = "cudagraph"\ndevice = "cpu"\n'
    Path("mine.toml").write_text(text + "checkpoint_seconds = 0\n")
    first = run("train", "mine.toml")
    folder = Path("runs/here/mine/seed0")
    assert (folder / "summary.json").is_file(), first.stderr
    assert json.loads((folder / "config.json").read_text())["runtime"]["device"] == "cpu"  # which --device did not say
    assert "! runtime.compile=cudagraph needs one process and a GPU" in first.stdout
    (folder / "summary.json").unlink()
    for state in (folder / "checkpoints").glob("*.pt"):
        state.write_bytes(b"cut off")
    again = run("train", "mine.toml")
    assert "! checkpoint of epoch 2: epoch-000002.pt does not have its checksum" in again.stdout
    assert "epoch   1 of 2" in again.stdout


def test_one_reason_of_many_runs_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console, jobs = Console(), make_plan(["fig4"], "quick", tmp_path)
    view = RunsView(console, jobs)
    for job in jobs:
        job.state, job.reason = "failed", "no image folder [data]"
    view(Runner(jobs))
    show_reasons(console, jobs)
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("no image folder [data]")
    assert [line.endswith("seed 0  for the same reason") for line in said[1:-1]] == [True] * (len(jobs) - 1)
    assert said[-1] == "  ✗ fig2/resnet50_l2 seed 0, fig4/bwn seed 0, fig4/wn seed 0: no image folder [data]"


def test_what_is_finished_does_not_change_how_the_rest_rounds(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums round otherwise on more threads, so that neither --jobs nor what is finished may change their number."""
    threads: list[int | None] = []

    def note(self: Runner, *_: object) -> list[PlannedRun]:
        waiting = self.of("waiting")
        threads.extend(job.config.runtime.threads for job in waiting)
        for job in waiting[1:]:
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / "config.json").write_text(to_json(job.config))
            (job.folder / "error.json").write_text('{"kind": "nan"}')
        return []

    monkeypatch.setattr(Runner, "run", note)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    command = ("reproduce", "fig1", "--seeds", "1", "--jobs", "4", "--device", "cpu", "--out", str(tmp_path))
    assert run(*command).returncode == 0
    assert run(*command).returncode == 0
    assert threads == [1] * 6 + [1]
    begun = tmp_path / "quick" / "fig1" / "wd_on" / "seed0"
    (begun / "config.json").write_text((begun / "config.json").read_text().replace('"threads": 1', '"threads": 3'))
    (begun / "checkpoints").mkdir()
    (begun / "checkpoints" / "epoch-000001.sha256").write_text("")
    (begun / "error.json").unlink(missing_ok=True)
    assert run(*command).returncode == 0
    assert sorted(threads[7:]) == [1, 3]  # as it began


def test_a_run_that_diverged_after_some_epochs_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = make_plan(["fig4"], "quick", tmp_path)[:2]
    view = RunsView(Console(), jobs)
    for job, diverge in zip(jobs, (True, False)):
        write_run(tmp_path, job.id, diverge=diverge)
        job.state = "done"
    view(Runner(jobs))
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition("seed 0  ")[2] for line in said] == ["diverged", "90.00 %"]
    assert [line[0] for line in said] == ["!", "✓"]


def test_data_prepare_knows_the_embedded_sets(run: Run) -> None:
    done = run("data", "prepare", "digits")
    assert done.returncode == 0, done.stderr
    assert "10 classes" in done.stdout


def test_data_prepare_takes_a_set_smaller_than_a_batch(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tiny-imagenet-200").mkdir()
    for split in ("train", "val"):
        np.save(tmp_path / "tiny-imagenet-200" / f"{split}_x.npy", np.zeros((2, 8, 8, 3), np.uint8))
        np.save(tmp_path / "tiny-imagenet-200" / f"{split}_y.npy", np.arange(2))
    done = run("data", "prepare", "tiny_imagenet", "--data-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "2 classes, 3×8×8" in done.stdout
    assert "8000 pairs of sentences" in run("data", "prepare", "numbers").stdout
