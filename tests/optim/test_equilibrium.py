from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from normmatters.optim.channels import angular_update, channel_norms
from normmatters.optim.equilibrium import (
    adamw_equilibrium_angle,
    adamw_equilibrium_norm,
    equilibrium_angle,
    equilibrium_norm,
    filter_sums,
    norm_trajectory,
    predict_equilibrium,
    steps_to_equilibrium,
)
from normmatters.optim.recipe import Recipe, explain, render
from normmatters.optim.weight_decay_free import next_alpha_kappa
from support.digits import backward, digit_net, direction_error, split, train


def batches(count: int, size: int = 16, seed: int = 9) -> Tensor:
    return torch.randint(1797, (count, size), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_norm_and_angle_of_a_real_net_within_five_percent(momentum):
    """Digits, a convnet, SGD with weight decay: every channel's norm, and the angle per step, in the second half."""
    lr, weight_decay = (0.1, 5e-3) if momentum else (0.3, 1e-2)
    net = digit_net()
    invariant, rest = split(net)
    optimizer = torch.optim.SGD(
        [{"params": invariant}, {"params": rest, "lr": 0.05, "weight_decay": 5e-4}],
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
    )
    fourth, gradient2, angle2 = ([torch.zeros(6).double() for _ in invariant] for _ in range(3))
    for t, batch in enumerate(batches(2400)):
        backward(net, batch)
        before = [p.detach().clone() for p in invariant]
        optimizer.step()
        if t < 1200:
            continue
        for i, (b, p) in enumerate(zip(before, invariant)):
            fourth[i] += channel_norms(b) ** 4 / 1200
            gradient2[i] += (channel_norms(b) * channel_norms(p.grad)) ** 2 / 1200
            angle2[i] += angular_update(b, p) ** 2 / 1200
    for f, g, a in zip(fourth, gradient2, angle2):
        norms = equilibrium_norm(g.sqrt(), lr, weight_decay, momentum)
        torch.testing.assert_close(f**0.25, norms, rtol=0.05, atol=0)
        angle = equilibrium_angle(lr, weight_decay, momentum)
        torch.testing.assert_close(a.sqrt(), torch.full_like(a, angle), rtol=0.05, atol=0)

    # And from a few batches at one moment, by the function a user calls.
    gradients = []
    for batch in batches(60, seed=8):
        backward(net, batch)
        gradients.append({name: p.grad.clone() for name, p in net.named_parameters()})
    convs = {"0.weight": net[0].weight, "3.weight": net[3].weight}
    found = predict_equilibrium(convs, lr, weight_decay, momentum, gradients=gradients)
    for equilibrium, f in zip(found.values(), fourth):
        # One moment is not the average over a run: gradients wander by tens of percent, norms by the root of that.
        ratio = equilibrium.equilibrium_norm / f**0.25
        assert 0.75 < ratio.log().mean().exp() < 1.33
        assert equilibrium.norm.shape == equilibrium.unit_gradient.shape == (6,)


def random_walk(make, start: float, steps: int = 2500, unit_gradient: float = 3.0) -> tuple[Tensor, ...]:
    """(‖w‖², ‖w‖⁴, θ²) averaged over rows and the second half, for gradients that are pure noise."""
    w = nn.Parameter(start / 8 * torch.randn(100, 64, dtype=torch.float64))
    optimizer = make([w])
    sums = torch.zeros(3, dtype=torch.float64)
    for t in range(steps):
        norm = w.detach().norm(dim=1, keepdim=True)
        unit, g = w.detach() / norm, torch.randn(100, 64, dtype=torch.float64)
        g -= (g * unit).sum(1, keepdim=True) * unit
        w.grad = unit_gradient * g / g.norm(dim=1, keepdim=True) / norm
        before = w.detach().clone()
        optimizer.step()
        if t >= steps // 2:
            n2 = before.square().sum(1)
            sums += torch.stack([n2.mean(), n2.square().mean(), angular_update(before, w).square().mean()])
    return tuple(sums / (steps - steps // 2))


def test_formulas_for_nesterov_and_adamw_where_gradients_are_noise():
    kwargs = {"lr": 0.1, "weight_decay": 0.005, "momentum": 0.9, "nesterov": True}
    _, fourth, angle2 = random_walk(lambda p: torch.optim.SGD(p, **kwargs), 5.0)
    assert fourth.item() ** 0.25 == pytest.approx(equilibrium_norm(torch.tensor(3.0), **kwargs).item(), rel=0.01)
    assert angle2.item() ** 0.5 == pytest.approx(equilibrium_angle(**kwargs), rel=0.01)
    assert equilibrium_angle(**kwargs) > 1.1 * equilibrium_angle(0.1, 0.005, 0.9)  # so the test can tell them apart

    second, _, angle2 = random_walk(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, betas=(0.9, 0.99)), 1.5)
    assert second.item() ** 0.5 == pytest.approx(adamw_equilibrium_norm(64, 0.01, 0.1), rel=0.02)
    assert angle2.item() ** 0.5 == pytest.approx(adamw_equilibrium_angle(0.01, 0.1, 0.9), rel=0.02)


def test_trajectory_follows_a_run_into_equilibrium_and_through_a_drop():
    lrs = [0.1] * 400 + [0.01] * 400
    norms, angles = norm_trajectory(lrs, 0.005, 0.9, unit_gradient=3.0, norm=4.0)
    w = nn.Parameter(torch.randn(200, 64, dtype=torch.float64))
    w.data *= 4 / w.data.norm(dim=1, keepdim=True)
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.005)
    for t, lr in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = lr
        norm = w.detach().norm(dim=1, keepdim=True)
        if t in (40, 200, 399, 450, 799):  # a drop takes momentum's few steps to come through: 450, not 401
            assert norm.pow(4).mean().item() ** 0.25 == pytest.approx(norms[t], rel=0.03)
        unit, g = w.detach() / norm, torch.randn(200, 64, dtype=torch.float64)
        g -= (g * unit).sum(1, keepdim=True) * unit
        w.grad = 3 * g / g.norm(dim=1, keepdim=True) / norm
        before = w.detach().clone()
        optimizer.step()
        if t in (200, 399, 450, 799):
            assert angular_update(before, w).square().mean().item() ** 0.5 == pytest.approx(angles[t], rel=0.05)
    assert angles[400] / angles[399] == pytest.approx(0.1, rel=1e-3)  # first with lr
    assert angles[-1] / angles[400] == pytest.approx(1.4, abs=0.05)  # then back towards √0.1
    assert norms[0] == 4.0


def test_time_constant_is_that_of_the_trajectory():
    steps = steps_to_equilibrium(0.1, 5e-4, 0.9)
    assert steps == pytest.approx(500)
    fourth = torch.tensor(norm_trajectory([0.1] * 501, 5e-4, 0.9, 2.0, 10.0)[0]) ** 4
    rest = equilibrium_norm(torch.tensor(2.0), 0.1, 5e-4, 0.9) ** 4
    assert ((fourth[500] - rest) / (fourth[0] - rest)).item() == pytest.approx(math.exp(-1), rel=1e-3)
    assert steps_to_equilibrium(0.1, 0.0) == math.inf
    grown = norm_trajectory([0.1, 0.1], 0.0, 0.0, 2.0, 1.0)[0]
    assert grown[1] ** 4 == pytest.approx(1 + 2 * 0.04)  # no decay: the norm only grows


def test_filter_sums_are_those_of_sgd():
    for momentum, nesterov in ((0.0, False), (0.7, False), (0.7, True)):
        w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([w], lr=1.0, momentum=momentum, nesterov=nesterov)
        updates = []
        for t in range(200):
            w.grad = torch.ones(1, dtype=torch.float64) * (t == 0)
            before = w.item()
            optimizer.step()
            updates.append(before - w.item())
        s, q = filter_sums(momentum, nesterov)
        assert sum(updates) == pytest.approx(s, rel=1e-12)
        assert sum(u * u for u in updates) == pytest.approx(q, rel=1e-12)


def test_translated_recipes_train_the_same_way():
    """Exactly, when the weights start as much longer as the recipe asks."""
    recipe = Recipe(0.1, 5e-3, 0.9)
    for other in (recipe.with_lr(0.4), recipe.with_weight_decay(1.25e-3)):
        assert (other.lr, other.weight_decay) == (pytest.approx(0.4), pytest.approx(1.25e-3))
        assert other.angle == pytest.approx(recipe.angle)
        nets = digit_net(), digit_net()
        for p in split(nets[1])[0]:
            p.data *= math.sqrt(other.lr / recipe.lr)
        for net, r in zip(nets, (recipe, other)):
            invariant, rest = split(net)
            groups = [{"params": invariant}, {"params": rest, "lr": 0.05, "weight_decay": 0.0}]
            train(net, torch.optim.SGD(groups, lr=r.lr, weight_decay=r.weight_decay, momentum=r.momentum), 100)
        assert direction_error(split(nets[0])[0], split(nets[1])[0]) < 1e-10
    back = Recipe.from_angle(recipe.angle, 0.1, 0.9)
    assert back.weight_decay == pytest.approx(5e-3)
    plain = recipe.with_momentum(0.0)
    assert plain.lr == pytest.approx(1.0)
    one = torch.tensor(1.0)
    assert equilibrium_norm(one, plain.lr, 5e-3) == pytest.approx(equilibrium_norm(one, 0.1, 5e-3, 0.9).item())
    assert steps_to_equilibrium(plain.lr, 5e-3) == pytest.approx(steps_to_equilibrium(0.1, 5e-3, 0.9))


def test_explain_says_the_numbers():
    rows = {row.quantity: row.value for row in explain(0.1, 5e-4, 0.9)}
    assert rows["angle per step"].startswith("0.007255 rad")
    assert rows["time to equilibrium"] == "500 steps"
    assert rows["memory"] == "2000 steps"
    assert rows["same: no weight decay"] == "AngularSGD(angle=0.007255, momentum=0.9)"
    assert rows["same: other weight decay"] == "lr 0.01, wd 0.005, momentum 0.9"
    assert rows["same speed: no momentum"] == "lr 1, wd 0.0005, momentum 0"
    alpha, kappa = 1.0, 0.0
    for _ in range(3000):
        last = alpha
        alpha, kappa = next_alpha_kappa(alpha, kappa, 0.1, 5e-4, 0.9)
    assert rows["same: growing lr"] == f"× {(alpha / last) ** 2:.6g} per step"
    assert {r.quantity: r.value for r in explain(0.1, 0.05, 0.9)}["same: growing lr"] == "none"
    assert {r.quantity: r.value for r in explain(1.0, 1.0)}["same: growing lr"] == "none"
    assert {r.quantity: r.value for r in explain(3.0, 1.0, 0.9)}["same: no weight decay"] == "none"  # > π/2: refused
    slow = {r.quantity: r.meaning for r in explain(1e-9, 1e-9, 0.9)}["same: growing lr"]
    assert slow.endswith(f"every {math.log(2) / (2 * 1e-18 / 0.1):.4g} steps")  # where 1 − ηλ rounds to 1
    assert explain(0.1, 0.0)[0].value == "no equilibrium"
    for momentum, limit in ((0.0, 2.0), (0.9, 3.8)):  # from where on SGD's own decay grows
        for weight_decay, grows in ((0.999 * limit, False), (1.001 * limit, True)):
            weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
            weight.grad = torch.zeros_like(weight)
            decay = torch.optim.SGD([weight], lr=1.0, momentum=momentum, weight_decay=weight_decay)
            for _ in range(1000):
                decay.step()
            assert (weight.abs().item() > 1) is grows
            assert (explain(1.0, weight_decay, momentum)[0].value == "no equilibrium") is grows
    lines = render(explain(0.1, 5e-4, 0.9)).splitlines()
    assert len({line.index(row.meaning) for line, row in zip(lines, explain(0.1, 5e-4, 0.9))}) == 1  # aligned


def test_errors_name_the_parameter():
    net = digit_net()
    with pytest.raises(ValueError, match=r"no gradient for '0.weight'"):
        predict_equilibrium({"0.weight": net[0].weight}, 0.1, 5e-4)
    with pytest.raises(ValueError, match=r"gradient of '0.weight' must have its shape \(6, 1, 3, 3\), got \(2,\)"):
        predict_equilibrium({"0.weight": net[0].weight}, 0.1, 5e-4, gradients=[{"0.weight": torch.ones(2)}])
    for given, kind in ((net, "Sequential"), (net.parameters(), "Parameter")):
        with pytest.raises(TypeError, match=rf"pairs, as model.named_parameters\(\) gives, got {kind}"):
            predict_equilibrium(given, 0.1, 5e-4)
    with pytest.raises(ValueError, match="at least one batch"):
        predict_equilibrium({"0.weight": net[0].weight}, 0.1, 5e-4, gradients=[])
    backward(net, torch.arange(16))
    with pytest.raises(ValueError, match="no equilibrium"):
        predict_equilibrium({"0.weight": net[0].weight}, 0.1, 0.0)
    for call in (
        lambda: equilibrium_angle(-0.1, 1e-4),
        lambda: equilibrium_angle(0.1, 1e-4, 1.0),
        lambda: adamw_equilibrium_angle(0.1, -1.0),
        lambda: explain(0.1, 1e-4, 1.5),
        lambda: Recipe(0.1, float("nan")),
        lambda: Recipe(0.1, 1e-4).with_lr(0.0),
        lambda: Recipe(0.1, 1e-4).with_weight_decay(0.0),
        lambda: Recipe.from_angle(0.1, 0.0),
        lambda: adamw_equilibrium_norm(10, 0.1, 0.0),
        lambda: norm_trajectory([0.1], 1e-4, 0.9, 1.0, norm=0.0),
        lambda: norm_trajectory([-0.1], 1e-4, 0.9, 1.0, norm=1.0),
    ):
        with pytest.raises(ValueError):
            call()
