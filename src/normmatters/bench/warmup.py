"""Compiles what a run will need in several processes at once.

Compiling the peers and our kernels takes far longer than timing them. The compilers keep their results on disk, so
processes that each run a share of the rows once, untimed, leave only cheap look-ups to the run itself.
"""

from __future__ import annotations

import os
import sys
import time
from subprocess import DEVNULL, Popen, TimeoutExpired

from normmatters.bench.harness import Setup

#: Processes at most, by the device memory that a row takes; others have nothing to compile.
PROCESSES = {"layers": 12, "layernorm": 8, "resnet50": 4, "weightnorm": 4}


def default_jobs(name: str, setup: Setup) -> int:
    """None on a CPU, in a smoke run, and in the processes themselves."""
    if not setup.cuda or setup.smoke or setup.share is not None:
        return 0
    return min(PROCESSES.get(name, 0), max((os.cpu_count() or 1) - 2, 0))


def warm_up(name: str, setup: Setup, jobs: int, *, limit_s: float = 300) -> None:
    """Run every row once in ``jobs`` processes, if there are rows to compile. Failures are the run's to report."""
    if not jobs or name not in PROCESSES or setup.share is not None:
        return
    start = time.perf_counter()
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": threads, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "normmatters.bench", name, "--device", str(setup.device), "--share"]
    options = ["--smoke"] if setup.smoke else []
    options += ["--only", ",".join(sorted(setup.only.words))] if setup.only.words else []
    running: list[Popen[bytes]] = []
    try:
        for index in range(jobs):
            share = [*command, f"{index}/{jobs}", *options]
            running.append(Popen(share, env=environment, stdout=DEVNULL, stderr=DEVNULL))
        for process in running:
            try:
                process.wait(max(1.0, limit_s - (time.perf_counter() - start)))
            except TimeoutExpired:
                process.kill()
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
    print(f"\n{name}: compiled in {time.perf_counter() - start:.0f} s by {jobs} processes", flush=True)
