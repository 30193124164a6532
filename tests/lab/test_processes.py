"""Runs that share a process, a thread each: the numbers of runs alone, errors of their own, and a way to stop them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from normmatters.lab.config import RunConfig, from_dict
from normmatters.lab.errors import RunError
from normmatters.lab.plan import PlannedRun, make_plan
from normmatters.lab.processes import Processes, train_when_free
from normmatters.lab.run import train
from normmatters.lab.runner import Runner
from normmatters.lab.side_by_side.threads import Threads
from support.fake_graphs import ThreadRunner
from support.lab_runs import rows, small_run

MICRO = ["optim.epochs=2", "data.train_size=120", "data.val_size=200", "optim.milestones=[1]", "runtime.threads=1"]


def test_only_graphs_on_a_gpu_share_a_process() -> None:
    graph = small_run(runtime={"device": "cuda", "compile": "cudagraph"})
    runner = Runner([], workers=4)
    assert runner.shares_a_process(graph)
    assert not Runner([], workers=1).shares_a_process(graph)
    assert not runner.shares_a_process(small_run(runtime={"device": "cuda"}))
    assert not runner.shares_a_process(small_run(runtime={"device": "cpu", "compile": "cudagraph"}))
    text = {"data": {"name": "numbers"}, "model": {"name": "lstm"}}
    for compile in ("cudagraph", "none", "compile"):
        config = from_dict({**text, "runtime": {"device": "cuda", "compile": compile}})
        assert runner.shares_a_process(config) is (compile == "cudagraph")


def _planned(out: Path, *cells: str) -> list[PlannedRun]:
    return [run for run in make_plan(["fig1"], "quick", out, overrides=MICRO) if run.config.cell in cells]


def test_an_error_is_the_runs_own(tmp_path: Path) -> None:
    plan = _planned(tmp_path, "wd_on", "wd_off", "corrected")
    broken = next(run for run in plan if run.id == "fig1/wd_on")
    broken.folder.mkdir(parents=True)
    (broken.folder / "checkpoints").write_text("in the way")
    ThreadRunner(plan, workers=2).run()
    assert {run.id: run.state for run in plan} == {
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
from normmatters.lab.processes import Processes

spawn = util.spawnv_passfds

def spy(path, words, fds):
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if not any("resource_tracker" in str(word) for word in words):
        raise SystemExit(0 if blocked else "Ctrl-C would reach the runs")
    return spawn(path, words, fds)

util.spawnv_passfds = spy
Processes(None).start(from_dict({}, "here"), Path("."))
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

    processes = Processes(None)
    monkeypatch.setattr(processes.context, "Process", Process)
    with pytest.raises(OSError, match="no more"):
        processes.start(small_run(), tmp_path)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_server_that_is_killed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing raises EOFError then, which Typer takes for the user's wish to end: "Aborted"."""

    class Killed:
        def __init__(self, **_: Any) -> None: ...

        def start(self) -> None:
            raise EOFError("unexpected EOF")

    processes = Processes(None)
    monkeypatch.setattr(processes.context, "Process", Killed)
    with pytest.raises(OSError, match="was killed while a run was started"):
        processes.start(small_run(), tmp_path / "run")


def test_a_stopped_thread_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    config = small_run(optim={"epochs": 12}, runtime={"threads": 1})
    threads = Threads(1, None)
    started = threads.start(config, tmp_path / "run")
    deadline = threading.Event()
    while started.running and not (tmp_path / "run" / "metrics.jsonl").is_file():
        deadline.wait(0.01)
    started.stop()
    started.wait()
    assert not started.running
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not (tmp_path / "run" / "error.json").exists()
    assert train(config, tmp_path / "run").status == "finished"
    assert [row["epoch"] for row in rows(tmp_path / "run")] == list(range(1, 13))


def _breaks(config: RunConfig, folder: Path, *_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA error: capture\nwith details")


class Finished:
    """A worker that has done its work at once; with a ``reason``, it failed."""

    running = False

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def error(self) -> dict[str, str]:
        return {"kind": "killed", "message": self.reason}

    def stop(self) -> None: ...

    def wait(self) -> None: ...


class HereAndNow:
    """Starts runs in the place of processes: it trains at once, but for the cells that break."""

    def __init__(self, *breaks: str) -> None:
        self.breaks, self.started = breaks, list[str]()

    def start(self, config: RunConfig, folder: Path) -> Finished:
        self.started.append(config.cell)
        if config.cell in self.breaks:
            return Finished("exit code 1")
        train(config, folder)
        return Finished()


def test_a_run_that_fails_beside_others_is_tried_in_a_process(tmp_path: Path) -> None:
    """Where it finishes there, threads were to blame, and no run is one from then on."""
    in_threads = list[str]()

    def breaks(config: RunConfig, *args: Any, **options: Any) -> None:
        in_threads.append(config.cell)
        _breaks(config, *args, **options)

    plan, processes = _planned(tmp_path, "wd_on", "wd_off"), HereAndNow()
    runner = ThreadRunner(plan, workers=1, train=breaks, processes=processes)
    assert runner.run() == [], [run.reason for run in plan]
    first, second = (run.config.cell for run in plan)
    assert in_threads == [first]
    assert processes.started == [first, second]  # the first run again; the second one is a process at once
    assert [len(rows(run.folder)) for run in plan] == [2, 2]
    assert runner.messages == [
        f"{plan[0].id} seed 0 failed beside other runs (RuntimeError: CUDA error: capture): "
        "it is tried again in a process of its own",
        f"{plan[0].id} seed 0 finished in a process of its own: all runs from here on have one",
    ]
    assert runner.messages[0] in (plan[0].folder / "log.txt").read_text()


def test_a_run_that_fails_in_a_process_too_leaves_the_others_in_threads(tmp_path: Path) -> None:
    in_threads = list[str]()

    def breaks_one(config: RunConfig, *args: Any, **options: Any) -> None:
        in_threads.append(config.cell)
        (_breaks if config.cell == "wd_off" else train_when_free)(config, *args, **options)

    plan, processes = _planned(tmp_path, "wd_on", "wd_off"), HereAndNow("wd_off")
    plan.sort(key=lambda run: run.id)  # wd_off is first
    runner = ThreadRunner(plan, workers=1, train=breaks_one, processes=processes)
    assert [run.id for run in runner.run()] == ["fig1/wd_off"]
    assert in_threads == ["wd_off", "wd_on"]
    assert processes.started == ["wd_off"]
    assert plan[0].reason == "exit code 1"  # of the second try
    assert len(runner.messages) == 1


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("CUDA error"), {"kind": "exception", "message": "RuntimeError: CUDA error"}),
        (ValueError("no such folder"), {"kind": "config", "message": "no such folder"}),
        (RunError("busy", "in use"), {"kind": "busy", "message": "in use"}),
    ],
)
def test_an_error_outside_of_the_run_says_its_kind(raised: Exception, expected: dict[str, str], tmp_path: Path) -> None:
    """A GPU that an earlier run's error has broken fails before a run has begun: that is tried in a process, too."""

    def breaks(*_: Any, **__: Any) -> None:
        raise raised

    threads = Threads(1, None, breaks)
    assert threads.start(small_run(), tmp_path).error() == expected
    assert not (tmp_path / "error.json").exists()  # the folder may be another run's


@pytest.mark.parametrize("launcher", [Threads(1, None), Processes(None)], ids=["thread", "process"])
def test_a_folder_that_cannot_be_written_is_the_reason(launcher: Threads | Processes, tmp_path: Path) -> None:
    """Neither error.json nor log.txt can say so, and the terminal shows no traceback."""
    (tmp_path / "run" / "log.txt").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    begun = launcher.start(small_run(), tmp_path / "run")
    while begun.running:
        time.sleep(0.05)
    error = begun.error()
    assert error["kind"] == "folder"
    assert error["message"].startswith(f"cannot write {tmp_path / 'run' / 'checkpoints'}")


@pytest.mark.gpu
def test_all_modes_share_a_gpu_and_step_in_graphs(tmp_path: Path) -> None:
    losses = {}
    for compile in ("none", "cudagraph"):
        sets = [*MICRO, "optim.epochs=3", "precision.tf32=false", "runtime.device=cuda", f"runtime.compile={compile}"]
        jobs = make_plan(["fig1"], "quick", tmp_path / compile, overrides=sets)
        graphs = compile == "cudagraph"
        if graphs:  # two of a mode: while one captures, another one of the same kind is in the midst of its work
            jobs += make_plan(["fig1"], "quick", tmp_path / "again", overrides=sets)
        assert Runner(jobs, workers=12 if graphs else 1).run() == [], [j.reason for j in jobs]
        losses[compile] = {j.id: [r["train_loss"] for r in rows(j.folder)] for j in jobs[:6]}
    for job in jobs[:6]:
        again = rows(tmp_path / "again" / job.folder.relative_to(tmp_path / "cudagraph"))
        assert [r["train_loss"] for r in again] == pytest.approx(losses["cudagraph"][job.id], rel=2e-2), job.id
    assert len(losses["none"]) == 6
    for id, expected in losses["none"].items():
        assert losses["cudagraph"][id] == pytest.approx(expected, rel=2e-2), id
