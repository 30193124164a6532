"""The kernels' tests run on a GPU, or, without one, on CPU tensors through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from normmatters.kernels import dispatch


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the dispatcher send CPU tensors to the kernels; everywhere else they take the equations."""
    monkeypatch.setattr(dispatch, "_INTERPRETED", not torch.cuda.is_available())
