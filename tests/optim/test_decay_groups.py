"""weight_decay_groups: who gets weight decay, from the structure alone and with the test for scale invariance."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import normmatters as nm
from normmatters.optim import weight_decay_groups


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nm.L1BatchNorm2d(4, act="relu"), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(27, 2)
    )


def names(group: dict[str, Any]) -> list[str]:
    return [name for name, _ in group["params"]]


def test_vectors_and_layer_norms_are_free() -> None:
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(5, 4),
            "linear": nn.Linear(4, 4),
            "ln": nm.L1LayerNorm((3, 4)),  # two dimensions, but no weight
            "rms": nn.RMSNorm((3, 4)),
            "bn": nn.BatchNorm1d(4),
            "frozen": nn.Linear(4, 4).requires_grad_(False),
        }
    )
    decayed, free = weight_decay_groups(model, 0.1)
    assert names(decayed) == ["embedding.weight", "linear.weight"]
    assert names(free) == ["linear.bias", "ln.weight", "ln.bias", "rms.weight", "bn.weight", "bn.bias"]
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert decayed["params"][1][1] is model["linear"].weight


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["bounded", "classic", "torch", "torch's hook"])
def test_directions_of_weight_norms_keep_their_decay_unless_the_user_drops_it(kind: str) -> None:
    layer = nn.Linear(3, 4, bias=False)
    if kind == "torch":
        parametrizations.weight_norm(layer)
    elif kind == "torch's hook":
        nn.utils.weight_norm(layer)
    else:
        nm.apply_weight_norm(layer, kind=kind)  # type: ignore[arg-type]
    (decayed,) = weight_decay_groups(layer, 0.1)
    assert {*names(decayed)} == {name for name, _ in layer.named_parameters()}
    groups = weight_decay_groups(layer, 0.1, decay_invariant=False)
    found = {group["weight_decay"]: names(group) for group in groups}
    v = "parametrizations.weight.original"
    expected = {"bounded": {0.0: [v]}, "torch's hook": {0.1: ["weight_g"], 0.0: ["weight_v"]}}
    assert found == expected.get(kind, {0.1: [f"{v}0"], 0.0: [f"{v}1"]})


def test_weights_followed_by_a_norm_keep_their_decay_unless_the_user_drops_it() -> None:
    """Without it their step size would shrink for ever: the paper's "WD off"."""
    model, x = convnet(), torch.randn(8, 2, 6, 6)
    decayed, _ = weight_decay_groups(model, 0.1)
    assert names(decayed) == ["0.weight", "2.weight", "4.weight"]
    decayed, free = weight_decay_groups(model, 0.1, x, decay_invariant=False, probes=2)
    assert names(decayed) == ["2.weight", "4.weight"]
    assert names(free) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.bias", "4.bias"]
    compiled = torch.compile(model, backend="eager")  # wrapped, but never called
    assert names(weight_decay_groups(compiled, 0.1, x, decay_invariant=False)[0]) == ["2.weight", "4.weight"]


def test_a_step_shrinks_the_decayed_alone() -> None:
    model = convnet()
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.5), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if name in ("0.weight", "2.weight", "4.weight") else 1.0
        torch.testing.assert_close(parameter, factor * before[name])


def test_a_tied_parameter_is_in_one_group_once() -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    (decayed,) = weight_decay_groups(nn.ModuleList([embedding, head]), 0.1)
    assert names(decayed) == ["0.weight"]


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        weight_decay_groups([], 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight_decay must be >= 0 and finite, got -1"):
        weight_decay_groups(convnet(), -1)
    with pytest.raises(ValueError, match="probes"):
        weight_decay_groups(convnet(), 0.1, probes=2)
    with pytest.raises(ValueError, match=r"example_input.*decay_invariant"):
        weight_decay_groups(convnet(), 0.1, torch.randn(8, 2, 6, 6))
    with pytest.raises(ValueError, match=r"probes.*example_input"):
        weight_decay_groups(convnet(), 0.1, decay_invariant=False, probes=2)
