"""Batch norm, ReLU and max pool in one: the kernels against the equation, the operators, and the ways around them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from normmatters import precision
from normmatters.kernels import dispatch
from normmatters.kernels.triton.batch_norm import pooled as kernels
from normmatters.kernels.triton.batch_norm.layout import Tiling
from normmatters.nn.batchnorm import L1BatchNorm2d
from normmatters.norm import Norm
from support import called
from support.batch_norm_cases import DEVICE, EPS, made
from support.pooled_cases import PooledNorm, check, few_values, parameters, pooled


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch, fresh_plans: None) -> None:
    """Tiles of 4 windows and 4 channels, and at most 3 programs over the windows: small tensors meet every edge."""
    whole = kernels.tiling_of

    def cut(shape: kernels.Shape, itemsize: int) -> Tiling:
        tiling = whole(shape, itemsize)
        tiles = -(-shape.windows // 4)
        return tiling._replace(block_c=min(tiling.block_c, 4), block_r=4, tiles=tiles, splits=min(tiles, 3))

    monkeypatch.setattr(kernels, "tiling_of", cut)


# Values and gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 6, 7, 6), (3, 4, 6, 9)], ids=str)
def test_values_and_gradients(shape, small_tiles, poisoned_empty):
    check(made(shape, "channels_last"), **parameters(shape[1]))


@pytest.mark.parametrize(
    "shape",
    [(5, 3, 1, 1), (3, 3, 1, 2), (3, 3, 2, 1), (2, 3, 2, 2), (2, 1, 5, 3), (1, 3, 4, 4), (1, 1, 9, 9), (2, 65, 3, 4)],
    ids=str,
)
def test_shapes(shape, poisoned_empty):
    """Windows that are all border, one channel, one image, and one channel more than a block has."""
    check(made(shape, "channels_last"), **parameters(shape[1]))


@pytest.mark.parametrize(("dtype", "half_weight"), [(torch.float16, True), (torch.bfloat16, False)])
def test_half_precision(dtype, half_weight, small_tiles, poisoned_empty):
    x = made((2, 6, 7, 5), "channels_last", dtype)
    check(x, **parameters(6, dtype if half_weight else torch.float32))


@pytest.mark.parametrize("given", ["weight", "bias", "neither"])
def test_without_weight_or_bias(given):
    some = {name: t for name, t in parameters(3).items() if name == given}
    check(made((2, 3, 5, 6), "channels_last"), **some)


@pytest.mark.parametrize("constant", ["none", 2.0])
def test_constants(constant):
    check(made((2, 3, 5, 6), "channels_last"), **parameters(3), constant=constant)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_of_equal_elements_the_first_wins(dtype, small_tiles):
    """And where γ = 0, all are equal."""
    x = few_values((2, 6, 6, 7), dtype, DEVICE)
    weight = torch.tensor([1.0, -1.0, 0.0, 2.0, -0.5, 0.0], device=DEVICE)
    bias = torch.tensor([0.1, 0.2, 0.3, -0.1, 2.0, -1.0], device=DEVICE)
    check(x, weight=weight, bias=bias)


def test_hard_values(small_tiles):
    """Constant channels, a mean far above the deviation, an outlier, and γ so small that the output does not show x̂."""
    x = made((2, 7, 5, 6), "channels_last")
    x[:, 0] = 3.0
    x[:, 1] += 1000.0
    x[1, 2, 3, 4] = 1e5
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, -1.5, 1e-7, -1e-7], device=DEVICE)
    ours = check(x, weight=weight, bias=0.5 + torch.rand(7, device=DEVICE))
    assert ours.dx.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_output_need_not_show_x(dtype):
    """Where γ is so small that all outputs are β, the sums go by the winners' x, above the mean and below it."""
    x = made((2, 4, 9, 9), "channels_last", dtype)
    x[:, :, 4:] -= 8.0
    weight, bias = torch.tensor([1e-9, -1e-9, 0.0, 1.0], device=DEVICE), torch.ones(4, device=DEVICE)
    g = torch.randn(2, 4, 5, 5, device=DEVICE).to(dtype)
    ours = pooled(x, weight, bias, g)
    assert torch.equal(ours.y[:, :3], torch.ones_like(ours.y[:, :3]))
    # The largest (smallest) x is the limit of the largest output. With γ = 0 the first element of each window wins.
    x, g = x.double(), g.double()
    _, at = F.max_pool2d(x * weight.sign().view(1, -1, 1, 1), 3, 2, 1, return_indices=True)
    deviation = x - x.mean((0, 2, 3), keepdim=True)
    winners = deviation.flatten(2).gather(2, at.flatten(2)).view_as(g)
    below = (winners < 0).double().mean((0, 2, 3))
    assert ((below > 0.1) & (below < 0.9))[:3].all()
    D = ((Norm(1).scale_constant(162) * deviation.abs().mean((0, 2, 3))) ** 2 + EPS).sqrt()
    torch.testing.assert_close(ours.dweight[:3].double(), ((g * winners).sum((0, 2, 3)) / D)[:3], rtol=1e-5, atol=1e-4)


def test_nan_is_not_lost():
    x = made((2, 3, 6, 6), "channels_last")
    x[1, 1, 2, 2] = torch.nan
    z = called.pooled_batch_norm(x, None, None, None, None, True, 0.1, EPS, act="relu")
    assert z[:, 1].isnan().all()
    assert z[:, [0, 2]].isfinite().all()


def test_bfloat16_of_any_size():
    """Keys are compared by their bits; from 2¹²¹ on these are no numbers of the type that they are compared in."""
    for power in (-60, 60, 120, 125):
        x = (made((2, 3, 4, 4), "channels_last") * 2.0**power).bfloat16()
        z = called.pooled_batch_norm(x, None, None, None, None, True, 0.1, 0.0, act="relu")
        y = called.batch_norm(x, None, None, None, None, True, 0.1, 0.0, act="relu")
        assert torch.equal(z.isnan(), F.max_pool2d(y, 3, 2, 1).isnan())
        assert torch.equal(z.nan_to_num(), F.max_pool2d(y, 3, 2, 1).nan_to_num())


def test_runs_are_equal():
    x, g = made((2, 6, 7, 6), "channels_last"), torch.randn(2, 6, 4, 3, device=DEVICE)
    weight, bias = parameters(6).values()
    first, second = (pooled(x, weight, bias, g) for _ in range(2))
    for name in ("y", "dx", "dweight", "dbias", "running_mean", "running_var"):
        assert torch.equal(getattr(first, name), getattr(second, name))


# Ways around the kernels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "options", "reason"),
    [
        (made((2, 3, 4, 4)), {}, "for channels_last inputs only"),
        (made((2, 3, 4, 4), "channels_last"), {"p": 2}, "L1 batch norm with a ReLU only"),
        (made((2, 3, 4, 4), "channels_last"), {"act": None}, "L1 batch norm with a ReLU only"),
        (made((2, 3, 4, 4), "channels_last").double(), {}, ""),
        (made((2, 3, 4, 4), "channels_last")[:, :, :3], {}, "for channels_last inputs only"),
    ],
    ids=["contiguous", "l2", "no relu", "float64", "strided"],
)
def test_the_unfused_way(x, options, reason, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(dispatch, "log_fallback", lambda what, backend, input: said.append(f"{what}: {backend.reason}"))
    options = {"act": "relu", **options}
    weight, bias = (t.to(x.dtype) if x.dtype == torch.float64 else t for t in parameters(3).values())
    arguments = (None, None, weight, bias, True, 0.1, EPS)
    results = []
    for function in (
        lambda x: called.pooled_batch_norm(x, *arguments, **options),
        lambda x: F.max_pool2d(called.batch_norm(x, *arguments, **options), 3, 2, 1),
    ):
        leaf = x.detach().requires_grad_()
        z = function(leaf)
        z.sum().backward()
        results.append((z, leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not reason or any("max pool" in sentence and reason in sentence for sentence in said)


def test_evaluation_and_arithmetic_are_unfused():
    x, (weight, bias) = made((2, 3, 5, 4), "channels_last"), parameters(3).values()
    running = (torch.rand(3, device=DEVICE), 0.5 + torch.rand(3, device=DEVICE))
    z = called.pooled_batch_norm(x, *running, weight, bias, False, 0.1, EPS, act="relu")
    y = F.batch_norm(x, *running, weight, bias, False, 0.1, EPS).relu()
    torch.testing.assert_close(z, F.max_pool2d(y, 3, 2, 1))
    with precision.arithmetic("fp32"):
        z, y = (
            function(x, None, None, weight, bias, True, 0.1, EPS, act="relu")
            for function in (called.pooled_batch_norm, called.batch_norm)
        )
        assert torch.equal(z, F.max_pool2d(y, 3, 2, 1))


def test_wrong_arguments_change_nothing():
    x, running = made((2, 3, 4, 4), "channels_last"), torch.zeros(3, device=DEVICE)
    with pytest.raises(ValueError, match="weight"):
        called.pooled_batch_norm(x, running, None, torch.ones(4, device=DEVICE), None, True, 0.1, EPS, act="relu")
    assert not running.any()


# The module ----------------------------------------------------------------------------------------------------------


def pooled_norm(memory: str = "exact") -> PooledNorm:
    norm = PooledNorm(3, act="relu", memory=memory).to(DEVICE)
    with torch.no_grad():
        for parameter, value in zip(norm.parameters(), parameters(3).values()):
            parameter.copy_(value)
    return norm


def step(norm, call, x: Tensor, g: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    norm.zero_grad()
    z = call(x)
    z.backward(g)
    return [z.detach(), x.grad, *(p.grad for p in norm.parameters()), *(b.clone() for b in norm.buffers())]


@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_module(memory):
    """With the pool there is one kind of memory, whose gradients are the exact ones."""
    norm = pooled_norm(memory)
    plain = L1BatchNorm2d(3, act="relu").to(DEVICE)
    plain.load_state_dict(norm.state_dict())
    x, g = made((2, 3, 5, 6), "channels_last"), torch.randn(2, 3, 3, 3, device=DEVICE)
    ours = step(norm, norm, x, g)
    for mine, reference in zip(ours, step(plain, lambda x: F.max_pool2d(plain(x), 3, 2, 1), x, g)):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)
    residual = torch.randn_like(x)
    for training in (True, False):
        norm.train(training)
        plain.train(training)
        z, link = norm.forward_linked(x, residual, pooled=True)
        assert link is None
        assert torch.equal(z, F.max_pool2d(plain(x, residual), 3, 2, 1))
        assert norm.num_batches_tracked == plain.num_batches_tracked


def test_compiled_is_eager():
    torch.compiler.reset()
    norm = pooled_norm()
    twin = copy.deepcopy(norm)
    seen: list[str] = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    for _ in range(2):
        x, g = made((2, 3, 5, 6), "channels_last"), torch.randn(2, 3, 3, 3, device=DEVICE)
        for mine, reference in zip(step(twin, compiled, x, g), step(norm, norm, x, g)):
            assert torch.equal(mine, reference)
            assert mine.stride() == reference.stride()
    assert [name for name in seen if "normmatters" in name] == ["normmatters.pooled_batch_norm_forward"]


# The operators -------------------------------------------------------------------------------------------------------

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


def arguments(save: bool = True) -> tuple:
    x, constant = made((2, 3, 4, 3), "channels_last"), Norm(1).scale_constant(24)
    tensors = [t.requires_grad_() if save else t for t in (x, *parameters(3).values())]
    running = (*(torch.rand(3, device=DEVICE) for _ in range(2)), torch.zeros((), dtype=torch.int64, device=DEVICE))
    return (*tensors, *running, 0.3, constant, EPS, save)


def test_opcheck():
    given = arguments()
    torch.library.opcheck(torch.ops.normmatters.pooled_batch_norm_forward, given, test_utils=CHECKS)
    _, weight, *_, constant, _, _ = given
    with torch.no_grad():
        _, *saved = torch.ops.normmatters.pooled_batch_norm_forward(*given)
    g = torch.randn(2, 3, 2, 2, device=DEVICE)
    backward = (g, *saved, weight.detach(), constant, 4, 3)
    torch.library.opcheck(torch.ops.normmatters.pooled_batch_norm_backward, backward, test_utils=CHECKS)


def test_nothing_is_saved_without_a_gradient():
    given = arguments(save=False)
    torch.library.opcheck(torch.ops.normmatters.pooled_batch_norm_forward, given, test_utils=CHECKS)
    z, *saved, _ = torch.ops.normmatters.pooled_batch_norm_forward(*given)
    assert (z.shape, *(t.numel() for t in saved)) == ((2, 3, 2, 2), 0, 0, 0)


@pytest.mark.parametrize("memory", ["exact", "lean"])
def test_saved_bytes(memory):
    """Neither x nor the output: the winners, a byte with each, and a number for each channel and program."""
    x = made((16, 8, 16, 16), "channels_last", torch.float16).requires_grad_()
    weight, bias = (t.requires_grad_() for t in parameters(8).values())
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        z = called.pooled_batch_norm(x, None, None, weight, bias, True, 0.1, EPS, act="relu", memory=memory)
    unique = {t.untyped_storage().data_ptr(): t for t in packed}
    kept = sum(t.untyped_storage().nbytes() for at, t in unique.items() if at != weight.data_ptr())
    size = x.numel() * 2
    assert 0.375 * size <= kept <= 0.385 * size
    assert not {t.untyped_storage().data_ptr() for t in (x, z)} & unique.keys()
