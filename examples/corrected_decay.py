"""A weight decay that follows the learning rate holds the norms. Run: python examples/corrected_decay.py [plot.png]"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from normmatters import optim

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
EPOCHS = 30


def run(corrected: bool) -> optim.Recording:
    """Train with a cosine schedule and a weight decay that is constant, or follows it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(288, 10)),
    )
    normalized, rest = optim.split_parameters(model, images[:64])
    groups = [normalized, rest | {"corrected": False}]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9, weight_decay=2e-2)
    recorder = optim.NormRecorder(optim.scale_invariant_parameters(model, images[:64]), optimizer)
    if corrected:
        optimizer = optim.CorrectedWeightDecay(optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
        recorder.end_epoch()
    return recorder.recording()


runs = {"constant decay": run(False), "decay that follows the learning rate": run(True)}
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for label, recording in runs.items():
    norm = recording.norm("3.weight", layer=True)
    left.plot(norm, label=label)
    right.plot(recording.angle("3.weight").median(1).values.unfold(0, 25, 5).mean(1))
    print(f"{label:38} norm at a third {norm[len(norm) // 3].item():.3f}, at the end {norm[-1].item():.3f}")
left.set(title="norm of the second layer", xlabel="step", yscale="log")
right.set(title="angle per step (moving mean)", xlabel="step / 5", yscale="log")
left.legend(fontsize=7)
path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/corrected_decay.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=100)
print("plot:", path)
