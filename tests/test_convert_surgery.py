"""Other modules in a converted model's places: where a norm holds what a placeholder stands for, it is an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.testing import assert_close

from normmatters.nn import L1BatchNorm2d
from normmatters.surgery import convert, fold, to_torch
from normmatters.surgery.fused import FusedBlock, LinkedSequential
from support.models import BasicBlock, ResNet

ERROR = r".*, but was .* when normmatters\.convert fused this block: set it before converting or after to_torch"


def resnet() -> Any:
    torch.manual_seed(0)
    return ResNet(BasicBlock).double()


def vgg() -> Any:
    torch.manual_seed(0)
    parts = [(nn.Conv2d(c, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for c in (3, 4, 4)]
    features = nn.Sequential(*(module for part in parts for module in part), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(features, nn.Flatten(), nn.Linear(64, 2)).double()


class PoolBehindAFunction(nn.Module):
    """Its forward is rewritten, but the pool is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.pool = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(F.relu(self.bn(self.conv(x))))


def slotted() -> Any:
    """Identities are places for something else."""
    stem = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Identity(), nn.ReLU(), nn.Identity(), nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem).double()


class Slotted(nn.Module):
    """Its forward stays."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.slot, self.relu = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.slot(self.bn(self.conv(x))))


class Residual(nn.Module):
    """The program calls the modules of ``convs`` one by one, past the guards of the Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convs(x) + x)


def x() -> Tensor:
    return torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def same(model: nn.Module, plain: nn.Module) -> None:
    """In evaluation, where an L1 norm is a batch norm, the models are one function, with the same gradients."""
    results = []
    for each in (model.eval(), plain.eval()):
        data = x().requires_grad_()
        each.zero_grad()
        output = each(data)
        output.square().sum().backward()
        results.append((output.detach(), data.grad, [p.grad for p in each.parameters()]))
    assert_close(*results, rtol=1e-9, atol=1e-11)


def put(path: str, module: Callable[[], nn.Module]) -> Callable[[nn.Module], None]:
    owner, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(owner), name, module().double())


def all_of(kind: type[nn.Module], new: Callable[[], nn.Module]) -> Callable[[nn.Module], None]:
    """As people exchange activations."""

    def change(model: nn.Module) -> None:
        for owner in list(model.modules()):
            for name, child in owner.named_children():
                if isinstance(child, kind):
                    setattr(owner, name, new())

    return change


def fold_by_hand(model: Any) -> None:
    model.eval()
    model.conv1 = fuse_conv_bn_eval(model.conv1, model.bn1)
    model.bn1 = nn.Identity()


REFUSED: dict[str, tuple[Callable[[], Any], str, Callable[[Any], None]]] = {
    "norm": (resnet, "ResNet.bn1.act is None", put("bn1", lambda: nn.BatchNorm2d(4))),
    "no norm": (resnet, "ResNet.bn1.act is None", put("bn1", nn.Identity)),
    "norm folded by hand": (resnet, "ResNet.bn1.act is None", fold_by_hand),
    "norm with relu alone": (resnet, "ResNet.bn1.pool is None", put("bn1", lambda: L1BatchNorm2d(4, act="relu"))),
    "activation": (resnet, "ResNet.relu.__class__ is .*SiLU", put("relu", nn.SiLU)),
    "pool": (resnet, "ResNet.maxpool.__class__ is .*Identity", put("maxpool", nn.Identity)),
    "all pools": (resnet, "ResNet.maxpool.__class__ is .*AvgPool2d", all_of(nn.MaxPool2d, lambda: nn.AvgPool2d(2))),
    "sequential": (vgg, "Sequential.4.act is None", put("0.4", lambda: nn.BatchNorm2d(4))),
    "all activations": (vgg, "Sequential.2.__class__ is .*SiLU", all_of(nn.ReLU, nn.SiLU)),
    "pool of a sequential": (vgg, "Sequential.9.__class__ is .*Identity", put("0.9", nn.Identity)),
    "pool cut off": (vgg, "Sequential.9.__class__ is .*NoneType", lambda model: model[0].pop(9)),
    "norm of a pool cut off": (vgg, "Sequential.4.act is None", lambda model: model[0].__delitem__(slice(3, 9))),
    "norm cut off": (vgg, "Sequential.1.act is None", lambda model: model[0].pop(1)),
    "identity of a sequential": (slotted, "Sequential.2.__class__ is .*Tanh", put("2", nn.Tanh)),
    "identity before a pool": (slotted, "Sequential.4.__class__ is .*Tanhshrink", put("4", nn.Tanhshrink)),
    "identity of a block": (lambda: Slotted().double(), "Slotted.slot.__class__ is .*Tanh", put("slot", nn.Tanh)),
    "pool of a rewritten block": (
        lambda: PoolBehindAFunction().double(),
        "PoolBehindAFunction.pool.__class__ is .*Identity",
        put("pool", nn.Identity),
    ),
    "inside a rewritten block": (
        lambda: Residual().double(),
        "Sequential.2.__class__ is .*SiLU",
        put("convs.2", nn.SiLU),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, message, change = REFUSED[case]
    for copied in (lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        model = copied(convert(make(), "l1"))
        model(x())
        change(model)
        for training in (True, False):
            with pytest.raises(RuntimeError, match=message + ERROR):
                model.train(training)(x())


@pytest.mark.parametrize(
    "case",
    ["norm", "activation", "pool", "sequential", "pool of a sequential", "all activations", "identity of a block"],
)
def test_the_way_back_gives_what_was_wanted(case: str) -> None:
    """Even after the exchange: the norm gives back what it took over, and the new module is in its place."""
    make, _, change = REFUSED[case]
    plain, model = make(), convert(make(), "l1")
    for each in (plain, model):
        change(each)
    if case == "norm" or case == "sequential":
        plain.load_state_dict(model.state_dict())
    if case == "pool of a sequential":  # 8×8 and not 4×4 come to the last layer
        plain[2], model[2] = (nn.Linear(256, 2).double() for _ in range(2))
        plain.load_state_dict(model.state_dict())
    same(to_torch(model), plain)
    assert not any(isinstance(module, FusedBlock) for module in model.modules())
    same(convert(model, "l1"), plain)


def test_refused_in_a_compiled_model() -> None:
    model = convert(resnet(), "l1")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(x()), convert(resnet(), "l1")(x()))
    model.maxpool = nn.Identity()
    with pytest.raises(Exception, match=r"maxpool|FusedMaxPool2d|Observed exception"):
        compiled(x())


ALLOWED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "relu": (resnet, put("relu", nn.ReLU)),
    "all relus": (vgg, all_of(nn.ReLU, nn.ReLU)),
    "first layer": (resnet, lambda model: model.conv1.weight.data.mul_(2)),
    "whole stage": (vgg, lambda model: model.__setitem__(0, nn.MaxPool2d(2).double())),
    "cut off": (vgg, lambda model: model[0].__delitem__(slice(3, 6))),
    "one in front": (vgg, lambda model: model[0].insert(0, nn.Identity())),
    "one behind": (vgg, lambda model: model[0].append(nn.SiLU())),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_allowed(case: str) -> None:
    make, change = ALLOWED[case]
    plain, model = make(), convert(make(), "l1")
    for each in (plain, model):
        change(each)
        if case == "whole stage":
            each[2] = nn.Linear(48, 2).double()
    plain.load_state_dict(model.state_dict())
    same(model, plain)
    assert_close(fold(model)(x()), plain(x()), rtol=1e-9, atol=1e-11)


def test_a_norm_that_went_back_alone_has_its_relu() -> None:
    model = convert(vgg(), "l1")
    model[0][1] = to_torch(model[0][1])
    same(model, vgg())


def test_a_slice_is_a_plain_sequential() -> None:
    plain, model = vgg(), convert(vgg(), "l1")
    part = model[0][:6]
    assert type(part) is nn.Sequential
    same(part, plain[0][:6])
    assert model[0][1].act == "relu"
    assert isinstance(model[0], FusedBlock)


def test_a_second_conversion_adds_its_guards() -> None:
    model = convert(vgg(), "l1")
    for added in (nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()):
        model[0].append(added.double())
    convert(model, "l1")
    assert model[0][11].act == "relu"
    same(to_torch(copy.deepcopy(model)), model)
    model[0][11] = nn.BatchNorm2d(4).double()
    with pytest.raises(RuntimeError, match="Sequential.11.act is None" + ERROR):
        model(x())


def test_a_sequential_of_blocks_hands_links_on_and_is_guarded() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), *(BasicBlock(4, 4) for _ in range(2)))

    model = convert(make().double(), "l1")
    assert isinstance(model, LinkedSequential)
    same(pickle.loads(pickle.dumps(model)), make().double())
    assert type(to_torch(copy.deepcopy(model))) is nn.Sequential
    model[2] = nn.SiLU()
    with pytest.raises(RuntimeError, match="LinkedSequential.2.__class__ is .*SiLU" + ERROR):
        model(x())


class Double(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


class Scaled(nn.Module):
    """A block with a parameter, and an attribute, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bn, self.relu = nn.Parameter(torch.ones(1)), nn.BatchNorm2d(3), nn.ReLU()
        self.program = "the user's"

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(x * self.scale))


def test_a_block_that_is_parametrized_later_goes_back() -> None:
    plain, model = Scaled().double(), copy.deepcopy(convert(Scaled().double(), "l1"))
    for each in (plain, model):
        parametrize.register_parametrization(each, "scale", Double())
    same(model, plain)
    same(to_torch(model), plain)
    assert type(model.relu) is nn.ReLU
    for each in (plain, model):
        parametrize.remove_parametrizations(each, "scale")
    assert type(model) is Scaled
    same(model, plain)


@pytest.mark.parametrize("make", [resnet, vgg])
def test_converted_models_go_on_as_others_run_them(make: Callable[[], Any]) -> None:
    model = convert(make(), "l1").eval()
    expected = make().eval()(x())
    exported = torch.export.export(model, (x(),)).module()
    replica = model._replicate_for_data_parallel()
    called = torch.func.functional_call(model, dict(model.named_parameters()), (x(),))
    for output in (exported(x()), replica(x()), called):
        assert_close(output, expected, rtol=1e-10, atol=1e-12)


def wrap(module: Any) -> None:
    """Put another forward on the instance, as accelerate does to offload weights."""
    forward = module.forward
    module.forward = lambda x, *more: forward(x * x, *more)


@pytest.mark.parametrize("part", [lambda block: block, lambda block: block.bn2])
def test_a_forward_put_on_a_part_of_a_linked_sequential_is_called(part: Callable[[Any], Any]) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 1), *(BasicBlock(4, 4) for _ in range(2))).double()

    model, plain = convert(make(), "l2"), make()
    assert isinstance(model, LinkedSequential)
    for each in (plain, model):
        wrap(part(each[1]))
        wrap(part(each[2]))
    assert_close(model(x()), plain(x()), rtol=1e-10, atol=1e-12)


class Doubled(L1BatchNorm2d):
    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return 2 * super().forward(input, residual)


def test_a_norm_of_ones_own_in_a_linked_sequential_is_called() -> None:
    model = convert(nn.Sequential(nn.Conv2d(3, 4, 1), *(BasicBlock(4, 4) for _ in range(2))).double(), "l1")
    alone = copy.deepcopy(model)
    for each in (model, alone):
        for block in each[1:]:
            block.bn2 = Doubled(4, act="relu").double()
    y = x()
    for module in alone:
        y = module(y)
    assert_close(model(x()), y)


class Reads(nn.Module):
    """Its forward reads what was set on modules that a norm takes over."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu, self.pool = (
            nn.Conv2d(3, 3, 1),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.relu.gain, self.pool.gain = 2.0, 3.0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.bn(self.conv(x)))
        return self.pool(y) * self.relu.gain * self.pool.gain


def test_what_was_set_on_a_relu_or_pool_and_hooks_on_them_stay() -> None:
    plain = Reads().double()
    model: Any = convert(copy.deepcopy(plain), "l1")
    assert model.bn.pool == "max"
    plain.eval(), model.eval()
    assert_close(model(x()), plain(x()))
    seen: list[nn.Module] = []
    handles = [part.register_forward_hook(lambda part, *_: seen.append(part)) for part in (model.relu, model.pool)]
    model = to_torch(model)
    assert [type(model.relu), type(model.pool)] == [nn.ReLU, nn.MaxPool2d]
    assert_close(model(x()), plain(x()))
    assert seen == [model.relu, model.pool]
    for handle in handles:
        handle.remove()
    model(x())
    assert len(seen) == 2
