"""A capture is alone: whatever runs beside it does nothing meanwhile, and every run has the numbers it has alone."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from normmatters.lab.config import RunConfig
from normmatters.lab.execution import Execution
from normmatters.lab.plan import PlannedRun, make_plan
from normmatters.lab.run import train
from normmatters.lab.side_by_side.graphs import no_collection
from normmatters.lab.side_by_side.rwlock import gpu
from support.fake_graphs import FakeExecution, FakeGraphs, ThreadRunner, train_with_fakes
from support.lab_runs import rows

MICRO = ["optim.epochs=2", "data.train_size=160", "data.val_size=100", "optim.milestones=[1]", "runtime.threads=1"]


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
        with gpu.exclusive(), no_collection():
            _Watched.capturing = threading.current_thread()
            time.sleep(0.03)
            _Recorder.collects.add(gc.isenabled())
            _Watched.capturing = None


def _plan(out: Path, *cells: str, compile: str) -> list[PlannedRun]:
    plan = make_plan(["fig1"], "quick", out, overrides=[*MICRO, f"runtime.compile={compile}"])
    return [run for run in plan if run.config.cell in cells]


def _train_watched(
    config: RunConfig, folder: Path, *_: Any, execution: Execution | None = None, **options: Any
) -> None:
    """On the CPU, with recorded steps and all work watched."""
    with _Watched():
        train(config, folder, execution=execution or FakeExecution(_Recorder), progress=options["progress"])


@pytest.fixture
def watched() -> type[_Watched]:
    _Watched.overlapping, _Watched.threads, _Recorder.collects = [], set(), set()
    return _Watched


def _disturb(event: dict[str, Any]) -> None:
    """Whatever a neighbour does to torch's own random numbers is nothing to a run that has begun."""
    torch.manual_seed(int(event.get("step", 0)) + 7)


def test_runs_beside_a_capture_wait_and_have_the_numbers_of_eager_steps_alone(
    tmp_path: Path, watched: type[_Watched]
) -> None:
    beside = _plan(tmp_path / "beside", "wd_on", "corrected", "angular", compile="cudagraph")
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    assert ThreadRunner(beside, workers=3, train=_train_watched).run() == [], [r.reason for r in beside]
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert watched.overlapping == []
    assert len(watched.threads) > 1
    assert _Recorder.collects == {False}
    assert gc.isenabled()
    for run in _plan(tmp_path / "alone", "wd_on", "corrected", compile="none"):
        train(run.config, run.folder, progress=_disturb)
        assert rows(tmp_path / "beside" / run.folder.relative_to(tmp_path / "alone")) == rows(run.folder), run.id


def test_text_beside_a_capture_has_the_numbers_of_a_run_alone(tmp_path: Path, watched: type[_Watched]) -> None:
    """Dropout, computed weights of an LSTM, and decoding: none of them knows of the neighbours."""
    tiny = ["data.train_size=100", "data.val_size=10", "data.tokens=200", "model.dropout=0.2", "runtime.threads=1"]
    tiny += ["optim.epochs=2", "runtime.compile=cudagraph", "runtime.bleu=epoch"]

    def planned(out: Path) -> list[PlannedRun]:
        found = make_plan(["supp2", "table1"], "quick", out, overrides=tiny)
        return [r for r in found if r.id in ("supp2/bwn", "supp2/ln", "table1/transformer_ln")]

    beside = planned(tmp_path / "beside")
    assert ThreadRunner(beside, workers=3, train=_train_watched).run() == [], [r.reason for r in beside]
    assert watched.overlapping == []
    assert len(watched.threads) > 1
    for run in planned(tmp_path / "alone"):
        with _Watched():  # a dispatch mode: under it weight norm takes another backend, which rounds in another way
            train_with_fakes(run.config, run.folder, progress=_disturb)
        found = rows(tmp_path / "beside" / run.folder.relative_to(tmp_path / "alone"))
        assert found == rows(run.folder), run.id
        assert len(found) == 2


def test_the_watch_sees_work_beside_a_capture(tmp_path: Path, watched: type[_Watched]) -> None:
    class Careless(FakeExecution):
        """Takes no lock."""

        def setting_up(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        training = setting_up

        def pause(self) -> None:
            pass

    def careless(*args: Any, **options: Any) -> None:
        _train_watched(*args, execution=Careless(_Recorder), **options)

    plan = _plan(tmp_path, "wd_on", "wd_off", compile="cudagraph")
    assert ThreadRunner(plan, workers=2, train=careless).run() == []
    assert watched.overlapping
