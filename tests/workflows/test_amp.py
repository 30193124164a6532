"""Mixed precision: under autocast statistics stay in float32, and a GradScaler changes the gradients' range alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import normmatters as nm
from support.workflow_nets import MODELS, gradients

LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
ROUNDING = 16 * torch.finfo(torch.bfloat16).eps  # of a handful of layers, each of order 1


def loss_of(model: nn.Module, x: Tensor, autocast: bool) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        return nn.functional.cross_entropy(model(x).float(), LABELS.to(x.device))


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name: str) -> None:
    build, shape = MODELS[name]
    mixed, full, x = build(), build(), torch.randn(shape)
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    for module in mixed.modules():
        if isinstance(module, (nm.L1BatchNorm2d, nm.L1LayerNorm)):
            module.register_forward_hook(lambda _, arguments, output: seen.append((arguments[0].dtype, output.dtype)))
    loss, expected = loss_of(mixed, x, True), loss_of(full, x, False)
    assert_close(loss, expected, rtol=0, atol=ROUNDING)
    assert all(before == after for before, after in seen)  # a norm casts nothing
    # The transformer's residual stream stays in float32, and its norms with it.
    assert {before for before, _ in seen} == {torch.bfloat16 if name == "convnet" else torch.float32}
    loss.backward()
    expected.backward()
    assert {parameter.grad.dtype for parameter in mixed.parameters()} == {torch.float32}
    for mine, other in zip(gradients(mixed), gradients(full)):
        assert (mine - other).norm() < ROUNDING * other.norm() + 1e-4  # a key's bias has no gradient but rounding
    for key, value in mixed.state_dict().items():
        assert value.dtype == full.state_dict()[key].dtype, key
        assert_close(value, full.state_dict()[key], rtol=ROUNDING, atol=ROUNDING)


def test_l2_is_torchs_batch_norm_under_autocast() -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 6), nn.Flatten())
    ours, x = nm.convert(copy.deepcopy(theirs), "l2"), torch.randn(8, 3, 8, 8)
    for model in (ours, theirs):
        loss_of(model, x, True).backward()
    for mine, other in zip(gradients(ours), gradients(theirs)):
        assert_close(mine, other, rtol=ROUNDING, atol=ROUNDING)
    assert_close(ours[1].running_var, theirs[1].running_var)
    assert ours[1].running_var.dtype == torch.float32


def train(scaled: bool) -> tuple[nn.Module, nm.optim.NormRecorder, list[float]]:
    build, shape = MODELS["convnet"]
    model, x = build(), torch.randn(shape, generator=torch.Generator().manual_seed(3))
    invariant, rest = nm.optim.split_parameters(model, x)
    rest |= {"weight_decay_free": False}
    optimizer = nm.optim.WeightDecayFreeSGD([invariant, rest], lr=0.1, momentum=0.9, weight_decay=5e-4)
    recorder = nm.optim.NormRecorder(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, x, autocast=True)
        scaler.scale(loss).backward()
        if step == 3:  # an overflow, or where nothing is scaled a step that the loop leaves out itself
            model[0].weight.grad[0, 0, 0, 0] = float("inf")
            before = copy.deepcopy(list(model.parameters()))
        if step != 3 or scaled:
            scaler.step(optimizer)
            scaler.update()
        if step == 3:
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
        losses.append(loss.item())
    assert not scaled or scaler.get_scale() == 512
    return model, recorder, losses


def test_scaled_gradients_give_the_same_training() -> None:
    """The scale is a power of two, so it rounds nothing; a step that overflows is skipped by everyone."""
    model, recorder, losses = train(scaled=True)
    expected, unscaled, same_losses = train(scaled=False)
    assert losses == same_losses
    assert losses[-1] < losses[0]
    assert recorder.steps == unscaled.steps == 5
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[key]), key
    assert model[1].num_batches_tracked == 6  # the forward pass was taken, as with torch.nn.BatchNorm2d
    for name, norms in recorder.recording().norms.items():
        assert torch.equal(norms, unscaled.recording().norms[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_fp16_on_a_gpu(name: str) -> None:
    build, shape = MODELS[name]
    model, x, labels = build().cuda(), torch.randn(shape, device="cuda"), LABELS.cuda()
    optimizer = torch.optim.SGD(nm.optim.weight_decay_groups(model, 5e-4), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(x), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    full = build().cuda()
    with torch.autocast("cuda", torch.float16):
        mixed = build().cuda()(x)
    assert_close(mixed.float(), full(x), rtol=0, atol=16 * torch.finfo(torch.float16).eps * 8)
