"""Plan, run, stop, go on: the orchestration on real runs that take a second or two."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from normmatters import cli
from normmatters.lab.cells import load_cell
from normmatters.lab.config import to_json
from normmatters.lab.memory import check_memory, need_bytes
from normmatters.lab.plan import PlannedRun, make_plan
from normmatters.lab.publish import publish
from normmatters.lab.report import write_report
from normmatters.lab.run_folder import RunFolder
from normmatters.lab.runner import Runner

MICRO = ["optim.epochs=2", "data.train_size=120", "data.val_size=200", "optim.milestones=[1]", "runtime.threads=1"]
MICRO += ["runtime.checkpoint_seconds=0"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"}


def command(out: Path, *words: str, sets: list[str] = MICRO) -> list[str]:
    options = [w for s in sets for w in ("--set", s)]
    where = ["--out", str(out), "--device", "cpu", "--seeds", "1"]
    return [sys.executable, "-m", "normmatters", "reproduce", *words, *where, *options]


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "time_per_step")} for row in rows]


def test_a_plan_has_each_run_once_and_references_first(tmp_path: Path) -> None:
    jobs = make_plan(["table2", "fig2", "supp1", "fig1"], "quick", tmp_path, seeds=2)
    assert len({job.folder for job in jobs}) == len(jobs)
    assert {job.seed for job in jobs} == {0, 1}
    for i, job in enumerate(jobs):
        if job.needs is not None:
            assert job.needs in {earlier.folder for earlier in jobs[:i]}
    ids = [job.id for job in jobs]
    assert "table1/resnet56_bn" in ids  # table2 shows its number
    assert "table2/resnet56_l2" not in ids
    alone = make_plan(["fig1"], "quick", tmp_path)
    assert {job.id for job in alone if job.needs} == {"fig1/corrected", "fig1/norm_schedule"}
    cells = make_plan(["table2/resnet56_l2", "fig1/corrected", "fig1/wd_off"], "quick", tmp_path)
    assert [job.id for job in cells] == ["table1/resnet56_bn", "fig1/wd_on", "fig1/corrected", "fig1/wd_off"]


def test_one_seed_by_name_is_not_taken_for_several(tmp_path: Path) -> None:
    assert {job.seed for job in make_plan(["fig1"], "quick", tmp_path, overrides=["seed=5"])} == {5}
    with pytest.raises(ValueError, match="seed=5 leaves one run of each cell, not 3"):
        make_plan(["fig1"], "quick", tmp_path, seeds=3, overrides=["seed=5"])


def test_a_folder_of_other_settings_is_left_alone_if_it_has_results(tmp_path: Path) -> None:
    def planned(*sets: str) -> PlannedRun:
        return make_plan(["fig4"], "quick", tmp_path, overrides=sets)[0]

    folder = planned().folder
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(planned("optim.epochs=5").config))
    assert planned("optim.epochs=6").state == "waiting"  # its data were missing, say
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"holds a run of other settings \(optim\.epochs: 5 and 6\)"):
        planned("optim.epochs=6")


def test_a_plan_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fig1/wd_on would wait for itself"):
        make_plan(["fig1"], "quick", tmp_path, overrides=["optim.reference=wd_on"])
    with pytest.raises(ValueError, match=r"fig1/angular and fig1/wd_on would both run in .*fig1/x/seed0"):
        make_plan(["fig1"], "quick", tmp_path, overrides=["cell=x"])
    with pytest.raises(ValueError, match="resnet56_norms/range is not run at the preset quick: try cifar, short, full"):
        make_plan(["fig1", "resnet56_norms/range"], "quick", tmp_path)
    with pytest.raises(ValueError, match="no data set 'cifar'; did you mean 'cifar10'"):
        make_plan(["supp2"], "quick", tmp_path, data="cifar")
    with pytest.raises(ValueError, match="'numbers' is text, which no cell of fig1 is trained on"):
        make_plan(["fig1"], "quick", tmp_path, data="numbers")
    with pytest.raises(ValueError, match="'cifar10' is images, which no cell of supp2 is trained on"):
        make_plan(["supp2"], "quick", tmp_path, data="cifar10")
    for setting, form, record in (("runtime.record=none", "epoch", "none"), ("optim.correction=step", "step", "epoch")):
        needed = f"fig1/corrected needs the norms of every {form} of fig1/wd_on, whose runtime.record is '{record}'"
        with pytest.raises(ValueError, match=needed):  # and not when wd_on has been trained
            make_plan(["fig1"], "quick", tmp_path, overrides=[setting])
    assert make_plan(["fig1"], "quick", tmp_path, overrides=["optim.correction=step", "runtime.record=step"])


def test_a_damaged_summary_does_not_finish_a_run(tmp_path: Path) -> None:
    folder = make_plan(["fig4"], "quick", tmp_path)[0].folder
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(make_plan(["fig4"], "quick", tmp_path)[0].config))
    (folder / "summary.json").write_text('{"status": "finished"}')
    assert make_plan(["fig4"], "quick", tmp_path)[0].state == "done"
    for damaged in ("", "{}", "[" * 100_000, "[1]", '{"status": 3}'):  # "": of a machine that lost power
        (folder / "summary.json").write_text(damaged)
        assert make_plan(["fig4"], "quick", tmp_path)[0].state == "waiting"
    (folder / "error.json").write_text('{"kind": "nan", "metrics": [1], "message": 3}')
    assert RunFolder(folder).diverged()


def test_other_data_replaces_only_its_own_kind(tmp_path: Path) -> None:
    jobs = {job.id: job for job in make_plan(["fig1", "supp2"], "cifar", tmp_path, data="digits")}
    assert jobs["fig1/wd_on"].config.data.name == "digits"
    assert jobs["supp2/bwn"].config.data.name == "text"


def test_more_jobs_than_memory_is_refused() -> None:
    configs = [load_cell("fig4/bwn").config("full", seed) for seed in range(4)]
    need = need_bytes(configs[0], "cuda")
    assert 20 * 2**30 < need < 80 * 2**30  # ResNet-50, batch 256, fp32
    check_memory(configs, 2, "cuda", free=int(2.5 * need))
    with pytest.raises(ValueError, match="at most --jobs 2"):
        check_memory(configs, 4, "cuda", free=int(2.5 * need))
    with pytest.raises(ValueError, match="not even one fits"):
        check_memory(configs, 1, "cuda", free=need // 2)


def test_a_failed_run_stops_only_what_needs_it(tmp_path: Path) -> None:
    jobs = make_plan(["fig1"], "quick", tmp_path, overrides=MICRO)
    keep = {"fig1/wd_on", "fig1/wd_off", "fig1/corrected"}
    jobs = [job for job in jobs if job.id in keep]
    reference = next(job for job in jobs if job.id == "fig1/wd_on")
    reference.folder.mkdir(parents=True)
    (reference.folder / "checkpoints").write_text("in the way")  # the run cannot make its folder
    failed = Runner(jobs, workers=1).run()
    assert {job.id: job.state for job in jobs} == {
        "fig1/wd_on": "failed",
        "fig1/wd_off": "done",
        "fig1/corrected": "skipped",
    }
    assert {job.id for job in failed} == {"fig1/wd_on", "fig1/corrected"}
    assert "checkpoints" in reference.reason


def test_end_to_end_on_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(command(tmp_path, "fig1"), capture_output=True, text=True, timeout=200, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    root = tmp_path / "quick"
    cells = {p.parent.parent.name for p in root.glob("fig1/*/seed0/summary.json")}
    assert cells == {"wd_on", "wd_off", "corrected", "norm_schedule", "wd_free", "angular"}
    last = metrics(root / "fig1" / "wd_on" / "seed0")[-1]
    assert last["epoch"] == 2
    assert f"{last['val_acc']:.2f} %" in done.stdout
    page = (root / "report" / "report.html").read_text()
    assert f"{last['val_acc']:.2f} %" in page
    assert "claims hold" in done.stdout
    assert str(root / "report" / "report.html") in done.stdout

    # The same command again, now in this process, runs nothing, and draws the same page.
    before = {p: p.stat().st_mtime_ns for p in root.glob("fig1/*/seed0/*.json*")}
    page_before = (root / "report" / "report.html").stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", command(tmp_path, "fig1")[2:])
    for key in ("NO_COLOR", "TERM", "COLUMNS"):
        monkeypatch.setenv(key, ENV[key])
    capsys.readouterr()
    with contextlib.suppress(SystemExit):
        cli.main()
    assert "6 of them finished" in capsys.readouterr().out
    assert (root / "report" / "report.html").stat().st_mtime_ns > page_before
    assert {p: p.stat().st_mtime_ns for p in root.glob("fig1/*/seed0/*.json*")} == before

    # Other settings in the same place are refused, and nothing is touched.
    other = [s if not s.startswith("optim.epochs") else "optim.epochs=3" for s in MICRO]
    with pytest.raises(ValueError, match=r"optim\.epochs: 2 and 3"):
        make_plan(["fig1"], "quick", root, overrides=other)
    assert {p: p.stat().st_mtime_ns for p in root.glob("fig1/*/seed0/*.json*")} == before
    report = write_report([root / "fig1"], tmp_path / "second")
    assert len(report.collection.runs) == 6


LONGER = [*MICRO[1:], "optim.epochs=12"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The numbers of a run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    jobs = [job for job in make_plan(["fig1"], "quick", folder, overrides=LONGER) if job.id == "fig1/wd_on"]
    assert Runner(jobs).run() == []
    return metrics(folder / "fig1" / "wd_on" / "seed0")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_command_goes_on_and_ends_with_the_same_numbers(
    tmp_path: Path, how: signal.Signals, whole: list[dict[str, float]]
) -> None:
    words = command(tmp_path / "stopped", "fig1", "--jobs", "1", sets=LONGER)
    process = subprocess.Popen(words, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "stopped" / "quick" / "fig1" / "wd_on" / "seed0" / "metrics.jsonl"
    limit = time.monotonic() + 60
    while not (log.exists() and log.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < limit
        time.sleep(0.005)
    process.send_signal(how)
    _, said = process.communicate(timeout=30)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "The same command resumes" in said
    assert not (log.parent / "summary.json").exists()
    planned = make_plan(["fig1"], "quick", tmp_path / "stopped" / "quick", overrides=LONGER)
    jobs = [job for job in planned if job.id == "fig1/wd_on"]
    assert jobs[0].state == "waiting"
    assert Runner(jobs).run() == []
    assert metrics(log.parent) == whole


def test_an_interrupt_that_a_callback_swallows_still_ends_the_runs(tmp_path: Path) -> None:
    jobs = [job for job in make_plan(["fig1"], "quick", tmp_path, overrides=MICRO[1:]) if job.id == "fig1/wd_on"]

    def swallow(runner: Runner) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Runner(jobs).run(swallow)
    assert jobs[0].state == "waiting"
    assert signal.getsignal(signal.SIGINT) is before


def test_published_runs_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets, results = ["optim.epochs=1", *MICRO[1:]], tmp_path / "results"
    cells = ["fig1/wd_on", "fig1/wd_off"]
    assert Runner(make_plan(cells, "quick", tmp_path / "quick", overrides=sets)).run() == []
    publish([tmp_path / "quick"], results / "quick")

    def states(*names: str, seeds: int = 1) -> dict[tuple[str, int], str]:
        jobs = make_plan(names, "quick", tmp_path / "new", seeds=seeds, overrides=sets, published=results / "quick")
        return {(job.id, job.seed): job.state for job in jobs}

    assert states(*cells, seeds=2) == {
        (id, seed): "waiting" if seed else "done" for id in ("fig1/wd_on", "fig1/wd_off") for seed in (0, 1)
    }
    # the norms that a run needs of another one are in its folder alone
    assert states(*cells, "fig1/corrected") == {
        ("fig1/wd_on", 0): "waiting",
        ("fig1/wd_off", 0): "done",
        ("fig1/corrected", 0): "waiting",
    }
    with pytest.raises(ValueError, match=r"seed0\.run\.jsonl: a published run of other settings \(optim\.lr"):
        make_plan(cells, "quick", tmp_path / "new", overrides=[*sets, "optim.lr=0.3"], published=results / "quick")
    options = [word for s in sets for word in ("--set", s)]
    words = ["reproduce", *cells, "--seeds", "1", "--device", "cpu", *options, "--out", str(tmp_path / "again")]
    cli.app([*words, "--published", str(results)], standalone_mode=False)
    assert "2 runs of 2 cells" in capsys.readouterr().out
    assert not list((tmp_path / "again").rglob("config.json"))
    assert "WD off" in (tmp_path / "again" / "quick" / "report" / "report.md").read_text()
    with pytest.raises(ValueError, match="no such folder"):
        cli.app([*words, "--published", str(tmp_path / "absent")], standalone_mode=False)


def _two(out: Path, *sets: str) -> list[PlannedRun]:
    runs = make_plan(["fig1"], "quick", out, overrides=[*MICRO, *sets])
    return [run for run in runs if run.config.cell in ("wd_on", "corrected")]


def test_norms_that_are_lost_come_from_the_last_checkpoint(tmp_path: Path) -> None:
    """A finished reference without them was a dead end: it was never run again, and what needs it failed."""
    assert Runner(_two(tmp_path)).run() == []
    reference, follower = _two(tmp_path)
    before, norms = metrics(follower.folder), load_file(reference.folder / "norms.safetensors")
    (reference.folder / "norms.safetensors").unlink()
    shutil.rmtree(follower.folder)
    runner = Runner(_two(tmp_path))
    assert [run.state for run in runner.plan] == ["waiting", "waiting"]
    assert runner.run() == [], [run.reason for run in runner.plan]
    assert "its norms are lost" in runner.messages[0]
    again = load_file(reference.folder / "norms.safetensors")
    assert all(torch.equal(again[name], values) for name, values in norms.items())
    assert metrics(follower.folder) == before


def test_what_follows_a_diverged_run_is_skipped_for_that_reason(tmp_path: Path) -> None:
    reference, follower = runs = _two(tmp_path)
    reference.folder.mkdir(parents=True)
    (reference.folder / "config.json").write_text(to_json(reference.config))
    (reference.folder / "error.json").write_text('{"kind": "nan"}')
    runs = _two(tmp_path)
    assert [run.state for run in runs] == ["done", "waiting"]
    assert Runner(runs).run() == [runs[1]]
    assert "diverged: there are no norms to follow" in runs[1].reason
    assert not follower.folder.exists()


def test_jobs_change_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for jobs in ("1", "2"):
        sets = [word for s in MICRO if not s.startswith("runtime.threads") for word in ("--set", s)]
        words = ["reproduce", "fig1/wd_on", "fig1/wd_off", "--seeds", "1", "--jobs", jobs, "--device", "cpu", *sets]
        monkeypatch.setattr(sys, "argv", ["normmatters", *words, "--out", str(tmp_path / jobs)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0, capsys.readouterr().err
        folder = tmp_path / jobs / "quick" / "fig1" / "wd_on" / "seed0"
        assert json.loads((folder / "environment.json").read_text())["threads"] == 1
        assert json.loads((folder / "config.json").read_text())["runtime"]["threads"] == 1
        found[jobs] = metrics(folder)
    assert found["1"] == found["2"]


def test_where_nothing_ran_there_is_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["reproduce", "fig1", "--data", "tiny_imagenet", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path)]
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(sys, "argv", ["normmatters", *words, "--data-dir", str(tmp_path / "data")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().out
    assert end.value.code == 1
    assert "no image folder" in said
    assert "claims" not in said
    assert not (tmp_path / "quick" / "report").exists()
