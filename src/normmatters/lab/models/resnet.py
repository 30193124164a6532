"""Residual networks: CIFAR's ResNet-6n+2 and ImageNet's ResNet-18 and -50.

Where the shape changes, the shortcut is a strided 1 × 1 convolution with a norm (He's option B), in the CIFAR networks
too. The authors' code has it so. Option A has no norm in its shortcuts, so they would carry scale past the norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normmatters.lab.models.layers import conv, init_weights
from normmatters.lab.norms import NormFactory


class BasicBlock(nn.Module):
    """relu(norm(conv(relu(norm(conv x)))) + shortcut x)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: NormFactory) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(inputs, width, 3, stride), norm.batch_norm(width, act=True)
        self.conv2, self.norm2 = conv(width, width, 3), norm.batch_norm(width, act=True)
        self.shortcut = _shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x))
        return self.norm2(self.conv2(y), residual=self.shortcut(x))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 (strided), 1 × 1 to four times the width."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: NormFactory) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.norm1 = conv(inputs, width, 1), norm.batch_norm(width, act=True)
        self.conv2, self.norm2 = conv(width, width, 3, stride), norm.batch_norm(width, act=True)
        self.conv3, self.norm3 = conv(width, outputs, 1), norm.batch_norm(outputs, act=True)
        self.shortcut = _shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x))))
        return self.norm3(self.conv3(y), residual=self.shortcut(x))  # type: ignore[no-any-return]


def _shortcut(inputs: int, outputs: int, stride: int, norm: NormFactory) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(conv(inputs, outputs, 1, stride), norm.batch_norm(outputs))


class ResNet(nn.Module):
    """Stages of residual blocks, each but the first halving the image.

    Shape: input (N, C, H, W), output (N, classes). Images up to 32² enter by a 3 × 3 convolution; larger ones by a
    7 × 7 one of stride 2, followed by a max pool of stride 2 above 64².
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        widths: Sequence[int],
        norm: NormFactory,
        *,
        channels: int,
        classes: int,
        size: int,
        width: float = 1.0,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        scaled = [max(1, round(w * width)) for w in widths]
        inputs = scaled[0]
        stem = conv(channels, inputs, 3) if size <= 32 else conv(channels, inputs, 7, 2)
        self.stem = nn.Sequential(stem, norm.batch_norm(inputs, act=True))
        self.pool = nn.MaxPool2d(3, 2, 1) if size > 64 else nn.Identity()
        blocks: list[BasicBlock | Bottleneck] = []
        for stage, (depth, outputs) in enumerate(zip(depths, scaled)):
            for index in range(depth):
                blocks.append(block(inputs, outputs, 2 if stage and not index else 1, norm))
                inputs = outputs * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.gather = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, classes)
        init_weights(self, norm)
        for item in blocks:
            last, its_norm = (item.conv3, item.norm3) if isinstance(item, Bottleneck) else (item.conv2, item.norm2)
            if not norm.rescales:
                # nothing rescales the branches, so n of them would double the variance n times: give each 1/n of it
                with torch.no_grad():
                    last.weight.mul_(1 / math.sqrt(len(blocks)))
            elif zero_init_residual:
                nn.init.zeros_(its_norm.norm.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.stem(x)))
        return self.classifier(self.gather(x).flatten(1))  # type: ignore[no-any-return]
