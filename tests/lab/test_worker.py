"""Runs that share a process, a thread each: the numbers of runs alone, errors of their own, and a way to stop them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normmatters.lab import worker
from normmatters.lab.config import RunConfig, from_dict
from normmatters.lab.reproduce import Runner, plan
from normmatters.lab.trainer import RunError, train
from normmatters.lab.worker import Workers, shares_a_process
from support.lab_runs import rows, small_run

MICRO = ["optim.epochs=2", "data.train_size=120", "data.val_size=200", "optim.milestones=[1]", "runtime.threads=1"]


def test_only_graphs_on_a_gpu_share_a_process() -> None:
    graph = small_run(runtime={"device": "cuda", "compile": "cudagraph"})
    assert shares_a_process(graph, workers=4)
    assert not shares_a_process(graph, workers=1)
    assert not shares_a_process(small_run(runtime={"device": "cuda"}), workers=4)
    assert not shares_a_process(small_run(runtime={"device": "cpu", "compile": "cudagraph"}), workers=4)


def test_an_error_is_the_runs_own(tmp_path: Path) -> None:
    keep = {"fig1/wd_on", "fig1/wd_off", "fig1/corrected"}
    jobs = [j for j in plan(["fig1"], "quick", tmp_path, overrides=MICRO) if j.id in keep]
    broken = next(j for j in jobs if j.id == "fig1/wd_on")
    broken.folder.mkdir(parents=True)
    (broken.folder / "checkpoints").write_text("in the way")
    Runner(jobs, workers=2, threads=True).run()
    assert {j.id: j.state for j in jobs} == {
        "fig1/wd_on": "failed",
        "fig1/wd_off": "done",
        "fig1/corrected": "skipped",
    }
    assert "checkpoints" in broken.reason
    assert "Traceback" in (broken.folder / "log.txt").read_text()


STARTED = """
import signal
from multiprocessing import util
from pathlib import Path
from normmatters.lab.config import from_dict
from normmatters.lab.worker import Workers

spawn = util.spawnv_passfds

def spy(path, words, fds):
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if not any("resource_tracker" in str(word) for word in words):
        raise SystemExit(0 if blocked else "Ctrl-C would reach the runs")
    return spawn(path, words, fds)

util.spawnv_passfds = spy
Workers(1, None).start(from_dict({}, "here"), Path("."))
"""


def test_ctrl_c_does_not_reach_what_runs_are_started_by(tmp_path: Path) -> None:
    """In a process of its own: here a server may be running already."""
    done = subprocess.run([sys.executable, "-c", STARTED], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_interrupt_is_heard_again_when_a_run_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, **_: Any) -> None: ...

        def start(self) -> None:
            raise OSError("no more processes")

    workers = Workers(1, None)
    monkeypatch.setattr(workers._context, "Process", Process)
    with pytest.raises(OSError, match="no more"):
        workers.start(small_run(), tmp_path)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_server_that_is_killed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing raises EOFError then, which Typer takes for the user's wish to end: "Aborted"."""

    class Killed(_Process):
        def start(self) -> None:
            raise EOFError("unexpected EOF")

    workers = Workers(1, None)
    monkeypatch.setattr(workers._context, "Process", Killed)
    with pytest.raises(OSError, match="was killed while a run was started"):
        workers.start(small_run(), tmp_path / "run")


def test_a_stopped_thread_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    config = small_run(optim={"epochs": 12}, runtime={"threads": 1})
    workers = Workers(1, None, threads=True)
    started = workers.start(config, tmp_path / "run")
    deadline = threading.Event()
    while started.running and not (tmp_path / "run" / "metrics.jsonl").is_file():
        deadline.wait(0.01)
    workers.stop([started])
    assert not started.running
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not (tmp_path / "run" / "error.json").exists()
    assert train(config, tmp_path / "run").status == "finished"
    assert [row["epoch"] for row in rows(tmp_path / "run")] == list(range(1, 13))


def _breaks(config: RunConfig, folder: Path, *_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA error: capture\nwith details")


def test_a_run_that_fails_beside_others_is_tried_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it finishes there, threads were to blame, and no run is one from then on."""
    started: list[bool] = []
    start = Workers.start

    def spy(self: Workers, *args: Any, **options: Any) -> worker.Worker:
        begun = start(self, *args, **options)
        started.append(begun.in_thread)
        return begun

    monkeypatch.setattr(Workers, "start", spy)
    monkeypatch.setattr(worker, "_train", _breaks)
    monkeypatch.setattr(worker, "shares_a_process", lambda config, workers: True)
    jobs = [j for j in plan(["fig1"], "quick", tmp_path, overrides=MICRO) if j.id in ("fig1/wd_on", "fig1/wd_off")]
    runner = Runner(jobs, workers=1)
    monkeypatch.setattr(runner._workers._context, "Process", _Process)
    assert runner.run() == [], [j.reason for j in jobs]
    assert started == [True, False, False]  # the first run twice; the second one is a process at once
    assert [len(rows(job.folder)) for job in jobs] == [2, 2]
    assert runner.messages == [
        f"{jobs[0].id} seed 0 failed beside other runs (RuntimeError: CUDA error: capture): "
        "it is tried again in a process of its own",
        f"{jobs[0].id} seed 0 finished in a process of its own: all runs from here on have one",
    ]
    assert runner.messages[0] in (jobs[0].folder / "log.txt").read_text()

    asked_for_threads = Runner([replace(jobs[0], state="waiting", folder=tmp_path / "other")], workers=1, threads=True)
    assert [j.state for j in asked_for_threads.run()] == ["failed"]
    assert len(asked_for_threads.messages) == 0


def test_a_run_that_fails_in_a_process_too_leaves_the_others_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_all, tried = worker._train, []

    def breaks_one(config: RunConfig, folder: Path, *args: Any, **options: Any) -> None:
        tried.append((config.cell, "run" in threading.current_thread().name))
        return (_breaks if config.cell == "wd_off" else train_all)(config, folder, *args, **options)

    class Fails(_Process):
        def start(self) -> None:
            tried.append((self.args[0]["cell"], False))
            self.exitcode = 1

    monkeypatch.setattr(worker, "_train", breaks_one)
    monkeypatch.setattr(worker, "shares_a_process", lambda config, workers: True)
    jobs = [j for j in plan(["fig1"], "quick", tmp_path, overrides=MICRO) if j.id in ("fig1/wd_on", "fig1/wd_off")]
    jobs.sort(key=lambda job: job.id)  # wd_off is first
    runner = Runner(jobs, workers=1)
    monkeypatch.setattr(runner._workers._context, "Process", Fails)
    assert [job.id for job in runner.run()] == ["fig1/wd_off"]
    assert tried == [("wd_off", True), ("wd_off", False), ("wd_on", True)]
    assert jobs[0].reason.startswith("exit code 1")  # of the second try
    assert len(runner.messages) == 1


def test_an_error_outside_of_the_run_says_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that an earlier run's error has broken fails before a run has begun: that is tried in a process, too."""
    raised: list[Exception] = [RuntimeError("CUDA error"), ValueError("no such folder"), RunError("busy", "in use")]

    def breaks(*_: Any, **__: Any) -> None:
        raise raised[0]

    monkeypatch.setattr(worker, "_train", breaks)
    kinds = []
    while raised:
        kinds.append(worker._run_in_thread(small_run(), tmp_path, None, threading.Event()))
        raised.pop(0)
    assert kinds == [
        {"kind": "exception", "message": "RuntimeError: CUDA error"},
        {"kind": "config", "message": "no such folder"},
        {"kind": "busy", "message": "in use"},
    ]
    assert not (tmp_path / "error.json").exists()  # the folder may be another run's


def test_a_folder_that_cannot_be_written_is_the_reason(tmp_path: Path) -> None:
    """Neither error.json nor log.txt can say so, and the terminal shows no traceback."""
    (tmp_path / "run" / "log.txt").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    for threads in (True, False):
        workers = Workers(1, None, threads=threads)
        begun = workers.start(small_run(), tmp_path / "run")
        while begun.running:
            time.sleep(0.05)
        told = begun.error()
        assert told["kind"] == "folder"
        assert told["message"].startswith(f"cannot write {tmp_path / 'run' / 'checkpoints'}")
        workers.stop([])


def test_text_shares_a_process_unless_its_dropout_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def text(compile: str) -> RunConfig:
        runtime = {"device": "cuda", "compile": compile}
        return from_dict({"data": {"name": "numbers"}, "model": {"name": "lstm"}, "runtime": runtime})

    assert shares_a_process(text("cudagraph"), workers=4)
    assert not shares_a_process(text("none"), workers=4)
    workers = Workers(2, None, threads=True)
    monkeypatch.setattr(workers._context, "Process", _Process)
    monkeypatch.setattr(_Process, "start", lambda self: None)
    monkeypatch.setattr(worker, "_run_in_thread", lambda *_: None)
    assert workers.start(text("cudagraph"), tmp_path / "graphs").in_thread
    assert not workers.start(text("compile"), tmp_path / "compiled").in_thread


class _Process:
    """As a process of its own would, it trains with what it is given."""

    exitcode = 0

    def __init__(self, target: Any, args: tuple[dict[str, Any], str, str | None, Any], daemon: bool) -> None:
        assert target is worker._run_in_process
        self.args = args

    def start(self) -> None:
        train(from_dict(self.args[0]), self.args[1], data_dir=self.args[2])


@pytest.mark.gpu
def test_all_modes_share_a_gpu_and_step_in_graphs(tmp_path: Path) -> None:
    losses = {}
    for compile in ("none", "cudagraph"):
        sets = [*MICRO, "optim.epochs=3", "precision.tf32=false", "runtime.device=cuda", f"runtime.compile={compile}"]
        jobs = plan(["fig1"], "quick", tmp_path / compile, overrides=sets)
        graphs = compile == "cudagraph"
        if graphs:  # two of a mode: while one captures, another one of the same kind is in the midst of its work
            jobs += plan(["fig1"], "quick", tmp_path / "again", overrides=sets)
        assert Runner(jobs, workers=12 if graphs else 1, threads=True).run() == [], [j.reason for j in jobs]
        losses[compile] = {j.id: [r["train_loss"] for r in rows(j.folder)] for j in jobs[:6]}
    for job in jobs[:6]:
        again = rows(tmp_path / "again" / job.folder.relative_to(tmp_path / "cudagraph"))
        assert [r["train_loss"] for r in again] == pytest.approx(losses["cudagraph"][job.id], rel=2e-2), job.id
    assert len(losses["none"]) == 6
    for id, expected in losses["none"].items():
        assert losses["cudagraph"][id] == pytest.approx(expected, rel=2e-2), id
