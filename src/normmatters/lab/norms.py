"""The norm factory: every model asks it for its norms, so that any norm of the library fits anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normmatters.lab.config import ModelConfig
from normmatters.nn.activations import TReLU
from normmatters.nn.batchnorm import LpBatchNorm2d, MeanOnlyBatchNorm2d
from normmatters.nn.layernorm import LpLayerNorm

_EPS = 1e-5  # torch's
_P: dict[str, float | str] = {"l1": 1, "l2": 2, "linf": math.inf, "topk": math.inf, "range": "range"}


class NormAct(nn.Module):
    """``act(norm(scale·x) + residual)``: one fused operation where the norm is ours, plain modules where it is native.

    The norm's state is at ``norm.*`` in both cases, so checkpoints move between them.
    """

    def __init__(self, norm: nn.Module, act: nn.Module | None, fused: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.act, self.fused, self.scale = norm, act, fused, scale

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.scale != 1:
            x = x * self.scale
        if self.fused:
            fused: Tensor = self.norm(x) if residual is None else self.norm(x, residual=residual)
            return fused
        x = self.norm(x)
        if residual is not None:
            x = x + residual
        return x if self.act is None else self.act(x)


@dataclass(frozen=True)
class NormFactory:
    """What every norm of a model is; made by :func:`norm_factory`.

    ``name``: "native" (torch.nn's), "l1", "l2", "lp" (with ``p``), "linf", "topk" (with ``k``), "range", "mean_only",
    "none" (a bias per channel). ``layer_norm``: "l2" (torch.nn's), "l1" or "none".

    ``input_scale``: what a batch norm's input is multiplied with, a power of two. The norm's eps and the running
    variance that it starts from are in the same units, so in exact arithmetic, and in float32 to the bit, nothing else
    changes; in fp16 it decides what over- and underflows. ``init_scale``: what the initial weights before a batch norm
    are multiplied with, which changes the units of its input in the same way.
    """

    name: str = "l2"
    p: float | None = None
    constant: str | float = "exact"
    k: int = 10
    memory: str = "exact"
    fuse: bool = True
    activation: str = "relu"
    layer: str = "l2"
    input_scale: float = 1.0
    trains_gamma: bool = True
    init_scale: float = 1.0

    @property
    def rescales(self) -> bool:
        """Whether activations leave the norm at unit scale whatever the weights' scale is."""
        return self.name not in ("mean_only", "none")

    def batch_norm(self, channels: int, *, act: bool = False) -> NormAct:
        """Over (N, C, H, W); with ``act`` followed by the activation (after the residual)."""
        activation = None if not act else TReLU() if self.activation == "trelu" else nn.ReLU(inplace=True)
        fused_act = "relu" if self.fuse and isinstance(activation, nn.ReLU) else None
        if self.name == "none":
            return NormAct(ChannelBias(channels), activation, fused=False)
        units = self.input_scale * self.init_scale
        eps = _EPS * units**2
        norm: nn.Module
        if self.name == "native":
            norm = nn.BatchNorm2d(channels, eps)
        elif self.name == "mean_only":
            norm = MeanOnlyBatchNorm2d(channels, act=fused_act)
        else:
            p = self.p if self.name == "lp" else _P[self.name]
            assert p is not None  # the config checks it
            k = self.k if self.name == "topk" else None
            norm = LpBatchNorm2d(channels, p, eps, k=k, constant=self.constant, act=fused_act, memory=self.memory)
        if not self.trains_gamma:
            norm.weight.requires_grad_(False)  # type: ignore[operator, union-attr]
        if units != 1:
            norm.running_var.fill_(units**2)  # type: ignore[operator, union-attr]
        fused = self.name != "native" and self.fuse and (activation is None or fused_act is not None)
        return NormAct(norm, activation, fused, self.input_scale)

    def layer_norm(self, features: int) -> nn.Module:
        """Over the last dimension (F10)."""
        if self.layer == "none":
            return nn.Identity()
        return nn.LayerNorm(features) if self.layer == "l2" else LpLayerNorm(features, 1, constant=self.constant)


class ChannelBias(nn.Module):
    """No norm: only the shift that a batch norm would have had."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias[:, None, None]


def norm_factory(config: ModelConfig) -> NormFactory:
    """The factory of a model. Beside a weight norm, batch norm is mean-only (F15), or none where ``norm`` is."""
    return NormFactory(
        name="mean_only" if config.weight_norm != "none" and config.norm != "none" else config.norm,
        p=config.p,
        constant=config.constant,
        k=config.k,
        memory=config.memory,
        fuse=config.fuse,
        activation=config.activation,
        layer=config.layer_norm,
        input_scale=config.norm_input_scale,
        trains_gamma=config.gamma == "free",
        init_scale=config.init_scale,
    )
