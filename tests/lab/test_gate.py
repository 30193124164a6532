"""A capture is alone: whatever runs beside it does nothing meanwhile, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from normmatters.lab import graph, step, trainer, worker
from normmatters.lab.gate import Gate
from normmatters.lab.reproduce import Job, Runner, plan
from normmatters.lab.trainer import train
from support.fake_graphs import FakeGraphs, use_fake_graphs
from support.lab_runs import rows

MICRO = ["optim.epochs=2", "data.train_size=160", "data.val_size=100", "optim.milestones=[1]", "runtime.threads=1"]


def test_alone_means_alone_and_nobody_starves() -> None:
    gate, inside, seen = Gate(), Counter[str](), []

    def work(number: int) -> int:
        done = 0
        with gate.together():
            for i in range(40):
                gate.pause()
                inside["all"] += 1
                time.sleep(0.0002)
                inside["all"] -= 1
                if i % 10 == number:
                    with gate.alone():
                        seen.append((inside["all"], inside["alone"]))
                        inside["alone"] += 1
                        time.sleep(0.001)
                        inside["alone"] -= 1
                done += 1
        return done

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6), timeout=20)) == [40] * 6
    assert seen == [(0, 0)] * 24


def test_who_waits_to_be_alone_comes_before_who_is_not_in_yet() -> None:
    gate, order = Gate(), list[str]()
    first_is_in, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with gate.together():
            first_is_in.set()
            go_on.wait(5)
            order.append("first")

    def alone() -> None:
        with gate.alone():
            order.append("alone")

    def late() -> None:
        with gate.together():
            order.append("late")

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(first)]
        assert first_is_in.wait(5)
        futures.append(pool.submit(alone))
        while not gate._waiting:
            time.sleep(0.001)
        futures.append(pool.submit(late))
        time.sleep(0.02)
        go_on.set()
        for future in futures:
            future.result(5)
    assert order == ["first", "alone", "late"]


def test_who_is_away_is_waited_for_by_nobody() -> None:
    gate = Gate()
    with gate.away():  # from outside it means nothing
        pass
    with gate.together():
        with ThreadPoolExecutor(1) as pool, gate.away():

            def alone() -> int:
                with gate.alone():
                    return gate._inside

            assert pool.submit(alone).result(5) == 0
        assert gate._inside == 1
        with pytest.raises(ZeroDivisionError), gate.away():
            raise ZeroDivisionError
        assert gate._inside == 1
    assert gate._inside == 0


def test_an_error_inside_leaves_the_gate_open() -> None:
    gate = Gate()
    with pytest.raises(ZeroDivisionError), gate.together(), gate.alone():
        raise ZeroDivisionError
    with gate.alone():  # from outside too
        pass
    with gate.together():
        assert (gate._inside, gate._waiting, gate._alone) == (1, 0, False)
    assert (gate._inside, gate._waiting) == (0, 0)


class _Watched(TorchDispatchMode):
    """All work of one run; work while another run captures is noted."""

    capturing: threading.Thread | None = None
    overlapping: list[str] = []
    threads: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Watched.threads.add(threading.current_thread().name)
        if _Watched.capturing not in (None, threading.current_thread()):
            _Watched.overlapping.append(str(func))
        return func(*args, **(kwargs or {}))


class _Recorder(FakeGraphs):
    """A recording takes its time."""

    collects: set[bool] = set()

    def record(self, key: Any, work: Callable[[], None]) -> None:
        super().record(key, work)
        with step.gpu.alone(), graph._no_collection():
            _Watched.capturing = threading.current_thread()
            time.sleep(0.03)
            _Recorder.collects.add(gc.isenabled())
            _Watched.capturing = None


def _jobs(out: Path, *cells: str, compile: str) -> list[Job]:
    jobs = plan(["fig1"], "quick", out, overrides=[*MICRO, f"runtime.compile={compile}"])
    return [job for job in jobs if job.config.cell in cells]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[_Watched]:
    """Runs whose steps are recorded, on the CPU, with all their work watched."""
    use_fake_graphs(monkeypatch, _Recorder)
    plain = worker._train

    def watching(*args: Any, **options: Any) -> None:
        with _Watched():
            plain(*args, **options)

    monkeypatch.setattr(worker, "_train", watching)
    _Watched.overlapping, _Watched.threads, _Recorder.collects = [], set(), set()
    return _Watched


def test_runs_beside_a_capture_wait_and_have_the_numbers_of_eager_steps_alone(
    tmp_path: Path, watched: type[_Watched]
) -> None:
    beside = _jobs(tmp_path / "beside", "wd_on", "corrected", "angular", compile="cudagraph")
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    assert Runner(beside, workers=3, threads=True).run() == [], [j.reason for j in beside]
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert watched.overlapping == []
    assert len(watched.threads) > 1
    assert _Recorder.collects == {False}
    assert gc.isenabled()
    for job in _jobs(tmp_path / "alone", "wd_on", "corrected", compile="none"):
        # Whatever a neighbour does to torch's own random numbers is nothing to a run that has begun.
        train(job.config, job.folder, progress=lambda told: torch.manual_seed(int(told.get("step", 0)) + 7))
        assert rows(tmp_path / "beside" / job.folder.relative_to(tmp_path / "alone")) == rows(job.folder), job.id


def test_text_beside_a_capture_has_the_numbers_of_a_run_alone(tmp_path: Path, watched: type[_Watched]) -> None:
    """Dropout, computed weights of an LSTM, and decoding: none of them knows of the neighbours."""
    tiny = ["data.train_size=100", "data.val_size=10", "data.tokens=200", "model.dropout=0.2", "runtime.threads=1"]
    tiny += ["optim.epochs=2", "runtime.compile=cudagraph", "runtime.bleu=epoch"]

    def jobs(out: Path) -> list[Job]:
        found = plan(["supp2", "table1"], "quick", out, overrides=tiny)
        return [j for j in found if j.id in ("supp2/bwn", "supp2/ln", "table1/transformer_ln")]

    beside = jobs(tmp_path / "beside")
    assert Runner(beside, workers=3, threads=True).run() == [], [j.reason for j in beside]
    assert watched.overlapping == []
    assert len(watched.threads) > 1
    for job in jobs(tmp_path / "alone"):
        train(job.config, job.folder, progress=lambda told: torch.manual_seed(int(told.get("step", 0)) + 7))
        found = rows(tmp_path / "beside" / job.folder.relative_to(tmp_path / "alone"))
        assert found == rows(job.folder), job.id
        assert len(found) == 2


def test_the_watch_sees_work_beside_a_capture(
    tmp_path: Path, watched: type[_Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ajar(Gate):
        """Keeps captures from each other, and nothing else."""

        def pause(self) -> None:
            pass

        @contextlib.contextmanager
        def alone(self) -> Iterator[None]:
            with self._changed:
                yield

        @contextlib.contextmanager
        def together(self) -> Iterator[None]:
            yield

    gate = Ajar()
    for module in (step, trainer):
        monkeypatch.setattr(module, "gpu", gate)
    jobs = _jobs(tmp_path, "wd_on", "wd_off", compile="cudagraph")
    assert Runner(jobs, workers=2, threads=True).run() == []
    assert watched.overlapping
