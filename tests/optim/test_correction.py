"""StepSizeCorrection: Eq. 5 is exact where it can be, and an optimizer like any other."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR, StepLR

from normmatters.optim import (
    Angular,
    NormRecorder,
    NormSchedule,
    Recording,
    StepSizeCorrection,
    channel_norms,
    correction,
    scale_invariant_parameters,
)
from support.optim_nets import INVARIANT, batch, convnet, directions, groups, train

STEPS, DROP = 300, 150


def reference(decay: float, steps: int = STEPS, momentum: float = 0.0) -> tuple[Recording, list[Tensor]]:
    """A run with weight decay: its recording and the directions after every step."""
    model = convnet()
    optimizer = torch.optim.SGD(groups(model, decay), lr=0.1, momentum=momentum)
    scheduler = MultiStepLR(optimizer, [DROP])
    recorder = NormRecorder(scale_invariant_parameters(model, batch(0)[0]), optimizer, angle=False)
    trajectory: list[Tensor] = []

    def after(t: int) -> None:
        scheduler.step()
        trajectory.append(directions(model))
        if t % 50 == 49:
            recorder.end_epoch()

    train(model, optimizer, range(steps), after)
    return recorder.recording(), trajectory


@pytest.fixture(scope="module")
def strong() -> tuple[Recording, list[Tensor]]:
    return reference(5e-2)


def distance(optimizer: torch.optim.Optimizer, model: nn.Module, trajectory: list[Tensor]) -> Tensor:
    """Largest deviation of the directions from the reference, at every step."""
    scheduler = MultiStepLR(optimizer, [DROP])
    gaps: list[Tensor] = []

    def after(t: int) -> None:
        scheduler.step()
        gaps.append((directions(model) - trajectory[t]).abs().max())

    train(model, optimizer, range(len(trajectory)), after)
    return torch.stack(gaps)


@pytest.mark.parametrize("decay", [5e-4, 5e-3, 5e-2])
def test_exact_form_gives_the_directions_of_weight_decay(decay: float, strong: tuple[Recording, list[Tensor]]) -> None:
    recording, trajectory = strong if decay == 5e-2 else reference(decay)
    model = convnet()
    optimizer = StepSizeCorrection(torch.optim.SGD(groups(model, 0.0), lr=0.1), recording, form="exact")
    assert distance(optimizer, model, trajectory).max() < 1e-10
    if decay == 5e-2:  # the norms did part, so the test could have failed
        assert (optimizer.ratio["0.weight"] > 4).all()


def test_paper_form_comes_closer_the_shorter_its_epochs(strong: tuple[Recording, list[Tensor]]) -> None:
    recording, trajectory = strong

    def gap(epoch: int, steps: int) -> float:
        model = convnet()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups(model, 0.0), lr=0.1)
        if epoch:
            ends = tuple(range(epoch, STEPS + 1, epoch))
            optimizer = StepSizeCorrection(optimizer, dataclasses.replace(recording, epoch_ends=ends))
        train(model, optimizer, range(steps))
        return (directions(model) - trajectory[steps - 1]).norm().item()

    # Early, before the difference of one noisy step has grown through the next hundred.
    assert gap(2, 10) < 0.2 * gap(10, 10) < 0.2 * 0.5 * gap(50, 10)
    assert gap(2, 50) < 0.7 * gap(0, 50)


def test_paper_form_is_eq_5(strong: tuple[Recording, list[Tensor]]) -> None:
    model = convnet()
    optimizer = StepSizeCorrection(torch.optim.SGD(groups(model, 0.0), lr=0.1), strong[0])
    train(model, optimizer, range(52))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, range(52, 53))
    for name in INVARIANT:  # step 52 is part of the second epoch, which ended at step 100
        expected = channel_norms(before[name]) ** 2 / strong[0].norms[name][100] ** 2
        torch.testing.assert_close(optimizer.ratio[name], expected, rtol=1e-12, atol=0)


def test_paper_form_changes_norms_at_the_epochs_boundary(strong: tuple[Recording, list[Tensor]]) -> None:
    rows = strong[0].rows_by_step("paper")
    assert len(rows) == STEPS + 1
    assert rows[[0, 49, 50, 99, 299, 300]].tolist() == [50, 50, 100, 100, 300, 300]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.AdamW, {"weight_decay": 0.0, "eps": 1e-30}),
        (torch.optim.RMSprop, {"eps": 1e-30}),
    ],
)
def test_scales_the_update_of_any_optimizer(
    kind: Any, options: dict[str, Any], strong: tuple[Recording, list[Tensor]]
) -> None:
    """One corrected step is the plain step times the ratio, and the others' steps are plain."""
    recording, _ = strong
    exponent = 1.0 if kind in (torch.optim.AdamW, torch.optim.RMSprop) else 2.0
    plain, model = convnet(), convnet()
    named = dict(model.named_parameters())
    inner = kind(model.parameters(), lr=1e-2, **options)
    optimizer = StepSizeCorrection(inner, recording, {n: named[n] for n in INVARIANT})
    other = kind(plain.parameters(), lr=1e-2, **options)
    before = {n: p.detach().clone() for n, p in named.items()}

    def closure(net: nn.Module, opt: torch.optim.Optimizer) -> Any:
        def evaluate() -> Tensor:
            opt.zero_grad()
            images, labels = batch(0)
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            return loss

        return evaluate

    loss = optimizer.step(closure(model, optimizer))
    assert loss.item() == other.step(closure(plain, other)).item()
    for name, p in plain.named_parameters():
        update = p.detach() - before[name]
        if name in INVARIANT:
            ratio = (channel_norms(before[name]) / recording.norms[name][50]) ** exponent
            torch.testing.assert_close(optimizer.ratio[name], ratio, rtol=1e-12, atol=0)
            update = update * ratio.view(-1, *[1] * (update.ndim - 1))
        torch.testing.assert_close(named[name].detach() - before[name], update, rtol=1e-9, atol=1e-14)


def test_the_optimizer_sees_the_references_gradients_and_the_user_his_own(
    strong: tuple[Recording, list[Tensor]],
) -> None:
    model = convnet()
    inner = torch.optim.SGD(groups(model, 0.0), lr=0.1, momentum=0.9)
    optimizer = StepSizeCorrection(inner, strong[0])
    seen: dict[Tensor, Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: seen.update({p: p.grad.clone() for p in model.parameters()}))
    ratio = {
        n: channel_norms(p.detach()) / strong[0].norms[n][50] for n, p in model.named_parameters() if n in INVARIANT
    }
    train(model, optimizer, range(1))
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, seen[p])
        if name in INVARIANT:
            scaled = p.grad * ratio[name].view(-1, *[1] * (p.ndim - 1))
            torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], scaled, rtol=1e-12, atol=0)


def test_momentum_does_not_multiply_old_gradients_by_what_the_weights_have_grown_since() -> None:
    """Long first steps: a correction that is a learning rate alone lets norms explode."""
    model = convnet()
    reference = torch.optim.SGD(groups(model, 5e-4), lr=2.0, momentum=0.9)
    recorder = NormRecorder(scale_invariant_parameters(model, batch(0)[0]), reference, angle=False)
    train(model, reference, range(40))
    recording = recorder.recording()
    model = convnet()
    optimizer = StepSizeCorrection(torch.optim.SGD(groups(model, 0.0), lr=2.0, momentum=0.9), recording, form="exact")
    train(model, optimizer, range(40))
    turned = {n: channel_norms(p.detach()) for n, p in model.named_parameters() if n in INVARIANT}
    for name, norms in turned.items():
        assert (norms < 3 * recording.norms[name].amax(0)).all()


def test_a_channel_that_grows_without_end_is_held(
    strong: tuple[Recording, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A channel that all but died in the reference and is alive here turns and grows at every step."""
    norms = {n: v.clone() for n, v in strong[0].norms.items()}
    norms["0.weight"][:, 0] *= 1e-2
    recording = dataclasses.replace(strong[0], norms=norms)

    def run() -> tuple[Tensor, Tensor]:
        model = convnet()
        sgd = torch.optim.SGD(groups(model, 0.0), lr=0.1, momentum=0.9)
        train(model, StepSizeCorrection(sgd, recording), range(40))
        return directions(model), channel_norms(model[0].weight.detach())[0]  # type: ignore[arg-type]

    held, norm = run()
    monkeypatch.setattr(correction, "LARGEST_RATIO", 1e300)
    free, endless = run()
    assert norm < 1e9 < 1e-9 * endless
    torch.testing.assert_close(held, free, rtol=1e-9, atol=1e-12)


def test_updates_far_below_the_weights_last_digit_are_not_lost() -> None:
    """Norms 1e5 times the reference's, in float32: the step must still turn the weights as the reference's does."""
    torch.manual_seed(0)
    recording, trajectory = reference(5e-2, steps=50)
    model = convnet().float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in INVARIANT:
                p.mul_(1e5)
    optimizer = StepSizeCorrection(torch.optim.SGD(groups(model, 0.0), lr=0.1), recording, form="exact")
    gaps = distance(optimizer, model, trajectory)
    assert gaps[:20].max() < 1e-4


def test_resume_is_bit_for_bit(strong: tuple[Recording, list[Tensor]], tmp_path: Path) -> None:
    def fresh() -> tuple[nn.Module, StepSizeCorrection, MultiStepLR]:
        model = convnet()
        inner = torch.optim.SGD(groups(model, 0.0), lr=0.1, momentum=0.9)
        optimizer = StepSizeCorrection(inner, strong[0], form="exact")
        return model, optimizer, MultiStepLR(optimizer, [5])

    model, optimizer, scheduler = fresh()
    train(model, optimizer, range(12), lambda _: scheduler.step())
    expected = copy.deepcopy(model.state_dict())
    model, optimizer, scheduler = fresh()
    train(model, optimizer, range(7), lambda _: scheduler.step())
    torch.save([part.state_dict() for part in (model, optimizer, scheduler)], tmp_path / "checkpoint")
    resumed = fresh()
    for part, state in zip(resumed, torch.load(tmp_path / "checkpoint", weights_only=True)):
        part.load_state_dict(state)
    model, optimizer, scheduler = resumed
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    train(model, optimizer, range(7, 12), lambda _: scheduler.step())
    assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="not a state of StepSizeCorrection"):
        optimizer.load_state_dict(optimizer.optimizer.state_dict())
    wrong = optimizer.state_dict()
    wrong["StepSizeCorrection"] = {**wrong["StepSizeCorrection"], "form": "paper"}
    with pytest.raises(ValueError, match="made with form 'paper'"):
        optimizer.load_state_dict(wrong)


def test_grad_scaler_hooks_copies_and_groups(strong: tuple[Recording, list[Tensor]]) -> None:
    model = convnet()
    optimizer = StepSizeCorrection(torch.optim.SGD(groups(model, 0.0), lr=0.1), strong[0])
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    twin = convnet()
    unscaled = StepSizeCorrection(torch.optim.SGD(groups(twin, 0.0), lr=0.1), strong[0])
    for t in range(3):
        images, labels = batch(t)
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(images), labels)).backward()
        if t == 1:
            model[3].weight.grad[0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        train(twin, unscaled, range(t, t + 1)) if t != 1 else twin(images)
    assert len(calls) == 2
    assert optimizer.state_dict()["StepSizeCorrection"]["step"] == 2
    torch.testing.assert_close(directions(model), directions(twin), rtol=1e-12, atol=1e-14)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "StepSizeCorrection(SGD" in repr(optimizer)
    both = copy.deepcopy([model, optimizer])
    train(both[0], both[1], range(3, 4))
    train(model, optimizer, range(3, 4))
    assert torch.equal(directions(both[0]), directions(model))
    optimizer.add_param_group({"params": [("extra", nn.Parameter(torch.ones(2)))]})
    assert len(optimizer.optimizer.param_groups) == 3


def altered(recording: Recording, name: str, **changes: Any) -> Recording:
    return dataclasses.replace(recording, **{k: {**getattr(recording, k), name: v} for k, v in changes.items()})


def test_errors_name_the_parameter_and_change_nothing(strong: tuple[Recording, list[Tensor]]) -> None:
    recording, _ = strong
    model = convnet()
    named = {n: dict(model.named_parameters())[n] for n in INVARIANT}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())

    def fails(
        message: str, rec: Recording = recording, parameters: Any = named, opt: Any = optimizer, **kw: Any
    ) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            StepSizeCorrection(opt, rec, parameters, **kw)

    fails(r"must be a Recording \(of a file: Recording.load\(path\)\), got str", rec="run.safetensors")  # type: ignore[arg-type]
    fails("does not know the names", parameters=None)
    fails("has no '11.weight'", parameters={"11.weight": model[11].weight})
    fails("'0.weight' .* never tested", rec=dataclasses.replace(recording, tested=False), parameters=model)
    other = nn.Sequential(nn.Conv2d(1, 7, 3), nn.BatchNorm2d(7))
    fails(r"another model: '0.weight' was \(6, 1, 3, 3\) there and is \(7, 1, 3, 3\)", parameters=other)
    fails("another model: it has '3.weight'", parameters=nn.Sequential(model[0]))
    zero = recording.norms["3.weight"].clone()
    zero[50, 2] = 0
    fails("recorded norm of channel 2 of '3.weight' must be positive", rec=altered(recording, "3.weight", norms=zero))
    with pytest.raises(ValueError, match=r"norms of '3.weight' .* must be \[301, 8\], got \[301, 5\]"):
        altered(recording, "3.weight", norms=zero[:, :5])
    with pytest.raises(ValueError, match=r"norms of '3.weight' .* got \[200, 8\]"):
        altered(recording, "3.weight", norms=zero[:200])
    fails("form must be", form="approximate")
    fails(
        "'0.weight' must be trained without weight decay",
        opt=torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1),
    )
    fails("'0.weight' is turned by", opt=Angular(torch.optim.SGD([*named.values()], lr=0.1), angle=0.1))
    tied = {key: getattr(recording, key)["0.weight"] for key in ("norms", "shapes", "dims", "groups")}
    twice = {"tied": model[0].weight} | named
    fails("'tied' and '0.weight' are one tensor", rec=altered(recording, "tied", **tied), parameters=twice)
    fails("must be a torch.optim.Optimizer", opt=model)
    fails("does not hold '3.weight'", opt=torch.optim.SGD(model[0].parameters(), lr=0.1))
    fails("no epochs: call recorder.end_epoch", rec=dataclasses.replace(recording, epoch_ends=()))
    steps = recording.steps.clone()
    steps[-1] += 1
    fails('record with every="step"', rec=dataclasses.replace(recording, steps=steps), form="exact")
    fails("below 1", rec=dataclasses.replace(recording, weight_decay=recording.weight_decay * 1e4), form="exact")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with torch.no_grad():
        model[3].weight[1] = 0
    fails("the norm of channel 1 of '3.weight' must be positive")


def test_the_end_of_the_recording_is_an_error_before_the_step(strong: tuple[Recording, list[Tensor]]) -> None:
    model = convnet()
    recording = dataclasses.replace(strong[0], epoch_ends=(1,))
    optimizer = StepSizeCorrection(torch.optim.SGD(groups(model, 0.0), lr=0.1), recording)
    train(model, optimizer, range(1))
    before = directions(model)
    with pytest.raises(ValueError, match="holds 1 steps, all of them were taken"):
        train(model, optimizer, range(1, 2))
    assert torch.equal(before, directions(model))


def test_weight_decay_that_comes_later_is_refused_before_the_step(strong: tuple[Recording, list[Tensor]]) -> None:
    """By a schedule of the weight decay, or by loading the reference's state into the wrapped optimizer."""
    model = convnet()
    optimizer = StepSizeCorrection(torch.optim.SGD(groups(model, 0.0), lr=0.1), strong[0])
    optimizer.optimizer.load_state_dict(torch.optim.SGD(groups(model, 1e-3), lr=0.1).state_dict())
    before = directions(model)
    with pytest.raises(ValueError, match=r"'0\.weight' must be trained without weight decay"):
        train(model, optimizer, range(1))
    assert torch.equal(before, directions(model))


def test_norms_do_not_schedule_corrected_steps(strong: tuple[Recording, list[Tensor]]) -> None:
    """They are brought to the reference's norms for each step: the schedule would do nothing, in silence."""
    model = convnet()
    optimizer = StepSizeCorrection(torch.optim.SGD(groups(model, 0.0), lr=0.1), strong[0])
    with pytest.raises(TypeError, match="schedule its learning rate instead"):
        NormSchedule(optimizer, lambda opt: StepLR(opt, 1), {n: model.get_parameter(n) for n in INVARIANT})


def test_a_weight_that_is_not_invariant_is_named_before_the_step() -> None:
    model = convnet()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = NormRecorder(model, optimizer)  # all weights, the last layer too
    train(model, optimizer, range(2))
    recorder.end_epoch()
    model = convnet()
    weights = {n: p for n, p in model.named_parameters() if p.ndim > 1}
    optimizer = StepSizeCorrection(torch.optim.SGD(model.parameters(), lr=0.1), recorder.recording(), weights)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2):  # and again, if the user tries again
        with pytest.raises(ValueError, match=r"'11\.weight' is not scale invariant: cos\(w, grad\) is"):
            train(model, optimizer, range(1))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    weights.pop("11.weight")
    optimizer = StepSizeCorrection(torch.optim.SGD(model.parameters(), lr=0.1), recorder.recording(), weights)
    train(model, optimizer, range(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype: torch.dtype, strong: tuple[Recording, list[Tensor]]) -> None:
    """Norms and ratios stay float32 beside half-precision weights; the update is the ratio times plain SGD's."""
    w = nn.Parameter(strong[0].norms["0.weight"][0].new_ones(6, 1, 3, 3).to(dtype))
    w.grad = torch.full_like(w, 0.25)
    optimizer = StepSizeCorrection(torch.optim.SGD([w], lr=1.0), strong[0], {"0.weight": w})
    optimizer.step()
    ratio = 9 / strong[0].norms["0.weight"][50].float() ** 2
    assert optimizer.ratio["0.weight"].dtype == torch.float32
    torch.testing.assert_close(optimizer.ratio["0.weight"], ratio, rtol=1e-6, atol=0)
    tolerance = 4 * torch.finfo(dtype).eps
    expected = 1 - 0.25 * ratio.view(6, 1, 1, 1).expand(6, 1, 3, 3)
    torch.testing.assert_close(w.detach().float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_without_a_gradient_stays_to_the_bit(
    dtype: torch.dtype, strong: tuple[Recording, list[Tensor]]
) -> None:
    """To the reference's scale and back was a rounding at every step, by which frozen weights wandered off."""
    torch.manual_seed(0)
    frozen, weight = (nn.Parameter(torch.randn(strong[0].shapes[n]).to(dtype)) for n in INVARIANT[:2])
    before = [frozen.detach().clone(), weight.detach().clone()]
    sgd = torch.optim.SGD([frozen, weight], lr=0.1, momentum=0.9)
    optimizer = StepSizeCorrection(sgd, strong[0], dict(zip(INVARIANT, (frozen, weight))), form="exact")
    optimizer._checked = True
    for step in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert torch.equal(frozen, before[0]), step
    assert not torch.equal(weight, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["paper", "exact"])
def test_a_channel_that_is_pruned_later_stays_zero(
    form: Any, dtype: torch.dtype, strong: tuple[Recording, list[Tensor]]
) -> None:
    """It has no direction, and became NaN: 0 · 1/0."""
    model = convnet(dtype)
    model[4].eps = 1e-5
    sgd = torch.optim.SGD(groups(model, 0.0), lr=0.1, momentum=0.9)
    optimizer = StepSizeCorrection(sgd, strong[0], form=form)
    train(model, optimizer, range(3))
    with torch.no_grad():
        model[3].weight[1] = 0
    train(model, optimizer, range(3, 6))
    assert model[3].weight[1].abs().max() < 1e-30
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_sparse_gradient_is_refused_before_a_weight_moves(strong: tuple[Recording, list[Tensor]]) -> None:
    """torch's error came with the weights at the reference's scale, where they stayed."""
    model = convnet()
    optimizer = StepSizeCorrection(torch.optim.SGD(groups(model, 0.0), lr=0.1), strong[0], form="exact")
    train(model, optimizer, range(2))
    before = copy.deepcopy(model.state_dict())
    weight = model[8].weight
    weight.grad = weight.grad.to_sparse()
    with pytest.raises(ValueError, match=r"'8\.weight' has a torch\.sparse_coo gradient"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has gradients of their weights' dtype only")
def test_gradients_of_another_dtype_than_their_weights(strong: tuple[Recording, list[Tensor]]) -> None:
    weight = nn.Parameter(torch.randn(strong[0].shapes["8.weight"]).bfloat16())
    weight.grad_dtype = torch.float32
    optimizer = StepSizeCorrection(torch.optim.SGD([weight], lr=0.1), strong[0], {"8.weight": weight}, form="exact")
    optimizer._checked = True
    before, weight.grad = weight.detach().clone(), torch.ones_like(weight, dtype=torch.float32)
    optimizer.step()
    assert weight.grad.equal(torch.ones_like(weight, dtype=torch.float32))
    update, ratio = (before - weight.detach()).float(), optimizer.ratio["8.weight"]
    # Three roundings of weights that are hardly longer than their update.
    rounding = 4 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(update, 0.1 * ratio[:, None].expand_as(update), rtol=rounding, atol=0)


def test_a_model_that_is_cast_or_moved_afterwards(strong: tuple[Recording, list[Tensor]]) -> None:
    """As with any optimizer of torch. It raised, with the weights left at the reference's scale."""
    ends = []
    for cast_late in (False, True):
        model = convnet(torch.float64 if cast_late else torch.float32)
        sgd = torch.optim.SGD(groups(model, 0.0), lr=0.1)
        optimizer = StepSizeCorrection(sgd, strong[0], form="exact")
        train(model.float(), optimizer, range(5))
        ends.append(directions(model))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_cuda_graph_steps_through_the_recording(strong: tuple[Recording, list[Tensor]]) -> None:
    recording, _ = strong

    def build() -> tuple[nn.Module, StepSizeCorrection]:
        model = convnet().cuda()
        return model, StepSizeCorrection(torch.optim.SGD(groups(model, 0.0), lr=0.1), recording, form="exact")

    images, labels = (t.cuda() for t in batch(0))

    def step(model: nn.Module, optimizer: StepSizeCorrection) -> None:
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    eager, captured = build(), build()
    for _ in range(8):
        step(*eager)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*captured)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*captured)
    for _ in range(5):
        graph.replay()
    assert captured[1].state_dict()["StepSizeCorrection"]["step"] == 8
    torch.testing.assert_close(directions(captured[0]), directions(eager[0]), rtol=1e-9, atol=1e-11)
