"""SyncLpBatchNorm in 2 and 3 gloo processes against one process with the whole batch.

Processes cost seconds to start, so three are started once; two of them form the group of two. They run every case and
leave the results in files, which the tests below compare case by case.
"""

import math
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from filelock import FileLock  # comes with torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from normmatters import precision
from normmatters.nn.batchnorm import L1BatchNorm2d, LpBatchNorm1d, LpBatchNorm2d, MeanOnlyBatchNorm2d, TopKBatchNorm2d
from normmatters.nn.sync import SyncLpBatchNorm, convert_sync_batchnorm

C = 3
NORMS = {
    "l1": {"p": 1},
    "l2": {"p": 2, "constant": 1.5},
    "lp": {"p": 3.0},
    "linf": {"p": math.inf},
    "top6": {"p": math.inf, "k": 6},
    "top30": {"p": math.inf, "k": 30, "constant": "paper"},  # more than some ranks have
    "range": {"p": "range"},
    "mean": {"p": "mean"},
}
SPLITS = {2: [(5, 3), (7, 1)], 3: [(6, 0, 2), (0, 0, 9)]}
CASES = [(world, sizes, norm) for world, splits in SPLITS.items() for sizes in splits for norm in NORMS]


def close(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-12)


def make(norm, sync, **extra):
    """The module under test or its one-process counterpart, with the same random parameters."""
    torch.manual_seed(1)
    options = NORMS[norm] | extra
    if sync:
        bn = SyncLpBatchNorm(C, dtype=torch.float64, **options)
    elif norm == "mean":
        bn = MeanOnlyBatchNorm2d(C, dtype=torch.float64, act=options.get("act"), momentum=options.get("momentum", 0.1))
    else:
        bn = LpBatchNorm2d(C, dtype=torch.float64, **options)
    with torch.no_grad():
        if bn.weight is not None:
            bn.weight.copy_(torch.tensor([0.5, 1.5, -1.0]))
        bn.bias.copy_(torch.tensor([0.1, -0.3, 0.2]))
    return bn


def batch(sizes, seed=0):
    """Input, residual and output gradient of the whole batch, (3, N, C, 2, 2), and where each rank's share begins."""
    generator = torch.Generator().manual_seed(seed)
    tensors = torch.randn(3, sum(sizes), C, 2, 2, dtype=torch.float64, generator=generator) + 0.5
    return tensors, [sum(sizes[:i]) for i in range(len(sizes) + 1)]


def step(bn, x, residual, grad):
    """Output and gradients of one training step."""
    x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
    output = bn(x, residual)
    output.backward(grad)
    return {"output": output.detach(), "dx": x.grad, "dresidual": residual.grad}


def two_steps(bn, shares):
    result = [step(bn, *share) for share in shares][-1]
    for name, parameter in bn.named_parameters():
        result[f"d{name}"] = parameter.grad
    return result | {name: buffer.clone() for name, buffer in bn.named_buffers()}


def two_batches(sizes, rank):
    shares = []
    for seed in (0, 1):
        tensors, starts = batch(sizes, seed)
        shares.append(tensors[:, starts[rank] : starts[rank + 1]])
    return shares


def ddp_model(sync, group=None):
    torch.manual_seed(2)
    norm = SyncLpBatchNorm(C, process_group=group, act="relu") if sync else LpBatchNorm1d(C, act="relu")
    return nn.Sequential(nn.Linear(4, C), norm, nn.Linear(C, 1)).double()


def ddp_input():
    x = torch.arange(8.0, dtype=torch.float64)[:, None]
    return (x * torch.tensor([1.0, -1.0, 0.5, 2.0])).sin()


def tied_input():
    values = torch.tensor([2.0, -2.0, 1.0, 2.0, -1.0, -2.0], dtype=torch.float64)
    return values[:, None, None, None].expand(-1, C, 2, 2)


def ddp_step(model, x, weight):
    """One SGD step on Σ output²·weight; returns the parameters after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(x).square().sum() * weight).backward()
    optimizer.step()
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def error_of(function, *args):
    try:
        function(*args)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def cases(group, world, rank):
    """Every case, as seen by one process of a group of ``world``."""
    results = {}
    for sizes in SPLITS[world]:
        for norm in NORMS:
            bn = make(norm, True, act="relu", process_group=group)
            results[f"{sizes} {norm}"] = two_steps(bn, two_batches(sizes, rank))

    model = DistributedDataParallel(ddp_model(True, group), process_group=group)
    results["ddp"] = ddp_step(model, ddp_input()[rank::world], world / 8)  # DDP averages over the ranks

    tensors, starts = batch(SPLITS[world][0])
    share = tensors[:, starts[rank] : starts[rank + 1]]
    bn = make("l1", True, momentum=None, process_group=group)
    recomputed = share[0].clone().requires_grad_()
    checkpoint(bn, recomputed, share[1], use_reentrant=False).backward(share[2])
    results["checkpoint"] = {"dx": recomputed.grad} | dict(bn.named_buffers())
    if rank == 0:  # alone: evaluation must not wait for the others
        results["eval"] = {"output": bn.eval()(share[0], share[1]).detach()}

    results["empty"] = {n: two_steps(make(n, True, process_group=group), [share[:, :0]] * 2) for n in NORMS}
    x = tied_input()[rank::world]
    results["tied"] = step(make("linf", True, process_group=group), x, torch.zeros_like(x), x.cos())
    constant = torch.full_like(share[0], 3.0)
    results["constant"] = {n: step(make(n, True, process_group=group), constant, *share[1:])["dx"] for n in NORMS}

    bn = make("top30", True, process_group=group)
    one = share[0, : 1 if rank == 0 else 0]
    results["errors"] = {
        "one value": error_of(bn, one[:, :, :1, :1]),
        "k > n": error_of(bn, one),
        "residual": error_of(bn, share[0], share[1, :, :, :1]),
        "residual's dtype": error_of(bn, share[0], share[1].int()),
        "rank": error_of(bn, torch.zeros(C)),
        "dtype": error_of(bn, share[0].int()),
    }
    with precision.arithmetic("fp16"):
        results["errors"]["precision"] = error_of(bn, share[0])
    results["after errors"] = dict(bn.named_buffers())

    half = share[0].bfloat16().contiguous(memory_format=torch.channels_last)
    bn = SyncLpBatchNorm(C, p=1, process_group=group)
    output = bn(half).detach()
    assert output.is_contiguous(memory_format=torch.channels_last)
    results["half"] = {"output": output, "running_var": bn.running_var}
    return results


def process(rank, folder):
    """One of three processes; two of them also form a group of two, and the third a group of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    results = {"3": cases(None, 3, rank)}
    if rank < 2:
        results["2"] = cases(groups[0], 2, rank)
    else:
        tensors, _ = batch((4,))
        results["alone"] = step(make("l1", True, process_group=groups[1]), *tensors)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results[world][rank][case]"""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers of pytest-xdist share one run
        folder = folder.parent
    folder = folder / "sync"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            mp.spawn(process, (str(folder),), nprocs=3)
    ranks = [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(3)]
    return {3: [rank["3"] for rank in ranks], 2: [rank["2"] for rank in ranks[:2]], 1: [ranks[2]]}


@pytest.mark.parametrize(("world", "sizes", "norm"), CASES)
def test_processes_equal_one_process(results, world, sizes, norm):
    ranks = [result[f"{sizes} {norm}"] for result in results[world]]
    whole = two_steps(make(norm, False, act="relu"), [batch(sizes, seed)[0] for seed in (0, 1)])
    for name in ("output", "dx", "dresidual"):
        close(torch.cat([rank[name] for rank in ranks]), whole[name])
    for name in ("dweight", "dbias"):
        if name in whole:
            close(sum(rank[name] for rank in ranks), whole[name])
    for rank in ranks:
        close(rank["running_mean"], whole["running_mean"])
        close(rank["running_var"], whole["running_var"])
        assert rank["num_batches_tracked"] == 2


@pytest.mark.parametrize("world", SPLITS)
class TestOfAGroup:
    def test_ddp_step_equals_one_process(self, results, world):
        expected = ddp_step(ddp_model(False), ddp_input(), 1 / 8)
        for result in results[world]:
            assert result["ddp"].keys() == expected.keys()
            for name, parameter in expected.items():
                close(result["ddp"][name], parameter)

    def test_recompute_counts_a_batch_once(self, results, world):
        bn = make("l1", False, momentum=None)
        tensors, starts = batch(SPLITS[world][0])
        whole = step(bn, *tensors)
        for rank, result in enumerate(results[world]):
            result = result["checkpoint"]
            assert result["num_batches_tracked"] == 1
            close(result["running_var"], bn.running_var)
            close(result["dx"], whole["dx"][starts[rank] : starts[rank + 1]])
        with torch.no_grad():
            expected = bn.eval()(*tensors[:2, : starts[1]])
        close(results[world][0]["eval"]["output"], expected)

    def test_a_batch_empty_everywhere_moves_nothing(self, results, world):
        for result in results[world]:
            for norm in NORMS:
                empty = result["empty"][norm]
                assert empty["output"].shape == (0, C, 2, 2)
                assert torch.equal(empty["running_mean"], torch.zeros(C, dtype=torch.float64))
                assert torch.equal(empty["running_var"], torch.ones(C, dtype=torch.float64))
                assert torch.equal(empty["dbias"], torch.zeros(C, dtype=torch.float64))

    def test_ties_over_ranks_share_the_gradient(self, results, world):
        x = tied_input()
        whole = step(make("linf", False), x, torch.zeros_like(x), x.cos())
        for rank, result in enumerate(results[world]):
            close(result["tied"]["dx"], whole["dx"][rank::world])

    def test_a_constant_channel_has_a_finite_gradient(self, results, world):
        tensors, starts = batch(SPLITS[world][0])
        for norm in NORMS:
            whole = step(make(norm, False), torch.full_like(tensors[0], 3.0), *tensors[1:])["dx"]
            for rank, result in enumerate(results[world]):
                torch.testing.assert_close(
                    result["constant"][norm], whole[starts[rank] : starts[rank + 1]], rtol=1e-9, atol=1e-9
                )

    def test_errors_are_the_same_on_every_rank_and_change_nothing(self, results, world):
        for result in results[world]:
            errors = result["errors"]
            assert errors["one value"].startswith("ValueError: Expected more than 1 value per channel")
            assert errors["k > n"].startswith("ValueError: Top(k) needs k <= the 4 values")
            assert errors["residual"].startswith("ValueError: residual must have the input's shape")
            assert errors["residual's dtype"].startswith("TypeError: residual must have a real floating-point dtype")
            assert errors["rank"].startswith("ValueError: expected at least 2D")
            assert errors["dtype"].startswith("TypeError: input must have a real floating-point dtype")
            assert errors["precision"].startswith("RuntimeError: precision.arithmetic")
            assert torch.equal(result["after errors"]["running_var"], torch.ones(C, dtype=torch.float64))
            assert result["after errors"]["num_batches_tracked"] == 0

    def test_half_precision_input(self, results, world):
        tensors, _ = batch(SPLITS[world][0])
        bn = LpBatchNorm2d(C, p=1)
        expected = bn(tensors[0].bfloat16())
        output = torch.cat([result["half"]["output"] for result in results[world]])
        assert output.dtype == torch.bfloat16
        torch.testing.assert_close(output, expected.detach(), rtol=2**-7, atol=1e-4)  # one ulp of bf16
        torch.testing.assert_close(results[world][0]["half"]["running_var"], bn.running_var)


def test_a_group_of_one_is_one_process(results):
    expected = step(make("l1", False), *batch((4,))[0])
    for name, tensor in results[1][0]["alone"].items():
        close(tensor, expected[name])


# --- Without a process group ---


@pytest.mark.parametrize("norm", NORMS)
def test_without_processes_it_is_lp_batch_norm(norm):
    tensors, _ = batch((9,))
    ours, plain = make(norm, True, act="relu"), make(norm, False, act="relu")
    result, expected = two_steps(ours, [tensors]), two_steps(plain, [tensors])
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert torch.equal(ours.eval()(tensors[0]), plain.eval()(tensors[0]))


def test_state_is_torchs():
    ours, theirs = SyncLpBatchNorm(4), nn.SyncBatchNorm(4)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == repr(LpBatchNorm2d(4)).replace("LpBatchNorm2d", "SyncLpBatchNorm")
    assert repr(SyncLpBatchNorm(4, math.inf, k=3)).endswith("p=inf, k=3)")
    mean_only = SyncLpBatchNorm(4, "mean")
    mean_only.reset_parameters()
    assert [name for name, _ in mean_only.named_parameters()] == ["bias"]
    with pytest.raises(ValueError, match="2D"):
        ours(torch.randn(4))
    with pytest.raises(ValueError, match="4 channels"):
        ours(torch.randn(4, 3))


def test_convert_wants_a_module():
    with pytest.raises(TypeError, match="expected a module, got NoneType"):
        convert_sync_batchnorm(None)


def test_convert_carries_everything_over():
    shared = L1BatchNorm2d(8, eps=1e-3, momentum=None, act="relu", memory="lean", dtype=torch.float64)
    model = nn.Sequential(
        shared,
        nn.Sequential(TopKBatchNorm2d(8, k=4, constant="paper").eval(), shared),
        MeanOnlyBatchNorm2d(8),
        LpBatchNorm2d(8, p=3.0, affine=False, track_running_stats=False),
        nn.BatchNorm2d(8),
    )
    before, model[0].weight.requires_grad = dict(model.state_dict(keep_vars=True)), False
    converted = convert_sync_batchnorm(model, process_group="a group")
    assert converted is model
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == {
        n: id(t) for n, t in before.items()
    }
    first, (top, again), mean, lp, torchs = model
    assert {type(m) for m in (first, top, mean, lp)} == {SyncLpBatchNorm}
    assert again is first
    assert (first.p, first.eps, first.momentum, first.act, first.memory) == (1, 1e-3, None, "relu", "lean")
    assert first.process_group == "a group"
    assert (top.p, top.k, top.constant, top.training, first.training) == (math.inf, 4, "paper", False, True)
    assert (mean.p, mean.weight, mean.eps) == ("mean", None, 0.0)
    assert (lp.p, lp.affine, lp.running_mean) == (3.0, False, None)
    assert type(torchs) is nn.SyncBatchNorm

    hooked, seen = L1BatchNorm2d(8), []
    hooked.register_forward_hook(lambda module, args, output: seen.append((type(module), module.note)))
    hooked.note = "kept"
    convert_sync_batchnorm(hooked)(torch.randn(4, 8, 2, 2))
    assert seen == [(SyncLpBatchNorm, "kept")]

    alone = L1BatchNorm2d(8)
    assert convert_sync_batchnorm(alone).weight is alone.weight
    linear = nn.Linear(2, 2)
    assert convert_sync_batchnorm(linear) is linear
