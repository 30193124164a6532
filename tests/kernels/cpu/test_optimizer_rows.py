"""The optimizers' native row operations, beside the same equations in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from normmatters.kernels import cpu
from normmatters.kernels.cpu import optimizer_rows as rows
from normmatters.norm import compute_dtype
from normmatters.optim import (
    AngularSGD,
    NormRecorder,
    WeightDecayFreeSGD,
    _base,
    angular_update,
    channel_norms,
    channels,
)
from normmatters.optim._base import one_kernel_takes
from support import native_steps

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=cpu.why_not())

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Shorter and longer than a vector, than its multiples, and than the block whose sums stay in single precision.
SHAPES = [(3, 2), (5, 16), (4, 3, 3, 3), (2, 7, 5), (3, 64), (2, 147), (2, 5000), (1, 9001), (700, 33)]


def tolerance(dtype: torch.dtype, size: float = 1.0) -> dict[str, float]:
    """A handful of roundings of numbers up to ``size``: those of the result, and of sums in the compute type."""
    return {"rtol": 0.0, "atol": size * (torch.finfo(dtype).eps + 8 * torch.finfo(compute_dtype(dtype)).eps)}


def laid_out(x: Tensor, layout: str) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" and x.ndim == 4 else x


def rotated(ws, ds, gs, norms, angle, form, decay=0.9, sign=-1.0):
    """In float64, by the plain equation."""
    ws, ds, gs, norms = ([x.double() for x in xs] for xs in (ws, ds, gs, norms))
    momentum = channels.Momentum(decay, sign, form == rows.NESTEROV)
    directions = ds if form == rows.GIVEN else momentum.take_in_(ds, gs)
    for one in zip(ws, directions, gs, norms):
        channels.rotate_channel_(*one, angle)
    return ws, ds


@pytest.mark.parametrize("form", [rows.GIVEN, rows.MOMENTUM, rows.NESTEROV])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation(dtype, layout, form):
    torch.manual_seed(0)
    ws, ds, gs = ([laid_out(torch.randn(s, dtype=torch.float64).to(dtype), layout) for s in SHAPES] for _ in range(3))
    norms = [w.to(compute_dtype(dtype)).flatten(1).norm(dim=1) for w in ws]
    ws[1][2] = 0  # pruned
    gs[2][1] = 0  # no gradient
    if dtype.itemsize > 2:  # in half precision, rounding gives the buffer a direction
        ds[3][0], gs[3][0] = 4 * ws[3][0], -2 * ws[3][0]  # along the row: no direction to turn to
        ds[4][1] = ds[4][1] + 30 * ws[4][1]  # nearly along it: few digits are left of its direction
    expected, buffers = rotated(ws, ds, gs, norms, 0.1, form)
    rows.RotationPlan(ws, form)(ws, ds, gs, norms, 0.1, 0.9, -1.0)
    for w, e, d, b in zip(ws, expected, ds, buffers):
        torch.testing.assert_close(d.double(), b, **tolerance(dtype, 100))
        torch.testing.assert_close(w.double(), e, **tolerance(dtype, 30))
    assert not ws[1][2].any()


@pytest.mark.parametrize("size", [1e-25, 1e-20, 1e20, 1e25])
def test_rotation_of_rows_whose_squares_leave_float32(size):
    torch.manual_seed(0)
    w, d = torch.randn(2, 4, 50)
    g, norm = torch.ones(4, 50), torch.ones(4)
    (expected,), _ = rotated([w], [d], [g], [norm], 0.1, rows.GIVEN)
    for scaled in ((w * size, d), (w, d * size), (w * size, d * size)):
        own = scaled[0].clone()
        rows.RotationPlan([own])([own], [scaled[1]], [g], [norm], 0.1)
        torch.testing.assert_close(own.double(), expected, **tolerance(torch.float32))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_number_stays_in_its_row(bad):
    torch.manual_seed(0)
    w, d = torch.randn(2, 4, 50)
    d[2, 7] = bad
    rows.RotationPlan([w])([w], [d], [torch.ones(4, 50)], [torch.ones(4)], 0.1)
    assert w[2].isnan().all()
    assert w[[0, 1, 3]].isfinite().all()
    norms, tangents = w.nan_to_num(1).norm(dim=1), torch.zeros(4)
    rows.RowNormsPlan([d], [norms], [w.nan_to_num(1)], [tangents])()
    assert norms.isfinite().tolist() == tangents.isfinite().tolist() == [True, True, False, True]


def step(optimizer_of, steps=4, dtype=torch.float32, layout="contiguous", shapes=((8, 3, 3, 3), (16, 8, 3, 3), (33,))):
    torch.manual_seed(0)
    params = [nn.Parameter(laid_out(torch.randn(s, dtype=torch.float64), layout).to(dtype)) for s in shapes]
    gradients = torch.randn(steps, sum(p.numel() for p in params), dtype=torch.float64)
    optimizer = optimizer_of(params)
    for row in gradients:
        for p, g in zip(params, row.split([p.numel() for p in params])):
            p.grad = laid_out(g.view(p.shape), layout).to(dtype)
        optimizer.step()
    return [p.detach() for p in params]


OPTIMIZERS = {
    "free": lambda ps: WeightDecayFreeSGD(ps, 0.1, 0.9, weight_decay=0.01, check_invariance=False),
    "free nesterov": lambda ps: WeightDecayFreeSGD(
        ps, 0.1, 0.9, weight_decay=0.01, nesterov=True, check_invariance=False
    ),
    "free plain": lambda ps: WeightDecayFreeSGD(ps, 0.1, weight_decay=0.01, check_invariance=False),
    "ordinary": lambda ps: WeightDecayFreeSGD(ps, 0.1, 0.9, weight_decay=0.01, weight_decay_free=False),
    "ordinary nesterov": lambda ps: WeightDecayFreeSGD(
        ps, 0.1, 0.9, weight_decay=0.01, weight_decay_free=False, nesterov=True, maximize=True
    ),
    "ordinary plain": lambda ps: WeightDecayFreeSGD(ps, 0.1, weight_decay=0.01, weight_decay_free=False),
    "angular": lambda ps: AngularSGD([{"params": ps[:2]}, {"params": ps[2:], "angular": False, "lr": 0.1}], angle=0.1),
    "angular nesterov": lambda ps: AngularSGD(ps[:2], 0.1, 0.9, weight_decay=0.01, nesterov=True, maximize=True),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_on_the_plain_path(name, dtype, layout, monkeypatch):
    native = step(OPTIMIZERS[name], dtype=dtype, layout=layout)
    monkeypatch.setattr(channels, "BACKENDS", {})
    monkeypatch.setattr(rows, "ROTATED", ())
    plain = step(OPTIMIZERS[name], dtype=torch.float64)
    # Four steps, each of which rounds the weight and its buffer.
    for one, other in zip(native, plain):
        torch.testing.assert_close(one.double(), other, **tolerance(dtype, 16))


@pytest.mark.parametrize(
    ("name", "kernels"),
    {
        "free": {"nm_momentum_step"},
        "angular": {"nm_rotate_rows"},
        "recorded": {"nm_measure_rows"},
        "corrected": {"nm_measure_rows", "nm_scale_rows"},
        "held": {"nm_measure_rows", "nm_scale_rows"},
    }.items(),
)
def test_every_optimizer_runs_on_its_kernels_as_on_the_plain_path(name, kernels, monkeypatch):
    used, function = set(), rows._function
    monkeypatch.setattr(rows, "_function", lambda kernel, numbers: used.add(kernel) or function(kernel, numbers))
    native = native_steps.optimized(name)
    assert used == kernels
    used.clear()
    monkeypatch.setattr(channels, "BACKENDS", {})
    monkeypatch.setattr(rows, "STEPPED", ())
    monkeypatch.setattr(_base, "STEPPED", ())
    for own, plain in zip(native, native_steps.optimized(name), strict=True):
        torch.testing.assert_close(own, plain, rtol=2e-4 if name == "recorded" else 0, atol=2e-5)  # angles
    assert not used


@pytest.mark.parametrize("name", native_steps.OPTIMIZERS)
def test_the_number_of_threads_changes_no_bit_of_any(name, threads):
    results = []
    for count in (1, 2, 3, 7):
        threads(count)
        results.append(native_steps.optimized(name))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", ["free", "angular"])
def test_the_number_of_threads_changes_no_bit(name, threads):
    results = []
    for count in (1, 2, 3, 7):  # the last: more than the last weight has rows
        threads(count)
        results.append(step(OPTIMIZERS[name], shapes=((64, 700), (300, 128, 3), (3, 90_000))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_angles(dtype):
    torch.manual_seed(0)
    now = [torch.randn(s, dtype=torch.float64).to(dtype) for s in SHAPES]
    before = [(w + torch.randn_like(w) / 100).to(dtype) for w in now]
    wide = compute_dtype(dtype)
    norms = [channel_norms(w).to(wide) for w in before]
    tangents = [torch.zeros_like(n) for n in norms]
    expected = [(channel_norms(w.double()), angular_update(b.double(), w.double())) for w, b in zip(now, before)]
    rows.RowNormsPlan(now, norms, before, tangents)()
    for w, b, norm, tangent, (length, angle) in zip(now, before, norms, tangents, expected):
        torch.testing.assert_close(norm.double(), length, rtol=8 * torch.finfo(wide).eps, atol=0)
        torch.testing.assert_close(2 * tangent.double().atan(), angle, rtol=2e4 * torch.finfo(wide).eps, atol=1e-7)
        assert torch.equal(b, w)
    alone = [torch.zeros_like(n) for n in norms]
    rows.RowNormsPlan(now, alone)()
    assert all(torch.equal(a, b) for a, b in zip(alone, norms))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales(dtype):
    torch.manual_seed(0)
    ws = [torch.randn(s, dtype=torch.float64).to(dtype) for s in SHAPES]
    factors = [torch.randn(w.shape[0]).to(compute_dtype(dtype)) for w in ws]
    expected = [(w.to(f.dtype) * f.view(-1, *[1] * (w.ndim - 1))).to(dtype) for w, f in zip(ws, factors)]
    rows.RowScalesPlan(ws, factors)()
    assert all(torch.equal(w, e) for w, e in zip(ws, expected))


def test_a_recording_is_that_of_the_plain_path(monkeypatch):
    def record():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 8, bias=False), nn.Linear(8, 33, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder = NormRecorder(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 20)).square().mean().backward()
            optimizer.step()
        return recorder.recording()

    native = record()
    monkeypatch.setattr(channels, "BACKENDS", {})
    plain = record()
    for name in plain.names:
        torch.testing.assert_close(native.norms[name], plain.norms[name], rtol=1e-6, atol=0)
        torch.testing.assert_close(native.angles[name], plain.angles[name], rtol=1e-3, atol=1e-7)


def test_what_the_kernels_do_not_take_gets_the_plain_path():
    torch.manual_seed(0)
    w = torch.randn(4, 6)
    assert one_kernel_takes([w], [w.clone()])
    for other in (w.t().contiguous().t(), w.double(), w[:, ::2].expand(2, 4, 3)[0]):
        assert not one_kernel_takes([w], [other])
    for dim, layout in ((1, torch.contiguous_format), (None, torch.contiguous_format)):
        p = nn.Parameter(torch.randn(4, 6, 2, 2).contiguous(memory_format=layout))
        reference = nn.Parameter(p.detach().double())
        for q in (p, reference):
            q.grad = torch.ones_like(q).cumsum(0)
            AngularSGD([{"params": [q], "dim": dim}], angle=0.1).step()
        torch.testing.assert_close(p.detach().double(), reference.detach(), **tolerance(torch.float32, 4))


def test_a_changed_weight_is_noticed_by_autograd():
    p = nn.Parameter(torch.randn(3, 4))
    square = (p * p).sum()
    p.grad = torch.randn_like(p)
    AngularSGD([p], angle=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


@pytest.mark.parametrize("name", ["free", "ordinary", "angular"])
@pytest.mark.parametrize("empty", [(0, 5), (3, 0), (0,)], ids=str)
def test_an_empty_parameter_changes_nothing(name, empty):
    whole = ((4, 6), (5, 3))
    expected = step(OPTIMIZERS[name], shapes=whole)
    with_empty = step(OPTIMIZERS[name], shapes=(*whole, empty))
    assert all(torch.equal(a, b) for a, b in zip(expected, with_empty))


def test_random_shapes_and_strides():
    """The dimensions of a row in any order in memory."""
    generator = torch.Generator().manual_seed(0)

    def strided_as(x: Tensor, order: list[int]) -> Tensor:
        return x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])

    for i in range(60):
        dtype, form = DTYPES[i % 4], (rows.GIVEN, rows.MOMENTUM, rows.NESTEROV)[i % 3]
        shapes = [
            tuple(torch.randint(1, 40, (int(torch.randint(2, 5, (), generator=generator)),), generator=generator))
            for _ in range(int(torch.randint(1, 5, (), generator=generator)))
        ]
        orders = [[0, *(torch.randperm(len(s) - 1, generator=generator) + 1).tolist()] for s in shapes]
        ws, ds, gs = (
            [
                strided_as(torch.randn([int(n) for n in s], generator=generator).to(dtype), o)
                for s, o in zip(shapes, orders)
            ]
            for _ in range(3)
        )
        norms = [torch.empty(len(w), dtype=compute_dtype(dtype)) for w in ws]
        rows.RowNormsPlan(ws, norms)()
        for w, norm in zip(ws, norms):
            length = w.double().flatten(1).square().sum(1).sqrt()  # exacter than torch's norm
            torch.testing.assert_close(norm.double(), length, rtol=8 * torch.finfo(norm.dtype).eps, atol=0)
        read = (gs, norms) if form != rows.GIVEN else (ds, gs, norms)
        guarded = copy.deepcopy(read)
        expected, buffers = rotated(ws, ds, gs, norms, 0.3, form)
        rows.RotationPlan(ws, form)(ws, ds, gs, norms, 0.3, 0.9, -1.0)
        for w, e, d, b in zip(ws, expected, ds, buffers):
            torch.testing.assert_close(d.double(), b, **tolerance(dtype, 4))
            if w[0].numel() > 2:  # two numbers may lie along one line to any digit
                torch.testing.assert_close(w.double(), e, **tolerance(dtype, 100))
        assert all(torch.equal(a, b) for xs, ys in zip(guarded, read) for a, b in zip(xs, ys))
