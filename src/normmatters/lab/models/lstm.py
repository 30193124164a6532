"""LSTM encoder and decoder with attention (E6): bidirectional encoder, layer norm between layers if asked for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from normmatters.lab.data.text import PAD
from normmatters.lab.models.layers import Dropout, Translator
from normmatters.lab.norms import NormFactory


class AdditiveScore(nn.Module):
    """Bahdanau's score v·tanh(W h + U m) of each query h against each key U m, which serves every query.

    Shape: h (n, T, d), keys (n, S, d); output (n, T, S).

    >>> score = AdditiveScore(8)
    >>> h, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    >>> score(h, score.key(memory)).shape
    torch.Size([2, 3, 5])
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, 1, bias=False)

    def forward(self, h: Tensor, keys: Tensor) -> Tensor:
        return self.value(torch.tanh(self.query(h)[:, :, None] + keys[:, None]))[..., 0]  # type: ignore[no-any-return]


class Seq2Seq(Translator):
    """``layers`` LSTM layers per side; the decoder's output attends to the encoder's.

    ``attention``: how an output h is scored against a word m of the source. "dot" is Luong's "general" score (W h)·m,
    "scaled" the same over √d_model, as in a Transformer, "additive" Bahdanau's. Normalized outputs have entries near 1;
    the scores of "dot" are then several units, and attention begins on one word alone.
    A norm follows each layer, outside of the recurrence, which stays one library call per layer.
    Shape: source (n, S), target_in (n, T) of token ids; output (n, T, vocabulary).
    """

    def __init__(
        self,
        vocabulary: int,
        norm: NormFactory,
        *,
        layers: int = 2,
        d_model: int = 512,
        dropout: float = 0.2,
        attention: str = "dot",
    ) -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"model.d_model must be even for an LSTM (two directions), got {d_model}")
        self.embedding = nn.Embedding(vocabulary, d_model, padding_idx=PAD)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        half = d_model // 2
        self.forwards = nn.ModuleList(nn.LSTM(d_model, half, batch_first=True) for _ in range(layers))
        self.backwards = nn.ModuleList(nn.LSTM(d_model, half, batch_first=True) for _ in range(layers))
        self.encoder_norms = nn.ModuleList(norm.layer_norm(d_model) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.LSTM(d_model, d_model, batch_first=True) for _ in range(layers))
        self.decoder_norms = nn.ModuleList(norm.layer_norm(d_model) for _ in range(layers))
        self.bridge = nn.Linear(d_model, 2 * layers * d_model)
        self.attention = attention
        self.score = AdditiveScore(d_model) if attention == "additive" else nn.Linear(d_model, d_model, bias=False)
        self.combine = nn.Linear(2 * d_model, d_model)
        self.drop = Dropout(dropout)
        self.classifier = nn.Linear(d_model, vocabulary)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Memory (n, S, d), mask (n, S), and the decoder's first states (1, n, d) by layer."""
        mask = source != PAD
        # each sentence turned round within its own length: its end comes first, its padding stays last
        position = torch.arange(source.shape[1], device=source.device)
        turned = torch.where(mask, mask.sum(1, keepdim=True) - 1 - position, position)[:, :, None]
        x = self.drop(self.embedding(source))
        for forward, backward, norm in zip(self.forwards, self.backwards, self.encoder_norms):
            ahead, _ = forward(x)
            back, _ = backward(x.gather(1, turned.expand_as(x)))
            both = torch.cat([ahead, back.gather(1, turned.expand_as(back))], 2)
            x = self.drop(norm(both))
        mean = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        start = torch.tanh(self.bridge(mean)).unflatten(1, (len(self.decoder), 2, -1))
        states = [(s[:, 0][None].contiguous(), s[:, 1][None].contiguous()) for s in start.unbind(1)]
        return x, mask, states

    def keys(self, memory: Tensor) -> Tensor:
        """What the scores compare h with: computed once per sentence."""
        return self.score.key(memory) if isinstance(self.score, AdditiveScore) else memory

    def attend(self, h: Tensor, memory: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        if isinstance(self.score, AdditiveScore):
            scores = self.score(h, keys)
        else:
            query = self.score(h)
            if self.attention == "scaled":
                query = query / math.sqrt(query.shape[2])
            scores = query @ keys.transpose(1, 2)
        weights = scores.masked_fill(~mask[:, None, :], float("-inf")).softmax(2)
        return self.classifier(self.drop(torch.tanh(self.combine(torch.cat([weights @ memory, h], 2)))))  # type: ignore[no-any-return]

    def decode(self, tokens: Tensor, states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x = self.drop(self.embedding(tokens))
        after = []
        for lstm, norm, state in zip(self.decoder, self.decoder_norms, states):
            x, state = lstm(x, state)
            x = self.drop(norm(x))
            after.append(state)
        return x, after

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        memory, mask, states = self.encode(source)
        h, _ = self.decode(target_in, states)
        return self.attend(h, memory, self.keys(memory), mask)

    def begin(self, source: Tensor) -> dict[str, Any]:
        memory, mask, states = self.encode(source)
        begun = {"memory": memory, "mask": mask, "lstm": [(h[0], c[0]) for h, c in states]}
        return {**begun, "keys": self.keys(memory)} if self.attention == "additive" else begun

    def step(self, tokens: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        states = [(h[None].contiguous(), c[None].contiguous()) for h, c in state["lstm"]]
        h, after = self.decode(tokens[:, None], states)
        memory = state["memory"]
        logits = self.attend(h, memory, state.get("keys", memory), state["mask"])[:, 0]
        return logits, {**state, "lstm": [(h[0], c[0]) for h, c in after]}
