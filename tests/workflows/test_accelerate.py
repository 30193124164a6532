"""accelerate: a prepared loop does what a loop by hand does, and resumes from its checkpoint to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normmatters as nm
from support.workflow_loops import assert_same_run, convnet, loader, plain_loop, weight_decay_free_sgd


@pytest.fixture
def accelerate() -> Any:
    return pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)


def train(accelerate: Any, epochs: range, folder: Path, resume: bool) -> tuple[nn.Module, nm.optim.Recording]:
    accelerator = accelerate.Accelerator(cpu=True)
    net = convnet()
    sgd = weight_decay_free_sgd(net)
    recorder = nm.optim.NormRecorder(net, sgd)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    model, optimizer, data, schedule = accelerator.prepare(net, sgd, loader(), schedule)
    accelerator.register_for_checkpointing(recorder)
    if resume:
        accelerator.load_state(str(folder))
    for _ in epochs:
        for images, labels in data:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
        schedule.step()
    accelerator.save_state(str(folder))
    return accelerator.unwrap_model(model), recorder.recording()


def test_training_and_resuming(accelerate: Any, tmp_path: Path) -> None:
    assert_same_run(*train(accelerate, range(2), tmp_path, resume=False), plain_loop(2))
    assert_same_run(*train(accelerate, range(2, 4), tmp_path, resume=True), plain_loop(4))


def test_gradient_accumulation_and_clipping(accelerate: Any) -> None:
    """Steps are counted, and recorded, once for two batches; norms see each batch."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = convnet()
    sgd = weight_decay_free_sgd(net)
    recorder = nm.optim.NormRecorder(net, sgd)
    model, optimizer, data = accelerator.prepare(net, sgd, loader())
    for images, labels in data:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert recorder.steps == 2
    assert net[1].num_batches_tracked == 4

    by_hand = convnet()
    optimizer = weight_decay_free_sgd(by_hand)
    for index, (images, labels) in enumerate(loader()):
        (nn.functional.cross_entropy(by_hand(images), labels) / 2).backward()
        if index % 2:
            nn.utils.clip_grad_norm_(by_hand.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(net.state_dict(), by_hand.state_dict())
