"""The peers: torch's own norms, a naive L1 batch norm, and plain ResNets as torchvision writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BACKEND = "inductor"


def compiled(function: Callable[..., Any], *, backward_again: bool = True) -> Callable[..., Any]:
    """``torch.compile`` for exactly the shapes it meets.

    With ``backward_again`` the backward pass of one output may be run many times.
    """
    import torch._functorch.config as functorch

    functorch.donated_buffer = not backward_again  # a backward pass may by default overwrite what it was given
    # In torch 2.11 this cache does not tell autocast's dtypes apart, and gives a bf16 step the kernels of fp16's.
    functorch.enable_autograd_cache = False
    wrapped: Callable[..., Any] = torch.compile(function, dynamic=False, backend=BACKEND)
    return wrapped


def why_no_compiler(device: torch.device) -> str | None:
    """None if ``torch.compile`` works on the device; else its complaint in one line."""
    try:
        x = torch.ones(8, device=device, requires_grad=True)
        compiled(lambda x: (x * 2).relu().sum())(x).backward()
    except Exception as error:  # a missing compiler shows in many ways
        lines = str(error).strip().splitlines() or ["no message"]
        return f"torch.compile does not work here: {type(error).__name__}: {lines[0][:160]}"
    finally:
        torch._dynamo.reset()
    return None


class NativeBatchNormReLU(nn.Module):
    """relu(batch norm (+ residual)) as torchvision writes it: in place, so that no memory is wasted."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y: Tensor = self.norm(x)
        if residual is not None:
            y += residual
        return F.relu(y, inplace=True)


class NaiveL1BatchNorm2d(nn.BatchNorm2d):
    """L1 batch norm (F5) in plain PyTorch operations, as anyone would write it."""

    def forward(self, input: Tensor) -> Tensor:
        x = input.float()
        n = x.numel() // x.shape[1]
        mean = x.mean((0, 2, 3), keepdim=True)
        centered = x - mean
        squared = (math.sqrt(math.pi / 2) * centered.abs().mean((0, 2, 3), keepdim=True)).square()
        with torch.no_grad():
            _move(self.running_mean, mean.flatten())
            _move(self.running_var, squared.flatten() * (n / (n - 1)))
        y = centered * torch.rsqrt(squared + self.eps)
        y = y * self.weight[:, None, None] + self.bias[:, None, None]
        return y.to(input.dtype)


def _move(running: Tensor | None, batch: Tensor) -> None:
    if running is not None:
        running.lerp_(batch, 0.1)


class NaiveL1BatchNormReLU(NativeBatchNormReLU):
    """relu(naive L1 batch norm (+ residual))."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.norm = NaiveL1BatchNorm2d(channels)


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 (strided), 1 × 1; with attributes named as in torchvision."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += identity
        return self.relu(y)  # type: ignore[no-any-return]


class BasicBlock(nn.Module):
    """3 × 3 (strided), 3 × 3; with attributes named as in torchvision."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += identity
        return self.relu(y)  # type: ignore[no-any-return]


class ResNet50(nn.Module):
    """torchvision's ResNet-50, layer for layer; written out so that it needs no torchvision and can be made small.

    Shape: (N, 3, H, W) → (N, classes).
    """

    block: type[Bottleneck] | type[BasicBlock] = Bottleneck
    depths: Sequence[int] = (3, 4, 6, 3)

    def __init__(
        self,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        *,
        depths: Sequence[int] | None = None,
        width: int = 64,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), norm(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        inputs, blocks = width, []
        for stage, depth in enumerate(depths or self.depths):
            for index in range(depth):
                blocks.append(self.block(inputs, width << stage, 2 if stage and not index else 1, norm))
                inputs = self.block.expansion * (width << stage)
        self.layers = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class ResNet18(ResNet50):
    """torchvision's ResNet-18, built as :class:`ResNet50` is."""

    block = BasicBlock
    depths = (2, 2, 2, 2)
