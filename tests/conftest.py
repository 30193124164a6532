"""Fixtures for every test: one thread, a fixed seed, and on request memory that shows a read before the first write."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings

# Without a GPU the kernels' tests run through Triton's interpreter. Triton reads this variable when it is imported,
# which torch.compile does as well: so it is set here, before any test module is. Only what tests kernels sends CPU
# tensors there.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples on every run: a failure is one that anyone can reproduce.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=20, database=None)
settings.load_profile("repeatable")

torch.set_num_threads(1)  # pytest-xdist runs one process for each core


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(autouse=True)
def seeded() -> int:
    """Seed torch before each test, so that no test depends on the order."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def rng() -> torch.Generator:
    """A seeded generator of the test's own."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill ``torch.empty`` and ``torch.empty_like`` with NaN, integers with 85 (every other bit), so that reading
    before writing shows in the result."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 85)

        return allocate_poisoned

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
