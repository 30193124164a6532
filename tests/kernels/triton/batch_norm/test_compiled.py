"""Compiled networks: one operator a norm and direction, running statistics moved in place and once, no warnings."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytest.importorskip("triton")

from normmatters import convert
from normmatters.bench import peers
from normmatters.nn import L1BatchNorm2d, L1LayerNorm, RangeBatchNorm2d, TopKBatchNorm2d, twin
from support import tolerances
from support.batch_norm_cases import DEVICE, EPS, made

SHAPE = (4, 3, 4, 5)


def step(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The output, all gradients and all buffers after one step."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    model.zero_grad()
    y = call(x)
    torch.manual_seed(1)
    y.backward(torch.randn_like(y))
    return [y.detach(), *(t.grad for t in (x, *model.parameters())), *(b.clone() for b in model.buffers())]


class Twice(nn.Module):
    """The same norm before and behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), L1BatchNorm2d(3, act="relu", memory="lean")

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.norm(x)))


class Checkpointed(Twice):
    """All of it is computed again in the backward pass, but counted once."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Quiet(Twice):
    """A first pass that nobody differentiates moves the running statistics as well."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            quiet = super().forward(x)
        return super().forward(x) + quiet


@pytest.mark.parametrize("network", [Twice, Checkpointed, Quiet])
def test_compiled_is_eager(network):
    torch.compiler.reset()
    model = network().to(DEVICE)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # and a second step, from moved statistics
        x = made(SHAPE, "channels_last")
        for mine, reference in zip(step(other, compiled, x), step(model, model, x), strict=True):
            assert torch.equal(mine, reference)


class Alone(nn.Module):
    """A norm whose running statistics are means over all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = L1BatchNorm2d(3, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).relu()


class Pooled(Alone):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm.forward_linked(x, relu=True, pooled=True)[0]


class Twin(Alone):
    def __init__(self) -> None:
        super().__init__()
        self.other = L1BatchNorm2d(3, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        assert twin.twin_fits(self.norm, x, self.other, x)
        return twin.twin_batch_norm(self.norm, x, self.other, x)[0]


@pytest.mark.parametrize("network", [Alone, Pooled, Twin])
def test_a_cumulative_average_compiles_into_one_graph(network):
    torch.compiler.reset()
    model = network().to(DEVICE)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for count in (1, 2, 3):
        x = made((4, 3, 4, 4), "channels_last")
        for mine, reference in zip(step(other, compiled, x), step(model, model, x), strict=True):
            bound = tolerances.gradient(torch.float32, x.numel()) * (1 + reference.abs().max().item())
            torch.testing.assert_close(mine, reference, rtol=0, atol=bound)
        assert other.norm.num_batches_tracked.item() == count


def test_what_the_compiler_makes_of_a_network():
    """A stem with its pool, and a block that downsamples: an operator each way, and nothing copied."""
    from torch._inductor.utils import run_and_get_code

    torch.compiler.reset()
    model = peers.ResNet50(nn.BatchNorm2d, width=4, classes=3, depths=(1,))
    model = convert(model, "l1", memory="lean").to(DEVICE, memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True)
    x = made((2, 3, 8, 8), "channels_last")
    # No graphs of earlier runs: they are kept by their operators' names, whatever those did then.
    graphs = (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    )
    with graphs[0], graphs[1]:
        found, codes = run_and_get_code(step, other, compiled, x)
    for mine, reference in zip(found, step(model, model, x), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-3, atol=1e-4)

    calls = [re.findall(r"= torch\.ops\.normmatters\.(\w+)\.default\((.*)\)", code) for code in codes]
    forward, backward = [sorted(name for name, _ in part) for part in calls]
    kinds = [*["batch_norm"] * 2, "pooled_batch_norm", "twin_batch_norm"]
    assert forward == [f"{kind}_forward" for kind in kinds]
    assert backward == [f"{kind}_backward" for kind in kinds]
    for name, arguments in calls[0]:
        at = {
            "batch_norm_forward": (5, 6, 7),
            "pooled_batch_norm_forward": (3, 4, 5),
            "twin_batch_norm_forward": (6, 7, 8, 12, 13, 14),
        }
        tensors = arguments.split(", ")
        assert all(tensors[i].startswith("primals_") for i in at[name])  # the buffers themselves
    copied = [line for line in "\n".join(codes).splitlines() if re.search(r"(clone|batch_norm_forward)\w*\(", line)]
    assert not [line for line in copied if "torch.ops" not in line and "def " not in line], copied


# The operator itself -------------------------------------------------------------------------------------------------


def arguments(x: Tensor) -> tuple:
    zeros = torch.zeros(3, device=DEVICE)
    running = zeros, torch.ones_like(zeros), torch.zeros((), dtype=torch.int64, device=DEVICE)
    return x, None, None, None, None, *running, 0.1, "l1", 0, 1.25, EPS, False, False, x.requires_grad, False


class Seen(TorchDispatchMode):
    """What is called below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["grad", "no grad", "inference", "watched", "watched grad"])
def test_every_way_to_the_kernel_moves_the_statistics_and_says_so(how):
    x = made(SHAPE)
    expected = torch.ops.normmatters.batch_norm_forward(*arguments(x))
    given = arguments(x.requires_grad_("grad" in how and how != "no grad"))
    _, _, _, _, _, mean, var, batches, *_ = given
    if how == "inference":
        with torch.inference_mode():
            y, *_, statistics, _ = torch.ops.normmatters.batch_norm_forward(*given)
    elif how.startswith("watched"):
        with Seen() as seen:
            y, *_, statistics, _ = torch.ops.normmatters.batch_norm_forward(*given)
        assert seen.names[0] == "normmatters.batch_norm_forward.default"
    else:
        with torch.set_grad_enabled(how == "grad"):
            y, *_, statistics, _ = torch.ops.normmatters.batch_norm_forward(*given)
    assert torch.equal(y, expected[0])
    assert y.requires_grad == ("grad" in how and how != "no grad")
    assert not statistics.requires_grad
    torch.testing.assert_close(mean, 0.1 * x.detach().mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    assert not torch.equal(var, torch.ones_like(var))
    assert batches.item() == 1
    assert all(moved._version >= 1 for moved in (mean, var, batches))


def test_autograd_notices_that_running_statistics_were_moved():
    given = arguments(made(SHAPE))
    mean = given[5]
    scale = torch.ones(3, device=DEVICE, requires_grad=True)
    product = scale * mean  # keeps the mean for its gradient
    torch.ops.normmatters.batch_norm_forward(*given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing(policy):
    model = Twice().to(DEVICE)
    other = copy.deepcopy(model)
    asked: list[str] = []

    def choose(_, operator, *args, **kwargs):
        asked.append(str(operator))
        return policy

    def call(x: Tensor) -> Tensor:
        return checkpoint(
            other, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(choose)
        )

    x = made(SHAPE)
    for mine, reference in zip(step(other, call, x), step(model, model, x), strict=True):
        assert torch.equal(mine, reference)
    assert "normmatters.batch_norm_forward.default" in asked


# Warnings ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = L1BatchNorm2d(3), TopKBatchNorm2d(3, k=2), RangeBatchNorm2d(3)
        self.rows = L1LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(self.last(self.second(self.first(x))))


def test_compiling_warns_of_nothing(monkeypatch):
    """The compiler warns once for each place where it meets a cache: nothing of ours may be such a place."""
    import torch._dynamo.utils

    told: list[str] = []
    monkeypatch.setattr(torch._dynamo.utils, "warn_once", told.append)
    torch.compiler.reset()
    stem = convert(peers.ResNet50(nn.BatchNorm2d, width=4, classes=3, depths=(2,)), "l1", memory="lean")
    networks = [(stem, made((2, 3, 8, 8), "channels_last")), (Block(), made(SHAPE))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for network, x in networks:
            model = network.to(DEVICE, memory_format=torch.channels_last)
            torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()
    told += [str(w.message) for w in caught if "triton" not in w.filename and "numpy" not in w.filename]
    assert not [message for message in told if "lru_cache" in message or "normmatters" in message]


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_batch_sizes_in_one_graph_each(dynamic):
    """The last batch of an epoch is a smaller one; its size is a symbol to the compiler, which kernels do not take."""
    torch.compiler.reset()
    model = nn.Sequential(TopKBatchNorm2d(3, k=2), RangeBatchNorm2d(3), L1BatchNorm2d(3), L1LayerNorm(5)).to(DEVICE)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for size in (4, 3):
        x = made((size, *SHAPE[1:]))
        for mine, expected in zip(step(model, compiled, x), step(plain, plain, x)):
            torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("norm", [L1BatchNorm2d(3, track_running_stats=False), L1LayerNorm(5)], ids=["batch", "layer"])
@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: torch.func.vmap(f),
        lambda f: torch.func.grad(lambda x: f(x[0]).square().sum()),
        lambda f: lambda x: torch.func.jvp(f, (x[0],), (x[1],))[1],
    ],
    ids=["vmap", "grad", "jvp"],
)
def test_transforms_inside_a_compiled_function(norm, transformed):
    """They need the plain equation there, as they do in eager mode: the operators know none of them."""
    norm = copy.deepcopy(norm).to(DEVICE)
    x = made((2, *SHAPE))
    function = transformed(lambda x: norm(x))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), function(x), atol=1e-6)
