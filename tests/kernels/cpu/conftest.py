"""Tests here run the native kernels; those beside this folder run Triton's, in its interpreter."""

from collections.abc import Callable, Iterator

import pytest
import torch

from normmatters.kernels import backends


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    monkeypatch.setattr(backends, "INTERPRETED", False)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set the number of PyTorch's threads for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
