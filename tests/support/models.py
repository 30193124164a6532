"""Small networks written like the ones people convert: torchvision's, timm's, and the many hand-written ones.

They mirror the forward passes, where fusion happens, with few channels; the real packages are tested where installed.
At the end, what the tests do with them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close


def conv(cin: int, cout: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(cin, cout, kernel, stride, kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """torchvision's: one shared in-place ReLU, an in-place add, a downsample that may be None."""

    expansion = 1

    def __init__(self, cin: int, width: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = conv(cin, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class Bottleneck(nn.Module):
    expansion = 2

    def __init__(self, cin: int, width: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = conv(cin, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's, of three stages; 10 classes."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck] = BasicBlock, width: int = 4) -> None:
        super().__init__()
        self.inplanes = width
        self.conv1 = conv(3, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._make_layer(block, width, 2)
        self.layer2 = self._make_layer(block, 2 * width, 1, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width * block.expansion, 10)

    def _make_layer(self, block: type[BasicBlock] | type[Bottleneck], width: int, n: int, stride: int = 1) -> nn.Module:
        downsample = None
        out = width * block.expansion
        if stride != 1 or self.inplanes != out:
            downsample = nn.Sequential(conv(self.inplanes, out, 1, stride), nn.BatchNorm2d(out))
        layers = [block(self.inplanes, width, stride, downsample)]
        self.inplanes = out
        return nn.Sequential(*layers, *(block(out, width) for _ in range(n - 1)))

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(self.avgpool(x).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


def vgg_bn() -> nn.Sequential:
    """torchvision's VGG with batch norm, as one Sequential inside another."""
    layers: list[nn.Module] = []
    cin = 3
    for width in (4, 6, 6):
        layers += [nn.Conv2d(cin, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        cin = width
    features = nn.Sequential(*layers, nn.MaxPool2d(2))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 10))


class TimmBlock(nn.Module):
    """timm's BasicBlock: separate activations, identities where drop_block and anti-aliasing could be, drop_path."""

    def __init__(self, cin: int, width: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = conv(cin, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.drop_block = nn.Identity()
        self.act1 = nn.ReLU(inplace=True)
        self.aa = nn.Identity()
        self.conv2 = conv(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.se = None
        self.act2 = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.drop_path = None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.drop_block(x)
        x = self.act1(x)
        x = self.aa(x)
        x = self.conv2(x)
        x = self.bn2(x)
        if self.se is not None:
            x = self.se(x)
        if self.drop_path is not None:
            x = self.drop_path(x)
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return self.act2(x)


class TimmResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.drop_rate = 0.25
        self.conv1 = conv(3, 4)
        self.bn1 = nn.BatchNorm2d(4)
        self.act1 = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        downsample = nn.Sequential(nn.AvgPool2d(2, 2), conv(4, 8, 1), nn.BatchNorm2d(8))
        self.layer1 = nn.Sequential(TimmBlock(4, 4), TimmBlock(4, 8, 2, downsample))
        self.fc = nn.Linear(8, 10)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        return self.layer1(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.forward_features(x).mean((2, 3))
        if self.drop_rate:
            x = F.dropout(x, p=float(self.drop_rate), training=self.training)
        return self.fc(x)


class BatchNormAct2d(nn.BatchNorm2d):
    """timm's: batch norm, dropout and activation in one module, with BatchNorm2d's state."""

    __module__ = "timm.layers.norm_act"

    def __init__(self, features: int, act: nn.Module | None = None, drop: nn.Module | None = None) -> None:
        super().__init__(features)
        self.drop = drop or nn.Identity()
        self.act = act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class HandWrittenBlock(nn.Module):
    """As in many CIFAR ResNets: functional ReLU, a shortcut that is an empty Sequential or ends in a norm."""

    def __init__(self, cin: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = conv(cin, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or cin != width:
            self.shortcut = nn.Sequential(conv(cin, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class HandWritten(nn.Module):
    """Functional ReLUs and a dropout that depends on the mode, so that training and evaluation are two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = conv(3, 4)
        self.bn1 = nn.BatchNorm2d(4)
        self.blocks = nn.ModuleList([HandWrittenBlock(4, 4), HandWrittenBlock(4, 6, 2)])
        self.bn_fc = nn.BatchNorm1d(6)
        self.fc = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        for block in self.blocks:
            x = block(x)
        x = F.relu(self.bn_fc(x.mean((2, 3))))
        x = F.dropout(x, 0.5, self.training)
        return self.fc(x)


class RegNetBlock(nn.Module):
    """torchvision's RegNet: the norm of the residual branch ends a nested Sequential, the add is in the parent."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first = nn.Sequential(conv(width, width), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.f = nn.Sequential(first, nn.Sequential(conv(width, width, 1), nn.BatchNorm2d(width)))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return self.activation(x)


def regnet() -> nn.Sequential:
    stem = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(stem, RegNetBlock(4), RegNetBlock(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet": ResNet,
    "resnet-bottleneck": lambda: ResNet(Bottleneck),
    "vgg": vgg_bn,
    "timm": TimmResNet,
    "functional": HandWritten,
    "regnet": regnet,
}


def make(name: str, seed: int = 0) -> nn.Module:
    """A float64 network whose norms have learned something, so that no parameter or statistic is at its default."""
    torch.manual_seed(seed)
    model = NETS[name]().double()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.weight, 1, 0.3)
            nn.init.normal_(module.bias, 0, 0.5)
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def batch(seed: int = 1) -> Tensor:
    return torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Output, gradients of the parameters, gradient of the input; the same dropout each time."""
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    output = model(x)
    direction = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    (output * direction).sum().backward()
    assert x.grad is not None
    return output.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}, x.grad


def assert_same_step(a: nn.Module, b: nn.Module) -> None:
    """Equal outputs, gradients and states; the order of sums may differ, so to rounding."""
    for mine, other in zip(step(a, batch()), step(b, batch())):
        assert_close(mine, other, rtol=1e-10, atol=1e-12)
    assert_close(a.state_dict(), b.state_dict(), rtol=1e-12, atol=1e-14)
