"""Projected bounded weight norm: v has its initial norm after every step, whatever is done to the model."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from normmatters.functional.weight import slice_norm
from normmatters.weight_norm import apply_weight_norm, bounded_weight_norm, project_weights, remove_weight_norm

X = torch.arange(24.0).reshape(6, 4).sin()
NORMS: list[tuple[float, int | None]] = [(1, None), (2, None), (3.0, None), (math.inf, None), (math.inf, 2)]


def net(*, project: bool = True, p: float = 2, k: int | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    apply_weight_norm(model, p=p, k=k, project=project)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def step(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, x: Tensor = X) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """The parameters after some steps."""
    optimizer = sgd(model)
    for _ in range(steps):
        step(model, optimizer)
    return parameters(model)


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def v_of(layer: nn.Module) -> Tensor:
    v: Tensor = layer.parametrizations.weight.original  # type: ignore[union-attr, index, assignment]
    return v


def check_held(model: nn.Module, start: nn.Module, p: float = 2, k: int | None = None) -> None:
    for ours, before in zip(layers(model), layers(start), strict=True):
        torch.testing.assert_close(
            slice_norm(v_of(ours).detach(), p=p, k=k), slice_norm(v_of(before).detach(), p=p, k=k)
        )


def layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "parametrizations")]


@pytest.mark.parametrize(("p", "k"), NORMS)
def test_every_step_ends_with_the_initial_norms(p, k):
    """The reference: bounded weight norm, whose v is rescaled by hand after each step."""
    ours, reference = net(p=p, k=k), net(project=False, p=p, k=k)
    start = copy.deepcopy(reference)
    lengths = [slice_norm(v_of(layer).detach(), p=p, k=k) for layer in layers(start)]
    optimizers = sgd(ours), sgd(reference)
    for _ in range(4):
        step(ours, optimizers[0])
        step(reference, optimizers[1])
        check_held(ours, start, p, k)
        with torch.no_grad():
            for layer, length in zip(layers(reference), lengths):
                v_of(layer).mul_(length / slice_norm(v_of(layer), p=p, k=k))
        torch.testing.assert_close(parameters(ours), parameters(reference))
    assert not torch.allclose(v_of(ours[0]), v_of(start[0]))


def test_without_it_the_norms_grow():
    model, start = net(project=False), net(project=False)
    train(model)
    assert (slice_norm(v_of(model[0])) > slice_norm(v_of(start[0])) * 1.01).all()


def test_an_adam_and_another_dimension():
    torch.manual_seed(0)
    layer = bounded_weight_norm(nn.ConvTranspose1d(3, 4, 2), dim=1, rho=2.0, project=True)
    whole = bounded_weight_norm(nn.Linear(2, 2), dim=None, project=True)
    lengths = [slice_norm(v_of(layer).detach(), dim=1), slice_norm(v_of(whole).detach(), dim=None)]
    optimizer = torch.optim.AdamW([*layer.parameters(), *whole.parameters()], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (layer(torch.randn(2, 3, 5)).square().sum() + whole(torch.randn(4, 2)).square().sum()).backward()
        optimizer.step()
    torch.testing.assert_close(slice_norm(v_of(layer).detach(), dim=1), lengths[0])
    torch.testing.assert_close(slice_norm(v_of(whole).detach(), dim=None), lengths[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_holds_them_to_its_rounding(dtype):
    model, start = net().to(dtype), net()
    optimizer = sgd(model)
    for _ in range(3):
        step(model, optimizer, X.to(dtype))
    assert all(layer.parametrizations.weight[0].length.dtype == torch.float32 for layer in layers(model))
    for ours, before in zip(layers(model), layers(start)):
        expected = slice_norm(v_of(before).detach())
        torch.testing.assert_close(slice_norm(v_of(ours).detach()), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_only_what_the_optimizer_trains():
    """Not a frozen layer, not the same layers in another model, not what was removed: their bits stay."""
    model, other = net(), net()
    model[0].requires_grad_(False)
    with torch.no_grad():
        for untouched in (v_of(model[0]), v_of(other[0])):
            untouched.mul_(3)
    before = [v_of(layer).detach().clone() for layer in (model[0], other[0])]
    train(model)
    assert torch.equal(v_of(model[0]), before[0])
    assert torch.equal(v_of(other[0]), before[1])
    plain = remove_weight_norm(net())
    train(plain)
    assert not torch.allclose(slice_norm(plain[0].weight), slice_norm(net()[0].weight))


def test_an_embedding_keeps_its_padding_row():
    layer = bounded_weight_norm(nn.Embedding(5, 4, padding_idx=1), project=True)
    length = slice_norm(v_of(layer).detach())
    optimizer = sgd(layer)
    layer(torch.arange(5)).sin().sum().backward()
    optimizer.step()
    torch.testing.assert_close(slice_norm(v_of(layer).detach()), length)
    assert not v_of(layer)[1].any()


def test_a_shared_v_and_a_layer_used_twice_in_a_checkpoint():
    class Twice(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight
            self.again = again

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(self.second(x).tanh()).tanh()
            y: Tensor = checkpoint(self.first, x, use_reentrant=False) if self.again else self.first(x)
            return y

    results = []
    for again in (True, False):
        torch.manual_seed(0)
        model = Twice(again)
        assert len(apply_weight_norm(model, project=True).applied) == 2
        length = slice_norm(v_of(model.first).detach())
        results.append(train(model))
        torch.testing.assert_close(slice_norm(v_of(model.first).detach()), length)
    torch.testing.assert_close(*results)


# What is done to a model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_projected_on_their_own(copied):
    model = net()
    other = copied(model)
    expected = train(model)
    torch.testing.assert_close(train(other), expected, rtol=0, atol=0)
    check_held(other, net())


def test_a_recurrent_layer_and_its_copy():
    torch.manual_seed(0)
    model = nn.LSTM(4, 3)
    assert len(apply_weight_norm(model, project=True).applied) == 2
    other, start = copy.deepcopy(model), model.parametrizations.weight_hh_l0.original.detach().clone()
    for one in (model, other):
        optimizer = sgd(one)
        one(X)[0].square().sum().backward()
        optimizer.step()
        v = one.parametrizations.weight_hh_l0.original.detach()
        torch.testing.assert_close(slice_norm(v), slice_norm(start))
        assert not torch.allclose(v, start)


def test_a_resumed_run_has_the_same_bits():
    model = net()
    optimizer = sgd(model)
    for _ in range(2):
        step(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    torch.manual_seed(5)
    resumed = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    apply_weight_norm(resumed, project=True)
    assert resumed.load_state_dict(saved["model"])
    again = sgd(resumed)
    again.load_state_dict(saved["optimizer"])
    for _ in range(2):
        step(model, optimizer)
        step(resumed, again)
    for ours, expected in zip(parameters(resumed), parameters(model), strict=True):
        assert torch.equal(ours, expected)


def test_checkpoints_of_plain_and_bounded_layers_go_in_and_out():
    plain, bounded = nn.Linear(4, 5), bounded_weight_norm(nn.Linear(4, 5))
    for source, weight in ((plain, plain.weight), (bounded, v_of(bounded))):
        layer = bounded_weight_norm(nn.Linear(4, 5), project=True)
        assert str(layer.load_state_dict(source.state_dict())) == "<All keys matched successfully>"
        torch.testing.assert_close(layer.parametrizations.weight[0].length, slice_norm(weight.detach()))
        torch.testing.assert_close(v_of(layer), weight)
    assert str(bounded.load_state_dict(layer.state_dict())) == "<All keys matched successfully>"
    assert "parametrizations.weight.0.length" not in bounded.state_dict()


def test_an_average_of_models():
    """The averaged v are shorter, enter by their direction, and stay as they were averaged."""
    model = net()
    average = AveragedModel(model, avg_fn=lambda old, new, _: old * 0.5 + new * 0.5)
    optimizer = sgd(model)
    expected = None
    for _ in range(3):
        step(model, optimizer)
        average.update_parameters(model)
        v = v_of(model[0]).detach()
        expected = v.clone() if expected is None else expected * 0.5 + v * 0.5
        torch.testing.assert_close(v_of(average.module[0]).detach(), expected)
    weight = average.module[0].weight
    torch.testing.assert_close(slice_norm(weight), slice_norm(model[0].weight))
    check_held(model, net())


@pytest.mark.parametrize("whole_step", [False, True], ids=["model", "model and step"])
def test_compiled(whole_step):
    torch._dynamo.reset()
    model = net()
    expected = train(net())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = sgd(model)
    update: Any = torch.compile(optimizer.step, backend="aot_eager") if whole_step else optimizer.step
    for _ in range(3):
        optimizer.zero_grad()
        compiled(X).square().sum().backward()
        update()
    torch.testing.assert_close(parameters(model), expected)


def test_function_transforms_and_a_step_of_ones_own():
    model, reference = net(), net(project=False)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, X).square().sum()  # type: ignore[no-any-return]

    ours, expected = (torch.func.grad(lambda v, m=m: loss(m, v))(values) for m in (model, reference))
    torch.testing.assert_close(ours, expected)
    batches = torch.func.vmap(lambda v: torch.func.functional_call(model, v, X))
    stacked = {name: torch.stack([value, value]) for name, value in values.items()}
    torch.testing.assert_close(batches(stacked)[1], model(X))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.sub_(0.3 * ours[name])
    assert not torch.allclose(slice_norm(v_of(model[0])), slice_norm(v_of(net()[0])))
    project_weights(model)
    check_held(model, net())
    torch.testing.assert_close(parameters(model), train(net(), steps=1))


def test_a_step_that_a_gradient_scaler_skips():
    model = net()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale(model(X * math.inf if bad else X).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        check_held(model, net())


# Several processes ----------------------------------------------------------------------------------------------------


def train_in_parallel(rank: int, folder: str, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init_{how}", rank=rank, world_size=2)
    model: Any = net()
    if how == "ddp":
        parallel = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in (model[0], model[2]) if how == "fsdp by layer" else ():
            fully_shard(layer, mesh=mesh)
        parallel = fully_shard(model, mesh=mesh)
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        (2 * parallel(X[3 * rank : 3 * rank + 3]).square().sum()).backward()  # the ranks' gradients are averaged
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    if rank == 1:
        torch.save([p.detach() for p in whole], f"{folder}/out_{how}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp by layer"])
def test_distributed(how, tmp_path):
    mp.spawn(train_in_parallel, (str(tmp_path), how), nprocs=2)  # type: ignore[attr-defined]
    ours = torch.load(tmp_path / f"out_{how}.pt", weights_only=True)
    torch.testing.assert_close(ours, train(net()))


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: bounded_weight_norm(nn.Linear(3, 2), project=1), TypeError),  # type: ignore[arg-type]
        (lambda: bounded_weight_norm(nn.Linear(3, 2, device="meta"), rho=1.0, project=True), ValueError),
        (lambda: apply_weight_norm(nn.Linear(3, 2), project="yes"), TypeError),  # type: ignore[arg-type]
        (lambda: apply_weight_norm(nn.Linear(3, 2), kind="classic", project=True), ValueError),
    ],
)
def test_bad_input(call, error):
    with pytest.raises(error, match="project"):
        call()


def test_what_is_no_module_and_what_is_no_whole_slice():
    with pytest.raises(TypeError, match="module"):
        project_weights([net()])  # type: ignore[arg-type]
    layer = bounded_weight_norm(nn.Linear(3, 2), project=True)
    layer.parametrizations.weight.original = nn.Parameter(v_of(layer).detach().flatten()[:4])
    with pytest.raises(RuntimeError, match="fully_shard"):
        project_weights(layer)
