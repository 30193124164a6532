"""Runs that share a process use its GPU together, but a CUDA graph is captured by one of them alone.

While a graph is captured, nothing else in the process may allocate or free device memory, draw random numbers, wait for
the device or replay: the capture would fail, or the other. So a run does everything inside :meth:`Gate.together`, says
between its steps that it can wait (:meth:`Gate.pause`, the read of an attribute), and captures inside
:meth:`Gate.alone`. A long time without a pause is time in which all others may have to wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["Gate", "gpu"]


class Gate:
    """A lock that many hold together, or one alone; who wants it alone comes before those who are not in yet.

    >>> gate = Gate()
    >>> with gate.together():
    ...     gate.pause()
    ...     with gate.alone():
    ...         pass
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0  # threads
        self._waiting = 0  # threads that want to be, or are, alone
        self._alone = False
        self._mine = threading.local()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Work beside others; the thread must not be inside yet, nor wait in there for one that is outside."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def pause(self) -> None:
        """Let those pass who wait to be alone. A thread inside calls it wherever it has nothing half done."""
        if self._waiting:
            self._leave()
            self._enter()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until all others are outside or pause, and keep them there; who was inside is so again."""
        was_inside = getattr(self._mine, "inside", False)
        got_it = False
        with self._changed:
            self._waiting += 1
            self._inside -= was_inside
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._inside and not self._alone)
                self._alone = got_it = True
            yield
        finally:
            with self._changed:  # in one go, or the next could be alone in between
                self._alone = self._alone and not got_it
                self._waiting -= 1
                self._inside += was_inside
                self._changed.notify_all()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Long work on the host, in which nobody has to wait for this thread: nothing inside may touch the device."""
        was_inside = getattr(self._mine, "inside", False)
        if was_inside:
            self._leave()
        try:
            yield
        finally:
            if was_inside:
                self._enter()

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._inside += 1
            self._mine.inside = True

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._mine.inside = False
            self._changed.notify_all()


gpu = Gate()
