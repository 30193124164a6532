"""A residual block as torchvision writes it, and the device that the kernels' tests run on."""

from __future__ import annotations

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """A residual block as torchvision writes it."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels_in, channels, 1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if channels_in != channels:
            self.downsample = nn.Sequential(nn.Conv2d(channels_in, channels, 1), nn.BatchNorm2d(channels))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)
