"""The extreme elements of each channel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from normmatters.kernels.triton.batch_norm import select, statistics
from normmatters.kernels.triton.batch_norm.layout import Statistic, view_of
from normmatters.norm import RunningStats
from support.batch_norm_cases import (
    DEVICE,
    EPS,
    KINDS,
    LAYOUTS,
    affine,
    by_channel,
    check,
    fused,
    made,
    plain,
)

ODD, EVEN = (9, 3, 2, 3), (8, 4, 2, 4)  # rows and columns that do not, or do, fill the tiles of ``small_tiles``
MEMORY = [*((kind, "exact") for kind in KINDS), ("l1", "lean")]


# What surrounds a batch norm, as (activation, residual): codes depend on it for L1, for the other kinds two will do.
AROUND = [(None, False), ("relu", True), ("relu", False), (None, True)]


@pytest.mark.parametrize("kind", ["linf", "topk", "range"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_groups_than_the_selection_holds(kind, layout, small_tiles, poisoned_empty, monkeypatch):
    """Then fewer programs share a channel: networks with few channels would lose the kernels."""
    view, k = view_of(made(ODD, layout)), KINDS[kind][1] or 1
    as_usual = select.groups_of(view, 4, k)
    monkeypatch.setattr(select, "MAX_GROUPS", as_usual // 2)
    assert select.groups_of(view, 4, k) == as_usual // 2
    check(made(ODD, layout), kind, **affine(kind, 3))


@pytest.mark.parametrize("kind", ["linf", "topk", "range"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_extremes(kind, layout, small_tiles):
    """Of equal extremes any may be taken, each at most once; their gradients add up to the same."""
    x = torch.randint(-2, 3, (9, 3, 2, 2), device=DEVICE).float().to(memory_format=LAYOUTS[layout])
    x -= by_channel(x).float().mean(1).round()[:, None, None]
    g = torch.randn_like(x)
    ours, reference = (f(x, None, None, None, g, kind, None) for f in (fused, plain))
    torch.testing.assert_close(ours.y.double(), reference.y, rtol=0, atol=1e-5)
    for channel in range(3):
        values, mine, theirs = (by_channel(t)[channel] for t in (x, ours.dx - g, reference.dx - g.double()))
        for value in values.unique():
            same = values == value
            sums = [d[same].sum().item() for d in (mine, theirs)]
            if kind == "topk" or (kind == "linf" and values.max() - values.mean() == values.mean() - values.min()):
                continue  # the tie may be between different values
            assert sums[0] == pytest.approx(sums[1], abs=1e-4)
    stats, index = statistics.statistics(x, Statistic(kind, KINDS[kind][1] or 0, 1.0, EPS), RunningStats())
    offsets = torch.where(index >= 0, index, ~index)
    for channel in range(3):
        assert len(set(offsets[:, channel].tolist())) == index.shape[0]
    assert stats.isfinite().all()
