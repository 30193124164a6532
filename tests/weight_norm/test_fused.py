"""All normalized weights of a model at once, against each layer's own: on a GPU, or through Triton's interpreter."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from normmatters.functional import bounded_weight
from normmatters.weight_norm import apply_weight_norm, classic_weight_norm, fuse, fused, remove_weight_norm, unfuse
from support.weight_norm_cases import DEVICE, ORDERS, close


class Net(nn.Module):
    """A convnet with a layer that autocast must not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Tanh(), nn.Conv2d(8, 4, 3))
        self.head = nn.Linear(16, 5)
        self.exact = nn.Linear(5, 4)
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        if self.fail:
            raise RuntimeError("on purpose")
        x = self.head(x.flatten(1))
        with torch.autocast(DEVICE, enabled=False):
            return self.exact(x.float())  # type: ignore[no-any-return]


def net(kind: Literal["bounded", "classic"], p: float = 2) -> Net:
    torch.manual_seed(1)
    model = Net().to(DEVICE)
    apply_weight_norm(model, p=p, kind=kind, fused=False)
    return model


BATCH = torch.linspace(-2, 2, 2 * 3 * 36).sin().view(2, 3, 6, 6)


def step(model: nn.Module, autocast: torch.dtype | None = None) -> list[Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    with torch.autocast(DEVICE, autocast or torch.bfloat16, enabled=autocast is not None):
        y = model(BATCH.to(DEVICE))
    y.square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len([*model.parameters()])
    return [y.detach(), *gradients]


def same(ours: list[Tensor], reference: list[Tensor], bound: float = 1e-6) -> None:
    for a, b in zip(ours, reference, strict=True):
        assert a.dtype == b.dtype
        close(a, b, bound)


@pytest.mark.parametrize("p", ORDERS)
def test_model_computes_the_same(p, kind, weight_norm_calls):
    same(step(fuse(net(kind, p))), step(net(kind, p)))
    assert weight_norm_calls == ["forward", "backward"]


def test_autocast_gets_its_precision(kind, weight_norm_calls):
    """Weights come out in fp16, except for the layer that is called with autocast off. fp16: rounding, not formula."""
    model = fuse(net(kind))
    seen = {}
    for name in ("stem", "exact"):
        getattr(model, name).register_forward_pre_hook(lambda m, _, name=name: seen.update({name: m.weight.dtype}))
    found = step(model, torch.float16)
    assert seen == {"stem": torch.float16, "exact": torch.float32}
    assert weight_norm_calls == ["forward", "backward"]
    same(found, step(net(kind), torch.float16), 16 * torch.finfo(torch.float16).eps)


def test_weights_are_fresh_at_every_pass(kind, weight_norm_calls):
    """Optimizer steps, accumulation over two passes, and passes whose graphs live side by side."""
    ours, reference = fuse(net(kind)), net(kind)
    results = []
    for model in (ours, reference):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            first, second = model(BATCH.to(DEVICE)), model(-BATCH.to(DEVICE))
            (first.square().sum() + second.exp().sum()).backward()
            model(BATCH.to(DEVICE)).sum().backward()
            optimizer.step()
        results.append([first.detach(), *(p.detach() for p in model.parameters())])
    same(*results, bound=1e-5)
    assert len(weight_norm_calls) == 2 * 6


def test_outside_the_pass_layers_compute_their_own(kind, weight_norm_calls):
    model = fuse(net(kind))
    step(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2).add_(0.01)
    stack = model.stem.parametrizations.weight
    v, rho = stack[0].v_and_rho(stack)
    fresh = bounded_weight(v, rho)
    assert torch.equal(model.stem.weight, fresh)
    assert model.stem.weight.requires_grad
    model.fail = True
    with pytest.raises(RuntimeError, match="on purpose"):
        model(BATCH.to(DEVICE))
    with torch.no_grad():
        v.neg_()
    torch.testing.assert_close(model.stem.weight, -fresh)


def test_gradients_in_a_part_of_a_pass_without_them(kind, weight_norm_calls):
    """As a saliency map is made in evaluation: the weights of the pass have no gradients, those of the part do."""

    class Recorded(nn.Linear):
        def forward(self, x):
            with torch.enable_grad():
                return super().forward(x)

    model = nn.Sequential(nn.Linear(3, 4), Recorded(4, 2)).to(DEVICE)
    apply_weight_norm(model, kind=kind)
    if kind == "classic":  # g alone is learned
        model[1].parametrizations.weight.original1.requires_grad_(False)
    plain = unfuse(copy.deepcopy(model))
    for net in (model, plain):
        with torch.no_grad():
            y = net(torch.ones(2, 3, device=DEVICE))
        y.square().sum().backward()
    assert len(weight_norm_calls) == 1
    ours, expected = ([p.grad for p in net[1].parameters()] for net in (model, plain))
    torch.testing.assert_close(ours, expected)


def test_eval_without_grad(kind, weight_norm_calls):
    model, reference = fuse(net(kind)).eval(), net(kind).eval()
    with torch.no_grad():
        close(model(BATCH.to(DEVICE)), reference(BATCH.to(DEVICE)), 1e-6)
    with torch.inference_mode():
        close(model(BATCH.to(DEVICE)), reference(BATCH.to(DEVICE)), 1e-6)
    assert weight_norm_calls == ["forward"] * 2


def test_copies_are_fused_on_their_own(kind, weight_norm_calls):
    model = fuse(net(kind))
    expected = step(net(kind))
    step(model)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    weight_norm_calls.clear()
    same(step(copied), expected)
    same(step(loaded), expected)
    assert weight_norm_calls == ["forward", "backward"] * 2
    assert sorted(copied.state_dict()) == sorted(net(kind).state_dict())


def test_unfuse_and_remove(kind, weight_norm_calls):
    model = fuse(fuse(net(kind)))
    expected = step(model)
    assert weight_norm_calls == ["forward", "backward"]
    same(step(unfuse(model)), expected)
    assert weight_norm_calls == ["forward", "backward"]
    assert not model._forward_hooks
    assert not model._forward_hooks_always_called
    fuse(model)
    y = model(BATCH.to(DEVICE))
    close(remove_weight_norm(model)(BATCH.to(DEVICE)), y, 1e-6)
    with pytest.raises(ValueError, match="found no bounded weight norm to fuse in Net"):
        fuse(model)
    with pytest.raises(TypeError, match="expected a module, got int"):
        fuse(3)


def test_apply_weight_norm_fuses(kind, weight_norm_calls):
    torch.manual_seed(1)
    model = Net().to(DEVICE)
    apply_weight_norm(model.body, kind=kind)
    apply_weight_norm(model, kind=kind)  # its hooks take over those of the part
    assert sorted(model.state_dict()) == sorted(net(kind).state_dict())
    same(step(model), step(net(kind)))
    assert weight_norm_calls == ["forward", "backward"]


def test_a_layer_without_its_norm_is_left_out(kind, weight_norm_calls):
    """And so is one whose parameter has another shape for the time being, as a sharded one has."""
    model, reference = fuse(net(kind)), net(kind)
    for one in (model, reference):
        remove_weight_norm(one.body[0])
    same(step(model), step(reference))
    (fusion,) = (hook.__self__ for hook in model._forward_pre_hooks.values())
    assert [len(members) for members, _ in fusion.groups] == [4]
    stack = model.stem.parametrizations.weight
    name = "original" if kind == "bounded" else "original1"
    whole = getattr(stack, name)
    setattr(stack, name, nn.Parameter(whole.detach()[:4]))
    fusion.before(model, ())
    assert [len(members) for members, _ in fusion.groups] == [3]
    if kind == "classic":
        stack.original1, stack.original0 = whole, nn.Parameter(stack.original0.detach()[:4])
        fusion.before(model, ())
        assert [len(members) for members, _ in fusion.groups] == [3]


def test_both_kinds_in_one_model(weight_norm_calls):
    def mixed() -> Net:
        torch.manual_seed(1)
        model = Net().to(DEVICE)
        apply_weight_norm(model.body, fused=False)
        apply_weight_norm(model, kind="classic", fused=False)
        return model

    same(step(fuse(mixed())), step(mixed()))
    assert weight_norm_calls == ["forward", "forward", "backward", "backward"]


def test_frozen_layers_get_no_gradients(kind, weight_norm_calls):
    """Nor does the backward pass go on to where all layers are frozen."""
    model, reference = fuse(net(kind)), net(kind)
    seen = []
    model.stem.register_forward_hook(lambda m, _, y: seen.append((m.weight.requires_grad, y.requires_grad)))
    for one in (model, reference):
        one.stem.requires_grad_(False)
        one(BATCH.to(DEVICE)).square().sum().backward()
    assert seen == [(False, False)]
    same(*([p.grad for p in one.parameters() if p.grad is not None] for one in (model, reference)))
    assert weight_norm_calls == ["forward", "forward", "backward"]
    model.stem.requires_grad_(True)
    same(step(model), step(net(kind)))
    assert weight_norm_calls[3:] == ["forward", "backward"]


@pytest.mark.parametrize("frozen", ["original0", "original1"])
def test_a_frozen_half_of_a_classic_weight(frozen, weight_norm_calls):
    ours, reference = fuse(net("classic")), net("classic")
    for model in (ours, reference):
        for layer in (model.stem, model.head):
            getattr(layer.parametrizations.weight, frozen).requires_grad_(False)
        model(BATCH.to(DEVICE)).square().sum().backward()
        assert getattr(model.stem.parametrizations.weight, frozen).grad is None
    found = [[p.grad for p in model.parameters() if p.grad is not None] for model in (ours, reference)]
    assert len(found[0]) == 15 - 2
    same(*found)
    assert weight_norm_calls == ["forward", "backward"]


def test_a_g_that_the_kernels_cannot_take(weight_norm_calls):
    """Of another dtype, or put in by a caller with other strides: the layer computes its own weight."""
    model = fuse(nn.Sequential(classic_weight_norm(nn.Linear(4, 3, bias=False)))).to(DEVICE)
    x = torch.ones(2, 4, device=DEVICE)
    y = model(x)
    (name, g), (_, v) = model.named_parameters()
    twice = g.detach().repeat(1, 2)[:, :1]
    torch.testing.assert_close(torch.func.functional_call(model, {name: twice}, x), y)
    assert weight_norm_calls == ["forward"]
    model[0].parametrizations.weight.original0 = nn.Parameter(g.detach().double())
    model(x).sum().backward()
    assert v.grad is not None
    assert weight_norm_calls == ["forward"]


def test_layers_that_the_kernels_cannot_take_stay_as_they_are(kind, weight_norm_calls):
    def mixed() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.ConvTranspose1d(3, 4, 2), nn.Linear(6, 5), nn.Linear(5, 4)).to(DEVICE)
        options = {"kind": kind, "fused": False}
        apply_weight_norm(model, filter=lambda name, _: name != "1", **options)  # the first one along dimension 1
        apply_weight_norm(model, p=math.inf, k=2, **options)
        return model

    def run(model: nn.Sequential, dtype: torch.dtype) -> list[Tensor]:
        y = model.to(dtype)(BATCH.to(DEVICE, dtype)[:, :, 0, :5])
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))]

    same(run(fuse(mixed()), torch.float32), run(mixed(), torch.float32))
    assert weight_norm_calls == ["forward", "backward"]  # for the last one
    same(run(fuse(mixed()), torch.float64), run(mixed(), torch.float64), 0)
    assert weight_norm_calls == ["forward", "backward"]


@pytest.mark.parametrize("autocast", [None, torch.float16])
def test_compiled_in_one_graph(autocast, kind, weight_norm_calls):
    torch._dynamo.reset()
    model = fuse(net(kind))
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for _ in range(2):
        same(step(compiled, autocast), step(net(kind), autocast), 1e-5 if autocast is None else 2e-2)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1)
    assert weight_norm_calls == []  # the compiler's own


def test_a_compiled_part_takes_the_weights_of_the_pass(kind, weight_norm_calls):
    torch._dynamo.reset()
    model, reference = fuse(net(kind)), net(kind)
    model.body.compile(fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for _ in range(2):
        same(step(model), step(reference), 1e-5)
        with torch.no_grad():
            for p in (*model.parameters(), *reference.parameters()):
                p.add_(0.01)
    assert weight_norm_calls == ["forward", "backward"] * 2


def test_distributed_data_parallel(kind, weight_norm_calls, tmp_path, monkeypatch):
    """Weights come in groups, whose gradients can be exchanged one after the other."""
    monkeypatch.setattr(fused, "BUCKET_BYTES", 4 * 8 * 3 * 9 + 1)  # the first convolution and some more
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(fuse(net(kind)))
        same(step(model), step(net(kind)))
        same(step(model), step(net(kind)))
    finally:
        torch.distributed.destroy_process_group()
    assert weight_norm_calls == [*["forward"] * 3, *["backward"] * 3] * 2


def test_function_transforms_take_the_plain_path(kind, weight_norm_calls):
    model, reference = fuse(net(kind)), net(kind)

    def loss(model: nn.Module, parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, BATCH.to(DEVICE)).square().sum()  # type: ignore[no-any-return]

    values = {name: p.detach() for name, p in model.named_parameters()}
    ours = torch.func.grad(lambda v: loss(model, v))(values)
    expected = torch.func.grad(lambda v: loss(reference, v))(values)
    same(list(ours.values()), list(expected.values()))
    assert weight_norm_calls == []
    swapped = {name: value.neg().requires_grad_() for name, value in values.items()}
    close(loss(model, swapped), loss(reference, swapped), 1e-6)
    assert weight_norm_calls == ["forward"]


def test_dispatch_modes_take_the_plain_path(kind, weight_norm_calls):
    """They must see operators, and see those of every layer."""
    model, reference = fuse(net(kind)), net(kind)
    with FlopCounterMode(display=False) as ours:
        step(model)
    with FlopCounterMode(display=False) as expected:
        same(step(model), step(reference), 0)
    assert 2 * ours.get_total_flops() == expected.get_total_flops() > 0
    assert weight_norm_calls == []


@pytest.mark.gpu
def test_reduce_overhead_mode_follows_the_optimizer(kind):
    """A compiled graph that is replayed must read the parameters as they are now."""
    torch._dynamo.reset()
    model, reference = fuse(net(kind)), net(kind)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        same([t.clone() for t in step(compiled)], step(reference), 1e-4)
        with torch.no_grad():
            for a, b in zip(model.parameters(), reference.parameters()):
                a.add_(0.01)
                b.add_(0.01)
