"""CPU tensors go to the native CPU kernels here, not to Triton's interpreter."""

from __future__ import annotations

import pytest

from normmatters.kernels import backends


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the fixture for the Triton kernels' tests."""
    monkeypatch.setattr(backends, "INTERPRETED", False)
