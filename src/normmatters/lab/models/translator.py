"""What a translation model offers to the trainer and to the beam search."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Translator(nn.Module):
    """``model(source, target_in)`` gives logits (n, T, V). For decoding one token at a time: ``begin(source)`` gives a
    state, ``step(tokens, state)`` the next logits (n, V) and the next state. Every tensor of a state has n rows.
    """

    classifier: nn.Module

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} defines no forward pass")

    def begin(self, source: Tensor) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} cannot decode")

    def step(self, tokens: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        raise TypeError(f"{type(self).__name__} cannot decode")
