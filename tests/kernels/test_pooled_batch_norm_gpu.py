"""Batch norm, ReLU and max pool in one on a GPU: real sizes, alignment, graphs, the compiler, and a whole stem."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from batch_norm_cases import DEVICE, EPS, Result, affine, made
from pooled_cases import check, compare_pooled, off_the_fence, pooled

import tolerances
from normmatters.convert import convert
from normmatters.kernels import dispatch
from normmatters.nn.batchnorm import L1BatchNorm2d

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

MEMORY = ("exact", "lean")
SHAPE, POOLED = (16, 24, 15, 14), (16, 24, 8, 7)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Other numbers every time: what fails must fail by its tolerance, not by its seed."""
    print(f"seed {torch.seed()}")


def parameters(channels: int) -> dict[str, Tensor]:
    """γ of both signs."""
    weight, bias = affine("l1", channels).values()
    return {"weight": torch.where(torch.arange(channels, device=DEVICE) % 3 == 1, -weight, weight), "bias": bias}


@pytest.mark.parametrize("memory", MEMORY)
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
def test_real_sizes(dtype, shape, memory, poisoned_empty):
    check(made(shape, "channels_last", dtype), **parameters(shape[1]), memory=memory)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(
    "shape", [(5, 3, 1, 1), (3, 3, 1, 2), (3, 1, 2, 1), (2, 1, 2, 2), (1, 1, 9, 9), (2, 17, 1, 5)], ids=str
)
def test_odd_shapes(shape, memory, poisoned_empty):
    """A size of 1 is a constant to the compiler, and code for it is code of its own."""
    check(made(shape, "channels_last"), **parameters(shape[1]), memory=memory)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_of_equal_elements_the_first_wins(dtype, memory):
    x = torch.randint(-2, 3, (8, 24, 15, 14), device=DEVICE).to(dtype, memory_format=torch.channels_last)
    weight = torch.linspace(-2, 2, 24, device=DEVICE).round()
    check(x, weight=weight, bias=torch.rand(24, device=DEVICE), memory=memory)


@pytest.mark.parametrize("memory", MEMORY)
def test_hard_values(memory):
    x = made((24, 8, 14, 15), "channels_last")
    x[:, 0] = 3.0
    x[:, 1] += 1000.0
    x[11, 2, 3, 4] = 1e5
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, -1.5, 1e-7, -1e-7, 1.0], device=DEVICE)
    bias = 0.5 + torch.rand(8, device=DEVICE)
    ours = check(x, weight=weight, bias=bias, memory=memory, pilot=tolerances.PILOT_ANY)
    assert ours.dx.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiny_inputs(dtype):
    """Below float16's normal numbers, where an operation that flushes them to 0 would find all equal."""
    x = (made(SHAPE, "channels_last") * 2.0**-20).to(dtype)
    check(x, weight=torch.ones(24, device=DEVICE), bias=torch.rand(24, device=DEVICE), memory="exact")


def test_more_than_two_to_the_31_elements():
    shape = (2100, 64, 128, 128)
    x = torch.empty(shape, device=DEVICE, dtype=torch.float16, memory_format=torch.channels_last).normal_(1.0, 2.0)
    g = torch.randn(2100, 64, 64, 64, device=DEVICE, dtype=torch.float16)
    weight, bias = parameters(64).values()
    z = dispatch.pooled_batch_norm(x, None, None, weight, bias, True, 0.1, EPS, act="relu")
    g = off_the_fence(g, z, z.amax((0, 2, 3), keepdim=True))
    ours = pooled(x, weight, bias, g, "lean")
    for channel in (0, 37, 63):
        one = slice(channel, channel + 1)
        part = Result(
            ours.y[:, one], ours.running_mean[one], ours.running_var[one], ours.dx[:, one],
            ours.dweight[one], ours.dbias[one], None,
        )  # fmt: skip
        compare_pooled(part, x[:, one], weight=weight[one], bias=bias[one], memory="lean", g=g[:, one])


def test_memory_that_is_not_aligned():
    """First the aligned kernel is compiled and kept; then it must not be used."""
    for _ in range(2):
        check(made(SHAPE, "channels_last"), **parameters(24), memory="lean")
    flat = torch.randn(16 * 24 * 15 * 14 + 1, device=DEVICE)
    x = flat[1:].view(16, 15, 14, 24).permute(0, 3, 1, 2)
    assert x.data_ptr() % 16
    check(x, **parameters(24), memory="lean")


def step(norm: nn.Module, x: Tensor, g: Tensor, call=None) -> list[Tensor]:
    """The output, all gradients and all buffers after one step."""
    x = x.detach().requires_grad_()
    norm.zero_grad()
    y = (call or norm)(x)
    y.backward(g)
    return [y.detach(), x.grad, *(p.grad for p in norm.parameters()), *(b.clone() for b in norm.buffers())]


def equal(ours: list[Tensor], reference: list[Tensor]) -> None:
    assert len(ours) == len(reference)
    for i, (mine, theirs) in enumerate(zip(ours, reference)):
        assert torch.equal(mine, theirs), f"tensor {i} differs by {(mine - theirs).abs().max()}"


def pooled_norm(memory: str, channels: int = 24) -> L1BatchNorm2d:
    norm = L1BatchNorm2d(channels, act="relu", memory=memory).to(DEVICE)
    norm.pool = "max"
    with torch.no_grad():
        for parameter, value in zip(norm.parameters(), parameters(channels).values()):
            parameter.copy_(value)
    return norm


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(("shape", "out"), [(SHAPE, POOLED), ((64, 64, 112, 112), (64, 64, 56, 56))], ids=str)
def test_runs_are_equal(shape, out, memory):
    """To the bit, with other work in front: a kernel that reads too early shows here."""
    norm = pooled_norm(memory, shape[1])
    x, g = made(shape, "channels_last", torch.float16), torch.randn(out, device=DEVICE).half()
    g = g.contiguous(memory_format=torch.channels_last)
    first = step(copy.deepcopy(norm), x, g)
    for _ in range(10):
        late_x, late_g = torch.empty_like(x).copy_(x), torch.empty_like(g).copy_(g)
        equal(step(copy.deepcopy(norm), late_x, late_g), first)


@pytest.mark.parametrize("memory", MEMORY)
def test_cuda_graph_replays_the_eager_step(memory):
    norm = pooled_norm(memory)
    eager = copy.deepcopy(norm)
    x, g = made(SHAPE, "channels_last").requires_grad_(), torch.randn(POOLED, device=DEVICE)
    inputs = [x, *norm.parameters()]

    def once() -> tuple[Tensor, ...]:
        y = norm(x)
        return y.detach(), *torch.autograd.grad(y, inputs, g)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = once()
    norm.load_state_dict(eager.state_dict())
    for _ in range(3):
        fresh_x, fresh_g = made(SHAPE, "channels_last"), torch.randn(POOLED, device=DEVICE)
        with torch.no_grad():
            x.copy_(fresh_x)
        g.copy_(fresh_g)
        graph.replay()
        equal([*outputs, *norm.buffers()], step(eager, fresh_x, fresh_g))


@pytest.mark.parametrize("memory", MEMORY)
def test_compiled_by_inductor(memory):
    torch.compiler.reset()
    norm = pooled_norm(memory)
    twin = copy.deepcopy(norm)

    def block(norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x * 2) + 1

    compiled = torch.compile(block, fullgraph=True)
    for _ in range(2):
        x, g = made(SHAPE, "channels_last", torch.float16), torch.randn(POOLED, device=DEVICE).half()
        ours = step(twin, x, g, lambda x: compiled(twin, x))
        for mine, reference in zip(ours, step(norm, x, g, lambda x: block(norm, x))):
            torch.testing.assert_close(mine, reference, rtol=2**-9, atol=2**-9)


@pytest.mark.parametrize("memory", MEMORY)
def test_a_stem_as_with_the_pool_left_alone(memory):
    """Under autocast, behind a convolution, with another one that takes the output."""
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    stem.append(nn.Conv2d(64, 8, 1))
    stem = stem.to(DEVICE, memory_format=torch.channels_last)
    fused = convert(copy.deepcopy(stem), "l1", memory=memory)
    unfused = convert(stem, "l1", memory=memory, fuse=False)
    assert fused[1].pool == "max"
    x = torch.randn(8, 3, 64, 64, device=DEVICE).to(memory_format=torch.channels_last)
    results = []
    for model in (fused, unfused):
        with torch.autocast("cuda", torch.float16):
            out = model(x)
        out.float().square().mean().backward()
        results.append([out.float(), *(p.grad for p in model.parameters()), *model.buffers()])
    for mine, reference in zip(*results):
        if mine.is_floating_point():  # of what rounding made equal, the unfused pool takes the first
            scale = reference.abs().max()
            assert (mine - reference).abs().max() <= 0.02 * scale
        else:
            assert torch.equal(mine, reference)


def test_the_pool_keeps_no_more_than_a_byte():
    norm = pooled_norm("lean", 64)
    x = made((32, 64, 112, 112), "channels_last", torch.float16).requires_grad_()
    norm(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    z = norm(x)
    kept = torch.cuda.memory_allocated() - before - z.numel() * 2
    assert z.numel() <= kept <= z.numel() * 1.02 + 2**20
    assert dispatch.batch_norm_backend(x).name == "triton"
