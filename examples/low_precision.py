"""Batch norm in fp16: the squares of L2 do not fit (Fig. 3, small). Run: python examples/low_precision.py [plot.png]"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import normmatters as nm

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
NORMS = {"L1, fp16 sums": (1, "fp16"), "L2, fp16 sums": (2, "fp16"), "L2, fp32 sums": (2, "fp32")}


def spread(p: float, accumulate: str, sigma: float) -> float:
    """Standard deviation of what batch norm makes of normal values with this one; it should be 1."""
    x = sigma * torch.randn(64, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), nm.precision.arithmetic("fp16", accumulate=accumulate):
        return nm.LpBatchNorm2d(4, p=p, eps=0.0)(x).std().item()


def run(p: float, accumulate: str, steps: int = 60) -> list[float]:
    """Training loss of a small CNN whose pixels are of order 1000, as raw sensors' are."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, bias=False), nm.LpBatchNorm2d(8, p=p, act="relu")),
        *(nn.Conv2d(8, 16, 3, stride=2, bias=False), nm.LpBatchNorm2d(16, p=p, act="relu")),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(steps):
        batch = torch.randint(len(images), (64,))
        with nm.precision.arithmetic("fp16", accumulate=accumulate):
            loss = nn.functional.cross_entropy(model(1000 * images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


sigmas = [10 ** (k / 2) for k in range(-8, 8)]
spreads = {label: [spread(*norm, sigma) for sigma in sigmas] for label, norm in NORMS.items()}
losses = {label: run(*norm) for label, norm in NORMS.items()}
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for label, style in zip(NORMS, ("-", "--", ":")):
    left.plot(sigmas, spreads[label], style, label=label)
    right.plot(torch.tensor(losses[label]).unfold(0, 5, 5).mean(1), style)
    print(f"{label}: loss of the last step {losses[label][-1]:.3f}")
left.set(title="spread of the output (should be 1)", xlabel="spread of the input", xscale="log", ylim=(-0.1, 2))
right.set(title="training loss, pixels of order 1000", xlabel="steps / 5")
left.legend()
path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/low_precision.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=100)
print("plot:", path)
