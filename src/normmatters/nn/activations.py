"""The activation that keeps zero mean and unit variance, for networks with weight norm in place of batch norm (F15)."""

from __future__ import annotations

import math

from torch import Tensor, nn


class TReLU(nn.Module):
    """(relu(x) − 1/√(2π)) / √(½(1 − 1/π)): zero mean and unit variance for standard Gaussian input (F15).

    Shape:
        input and output: any, the same

    Example::

        >>> TReLU()(torch.zeros(1))
        tensor([-0.6833])
    """

    MEAN = 1 / math.sqrt(2 * math.pi)
    STD = math.sqrt(0.5 * (1 - 1 / math.pi))

    def forward(self, input: Tensor) -> Tensor:
        """Apply the activation elementwise."""
        return (input.relu() - self.MEAN) / self.STD
