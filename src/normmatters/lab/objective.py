"""What is minimized and what is measured, for images and for text, with one interface.

``batch`` is what the data loaders yield. ``measure`` returns the loss to differentiate and a float64 vector
(loss sum, right answers, answers) that is added up on the device: no value crosses to the host during an epoch.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normmatters.lab.data import ImageData, Shard, TextData
from normmatters.lab.data.text import PAD, TextBatch


class Objective(Protocol):
    """See the head of this file. ``example`` is a small input for the test of scale invariance."""

    def measure(self, model: nn.Module, batch: Any, *, smooth: bool) -> tuple[Tensor, Tensor]: ...
    def epoch_metrics(self, sums: list[float], split: str) -> dict[str, float | None]: ...
    def example(self, device: torch.device) -> Any: ...


class Classification:
    """Cross entropy of images; ``batch`` = uint8 images (n, C, H, W), labels (n,)."""

    def __init__(self, data: ImageData, label_smoothing: float, device: torch.device) -> None:
        self.smoothing, self.data = label_smoothing, data
        std, mean = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (data.std, data.mean))
        self.scale, self.shift = 1 / (255 * std), -mean / std

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor], *, smooth: bool) -> tuple[Tensor, Tensor]:
        images, labels = batch
        logits = model(images * self.scale + self.shift)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing if smooth else 0.0)
        with torch.no_grad():
            right = (logits.argmax(1) == labels).sum()
            n = len(labels)
            sums = torch.stack([loss.double() * n, right.double(), torch.full_like(loss, n, dtype=torch.float64)])
        return loss, sums

    def epoch_metrics(self, sums: list[float], split: str) -> dict[str, float | None]:
        loss, right, count = sums
        return {f"{split}_loss": finite(loss / count), f"{split}_acc": 100 * right / count}

    def example(self, device: torch.device) -> Tensor:
        size = min(self.data.size, 32)  # only the architecture matters here: small images do
        generator = torch.Generator().manual_seed(0)
        return torch.randn(16, self.data.channels, size, size, generator=generator).to(device)


class Translation:
    """Cross entropy per target token; ``loss`` is the mean over the tokens of all processes' parts of the batch."""

    def __init__(self, data: TextData, label_smoothing: float, shard: Shard) -> None:
        self.smoothing, self.data, self.shard = label_smoothing, data, shard

    def measure(self, model: nn.Module, batch: TextBatch, *, smooth: bool) -> tuple[Tensor, Tensor]:
        logits = model(batch.source, batch.target_in).flatten(0, 1)
        target = batch.target_out.flatten()
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)
        real = target != PAD
        count = real.sum()
        nll = F.nll_loss(log_p, target, ignore_index=PAD, reduction="sum")
        total = nll
        if smooth and self.smoothing:
            uniform = -(log_p.mean(1) * real).sum()
            total = (1 - self.smoothing) * nll + self.smoothing * uniform
        # DDP averages the processes' gradients, so each takes its sum over the whole batch's tokens, times their number
        loss = total * self.shard.world / (count if batch.tokens is None else batch.tokens)
        with torch.no_grad():
            right = ((log_p.argmax(1) == target) & real).sum()
            sums = torch.stack([nll.double(), right.double(), count.double()])
        return loss, sums

    def epoch_metrics(self, sums: list[float], split: str) -> dict[str, float | None]:
        nll, right, count = sums
        mean = nll / count
        ppl = math.exp(min(mean, 700.0)) if math.isfinite(mean) else math.nan
        return {f"{split}_loss": finite(mean), f"{split}_acc": 100 * right / count, f"{split}_ppl": finite(ppl)}

    def example(self, device: torch.device) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (4, 6)
        source, target = (
            torch.randint(3, self.data.vocab_size, shape, generator=generator).to(device) for _ in range(2)
        )
        return source, target


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
