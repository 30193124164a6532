"""How steps and state scale with a weight's length, for every optimizer whose powers are written down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from normmatters.optim import Angular
from normmatters.optim._base import exponents, innermost

FACTOR = 4.0
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"momentum": 0.9}),
    (optim.Adam, {"amsgrad": True, "eps": 0.0}),
    (optim.AdamW, {"weight_decay": 0.0, "eps": 0.0}),
    (optim.NAdam, {"eps": 0.0}),
    (optim.Adagrad, {"eps": 0.0}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9, "eps": 0.0}),
]


def run(kind: Any, options: dict[str, Any], factor: float, lr: float) -> tuple[Tensor, optim.Optimizer]:
    """Two steps of a weight that is ``factor`` times as long: behind a norm its gradients are as much smaller (F1)."""
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(factor * torch.randn(3, 5, generator=generator, dtype=torch.float64))
    before = w.detach().clone()
    optimizer = kind([w], lr=lr, **options)
    for _ in range(2):
        w.grad = torch.randn(3, 5, generator=generator, dtype=torch.float64) / factor
        optimizer.step()
    return (w.detach() - before) / factor, optimizer


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_state_scales_as_written(kind: Any, options: dict[str, Any]) -> None:
    (_, one), (_, other) = (run(kind, options, factor, 1e-3) for factor in (1.0, FACTOR))
    known = exponents(one)
    assert known is not None
    powers = known[1]
    (state,), (scaled,) = one.state.values(), other.state.values()
    found = {name for name, value in state.items() if torch.is_tensor(value) and name != "step"}
    assert found <= set(powers)
    for name in found:
        torch.testing.assert_close(scaled[name], state[name] * FACTOR ** powers[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_the_relative_step_scales_as_written(kind: Any, options: dict[str, Any]) -> None:
    (moved, one), (other, _) = (run(kind, options, factor, 1e-3) for factor in (1.0, FACTOR))
    known = exponents(one)
    assert known is not None
    torch.testing.assert_close(other, moved * FACTOR ** -known[0], rtol=1e-10, atol=0)


def test_wrappers_and_others() -> None:
    w = nn.Parameter(torch.ones(2, 3))
    inner = optim.AdamW([w], weight_decay=0.1)
    wrapped = Angular(inner)
    assert innermost(wrapped) is inner  # type: ignore[arg-type]
    assert exponents(wrapped) == (1.0, {"exp_avg": -1.0, "exp_avg_sq": -2.0, "max_exp_avg_sq": -2.0})  # type: ignore[arg-type]
    assert exponents(optim.Rprop([w])) is None
