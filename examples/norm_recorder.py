"""Watch norms, effective step sizes and angles of a run. Run: python examples/norm_recorder.py [plot.png]"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from normmatters.optim import NormRecorder, Recording, scale_invariant_parameters

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(288, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [12, 18])
recorder = NormRecorder(scale_invariant_parameters(model, images[:64]), optimizer)  # records at each optimizer.step()
for _ in range(24):
    for batch in torch.randperm(len(images)).split(128):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    scheduler.step()
    recorder.end_epoch()

path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out/norm_recorder.png")
path.parent.mkdir(parents=True, exist_ok=True)
recorder.save(str(path.with_suffix(".safetensors")))
recording = Recording.load(path.with_suffix(".safetensors"))
for name in recording.names:
    steps = recording.effective_step_size(name).median(1).values
    turn = recording.angle(name).median(1).values
    print(
        f"{name}: effective step {steps[0]:.2e} -> {steps[-1]:.2e}, angle {turn[0]:.2e} -> {turn[-1]:.2e} rad per step"
    )
recording.plot(path)
print("plot:", path)
