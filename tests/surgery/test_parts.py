"""Parts of a block that have other uses than the block's own: fusing and folding must not be noticed by those."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from normmatters.nn import L1BatchNorm2d
from normmatters.nn.sync import SyncLpBatchNorm, convert_sync_batchnorm
from normmatters.surgery import ConversionReport, convert, fold, to_torch
from support.models import assert_same_step


def conv_norm() -> list[nn.Module]:
    return [nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)]


class PartAlone(nn.Module):
    """Looks at what comes out of the inner Sequential, before the outer one's ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(*conv_norm()), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        inner = self.body[0](x)
        return inner + self.body[1](inner)


class ConvNormReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv_norm()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))  # type: ignore[no-any-return]


class WholeBlockAlone(nn.Module):
    """Calls a part of another block: with it comes, whole, the block that the norm and its ReLU are of."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Sequential(ConvNormReLU()), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.outer[0](x)  # type: ignore[no-any-return]


class Holder(ConvNormReLU):
    """Has no forward of its own: whoever holds it calls what it holds."""

    forward = nn.Module.forward


class OfAHolder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = Holder()

    def forward(self, x: Tensor) -> Tensor:
        return self.held.relu(self.held.bn(self.held.conv(x)))  # type: ignore[no-any-return]


class ReluOfSequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv_norm(), nn.ReLU(), nn.Conv2d(3, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.body[2](x)


class PoolOfSequential(ReluOfSequential):
    def __init__(self) -> None:
        super().__init__()
        self.body[3] = nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.body[3](x)


class Inner(nn.Module):
    def __init__(self, relus: nn.ModuleList | None = None) -> None:
        super().__init__()
        self.conv, self.bn = conv_norm()
        self.relus = nn.ModuleList([nn.ReLU()]) if relus is None else relus

    def forward(self, x: Tensor) -> Tensor:
        return self.relus[0](self.bn(self.conv(x)))  # type: ignore[no-any-return]


class ReluOfBlock(nn.Module):
    """Has no norm of its own, but uses a part of a block that has."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.block.relus[0](x)  # type: ignore[no-any-return]


class OtherUse(nn.Module):
    def __init__(self, relus: nn.ModuleList) -> None:
        super().__init__()
        self.relus = relus

    def forward(self, x: Tensor) -> Tensor:
        return self.relus[0](x - 1)  # type: ignore[no-any-return]


def shared_list() -> nn.Module:
    inner = Inner()
    return nn.Sequential(inner, OtherUse(inner.relus))


def shared_sequential(part: Callable[[], nn.Module]) -> nn.Module:
    shared = nn.Sequential(part(), nn.Dropout(0.0))
    between = [] if isinstance(shared[0], nn.ReLU) else [nn.ReLU()]
    return nn.Sequential(*conv_norm(), *between, shared, nn.Conv2d(3, 3, 1), shared)


def with_another_forward(kind: type[nn.Module], *arguments: int) -> nn.Module:
    changed = kind(*arguments)
    changed.forward = lambda x: F.max_pool2d(-x, 3, 2, 1)  # type: ignore[method-assign]
    between = [] if kind is nn.ReLU else [nn.ReLU()] if kind is nn.MaxPool2d else [nn.Identity()]
    return nn.Sequential(*conv_norm(), *between, changed, nn.ReLU())


def hooked_sequential() -> nn.Module:
    row = nn.Sequential(*conv_norm(), nn.ReLU())
    row.register_forward_hook(lambda module, arguments, output: None)
    return row


class PlainList(nn.Module):
    """Calls its norm and its pool out of lists that PyTorch knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv_norm()
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        self.norms, self.pools = {"first": [self.bn]}, (self.pool,)

    def forward(self, x: Tensor) -> Tensor:
        return self.pools[0](self.relu(self.norms["first"][0](self.conv(x))))  # type: ignore[no-any-return]


class Untraceable(nn.Module):
    """Takes what it needs out of a block and a Sequential; nobody can follow it, for its forward has an option."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.held = [module for module in block.modules() if isinstance(module, nn.BatchNorm2d)]

    def forward(self, x: Tensor, option: None = None) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


class Stem(ConvNormReLU):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.relu(self.bn(self.conv(x))))  # type: ignore[no-any-return]


class ByName(Untraceable):
    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        del self.held

    def forward(self, x: Tensor, option: None = None) -> Tensor:
        block: Any = self.block
        features = block.relu(block.bn(block.conv(x)))
        return features[..., ::2, ::2] + block.pool(features)  # type: ignore[no-any-return]


class ByMethod(ByName):
    def forward(self, x: Tensor, option: None = None) -> Tensor:
        return F.relu(self.before(x) + 1)

    @torch.enable_grad()
    def before(self, x: Tensor) -> Tensor:
        return self.block.bn(self.block.conv(x))  # type: ignore[operator, union-attr, no-any-return]


class ByProperty(ByName):
    @property
    def before(self) -> nn.Module:
        return self.block.bn  # type: ignore[no-any-return, union-attr]

    def forward(self, x: Tensor, option: None = None) -> Tensor:
        return self.before(self.block.conv(x))  # type: ignore[no-any-return, operator, union-attr]


class InTurn(ByName):
    def forward(self, x: Tensor, option: None = None) -> Tensor:
        features = []
        for layer in self.block.children():
            x = layer(x)
            features.append(x)
        return torch.stack(features).sum(0)


class ByNumber(ByName):
    def forward(self, x: Tensor, option: None = None) -> Tensor:
        return self.block[1](self.block[0](x))  # type: ignore[index, operator, no-any-return]


class Whole(ByName):
    def forward(self, x: Tensor, option: None = None) -> Tensor:
        x = self.block(x)
        return x.relu() / x.norm()  # type: ignore[no-any-return]


class NamedAsTensorsMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv_norm()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class ByLocalName(ByName):
    def forward(self, x: Tensor, option: None = None) -> Tensor:
        block: Any = self.block
        return block.norm(block.conv(x))  # type: ignore[no-any-return]


def row() -> nn.Module:
    return nn.Sequential(*conv_norm(), nn.ReLU())


class SharedInBlock(nn.Module):
    """One in-place ReLU, in the block's Sequential and after its add."""

    def __init__(self) -> None:
        super().__init__()
        relu = nn.ReLU(inplace=True)
        self.body = nn.Sequential(*conv_norm(), relu, *conv_norm())
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + x)  # type: ignore[no-any-return]


class Slices(nn.Module):
    """A backbone's Sequential, by slices, by its parts and by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = row()

    def forward(self, x: Tensor) -> Tensor:
        y = self.backbone[:2](x)
        z = self.backbone.get_submodule("1")(y)
        for module in self.backbone[1:]:
            z = module(z)
        return z + self.backbone[2](y) + dict(self.backbone.named_modules())["1"](x)  # type: ignore[no-any-return]


def norm_of(block: Any, x: Tensor) -> Tensor:
    """A function outside of the class."""
    return block.bn(block.conv(x))  # type: ignore[no-any-return]


class ByFunction(ByName):
    def forward(self, x: Tensor) -> Tensor:
        return norm_of(self.block, x) - self.block(x).mean()  # type: ignore[no-any-return]


class ByBoundMethod(ByName):
    def forward(self, x: Tensor) -> Tensor:
        block: Any = self.block
        y = block.bn.forward(block.conv(x))
        norm = block.bn
        z = checkpoint(norm, y, use_reentrant=False)
        return self.block(x).mean() + functools.partial(block.bn)(z)  # type: ignore[no-any-return]


class Holds(ConvNormReLU):
    """Holds its norm in places that PyTorch knows nothing of, and calls it from there."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.table = {self.bn: 2}
        y = self.bn(self.conv(x))
        ((norm, times),) = self.table.items()
        y = norm(y) * times
        return self.relu(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        PlainList,
        *(lambda kind=kind: kind(Stem()) for kind in (Untraceable, ByName, ByMethod, ByProperty, Whole, ByFunction)),
        lambda: ByBoundMethod(Stem()),
        *(lambda kind=kind: kind(row()) for kind in (InTurn, ByNumber, Whole)),
        *(lambda kind=kind: kind(NamedAsTensorsMethod()) for kind in (ByLocalName, Whole)),
        *(PartAlone, WholeBlockAlone, OfAHolder, ReluOfSequential, PoolOfSequential, ReluOfBlock, shared_list),
        *(SharedInBlock, Slices, Holds),
        lambda: shared_sequential(nn.ReLU),
        lambda: shared_sequential(lambda: nn.MaxPool2d(3, 2, 1)),
        lambda: with_another_forward(nn.ReLU),
        lambda: with_another_forward(nn.Identity),
        lambda: with_another_forward(nn.MaxPool2d, 3, 2, 1),
        hooked_sequential,
    ],
)
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_every_way_to_a_part_gives_what_it_gave(make: Callable[[], nn.Module], norm: str) -> None:
    torch.manual_seed(0)
    model = make().double()
    nn.init.normal_(next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)).bias)
    plain = convert(copy.deepcopy(model), norm, fuse=False)
    model = convert(model, norm)
    for training in (True, False):
        assert_same_step(model.train(training), plain.train(training))


class HeldAnywhere(nn.Module):
    """Calls its norm out of places that nobody could look through."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv_norm()
        norm = self.bn
        self.norms, self.keys, self.some = [{"first": (norm,)}], {norm: 1.0}, {norm}
        self.partial, self.call, self.closure = functools.partial(norm), norm.__call__, lambda x: norm(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        for norm in (self.norms[0]["first"][0], *self.keys, *self.some, self.partial, self.call, self.closure):
            x = F.relu(norm(x)) + x  # type: ignore[operator]
        return x


class HeldByName(HeldAnywhere):
    """The same, through the one name that PyTorch knows."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        for _ in range(6):
            x = F.relu(self.bn(x)) + x
        return x


@pytest.mark.parametrize("go", [convert, fold, to_torch, convert_sync_batchnorm])
def test_who_holds_a_norm_has_the_new_one(go: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = HeldAnywhere().double()
    old = model.bn
    nn.init.normal_(old.bias)
    nn.init.uniform_(old.running_var, 2, 3)  # type: ignore[arg-type]
    if go is not convert:
        convert(model, "l1")
    go(model.eval())
    assert model.bn is old
    assert type(old) is {convert: L1BatchNorm2d, convert_sync_batchnorm: SyncLpBatchNorm}.get(go, nn.BatchNorm2d)
    plain = HeldByName().double()
    plain.load_state_dict(model.state_dict())
    if type(old) is not nn.BatchNorm2d:
        convert(plain, "l1")
    for training in (True, False):
        assert_same_step(model.train(training), plain.train(training))


class Tied(nn.Module):
    """The decoder uses the encoder's weight, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv_norm()

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(self.bn(self.conv(x)), self.conv.weight, padding=1)


class Reads(ByName):
    """Takes the weight of a layer in a block; its forward has an option, and cannot be traced."""

    def forward(self, x: Tensor, option: None = None) -> Tensor:
        return self.block(x) + self.block.conv.weight.sum()  # type: ignore[no-any-return, operator, union-attr]


class Outside(nn.Module):
    """Calls a block, and the convolution in it once more."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.block.conv(x)


def with_another_convolution() -> nn.Module:
    model = nn.Sequential(*conv_norm())
    model[0].forward = lambda x: F.relu(F.conv2d(x, model[0].weight))  # type: ignore[method-assign, arg-type]
    return model


SEVERAL = "it or the layer in front of it is used at several places"


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Tied, SEVERAL),
        (Outside, SEVERAL),
        (lambda: ByName(Stem()), SEVERAL),
        (lambda: Reads(ConvNormReLU()), SEVERAL),
        (lambda: InTurn(row()), SEVERAL),
        (Slices, SEVERAL),
        (lambda: ByFunction(Stem()), SEVERAL),
        (with_another_convolution, "hooks see its input or output, or a forward was replaced"),
    ],
)
def test_a_layer_with_other_uses_is_not_folded(make: Callable[[], nn.Module], reason: str) -> None:
    torch.manual_seed(0)
    model = make().double().eval()
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    nn.init.uniform_(norm.running_var, 2, 3)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    expected = model(x)
    report = ConversionReport()
    assert_close(fold(model, report=report)(x), expected, rtol=0, atol=0)
    assert [change.note for change in report.skipped] == [reason]
