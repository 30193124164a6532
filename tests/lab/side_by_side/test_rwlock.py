"""A lock that many share or one holds alone: nobody works beside that one, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from normmatters.lab.side_by_side.rwlock import ReadWriteLock


def test_alone_means_alone_and_nobody_starves() -> None:
    lock, inside, seen = ReadWriteLock(), Counter[str](), []

    def work(number: int) -> int:
        done = 0
        with lock.shared():
            for i in range(40):
                lock.pause()
                inside["all"] += 1
                time.sleep(0.0002)
                inside["all"] -= 1
                if i % 10 == number:
                    with lock.exclusive():
                        seen.append((inside["all"], inside["alone"]))
                        inside["alone"] += 1
                        time.sleep(0.001)
                        inside["alone"] -= 1
                done += 1
        return done

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6), timeout=20)) == [40] * 6
    assert seen == [(0, 0)] * 24


def test_who_waits_to_be_alone_precedes_new_sharers() -> None:
    lock, order = ReadWriteLock(), list[str]()
    first_is_in, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with lock.shared():
            first_is_in.set()
            go_on.wait(5)
            order.append("first")

    def alone() -> None:
        with lock.exclusive():
            order.append("alone")

    def late() -> None:
        with lock.shared():
            order.append("late")

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(first)]
        assert first_is_in.wait(5)
        futures.append(pool.submit(alone))
        while not lock._wanted:
            time.sleep(0.001)
        futures.append(pool.submit(late))
        time.sleep(0.02)
        go_on.set()
        for future in futures:
            future.result(5)
    assert order == ["first", "alone", "late"]


def test_an_error_inside_leaves_the_lock_free() -> None:
    lock = ReadWriteLock()
    with pytest.raises(ZeroDivisionError), lock.shared(), lock.exclusive():
        raise ZeroDivisionError
    with lock.exclusive():  # from outside too
        pass
    with lock.shared():
        assert (lock._sharers, lock._wanted, lock._exclusive) == (1, 0, False)
    assert (lock._sharers, lock._wanted) == (0, 0)
