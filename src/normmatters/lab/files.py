"""Files of a run: written whole or not at all; read only if they are plain files of the right type."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from normmatters.lab.errors import write_error

_LARGEST = 1 << 28  # bytes of a text file that one of our commands wrote; a checkpoint is no such file


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


def read_plain(path: Path, largest: int | None = _LARGEST) -> bytes:
    """A file's bytes. Raises ValueError for what is no plain file (a named pipe would never end) or too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # which a named pipe does not delay
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path}: expected a plain file")
        if largest is not None and about.st_size > largest:
            raise ValueError(f"{path}: has {about.st_size} bytes, expected at most {largest}")
        return file.read()


def read_value(path: Path) -> Any:
    """The JSON value in a file. Raises ValueError that says what is wrong with it, or FileNotFoundError."""
    try:
        return json.loads(read_plain(path))
    except FileNotFoundError:
        raise
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        problem = str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path}: cannot be read as JSON: {problem}") from None


def read_object(path: Path) -> dict[str, Any]:
    """:func:`read_value` of a file that should hold a JSON object; ValueError if it holds something else."""
    value = read_value(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any] | None:
    """:func:`read_object`, or None where there is none that can be read."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return None
