"""A run's folder: what was run (config, environment), what came out (metrics, norms, summary), or why it ended.

config.json       the run's config                     environment.json   versions, device, commit
metrics.jsonl     one line an epoch                    norms.safetensors  the recorder's norms
checkpoints/      the last states                      summary.json       written last: the run is finished
error.json        the reason, where it ended early     tensorboard/       where asked for
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

import normmatters
from normmatters.lab.config import RunConfig, config_hash, differences, from_dict, to_json
from normmatters.provenance import commit, device_name


class RunError(RuntimeError):
    """A run that cannot go on. ``kind``: "nan", "disk_full", "folder", "busy", "other_run", "checkpoint"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class RunResult:
    """``status``: "finished" or "nan"; ``metrics``: the last epoch's and the summary's numbers."""

    status: str
    run_dir: Path
    metrics: dict[str, Any] = field(default_factory=dict)
    message: str = ""


def write_atomic(path: Path, data: bytes) -> None:
    """All of ``data`` under ``path``, or the old file untouched: temporary file, fsync, rename, fsync of the folder."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            partial.unlink(missing_ok=True)
        raise _clear(error, path) from error


def _clear(error: OSError, path: Path) -> RunError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(
            "disk_full", f"no space left to write {path}; what was saved before is intact: free space, run again"
        )
    return RunError("folder", f"cannot write {path}: {error.strerror or error}")


def why(error: Exception) -> dict[str, str]:
    """The ``kind`` and the ``message`` of what ended a run."""
    if isinstance(error, RunError):
        return {"kind": error.kind, "message": str(error)}
    if isinstance(error, ValueError | torch.OutOfMemoryError):
        return {"kind": "config" if isinstance(error, ValueError) else "memory", "message": str(error)}
    return {"kind": "exception", "message": f"{type(error).__name__}: {error}"}


class RunFolder:
    """One run's folder, locked while it is open, so that no second process writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self._lock: IO[str] | None = None
        self._started = False  # until then what the folder holds is an earlier run's

    def __enter__(self) -> RunFolder:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise _clear(error, Path(error.filename or self.path)) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise RunError("busy", f"{self.path}: another process is running this run") from None
        except OSError:
            pass  # a file system without locks, such as Lustre often is
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()  # which also unlocks; a killed process's lock goes with it
            self._lock = None

    def check(self, config: RunConfig) -> None:
        """Refuse a folder that holds another run, unless that one has not trained for an epoch: it is cleared then."""
        existing = self.path / "config.json"
        if not existing.is_file():
            return
        try:
            old = from_dict(json.loads(existing.read_text(encoding="utf-8")), str(existing))
        except ValueError as error:
            raise RunError("other_run", f"{existing} cannot be read ({error}); choose another folder") from None
        if config_hash(old) == config_hash(config):
            return
        if has_results(self.path):
            raise RunError(
                "other_run",
                f"{self.path} holds another run ({', '.join(differences(old, config))}): "
                "choose another folder, or throw it away (--fresh, resume=False)",
            )
        self.clear()

    def clear(self) -> None:
        """Throw away what the folder holds of a run. How it ended goes first: half of it must not look finished."""
        if not (self.path / "config.json").is_file():
            return  # no run has been here, and what lies here is somebody's
        for name in ("summary.json", "error.json", "metrics.jsonl", "norms.safetensors", "tokenizer.json"):
            (self.path / name).unlink(missing_ok=True)
        for item in (*self.checkpoints.glob("epoch-*.pt"), *self.checkpoints.glob("epoch-*.sha256")):
            item.unlink()
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)

    def start(self, config: RunConfig, device: torch.device) -> None:
        """Write what is run."""
        self._started = True
        for folder in (self.path, self.checkpoints):
            for stray in folder.glob(".*.[0-9]*.tmp"):  # of a process that was killed while it wrote
                stray.unlink(missing_ok=True)
        (self.path / "error.json").unlink(missing_ok=True)
        write_atomic(self.path / "config.json", to_json(config).encode())
        write_atomic(self.path / "environment.json", _json(environment(device)))

    def ended(self) -> RunResult | None:
        """The result of a run that finished, or that ended with NaN (it would again)."""
        summary = read_json(self.path / "summary.json")
        if summary is not None:
            return RunResult("finished", self.path, summary)
        error = read_json(self.path / "error.json")
        if error is not None and error.get("kind") == "nan":
            return RunResult("nan", self.path, error.get("metrics", {}), error.get("message", ""))
        return None

    def append(self, row: dict[str, Any]) -> None:
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise _clear(error, self.metrics) from error

    def rewrite(self, rows: list[dict[str, Any]]) -> None:
        """Replace the metrics by those of the checkpoint that the run goes on from."""
        write_atomic(self.metrics, "".join(json.dumps(r) + "\n" for r in rows).encode())

    def finish(self, summary: dict[str, Any]) -> None:
        (self.path / "error.json").unlink(missing_ok=True)
        write_atomic(self.path / "summary.json", _json(summary))

    def fail(self, kind: str, message: str, **details: Any) -> None:
        """Say why the run ended; where even that cannot be written, the caller's error says it."""
        if not self._started:
            return
        with contextlib.suppress(RunError):
            write_atomic(self.path / "error.json", _json({"kind": kind, "message": message, **details}))


def has_results(folder: Path) -> bool:
    """Whether a run has anything to lose: an epoch, a checkpoint, or how it ended. Missing data leave nothing."""
    diverged = (read_json(folder / "error.json") or {}).get("kind") == "nan"
    files = [folder / "metrics.jsonl", folder / "summary.json", *(folder / "checkpoints").glob("*.pt")]
    return diverged or any(file.is_file() and file.stat().st_size for file in files)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The epochs of a ``metrics.jsonl``, none where there is no file; what follows a damaged line is left out."""
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # the line that was being written when the run was killed
            break
        if not isinstance(row, dict) or not isinstance(row.get("epoch"), int):
            break
        rows.append(row)
    return rows


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware that a result should be read with."""
    about: dict[str, Any] = {
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
    return about


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
