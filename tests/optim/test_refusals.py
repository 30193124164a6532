"""What the optimizers and recordings refuse, in which words, and that nothing has changed by then."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from normmatters.optim import (
    Angular,
    AngularSGD,
    NormRecorder,
    NormSchedule,
    Recipe,
    Recording,
    StepSizeCorrection,
    WeightDecayFreeAdamW,
    WeightDecayFreeSGD,
    adamw_equilibrium_angle,
    adamw_equilibrium_norm,
    channel_norms,
    equilibrium_angle,
    equilibrium_norm,
    norm_trajectory,
    predict_equilibrium,
    steps_to_equilibrium,
)
from normmatters.optim.channels import named_weights
from support.optim_nets import INVARIANT, convnet, groups, train


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


@pytest.mark.parametrize(
    "function",
    [
        equilibrium_angle,
        lambda lr, wd, mu=0.0: equilibrium_norm(torch.ones(1), lr, wd, mu),
        adamw_equilibrium_angle,
        lambda lr, wd: adamw_equilibrium_norm(3, lr, wd),
        steps_to_equilibrium,
    ],
    ids=["angle", "norm", "adamw angle", "adamw norm", "steps"],
)
def test_numbers_out_of_range(function: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="lr must be"):
        function(-0.1, 5e-4)
    with pytest.raises(ValueError, match="weight_decay must be"):
        function(0.1, -5e-4)
    with pytest.raises(ValueError, match="weight_decay must be"):
        function(0.1, float("nan"))
    with pytest.raises(TypeError, match="lr"):
        function("0.1", 5e-4)


def test_numbers_out_of_range_of_a_momentum() -> None:
    with pytest.raises(ValueError, match="momentum"):
        equilibrium_angle(0.1, 5e-4, 1.0)
    with pytest.raises(ValueError, match="beta1"):
        adamw_equilibrium_angle(1e-3, 0.1, 1.0)
    with pytest.raises(ValueError, match="weight_decay"):
        norm_trajectory([0.1], -1.0, 0.9, 1.0, 1.0)


def test_arguments_of_another_kind_are_named() -> None:
    ones = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(TypeError, match="unit_gradient must be a tensor, got float"):
        equilibrium_norm(2.0, 0.1, 5e-4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unit_gradient must be a number, got str"):
        norm_trajectory([0.1], 5e-4, 0.9, "1", 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="numel must be >= 0 and finite, got -3"):
        adamw_equilibrium_norm(-3, 0.1, 5e-4)
    with pytest.raises(TypeError, match="lr must be a number, got str"):
        Recipe.from_angle(0.01, "0.1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="gradients must be a list of dicts, one for each batch, got dict"):
        predict_equilibrium({"w": ones}, 0.1, 5e-4, gradients={"w": ones})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected \(name, tensor\) pairs, .*got \(str, int\)"):
        predict_equilibrium({"w": 3}, 0.1, 5e-4)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"expected a module, a mapping or \(name, tensor\) pairs, got int"):
        NormRecorder(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"metadata must map strings to strings, got 'on': device"):
        NormRecorder({"w": ones}, metadata={"on": torch.device("cpu")})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"dim must lie in \[-2, 2\) .*got 0\.5"):
        channel_norms(ones, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dim a is no dimension of parameter 0 of group 0"):
        AngularSGD([ones], angle=0.1, dim="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"betas must be two numbers, got 0\.9"):
        WeightDecayFreeAdamW([ones], betas=0.9)  # type: ignore[arg-type]


def test_numbers_of_numpy() -> None:
    assert equilibrium_angle(np.float32(0.5), np.float16(0.25), np.int64(0)) == 0.5
    norms, angles = norm_trajectory(np.full(50, 0.1, np.float32), 5e-4, 0.9, 2.0, 1.0)  # type: ignore[arg-type]
    lr = float(np.float32(0.1))
    assert (norms, angles) == norm_trajectory([lr] * 50, 5e-4, 0.9, 2.0, 1.0)
    with pytest.raises(TypeError, match="lr must be a number, got ndarray"):
        equilibrium_angle(np.full(2, 0.1), 5e-4)  # type: ignore[arg-type]


def test_a_tensor_stands_for_one_number() -> None:
    assert AngularSGD([weight(2, 2)], lr=torch.tensor(0.1), weight_decay=5e-4).param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match=r"tensor of one element, got shape \(2,\)"):
        AngularSGD([weight(2, 2)], lr=torch.tensor([0.1, 0.2]), weight_decay=5e-4)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("kind", [AngularSGD, WeightDecayFreeSGD, WeightDecayFreeAdamW, SGD])
def test_a_tensor_of_one_element_may_have_dimensions(
    kind: Any, capturable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch.optim. It stays the user's own tensor, which he, or a scheduler, may fill anew; it is recorded."""
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    options: dict[str, Any] = {} if kind is SGD else {"capturable": capturable}
    options |= {"check_invariance": False} if kind in (WeightDecayFreeSGD, WeightDecayFreeAdamW) else {}
    plain = {AngularSGD: {"angular": False}, SGD: {}}.get(kind, {"weight_decay_free": False})
    ends = []
    for shape in ((), (1,), (1, 1)):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(3, 4, dtype=torch.float64)) for _ in range(2)]
        lr = torch.full(shape, 0.05, dtype=torch.float64)
        optimizer = kind(
            [{"params": weights[:1]}, {"params": weights[1:], **plain}], lr=lr, weight_decay=0.1, **options
        )
        recorder = NormRecorder({"w": weights[0]}, optimizer)
        for value in (0.05, 0.02):
            lr.fill_(value)
            for w in weights:
                w.grad = torch.randn_like(w)
            optimizer.step()
        ends.append(torch.cat([*(w.detach().flatten() for w in weights), recorder.recording().lr.flatten()]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize(
    "make",
    [
        lambda params, lr, wd, mu: AngularSGD(params, lr, mu, wd),
        lambda params, lr, wd, mu: AngularSGD(params, angle=lr, momentum=mu),
        lambda params, lr, wd, mu: Angular(SGD(params, lr, mu, weight_decay=wd)),
        lambda params, lr, wd, mu: Angular(AdamW(params, lr, weight_decay=wd), angle=lr),
        lambda params, lr, wd, mu: WeightDecayFreeSGD(params, lr, mu, weight_decay=wd, check_invariance=False),
        lambda params, lr, wd, mu: WeightDecayFreeAdamW(params, lr, weight_decay=wd, check_invariance=False),
    ],
    ids=["AngularSGD", "angle", "Angular", "Angular, angle", "WeightDecayFreeSGD", "WeightDecayFreeAdamW"],
)
def test_numbers_of_numpy_are_those_that_they_stand_for(make: Callable[..., torch.optim.Optimizer]) -> None:
    """As in torch.optim, to the last digit of float64; a scheduler may set them, too."""
    runs = []
    for number in (np.float32, lambda x: float(np.float32(x))):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        optimizer = make([p], number(0.1), number(1e-2), number(0.9))
        for lr in (0.1, 0.03, 0.01):
            optimizer.param_groups[0]["lr"] = number(lr)
            p.grad = torch.randn_like(p)
            optimizer.step()
        runs.append(p.detach())
    assert torch.equal(*runs)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"angle": 0.1, "lr": 0.1}, "the angle replaces both"),
        ({"angle": 0.1, "weight_decay": 0.1}, "the angle replaces both"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"momentum": 0.0, "nesterov": True}, "nesterov=True needs momentum"),
        ({"dim": 2}, "dim 2 is no dimension"),
        ({"lr": -1.0, "angular": False}, "lr must be"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
    ],
)
def test_angular_sgd_refuses_a_group_and_stays_as_it_was(group: dict[str, Any], message: str) -> None:
    optimizer = AngularSGD([weight(2, 3)], lr=0.1, weight_decay=5e-4)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [weight(4, 3)], **group})
    assert len(optimizer.param_groups) == 1


def test_angular_sgd_has_no_angle_for_complex_weights_and_single_numbers() -> None:
    with pytest.raises(ValueError, match="is complex"):
        AngularSGD([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))], angle=0.1)
    with pytest.raises(ValueError, match="fewer than two numbers"):
        AngularSGD([weight(4)], angle=0.1)


def test_the_wrapper_refuses_a_group_and_stays_as_it_was() -> None:
    optimizer = Angular(SGD([weight(2, 3)], lr=0.1, weight_decay=5e-4))
    with pytest.raises(ValueError, match="needs weight_decay > 0"):
        optimizer.add_param_group({"params": [weight(4, 3)], "weight_decay": 0.0})
    with pytest.raises(ValueError, match="must not be 0"):
        optimizer.add_param_group({"params": [weight(4, 3)], "lr": 0.0, "angle": 0.1})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [weight(4, 3)]})
    assert optimizer.param_groups[1]["angular"]
    with pytest.raises(ValueError, match="known for SGD and AdamW, not for Adagrad"):
        Angular(torch.optim.Adagrad([weight(2, 3)], weight_decay=0.1))


def test_the_wrapper_names_a_group_that_was_changed_behind_its_back() -> None:
    """The options of a group are part of a state: one of plain SGD has not those of Angular."""
    first, second = weight(2, 3), weight(4, 3)
    plain = SGD([first], lr=0.1, weight_decay=5e-4)
    optimizer = Angular(SGD([first], lr=0.1, weight_decay=5e-4))
    with pytest.raises(ValueError, match="load a plain one into the optimizer before it is wrapped"):
        optimizer.load_state_dict(plain.state_dict())
    optimizer.optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="group 0 has lost its angular"):
        optimizer.step()
    optimizer = Angular(optimizer.optimizer)
    optimizer.step()
    optimizer.optimizer.add_param_group({"params": [second]})
    with pytest.raises(ValueError, match="group 1 has lost its angular"):
        optimizer.step()


@pytest.mark.parametrize("kind", [WeightDecayFreeSGD, WeightDecayFreeAdamW])
def test_weight_decay_free_refuses_a_group_and_stays_as_it_was(kind: Any) -> None:
    optimizer = kind([weight(2, 3)], lr=0.1, weight_decay=0.1)
    wrong: list[dict[str, Any]] = [{"lr": -1.0}, {"weight_decay": -1.0}]
    wrong += [{"betas": (0.9,)}, {"betas": (0.9, 1.0)}, {"eps": -1.0}] if kind is WeightDecayFreeAdamW else []
    wrong += [{"momentum": 1.0}] if kind is WeightDecayFreeSGD else [{"lr": 10.0}]  # η·λ = 1 takes all away
    for change in wrong:
        with pytest.raises(ValueError, match=next(iter(change))):
            optimizer.add_param_group({"params": [weight(4, 3)], **change})
    assert len(optimizer.param_groups) == 1


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    w = nn.Parameter(torch.tensor([[1.0, 0.0]]))
    optimizer = WeightDecayFreeAdamW([w], lr=0.1, weight_decay=0.1, check_invariance=False)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w[0, 1] - w[0, 0] * 0
        loss.backward()
        return loss

    assert optimizer.step(closure) == 0.0  # type: ignore[arg-type]
    assert w[0, 1] < 0


def recording(**changes: Any) -> Recording:
    """One weight of two channels over two steps."""
    values: dict[str, Any] = {
        "norms": {"w": torch.ones(3, 2)},
        "steps": torch.arange(3),
        "lr": torch.full((2, 1), 0.1),
        "weight_decay": torch.full((2, 1), 5e-4),
        "groups": {"w": 0},
        "shapes": {"w": (2, 4)},
        "dims": {"w": 0},
    }
    return Recording(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": torch.full((3, 1), 0.1)}, r"3 rows need lr and weight_decay of \[2, groups\]"),
        ({"weight_decay": torch.full((2,), 0.1)}, r"3 rows need lr and weight_decay of \[2, groups\]"),
        ({"shapes": {}}, "shape and dim"),
        ({"dims": {}}, "shape and dim"),
        ({"norms": {"w": torch.ones(3, 3)}}, r"must be \[3, 2\], got \[3, 3\]"),
        ({"norms": {"w": torch.ones(2, 2)}}, r"must be \[3, 2\], got \[2, 2\]"),
        ({"angles": {"v": torch.ones(2, 2)}}, r"angles of 'w' must be \[2, 2\]"),
        ({"angles": {"w": torch.ones(3, 2)}}, r"angles of 'w' must be \[2, 2\]"),
        ({"groups": {}}, "has no learning rate: its group is None"),
        ({"groups": {"w": 1}}, "has no learning rate: its group is 1"),
    ],
)
def test_a_recording_whose_tables_do_not_fit(changes: dict[str, Any], message: str) -> None:
    recording()
    recording(angles={"w": torch.ones(2, 2)})
    with pytest.raises(ValueError, match=message):
        recording(**changes)


def test_a_recording_without_steps_corrects_and_schedules_nothing() -> None:
    empty = recording(
        norms={"w": torch.ones(1, 2)}, steps=torch.arange(1), lr=torch.ones(0, 1), weight_decay=torch.ones(0, 1)
    )
    w = weight(2, 4)
    optimizer = SGD([("w", w)], lr=0.1)
    for use in (StepSizeCorrection, NormSchedule):
        with pytest.raises(ValueError, match="the recording is empty"):
            use(optimizer, empty, {"w": w}, form="exact")  # type: ignore[operator]
    assert torch.equal(w, torch.ones(2, 4))


def test_an_epoch_whose_end_was_not_recorded() -> None:
    with pytest.raises(ValueError, match="has no epochs"):
        recording().rows_by_step("paper")
    with pytest.raises(ValueError, match="step 5: record every step or epoch"):
        recording(epoch_ends=(2, 5)).rows_by_step("paper")


def test_a_recorders_state_of_other_parameter_groups() -> None:
    model = convnet()
    recorder = NormRecorder(model, SGD(groups(model, 5e-4), lr=0.1))
    other = convnet()
    one_group = NormRecorder(other, SGD(list(other.named_parameters()), lr=0.1))
    before = copy.deepcopy(recorder.state_dict())
    with pytest.raises(ValueError, match="1 parameter groups, here are 2"):
        recorder.load_state_dict(one_group.state_dict())
    after = recorder.state_dict()
    assert after.keys() == before.keys()
    assert torch.equal(after["settings"], before["settings"])


def test_a_damaged_state_leaves_a_recorder_its_rows() -> None:
    recorder = NormRecorder({"w": weight(2, 3)})
    recorder.step()
    damaged = recorder.state_dict()
    del damaged["previous"], damaged["steps"]
    with pytest.raises(ValueError, match="damaged: it has no previous, steps"):
        recorder.load_state_dict(damaged)
    assert len(recorder.recording().steps) == 2


class Holding(torch.optim.Optimizer):
    """Keeps its optimizer as torch's ZeroRedundancyOptimizer does, not as `.optimizer`."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        super().__init__(optim.param_groups, {})
        self.optim, self.param_groups = optim, optim.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optim.step(closure)


REFERENCES: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "weight-decay-free": lambda groups: WeightDecayFreeSGD(
        [groups[0], groups[1] | {"weight_decay_free": False}], lr=0.1, weight_decay=0.01
    ),
    "angle": lambda groups: AngularSGD(
        [{"params": groups[0]["params"]}, {"params": groups[1]["params"], "angular": False, "lr": 0.1}], angle=0.01
    ),
    "recipe": lambda groups: AngularSGD([groups[0], groups[1] | {"angular": False}], lr=0.1),
    "wrapper": lambda groups: Angular(SGD([groups[0], groups[1] | {"angular": False}], lr=0.1)),
    "held": lambda groups: Holding(REFERENCES["weight-decay-free"](groups)),
}


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("user", [StepSizeCorrection, NormSchedule])
def test_norms_that_no_decay_made_are_no_reference(user: Any, kind: str, tmp_path: Path) -> None:
    """Its norms grow, or stay: in silence another run would get effective steps that no run with weight decay had."""
    model = convnet()
    optimizer = REFERENCES[kind](groups(model, 0.01))
    invariant, others = ({n: model.get_parameter(n) for n in names} for names in (INVARIANT, ["11.weight"]))
    recorder = NormRecorder(invariant | others, optimizer)
    train(model, optimizer, range(3))  # type: ignore[arg-type]
    recorder.end_epoch()
    recorder.save(str(tmp_path / "run.safetensors"))
    recording = Recording.load(tmp_path / "run.safetensors")
    optimizer = SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"'0.weight' was recorded under .* record a run with weight decay"):
        user(optimizer, recording, invariant)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    recording.match(optimizer, others)  # had an ordinary optimizer


def test_names_and_weights_must_be_there_once() -> None:
    w = weight(2, 2)
    with pytest.raises(ValueError, match="'w' appears twice"):
        named_weights([("module.w", w), ("w", w)])
    with pytest.raises(ValueError, match="no weights to work on"):
        named_weights(nn.BatchNorm1d(3))
    with pytest.raises(TypeError, match="pairs"):
        named_weights([("w", 3)])  # type: ignore[list-item]


def test_parameters_without_a_gradient_are_left_alone() -> None:
    model = convnet(torch.float32)
    idle = weight(2, 3)
    named = dict(model.named_parameters())
    optimizer = Angular(AdamW([{"params": [named["0.weight"]]}, {"params": [idle]}], lr=1e-3, weight_decay=0.1))
    train(model, optimizer, range(2))  # type: ignore[arg-type]
    assert torch.equal(idle, torch.ones(2, 3))


OF_OURS: dict[str, Callable[[nn.Parameter], torch.optim.Optimizer]] = {
    "WeightDecayFreeSGD": lambda w: WeightDecayFreeSGD([w], lr=0.1, weight_decay=0.01),
    "WeightDecayFreeAdamW": lambda w: WeightDecayFreeAdamW([w], lr=0.1, weight_decay=0.01),
    "AngularSGD": lambda w: AngularSGD([w], lr=0.1, weight_decay=0.01),
    "Angular": lambda w: Angular(SGD([w], lr=0.1, weight_decay=0.01)),
}


@pytest.mark.parametrize("name", list(OF_OURS)[:3])
def test_another_optimizers_state_is_refused_and_changes_nothing(name: str) -> None:
    weight = nn.Parameter(torch.randn(3, 4))
    optimizer = OF_OURS[name](weight)
    for other in (SGD, torch.optim.Adam):
        with pytest.raises(ValueError, match=f"not a state of {name}: its group 0 has no .*load the model alone"):
            optimizer.load_state_dict(other([weight], lr=0.5).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    weight.grad = torch.zeros(3, 4)
    optimizer.step()
    for _ in range(2):  # its own is taken, also when torch has been there
        optimizer.load_state_dict(copy.deepcopy(optimizer).state_dict())


@pytest.mark.parametrize("name", OF_OURS)
def test_complex_weights_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"parameter 0 of group 0, shape \(3, 4\) is complex: only real weights"):
        OF_OURS[name](nn.Parameter(torch.randn(3, 4, dtype=torch.complex64)))


@pytest.mark.parametrize("name", OF_OURS)
@pytest.mark.parametrize("lr", [-0.1, float("nan")])
def test_a_schedule_that_leaves_the_learning_rates_is_refused(name: str, lr: float) -> None:
    weight = nn.Parameter(torch.randn(3, 4))
    optimizer, before = OF_OURS[name](weight), weight.detach().clone()
    optimizer.param_groups[0]["lr"] = lr
    weight.grad = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=f"lr must be >= 0 and finite, got {lr}"):
        optimizer.step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("kind", [WeightDecayFreeSGD, AngularSGD])
@pytest.mark.parametrize(("name", "value"), [("lr", -1.0), ("momentum", 1.0), ("weight_decay", float("nan"))])
def test_numbers_of_an_ordinary_group_that_leave_their_range_are_refused_before_a_weight_moves(
    kind: Any, name: str, value: float
) -> None:
    """Angular SGD had turned the others by then, or had taken them: weight decay of nan made every weight nan."""
    turned, plain = nn.Parameter(torch.eye(3, 4)), weight(3, 4)
    ordinary = {"params": [plain], "angular": False, "weight_decay_free": False}
    optimizer = kind([{"params": [turned]}, ordinary], lr=0.1, momentum=0.5, weight_decay=0.01)
    for w in (turned, plain):
        w.grad = torch.eye(3, 4).roll(1, 1)
    optimizer.param_groups[1][name] = value
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        optimizer.step()
    assert torch.equal(turned, torch.eye(3, 4))
    assert plain.eq(1).all()


def test_a_wrapper_that_refuses_a_state_keeps_its_own() -> None:
    def angular(*shapes: tuple[int, int]) -> tuple[Angular, list[nn.Parameter]]:
        weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        return Angular(SGD([{"params": [w]} for w in weights], lr=0.1, weight_decay=0.01)), weights

    saved, (first, _) = angular((3, 4), (3, 4))
    optimizer, (weight,) = angular((3, 4))
    for stepping, w in ((saved, first), (optimizer, weight)):
        w.grad = torch.randn(3, 4)
        stepping.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(saved.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (ReduceLROnPlateau, TypeError, "needs a metric at each step"),
        (lambda o: OneCycleLR(o, 0.2, total_steps=9), ValueError, "OneCycleLR [a-z]+ the momentum"),
        (lambda o: CyclicLR(o, 0.1, 0.2), ValueError, "CyclicLR [a-z]+ the momentum"),
    ],
    ids=["plateau", "one cycle", "cyclic"],
)
def test_a_schedule_of_more_than_the_learning_rate(
    source: Callable[[torch.optim.Optimizer], Any], error: type[Exception], message: str
) -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    optimizer, before = SGD([parameter], lr=0.1, momentum=0.9), parameter.detach().clone()
    with pytest.raises(error, match=message):
        NormSchedule(optimizer, source, {"w": parameter})
    assert torch.equal(parameter, before)
    NormSchedule(optimizer, lambda o: OneCycleLR(o, 0.2, total_steps=9, cycle_momentum=False), {"w": parameter})
