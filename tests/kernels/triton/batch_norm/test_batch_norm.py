"""The batch norm kernels against the equation in float64: on a GPU, or through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from normmatters.functional import lp_batch_norm
from normmatters.kernels.triton.batch_norm import statistics
from normmatters.kernels.triton.batch_norm.layout import Statistic
from normmatters.norm import RunningStats
from support import called
from support.batch_norm_cases import (
    DEVICE,
    EPS,
    KINDS,
    LAYOUTS,
    affine,
    check,
    fused,
    made,
    plain,
    plant_extremes,
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
