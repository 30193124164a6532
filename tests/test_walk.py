"""How many of our files a call passes through: few enough that a reader can follow it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import normmatters

SOURCE = str(Path(normmatters.__file__).parent) + "/"


def walk(call: Callable[[], Any]) -> list[str]:
    """Our files in the order in which ``call`` enters and re-enters them; what others' code does is not seen."""
    stack: list[str] = []
    files: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(SOURCE) or event not in ("call", "return"):
            return
        if event == "call":
            stack.append(name.removeprefix(SOURCE))
        else:
            stack.pop()
        if stack and stack[-1:] != files[-1:]:
            files.append(stack[-1])

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def test_the_walk_of_a_batch_norm_on_a_cpu() -> None:
    norm = normmatters.L1BatchNorm2d(4, act="relu")
    x = torch.randn(8, 4, 5, 5, requires_grad=True)
    norm(x)  # what only the first call does: constants are computed
    files = walk(lambda: norm(x))
    assert len(set(files)) <= 7, files
    assert len(files) - 1 <= 12, files
