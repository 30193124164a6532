"""``normmatters bench``: ours against the peers, in one process, each checked before it is timed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from normmatters.bench.harness import Axes, Row, Setup

#: Each is a module with ``AXES``, the names of its rows axis by axis, and ``rows(setup)``.
NAMES = ("layers", "resnet50", "layernorm", "weightnorm", "optim", "cpu")
RESULTS = Path("results/bench")


def run(
    names: list[str],
    *,
    smoke: bool = False,
    device: str | None = None,
    out: Path | None = None,
    only: Sequence[str] = (),
    jobs: int | None = None,
    share: tuple[int, int] | None = None,
) -> int:
    """Run benchmarks, print their tables row by row, and write ``out/NAME.json``; for ``layers`` also a picture.

    Args:
        names: of :data:`NAMES`; all of them if empty.
        smoke: tiny shapes, in seconds, on any machine; the times mean nothing. Files only where ``out`` says.
        device: "cpu", "cuda" or "cuda:1"; a GPU where there is one by default.
        out: folder of the JSON files; by default ``results/bench``, and none where ``only`` chooses some of the rows.
        only: words that choose rows, such as "cl", "fp16", "l1_lean", or "all"; see
            :class:`~normmatters.bench.harness.Selection`.
        jobs: processes that compile beforehand (:mod:`~normmatters.bench.warmup`); None is as many as fit on a GPU.
        share: only run the i-th of n shares of the rows once, untimed: what those processes do.

    Returns:
        0, or 1 if a result was wrong or one of ours failed.
    """
    from normmatters.bench import harness, warmup

    names = list(dict.fromkeys(names)) or list(NAMES)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"no benchmark is called {', '.join(map(repr, unknown))}; there are {', '.join(NAMES)}")
    selection = harness.Selection.of(only, map(axes_of, names))
    place = _device(device)
    if jobs is not None and jobs < 0:
        raise ValueError(f"jobs must not be negative, got {jobs}")
    if not smoke and not only and share is None and out is None:
        out = RESULTS
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # an error now, not after the first row
    setup = harness.Setup(place, smoke, selection, share)
    if smoke and share is None:
        print("A smoke run: tensors so small that their times and ratios mean nothing. It shows that every row runs.")
    rows: list[Row] = []
    for name in names:
        setup.warm_up = partial(warmup.warm_up, name, setup, warmup.default_jobs(name, setup) if jobs is None else jobs)
        rows += _run_one(name, setup, out)
    if only and not rows and share is None:
        raise ValueError(f"no row is called {' and '.join(only)}{' in a smoke run' if smoke else ''}")
    bad = harness.failed(rows)
    if bad:
        print(f"\n{len(bad)} rows are wrong or failed:")
        for row in bad:
            print(f"  {row['variant']}: {row['status']}: {row['note']}")
    return 1 if bad else 0


def _device(name: str | None) -> torch.device:
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"expected the device cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name}: torch finds no GPU here")
    return device


def _run_one(name: str, setup: Setup, out: Path | None) -> list[Row]:
    import torch

    from normmatters.bench import harness, report, roofline

    if name == "cpu":
        setup = replace(setup, device=torch.device("cpu"))
    bandwidth = setup.memory_bandwidth if setup.share is None else 1.0  # a share measures nothing
    env = setup.environment
    print(f"\n{name}: {env['device']}, torch {env['torch']}, memory {bandwidth / 1e12:.3f} TB/s", flush=True)
    print(report.text_header(name), flush=True)
    rows: list[Row] = []
    for row in _rows(name, setup):
        rows.append(row)
        shown = {key: value for key, value in row.items() if not (setup.smoke and "ratio" in key)}
        print(report.text_row(name, report.with_passes(shown, bandwidth)), flush=True)
        if out is not None:
            harness.write_json(out / f"{name}.json", name, setup, rows, {"memory_bandwidth": bandwidth})
    if name == "layers" and rows and out is not None:
        try:
            data = {"rows": rows, "environment": env, "memory_bandwidth": bandwidth}
            print(f"drawn: {roofline.draw(data, out / 'roofline.svg')}")
        except (ImportError, ValueError) as error:  # the numbers are what matters
            print(f"no picture: {error}")
    return rows


def _rows(name: str, setup: Setup) -> Iterator[Row]:
    """The rows; what goes wrong between them, such as memory that runs out, becomes the last one."""
    from normmatters.bench import timing

    try:
        yield from importlib.import_module(f"normmatters.bench.{name}").rows(setup)
    except Exception as error:
        note = f"{type(error).__name__}: {timing.one_line(error)}"
        yield {"variant": name, "ours": True, "status": "failed", "note": note}


def axes_of(name: str) -> Axes:
    """The names of a benchmark's rows, axis by axis."""
    axes: Axes = importlib.import_module(f"normmatters.bench.{name}").AXES
    return axes
