"""A small convnet, its data and its optimizer, for the loops that others write."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import normmatters as nm


def convnet() -> nn.Sequential:
    """The same weights each time."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)]
    model = nm.convert(nn.Sequential(*layers), "l1")
    assert isinstance(model, nn.Sequential)
    return model


def loader() -> DataLoader:
    """Four batches of eight that can be told apart, in a fixed order."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (32,), generator=generator)
    images = torch.randn(32, 1, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1)
    return DataLoader(TensorDataset(images, labels), batch_size=8)


def weight_decay_free_sgd(model: nn.Module) -> nm.optim.WeightDecayFreeSGD:
    invariant, rest = nm.optim.split_parameters(model, next(iter(loader()))[0])
    rest |= {"weight_decay_free": False}
    return nm.optim.WeightDecayFreeSGD([invariant, rest], lr=0.05, momentum=0.9, weight_decay=5e-3)


def plain_loop(epochs: int) -> tuple[nn.Sequential, nm.optim.Recording]:
    """What every loop has to come to: the model after training by hand, and what a recorder saw."""
    model = convnet()
    optimizer = weight_decay_free_sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    recorder = nm.optim.NormRecorder(model, optimizer)
    for _ in range(epochs):
        for images, labels in loader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        schedule.step()
    return model, recorder.recording()


def assert_same_run(
    model: nn.Module, recording: nm.optim.Recording, expected: tuple[nn.Module, nm.optim.Recording]
) -> None:
    """Bit for bit the same weights, statistics and recording."""
    for key, value in expected[0].state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    for name, norms in expected[1].norms.items():
        assert torch.equal(norms, recording.norms[name]), name
        assert torch.equal(expected[1].angles[name], recording.angles[name]), name
    assert torch.equal(expected[1].lr, recording.lr)
    assert not torch.equal(norms[0], norms[-1])
