"""From a ``ModelConfig`` to a network: ``build_model`` gives every norm and weight norm its place."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from normmatters.lab.config import ModelConfig
from normmatters.lab.data import ImageData, TextData
from normmatters.lab.models.layers import Translator
from normmatters.lab.models.lstm import Seq2Seq
from normmatters.lab.models.plain import SMALL_CNN, VGG11, PlainNet
from normmatters.lab.models.resnet import BasicBlock, Bottleneck, ResNet
from normmatters.lab.models.transformer import Transformer
from normmatters.lab.norms import NormFactory
from normmatters.weight_norm import apply_weight_norm
from normmatters.weight_norm.parametrizations import BoundedWeight

_CIFAR_DEPTHS = {"resnet8": 1, "resnet20": 3, "resnet56": 9, "resnet110": 18}  # n of 6n + 2
_WEIGHT_NORM: dict[str, dict[str, Any]] = {
    "wn": {"kind": "classic"},
    "bwn": {"kind": "bounded", "p": 2},
    "l1_wn": {"kind": "bounded", "p": 1},
    "linf_wn": {"kind": "bounded", "p": math.inf},
}


def build_model(config: ModelConfig, data: ImageData | TextData) -> nn.Module:
    """The network of a run, initialised from torch's global random state."""
    if isinstance(data, TextData):
        return build_text_model(config, data.vocab_size, data.max_length)
    return build_image_model(config, channels=data.channels, classes=data.classes, size=data.size)


def build_image_model(config: ModelConfig, *, channels: int, classes: int, size: int) -> nn.Module:
    """VGG11, a small CNN, or a ResNet; ``config.name`` must be of a model for images, as a run's config makes sure.

    >>> build_image_model(ModelConfig("resnet20", norm="l1"), channels=3, classes=10, size=32)  # doctest: +ELLIPSIS
    ResNet(...
    """
    norm = NormFactory(config)
    shape: dict[str, Any] = {"channels": channels, "classes": classes, "size": size, "width": config.width}
    residual = {**shape, "zero_init_residual": config.zero_init_residual}
    model: nn.Module
    if config.name in ("vgg11", "small_cnn"):
        model = PlainNet(VGG11 if config.name == "vgg11" else SMALL_CNN, norm, **shape)
    elif config.name in _CIFAR_DEPTHS:
        model = ResNet(BasicBlock, [_CIFAR_DEPTHS[config.name]] * 3, (16, 32, 64), norm, **residual)
    elif config.name == "resnet18":
        model = ResNet(BasicBlock, (2, 2, 2, 2), (64, 128, 256, 512), norm, **residual)
    else:
        model = ResNet(Bottleneck, (3, 4, 6, 3), (64, 128, 256, 512), norm, **residual)
    return _with_weight_norm(model, config)


def build_text_model(config: ModelConfig, vocabulary: int, max_length: int) -> Translator:
    """LSTM or Transformer; sizes that the config leaves open are the paper's (``transformer_small``: half of each)."""
    norm = NormFactory(config)
    usual: dict[str, dict[str, Any]] = {
        "lstm": {"layers": 2, "d_model": 512, "dropout": 0.2},
        "transformer": {"layers": 6, "d_model": 512, "heads": 8, "d_ff": 2048, "dropout": 0.1},
        "transformer_small": {"layers": 3, "d_model": 256, "heads": 4, "d_ff": 1024, "dropout": 0.1},
    }
    chosen = {k: v if getattr(config, k) is None else getattr(config, k) for k, v in usual[config.name].items()}
    model: Translator
    if config.name == "lstm":
        model = Seq2Seq(vocabulary, norm, **chosen, attention=config.attention)
    else:
        model = Transformer(vocabulary, norm, **chosen, max_length=2 * max_length + 64)
    _with_weight_norm(model, config)
    return model


def _with_weight_norm(model: nn.Module, config: ModelConfig) -> nn.Module:
    """Weight norm on every layer but the classifier, which sets the scale of the logits (F14 moves all ρ there)."""
    if config.weight_norm != "none":
        apply_weight_norm(
            model,
            filter=lambda name, _: name != "classifier",
            project=config.project,
            **_WEIGHT_NORM[config.weight_norm],
        )
        for module in model.modules():
            if isinstance(module, BoundedWeight):
                module.rho.mul_(config.rho)
    return model
