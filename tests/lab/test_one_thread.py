"""Runs that are threads of a process have what torch keeps for each thread made once, by one thread."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lab_runs import small_run

from normmatters.lab import trainer, worker
from normmatters.lab.one_thread import OneThread


def test_threads_share_one_that_does_one_thing_at_a_time() -> None:
    one, inside, most, names = OneThread("shared"), 0, 0, set[str]()

    def work(value: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        names.add(threading.current_thread().name)
        time.sleep(0.005)
        inside -= 1
        return value

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda value: one(lambda: work(value)), range(8))) == list(range(8))
    assert most == 1
    assert names == {"shared_0"}


def test_an_error_comes_back_and_the_thread_goes_on() -> None:
    one = OneThread("shared")
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ZeroDivisionError):
            pool.submit(one, lambda: 1 // 0).result()
        assert pool.submit(one, lambda: 1).result() == 1


def test_the_main_thread_does_its_own_work() -> None:
    assert OneThread("shared")(threading.current_thread) is threading.main_thread()


def test_runs_beside_each_other_are_set_up_by_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    plain = trainer.build_model

    def build(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return plain(*args)

    monkeypatch.setattr(trainer, "build_model", build)
    workers = worker.Workers(3, None, threads=True)
    started = [workers.start(small_run(optim={"epochs": 1}, seed=s), tmp_path / str(s)) for s in range(3)]
    for one in started:
        one.wait()
    assert [one.running for one in started] == [False] * 3
    assert all((tmp_path / str(s) / "summary.json").exists() for s in range(3))
    assert threads == ["set-up_0"] * 3
    workers.stop([])
