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
    """What every norm of a model is: ``ModelConfig`` says it, and what its settings mean.

    ``norm_input_scale`` multiplies what a batch norm gets, ``init_scale`` the initial weights before it. The norm's eps
    and the running variance that it starts from are in the same units. So in exact arithmetic, and for a power of two
    in float32 to the bit, nothing else changes; in fp16 the units decide what over- and underflows.
    """

    config: ModelConfig

    @property
    def name(self) -> str:
        """The batch norm. Beside a weight norm it is mean-only (F15), or none where ``norm`` is."""
        return "mean_only" if self.config.weight_norm != "none" != self.config.norm else self.config.norm

    @property
    def rescales(self) -> bool:
        """Whether activations leave the norm at unit scale whatever the weights' scale is."""
        return self.name not in ("mean_only", "none")

    @property
    def gain(self) -> float:
        """Of the initial weights where no norm restores the scale: it undoes what the activation and the mean-only norm
        leave of the variance, ½(1 − 1/π) for a ReLU (F15)."""
        if self.config.activation == "trelu":
            return 1.0
        return math.sqrt(2) if self.name == "none" else 1 / TReLU.STD

    @property
    def initial_weights(self) -> str:
        """How the network begins, in words: that depends on the norm, and no setting says it. Empty if it does not."""
        network = self.config.name
        if network == "lstm":
            return ""
        if network.startswith("transformer"):
            return "Xavier's" + ", branches ÷ √(their number)" * (self.config.layer_norm == "none")
        if self.rescales:
            return "He's, by fan-out"
        branches = ", branches ÷ √(their number)" * network.startswith("resnet")
        return f"by fan-in × {self.gain:.3g}{branches}"

    def batch_norm(self, channels: int, *, act: bool = False) -> NormAct:
        """Over (N, C, H, W); with ``act`` followed by the activation (after the residual)."""
        name, c = self.name, self.config
        activation = None if not act else TReLU() if c.activation == "trelu" else nn.ReLU(inplace=True)
        fused_act = "relu" if c.fuse and isinstance(activation, nn.ReLU) else None
        if name == "none":
            return NormAct(ChannelBias(channels), activation, fused=False)
        units = c.norm_input_scale * c.init_scale
        eps = _EPS * units**2
        norm: nn.Module
        if name == "native":
            norm = nn.BatchNorm2d(channels, eps)
        elif name == "mean_only":
            norm = MeanOnlyBatchNorm2d(channels, act=fused_act)
        else:
            p, k = _P.get(name, c.p), c.k if name == "topk" else None
            assert p is not None  # the config checks it
            norm = LpBatchNorm2d(channels, p, eps, k=k, constant=c.constant, act=fused_act, memory=c.memory)
        if c.gamma == "frozen":
            norm.weight.requires_grad_(False)  # type: ignore[operator, union-attr]
        if units != 1:
            norm.running_var.fill_(units**2)  # type: ignore[operator, union-attr]
        fused = name != "native" and c.fuse and (activation is None or fused_act is not None)
        return NormAct(norm, activation, fused, c.norm_input_scale)

    def layer_norm(self, features: int) -> nn.Module:
        """Over the last dimension (F10)."""
        kind, constant = self.config.layer_norm, self.config.constant
        if kind == "none":
            return nn.Identity()
        return nn.LayerNorm(features) if kind == "l2" else LpLayerNorm(features, 1, constant=constant)


class ChannelBias(nn.Module):
    """No norm: only the shift that a batch norm would have had."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias[:, None, None]
