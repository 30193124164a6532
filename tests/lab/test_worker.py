"""Runs that share a process, a thread each: the numbers of runs alone, errors of their own, and a way to stop them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from lab_runs import rows, small_run

from normmatters.lab.reproduce import Runner, plan
from normmatters.lab.trainer import train
from normmatters.lab.worker import Workers, shares_a_process

MICRO = ["optim.epochs=2", "data.train_size=120", "data.val_size=200", "optim.milestones=[1]", "runtime.threads=1"]


def test_only_graphs_on_a_gpu_share_a_process() -> None:
    graph = small_run(runtime={"device": "cuda", "compile": "cudagraph"})
    assert shares_a_process(graph, workers=4)
    assert not shares_a_process(graph, workers=1)
    assert not shares_a_process(small_run(runtime={"device": "cuda"}), workers=4)
    assert not shares_a_process(small_run(runtime={"device": "cpu", "compile": "cudagraph"}), workers=4)


def test_threads_give_the_numbers_of_runs_alone(tmp_path: Path) -> None:
    ids = {"fig1/wd_on", "fig1/corrected", "fig1/wd_off"}
    jobs = [j for j in plan(["fig1"], "quick", tmp_path / "beside", overrides=MICRO) if j.id in ids]
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    assert Runner(jobs, workers=3, threads=True).run() == []
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    for job in plan(["fig1"], "quick", tmp_path / "alone", overrides=MICRO):
        if job.id in ids:
            train(job.config, job.folder)
            beside = tmp_path / "beside" / job.folder.relative_to(tmp_path / "alone")
            assert rows(beside) == rows(job.folder), job.id
            assert len(rows(beside)) == 2


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


def test_a_stopped_thread_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    config = small_run(optim={"epochs": 12}, runtime={"threads": 1})
    workers = Workers(1, None, threads=True)
    worker = workers.start(config, tmp_path / "run")
    deadline = threading.Event()
    while worker.running and not (tmp_path / "run" / "metrics.jsonl").is_file():
        deadline.wait(0.01)
    workers.stop([worker])
    assert not worker.running
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not (tmp_path / "run" / "error.json").exists()
    assert train(config, tmp_path / "run").status == "finished"
    assert [row["epoch"] for row in rows(tmp_path / "run")] == list(range(1, 13))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_all_modes_share_a_gpu_and_step_in_graphs(tmp_path: Path) -> None:
    losses = {}
    for compile in ("none", "cudagraph"):
        sets = [*MICRO, "optim.epochs=3", "precision.tf32=false", "runtime.device=cuda", f"runtime.compile={compile}"]
        jobs = plan(["fig1"], "quick", tmp_path / compile, overrides=sets)
        graphs = compile == "cudagraph"
        assert Runner(jobs, workers=6 if graphs else 1, threads=True).run() == [], [j.reason for j in jobs]
        losses[compile] = {j.id: [r["train_loss"] for r in rows(j.folder)] for j in jobs}
    assert len(losses["none"]) == 6
    for id, expected in losses["none"].items():
        assert losses["cudagraph"][id] == pytest.approx(expected, rel=2e-2), id
