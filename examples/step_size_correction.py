"""Weight decay replaced by Eq. 5's learning-rate correction. Run: python examples/step_size_correction.py [plot.png]"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from normmatters.optim import NormRecorder, Recording, StepSizeCorrection, scale_invariant_parameters, split_parameters

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)


def run(decay: float, reference: Recording | None = None) -> Recording:
    """Train with weight decay, without, or without and corrected; the last layer always has weight decay."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(288, 10)),
    )
    invariant, rest = split_parameters(model, images[:64])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        [invariant | {"weight_decay": decay}, rest], 0.1, weight_decay=5e-3
    )
    if reference is not None:
        optimizer = StepSizeCorrection(optimizer, reference, model, form="exact")
    recorder = NormRecorder(scale_invariant_parameters(model, images[:64]), optimizer)
    for _ in range(12):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        recorder.end_epoch()
    return recorder.recording()


wd_on = run(decay=5e-2)
runs = {"weight decay": wd_on, "no weight decay": run(0.0), "no weight decay, corrected": run(0.0, wd_on)}
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for (label, recording), style in zip(runs.items(), ("-", "-", "--")):
    left.plot(recording.norm("3.weight", layer=True), style, label=label)
    right.plot(recording.angle("3.weight").median(1).values.unfold(0, 25, 5).mean(1), style)
    print(f"{label:28} final norm {recording.norm('3.weight', layer=True)[-1]:.3f}")
left.set(title="norm of the second layer", xlabel="step", yscale="log")
right.set(title="angle per step (moving mean)", xlabel="step / 5", yscale="log")
left.legend(fontsize=7)
path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/step_size_correction.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=100)
print("plot:", path)
