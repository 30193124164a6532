"""The batch norm kernels against the equation in float64: on a GPU, or through Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from normmatters.functional import lp_batch_norm
from normmatters.kernels.triton.batch_norm import select, statistics
from normmatters.kernels.triton.batch_norm.layout import Statistic, view_of
from normmatters.norm import RunningStats
from support import called, tolerances
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
    plant_extremes,
    uses_pilot,
)

ODD, EVEN = (9, 3, 2, 3), (8, 4, 2, 4)  # rows and columns that do not, or do, fill the tiles of ``small_tiles``
MEMORY = [*((kind, "exact") for kind in KINDS), ("l1", "lean")]


# What surrounds a batch norm, as (activation, residual): codes depend on it for L1, for the other kinds two will do.
AROUND = [(None, False), ("relu", True), ("relu", False), (None, True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "memory", "act", "with_residual"),
    [(*item, *around) for item in MEMORY for around in (AROUND if item[0] == "l1" else AROUND[:2])],
)
def test_values_and_gradients(kind, memory, layout, act, with_residual, small_tiles, poisoned_empty):
    residual = made(ODD, layout) if with_residual else None
    check(made(ODD, layout), kind, **affine(kind, 3), act=act, residual=residual, memory=memory)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "memory"), [("l1", "exact"), ("l1", "lean"), ("l2", "exact"), ("topk", "exact")])
def test_full_tiles(kind, memory, layout, small_tiles, poisoned_empty):
    check(made(EVEN, layout), kind, **affine(kind, 4), act="relu", memory=memory)


@pytest.mark.parametrize(("kind", "memory"), [("l1", "exact"), ("l1", "lean"), ("l2", "exact"), ("topk", "exact")])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((7, 3), ""), ((5, 3, 6), ""), ((2, 3, 2, 3, 2), ""), ((3, 3, 2, 2, 3), "channels_last")],
    ids=str,
)
def test_dimensions(shape, layout, kind, memory, poisoned_empty):
    check(made(shape, layout or "contiguous"), kind, **affine(kind, 3), act="relu", memory=memory)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((13, 65), "l1"), ((13, 65), "l2"), ((6, 1), "l1"), ((6, 1), "topk"), ((3, 1, 5, 5), "linf"), ((2, 2), "range")],
    ids=str,
)
def test_channels(shape, kind, poisoned_empty):
    """65 are one more than a block, 1 is less than a vector, and two values are the fewest that batch norm takes."""
    check(made(shape), kind, **affine(kind, shape[1]), act="relu")


def test_pixels_that_are_one_row_each(poisoned_empty):
    """1×1 pixels are both layouts at once."""
    check(made((9, 5, 1, 1)), "l1", **affine("l1", 5), act="relu")


@pytest.mark.parametrize("given", ["weight", "bias", "neither"])
@pytest.mark.parametrize(("kind", "memory"), [("l1", "exact"), ("l1", "lean"), ("topk", "exact")])
def test_without_weight_or_bias(kind, memory, given):
    parameters = {name: t for name, t in affine(kind, 3).items() if name == given}
    check(made(ODD), kind, **parameters, act="relu", memory=memory)


@pytest.mark.parametrize(("memory", "with_residual"), [("exact", False), ("lean", False), ("lean", True)])
@pytest.mark.parametrize(("layout", "half_weight"), [("contiguous", True), ("channels_last", False)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, layout, half_weight, memory, with_residual, small_tiles, poisoned_empty):
    residual = made(ODD, layout, dtype) if with_residual else None
    parameters = affine("l1", 3, dtype if half_weight else torch.float32)
    check(made(ODD, layout, dtype), "l1", **parameters, act="relu", memory=memory, residual=residual)


@pytest.mark.parametrize("kind", ["l2", "linf", "topk", "range", "mean"])
def test_half_precision_of_other_kinds(kind, small_tiles):
    x = plant_extremes(made(ODD, "channels_last", torch.bfloat16))
    check(x, kind, **affine(kind, 3), act="relu")


@pytest.mark.parametrize("constant", ["none", "paper", 2.0])
@pytest.mark.parametrize(("kind", "memory"), [("l1", "exact"), ("l1", "lean"), ("l2", "exact"), ("topk", "exact")])
def test_constants(kind, memory, constant):
    check(made(ODD), kind, **affine(kind, 3), memory=memory, constant=constant, act="relu")


# Values that are hard ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "memory"), [item for item in MEMORY if item[0] != "mean"])
def test_constant_channels_offsets_and_outliers(kind, memory, layout, small_tiles):
    x = made((9, 5, 2, 3), layout)
    x[:, 0] = 3.0
    x[:, 1] = 0.0
    x[:, 2] += 3000.0
    x[4, 3, 1, 2] = -1e5
    x[:, 4] *= 1e-6  # far below √eps
    ours = check(x, kind, **affine(kind, 5), memory=memory, act="relu")
    assert ours.y.isfinite().all()
    assert ours.dx.isfinite().all()


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


@pytest.mark.parametrize(("layout", "value"), [("contiguous", float("nan")), ("channels_last", float("-inf"))])
@pytest.mark.parametrize(("kind", "memory"), [item for item in MEMORY if item[0] not in ("l2", "linf")])
def test_nan_and_infinity_stay_in_their_channel(kind, memory, layout, value, small_tiles):
    x = made((5, 3, 1, 3), layout)
    clean = fused(x, None, None, None, torch.ones_like(x), kind, "relu", memory)
    x[3, 1, 0, 2] = value
    ours = fused(x, None, None, None, torch.ones_like(x), kind, "relu", memory)
    assert ours.y[:, 1].isnan().all()
    assert not ours.running_mean[1].isfinite()
    assert kind == "mean" or not ours.running_var[1].isfinite()
    for name in ("y", "dx"):
        assert torch.equal(getattr(ours, name)[:, ::2], getattr(clean, name)[:, ::2])
    if kind in ("linf", "topk", "range"):  # the backward pass writes there
        _, index = statistics.statistics(x, Statistic(kind, KINDS[kind][1] or 0, 1.0, EPS), RunningStats())
        offsets = torch.where(index >= 0, index, ~index)
        assert ((offsets >= 0) & (offsets < x.numel())).all()


# The pilot -----------------------------------------------------------------------------------------------------------


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


# Arguments -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["l1", "topk"])
def test_strided_tensors(kind):
    """Inputs that are dense in no order, parameters that are every other number, gradients of stride 0."""
    whole = torch.randn(9, 6, 4, 10, device=DEVICE)
    x, residual = whole[:, ::2, 1:, ::2], whole[:, 1::2, :3, 1::2].transpose(2, 3).contiguous().transpose(2, 3)
    weight, bias = (0.5 + torch.rand(6, device=DEVICE))[::2], torch.ones(1, device=DEVICE).expand(3)
    g = torch.ones(1, 3, 1, 1, device=DEVICE).expand(9, 3, 3, 5)
    ours, reference = (f(x, weight, bias, residual, g, kind, "relu") for f in (fused, plain))
    for name, expected in vars(reference).items():
        torch.testing.assert_close(getattr(ours, name).double(), expected, rtol=1e-5, atol=1e-5, msg=name)
    buffers = torch.zeros(2, 3, 2, device=DEVICE)
    called.batch_norm(x, buffers[0, :, 0], buffers[1, :, 0], None, None, True, 1.0, EPS, p=KINDS[kind][0])
    torch.testing.assert_close(buffers[0, :, 0], x.mean((0, 2, 3)), rtol=0, atol=1e-6)
    assert (buffers[1, :, 0] > 0).all()
    assert (buffers[:, :, 1] == 0).all()


@pytest.mark.parametrize("rank", [4, 5])
@pytest.mark.parametrize("act", [None, "relu"])
def test_channels_of_a_channels_last_tensor_stay_channels_last(rank, act):
    """As in torch.nn: else what follows a split of channels would be in another layout than the network."""
    whole = made((4, 6, 3, 2, 2)[:rank], "channels_last")
    x, residual = (part.requires_grad_() for part in whole.detach().chunk(2, 1))
    g = made(tuple(x.shape), "channels_last")
    y = called.batch_norm(x, None, None, None, None, True, 0.1, EPS, p=1, act=act, residual=residual)
    expected = torch.nn.functional.batch_norm(x, None, None, training=True)
    assert y.stride() == expected.stride() == g.stride()
    y.backward(g)
    doubles = [part.detach().double().requires_grad_() for part in (x, residual)]
    lp_batch_norm(doubles[0], training=True, eps=EPS, act=act, residual=doubles[1]).backward(g.double())
    for mine, reference in zip((x, residual), doubles):
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_residual_of_another_layout_and_dtype(layout):
    x = made(ODD, layout, torch.bfloat16)
    residual = made(ODD).transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    y = called.batch_norm(x, None, None, None, None, True, 0.1, EPS, p=1, act="relu", residual=residual)
    y.backward(torch.ones_like(y))
    expected = lp_batch_norm(x.double(), training=True, eps=EPS, act="relu", residual=residual.double())
    torch.testing.assert_close(y.double(), expected, rtol=2**-6, atol=2**-6)
    assert residual.grad.dtype == torch.float32
    assert torch.equal(residual.grad, (y > 0).float())
