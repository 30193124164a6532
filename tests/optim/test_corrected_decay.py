"""CorrectedWeightDecay: the wrapped optimizer's steps with λ·η_t/η_max, and norms that a schedule does not move."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from normmatters.optim import Angular, CorrectedWeightDecay

KINDS = [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})]


def weights() -> tuple[nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    normalized, other = (nn.Parameter(torch.randn(4, 5, generator=generator, dtype=torch.float64)) for _ in range(2))
    return normalized, other


def draw_gradients(parameters: tuple[nn.Parameter, ...], t: int) -> None:
    generator = torch.Generator().manual_seed(100 + t)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def groups(normalized: Tensor, other: Tensor) -> list[dict[str, Any]]:
    return [{"params": [normalized]}, {"params": [other], "corrected": False}]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_steps_are_the_equations(kind: Any, options: dict[str, Any]) -> None:
    """Beside an optimizer whose weight decay is set by hand before every step."""
    ours, theirs = weights(), weights()
    wrapped = CorrectedWeightDecay(kind(groups(*ours), lr=0.1, weight_decay=0.2, **options))
    plain = kind([{"params": [p]} for p in theirs], lr=0.1, weight_decay=0.2, **options)
    schedules = [CosineAnnealingLR(optimizer, 6) for optimizer in (wrapped, plain)]
    for t in range(6):
        draw_gradients(ours, t)
        draw_gradients(theirs, t)
        plain.param_groups[0]["weight_decay"] = 0.2 * plain.param_groups[0]["lr"] / 0.1
        for optimizer, schedule in zip((wrapped, plain), schedules):
            optimizer.step()
            schedule.step()
        assert [group["weight_decay"] for group in wrapped.param_groups] == [0.2, 0.2]  # λ itself stays
        for one, other in zip(ours, theirs):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("corrected", [True, False])
def test_a_norm_in_equilibrium_stays_when_the_learning_rate_falls(
    kind: Any, options: dict[str, Any], corrected: bool
) -> None:
    """Scale-invariant noise: ‖w‖ falls with the learning rate, unless weight decay falls with it."""
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.randn(400, generator=generator, dtype=torch.float64))
    lr, decay = (0.01, 0.5) if kind is torch.optim.SGD else (0.02, 0.5)
    optimizer: torch.optim.Optimizer = kind([w], lr=lr, weight_decay=decay, **options)
    if corrected:
        optimizer = CorrectedWeightDecay(optimizer)
    schedule = LambdaLR(optimizer, lambda t: 1.0 if t < 600 else 0.1)
    norms = []
    for _ in range(3000):
        g = torch.randn(400, generator=generator, dtype=torch.float64)
        direction = w.detach() / w.detach().norm()
        w.grad = (g - (g @ direction) * direction) / w.detach().norm()  # orthogonal, and as 1/‖w‖
        optimizer.step()
        schedule.step()
        norms.append(w.detach().norm().item())
    ratio = norms[-1] / (sum(norms[500:600]) / 100)
    if corrected:
        assert 0.9 < ratio < 1.1
    else:
        assert ratio < 0.7


def test_the_largest_learning_rate() -> None:
    normalized, other = weights()
    assert (
        CorrectedWeightDecay(torch.optim.SGD([normalized], lr=0.1, weight_decay=0.1)).param_groups[0]["max_lr"] == 0.1
    )
    # From a scheduler that was made before, whose learning rate starts lower.
    sgd = torch.optim.SGD([normalized], lr=0.1, weight_decay=0.1)
    LambdaLR(sgd, lambda t: 0.01)
    assert CorrectedWeightDecay(sgd).param_groups[0]["max_lr"] == 0.1
    sgd = torch.optim.SGD([normalized], lr=0.1, momentum=0.9, weight_decay=0.1)
    OneCycleLR(sgd, max_lr=0.4, total_steps=10)
    assert CorrectedWeightDecay(sgd).param_groups[0]["max_lr"] == 0.4
    optimizer = CorrectedWeightDecay(torch.optim.SGD([normalized], lr=0.1, weight_decay=0.1), max_lr=0.2)
    assert optimizer.param_groups[0]["max_lr"] == 0.2
    optimizer.param_groups[0]["lr"] = 0.3
    before = normalized.detach().clone()
    draw_gradients((normalized, other), 0)
    with pytest.raises(ValueError, match="max_lr"):
        optimizer.step()
    assert torch.equal(normalized, before)


def test_state_copies_and_added_groups() -> None:
    runs = []
    for interrupted in (False, True):
        parameters = weights()
        optimizer = CorrectedWeightDecay(torch.optim.AdamW(groups(*parameters), lr=0.1, weight_decay=0.2))
        for t in range(6):
            optimizer.param_groups[0]["lr"] = 0.1 / (t + 1)
            if interrupted and t == 3:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = CorrectedWeightDecay(torch.optim.AdamW(groups(*parameters), lr=0.5, weight_decay=0.9))
                optimizer.load_state_dict(state)
            draw_gradients(parameters, t)
            optimizer.step()
        runs.append(parameters)
    for one, other in zip(*runs):
        assert torch.equal(one, other)
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["max_lr"] == 0.1
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    assert optimizer.param_groups[-1]["corrected"]
    with pytest.raises(ValueError, match="weight_decay"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "weight_decay": 0.0})
    assert len(optimizer.param_groups) == 3


def test_an_error_of_the_wrapped_optimizer_leaves_its_weight_decay() -> None:
    (normalized, _) = weights()
    optimizer = CorrectedWeightDecay(torch.optim.SGD([normalized], lr=0.1, weight_decay=0.2), max_lr=1.0)

    def closure() -> float:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["weight_decay"] == 0.2


def test_wrong_arguments() -> None:
    (normalized, _) = weights()
    with pytest.raises(TypeError, match="optimizer"):
        CorrectedWeightDecay([normalized])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Angular applies no weight decay"):
        CorrectedWeightDecay(Angular(torch.optim.AdamW([normalized], lr=0.1, weight_decay=0.1)))
    sgd = torch.optim.SGD([normalized], lr=0.1)
    with pytest.raises(ValueError, match="group 0 needs a weight_decay"):
        CorrectedWeightDecay(sgd)
    assert "corrected" not in sgd.param_groups[0]
    with pytest.raises(ValueError, match="max_lr"):
        CorrectedWeightDecay(torch.optim.SGD([normalized], lr=0.1, weight_decay=0.1), max_lr=-1.0)
    with pytest.raises(ValueError, match="max_lr of group 0 must be positive"):
        CorrectedWeightDecay(torch.optim.SGD([normalized], lr=0.0, weight_decay=0.1))
