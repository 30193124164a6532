"""The layer norm modules: torch.nn's state and arguments, the paper's equation (F10)."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from normmatters.functional import lp_layer_norm, lp_rms_norm
from normmatters.nn import L1LayerNorm, L1LayerNorm2d, L1RMSNorm, LpLayerNorm


@pytest.mark.parametrize(
    ("module", "p", "k"),
    [
        (L1LayerNorm((3, 4)), 1, None),
        (LpLayerNorm((3, 4), 1.5), 1.5, None),
        (LpLayerNorm((3, 4), math.inf, k=3), math.inf, 3),
        (LpLayerNorm((3, 4), "range"), "range", None),
    ],
)
def test_layer_norm_computes_its_equation(module: LpLayerNorm, p: float | str, k: int | None) -> None:
    module = copy.deepcopy(module).double()
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True)
    leaves, g = (x, module.weight, module.bias), torch.randn_like(x)
    y, expected = module(x), lp_layer_norm(x, (3, 4), module.weight, module.bias, p=p, k=k)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, g), torch.autograd.grad(expected, leaves, g))


def test_rms_norm_computes_its_equation() -> None:
    module = L1RMSNorm(6, constant=2.0).double()
    nn.init.normal_(module.weight)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(x)
    y, expected = module(x), lp_rms_norm(x, (6,), module.weight, constant=2.0)
    torch.testing.assert_close(y, expected)
    leaves = (x, module.weight)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, g), torch.autograd.grad(expected, leaves, g))


@pytest.mark.parametrize(
    ("mine", "theirs", "arguments"),
    [
        (L1LayerNorm, nn.LayerNorm, {}),
        (L1LayerNorm, nn.LayerNorm, {"bias": False}),
        (L1LayerNorm, nn.LayerNorm, {"elementwise_affine": False}),
        (L1RMSNorm, nn.RMSNorm, {}),
        (L1RMSNorm, nn.RMSNorm, {"elementwise_affine": False, "eps": 1e-3}),
    ],
)
def test_state_and_repr_are_torchs(mine: Any, theirs: Any, arguments: dict[str, Any]) -> None:
    a, b = mine((3, 4), **arguments), theirs((3, 4), **arguments)
    assert {k: v.shape for k, v in a.state_dict().items()} == {k: v.shape for k, v in b.state_dict().items()}
    a.load_state_dict(b.state_dict())
    b.load_state_dict(a.state_dict())
    assert repr(a) == repr(b).replace(theirs.__name__, mine.__name__)
    assert a.eps == b.eps


def test_argument_order_is_torchs() -> None:
    module = L1LayerNorm([5], 1e-3, True, False, "cpu", torch.float64)
    assert (module.normalized_shape, module.eps, module.bias) == ((5,), 1e-3, None)
    assert module.weight.dtype == torch.float64
    rms = L1RMSNorm(5, 1e-3, False, "cpu", torch.float64)
    assert (rms.normalized_shape, rms.eps, rms.weight) == ((5,), 1e-3, None)


def test_repr_shows_what_is_not_the_default() -> None:
    assert repr(LpLayerNorm(5, math.inf, k=2, constant="paper")).endswith("p=inf, k=2, constant='paper')")
    assert repr(L1RMSNorm(5, constant="none")).endswith("constant='none')")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: LpLayerNorm(5, 0.5), ValueError),
        (lambda: LpLayerNorm(5, "mean"), ValueError),
        (lambda: LpLayerNorm(5, k=2), ValueError),
        (lambda: L1LayerNorm(5, constant="gaussian"), ValueError),
        (lambda: L1RMSNorm(5, constant=None), TypeError),
        (lambda: L1LayerNorm(5, eps=-1e-5), ValueError),
        (lambda: L1RMSNorm(5, eps=math.nan), ValueError),
        (lambda: L1LayerNorm(5)(torch.randn(2, 4)), ValueError),
        (lambda: L1RMSNorm(5)(torch.ones(2, 5, dtype=torch.long)), TypeError),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (5, 3, 3)])
def test_channels_first_names_the_shape_that_came(shape: tuple[int, ...]) -> None:
    """Not the one it is permuted to."""
    with pytest.raises(ValueError, match=re.escape(f"expected 4D input, (N, 5, H, W), got shape {shape}")):
        L1LayerNorm2d(5)(torch.randn(shape))


def test_compiles_to_one_graph() -> None:
    model = nn.Sequential(L1LayerNorm(8), L1RMSNorm(8))
    x = torch.randn(3, 8, requires_grad=True)
    y, expected = torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x)
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(x)
    torch.testing.assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(expected, x, g))
