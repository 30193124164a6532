"""A transformer with L1 layer norm, beside L2 (Table 2, small). Run: python examples/l1_layer_norm.py [plot.png]"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import normmatters as nm

LENGTH, SYMBOLS, STEPS = 8, 10, 120


class Reverser(nn.Module):
    """Reads symbols, writes them backwards: attention has to look at the mirrored place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(SYMBOLS, 32), nn.Parameter(torch.randn(LENGTH, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, SYMBOLS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """(batch, LENGTH) symbols -> (batch, LENGTH, SYMBOLS) logits."""
        return self.head(self.encoder(self.tokens(symbols) + self.places))


def run(layer_norm: str | None) -> list[float]:
    """Perplexity of every step's new batch; the same weights and batches whatever the norm."""
    torch.manual_seed(0)
    model = nm.convert(Reverser(), layer_norm=layer_norm) if layer_norm else Reverser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=STEPS)
    perplexities = []
    for _ in range(STEPS):
        symbols = torch.randint(SYMBOLS, (64, LENGTH))
        loss = nn.functional.cross_entropy(model(symbols).flatten(0, 1), symbols.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        perplexities.append(loss.exp().item())
    print(f"{layer_norm or 'nn.LayerNorm':12} perplexity at the end {perplexities[-1]:.4f}")
    return perplexities


perplexities = {label: run(norm) for label, norm in (("nn.LayerNorm", None), ("nm.L1LayerNorm", "l1"))}
plt.rcParams["axes.formatter.min_exponent"] = 3  # ticks such as 0.02
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
for (label, curve), style in zip(perplexities.items(), ("-", "--")):
    axis.plot(curve, style, label=label)
axis.set(title="A transformer learns to reverse", xlabel="step", ylabel="perplexity", yscale="log")
axis.legend()
path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/l1_layer_norm.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=100)
print("plot:", path)
