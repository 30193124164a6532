"""The statistics of a batch: the pilot and what it misses, and how the running ones move."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from normmatters.functional import lp_batch_norm
from normmatters.kernels.triton.batch_norm import statistics
from support import called, tolerances
from support.batch_norm_cases import (
    DEVICE,
    EPS,
    KINDS,
    LAYOUTS,
    affine,
    by_channel,
    check,
    made,
    uses_pilot,
)

ODD, EVEN = (9, 3, 2, 3), (8, 4, 2, 4)  # rows and columns that do not, or do, fill the tiles of ``small_tiles``
MEMORY = [*((kind, "exact") for kind in KINDS), ("l1", "lean")]


# What surrounds a batch norm, as (activation, residual): codes depend on it for L1, for the other kinds two will do.
AROUND = [(None, False), ("relu", True), ("relu", False), (None, True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "memory"), [("l1", "exact"), ("l1", "lean"), ("l2", "exact")])
def test_pilot(kind, memory, layout, monkeypatch, fresh_plans, poisoned_empty):
    """Some channels are near enough to their pilot, others are summed again."""
    monkeypatch.setattr(statistics, "PILOT_SAMPLES", 256)
    x = made((16, 6, 8, 10), layout)
    assert uses_pilot(x)
    check(x, kind, **affine(kind, 6), act="relu", memory=memory)


def test_pilot_accounts_for_a_gaussians_density(monkeypatch, fresh_plans):
    """Without its second-order term the scale would be 1e-3 too small in the worst of these channels."""
    monkeypatch.setattr(statistics, "PILOT_SAMPLES", 512)
    x = made((12, 32, 32, 32), "channels_last")
    mean, var = torch.zeros(2, 32, device=DEVICE).unbind()
    with torch.no_grad():
        called.batch_norm(x, mean, var, None, None, True, 1.0, EPS, p=1)
    n = 12 * 32 * 32
    values = by_channel(x)
    scale = (values - values.mean(1, keepdim=True)).abs().mean(1) * math.sqrt(math.pi / 2)
    error = (var.double() * (n - 1) / n).sqrt() / scale - 1
    assert uses_pilot(x)
    assert error.abs().max() <= tolerances.pilot(n)
    assert error.mean().abs() <= tolerances.pilot(n) / 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("full", [0.5, 0.05])
def test_pilot_where_values_crowd_at_the_mean(full, layout, monkeypatch, fresh_plans):
    """Sparse data: by first order alone the scale would be up to a tenth too small."""
    x = made((8, 8, 40, 40), layout)
    x *= torch.rand_like(x) < full
    mean, var = torch.zeros(2, 8, device=DEVICE).unbind()
    with torch.no_grad():
        called.batch_norm(x, mean, var, None, None, True, 1.0, EPS, p=1)
    n = 8 * 40 * 40
    values = by_channel(x)
    scale = (values - values.mean(1, keepdim=True)).abs().mean(1) * math.sqrt(math.pi / 2)
    assert uses_pilot(x)
    assert ((var.double() * (n - 1) / n).sqrt() / scale - 1).abs().max() <= tolerances.PILOT_ANY


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["l1", "l2"])
def test_pilot_that_misses(kind, layout, monkeypatch, fresh_plans):
    """One huge number: the pilot is far off whether it is in the sample or not, and the scale is exact all the same."""
    monkeypatch.setattr(statistics, "PILOT_SAMPLES", 64)
    x = made((16, 6, 8, 10), layout)
    for channel, (image, row, column) in enumerate(
        [(0, 0, 0), (15, 7, 9), (3, 0, 4), (8, 5, 5), (12, 2, 1), (0, 3, 3)]
    ):
        x[image, channel, row, column] = (-1) ** channel * 1e5
    check(x, kind, **affine(kind, 6), pilot=0.0)


@pytest.mark.parametrize("kept", ["mean", "variance"])
@pytest.mark.parametrize("kind", ["l1", "range"])
def test_either_running_statistic_alone(kind, kept):
    """Each of them moves without the other, as in the equation."""
    x = made(ODD)
    p, k = KINDS[kind]
    both, one = ([torch.ones(3, device=DEVICE) for _ in range(2)] for _ in range(2))
    one[kept == "mean"] = None
    expected = called.batch_norm(x, *both, None, None, True, 0.5, EPS, p=p, k=k)
    y = called.batch_norm(x, *one, None, None, True, 0.5, EPS, p=p, k=k)
    assert torch.equal(y, expected)
    for mine, reference in zip(one, both):
        assert mine is None or torch.equal(mine, reference)
    torch.testing.assert_close(y.double(), lp_batch_norm(x.double(), training=True, eps=EPS, p=p), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["l1", "linf"])
def test_running_statistics_forget_what_they_were(kind, layout):
    """With a momentum of 1, as at the first batch of an average, nothing stays of the old ones, nor their rounding."""
    x = 1e-3 * made(ODD, layout)
    mean, var = torch.full((2, 3), 1e3, device=DEVICE).unbind()
    expected_mean, expected_var = torch.zeros(2, 3, dtype=torch.float64, device=DEVICE).unbind()
    called.batch_norm(x, mean, var, None, None, True, 1.0, EPS, p=KINDS[kind][0])
    lp_batch_norm(x.double(), expected_mean, expected_var, training=True, momentum=1.0, p=KINDS[kind][0])
    torch.testing.assert_close(mean.double(), expected_mean, rtol=0, atol=1e-3 * tolerances.statistic(x.dtype, 54))
    torch.testing.assert_close(var.double(), expected_var, rtol=2 * tolerances.statistic(x.dtype, 54), atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["l1", "linf"])
def test_an_infinite_running_variance_stays_infinite(kind, layout):
    """A half-precision buffer may have one, and it is none the next batch turns into NaN, in torch.nn neither."""
    x = made(ODD, layout, torch.float16)
    mean, var = torch.zeros(2, 3, dtype=torch.float16, device=DEVICE).unbind()
    var[1] = math.inf
    called.batch_norm(x, mean, var, None, None, True, 0.1, EPS, p=KINDS[kind][0])
    assert var.isinf().tolist() == [False, True, False]
    assert not var.isnan().any()
