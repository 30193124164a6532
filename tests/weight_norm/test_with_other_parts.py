"""Weight norm beside the library's other parts and torch.distributed; the examples of the docstrings."""

import copy
import doctest
import importlib
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from normmatters.functional.weight import bounded_weight
from normmatters.nn.activations import TReLU
from normmatters.nn.batchnorm import MeanOnlyBatchNorm2d
from normmatters.weight_norm import apply_weight_norm


def test_mean_only_batch_norm_beside_bounded_weights():
    """F15: relu(conv(x; ρv/‖v‖) − mean + β), gradients included; evaluation, copies and pickles work."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), MeanOnlyBatchNorm2d(4), TReLU()).double()
    v = model[0].weight.detach().clone().requires_grad_()
    beta = torch.randn(4, dtype=torch.float64)
    with torch.no_grad():
        model[1].bias.copy_(beta)
    assert apply_weight_norm(model, rho=1.5).applied == ["0.weight"]
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)

    y = nn.functional.conv2d(x, bounded_weight(v, 1.5))
    expected = TReLU()(y - y.mean((0, 2, 3), keepdim=True) + beta[:, None, None])
    out = model(x)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(model[0].parametrizations.weight.original.grad, v.grad)

    model.eval()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), model(x))


def ddp_worker(rank, init_file, out_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=2)
    torch.manual_seed(rank)  # rank 1 starts with other weights and another rho
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    apply_weight_norm(model)
    parallel = DistributedDataParallel(model)
    batch = torch.arange(24.0).reshape(6, 4).sin()
    parallel(batch[3 * rank : 3 * rank + 3]).square().mean().backward()
    if rank == 1:
        torch.save({"state": model.state_dict(), "grads": [p.grad for p in model.parameters()]}, out_file)
    dist.destroy_process_group()


def test_ddp_broadcasts_rho_and_averages_gradients(tmp_path):
    mp.spawn(ddp_worker, (str(tmp_path / "init"), str(tmp_path / "out.pt")), nprocs=2)
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    apply_weight_norm(model)
    torch.testing.assert_close(saved["state"], model.state_dict())
    model(torch.arange(24.0).reshape(6, 4).sin()).square().mean().backward()
    torch.testing.assert_close(saved["grads"], [p.grad for p in model.parameters()])


@pytest.mark.parametrize(
    "name",
    ["functional.weight", "weight_norm.register", "weight_norm.move_rho"],
)
def test_examples_of_the_docstrings(name):
    module = importlib.import_module(f"normmatters.{name}")
    names = {"torch": torch, "nn": nn, "apply_weight_norm": apply_weight_norm}
    outcome = doctest.testmod(module, extraglobs=names)
    assert outcome.attempted > 0
    assert outcome.failed == 0
