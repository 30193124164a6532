"""Fixtures for tests in which weight norm's kernels run: on a GPU, or on CPU tensors through Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normmatters.kernels import backends
from support.quick_interpreter import quicken


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels take CPU tensors where there is no GPU."""
    if not torch.cuda.is_available():
        quicken()
        monkeypatch.setattr(backends, "INTERPRETED", True)


@pytest.fixture
def weight_norm_calls(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> list[str]:
    """Which kernels of weight norm were launched, so that no test passes by way of the plain path."""
    from normmatters.kernels.triton.weight_norm import WeightGroup

    calls: list[str] = []
    for name in ("forward", "backward"):
        launch = getattr(WeightGroup, name)

        def counted(*args: Any, launch: Any = launch, name: str = name) -> Any:
            calls.append(name)
            return launch(*args)

        monkeypatch.setattr(WeightGroup, name, counted)
    return calls


@pytest.fixture(params=["bounded", "classic"])
def kind(request: pytest.FixtureRequest) -> str:
    """Of weight norm: one fixed ρ for each tensor, or a learned one for each row."""
    return str(request.param)
