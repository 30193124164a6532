"""Lightning: its Trainer does what a loop by hand does, and resumes from its checkpoint to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normmatters as nm
from support.workflow_loops import assert_same_run, convnet, loader, plain_loop, weight_decay_free_sgd


def fit(lightning: Any, epochs: int, folder: Path, checkpoint: str | None = None) -> tuple[Any, nm.optim.Recording]:
    class RecordNorms(lightning.Callback):
        saved = None

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.recorder = nm.optim.NormRecorder(module.net, trainer.optimizers[0])
            if self.saved is not None:
                self.recorder.load_state_dict(self.saved)

        def state_dict(self) -> dict[str, Any]:
            return self.recorder.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.saved = state

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = convnet()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            images, labels = batch
            return nn.functional.cross_entropy(self.net(images), labels)

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = weight_decay_free_sgd(self.net)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    recorder, module = RecordNorms(), Classifier()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[recorder],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), ckpt_path=checkpoint, weights_only=True)
    return trainer, recorder.recorder.recording()


def test_training_and_resuming(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed", exc_type=ImportError)
    trainer, recording = fit(lightning, 2, tmp_path / "first")
    assert_same_run(trainer.model.net, recording, plain_loop(2))
    checkpoint = trainer.checkpoint_callback.best_model_path
    trainer, recording = fit(lightning, 4, tmp_path / "resumed", checkpoint)
    assert trainer.global_step == 16
    assert_same_run(trainer.model.net, recording, plain_loop(4))
