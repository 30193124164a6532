"""Files of a run: written whole or not at all, and read as what they should be or refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["RunError", "read_json", "write_atomic", "write_error"]


class RunError(RuntimeError):
    """A run that cannot continue. ``kind``: "nan", "disk_full", "folder", "busy", "other_run", "checkpoint"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def write_atomic(path: Path, data: bytes | memoryview) -> None:
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
        with contextlib.suppress(OSError):  # the first error is the one to report
            partial.unlink(missing_ok=True)
        raise write_error(error, path) from error


def write_error(error: OSError, path: Path) -> RunError:
    """The error of a run whose file ``path`` could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = f"no space left to write {path}; what was saved before is intact: free space, run again"
        return RunError("disk_full", text)
    return RunError("folder", f"cannot write {path}: {error.strerror or error}")


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
