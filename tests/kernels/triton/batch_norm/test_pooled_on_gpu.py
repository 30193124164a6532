"""Batch norm, ReLU and max pool in one on a GPU: real sizes, alignment, graphs, the compiler, and a whole stem."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("triton")

from normmatters.surgery import convert
from support import called, tolerances
from support.batch_norm_cases import DEVICE, made
from support.gpu_steps import check_cuda_graph, equal, step
from support.pooled_cases import PooledNorm, check, compare_pooled, few_values, off_the_fence, parameters, pooled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_seed"),
]

SHAPE, POOLED = (16, 24, 15, 14), (16, 24, 8, 7)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float16, (32, 64, 112, 112)),
        (torch.bfloat16, (32, 64, 113, 111)),
        (torch.float32, (16, 65, 57, 56)),
        (torch.float16, (8, 192, 28, 27)),
    ],
    ids=str,
)
def test_real_sizes(dtype, shape, poisoned_empty):
    check(made(shape, "channels_last", dtype), **parameters(shape[1]))


@pytest.mark.parametrize(
    "shape", [(5, 3, 1, 1), (3, 3, 1, 2), (3, 1, 2, 1), (2, 1, 2, 2), (1, 1, 9, 9), (2, 17, 1, 5)], ids=str
)
def test_odd_shapes(shape, poisoned_empty):
    """A size of 1 is a constant to the compiler, and code for it is code of its own."""
    check(made(shape, "channels_last"), **parameters(shape[1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_of_equal_elements_the_first_wins(dtype):
    weight = torch.linspace(-2, 2, 24, device=DEVICE).round()
    check(few_values((8, 24, 15, 14), dtype, DEVICE), weight=weight, bias=torch.rand(24, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_so_small_that_rounding_the_output_loses_x(dtype):
    weight = torch.linspace(-0.02, 0.02, 24, device=DEVICE)
    check(made((16, 24, 29, 28), "channels_last", dtype), weight=weight, bias=torch.ones(24, device=DEVICE))


def test_hard_values():
    x = made((24, 8, 14, 15), "channels_last")
    x[:, 0] = 3.0
    x[:, 1] += 1000.0
    x[11, 2, 3, 4] = 1e5
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, -1.5, 1e-7, -1e-7, 1.0], device=DEVICE)
    bias = 0.5 + torch.rand(8, device=DEVICE)
    ours = check(x, weight=weight, bias=bias, pilot=tolerances.PILOT_ANY)
    assert ours.dx.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiny_inputs(dtype):
    """Below float16's normal numbers, where an operation that flushes them to 0 would find all equal."""
    x = (made(SHAPE, "channels_last") * 2.0**-20).to(dtype)
    check(x, weight=torch.ones(24, device=DEVICE), bias=torch.rand(24, device=DEVICE))


def test_more_than_two_to_the_31_elements():
    shape = (2100, 64, 128, 128)
    x = torch.empty(shape, device=DEVICE, dtype=torch.float16, memory_format=torch.channels_last).normal_(1.0, 2.0)
    g = torch.randn(2100, 64, 64, 64, device=DEVICE, dtype=torch.float16)
    weight, bias = parameters(64).values()
    looked_at = [slice(channel, channel + 1) for channel in (0, 37, 63)]
    for one in looked_at:
        g[:, one] = off_the_fence(g[:, one], x[:, one], weight[one], bias[one])
    ours = pooled(x, weight, bias, g)
    for one in looked_at:
        compare_pooled(ours.part(one), x[:, one], weight=weight[one], bias=bias[one], g=g[:, one])


def test_memory_that_is_not_aligned():
    """First the aligned kernel is compiled and kept; then it must not be used."""
    for _ in range(2):
        check(made(SHAPE, "channels_last"), **parameters(24))
    flat = torch.randn(16 * 24 * 15 * 14 + 1, device=DEVICE)
    x = flat[1:].view(16, 15, 14, 24).permute(0, 3, 1, 2)
    assert x.data_ptr() % 16
    check(x, **parameters(24))


def pooled_norm(channels: int = 24) -> PooledNorm:
    norm = PooledNorm(channels, act="relu").to(DEVICE)
    with torch.no_grad():
        for parameter, value in zip(norm.parameters(), parameters(channels).values()):
            parameter.copy_(value)
    return norm


@pytest.mark.parametrize(("shape", "out"), [(SHAPE, POOLED), ((64, 64, 112, 112), (64, 64, 56, 56))], ids=str)
def test_runs_are_equal(shape, out):
    """To the bit, with other work in front: a kernel that reads too early shows here."""
    norm = pooled_norm(shape[1])
    x, g = made(shape, "channels_last", torch.float16), torch.randn(out, device=DEVICE).half()
    g = g.contiguous(memory_format=torch.channels_last)
    first = step(copy.deepcopy(norm), x, g)
    for _ in range(10):
        late_x, late_g = torch.empty_like(x).copy_(x), torch.empty_like(g).copy_(g)
        equal(step(copy.deepcopy(norm), late_x, late_g), first)


def test_cuda_graph_replays_the_eager_step():
    check_cuda_graph(pooled_norm(), lambda: (made(SHAPE, "channels_last"), torch.randn(POOLED, device=DEVICE)))


def test_compiled_by_inductor():
    torch.compiler.reset()
    norm = pooled_norm()
    twin = copy.deepcopy(norm)

    def block(norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x * 2) + 1

    compiled = torch.compile(block, fullgraph=True)
    for _ in range(2):
        x, g = made(SHAPE, "channels_last", torch.float16), torch.randn(POOLED, device=DEVICE).half()
        ours = step(twin, x, g, lambda x: compiled(twin, x))
        for mine, reference in zip(ours, step(norm, x, g, lambda x: block(norm, x))):
            torch.testing.assert_close(mine, reference, rtol=2**-9, atol=2**-9)


class InFloat32(nn.Module):
    """A norm with its ReLU, and the pool on its own, whose input is not rounded."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.norm(x.float()), 3, 2, 1).to(x.dtype)


@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_a_stem_as_with_the_pool_left_alone(memory):
    """Under autocast, behind a convolution, with another one that takes the output."""
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    stem.append(nn.Conv2d(64, 8, 1))
    stem = stem.to(DEVICE, memory_format=torch.channels_last)
    fused = convert(copy.deepcopy(stem), "l1", memory=memory)
    # Rounded outputs are equal more often: a pool of those would have other winners, in one window of some hundred.
    unfused = nn.Sequential(stem[0], InFloat32(convert(stem, "l1", fuse=False)[1:3]), stem[4])
    x = torch.randn(8, 3, 64, 64, device=DEVICE).to(memory_format=torch.channels_last)
    results = []
    for model in (fused, unfused):
        with torch.autocast("cuda", torch.float16):
            out = model(x)
        (out.float().square().sum() / 64).backward()  # gradients of a size that float16 likes
        results.append([out.float(), *(p.grad for p in model.parameters()), *model.buffers()])
    # Each side has a pilot of its own, as its tiles are others; then some roundings to float16.
    allowed = 2 * tolerances.pilot(8 * 32 * 32) + tolerances.elementwise(torch.float16)
    for mine, reference in zip(*results, strict=True):
        if mine.is_floating_point():
            assert (mine - reference).abs().max() <= allowed * reference.abs().max()
        else:
            assert torch.equal(mine, reference)


def test_the_pool_keeps_three_bytes_an_element_of_its_output():
    """The winner's x and a byte."""
    norm = pooled_norm(64)
    x = made((32, 64, 112, 112), "channels_last", torch.float16).requires_grad_()
    norm(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    z = norm(x)
    kept = torch.cuda.memory_allocated() - before - z.numel() * 2
    assert 3 * z.numel() <= kept <= 3.02 * z.numel() + 2**20
    assert called.backend(x).name == "triton"
