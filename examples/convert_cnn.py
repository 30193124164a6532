"""The batch norms of a CNN swapped (Fig. 2, small). Run: python examples/convert_cnn.py [plot.png]"""

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


def run(norm: str | None) -> list[float]:
    """Train the same network from the same weights; the error on the test images, in percent, by epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(288, 10)),
    )
    if norm is not None:
        report = nm.ConversionReport()
        constant = "paper" if norm in ("linf", "topk") else "exact"
        model = nm.convert(model, norm, constant=constant, report=report)  # the one line that differs
        print(report.summary())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    errors = []
    for _ in range(10):
        model.train()
        for batch in train[torch.randperm(len(train))].split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            errors.append(100 * (model.eval()(images[test]).argmax(1) != labels[test]).double().mean().item())
    print(f"{norm or 'nn.BatchNorm2d':14} test error {errors[-1]:.2f} %")
    return errors


errors = {norm or "nn.BatchNorm2d": run(norm) for norm in (None, "l1", "topk", "linf")}
plt.rcParams["axes.formatter.min_exponent"] = 3  # ticks such as 0.02
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
for (label, curve), style in zip(errors.items(), ("-", "--", ":", "-.")):
    axis.plot(range(1, 11), curve, style, label=label)
axis.set(title="Batch norm in other norms: digits", xlabel="epoch", ylabel="test error, %", yscale="log")
axis.legend()
path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/convert_cnn.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=100)
print("plot:", path)
