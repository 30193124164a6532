"""How many of the library's files one call passes through: what a reader must open to follow it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import normmatters
from normmatters.optim import WeightDecayFreeSGD

SOURCE = str(Path(normmatters.__file__).parent)


def walk(call: Callable[[], Any]) -> list[str]:
    """The library's file of every Python function that ``call`` enters, in order."""
    files: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return files


def changes(files: list[str]) -> int:
    """How often the reader must change the file."""
    return sum(one != other for one, other in zip(files, files[1:]))


def test_weight_decay_free_sgd_steps_within_three_files() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    weight, *others = net.parameters()
    groups = [{"params": [weight]}, {"params": others, "weight_decay_free": False}]
    optimizer = WeightDecayFreeSGD(groups, lr=0.1, momentum=0.9, weight_decay=5e-4)
    for _ in range(2):  # the first step also makes the state
        optimizer.zero_grad()
        net(torch.randn(4, 3, 8, 8)).square().sum().backward()
        files = walk(optimizer.step)
        # The hook that projects weights after every optimizer's step, if an earlier test has asked for it.
        files = [file for file in files if not file.endswith("weight_norm/projection.py")]
    assert any(file.endswith("weight_decay_free.py") for file in files)
    assert len(set(files)) <= 3
    assert changes(files) <= 8


def test_a_batch_norm_on_a_cpu_passes_through_seven_files() -> None:
    norm = normmatters.L1BatchNorm2d(4, act="relu")
    x = torch.randn(8, 4, 5, 5, requires_grad=True)
    norm(x)  # the first call also computes constants
    files = walk(lambda: norm(x))
    assert any(file.endswith(("cpu/batch_norm.py", "hand_derived.py")) for file in files)
    assert len(set(files)) <= 7, files
    assert changes(files) <= 12, files
