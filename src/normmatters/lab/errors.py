"""Errors that a user can do something about: each is one sentence, on a terminal and in ``error.json``."""

from __future__ import annotations

import errno
from pathlib import Path

_NO_MEMORY = (
    "allocate memory",
    "out of memory",
    "not enough memory",
    "calculation overflowed",
    "multiplication overflow",
)


class RunError(RuntimeError):
    """A run that cannot continue. ``kind``: "nan", "disk_full", "folder", "busy", "other_run", "checkpoint"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def write_error(error: OSError, path: Path) -> RunError:
    """The error of a run whose file ``path`` could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = f"no space left to write {path}; what was saved before is intact: free space, run again"
        return RunError("disk_full", text)
    return RunError("folder", f"cannot write {path}: {error.strerror or error}")


def describe_error(error: Exception) -> dict[str, str]:
    """The ``kind`` and the ``message`` of what ended a run."""
    if isinstance(error, RunError):
        return {"kind": error.kind, "message": str(error)}
    message = expected_message(error)
    if message is None:
        return {"kind": "exception", "message": f"{type(error).__name__}: {error}"}
    kind = "config" if isinstance(error, ValueError) else "memory" if _is_out_of_memory(error) else "exception"
    return {"kind": kind, "message": message}


def expected_message(error: BaseException) -> str | None:
    """What to tell a user about an error that is not a mistake of ours; None for one that may be."""
    if _is_out_of_memory(error):
        detail = (str(error).strip() or "MemoryError").splitlines()[0]
        return f"not enough memory: make data.batch_size (or data.tokens), the model or --jobs smaller ({detail})"
    if isinstance(error, RecursionError):
        return "a file is nested too deeply to be read"
    if isinstance(error, RunError | ValueError | OSError | ImportError):
        return str(error) or type(error).__name__
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    """torch has an error of its own for a GPU's memory only."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )
