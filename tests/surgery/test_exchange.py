"""Other modules, and other settings, in a converted model: it does what the model as written does with them."""

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
from normmatters.surgery.blocks import FusedBlock
from support.models import BasicBlock, ResNet


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


Change = Callable[[Any], Any]
CASES: dict[str, tuple[Callable[[], Any], Change]] = {
    "norm": (resnet, put("bn1", lambda: nn.BatchNorm2d(4))),
    "no norm": (resnet, put("bn1", nn.Identity)),
    "norm folded by hand": (resnet, fold_by_hand),
    "activation": (resnet, put("relu", nn.SiLU)),
    "pool": (resnet, put("maxpool", nn.Identity)),
    "all pools": (resnet, all_of(nn.MaxPool2d, lambda: nn.AvgPool2d(2))),
    "sequential": (vgg, put("0.4", lambda: nn.BatchNorm2d(4))),
    "all activations": (vgg, all_of(nn.ReLU, nn.SiLU)),
    "norm cut off": (vgg, lambda model: model[0].pop(1)),
    "identity of a sequential": (slotted, put("2", nn.Tanh)),
    "identity before a pool": (slotted, put("4", nn.Tanhshrink)),
    "identity of a block": (lambda: Slotted().double(), put("slot", nn.Tanh)),
    "pool after a function": (lambda: PoolBehindAFunction().double(), put("pool", nn.Identity)),
    "inside a Sequential": (lambda: Residual().double(), put("convs.2", nn.SiLU)),
    "relu": (resnet, put("relu", nn.ReLU)),
    "all relus": (vgg, all_of(nn.ReLU, nn.ReLU)),
    "first layer": (resnet, lambda model: model.conv1.weight.data.mul_(2)),
    "cut off": (vgg, lambda model: model[0].__delitem__(slice(3, 6))),
    "one in front": (vgg, lambda model: model[0].insert(0, nn.Identity())),
    "one after": (vgg, lambda model: model[0].append(nn.Tanh())),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_put_there_is_called(case: str) -> None:
    make, change = CASES[case]
    for copied in (lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        plain, model = convert(make(), "l1", fuse=False), copied(convert(make(), "l1"))
        model(x())
        for each in (plain, model):
            torch.manual_seed(2)
            change(each)
        plain.load_state_dict(model.state_dict())
        same(model, plain)
    same(to_torch(copy.deepcopy(model)), plain)
    assert_close(fold(model)(x()), plain(x()), rtol=1e-9, atol=1e-11)


def test_what_is_put_into_a_compiled_model_is_called() -> None:
    model, plain = convert(resnet(), "l1"), convert(resnet(), "l1", fuse=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for change in (lambda model: None, put("maxpool", nn.Identity), put("relu", nn.SiLU)):
        for each in (model, plain):
            change(each)
        assert_close(compiled(x()), plain(x()))


def test_slices_and_parts_of_a_sequential() -> None:
    plain, model = vgg(), convert(vgg(), "l1")
    for part in (slice(6), slice(2), slice(1, 3), slice(2, 9)):
        y = x() if part.start is None else torch.randn(2, 4, 8, 8, dtype=torch.float64)
        assert_close(model[0][part].eval()(y), plain[0][part].eval()(y))
    model = to_torch(model)
    assert type(model[0][:2]) is nn.Sequential


def test_a_graph_of_a_converted_sequential_can_be_pickled() -> None:
    model = convert(vgg(), "l1").eval()
    traced = torch.fx.symbolic_trace(model)
    assert_close(pickle.loads(pickle.dumps(traced))(x()), model(x()))


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
    assert isinstance(model, FusedBlock)
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
    """Its forward reads what was set on its modules, and a part of the norm between the norm and its ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.bn.gain, self.relu.gain = 2.0, 3.0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x))
        mean = self.bn.running_mean.clone()
        return self.relu(y) * self.relu.gain * self.bn.gain + mean.view(-1, 1, 1)  # type: ignore[operator]


def test_what_was_set_on_modules_and_statistics_read_in_between() -> None:
    plain: Any = Reads().double()
    model: Any = convert(copy.deepcopy(plain), "l2")
    for each in (model, plain):
        each.bn.note = "the user's"
    for training in (True, False):
        assert_close(model.train(training)(x()), plain.train(training)(x()))
    back: Any = to_torch(model)
    assert back.bn.note == "the user's"
    assert_close(back(x()), plain(x()))
