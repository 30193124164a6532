"""SGD with weight decay, and the same directions without it. Run: python examples/weight_decay_free.py [plot.png]"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from normmatters.optim import WeightDecayFreeSGD, split_parameters

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float64).unsqueeze(1) / 16, torch.tensor(digits.target)


def run(kind: str) -> tuple[list[float], list[float]]:
    """Training loss, and norm of the second layer, by epoch; the learning rate falls tenfold at epoch 7."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16, eps=1e-12), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32, eps=1e-12), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(288, 10)),
    ).double()
    invariant, rest = split_parameters(model, images[:64])
    if kind == "weight-decay-free":
        groups = [invariant, rest | {"weight_decay_free": False}]
        optimizer = WeightDecayFreeSGD(groups, lr=0.1, momentum=0.9, weight_decay=5e-3)
    else:
        decay = 5e-3 if kind == "weight decay" else 0.0
        optimizer = torch.optim.SGD([invariant | {"weight_decay": decay}, rest], 0.1, 0.9, weight_decay=5e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7])
    losses, norms = [], []
    for _ in range(10):
        total = 0.0
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch) / len(images)
        scheduler.step()
        losses.append(total)
        norms.append(model[3].weight.norm().item())
    print(f"{kind:18} final loss {total:.12f}, norm of the second layer {norms[-1]:.3f}")
    return losses, norms


plt.rcParams["axes.formatter.min_exponent"] = 3  # ticks such as 0.02
figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for kind, style in (("weight decay", "-"), ("weight-decay-free", "--"), ("no weight decay", ":")):
    for axis, curve, title in zip(axes, run(kind), ("training loss", "norm of the second layer")):
        axis.plot(curve, style, label=kind)
        axis.set(title=title, xlabel="epoch", yscale="log")
axes[0].legend()
path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/weight_decay_free.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=100)
print("plot:", path)
