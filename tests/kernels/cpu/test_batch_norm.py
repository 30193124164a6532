"""The native CPU batch norm against the equation in float64, with tolerances from the rounding of each dtype."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normmatters.functional.batch_norm import batch_norm as plain_batch_norm
from normmatters.kernels import cpu, dispatch
from normmatters.nn import L1BatchNorm2d
from normmatters.norm import Norm, RunningStats, compute_dtype
from support import batch_norm_cases
from support.batch_norm_cases import CPU_KINDS, affine, compare, fused, made, off_the_fence, plant_extremes

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=cpu.why_not())

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FOLLOWED = {"": (None, False), "relu": ("relu", False), "add": (None, True), "add_relu": ("relu", True)}
LEAN = ("l1", "lean")
CASES = {kind: (kind, "exact") for kind in CPU_KINDS} | {"lean": LEAN}
EXTREMES = ("linf", "topk", "range")
# No mean of a sample, and no mean in one rounded number.
PRECISE = {"pilot": 0.0, "stored_mean": False}
check = functools.partial(batch_norm_cases.check, **PRECISE)
each_case = pytest.mark.parametrize(("kind", "memory"), CASES.values(), ids=CASES)
SHAPES = {
    "planes": ((5, 7, 9, 11), "contiguous"),
    "long_planes": ((1, 2, 130, 131), "contiguous"),
    "rows": ((5, 37, 6, 7), "channels_last"),
    "whole_rows": ((3, 96, 8, 8), "channels_last"),
    "volume": ((4, 5, 3, 4, 5), "channels_last"),
    "matrix": ((70, 19), "contiguous"),
    "signal": ((6, 5, 40), "contiguous"),
}


def _norm(x: Tensor, norm: Norm, weight=None, bias=None, **more) -> Tensor:
    return dispatch.batch_norm(x, norm, weight, bias, RunningStats(), True, **more)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", SHAPES)
@each_case
def test_every_kind_dtype_and_layout(kind, memory, where, dtype) -> None:
    shape, layout = SHAPES[where]
    wide = compute_dtype(dtype)
    for act, added in FOLLOWED.values():
        x = made(shape, layout, wide)
        x = (plant_extremes(x) if shape[0] > 2 else x).to(dtype)
        residual = torch.randn_like(x) if added else None
        parameters = affine(kind, shape[1], dtype if act else wide)
        if memory == "lean":  # from these no output tells x̂
            parameters["weight"][0], parameters["weight"][1] = 0.0, -1e-9
        if dtype.itemsize > 2 or shape[0] > 2 or kind not in EXTREMES:  # of equal extremes any may get the gradient
            check(x, kind, **parameters, residual=residual, act=act, memory=memory)


def _saved_bytes(x: Tensor, memory: str) -> int:
    """What the backward pass needs beside the output, which the next layer saves anyway."""
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        sizes[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = _norm(x, Norm(1, memory=memory), act="relu")
    sizes.pop(y.data_ptr(), None)
    return sum(sizes.values())


def test_lean_saves_bits_instead_of_the_input() -> None:
    x = torch.randn(8, 16, 32, 32, requires_grad=True)
    assert _saved_bytes(x, "lean") < _saved_bytes(x, "exact") / 25  # one bit instead of 32, and numbers per channel


# Hard values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@each_case
def test_hard_values(kind, memory, layout) -> None:
    """γ = 0 and γ < 0, means far from 0, one huge outlier."""
    for act in (None, "relu"):
        x = plant_extremes(made((6, 18, 10, 10), layout))
        x[:, 3] += 1e6  # where float32 counts in sixteenths: some elements are the mean's neighbours
        x[:, 5] = 1e6 + torch.randn(6, 10, 10).sign()
        x[0, 4, 0, 0] = 1e5
        x[0, 5, 0, :4] = 1e6 + torch.tensor([5.0, -5, 3, -2])  # only the exact mean tells which is farther
        parameters = affine(kind, 18)
        if parameters["weight"] is not None:
            parameters["weight"][0], parameters["weight"][1] = 0.0, -2.0
        check(x, kind, **parameters, act=act, memory=memory)


@pytest.mark.parametrize("kind", ["l1", "linf", "range"])
def test_the_mean_of_a_long_plane(kind) -> None:
    """Sums in float32 over all of it would be off by 1e-5. The elements that tell where to sum about are outliers."""
    x = torch.randn(1, 1, 2**12, 2**12).mul_(1e-3).add_(0.1)
    for i in (0, x.numel() // 2, -1):
        x.view(-1)[i] = 0.0
    running = RunningStats(torch.zeros(1), torch.ones(1), None, 1.0)
    dispatch.batch_norm(x, Norm(*CPU_KINDS[kind]), None, None, running, True)
    assert abs(float(running.mean) / float(x.double().mean()) - 1) < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("kind", ["l1", "linf"])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((17, 32, 92, 92), "contiguous"),
        ((17, 32, 92, 93), "contiguous"),
        ((17, 32, 92, 92), "channels_last"),
        ((17, 33, 92, 92), "channels_last"),
    ],
    ids=["planes", "odd planes", "rows", "odd rows"],
)
def test_outputs_that_leave_the_cache(shape, layout, kind) -> None:
    """Outputs of 16 MB and more are stored past the cache, where they are aligned."""
    x = made(shape, layout)
    check(x, kind, **affine(kind, shape[1]), act="relu", memory="exact", residual=torch.randn_like(x))


@pytest.mark.parametrize("where", SHAPES)
@each_case
def test_a_constant_channel_gives_its_bias(kind, memory, where) -> None:
    shape, layout = SHAPES[where]
    x = torch.full_like(made(shape, layout), 3.25).requires_grad_()
    y = _norm(x, Norm(*CPU_KINDS[kind], memory=memory), None, torch.arange(shape[1]) * 1.0)
    y.sum().backward()
    assert torch.equal(y, torch.arange(shape[1]).view(1, -1, *[1] * (len(shape) - 2)).expand(shape) * 1.0)
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@each_case
def test_nan_and_infinity_as_in_the_equation(kind, memory, layout, value) -> None:
    """A channel with one is NaN where the equation is; the others do not notice. Also in its running statistics."""
    x, g = made((4, 20, 5, 5), layout), torch.randn(4, 20, 5, 5)
    x[2, 7, 1, 1] = value
    norm, results = Norm(*CPU_KINDS[kind], memory=memory), []
    for function in (dispatch.batch_norm, plain_batch_norm):
        leaf, running = x.clone().requires_grad_(), RunningStats(torch.zeros(20), torch.ones(20))
        y = function(leaf, norm, None, None, running, True, act="relu")
        y.backward(g)
        results.append((y.detach(), running.mean, running.var, leaf.grad))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shape", [(2, 3), (2, 1), (2, 1, 1, 1), (1, 1, 2), (2, 40), (3, 1, 5, 5), (1, 17, 1, 3)], ids=str
)
@each_case
def test_few_elements_and_one_channel(kind, memory, shape) -> None:
    if kind != "topk" or math.prod(shape) // shape[1] > 2:
        check(made(shape), kind, **affine(kind, shape[1]), memory=memory)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((3, 40_000), "contiguous"), ((2, 1, 300, 301), "contiguous"), ((1, 3, 401, 150), "channels_last")],
    ids=["rows of a matrix", "planes", "rows"],
)
@each_case
def test_more_threads_than_rows_or_channels(kind, memory, shape, layout, threads) -> None:
    threads(7)
    check(made(shape, layout), kind, **affine(kind, shape[1]), act="relu", memory=memory)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4), (2, 0, 4)], ids=str)
def test_an_empty_batch_is_left_to_the_equation(shape) -> None:
    x = torch.randn(shape).requires_grad_()
    y = _norm(x, Norm(), act="relu")
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 19), min_size=2, max_size=5),
    order=st.randoms(use_true_random=False),
    case=st.sampled_from([*CASES.values()]),
    dtype=st.sampled_from(DTYPES),
    followed=st.sampled_from(sorted(FOLLOWED)),
    crop=st.booleans(),
    threads=st.integers(1, 5),
)
def test_any_shape_and_strides(sizes, order, case, dtype, followed, crop, threads) -> None:
    """Dimensions in any order in memory, cropped or not, and more threads than rows."""
    if math.prod(sizes) // sizes[1] < 3:
        sizes[0] += 2
    dims = list(range(len(sizes)))
    order.shuffle(dims)
    (kind, memory), (act, added) = case, FOLLOWED[followed]
    if dtype.itemsize == 2 and kind in EXTREMES:
        dtype = torch.float32  # few numbers, of which many are equal
    whole = torch.randn([sizes[d] + crop for d in dims], dtype=dtype) * 2
    x = whole.permute([dims.index(d) for d in range(len(sizes))])[tuple(slice(size) for size in sizes)]
    residual = torch.randn(sizes).to(dtype) if added else None
    parameters = affine(kind, sizes[1], compute_dtype(dtype)) | {"residual": residual}
    g = off_the_fence(torch.randn(sizes).to(dtype), x, **parameters, kind=kind, constant="exact")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = fused(x, **parameters, g=g, kind=kind, act=act, memory=memory)
    finally:
        torch.set_num_threads(before)
    compare(ours, x, kind, **parameters, act=act, memory=memory, constant="exact", g=g, **PRECISE)


# With the rest of PyTorch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", [False, True])
def test_several_gradients_at_once(added) -> None:
    x = made((4, 20, 3, 3), "channels_last").requires_grad_()
    y = _norm(x, Norm(), act="relu", residual=torch.randn_like(x) if added else None)
    many = torch.randn(3, *y.shape)
    (together,) = torch.autograd.grad(y, x, many, retain_graph=True, is_grads_batched=True)
    one_by_one = torch.stack([torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in many])
    torch.testing.assert_close(together, one_by_one, rtol=1e-4, atol=1e-5)


def test_autocast_and_half_precision_buffers() -> None:
    module = L1BatchNorm2d(6).bfloat16()
    assert module.running_mean.dtype == torch.bfloat16
    x = made((4, 6, 8, 8)) + 5
    with torch.autocast("cpu", torch.bfloat16):
        module(x.bfloat16()).sum().backward()
    torch.testing.assert_close(module.running_mean.float(), 0.1 * x.mean((0, 2, 3)), rtol=0.02, atol=0.02)


def test_a_second_derivative_is_refused() -> None:
    x = made((4, 6, 8, 8)).requires_grad_()
    (gradient,) = torch.autograd.grad(_norm(x, Norm()).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        gradient.sum().backward()


def test_running_statistics_count_as_changed() -> None:
    running = RunningStats(torch.zeros(3), torch.ones(3))
    before = running.mean._version
    dispatch.batch_norm(torch.randn(4, 3), Norm(), None, None, running, True)
    assert running.mean._version > before
