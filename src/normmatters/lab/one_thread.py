"""Work that all runs of a process have done by the same thread.

torch keeps for each thread which of cuDNN's convolutions were found to be the fastest, and what was built to use them.
To find that out takes seconds, in which no other run may do anything. So of the runs that share a process, threads of
their own, the first pays for it and the others find it ready.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["OneThread"]

T = TypeVar("T")


class OneThread:
    """Does what it is called with in its thread, one after another, and gives back what came out.

    The main thread does its own work: it alone hears Ctrl-C, which would leave the other one in the midst of something.

    >>> OneThread("adding")(lambda: 1 + 1)
    2
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)  # which starts its thread when there is work

    def __call__(self, work: Callable[[], T]) -> T:
        if threading.current_thread() is threading.main_thread():
            return work()
        return self._pool.submit(work).result()
