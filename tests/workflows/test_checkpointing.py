"""Activation checkpointing of converted models: the same training, and each batch counted once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from normmatters.surgery.blocks import FusedBlock
from support.workflow_nets import MODELS, gradients


def run(model: nn.Module, x: Tensor, reentrant: bool | None) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input, with each part of the Sequential checkpointed, or none."""
    y = x = x.clone().requires_grad_()
    for part in model:  # type: ignore[attr-defined]
        y = part(y) if reentrant is None else checkpoint(part, y, use_reentrant=reentrant)
    model.zero_grad()
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_same_training(name: str, reentrant: bool) -> None:
    build, shape = MODELS[name]
    checkpointed, plain = build().double(), build().double()
    for _ in range(2):
        x = torch.randn(shape, dtype=torch.float64)
        assert_close(run(checkpointed, x, reentrant), run(plain, x, None))
        assert_close(gradients(checkpointed), gradients(plain))
    assert_close(checkpointed.state_dict(), plain.state_dict())
    if name == "convnet":
        assert isinstance(checkpointed[3], FusedBlock)
        assert checkpointed[3].bn2.num_batches_tracked == 2


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_same_training_on_a_gpu(name: str, reentrant: bool) -> None:
    build, shape = MODELS[name]
    checkpointed, plain = build().cuda(), build().cuda()
    x = torch.randn(shape, device="cuda")
    assert_close(run(checkpointed, x, reentrant), run(plain, x, None), rtol=1e-4, atol=1e-4)
    assert_close(gradients(checkpointed), gradients(plain), rtol=1e-4, atol=1e-4)
    assert_close(checkpointed.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
