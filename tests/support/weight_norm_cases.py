"""What the tests of weight norm's kernels and those of fused models share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ORDERS = [1, 2, math.inf]


def close(ours: Tensor, reference: Tensor | None, bound: float, size: float = 0.0) -> None:
    assert reference is not None
    largest = max(size, float(reference.detach().abs().max()))
    torch.testing.assert_close(ours.double(), reference.double(), rtol=0, atol=bound * largest)
