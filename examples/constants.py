"""How well each statistic knows a Gaussian's scale. Run: python examples/constants.py [plot.png]"""

import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from normmatters.constants import gaussian_scale

SIZES = [32, 128, 512, 2048, 8192]  # values per channel: batch × pixels
KINDS = {"L2": (2, None), "L1": (1, None), "Top(10)": (math.inf, 10), "range": ("range", None), "L∞": (math.inf, None)}


def statistic(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Of each row of x."""
    deviation = x - x.mean(1, keepdim=True)
    if kind == "range":
        return x.amax(1) - x.amin(1)
    if kind == "L2":
        return deviation.square().mean(1).sqrt()
    return deviation.abs().topk({"L1": x.shape[1], "Top(10)": 10, "L∞": 1}[kind]).values.mean(1)


def mean_and_scatter(kind: str, method: str) -> list[tuple[float, float]]:
    """Of C·statistic over 400 batches of normal values with σ = 1, for every size."""
    p, k = KINDS[kind]
    rows = []
    for n in SIZES:
        x = torch.randn(400, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        found = gaussian_scale(p, n, k, method) * statistic(x, kind)
        rows.append((found.mean().item(), found.std().item()))
    return rows


exact = {kind: mean_and_scatter(kind, "exact") for kind in KINDS}
paper = {kind: mean_and_scatter(kind, "paper") for kind in ("L1", "Top(10)", "L∞")}
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
colors = dict(zip(KINDS, ("C7", "C0", "C1", "C2", "C3")))
for kind, rows in exact.items():
    left.plot(SIZES, [mean for mean, _ in rows], "-", color=colors[kind], label=kind)
    right.plot(SIZES, [100 * scatter for _, scatter in rows], "-", color=colors[kind], label=kind)
    print(f"{kind:8} n = {SIZES[-1]}: estimate {rows[-1][0]:.4f} ± {rows[-1][1]:.4f}")
for kind, rows in paper.items():
    left.plot(SIZES, [mean for mean, _ in rows], "--", color=colors[kind])
left.set(title="estimate of σ = 1 (dashed: the paper's C)", xlabel="values per channel", xscale="log")
right.set(title="its scatter from batch to batch, %", xlabel="values per channel", xscale="log", yscale="log")
right.legend(fontsize=7)
path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/constants.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=100)
print("plot:", path)
