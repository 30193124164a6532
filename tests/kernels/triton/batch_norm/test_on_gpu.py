"""Batch norm on a GPU: large tensors, streams, graphs, autocast, the compiler, and what else a training run does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from normmatters.kernels import backends
from normmatters.nn.batchnorm import L1BatchNorm2d, LpBatchNorm2d, RangeBatchNorm2d, TopKBatchNorm2d
from support import called, tolerances
from support.batch_norm_cases import (
    DEVICE,
    EPS,
    KINDS,
    LAYOUTS,
    affine,
    by_channel,
    check,
    compare,
    fused,
    made,
    off_the_fence,
    plant_extremes,
)
from support.gpu_steps import check_cuda_graph, equal, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_seed"),
]

MEMORY = [*((kind, "exact") for kind in KINDS), ("l1", "lean")]
SHAPE = (16, 24, 14, 14)  # of all tests that need no other, so that few kernels are compiled
NORMS = {
    "l1": lambda: L1BatchNorm2d(24, act="relu"),
    "l1 lean": lambda: L1BatchNorm2d(24, act="relu", memory="lean"),
    "topk": lambda: TopKBatchNorm2d(24, k=3, act="relu"),
    "range": lambda: RangeBatchNorm2d(24, act="relu"),
}


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape", "act", "with_residual"),
    [
        (torch.float16, (32, 64, 28, 28), "relu", True),
        (torch.bfloat16, (64, 256, 14, 14), "relu", False),
        (torch.float32, (8, 65, 33, 31), None, False),
    ],
    ids=["float16", "bfloat16", "float32"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "memory"), MEMORY)
def test_values_and_gradients(kind, memory, layout, dtype, shape, act, with_residual, poisoned_empty):
    x = plant_extremes(made(shape, layout, dtype))
    residual = made(shape, layout, dtype) if with_residual else None
    # The planted extremes move the scale, but L1 of many values hardly notices them, and its pilot may miss them.
    check(x, kind, **affine(kind, shape[1]), act=act, residual=residual, memory=memory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 3, 5, 7), (7, 1), (4, 1, 1, 1), (1, 1, 64, 64), (3, 130, 2)], ids=str)
def test_odd_shapes(shape, kind, poisoned_empty):
    """A size of 1 is a constant to the compiler, and code for it is code of its own."""
    check(made(shape), kind, **affine(kind, shape[1]), act="relu")


def test_one_shape_in_every_dtype():
    """Compiled kernels are kept by shape: another dtype of the same shape must not meet them."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float16):
        for parameters in (torch.float32, dtype):
            check(made(SHAPE, dtype=dtype), "l1", **affine("l1", 24, parameters), act="relu")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "memory"), [item for item in MEMORY if item[0] != "mean"])
def test_hard_values(kind, memory, layout):
    """Constant channels, a mean far above the deviation, one huge outlier, γ = 0, negative and tiny γ; at 4704 values
    L1 goes by its pilot."""
    x = made((24, 8, 14, 14), layout)
    x[:, 0] = 3.0
    x[:, 1] += 1000.0
    x[11, 2, 3, 4] = 1e5
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, -1.5, 1e-6, -1e-30, 1.0], device=DEVICE)
    ours = check(
        x, kind, weight=weight, bias=torch.rand(8, device=DEVICE), memory=memory, act="relu", pilot=tolerances.PILOT_ANY
    )
    assert ours.dx.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "memory", "layout"), [("l1", "lean", "channels_last"), ("topk", "exact", "contiguous")]
)
def test_more_than_two_to_the_31_elements(kind, memory, layout):
    shape = (2100, 64, 128, 128)
    x, g = (torch.empty(shape, device=DEVICE, dtype=torch.float16, memory_format=LAYOUTS[layout]) for _ in range(2))
    x.normal_(1.0, 2.0)
    g.normal_()
    x[-1, :, -1, -1], x[-1, :, -1, -2], x[0, :, 0, 0] = 24.0, -22.5, 21.0
    weight, bias = affine(kind, 64).values()
    channels = [slice(c, c + 1) for c in (0, 37, 63)]
    for one in channels:  # of 34 million values of a channel, a few hundred equal ones may lie where rounding decides
        g[:, one] = off_the_fence(g[:, one], x[:, one], weight[one], bias[one], None, kind, "exact")
    ours = fused(x, weight, bias, None, g, kind, "relu", memory)
    for one in channels:
        compare(
            ours.part(one), x[:, one], kind, weight=weight[one], bias=bias[one],
            residual=None, act="relu", memory=memory, constant="exact", g=g[:, one],
        )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["l1", "topk"])
def test_memory_that_is_not_aligned(kind, layout):
    """First the aligned kernel is compiled and kept; then it must not be used."""
    parameters = affine(kind, 24)
    for _ in range(2):
        check(made(SHAPE, layout), kind, **parameters, act="relu")
    flat = torch.randn(2, 16 * 24 * 14 * 14 + 1, device=DEVICE)
    channels_last = layout == "channels_last"
    x, g = (
        t[1:].view(16, 14, 14, 24).permute(0, 3, 1, 2) if channels_last else t[1:].view(SHAPE) for t in flat.unbind()
    )
    weight = torch.rand(25, device=DEVICE)[1:]
    assert x.data_ptr() % 16
    check(x, kind, weight=weight, bias=parameters["bias"], act="relu", g=g)


def test_strided_input():
    whole = torch.randn(16, 48, 14, 28, device=DEVICE)
    x = whole[:, ::2, :, ::2]
    ours, dense = (fused(t, None, None, None, torch.ones_like(t), "l1", "relu") for t in (x, x.contiguous()))
    for name in ("y", "dx", "running_mean", "running_var"):
        assert torch.equal(getattr(ours, name), getattr(dense, name))


def test_empty_batch():
    x = torch.empty(0, 24, 14, 14, device=DEVICE, requires_grad=True)
    y = L1BatchNorm2d(24).to(DEVICE)(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 24, 14, 14)


# Composition ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NORMS)
def test_bitwise_equal_in_deterministic_mode(name):
    norm = NORMS[name]().to(DEVICE)
    x, g = made(SHAPE, "channels_last", torch.float16), torch.randn(SHAPE, device=DEVICE).half()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN besides
    try:
        first = step(copy.deepcopy(norm), x, g)
        for _ in range(5):
            equal(step(copy.deepcopy(norm), x, g), first)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", NORMS)
def test_another_stream(name):
    """The work follows the current stream: the numbers arrive there after a long wait."""
    norm = NORMS[name]().to(DEVICE)
    x, g = made(SHAPE), torch.randn(SHAPE, device=DEVICE)
    expected = step(copy.deepcopy(norm), x, g)
    late_x, late_g = torch.zeros_like(x), torch.zeros_like(g)
    twin = copy.deepcopy(norm)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late_x.copy_(x)
        late_g.copy_(g)
        ours = step(twin, late_x, late_g)
    stream.synchronize()
    equal(ours, expected)


def test_two_streams_at_once():
    norms = [L1BatchNorm2d(24, act="relu", memory="lean").to(DEVICE) for _ in range(2)]
    inputs = [(made(SHAPE), torch.randn(SHAPE, device=DEVICE)) for _ in range(2)]
    expected = [step(copy.deepcopy(norm), *data) for norm, data in zip(norms, inputs)]
    twins = [[copy.deepcopy(norm) for _ in range(20)] for norm in norms]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results: list[list[list[Tensor]]] = [[], []]
    for turn in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(step(twins[i][turn], *inputs[i]))
    torch.cuda.synchronize()
    for i in range(2):
        for result in results[i]:
            equal(result, expected[i])


@pytest.mark.parametrize("name", NORMS)
def test_cuda_graph_replays_the_eager_step(name):
    check_cuda_graph(NORMS[name]().to(DEVICE), lambda: (made(SHAPE), torch.randn(SHAPE, device=DEVICE)))


@pytest.mark.parametrize("kind", [*KINDS, "lp"])
def test_cuda_graph_of_the_plain_path(kind, monkeypatch):
    """Where a kernel does not serve, a step can still be captured: nothing is copied from the host."""
    p, k = KINDS.get(kind, (3, None))
    monkeypatch.setattr(backends, "why_not_triton", lambda input: "it is not to")
    norm = LpBatchNorm2d(24, p, k=k, act="relu").to(DEVICE)
    assert called.backend(made(SHAPE), p=p, k=k).name == "hand-derived"
    check_cuda_graph(norm, lambda: (made(SHAPE), torch.randn(SHAPE, device=DEVICE)))


@pytest.mark.parametrize("kind", ["linf", "topk", "range"])
def test_few_channels(kind, poisoned_empty):
    """The first layers of ResNet-56: a channel has as many groups as the selection kernel holds."""
    shape = (128, 16, 32, 32)
    x = plant_extremes(made(shape, "channels_last", torch.bfloat16))
    check(x, kind, **affine(kind, 16), act="relu")


def test_autocast():
    net = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), L1BatchNorm2d(24, act="relu"), nn.Conv2d(24, 4, 1)).to(DEVICE)
    x = torch.randn(16, 3, 14, 14, device=DEVICE)
    with torch.autocast("cuda", torch.float16):
        hidden = net[0](x)
        y = net[1](hidden)
        out = net[2](y)
    assert hidden.dtype == y.dtype == out.dtype == torch.float16
    out.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in net.parameters())
    assert net[1].running_mean.dtype == torch.float32
    g = torch.randn_like(hidden)
    check(hidden.detach(), "l1", weight=net[1].weight, bias=net[1].bias, act="relu", g=g)
    twin = copy.deepcopy(net[1])
    with torch.autocast("cuda", torch.float16):
        assert torch.equal(twin(hidden.detach()), y)  # the same kernel, whatever autocast thinks of it


@pytest.mark.parametrize("name", ["l1", "l1 lean", "topk"])
def test_compiled_by_inductor(name):
    torch.compiler.reset()
    norm = NORMS[name]().to(DEVICE)
    twin = copy.deepcopy(norm)

    def block(norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x * 2, residual=x) + 1

    compiled = torch.compile(block, fullgraph=True)
    for _ in range(2):
        x, g = made(SHAPE, "channels_last", torch.float16), torch.randn(SHAPE, device=DEVICE).half()
        ours = step(twin, x, g, lambda x: compiled(twin, x))
        for mine, reference in zip(ours, step(norm, x, g, lambda x: block(norm, x))):
            # The same kernels; the sum of the two gradients of x is rounded once instead of twice.
            torch.testing.assert_close(mine, reference, rtol=2**-9, atol=2**-9)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["l1", "l1 lean"])
def test_activation_checkpointing_counts_the_batch_once(name, use_reentrant):
    norm = NORMS[name]().to(DEVICE)
    twin = copy.deepcopy(norm)
    x, g = made(SHAPE), torch.randn(SHAPE, device=DEVICE)
    ours = step(twin, x, g, lambda x: checkpoint(twin, x, use_reentrant=use_reentrant))
    equal(ours, step(norm, x, g))
    assert twin.num_batches_tracked == 1


def test_one_norm_twice_in_one_step():
    norm = L1BatchNorm2d(24, act="relu").to(DEVICE)
    first, second = copy.deepcopy(norm), copy.deepcopy(norm)
    x, g = made(SHAPE).requires_grad_(), torch.randn(SHAPE, device=DEVICE)
    norm(norm(x)).backward(g)
    other = x.detach().clone().requires_grad_()
    middle = first(other)
    second.load_state_dict(first.state_dict())
    second(middle).backward(g)
    assert torch.equal(x.grad, other.grad)
    torch.testing.assert_close(norm.weight.grad, first.weight.grad + second.weight.grad)
    assert torch.equal(norm.running_var, second.running_var)


def test_distributed_data_parallel(tmp_path):
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_nccl_available()):
        pytest.skip("no NCCL")
    norm = L1BatchNorm2d(24, act="relu", memory="lean").to(DEVICE)
    twin = copy.deepcopy(norm)
    x, g = made(SHAPE), torch.randn(SHAPE, device=DEVICE)
    expected = step(norm, x, g)
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(twin, device_ids=[0])
        equal(step(twin, x, g, parallel), expected)
    finally:
        distributed.destroy_process_group()


def test_kernels_of_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x = made(SHAPE)
    there = called.batch_norm(x.to("cuda:1"), None, None, None, None, True, 0.1, EPS)
    assert torch.equal(there.cpu(), called.batch_norm(x, None, None, None, None, True, 0.1, EPS).cpu())


def test_a_long_run_of_small_shapes_does_not_drift():
    """Plans are kept by shape; going back and forth between shapes must find each one's own."""
    shapes = [(8, 24, 7, 7), (8, 24, 7, 8), (9, 24, 7, 7), (8, 25, 7, 7)]
    data = [(made(shape), torch.randn(shape, device=DEVICE)) for shape in shapes]
    first = [fused(x, None, None, None, g, "l1", "relu") for x, g in data]
    for _ in range(3):
        for (x, g), expected in zip(data, first):
            again = fused(x, None, None, None, g, "l1", "relu")
            assert torch.equal(again.y, expected.y)
            assert torch.equal(again.dx, expected.dx)
    for (x, g), ours in zip(data, first):
        mean = by_channel(x).mean(1)
        torch.testing.assert_close(ours.running_mean.double(), 0.35 + 0.3 * mean, rtol=0, atol=1e-5)
        check(x, "l1", act="relu", g=g)


@pytest.mark.parametrize("memory", ["exact", "lean"])
@pytest.mark.parametrize("shape", [(64, 256, 14, 14), (64, 64, 56, 56)], ids=str)  # two launches backward, and three
def test_a_linked_gradient_is_read_after_it_is_written(shape, memory):
    """One kernel writes the sum of the two gradients, the next one starts before it has ended."""
    x, residual, g, other = (made(shape, "channels_last", torch.float16) for _ in range(4))
    weight, bias = affine("l1", shape[1]).values()
    leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]

    def gradients(linked):
        z, link = called.linked_batch_norm(
            x, None, None, weight, bias, True, 0.1, EPS, act="relu", residual=residual, memory=memory, linked=linked
        )
        outputs, theirs = ([z, link], [g, other]) if linked else ([z], [g + other])
        return torch.autograd.grad(outputs, leaves, theirs)

    expected = gradients(linked=False)
    for _ in range(20):
        for ours, right in zip(gradients(linked=True), expected):
            torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-3)
