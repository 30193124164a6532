"""Settings for experiments that ask why: the scale of the first weights, learning rates and decays of their own, a
control that takes every convolution for scale invariant."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from normmatters.lab.config import config_hash
from normmatters.lab.data import load_data
from normmatters.lab.models import build_model
from normmatters.lab.regimes import Regime, build_regime, find_invariant
from normmatters.lab.run import train
from normmatters.optim.corrected_decay import CorrectedWeightDecay
from support.lab_runs import rows, small_run


def float64_steps(
    scale: float, norm: str = "l2", nesterov: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of twelve steps in float64, and the weights after them: weights × c, lr × c², decay ÷ c²."""
    optim = {"invariant_lr": 0.1 * scale**2, "weight_decay": 2e-2 / scale**2, "nesterov": nesterov}
    config = small_run(model={"norm": norm, "init_scale": scale}, optim={**optim, "milestones": [2]})
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # of the first weights too
    try:
        model = build_model(config.model, load_data(config.data))
    finally:
        torch.set_default_dtype(torch.float32)
    x, y = torch.randn(8, 1, 8, 8, dtype=torch.float64), torch.randint(10, (8,))
    regime = build_regime(config, model, 4, find_invariant(config, model, x))
    losses = []
    for step in range(12):
        regime.before_step(step)
        regime.optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        regime.optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("norm", ["native", "l2", "l1"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_initial_norm_and_learning_rate_are_one_setting(norm: str, nesterov: bool) -> None:
    """w × c, lr × c² and decay ÷ c² train the same network: momentum SGD's b goes as 1/c, and lr·b as c."""
    losses, weights = float64_steps(1.0, norm, nesterov)
    for c in (0.7, 3.0):
        others, scaled = float64_steps(c, norm, nesterov)
        assert others == pytest.approx(losses, rel=1e-10)
        for name, w in weights.items():
            factor = c if name.startswith("features") and w.ndim == 4 else 1.0
            factor = {"running_mean": c, "running_var": c**2}.get(name.rpartition(".")[2], factor)
            torch.testing.assert_close(scaled[name].double(), factor * w.double(), rtol=1e-9, atol=1e-12, msg=name)
    assert losses[-1] < 0.9 * losses[0]
    for changed in ({"init_scale": 3.0}, {}):  # either alone is another run
        other = small_run(model={"norm": norm, **changed}, optim={"invariant_lr": 0.1 if changed else 0.9})
        assert config_hash(other) != config_hash(small_run(model={"norm": norm}))


def test_the_control_is_exact_to_the_bit_for_powers_of_two(tmp_path: Path) -> None:
    """Then float32 rounds alike in both, and a whole run has the same losses and accuracies."""
    kept = ("train_loss", "train_acc", "val_loss", "val_acc")
    found = []
    for c in (1.0, 2.0, 0.5):
        optim = {"invariant_lr": 0.1 * c**2, "weight_decay": 5e-3 / c**2}
        config = small_run(model={"norm": "l2", "init_scale": c}, optim=optim)
        train(config, tmp_path / str(c))
        found.append([[row[key] for key in kept] for row in rows(tmp_path / str(c))])
    assert found[1] == found[0]
    assert found[2] == found[0]


def regime_of(**sections: Any) -> Regime:
    config = small_run(**sections)
    torch.manual_seed(0)
    data = load_data(config.data)
    model = build_model(config.model, data)
    return build_regime(config, model, 6, find_invariant(config, model, torch.randn(8, 1, 8, 8)))


def group_of(regime: Regime, name: str) -> dict[str, Any]:
    return next(group for group in regime.optimizer.param_groups if name in group["param_names"])


def test_a_learning_rate_of_its_own_for_weights_before_a_norm() -> None:
    regime = regime_of(optim={"invariant_lr": 0.4})
    assert group_of(regime, "features.0.weight") is not group_of(regime, "classifier.weight")
    for step, factor in ((0, 1.0), (12, 0.1)):
        regime.before_step(step)
        assert group_of(regime, "features.0.weight")["lr"] == pytest.approx(0.4 * factor)
        for other in ("classifier.weight", "features.1.norm.weight"):
            assert group_of(regime, other)["lr"] == pytest.approx(0.1 * factor)


def test_decay_that_follows_the_learning_rate() -> None:
    """The library's own optimizer: an invariant weight shrinks by lr · λ · lr/lr_max, the classifier by lr · its λ."""
    regime = regime_of(optim={"mode": "wd_follows_lr", "weight_decay": 5e-3, "momentum": 0.0})
    assert isinstance(regime.optimizer, CorrectedWeightDecay)
    groups = {name: group_of(regime, name) for name in ("features.0.weight", "classifier.weight")}
    for step, factor in ((0, 1.0), (12, 0.1)):
        regime.before_step(step)
        for name, decay in (("features.0.weight", 5e-3 * factor), ("classifier.weight", 5e-4)):
            group = groups[name]
            assert group["lr"] == pytest.approx(0.1 * factor)
            weight = group["params"][group["param_names"].index(name)]
            before = weight.detach().double().norm()
            weight.grad = torch.zeros_like(weight)
            regime.optimizer.step()
            weight.grad = None
            shrunk = 1 - (weight.detach().double().norm() / before).item()
            assert shrunk == pytest.approx(0.1 * factor * decay, abs=2**-24)  # float32 rounds each weight by that


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_the_angle_falls_by_the_power_that_is_asked_for(power: float) -> None:
    regime = regime_of(optim={"mode": "angular", "weight_decay": 0.05, "angle_power": power})
    weight = group_of(regime, "features.0.weight")["params"][0]
    angles = []
    for step in (0, 12):
        regime.before_step(step)
        before = weight.detach().flatten(1).double().clone()
        for group in regime.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
        regime.optimizer.step()
        cosine = F.cosine_similarity(before, weight.detach().flatten(1).double())
        angles.append(cosine.clamp(max=1).acos().mean().item())
    assert angles[0] == pytest.approx(math.sqrt(2 * 0.1 * 0.05 / 1.9), rel=1e-3)
    assert angles[1] == pytest.approx(angles[0] * 0.1**power, rel=1e-2)


def test_a_control_may_take_every_convolution_for_invariant(tmp_path: Path) -> None:
    """Without a norm the modes run on weights that are not invariant, and then do not do what weight decay does."""
    plain = {"norm": "none"}
    with pytest.raises(ValueError, match="acts on scale-invariant weights, and small_cnn has none"):
        train(small_run(model=plain, optim={"mode": "wd_free"}), tmp_path / "refused")
    losses = {}
    for mode in ("wd_on", "wd_off", "wd_free", "corrected", "norm_schedule"):
        own: dict[str, Any] = {"mode": mode, "invariant": "all", "lr": 0.05, "weight_decay": 5e-2}
        if mode in ("corrected", "norm_schedule"):
            own |= {"reference": "wd_on"}
        train(small_run(model=plain, optim=own), tmp_path / mode / "seed0")
        losses[mode] = rows(tmp_path / mode / "seed0")[-1]["train_loss"]
    assert len(set(losses.values())) == len(losses)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"norm": "none", "init_scale": 2.0}}, "model.init_scale must be 1 where no norm undoes it, got 2.0"),
        ({"optim": {"invariant_lr": 0.1, "mode": "angular"}}, "optim.invariant_lr must be unset with mode angular"),
        ({"optim": {"angle_power": 1.0}}, "optim.angle_power must be 0.5 but with mode angular, sgd"),
        ({"optim": {"mode": "wd_follows_lr", "weight_decay": 0.0}}, "optim.weight_decay must be positive with mode"),
        ({"optim": {"invariant": "every"}}, "optim.invariant"),
    ],
)
def test_mistakes_are_told(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_run(**sections)
