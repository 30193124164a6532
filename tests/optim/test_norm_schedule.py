"""NormSchedule: moving the norms is moving the learning rate, exactly, with momentum and for Adam too."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, SequentialLR

from normmatters.optim import Angular, NormRecorder, NormSchedule, Recording, channel_norms, scale_invariant_parameters
from support.optim_nets import INVARIANT, batch, convnet, directions, groups, train

Build = Callable[[Optimizer], LRScheduler]


def weights(model: nn.Module) -> dict[str, nn.Parameter]:
    named = dict(model.named_parameters())
    return {n: named[n] for n in INVARIANT}


def warmup_then_drop(optimizer: Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.1, 1.0, total_iters=10), MultiStepLR(optimizer, [40], 0.1)]
    return SequentialLR(optimizer, parts, milestones=[10])


SCHEDULES: dict[str, Build] = {
    "drops": lambda opt: MultiStepLR(opt, [40, 80]),
    "cosine": lambda opt: CosineAnnealingLR(opt, 120, eta_min=1e-4),
    "warm-up": warmup_then_drop,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        (SGD, {"lr": 0.1}, 1e-12),
        (SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.1}, 1e-10),
        (SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}, 1e-10),
        # Adam's eps beside √v̂ is what remains; set far below, so that the equation is what is tested.
        (Adam, {"lr": 0.005, "amsgrad": True, "eps": 1e-30}, 1e-9),
        (AdamW, {"lr": 0.005, "weight_decay": 0.0, "eps": 1e-30}, 1e-9),
    ],
)
def test_directions_are_those_of_the_lr_schedule(
    kind: Any, options: dict[str, Any], tolerance: float, schedule: str
) -> None:
    build = SCHEDULES[schedule]
    reference, model = convnet(), convnet()
    # 0.bias is subtracted by batch norm; its noise-sized gradient is not scale covariant, Adam would blow it up.
    for net in (reference, model):
        net[0].bias.requires_grad_(False)
    expected: list[Tensor] = []
    optimizer = kind(groups(reference, 0.0, 0.0), **options)
    scheduler = build(optimizer)
    train(reference, optimizer, range(100), lambda t: (scheduler.step(), expected.append(directions(reference))))
    optimizer = kind(groups(model, 0.0, 0.0), **options)
    norms = NormSchedule(optimizer, build, weights(model))
    gaps: list[float] = []

    def after(t: int) -> None:
        norms.step()
        gaps.append((directions(model) - expected[t]).abs().max().item())

    train(model, optimizer, range(100), after)
    assert max(gaps) < tolerance
    assert optimizer.param_groups[0]["lr"] == options["lr"]
    assert optimizer.param_groups[1]["lr"] == pytest.approx(scheduler.get_last_lr()[1], rel=1e-14)
    assert norms.get_last_lr() == [g["lr"] for g in optimizer.param_groups]


def test_norm_times_root_ten_where_the_lr_falls_by_ten() -> None:
    model = convnet()
    optimizer = SGD(groups(model, 0.0), lr=0.1)
    schedule = NormSchedule(optimizer, lambda opt: MultiStepLR(opt, [2]), weights(model))
    before = {n: channel_norms(w.detach()) for n, w in weights(model).items()}
    optimizer.step()
    for factor in (1.0, math.sqrt(10), math.sqrt(10)):
        schedule.step()
        for name, w in weights(model).items():
            torch.testing.assert_close(channel_norms(w.detach()), factor * before[name], rtol=1e-14, atol=0)
    images, _ = batch(0)
    torch.testing.assert_close(model(images), convnet()(images), rtol=1e-11, atol=1e-12)


def test_constant_others_keep_every_learning_rate_in_one_group() -> None:
    model = convnet()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'0\.weight' shares parameter group 0"):
        NormSchedule(optimizer, SCHEDULES["drops"], weights(model))
    schedule = NormSchedule(optimizer, lambda opt: MultiStepLR(opt, [1]), weights(model), others="constant")
    before = channel_norms(model[0].weight.detach())
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.1]
    torch.testing.assert_close(channel_norms(model[0].weight.detach()), before * math.sqrt(10))


@pytest.fixture(scope="module")
def recorded() -> tuple[Recording, list[Tensor]]:
    """100 steps with weight decay and an LR drop after 60."""
    model = convnet()
    optimizer = SGD(groups(model, 5e-3), lr=0.1)
    scheduler = MultiStepLR(optimizer, [60])
    recorder = NormRecorder(scale_invariant_parameters(model, batch(0)[0]), optimizer, angle=False)
    trajectory: list[Tensor] = []

    def after(t: int) -> None:
        scheduler.step()
        trajectory.append(directions(model))
        if t % 20 == 19:
            recorder.end_epoch()

    train(model, optimizer, range(100), after)
    return recorder.recording(), trajectory


@pytest.mark.parametrize("lr", [0.1, 0.03])  # the effective step is what follows the recording, from any constant lr
def test_exact_recorded_norms_give_the_recorded_directions(lr: float, recorded: tuple[Recording, list[Tensor]]) -> None:
    recording, trajectory = recorded
    model = convnet()
    invariant, rest = groups(model, 0.0)
    optimizer = SGD([invariant | {"lr": lr}, rest | {"lr": 0.1}])
    schedule = NormSchedule(optimizer, recording, form="exact")
    gaps: list[float] = []

    def after(t: int) -> None:
        schedule.step()
        gaps.append((directions(model) - trajectory[t]).abs().max().item())

    train(model, optimizer, range(100), after)
    assert max(gaps) < 1e-10
    assert optimizer.param_groups[0]["lr"] == lr
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.01)


def test_paper_form_forces_the_epochs_norms_times_root_ten(recorded: tuple[Recording, list[Tensor]]) -> None:
    recording, _ = recorded
    model = convnet()
    optimizer = SGD(groups(model, 0.0), lr=0.1, momentum=0.9)
    schedule = NormSchedule(optimizer, recording, model)
    for t in range(100):
        row = 20 * (t // 20 + 1)
        factor = math.sqrt(10) if t >= 60 else 1.0
        for name, w in weights(model).items():
            torch.testing.assert_close(
                channel_norms(w.detach()), factor * recording.norms[name][row], rtol=1e-12, atol=0
            )
        buffer = copy.deepcopy(optimizer.state[model[3].weight].get("momentum_buffer"))
        train(model, optimizer, range(t, t + 1))
        after_step = optimizer.state[model[3].weight]["momentum_buffer"].clone()
        schedule.step()
        now = optimizer.state[model[3].weight]["momentum_buffer"]
        torch.testing.assert_close(now, after_step / math.sqrt(10) if t == 59 else after_step, rtol=1e-14, atol=0)
        assert buffer is None or not torch.equal(buffer, after_step)
    with pytest.raises(ValueError, match="holds 100 steps, all of them were taken"):
        schedule.step()


@pytest.mark.parametrize("form", ["paper", "exact"])
def test_a_channel_that_is_pruned_later_stays_zero(form: Any, recorded: tuple[Recording, list[Tensor]]) -> None:
    """It has no direction to give a length to, and became NaN."""
    model = convnet()
    schedule = NormSchedule(SGD(groups(model, 0.0), lr=0.1), recorded[0], model, form=form)
    schedule.optimizer.step()
    with torch.no_grad():
        model[3].weight[1] = 0
    schedule.step()
    assert not model[3].weight[1].any()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("source", ["schedule", "recording"])
def test_resume_is_bit_for_bit(source: str, recorded: tuple[Recording, list[Tensor]], tmp_path: Path) -> None:
    def fresh() -> tuple[nn.Module, Optimizer, NormSchedule]:
        model = convnet()
        optimizer = SGD(groups(model, 0.0), lr=0.1, momentum=0.9)
        given = recorded[0] if source == "recording" else warmup_then_drop
        return model, optimizer, NormSchedule(optimizer, given, weights(model))

    model, optimizer, schedule = fresh()
    train(model, optimizer, range(65), lambda _: schedule.step())
    expected = copy.deepcopy(model.state_dict())
    model, optimizer, schedule = fresh()
    train(model, optimizer, range(37), lambda _: schedule.step())
    torch.save([part.state_dict() for part in (model, optimizer, schedule)], tmp_path / "checkpoint")
    resumed = fresh()
    for part, state in zip(resumed, torch.load(tmp_path / "checkpoint", weights_only=False)):
        part.load_state_dict(state)
    model, optimizer, schedule = resumed
    train(model, optimizer, range(37, 65), lambda _: schedule.step())
    assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())


def test_errors_name_the_parameter_and_change_nothing(recorded: tuple[Recording, list[Tensor]]) -> None:
    recording, _ = recorded
    model = convnet()
    optimizer = SGD(groups(model, 0.0), lr=0.1)
    before = copy.deepcopy(model.state_dict())

    def fails(
        message: str, source: Any = SCHEDULES["drops"], parameters: Any = None, opt: Any = optimizer, **kw: Any
    ) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            NormSchedule(opt, source, weights(model) if parameters is None else parameters, **kw)

    fails("must be a torch.optim.Optimizer", opt=model)
    fails("others must be", others="same")
    fails("source must be a Recording or a function", source=3)
    fails("must build an LRScheduler, it returned SGD", source=lambda opt: opt)
    with pytest.raises(ValueError, match="parameters= must say"):
        NormSchedule(optimizer, SCHEDULES["drops"])
    fails("'0.weight' must be trained without weight decay", opt=SGD(groups(model, 1e-3), lr=0.1))
    fails("'0.weight' is turned by", opt=Angular(SGD(groups(model, 0.0)[:1], lr=0.1), angle=0.1))
    fails("'0.weight' and 'tied' are one tensor", parameters=weights(model) | {"tied": model[0].weight})
    fails("group 1 shares its learning rate's tensor", opt=SGD(groups(model, 0.0), lr=torch.tensor(0.1)))
    fails("does not hold 'w'", parameters={"w": torch.ones(2, 2)})
    fails("exponent must be positive, got 0", exponent=0)
    adamax = torch.optim.Adamax(groups(model, 0.0), lr=0.1)
    powers = {"exp_avg": -1.0, "exp_inf": -1.0}
    fails("steps of Adamax scale is not known: pass exponent=2", opt=adamax, state_powers=powers)
    fails("state of LBFGS scales is not known", opt=torch.optim.LBFGS(list(weights(model).values())))
    fails(
        "learning rate 0.0: the norm would be infinite",
        source=lambda opt: LinearLR(opt, 1e-300, total_iters=5),
        opt=SGD(groups(model, 0.0), lr=1e-300),
    )
    fails("'0.weight' was recorded with learning rate 0.0", source=dataclasses.replace(recording, lr=recording.lr * 0))
    fails("another model", source=recording, parameters=nn.Sequential(nn.Conv2d(1, 7, 3)))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    schedule = NormSchedule(optimizer, SCHEDULES["drops"], weights(model))
    with pytest.raises(ValueError, match="cannot jump"):
        schedule.step(3)
    with pytest.raises(ValueError, match="other weights"):
        schedule.load_state_dict({**schedule.state_dict(), "names": ["v"]})
    with pytest.raises(ValueError, match="one is an LR schedule, the other a recording"):
        schedule.load_state_dict({**schedule.state_dict(), "source": {"step": 3}})


def test_weight_decay_that_comes_later_is_refused_before_a_weight_moves() -> None:
    """A schedule of the weight decay sets it in the groups."""
    model = convnet()
    optimizer = SGD(groups(model, 0.0), lr=0.1)
    schedule = NormSchedule(optimizer, lambda opt: MultiStepLR(opt, [1]), weights(model))
    optimizer.param_groups[0]["weight_decay"] = 1e-3
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"'0\.weight' must be trained without weight decay"):
        schedule.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_unknown_state_is_refused_before_a_weight_moves() -> None:
    model = convnet()
    optimizer = SGD(groups(model, 0.0), lr=0.1, momentum=0.9)
    schedule = NormSchedule(optimizer, lambda opt: MultiStepLR(opt, [1]), weights(model), state_powers={})
    train(model, optimizer, range(1))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"state 'momentum_buffer' of '0\.weight'"):
        schedule.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_group_that_came_later_is_refused_before_a_weight_moves() -> None:
    model = convnet()
    optimizer = SGD([{"params": list(weights(model).values())}, {"params": model[11].weight}], lr=0.1)
    schedule = NormSchedule(optimizer, lambda opt: MultiStepLR(opt, [1]), weights(model))
    optimizer.add_param_group({"params": model[11].bias})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="has 3 parameter groups"):
        schedule.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_schedulers_own_optimizer_causes_no_warning() -> None:
    model = convnet()
    optimizer = SGD(groups(model, 0.0), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of a scheduler that steps before its optimizer
        schedule = NormSchedule(optimizer, lambda opt: MultiStepLR(opt, [1]), weights(model))
        train(model, optimizer, range(2), lambda _: schedule.step())
    assert optimizer.param_groups[0]["lr"] == 0.1
