"""What every benchmark shares: where it runs, which rows are wanted, rows that survive a failure, and the JSON file."""

from __future__ import annotations

import datetime
import gc
import json
import platform
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from normmatters.bench import peers, timing
from normmatters.provenance import commit, device_name

Row = dict[str, Any]
Axes = Mapping[str, Sequence[str]]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Wrong(Exception):
    """A variant's result differs from the float64 equation: it gets no number."""


class Skip(Exception):
    """A variant cannot run here; the text says why."""


@dataclass(frozen=True)
class Selection:
    """The rows a user asked for, by words such as ``cl``, ``fp16`` or ``l1_lean``.

    Words of one axis are alternatives, words of different axes must all hold: ``cl,fp16,bf16`` is channels_last in
    either precision. Without words a benchmark runs its default rows; the word ``all`` asks for every row.
    """

    words: frozenset[str] = frozenset()

    @classmethod
    def of(cls, only: Iterable[str], known: Iterable[Axes]) -> Selection:
        """Check the words against the axes of the benchmarks that will run."""
        words = frozenset(only)
        values = sorted({value for axes in known for values in axes.values() for value in values} | {"all"})
        unknown = sorted(words - set(values))
        if unknown:
            raise ValueError(f"no row is called {', '.join(map(repr, unknown))}; there are {', '.join(values)}")
        return cls(words)

    def default(self) -> bool:
        """Whether nothing was asked for in particular."""
        return not self.words

    def allows(self, axes: Axes, row: Mapping[str, str]) -> bool:
        """Whether a row with these values on these axes is wanted."""
        return all(not (picked := self.words & set(axes[axis])) or row[axis] in picked for axis in row)


@dataclass
class Setup:
    """Where and how a benchmark runs."""

    device: torch.device
    smoke: bool = False
    only: Selection = Selection()
    share: tuple[int, int] | None = None  # (i, n): run the i-th of n shares of the rows once, for the compilers' caches
    warm_up: Callable[[], None] = lambda: None  # compiles what the rows need; for those that put it off, see `warmup`

    def mine(self, *key: str) -> bool:
        """Whether a row that compiles what ``key`` names belongs to this process."""
        return self.share is None or zlib.crc32("/".join(key).encode()) % self.share[1] == self.share[0]

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def memory_bandwidth(self) -> float:
        """Bytes per second that an elementwise kernel reads and writes, measured in this very run."""
        return timing.memory_bandwidth(self.device, 2**22 if self.smoke else 2**30 if self.cuda else 2**28)

    @cached_property
    def no_compiler(self) -> str | None:
        """Why ``torch.compile`` does not work here, or None."""
        return peers.why_no_compiler(self.device)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The machine and the versions that the numbers belong to."""
        return environment(self.device)

    def free(self) -> None:
        """Let go of compiled code and of memory that nothing uses any more; a smoke run has little of either."""
        if self.smoke:
            return
        torch._dynamo.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def attempt(row: Row, measure: Callable[[], Row]) -> Row:
    """``row`` with what ``measure`` gives, or with the reason why it has no numbers. Never raises."""
    start = time.perf_counter()
    try:
        result = {**row, "status": "ok", "note": "", **measure()}
    except Wrong as error:
        result = {**row, "status": "WRONG", "note": str(error)}
    except Skip as error:
        result = {**row, "status": "skipped", "note": str(error)}
    except Exception as error:  # one variant must not take the others with it
        text = " ".join(str(error).split()) or "no message"
        result = {**row, "status": "failed", "note": f"{type(error).__name__}: {text[:300]}"}
    result["seconds"] = round(time.perf_counter() - start, 2)
    return result


def passes(ms: float, memory_bandwidth: float, tensor_bytes: int) -> float:
    """Time in passes over memory: one pass is the tensor read or written once at the speed of a copy.

    Files keep times and the bandwidth; passes follow from them whenever a file is read.

    >>> passes(1.0, memory_bandwidth=4e12, tensor_bytes=1_000_000_000)
    4.0
    """
    return ms * 1e-3 * memory_bandwidth / tensor_bytes


def measured(error: float, fwd: timing.Timing, bwd: timing.Timing, memory: timing.Memory, tensor_bytes: int) -> Row:
    """What a row says of a layer that passed its check with ``error``: times and bytes."""
    return {
        "error": error,
        "fwd_ms": fwd.ms,
        "bwd_ms": bwd.ms,
        "eager_fwd_ms": fwd.eager_ms,
        "eager_bwd_ms": bwd.eager_ms,
        "timed_by": fwd.by if fwd.by == bwd.by else f"{fwd.by}; {bwd.by}",
        "saved_bytes": memory.saved,
        "saved_share": memory.saved / tensor_bytes,
        "allocated_bytes": memory.allocated,
        "peak_bytes": memory.peak,
    }


def failed(rows: Iterable[Row]) -> list[Row]:
    """The rows that make a run fail: any wrong result, and any of ours that did not run."""
    return [r for r in rows if r["status"] == "WRONG" or (r["status"] == "failed" and r.get("ours"))]


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the versions that the numbers belong to."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "triton": triton_version,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_json(path: Path, name: str, setup: Setup, rows: Sequence[Row], extra: Mapping[str, Any]) -> None:
    """Environment and rows of one benchmark; called after every row, so that a killed run loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"bench": name, "smoke": setup.smoke, "environment": setup.environment, **extra, "rows": list(rows)}
    replace(path, json.dumps(data, indent=1, allow_nan=False, default=str) + "\n")


def replace(path: Path, text: str) -> None:
    """The file with this text, or what it was: a full disk does not leave half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
