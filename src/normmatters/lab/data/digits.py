"""The embedded set: scikit-learn's 1,797 handwritten digits, 8 × 8 pixels. Real images, no download."""

from __future__ import annotations

import torch
from torch import Tensor


def load(train_size: int = 1437) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``train_x, train_y, val_x, val_y``: uint8 N×8×8×1 and int64 labels; what is not for training validates."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the digits set comes with scikit-learn: pip install scikit-learn") from None
    bunch = load_digits()
    x = torch.from_numpy(bunch.images)
    x = (x * (255 / 16)).round().to(torch.uint8).unsqueeze(-1)  # the scanner's 17 grey levels
    y = torch.from_numpy(bunch.target).to(torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1797))  # writers are in blocks in the file
    train, val = order[:train_size], order[train_size:]
    return x[train], y[train], x[val], y[val]
