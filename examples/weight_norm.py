"""Batch norm, weight norm and bounded weight norm (Fig. 4, small). Run: python examples/weight_norm.py [plot.png]"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import normmatters as nm

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
train, test = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).split([1200, 597])


def run(kind: str) -> tuple[list[float], list[float]]:
    """Error on the test images in percent, and mean norm of the second layer's filters, by epoch."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d if kind == "batch norm" else nm.MeanOnlyBatchNorm2d  # weight norm leaves the mean to it
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), norm(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, bias=False), norm(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(288, 10)),
    )
    for conv in (model[0], model[3]):
        nn.init.kaiming_normal_(conv.weight)  # bounded weight norm keeps this scale for good
    if kind != "batch norm":
        form, p = "classic" if kind == "weight norm" else "bounded", 1 if "L1" in kind else 2
        nm.apply_weight_norm(model, kind=form, p=p, filter=lambda name, module: isinstance(module, nn.Conv2d))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    errors, norms = [], []
    for _ in range(8):
        model.train()
        for batch in train[torch.randperm(len(train))].split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            errors.append(100 * (model.eval()(images[test]).argmax(1) != labels[test]).double().mean().item())
            norms.append(model[3].weight.flatten(1).norm(dim=1).mean().item())
    print(f"{kind:24} test error {errors[-1]:.2f} %, norm of a filter {norms[0]:.3f} -> {norms[-1]:.3f}")
    return errors, norms


runs = {kind: run(kind) for kind in ("batch norm", "weight norm", "bounded weight norm", "the same in L1")}
figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for (kind, curves), style in zip(runs.items(), ("-", ":", "--", "-.")):
    for axis, curve, title in zip(axes, curves, ("test error, %", "mean norm of a filter, second layer")):
        axis.plot(range(1, 9), curve, style, label=kind)
        axis.set(title=title, xlabel="epoch")
axes[0].legend()
path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/weight_norm.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=100)
print("plot:", path)
