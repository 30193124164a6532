"""Which weights of a network have a length that does not matter? Run: python examples/scale_invariance.py [plot.png]"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from normmatters.optim import scale_invariant_parameters

torch.manual_seed(0)
images = torch.tensor(load_digits().images[:256], dtype=torch.float32).unsqueeze(1) / 16
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),  # invariant channel by channel
    *(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),  # together with its bias, as a whole
    *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)),  # not invariant
)
result = scale_invariant_parameters(model, images)
print(result)
print("weight decay acts on the step size alone:", list(result))

with torch.no_grad():
    base, factors = model(images), [2.0**k for k in range(-6, 7)]
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        original, changes = weight.clone(), []
        for factor in factors:
            weight.copy_(original * factor)
            changes.append(((model(images) - base).norm() / base.norm()).item())
        weight.copy_(original)
        plt.plot(factors, changes, "o-", markersize=3, label=f"{name}: {result[name]}")
plt.gcf().set_size_inches(6, 3.4)
plt.xscale("log", base=2)
plt.yscale("symlog", linthresh=1e-4)
plt.ylim(bottom=0)
plt.gca().set(
    xlabel="weight multiplied by", ylabel="relative change of the output", title="Does a weight's length matter?"
)
plt.legend(fontsize=7)
path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/scale_invariance.png")
path.parent.mkdir(parents=True, exist_ok=True)
plt.savefig(path, dpi=100, bbox_inches="tight")
print("plot:", path)
