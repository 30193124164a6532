"""Predict norms from gradients, and explain a recipe. Run: python examples/equilibrium.py [plot.png]"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from normmatters.optim import angular_update, equilibrium_angle, equilibrium_norm, explain, predict_equilibrium
from normmatters.optim.recipe import render

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
recipe = {"lr": 0.1, "weight_decay": 5e-3, "momentum": 0.9}
print(render(explain(**recipe)))

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(288, 10)),
)
weight, optimizer = model[3].weight, torch.optim.SGD(model.parameters(), **recipe)
norms, squares, angles = [], [], []
for _ in range(30):
    for batch in torch.randperm(len(images)).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        before = weight.detach().clone()
        found = predict_equilibrium({"second": weight}, **recipe)["second"]
        norms.append(found.norm.mean())
        squares.append(found.unit_gradient.square())
        optimizer.step()
        angles.append(angular_update(before, weight).square().mean())

unit_gradient = torch.stack(squares).unfold(0, 50, 50).mean(-1).sqrt()  # over 50 batches, [batches / 50, channels]
predicted = equilibrium_norm(unit_gradient, **recipe)
figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
axes[0].plot(torch.stack(norms), label="measured")
axes[0].plot(torch.arange(25, 50 * len(predicted), 50), predicted.mean(1), "--", label="where the gradients lead")
axes[0].set(title="norm of a neuron, second layer", xlabel="step", ylim=(0, None))
axes[1].plot(torch.stack(angles).unfold(0, 50, 50).mean(-1).sqrt(), label="measured")
axes[1].axhline(equilibrium_angle(**recipe), linestyle="--", color="C1", label="√(2ηλ/(1+μ))")
axes[1].set(title="angle per step", xlabel="steps / 50", ylim=(0, None))
for axis in axes:
    axis.legend()
path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/equilibrium.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=100)
print("plot:", path)
