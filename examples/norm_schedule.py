"""A learning-rate schedule replaced by a schedule of norms. Run: python examples/norm_schedule.py [plot.png]"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from normmatters.optim import NormSchedule, scale_invariant_parameters, split_parameters

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float64).unsqueeze(1) / 16, torch.tensor(digits.target)


def run(move_norms: bool) -> tuple[list[float], list[float]]:
    """Training loss and norm of the second layer by epoch; at epochs 6 and 9 the LR falls (or the norms grow)."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(288, 10)),
    ).double()
    optimizer = torch.optim.SGD(split_parameters(model, images[:64]), lr=0.1, momentum=0.9)
    if move_norms:  # the second group, biases and last layer, follows the schedule with its learning rate
        invariant = scale_invariant_parameters(model, images[:64])
        scheduler = NormSchedule(optimizer, lambda opt: MultiStepLR(opt, [6, 9]), invariant)
    else:
        scheduler = MultiStepLR(optimizer, [6, 9])
    losses, norms = [], []
    for _ in range(12):
        total = 0.0
        for batch in torch.randperm(len(images)).split(128):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch) / len(images)
        scheduler.step()
        losses.append(total)
        norms.append(model[3].weight.norm().item())
    kind = "norm" if move_norms else "LR"
    print(f"{kind} schedule: learning rates {scheduler.get_last_lr()}, final loss {total:.6f}")
    return losses, norms


plt.rcParams["axes.formatter.min_exponent"] = 3  # ticks such as 0.02
figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for move_norms, style in ((False, "-"), (True, "--")):
    for axis, curve, title in zip(axes, run(move_norms), ("training loss", "norm of the second layer")):
        axis.plot(curve, style, label="norm schedule" if move_norms else "LR schedule")
        axis.set(title=title, xlabel="epoch", yscale="log")
axes[0].legend()
path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/norm_schedule.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=100)
print("plot:", path)
