"""The kernels behind `precision.arithmetic` against its plain operations: the same bits, for every number there is."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from normmatters import precision
from normmatters.kernels import backends
from normmatters.kernels.triton import rounding as kernels
from normmatters.kernels.triton.launch import Launch
from normmatters.kernels.triton.rounding import FORMATS
from normmatters.nn.batchnorm import LpBatchNorm2d
from normmatters.nn.layernorm import L1LayerNorm
from normmatters.precision import rounding
from support.batch_norm_cases import DEVICE
from support.gpu_steps import check_cuda_graph

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

ACCUMULATORS = [torch.float16, torch.bfloat16, torch.float32]
ROUNDED = [dtype for dtype in FORMATS if dtype != torch.float32]
OPERATIONS = [rounding.add, rounding.subtract, rounding.multiply, rounding.divide]
gpu = pytest.mark.gpu


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "TRITON_MISSING", "kernels are switched off by the test")
        yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels, as they are launched."""
    names: list[str] = []
    launch = Launch.by_triton

    def note(self: Launch, *arguments: Any) -> None:
        names.append(self.kernel.fn.__name__)
        launch(self, *arguments)

    monkeypatch.setattr(Launch, "by_triton", note)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda *_: None)  # so that Triton launches all
    return names


def same_bits(ours: Tensor, reference: Tensor) -> None:
    """Raise unless both have the same bits; of NaN there are many, which are all the same."""
    assert ours.shape == reference.shape
    assert ours.dtype == reference.dtype
    wrong = ours.ne(reference) | ours.signbit().ne(reference.signbit())
    wrong &= ~(ours.isnan() & reference.isnan())
    where = wrong.nonzero()[:5].tolist()
    assert not where, f"at {where}: {ours[wrong][:5].tolist()}, not {reference[wrong][:5].tolist()}"


def numbers(count: int) -> Tensor:
    """Every kind of float32: of random bits, and what lies at the edges and in the middle between two of a format."""
    anything = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    edges = [0.0, 1.0, math.inf, math.nan, 3.4e38, 1.4e-45, 1e-40, 65504.0, 65519.996, 65520.0, 65536.0]
    edges += [2**-24, 2**-25, 1.0001 * 2**-25, 1.5 * 2**-24, 2**-14, 2**-14 - 2**-25, 2**-133, 2**-134]
    edges += [448.0, 464.0, 480.0, 57344.0, 61440.0, 2**-9, 2**-10, 1.5 * 2**-9, 2**-16, 2**-17, 2**-6 - 2**-10]
    edges += [1 + odd * 2.0**-bits for odd in (1, 3) for bits in (3, 4, 8, 11)]
    near = torch.randn(count) * 10.0 ** torch.randint(-9, 6, (count,))
    return torch.cat([anything, torch.tensor(edges), -torch.tensor(edges), near]).to(DEVICE)


# Operations ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ROUNDED, ids=FORMATS.get)
def test_rounding(dtype: torch.dtype, launched: list[str]) -> None:
    x = numbers(2**18 if DEVICE == "cuda" else 2**12)
    ours = rounding.rounded(x, dtype)
    assert launched == ["operation_kernel"]
    with plain():
        same_bits(ours, rounding.rounded(x, dtype))
    assert len(launched) == 1
    same_bits(ours, rounding.rounded(ours, dtype))  # which are numbers of the format


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ROUNDED, ids=FORMATS.get)
def test_operations(operation: Any, dtype: torch.dtype, launched: list[str]) -> None:
    x = numbers(1000)
    y = x[torch.randperm(len(x))]
    ours = operation(x, y, dtype), operation(x[:, None], 1.7, dtype)
    assert launched == ["operation_kernel"] * 2
    with plain():
        same_bits(ours[0], operation(x, y, dtype))
        same_bits(ours[1], operation(x[:, None], 1.7, dtype))


def test_operands_of_every_shape(launched: list[str]) -> None:
    x, row, column = (torch.randn(shape, device=DEVICE) for shape in ((5, 1500), (1, 1500), (5, 1)))
    pairs = [(x, x), (x, row), (x, column), (column, x), (row, column), (column, column), (x, 3)]
    pairs += [(x, x[:1, :1].expand(5, 1500)), (x[:, ::3], column), (x[1:4, 7:9], x[2:5, :2]), (x.T, row.T)]
    for a, b in pairs:
        ours = rounding.divide(a, b, torch.float16)
        assert ours.is_contiguous()
        with plain():
            same_bits(ours, rounding.divide(a, b, torch.float16))
    assert len(launched) == len(pairs)
    with pytest.raises(RuntimeError, match="expand"):
        rounding.add(x, x[:, :7], torch.float16)


def test_what_the_kernel_does_not_take(launched: list[str]) -> None:
    x = torch.randn(2, 3, 4, device=DEVICE)
    for a, b in [(x.mT, x.mT), (x.double(), 3.0), (x[:0], x[:0]), (x, x[0])]:
        assert launched == []
        same_bits(rounding.multiply(a, b, torch.float16), (a * b).half().float())
    assert launched == ["operation_kernel"]  # of the last, which broadcasts in three dimensions, the rounding alone
    assert rounding.rounded(x, torch.float32) is x


# Tree means ----------------------------------------------------------------------------------------------------------


def check_tree_mean(x: Tensor, dim: int, accumulate: torch.dtype) -> None:
    ours = rounding.tree_mean(x, dim, accumulate)
    with plain():
        same_bits(ours, rounding.tree_mean(x, dim, accumulate))


@pytest.mark.parametrize("accumulate", ACCUMULATORS, ids=FORMATS.get)
@pytest.mark.parametrize("n", [2, 4, 64, 512, 1024, 8192, 16384])
def test_tree_mean_of_a_power_of_two(n: int, accumulate: torch.dtype, launched: list[str]) -> None:
    rows = {8192: 2, 16384: 1}.get(n, 5)
    x = torch.randn(rows, n, device=DEVICE) * 10.0 ** torch.arange(-4, rows - 4, device=DEVICE)[:, None]
    check_tree_mean(x + 3 * x.abs().mean(), 1, accumulate)
    assert launched == ["tree_mean_kernel"] * (2 if n > 8192 else 1)


@pytest.mark.parametrize("accumulate", ACCUMULATORS, ids=FORMATS.get)
def test_tree_mean_of_any_number(accumulate: torch.dtype) -> None:
    x = numbers(2**11)
    n = len(x) // 64 * 64
    check_tree_mean(x[:n].view(-1, 2), 1, accumulate)
    check_tree_mean(x[:n].view(-1, 64), 1, accumulate)
    tiny = torch.randint(-7, 8, (64, 64), device=DEVICE) * 2.0**-149  # half of which rounds, in float32 as well
    check_tree_mean(tiny, 1, accumulate)
    check_tree_mean(tiny * -0.0, 1, accumulate)


@pytest.mark.parametrize("accumulate", ACCUMULATORS, ids=FORMATS.get)
def test_tree_mean_of_other_counts_and_dimensions(accumulate: torch.dtype, launched: list[str]) -> None:
    for shape, dim, launches in [
        ((3, 1), 1, 0),
        ((3, 7), 1, 0),
        ((3, 12), 1, 1),
        ((2, 96), 1, 2),
        ((64, 5), 0, 2),
        ((2, 8, 3), 1, 1),
        ((2, 3, 8), 2, 1),
        ((1, 16), 1, 1),
    ]:
        launched.clear()
        check_tree_mean(torch.randn(shape, device=DEVICE), dim, accumulate)
        assert launched.count("tree_mean_kernel") == launches, shape
    check_tree_mean(torch.randn(64, 6, device=DEVICE).T, -1, accumulate)
    assert rounding.tree_mean(torch.zeros(3, 0, device=DEVICE), 1, accumulate).tolist() == [[0.0]] * 3


def test_launches_of_long_rows() -> None:
    assert [left for _, left in kernels.tree_launches(16, 2**17, 1, torch.float16)] == [2**13, 1]
    assert [left for _, left in kernels.tree_launches(3, 2**20, 1, torch.float16)] == [2**16, 2**13, 1]
    assert [left for _, left in kernels.tree_launches(3, 49 * 2**6, 1, torch.float16)] == [49 * 4, 49]


@gpu
@pytest.mark.parametrize("accumulate", ACCUMULATORS, ids=FORMATS.get)
@pytest.mark.parametrize(
    ("rows", "n"), [(16, 131072), (32, 32768), (64, 8192), (1, 131072), (3, 2**20), (5, 49 * 2**13), (4, 100_001)]
)
def test_tree_mean_of_real_sizes(rows: int, n: int, accumulate: torch.dtype) -> None:
    x = torch.randn(rows, n, device=DEVICE)
    for scale in (1.0, 1e4, 1e-6):
        check_tree_mean(x * scale + scale, 1, accumulate)


@gpu
def test_tree_mean_of_specials_in_long_rows() -> None:
    x = numbers(2**19)[: 8 * 131072].view(8, -1)
    for accumulate in ACCUMULATORS:
        check_tree_mean(x, 1, accumulate)


# Whole norms ---------------------------------------------------------------------------------------------------------


def norm_step(p: Any, k: int | None, shape: tuple[int, ...], residual: bool, eval: bool = False) -> list[Tensor]:
    """The output of a batch norm, all gradients and the buffers."""
    torch.manual_seed(1)
    x, r, g = ((torch.randn(shape) * 3 + 1).to(DEVICE) for _ in range(3))
    module = LpBatchNorm2d(shape[1], p=p, k=k, act="relu").to(DEVICE).train(not eval)
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    x.requires_grad_()
    r.requires_grad_()
    y = module(x, residual=r) if residual else module(x)
    y.backward(g)
    gradients = [x.grad, r.grad if residual else x.grad, module.weight.grad, module.bias.grad]
    return [y.detach(), *gradients, *module.buffers()]


@pytest.mark.parametrize(
    ("p", "k", "dtype", "accumulate"),
    [
        (1, None, "fp16", "fp16"),
        (2, None, "fp16", "fp16"),
        (2, None, "bf16", "bf16"),
        (1, None, "bf16", "fp32"),
        (1, None, "e4m3", "fp16"),
        (math.inf, 4, "e5m2", "fp16"),
        ("range", None, "fp16", "fp32"),
    ],
)
@pytest.mark.parametrize("shape", [(8, 3, 4, 4), pytest.param((128, 16, 32, 32), marks=gpu)], ids=["small", "real"])
def test_batch_norm(p: Any, k: Any, dtype: str, accumulate: str, shape: tuple[int, ...], launched: list[str]) -> None:
    with precision.arithmetic(dtype, accumulate):
        ours = norm_step(p, k, shape, residual=True)
        assert {*launched} == {"operation_kernel", "tree_mean_kernel"}
        launched.clear()
        with plain():
            reference = norm_step(p, k, shape, residual=True)
    assert launched == []
    for mine, theirs in zip(ours, reference, strict=True):
        same_bits(mine, theirs)


def test_batch_norm_in_evaluation() -> None:
    with precision.arithmetic("fp16", "fp16"):
        ours = norm_step(1, None, (8, 3, 4, 4), residual=False, eval=True)
        with plain():
            reference = norm_step(1, None, (8, 3, 4, 4), residual=False, eval=True)
    for mine, theirs in zip(ours, reference, strict=True):
        same_bits(mine, theirs)


def test_layer_norm() -> None:
    module = L1LayerNorm(24).to(DEVICE)
    torch.nn.init.normal_(module.weight)
    x, g = torch.randn(12, 24, device=DEVICE, requires_grad=True), torch.randn(12, 24, device=DEVICE)

    def step() -> list[Tensor]:
        y = module(x)
        return [y.detach(), *torch.autograd.grad(y, [x, module.weight, module.bias], g)]

    with precision.arithmetic("fp16", "fp16"):
        ours = step()
        with plain():
            reference = step()
    for mine, theirs in zip(ours, reference, strict=True):
        same_bits(mine, theirs)


@gpu
@pytest.mark.parametrize("p", [1, 2])
def test_cuda_graph(p: int) -> None:
    def data() -> tuple[Tensor, Tensor]:
        return torch.randn(128, 16, 32, 32, device=DEVICE), torch.randn(128, 16, 32, 32, device=DEVICE)

    with precision.arithmetic("fp16", "fp16"):
        check_cuda_graph(LpBatchNorm2d(16, p=p, act="relu").to(DEVICE), data)


@gpu
def test_cpu_and_gpu_agree() -> None:
    x = torch.randn(8, 16384) * 5 + 2
    for accumulate in ACCUMULATORS:
        same_bits(rounding.tree_mean(x.cuda(), 1, accumulate).cpu(), rounding.tree_mean(x, 1, accumulate))
    for dtype in ROUNDED:
        for operation in OPERATIONS:
            same_bits(operation(x.cuda(), x.cuda()[:, :1], dtype).cpu(), operation(x, x[:, :1], dtype))


def test_a_dispatch_mode_sees_operations_that_it_knows(launched):
    """The kernels have no operators: a mode of tensors without memory could not follow them."""
    mode, norm = FakeTensorMode(allow_non_fake_inputs=True), LpBatchNorm2d(3, device=DEVICE)
    with mode, precision.arithmetic("fp16"):
        assert norm(mode.from_tensor(torch.randn(4, 3, 2, 2, device=DEVICE))).shape == (4, 3, 2, 2)
    assert launched == []


@pytest.mark.parametrize("accumulate", ACCUMULATORS)
@pytest.mark.parametrize("n", [1, 63, 64, 130])
def test_running_sums_are_the_plain_ones(accumulate: torch.dtype, n: int, launched: list[str]) -> None:
    torch.manual_seed(n)
    x = torch.randn(5, n, device=DEVICE) * torch.tensor([1e-7, 1.0, 100.0, 3000.0, 0.0], device=DEVICE)[:, None]
    x[3] = x[3].abs()  # its sum leaves fp16
    x[4] = -0.0
    ours = rounding.running_mean(x, 1, accumulate)
    assert "running_sum_kernel" in launched
    with plain():
        same_bits(ours, rounding.running_mean(x.cpu(), 1, accumulate).to(DEVICE))
