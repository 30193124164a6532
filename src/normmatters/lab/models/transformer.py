"""The Transformer of Vaswani et al.: norm after each residual sum, sinusoidal positions, one shared embedding."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normmatters.lab.data.text import PAD
from normmatters.lab.models.layers import Dropout, Translator
from normmatters.lab.norms import NormFactory


class Attention(nn.Module):
    """Multi-head attention with plain linear layers, so that weight norm finds them."""

    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        if d_model % heads:
            raise ValueError(f"model.d_model {d_model} must be a multiple of model.heads {heads}")
        self.heads = heads
        self.drop = Dropout(dropout)
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.split(self.key(x)), self.split(self.value(x))

    def forward(self, x: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """x (n, T, d); kv (n, heads, S, d/heads) each; ``mask`` (n, 1, 1, S) is True where a key may be seen."""
        q = self.split(self.query(x))
        if self.training and self.drop.p:
            y = self._with_dropout(q, *kv, mask, causal)
        else:
            y = F.scaled_dot_product_attention(q, *kv, attn_mask=mask, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Torch's own attention in steps, since that draws its dropout from torch's own generator."""
        scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5)
        if causal:
            later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        y: Tensor = self.drop(scores.softmax(3)) @ v
        return y


class Layer(nn.Module):
    """Self-attention, attention to the source (``cross``), and a two-layer network, each as norm(x + f(x))."""

    def __init__(
        self, d_model: int, heads: int, d_ff: int, dropout: float, norm: NormFactory, *, cross: bool, depth: int
    ) -> None:
        super().__init__()
        self.attention = Attention(d_model, heads, dropout)
        self.norm1 = norm.layer_norm(d_model)
        self.cross = Attention(d_model, heads, dropout) if cross else None
        self.norm2 = norm.layer_norm(d_model) if cross else None
        self.inner, self.outer = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norm3 = norm.layer_norm(d_model)
        self.drop = Dropout(dropout)
        for linear in (m for m in self.modules() if isinstance(m, nn.Linear)):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        if (
            norm.config.layer_norm == "none"
        ):  # nothing rescales the sum of the branches: each gets its share of the variance
            branches = [self.attention.out, self.outer] + ([self.cross.out] if self.cross is not None else [])
            with torch.no_grad():
                for linear in branches:
                    linear.weight.mul_(1 / math.sqrt(len(branches) * depth))

    def forward(
        self,
        x: Tensor,
        *,
        past: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        memory: tuple[Tensor, Tensor] | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        kv = self.attention.keys_values(x)
        if past is not None:
            kv = (torch.cat([past[0], kv[0]], 2), torch.cat([past[1], kv[1]], 2))
        x = self.norm1(x + self.drop(self.attention(x, kv, mask, causal)))
        if self.cross is not None and memory is not None and self.norm2 is not None:
            x = self.norm2(x + self.drop(self.cross(x, memory, memory_mask)))
        x = self.norm3(x + self.drop(self.outer(self.drop(self.inner(x).relu()))))
        return x, kv


class Transformer(Translator):
    """Encoder and decoder of ``layers`` layers each; embedding shared by source, target and classifier.

    Shape: source (n, S), target_in (n, T) of token ids; output (n, T, vocabulary).
    """

    def __init__(
        self,
        vocabulary: int,
        norm: NormFactory,
        *,
        layers: int = 6,
        d_model: int = 512,
        heads: int = 8,
        d_ff: int = 2048,
        dropout: float = 0.1,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.embedding = nn.Embedding(vocabulary, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        shape: dict[str, Any] = {"d_model": d_model, "heads": heads, "d_ff": d_ff, "dropout": dropout, "norm": norm}
        self.encoder = nn.ModuleList(Layer(**shape, cross=False, depth=layers) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(**shape, cross=True, depth=layers) for _ in range(layers))
        self.drop = Dropout(dropout)
        self.classifier = nn.Linear(d_model, vocabulary, bias=False)
        self.classifier.weight = self.embedding.weight
        self.register_buffer("positions", _sinusoids(max_length, d_model), persistent=False)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        positions: Tensor = self.positions[start : start + tokens.shape[1]]  # type: ignore[index, assignment]
        return self.drop(self.embedding(tokens) * math.sqrt(self.d_model) + positions)  # type: ignore[no-any-return]

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        mask = (source != PAD)[:, None, None, :]
        x = self.embed(source)
        for layer in self.encoder:
            x, _ = layer(x, mask=mask)
        return x, mask

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        memory, mask = self.encode(source)
        x = self.embed(target_in)
        for layer in self.decoder:
            x, _ = layer(x, causal=True, memory=layer.cross.keys_values(memory), memory_mask=mask)  # type: ignore[union-attr, operator]
        return self.classifier(x)  # type: ignore[no-any-return]

    def begin(self, source: Tensor) -> dict[str, Any]:
        memory, mask = self.encode(source)
        cross = [layer.cross.keys_values(memory) for layer in self.decoder]  # type: ignore[union-attr, operator]
        empty = memory.new_zeros(len(source), self.decoder[0].attention.heads, 0, cross[0][0].shape[-1])  # type: ignore[union-attr, arg-type]
        return {"mask": mask, "cross": cross, "past": [(empty, empty)] * len(self.decoder)}

    def step(self, tokens: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        x = self.embed(tokens[:, None], start=state["past"][0][0].shape[2])
        past = []
        for layer, before, cross in zip(self.decoder, state["past"], state["cross"]):
            x, kv = layer(x, past=before, memory=cross, memory_mask=state["mask"])
            past.append(kv)
        return self.classifier(x[:, 0]), {**state, "past": past}


def _sinusoids(length: int, d_model: int) -> Tensor:
    position = torch.arange(length)[:, None]
    rate = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    table = torch.zeros(length, d_model)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)[:, : d_model // 2]
    return table
