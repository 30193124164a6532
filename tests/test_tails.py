"""Tails: the ratio of an L1 to an L2 norm's output, by hand and layer by layer; and that the model is unchanged."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import normmatters as nm
from normmatters.tails import measure_tails, tails


def test_known_distributions() -> None:
    quantiles = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    gaussian = torch.special.ndtri(quantiles)
    laplace = torch.where(quantiles < 0.5, (2 * quantiles).log(), -(2 - 2 * quantiles).log())
    uniform = quantiles
    c = math.sqrt(math.pi / 2)
    assert tails(gaussian, [0]).item() == pytest.approx(1, abs=1e-4)
    assert tails(laplace, [0]).item() == pytest.approx(math.sqrt(2) / c, abs=1e-3)  # σ = √2, mean|S| = 1
    assert tails(uniform, [0]).item() == pytest.approx(math.sqrt(1 / 12) / (c / 4))
    rare = torch.zeros(50, dtype=torch.float64)
    rare[0] = 3.0
    assert tails(rare, [0]).item() == pytest.approx(1 / (2 * c * math.sqrt(0.02 * 0.98)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_is_the_factor_between_the_outputs(dtype: torch.dtype) -> None:
    x = torch.randn(32, 3, 4, 4, dtype=torch.float64).pow(3).to(dtype)
    one, two = (nm.functional.lp_batch_norm(x.double(), training=True, p=p, eps=0.0) for p in (1, 2))
    ratio = tails(x, [0, 2, 3])
    assert ratio.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(one, two * ratio.double().view(1, 3, 1, 1), rtol=1e-5, atol=1e-8)
    assert ratio.min() > 1.3  # the cube of a Gaussian


class Net(nn.Module):
    """A batch norm that is called twice, layer norms of both layouts, a norm of nothing but zeros, one never called."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm2d(4)
        self.ours = nm.L1BatchNorm2d(4)
        self.first = nm.nn.L1LayerNorm2d(4)
        self.last = nn.LayerNorm((2, 3))
        self.instance = nn.InstanceNorm2d(4)
        self.dead = nn.BatchNorm2d(4)
        self.unused = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        y = self.batch(x) + self.batch(x.relu())
        y = self.last(input=self.instance(self.first(self.ours(y))))
        return self.drop(self.dead(0 * y)) * times  # type: ignore[no-any-return]


@pytest.mark.parametrize("by_name", [False, True])
def test_layer_by_layer(by_name: bool) -> None:
    model, x, times = Net().eval(), torch.randn(6, 4, 2, 3), torch.ones(1)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    found = measure_tails(model, {"x": x, "times": times} if by_name else (x, times))
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert {name: len(ratios) for name, ratios in found.items()} == {"batch": 8, "ours": 4, "first": 36, "last": 24}
    torch.testing.assert_close(found["batch"], torch.cat([tails(x, [0, 2, 3]), tails(x.relu(), [0, 2, 3])]))
    with torch.no_grad():
        y = nn.BatchNorm2d(4)(x) + nn.BatchNorm2d(4)(x.relu())  # by the batch's statistics, as in training
    torch.testing.assert_close(found["ours"], tails(y, [0, 2, 3]))


def test_a_dead_channel_is_left_out() -> None:
    x = torch.randn(8, 3)
    x[:, 1] = 5.0
    (ratios,) = measure_tails(nn.Sequential(nn.BatchNorm1d(3)), x).values()
    torch.testing.assert_close(ratios, tails(x, [0])[[0, 2]])


def test_channels_of_torchvisions_layer_norm_are_found() -> None:
    layer = pytest.importorskip("torchvision.models.convnext").LayerNorm2d(4)
    x = torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(measure_tails(nn.Sequential(layer), x)["0"], tails(x, [1]))
