"""What every benchmark shares: where it runs, which rows are wanted, how a row is measured, and the JSON file.

A benchmark is a table of variants and shapes. It gives a :class:`Case` for each row, and says what the row is compared
with. :func:`rows_of` does the rest. A case of one layer is a :class:`Layer`, checked and then timed.
"""

from __future__ import annotations

import datetime
import gc
import json
import platform
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normmatters.bench import peers, timing
from normmatters.provenance import commit, device_name

try:
    import triton
except ImportError:
    triton = None

Row = dict[str, Any]
Axes = Mapping[str, Sequence[str]]

_PLACE = ("part", "mode")
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
        """Check the words, or lists of words with commas, against the axes of the benchmarks that will run."""
        words = frozenset(word for text in only for word in text.replace(",", " ").split())
        values = sorted({value for axes in known for values in axes.values() for value in values} | {"all"})
        unknown = sorted(words - set(values))
        if unknown:
            raise ValueError(f"no row is called {', '.join(map(repr, unknown))}; there are {', '.join(values)}")
        return cls(words)

    def default(self) -> bool:
        """Whether the user chose no rows."""
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
    warm_up: Callable[[], None] = lambda: None  # compiles what the rows need, see `warmup`

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
        return {
            "device": device_name(self.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda if self.cuda else None,
            "triton": triton.__version__ if triton else None,
            "python": platform.python_version(),
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def free(self) -> None:
        """Free compiled code and unused memory; a smoke run has little of either."""
        if self.smoke:
            return
        torch._dynamo.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Case:
    """A row before it is measured: its names, the function that measures it, and what else it says."""

    names: Mapping[str, str]  # the variant, and where it stands on the other axes
    measure: Callable[[], Row]
    ours: bool = True
    compile: bool = False  # by torch.compile
    more: Row = field(default_factory=dict)


def layer_cases(
    setup: Setup,
    axes: Mapping[str, str],
    tensor_bytes: int,
    variants: Iterable[Any],
    draw: Callable[[], Any],
    layer_of: Callable[[Any, Any], Layer],
) -> Iterator[Case]:
    """The variants of one layer, all on the same data, which ``draw`` makes when the first of them is measured."""

    @cache
    def data() -> list[Any]:
        one = draw()
        copies = timing.rotation(tensor_bytes, setup.device) if setup.share is None else 1
        return [one, *(one.copies() for _ in range(copies - 1))]

    def measure(variant: Any) -> Row:
        return layer_of(variant, data()[0]).measure(setup, data(), tensor_bytes)

    for v in variants:
        names = {**axes, "variant": v.name}
        yield Case(names, partial(measure, v), v.ours, v.compile, {"tensor_bytes": tensor_bytes})
        if v.compile:
            setup.free()


def rows_of(
    setup: Setup,
    cases: Iterable[Case],
    compare: Callable[[Sequence[Row]], None],
    *,
    eager_first: bool = False,
) -> Iterator[Row]:
    """Measure the cases one after the other.

    Args:
        compare: adds the ratios to the last of the rows that have numbers. It may fill them in in earlier rows too.
        eager_first: compile beforehand only when the first compiled row comes, so that eager rows do not wait.
    """
    good: list[Row] = []
    warmed = False
    for case in cases:
        # One process compiles what rows share: our kernels serve every shape, the peers are compiled for each.
        compiles = "/".join(value for axis, value in case.names.items() if case.compile or axis != "size")
        if setup.share is not None and zlib.crc32(compiles.encode()) % setup.share[1] != setup.share[0]:
            continue
        if not warmed and (case.compile or not eager_first):
            setup.warm_up()
            warmed = True
        row = attempt(setup, case)
        if row["status"] == "ok" and setup.share is None:
            good.append(row)
            compare(good)
        del case  # frees the tensors that it holds
        yield row


def attempt(setup: Setup, case: Case) -> Row:
    """The row of a case with its numbers, or with the reason why it has none. Never raises."""
    row: Row = {**case.names, "ours": case.ours, **case.more}
    start = time.perf_counter()
    try:
        if case.compile and setup.no_compiler:
            raise Skip(setup.no_compiler)
        result = {**row, "status": "ok", "note": "", **case.measure()}
    except Wrong as error:
        result = {**row, "status": "WRONG", "note": str(error)}
    except Skip as error:
        result = {**row, "status": "skipped", "note": str(error)}
    except Exception as error:  # one variant must not take the others with it
        result = {**row, "status": "failed", "note": f"{type(error).__name__}: {timing.one_line(error)}"}
    result["seconds"] = round(time.perf_counter() - start, 2)
    return result


@dataclass(frozen=True)
class Layer:
    """A layer: its forward pass on some data, and its backward pass. The data's ``g`` are the outputs' gradients."""

    forward: Callable[[Any], Any]
    sources: Callable[[Any], Sequence[Tensor]]  # of the data: the tensors whose gradients are computed
    check: Callable[[], float]  # the largest error as a share of its tolerance; raises Wrong
    state: Sequence[Tensor] = ()  # parameters and buffers: memory that is there anyway

    def backward(self, data: Any, outputs: Any, *, again: bool = False) -> tuple[Tensor, ...]:
        """The gradients; with ``again`` the backward pass may be repeated."""
        return torch.autograd.grad(outputs, self.sources(data), data.g, retain_graph=again)

    def memory(self, data: Any) -> timing.Memory:
        return timing.memory(partial(self.forward, data), partial(self.backward, data, again=True), self.state)

    def measure(self, setup: Setup, data: Sequence[Any], tensor_bytes: int) -> Row:
        """Check, memory and times; ``data`` are sets to take turns with. A share of the rows only runs it once."""
        first = data[0]
        if setup.share is not None:
            self.backward(first, self.forward(first))
            return {}
        with timing.side_stream(setup.device):
            error, memory = self.check(), self.memory(first)
            fwd = timing.time_calls([partial(self.forward, one) for one in data], setup.device, quick=setup.smoke)
            calls = [partial(self.backward, one, self.forward(one), again=True) for one in data]
            bwd = timing.time_calls(calls, setup.device, quick=setup.smoke)
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


def compare_with_native(rows: Sequence[Row], family: Callable[[str], str] = lambda variant: "") -> None:
    """Give the last row its time as a ratio to the fastest native form so far, of the same family and shape."""

    def place(row: Row) -> list[Any]:
        return [family(row["variant"]), *(row.get(axis) for axis in ("dtype", "layout", "form", "size"))]

    def total(row: Row) -> float:
        return float(row["fwd_ms"] + row["bwd_ms"])

    last = rows[-1]
    native = [total(row) for row in rows if "native" in row["variant"] and place(row) == place(last)]
    last["ratio"] = total(last) / min(native) if native else None


def compare_with(base: str, rows: Sequence[Row]) -> None:
    """Give the last row its time beside that of ``base`` in the same part and mode, if that was measured."""
    last = rows[-1]
    same = [row["ms"] for row in rows if row["variant"] == base and all(row.get(k) == last.get(k) for k in _PLACE)]
    last |= {"ratio": last["ms"] / same[0] if same else None, "added_ms": last["ms"] - same[0] if same else None}


def passes(ms: float, memory_bandwidth: float, tensor_bytes: int) -> float:
    """Time in passes over memory: one pass is the tensor read or written once at the speed of a copy.

    Files keep times and the bandwidth; passes follow from them whenever a file is read.

    >>> passes(1.0, memory_bandwidth=4e12, tensor_bytes=1_000_000_000)
    4.0
    """
    return ms * 1e-3 * memory_bandwidth / tensor_bytes


def failed(rows: Iterable[Row]) -> list[Row]:
    """The rows that make a run fail: any wrong result, and any of ours that did not run."""
    return [r for r in rows if r["status"] == "WRONG" or (r["status"] == "failed" and r.get("ours"))]


def write_json(path: Path, name: str, setup: Setup, rows: Sequence[Row], extra: Mapping[str, Any]) -> None:
    """Environment and rows of one benchmark; called after every row, so that a killed run loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"bench": name, "smoke": setup.smoke, "environment": setup.environment, **extra, "rows": list(rows)}
    replace(path, json.dumps(data, indent=1, allow_nan=False, default=str) + "\n")


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: a full disk does not leave half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
