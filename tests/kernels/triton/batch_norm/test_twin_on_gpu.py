"""Two added batch norms on a GPU: real shapes, links, streams, graphs and the compiler."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from normmatters.nn import L1BatchNorm2d, twin
from normmatters.surgery import convert
from support.batch_norm_cases import DEVICE, LAYOUTS, affine, made
from support.gpu_steps import check_cuda_graph, step
from support.twin_cases import Norm, check, fused

pytestmark = [
    pytest.mark.gpu,
]

SHAPE = (16, 24, 14, 14)


def two(shape, layout="channels_last", dtype=torch.float16):
    first, second = (Norm(made(shape, layout, dtype), **affine("l1", shape[1])) for _ in range(2))
    second.x.mul_(0.3).add_(1)
    second.weight[::2] *= -1
    return first, second


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float16, (64, 256, 28, 28)),
        (torch.bfloat16, (64, 512, 7, 7)),
        (torch.float32, (8, 65, 33, 31)),
    ],
    ids=["float16", "bfloat16", "float32"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_values_and_gradients(memory, layout, dtype, shape, linked, poisoned_empty):
    check(*two(shape, layout, dtype), memory, linked=linked)


@pytest.mark.parametrize("shape", [(1, 3, 5, 7), (7, 1), (4, 1, 1, 1), (1, 1, 64, 64), (3, 130, 2)], ids=str)
def test_odd_shapes(shape, poisoned_empty):
    """A size of 1 is a constant to the compiler, and code for it is code of its own."""
    check(*two(shape, "contiguous", torch.float32), "lean", linked=True)


@pytest.mark.parametrize("memory", ["exact", "lean"])
@pytest.mark.parametrize("shape", [(256, 64, 56, 56), (64, 512, 7, 7)], ids=str)  # by a pilot, and by whole sums
def test_runs_of_one_step_are_equal_behind_a_busy_stream(shape, memory):
    """Every kernel starts before the one before it has ended: whatever it reads too early shows sooner or later."""
    norms, g, link = (
        two(shape),
        made(shape, "channels_last", torch.float16),
        made(shape, "channels_last", torch.float16),
    )
    first = fused(*norms, g, memory, link)
    for _ in range(10):
        torch.cuda._sleep(1_000_000)
        for mine, expected in zip(fused(*norms, g, memory, link), first):
            for name, value in vars(expected).items():
                assert value is None or torch.equal(getattr(mine, name), value), name


class Pair(nn.Module):
    """Two norms, added; then one that takes the link."""

    def __init__(self, memory: str, linked: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            L1BatchNorm2d(24, act=act, memory=memory) for act in ("relu", None, "relu")
        )
        self.linked = linked

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        z, link = twin.twin_batch_norm(self.first, x1, self.second, x2, linked=self.linked)
        return self.third.forward_linked(2 * z, z, link, linked=False)[0]


def data() -> tuple[list[Tensor], Tensor]:
    return [made(SHAPE, "channels_last", torch.float16) for _ in range(2)], torch.randn(SHAPE, device=DEVICE).half()


@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_links(memory):
    model = Pair(memory).to(DEVICE)
    plain = copy.deepcopy(model)
    plain.linked = False
    inputs, g = data()
    for mine, theirs in zip(step(model, inputs, g), step(plain, inputs, g), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_cuda_graph_replays_the_eager_step(memory):
    check_cuda_graph(Pair(memory).to(DEVICE), data)


@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_compiled_by_inductor(memory):
    torch.compiler.reset()
    model = Pair(memory).to(DEVICE)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True)
    for _ in range(2):
        inputs, g = data()
        for mine, reference in zip(step(other, inputs, g, compiled), step(model, inputs, g), strict=True):
            torch.testing.assert_close(mine, reference, rtol=2**-8, atol=2**-8)


def test_a_converted_block_under_autocast():
    """The block's two norms go through one operation, and give what two operations give."""

    class Down(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.relu = nn.Conv2d(24, 64, 1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
            self.downsample = nn.Sequential(nn.Conv2d(24, 64, 1), nn.BatchNorm2d(64))

        def forward(self, x):
            out = self.bn(self.conv(x))
            out += self.downsample(x)
            return self.relu(out)

    block = convert(Down().to(DEVICE, memory_format=torch.channels_last), "l1", memory="lean")
    other = copy.deepcopy(block)
    x = made(SHAPE, "channels_last")
    seen: list[bool] = []

    def run(model):
        with torch.autocast("cuda", torch.float16):
            y = model(x)
        y.float().square().mean().backward()
        return [y.float(), *(p.grad for p in model.parameters()), *model.buffers()]

    other.bn.register_forward_hook(lambda *_: None)  # a norm with a hook is called as it is
    whole = twin.twin_batch_norm
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(twin, "twin_batch_norm", lambda *args, **kwargs: seen.append(True) or whole(*args, **kwargs))
        expected = run(other)
        assert not seen
        ours = run(block)
    assert seen == [True]
    for mine, theirs in zip(ours, expected, strict=True):
        size = theirs.abs().max().item() if theirs.is_floating_point() else 1
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=5e-3 * size + 1e-5)
