"""Weight-decay-free optimizers through random sequences of what users do, after each compared with torch's optimizer.

Both runs see one loss, which knows only the directions of the first weights. Then w = α·u holds at every moment, w the
weight here and u torch's, and the other parameters are equal.
"""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from normmatters.optim import WeightDecayFreeAdamW, WeightDecayFreeSGD, _base

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "SGD": (WeightDecayFreeSGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.02}),
    "AdamW": (WeightDecayFreeAdamW, torch.optim.AdamW, {"betas": (0.8, 0.9), "weight_decay": 0.5}),
}


class Run:
    """Parameters with an optimizer: ours, or torch's with weight decay."""

    def __init__(self, ours: bool, kind: str, seed: int) -> None:
        self.ours, self.kind = ours, kind
        generator = torch.Generator().manual_seed(seed)
        shapes = [(3, 4), (2, 3, 2), (4,), (2, 2)]
        self.params = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]
        self.optimizer = self.build()

    def build(self) -> torch.optim.Optimizer:
        free, plain, later = self.params[:2], self.params[2:4], self.params[4:]
        mine, theirs, options = KINDS[self.kind]
        groups: list[dict[str, Any]] = [{"params": free}, {"params": plain}, *({"params": [p]} for p in later)]
        if self.ours:
            groups[1]["weight_decay_free"] = False
        return (mine if self.ours else theirs)(groups, lr=0.05, **options)  # type: ignore[no-any-return]

    def backward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        loss = torch.zeros((), dtype=torch.float64)
        for i, p in enumerate(self.params):
            x = p if i in (2, 3) else p / p.norm()
            direction = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            loss = loss + torch.tanh((x * direction).sum() + 0.1 * loss)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def weights(self) -> list[Tensor]:
        """Those of the run with weight decay: w/α."""
        alphas = [float(self.optimizer.state.get(p, {}).get("alpha", 1.0)) for p in self.params]
        return [p.detach() / alpha for p, alpha in zip(self.params, alphas)]

    def set(self, group: int, **values: Any) -> None:
        self.optimizer.param_groups[group].update(values)

    def add_group(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.params.append(nn.Parameter(torch.randn(2, 3, generator=generator, dtype=torch.float64)))
        self.optimizer.add_param_group({"params": self.params[-1:]})

    def reload(self, fresh: bool) -> None:
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        self.optimizer = self.build() if fresh else self.optimizer
        self.optimizer.load_state_dict(torch.load(file, weights_only=True))


class Sequence:
    """The two runs side by side; every method that begins with `do_` is something a user does."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random, self.kind = random.Random(seed), kind
        self.ours, self.theirs = self.runs = [Run(True, kind, seed), Run(False, kind, seed)]
        self.captured = False

    def do_steps(self) -> None:
        idle = self.random.randrange(6)  # more often than not a number that is no parameter's
        for _ in range(self.random.randrange(1, 4)):
            seed = self.random.random()
            for run in self.runs:
                run.optimizer.zero_grad(set_to_none=seed < 0.5)
                run.backward(int(seed * 1e9))
                if not self.captured and idle < len(run.params):
                    run.params[idle].grad = None
                run.optimizer.step()

    def do_a_closure(self) -> None:
        seed = self.random.randrange(10**6)
        for run in self.runs:
            run.optimizer.zero_grad()
            run.optimizer.step(lambda run=run: run.backward(seed))

    def do_a_scheduler(self) -> None:
        schedulers = []
        for run in self.runs:
            for group in run.optimizer.param_groups:
                group.pop("initial_lr", None)
            schedulers.append(StepLR(run.optimizer, 1, 0.7))
        self.do_steps()
        for scheduler in schedulers:
            scheduler.step()

    def do_settings(self) -> None:
        group = self.random.randrange(len(self.ours.optimizer.param_groups))
        values: dict[str, Any] = {
            "lr": self.random.choice([0.0, 0.01, 0.05, torch.tensor([0.03], dtype=torch.float64)]),
            "weight_decay": KINDS[self.kind][2]["weight_decay"] * self.random.choice([0.0, 0.5, 2.0]),
            "maximize": self.random.random() < 0.5,
        }
        if self.kind == "SGD":
            values["momentum"] = self.random.choice([0.0, 0.3, 0.5, 0.9])
            values["nesterov"] = values["momentum"] > 0 and self.random.random() < 0.3
        else:
            values["betas"] = self.random.choice([(0.9, 0.9), (0.0, 0.99)])
        for run in self.runs:
            run.set(group, **copy.deepcopy(values))

    def do_another_implementation(self) -> None:
        self.captured = self.random.random() < 0.3
        for i in range(len(self.ours.optimizer.param_groups)):
            self.ours.set(i, foreach=self.random.choice([None, True, False]), capturable=self.captured)

    def do_a_new_group(self) -> None:
        if len(self.ours.params) < 6:
            seed = self.random.randrange(10**6)
            for run in self.runs:
                run.add_group(seed)

    def do_a_reload(self) -> None:
        fresh = self.random.random() < 0.5
        for run in self.runs:
            run.reload(fresh)

    def do_a_copy(self) -> None:
        how = self.random.choice([copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
        self.ours, self.theirs = self.runs = [how(run) for run in self.runs]

    def error(self) -> float:
        pairs = zip(self.ours.weights(), self.theirs.weights())
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize("kind", list(KINDS))
def test_any_sequence_has_the_weights_of_weight_decay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    monkeypatch.setattr(_base, "RESCALE_AT", 1.05)
    alphas = []
    for seed in range(14):
        sequence, done = Sequence(kind, seed), list[str]()
        actions = [name for name in dir(sequence) if name.startswith("do_")]
        captured = False
        for _ in range(20):
            done.append(sequence.random.choice([*actions, "do_steps"]))
            getattr(sequence, done[-1])()
            captured |= sequence.captured
            # AdamW counts captured steps, and what comes of them, in float32.
            assert sequence.error() < (1e-4 if captured and kind == "AdamW" else 1e-9), (seed, done)
        alphas += [state["alpha"] for state in sequence.ours.optimizer.state.values() if "alpha" in state]
    assert 1.03 < max(alphas) < 1.05  # there was something to do, and to take back
