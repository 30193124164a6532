"""The native CPU kernels with the rest of PyTorch, with threads and processes, and in every instruction set."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from normmatters import nn as norms
from normmatters.kernels import backends, cpu
from support import native_steps, tolerances
from support.native_steps import LAYERS, NATIVE, Network, data, native_nodes, optimized, step

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=cpu.why_not())


TESTS = Path(native_steps.__file__).parents[1]


def same(ours: list[Tensor], expected: list[Tensor]) -> bool:
    return len(ours) == len(expected) and all(map(torch.equal, ours, expected))


def close(ours: list[Tensor], expected: list[Tensor], what: str = "") -> None:
    """Within roundings of sums over (N, H, W), relative to the largest number of each result."""
    assert len(ours) == len(expected)
    for i, (a, b) in enumerate(zip(ours, expected)):
        bound = tolerances.gradient(torch.float32, data().numel()) * (1 + b.double().abs().max())
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=bound.item(), msg=f"{what} {i}")


# With the rest of PyTorch --------------------------------------------------------------------------------------------


def test_every_layer_here_runs_on_native_kernels() -> None:
    for layout in native_steps.LAYOUTS:
        x = data(layout=layout).requires_grad_()
        for name, make in LAYERS.items():
            assert native_nodes(make()(x)), name
        assert native_nodes(Network()(x)) == NATIVE


@pytest.mark.parametrize("layout", native_steps.LAYOUTS)
def test_compiled_by_inductor_in_one_graph(layout: str) -> None:
    torch.compiler.reset()
    model, x = Network(), data(layout=layout)
    expected = step(copy.deepcopy(model), x)
    close(step(model, x, torch.compile(model, fullgraph=True)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("p", [1, 2, "range"])
def test_a_cumulative_average_compiles_into_one_graph(p: float | str, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    model = norms.LpBatchNorm2d(native_steps.CHANNELS, p, momentum=None, act="relu").to(dtype)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for count in (1, 2, 3):
        x = count * data(dtype=dtype)
        for ours, expected in zip(step(model, x, compiled), step(eager, x)):
            bound = tolerances.gradient(dtype, x.numel()) * (1 + expected.abs().max().item())
            torch.testing.assert_close(ours, expected, rtol=0, atol=bound)
        assert model.num_batches_tracked.item() == count
    assert native_nodes(eager(x.requires_grad_()))


def test_exported_programs_run_without_this_library() -> None:
    model, x = Network(exact=True), data()
    program = torch.export.export(copy.deepcopy(model), (x,))
    assert not [str(node.target) for node in program.graph.nodes if "normmatters" in str(node.target)]
    close(step(program.module(), x)[:2], step(model, x)[:2])


def test_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the plain path: linear layers in bfloat16, norms of float32 in float32."""
    x, results = data(), []
    for missing in ("", "this test has none"):
        monkeypatch.setattr(backends, "NATIVE_MISSING", missing)
        model = Network(exact=True)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(step(copy.deepcopy(model), x))
            assert native_nodes(model(x.requires_grad_())) == (set() if missing else NATIVE)
    one = tolerances.elementwise(torch.bfloat16)  # products in bfloat16, of weights that may be rounded either way
    for ours, plain in zip(*results):
        torch.testing.assert_close(ours, plain, rtol=one, atol=one * plain.double().abs().max().item())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool) -> None:
    model, x = Network(), data()
    expected = step(copy.deepcopy(model), x)
    parameters = 2 + len([*model.parameters()])  # running statistics move at each forward pass
    again = step(model, x, lambda x: checkpoint(model, x, use_reentrant=reentrant))
    assert same(again[:parameters], expected[:parameters])


def test_function_transforms_take_the_plain_path() -> None:
    model, x = Network(exact=True), data()
    expected = step(copy.deepcopy(model), x)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def outputs(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        mine = {name: buffer.clone() for name, buffer in buffers.items()}
        return torch.func.functional_call(model, (parameters, mine), (x,))

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y = outputs(parameters, x)
        return (y * native_steps.weights_of(y)).sum()

    gradients, dx = torch.func.grad(loss, (0, 1))(parameters, x)
    close([outputs(parameters, x), dx, *gradients.values()], expected[: 2 + len(parameters)])
    direction = torch.ones_like(x)
    _, along = torch.func.jvp(lambda x: loss(parameters, x), (x,), (direction,))
    close([along], [(expected[1] * direction).sum()])
    rows = nn.Sequential(*[LAYERS[name]() for name in ("layer", "rms", "layer lp")])
    each = torch.func.vmap(torch.func.grad(lambda x: rows(x).square().sum()))(x)
    x.requires_grad_()
    close([each], [*torch.autograd.grad(rows(x).square().sum(), x)])


def _in_parallel(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    torch.set_num_threads(1)
    mesh, x = init_device_mesh("cpu", (2,)), data(8)
    alone = [step(Network(), half) for half in x.chunk(2)]
    count = 2 + len([*Network().parameters()])
    expected = [*alone[rank][:2], *[(a + b) / 2 for a, b in zip(*(one[2:count] for one in alone))]]
    for name in ("ddp", "fsdp"):
        model = Network()
        parallel = DistributedDataParallel(model) if name == "ddp" else fully_shard(model, mesh=mesh)
        assert native_nodes(parallel(x.chunk(2)[rank].requires_grad_())) == NATIVE
        model = Network()
        parallel = DistributedDataParallel(model) if name == "ddp" else fully_shard(model, mesh=mesh)
        found = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in step(parallel, x.chunk(2)[rank])]
        close(found[:count], expected, name)
    torch.save(True, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ddp_and_fsdp_over_gloo(tmp_path: Path) -> None:
    """Two processes, forked after the kernels have run: gradients are the mean of the halves' own."""
    step(Network(), data())
    mp.start_processes(_in_parallel, (str(tmp_path),), nprocs=2, start_method="fork")
    assert len([*tmp_path.glob("*.pt")]) == 2


# Threads and processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", native_steps.LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_threads(name: str, layout: str, threads: Callable[[int], None]) -> None:
    """A number of threads gives the same bits always. Another number moves the bounds of batch norms' partial sums."""
    layer, x, results = LAYERS[name](), data(70, layout), {}
    for count in (1, 2, 3):
        threads(count)
        fresh = [step(copy.deepcopy(layer), x) for _ in range(3)]
        assert same(fresh[0], fresh[1])
        assert same(fresh[0], fresh[2])
        results[count] = fresh[0]
    for count in (2, 3):
        for i, (one, many) in enumerate(zip(results[1], results[count])):
            # From the third on they are sums, whose terms are of order 1 and may cancel.
            sums, size = tolerances.statistic(torch.float32, x.numel() // x.shape[1]), float(one.abs().max())
            atol = tolerances.regrouped(torch.float32) * size if i < 2 else sums * (1 + size)
            torch.testing.assert_close(one, many, rtol=0, atol=atol)


def test_deterministic_mode_gives_the_same_bits(threads: Callable[[int], None]) -> None:
    """The mode also fills new tensors with NaN, which shows what is read before it is written."""
    model, x = Network(), data(70)
    threads(3)
    expected = step(copy.deepcopy(model), x)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            assert same(step(copy.deepcopy(model), x), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_several_python_threads_at_once(threads: Callable[[int], None]) -> None:
    model, x, found = Network(), data(20), {}
    threads(2)
    expected = step(copy.deepcopy(model), x)
    optimized_alone = [optimized(name) for name in native_steps.OPTIMIZERS]

    def work(i: int) -> None:
        torch.set_num_threads(2)  # each Python thread has a number of its own
        mine = copy.deepcopy(model)
        found[i] = [step(copy.deepcopy(mine), x) for _ in range(3)], [optimized(n) for n in native_steps.OPTIMIZERS]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 4
    for steps, weights in found.values():
        assert all(same(one, expected) for one in steps)
        assert all(map(same, weights, optimized_alone))


def _in_child(model: nn.Module, x: Tensor, path: str) -> None:
    torch.set_num_threads(1)  # as in a DataLoader's workers: no pool of threads survives a fork
    torch.save([step(model, x), *(optimized(name) for name in native_steps.OPTIMIZERS)], path)


def test_a_fork_after_use(tmp_path: Path, threads: Callable[[int], None]) -> None:
    model, x, path = Network(), data(70), tmp_path / "child.pt"
    expected = [step(copy.deepcopy(model), x), *(optimized(name) for name in native_steps.OPTIMIZERS)]
    threads(2)
    step(copy.deepcopy(model), x)
    child = mp.get_context("fork").Process(target=_in_child, args=(model, x, str(path)))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert all(map(same, torch.load(path), expected))


def test_every_instruction_set_gives_equal_results(tmp_path: Path) -> None:
    library = cpu.library()
    assert library is not None
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = {
        isa: subprocess.Popen(
            [sys.executable, "-m", "support.native_steps", tmp_path / isa], cwd=TESTS,
            env={**environment, "NORMMATTERS_CPU_ISA": isa},
            stderr=subprocess.PIPE, text=True,
        )
        for isa in native_steps.instruction_sets() if isa != library.isa
    }  # fmt: skip
    results = {library.isa: native_steps.results()}
    for isa, process in started.items():
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        results[isa] = torch.load(tmp_path / isa)
    baseline = results.pop("baseline")
    for isa, found in results.items():
        native_steps.compare(found, baseline, isa)
