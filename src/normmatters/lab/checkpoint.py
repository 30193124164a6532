"""Checkpoints that survive a kill at any moment: written beside, synced, renamed, each with its checksum."""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path
from typing import Any

import torch

from normmatters.lab.errors import RunError
from normmatters.lab.files import read_plain, write_atomic

_NAME = re.compile(r"epoch-(\d{6})\.pt")


def save(folder: Path, epoch: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Write the state after ``epoch`` epochs, then remove all but the last ``keep`` up to this one.

    The checksum is a file of its own, written second: a state without one was cut off and does not count.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getbuffer()
    path = folder / f"epoch-{epoch:06d}.pt"
    checksum = path.with_suffix(".sha256")
    checksum.unlink(missing_ok=True)
    write_atomic(path, data)
    write_atomic(checksum, (hashlib.sha256(data).hexdigest() + "\n").encode())
    saved = epochs(folder)
    damaged = [p for e, p in saved if e > epoch]  # or the run would have continued from there
    for old in damaged + [p for e, p in saved if e <= epoch][:-keep]:
        old.with_suffix(".sha256").unlink(missing_ok=True)
        old.unlink(missing_ok=True)
    return path


def epochs(folder: Path) -> list[tuple[int, Path]]:
    """(epoch, file) of every checkpoint, oldest first."""
    return sorted((int(m[1]), p) for p in folder.glob("epoch-*.pt") if (m := _NAME.fullmatch(p.name)))


def load(folder: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Any] | None, list[str]]:
    """The newest undamaged state (None where there is none), and a line about each that was passed over."""
    passed_over = []
    for epoch, path in reversed(epochs(folder)):
        name, checksum = f"checkpoint of epoch {epoch}", path.with_suffix(".sha256")
        if not checksum.exists():
            passed_over.append(f"{name}: the run was stopped while it was written")
            continue
        try:
            data, expected = read_plain(path, None), read_plain(checksum).decode(errors="replace").strip()
        except (OSError, ValueError) as error:
            passed_over.append(f"{name}: cannot be read: {error}")
            continue
        if hashlib.sha256(data).hexdigest() != expected:
            passed_over.append(f"{name}: {path.name} does not have its checksum")
            continue
        try:
            state = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        except Exception as error:  # torch advises to run whatever code is in the file: not passed on
            problem = "has its checksum, but is not a state that a run has saved"
            raise RunError("checkpoint", f"{path} {problem}: remove it, or begin again (--fresh)") from error
        return state, passed_over
    return None, passed_over


def random_state() -> dict[str, Any]:
    """Torch's global random number generators: nothing in a run draws from Python's or numpy's."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if cuda else []}


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
