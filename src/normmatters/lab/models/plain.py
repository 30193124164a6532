"""Networks without shortcuts: VGG11 of Fig. 1 and a small one for 8 × 8 digits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from normmatters.lab.models.layers import conv, init_weights
from normmatters.lab.norms import NormFactory

VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
SMALL_CNN = (16, "pool", 32, 32, "pool", 64)


class PlainNet(nn.Module):
    """3 × 3 convolutions, a norm and an activation after each, max pooling while there is something to pool.

    Shape: input (N, C, H, W), output (N, classes). ``classifier`` is the last layer, the only one that no norm follows.
    """

    def __init__(
        self,
        plan: Sequence[int | str],
        norm: NormFactory,
        *,
        channels: int,
        classes: int,
        size: int,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for item in plan:
            if isinstance(item, str):
                if size > 1:
                    layers.append(nn.MaxPool2d(2))
                    size //= 2
                continue
            out = max(1, round(item * width))
            layers += [conv(channels, out, 3), norm.batch_norm(out, act=True)]
            channels = out
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)
        init_weights(self, norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))  # type: ignore[no-any-return]
