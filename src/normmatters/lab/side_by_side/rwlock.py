"""Runs that share a process use its GPU together, but a CUDA graph is captured by one of them alone.

While a graph is captured, nothing else in the process may allocate or free device memory, draw random numbers, wait for
the device or replay: the capture would fail, or the other would. So a run does everything inside :meth:`shared`, calls
:meth:`pause` between its steps (which costs the read of an attribute), and captures inside :meth:`exclusive`. A long
time without a pause is time in which all others may have to wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ReadWriteLock:
    """A lock that many threads share, or one holds alone. A thread that waits to be alone precedes new sharers.

    >>> lock = ReadWriteLock()
    >>> with lock.shared():
    ...     lock.pause()
    ...     with lock.exclusive():
    ...         pass
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharers = 0
        self._wanted = 0  # threads that wait to be alone, or are
        self._exclusive = False
        self._of_thread = threading.local()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Work beside others. A thread must not enter twice, nor wait in there for one that is outside."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def pause(self) -> None:
        """Let threads pass that wait to be alone. A sharer calls it between pieces of work."""
        if self._wanted:
            self._leave()
            self._enter()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until all others are outside or pause, and keep them there; a sharer is one again afterwards."""
        was_sharer = getattr(self._of_thread, "shares", False)
        acquired = False
        with self._changed:
            self._wanted += 1
            self._sharers -= was_sharer
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._sharers and not self._exclusive)
                self._exclusive = acquired = True
            yield
        finally:
            with self._changed:  # all at once, or the next could be alone in between
                self._exclusive = self._exclusive and not acquired
                self._wanted -= 1
                self._sharers += was_sharer
                self._changed.notify_all()

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._wanted)
            self._sharers += 1
            self._of_thread.shares = True

    def _leave(self) -> None:
        with self._changed:
            self._sharers -= 1
            self._of_thread.shares = False
            self._changed.notify_all()


gpu = ReadWriteLock()
