"""Tests here run the native kernels; those beside this folder run Triton's, in its interpreter."""

import pytest

from normmatters.kernels import backends


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    monkeypatch.setattr(backends, "INTERPRETED", False)
