"""A run's folder: what was run (config, environment), what came out (metrics, norms, summary), or why it ended.

config.json       the run's config                     environment.json   versions, device, commit
metrics.jsonl     one line per epoch                   norms.safetensors  the recorder's norms
checkpoints/      the last states                      summary.json       written last: the run is finished
error.json        the reason, where it ended early     tensorboard/       where asked for
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

import normmatters
from normmatters.lab.config import RunConfig, differences, from_dict, to_json
from normmatters.lab.errors import RunError, write_error
from normmatters.lab.files import read_json, read_object, read_plain, write_atomic
from normmatters.provenance import commit, device_name

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # errors of file systems without locks, as Lustre often is


@dataclass(frozen=True)
class RunResult:
    """``status``: "finished" or "nan"; ``metrics``: the last epoch's and the summary's numbers."""

    status: str
    run_dir: Path
    metrics: dict[str, Any] = field(default_factory=dict)
    message: str = ""


class RunFolder:
    """One run's folder, locked while it is open, so that no second process writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self._lock = FileLock(path / ".lock", timeout=0, thread_local=False, fallback_to_soft=False)
        self._started = False  # until then what the folder holds is an earlier run's

    def __enter__(self) -> RunFolder:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise RunError("busy", f"{self.path}: another process is running this run") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise write_error(error, Path(error.filename or self._lock.lock_file)) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()  # for a killed process the system does it

    def conflict(self, config: RunConfig) -> str:
        """What the folder holds of another run than this one; empty if it holds none, or none that has results."""
        try:
            old = self.config()
        except ValueError as error:
            return f"holds a run that cannot be read ({error})"
        if old is None or not (differs := differences(old, config)) or not self.has_results():
            return ""
        return f"holds a run of other settings ({', '.join(differs)})"

    def check(self, config: RunConfig) -> None:
        """Refuse a folder with another run's results. What another run without results has left is cleared."""
        if problem := self.conflict(config):
            raise RunError("other_run", f"{self.path} {problem}: choose another folder, or throw it away (--fresh)")
        if (old := self.config()) is not None and differences(old, config):
            self.clear()

    def config(self) -> RunConfig | None:
        """The config of the run in this folder, None if there is no run. Raises ValueError if it cannot be read."""
        file = self.path / "config.json"
        return from_dict(read_object(file), str(file)) if file.exists() else None

    def threads(self) -> int | None:
        """The number of threads that the run began with, by which its sums round; None before its first checkpoint."""
        with contextlib.suppress(ValueError):
            if (config := self.config()) is not None and any(self.checkpoints.glob("epoch-*.sha256")):
                return config.runtime.threads
        return None

    def has_results(self) -> bool:
        """Whether a run has left anything of use: an epoch, a checkpoint, or how it ended."""
        diverged = (read_json(self.path / "error.json") or {}).get("kind") == "nan"
        files = [self.metrics, self.path / "summary.json", *self.checkpoints.glob("*.pt")]
        return diverged or any(file.is_file() and file.stat().st_size for file in files)

    def clear(self) -> None:
        """Remove a run's files. Its end goes first: if this is stopped halfway, the run must not look finished."""
        if not (self.path / "config.json").is_file():
            return  # no run has been here: the files are somebody else's
        for name in ("summary.json", "error.json", "metrics.jsonl", "norms.safetensors", "tokenizer.json"):
            (self.path / name).unlink(missing_ok=True)
        for item in (*self.checkpoints.glob("epoch-*.pt"), *self.checkpoints.glob("epoch-*.sha256")):
            item.unlink()
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)

    def start(self, config: RunConfig, device: torch.device) -> None:
        """Write what is run."""
        self._started = True
        for folder in (self.path, self.checkpoints):
            for stray in folder.glob(".*.[0-9]*.tmp"):  # a process was killed while it wrote them
                stray.unlink(missing_ok=True)
        (self.path / "error.json").unlink(missing_ok=True)
        write_atomic(self.path / "config.json", to_json(config).encode())
        write_atomic(self.path / "environment.json", _json(environment(device)))

    def ended(self) -> RunResult | None:
        """The result of a run that finished, or that ended with NaN, as it would again; None for all others."""
        summary = read_json(self.path / "summary.json") or {}
        if summary.get("status") == "finished":
            return RunResult("finished", self.path, summary)
        error = read_json(self.path / "error.json") or {}
        metrics, message = error.get("metrics"), error.get("message")
        if error.get("kind") == "nan":
            return RunResult("nan", self.path, metrics if isinstance(metrics, dict) else {}, str(message or ""))
        return None

    def diverged(self) -> bool:
        ended = self.ended()
        return ended is not None and ended.status == "nan"

    def append(self, row: dict[str, Any]) -> None:
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise write_error(error, self.metrics) from error

    def rewrite(self, rows: list[dict[str, Any]]) -> None:
        """Replace the metrics by those of the checkpoint from which the run continues."""
        write_atomic(self.metrics, "".join(json.dumps(r) + "\n" for r in rows).encode())

    def finish(self, summary: dict[str, Any]) -> None:
        (self.path / "error.json").unlink(missing_ok=True)
        write_atomic(self.path / "summary.json", _json(summary))

    def fail(self, kind: str, message: str, **details: Any) -> None:
        """Write why the run ended. If even that cannot be written, the caller's error still says it."""
        if not self._started:
            return
        with contextlib.suppress(RunError):
            write_atomic(self.path / "error.json", _json({"kind": kind, "message": message, **details}))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The epochs of a ``metrics.jsonl``, up to a damaged line, as a killed run may leave; none without a file."""
    rows: list[dict[str, Any]] = []
    for line in read_plain(path).splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or not isinstance(row.get("epoch"), int):
            break
        rows.append({sys.intern(key): value for key, value in row.items()})  # thousands of runs share the names
    return rows


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware that a result should be read with."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "normmatters": normmatters.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "commit": commit(),
    }


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
