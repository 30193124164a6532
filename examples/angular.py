"""Fixed norms and a fixed angle per step, beside SGD with weight decay. Run: python examples/angular.py [plot.png]"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from normmatters.optim import Angular, AngularSGD, angular_update, split_parameters

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
RECIPE = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-3}


def run(kind: str) -> tuple[list[float], list[float]]:
    """Training loss, and mean angle by which neurons of the second layer turn, for every step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(288, 10)),
    )
    invariant, rest = split_parameters(model, images[:64])
    if kind == "SGD with weight decay":
        optimizer = torch.optim.SGD([invariant, rest], **RECIPE)
    elif kind == "AngularSGD, same recipe":
        optimizer = AngularSGD([invariant, rest | {"angular": False}], **RECIPE)
    else:
        optimizer = Angular(torch.optim.AdamW([invariant, rest | {"angular": False}], lr=1e-2), angle=0.0229)
    losses, angles = [], []
    for _ in range(12):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            before = model[3].weight.detach().clone()
            optimizer.step()
            losses.append(loss.item())
            angles.append(angular_update(before, model[3].weight).mean().item())
    accuracy = (model.eval()(images).argmax(1) == labels).float().mean()
    last = torch.tensor(angles[-len(angles) // 4 :]).median()  # SGD's single steps scatter around it
    print(f"{kind:24} angle per step at the end {last:.5f}, training accuracy {accuracy:.4f}")
    return losses, angles


plt.rcParams["axes.formatter.min_exponent"] = 3  # ticks such as 0.02
figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for kind, style in (("SGD with weight decay", "-"), ("AngularSGD, same recipe", "--"), ("Angular(AdamW)", ":")):
    for axis, curve, title in zip(axes, run(kind), ("training loss, mean of 10", "angle per step, mean of 10")):
        axis.plot(torch.tensor(curve).unfold(0, 10, 10).mean(1), style, label=kind)
        axis.set(title=title, xlabel="steps / 10", yscale="log")
axes[1].legend()
path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/angular.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=100)
print("plot:", path)
