"""The backward pass where x̂ is hard to know: tiny weights, lean codes, an output that hides it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.batch_norm_cases import (
    DEVICE,
    KINDS,
    check,
    made,
)

ODD, EVEN = (9, 3, 2, 3), (8, 4, 2, 4)  # rows and columns that do not, or do, fill the tiles of ``small_tiles``
MEMORY = [*((kind, "exact") for kind in KINDS), ("l1", "lean")]


# What surrounds a batch norm, as (activation, residual): codes depend on it for L1, for the other kinds two will do.
AROUND = [(None, False), ("relu", True), ("relu", False), (None, True)]


@pytest.mark.parametrize(("layout", "act"), [("contiguous", None), ("channels_last", "relu")])
@pytest.mark.parametrize(("kind", "memory"), [item for item in MEMORY if item[0] != "mean"])
def test_zero_negative_and_tiny_weights(kind, memory, layout, act, small_tiles):
    """γ = 0 (zero-init residual branches) still has a gradient, and exact memory finds it to the last digit."""
    x = made((9, 7, 2, 3), layout)
    weight = torch.tensor([0.0, -0.0, -1.5, 1e-9, -1e-6, 1e-3, -1e-30], device=DEVICE)
    bias = torch.tensor([0.7, 0.3, 0.1, 1.0, 2.0, 0.5, 0.0], device=DEVICE)
    ours = check(x, kind, weight=weight, bias=bias, act=act, memory=memory)
    assert (ours.dweight.abs() > 0).all() or act == "relu"


@pytest.mark.parametrize("weight", [0.0, 1e-4, -0.01, 0.5])
def test_lean_in_half_precision_knows_when_the_output_hides_the_input(weight):
    """β = 3 leaves few digits of γ·x̂ in a float16: down to those, x̂ is (z−β)/γ, and below it is ±E|x̂|."""
    x = made((16, 3, 4, 4), dtype=torch.float16)
    values = {"weight": torch.full((3,), weight, device=DEVICE), "bias": torch.full((3,), 3.0, device=DEVICE)}
    check(x, "l1", **values, act="relu", memory="lean")


@pytest.mark.parametrize("act", [None, "relu"])
def test_lean_codes_are_right_on_average(act):
    """A gradient of one sign adds up any bias of the codes."""
    x = made((16, 3, 4, 4))
    g = 1 + 0.1 * torch.randn_like(x)
    parameters = {"weight": torch.ones(3, device=DEVICE), "bias": torch.full((3,), 0.5, device=DEVICE)}
    check(x, "l1", **parameters, residual=torch.randn_like(x), act=act, memory="lean", g=g)
