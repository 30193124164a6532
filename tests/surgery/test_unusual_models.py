"""Models that a hostile reader of the rewriting would write: converted to L2, and folded, they are the originals."""

from __future__ import annotations

import copy
import linecache
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from normmatters.surgery import ConversionReport, convert, fold

A_LIST, A_DICT = [1.0], {"scale": 1.0}


class Block(nn.Module):
    flag = True
    times = 1

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.conv2 = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.bn, self.bn2 = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.relu, self.inplace = nn.ReLU(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        return self.relu(self.bn(self.conv(x)) + x)


class Aliases(Block):
    """Two variables for one norm's output, both of which may hold a deferred norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(x)
        identity = x
        x = self.bn2(self.conv(x))
        identity = self.relu(identity)
        x = x + identity
        identity = x
        x = self.relu(x)
        return x + identity


class AliasByChoice(Block):
    def forward(self, x: Tensor) -> Tensor:
        z = self.bn2(x)
        y = self.bn(x)
        z = y if self.training else z
        y = self.relu(y)
        return y + z


class WrapsItsModules(Block):
    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return (lambda x: found(x) * 2) if name == "bn" else found


class LooksUpOtherwise(Block):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("_modules")["bn2"] if name == "bn" else super().__getattribute__(name)


class ReadsGlobals(Block):
    def forward(self, x: Tensor, A_DICT: float = 2.0) -> Tensor:
        return self.relu(self.bn(x) * A_LIST[0]) * A_DICT


class ScaledReLU(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] * 0.3 if func in (torch.relu, F.relu) else func(*args, **(kwargs or {}))


class UnderAMode(Block):
    def forward(self, x: Tensor) -> Tensor:
        with ScaledReLU():
            return self.relu(self.bn(x))


class Scaling(Tensor):
    """Whose ReLU is another one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.relu, F.relu):
            return args[0].as_subclass(Tensor) * 0.3
        return super().__torch_function__(func, types, args, kwargs)


class AddsASubclass(Block):
    def forward(self, x: Tensor) -> Tensor:
        other = x.detach().as_subclass(Scaling)
        y = self.bn(x)
        y = y + other
        return self.relu(y)


class Suppress:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, *_: object) -> bool:
        return kind is RuntimeError


class Raises(Block):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(x)
        z = self.conv(x)
        return self.relu(y + z)


class SuppressesErrors(Block):
    """The norm of the inner block has run, whatever came after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Raises()

    def forward(self, x: Tensor) -> Tensor:
        with Suppress():
            x = self.inner(x)
        return self.relu(self.bn(x) + x)


class Registers(type):
    known: dict[str, type] = {}

    def __new__(cls, name: str, *args: Any) -> type:
        assert name not in cls.known
        cls.known[name] = made = super().__new__(cls, name, *args)
        return made


class Registered(Block, metaclass=Registers):
    pass


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(Block(), Block(), Block())

    def forward(self, x: Tensor) -> Any:
        return self.row(x)


def put_first(model: Any) -> None:
    model.__dict__["bn"] = nn.Tanh()  # found before the module of this name


def other_block(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "forward", lambda self, x: self.bn(x) - 1)


def other_relu(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x * 0.1)


def assert_same(model: nn.Module, original: nn.Module) -> None:
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for training in (True, False, True):
        results = []
        for each in (model.train(training), original.train(training)):
            each.zero_grad()
            data = x.clone().requires_grad_()
            output = each(data)
            (output * torch.linspace(-1, 2, output.numel(), dtype=x.dtype).view_as(output)).sum().backward()
            results.append([output.detach(), data.grad, *(p.grad for p in each.parameters() if p.grad is not None)])
        assert_close(*results, rtol=1e-9, atol=1e-9)
    assert_close(model.state_dict(), original.state_dict(), rtol=1e-9, atol=1e-9)


def make(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = cls().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)
            nn.init.uniform_(module.running_var, 2, 3)  # type: ignore[arg-type]
    return model


SAME = [
    *(Aliases, AliasByChoice, WrapsItsModules, LooksUpOtherwise, ReadsGlobals, UnderAMode, AddsASubclass),
    *(SuppressesErrors, Registered),
]


@pytest.mark.parametrize("cls", SAME)
def test_converted_is_the_original(cls: type[nn.Module]) -> None:
    assert_same(convert(make(cls), "l2"), make(cls))


@pytest.mark.parametrize(
    ("cls", "change"),
    [(Block, put_first), (Block, other_block), (Row, other_block), (Block, other_relu), (Row, other_relu)],
)
def test_what_is_put_there_later_is_called(
    cls: type[nn.Module], change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, original = convert(make(cls), "l2"), make(cls)
    assert_same(model, original)
    if change is put_first:
        put_first(model), put_first(original)
    else:
        change(model, monkeypatch)
    assert_same(model, original)


def test_under_a_default_device_norms_fuse() -> None:
    model = convert(make(Block), "l1")
    with torch.device("cpu"), torch.profiler.profile() as profile:
        model(torch.randn(4, 3, 5, 5, dtype=torch.float64))
    names = {event.name for event in profile.events()}
    assert "aten::relu" not in names
    assert "aten::add" not in names


def of_source(body: str) -> Callable[[], nn.Module]:
    """A block whose forward, which a test must be able to read, is ``body``."""
    source = "class Case(Block):\n    def forward(self, x):\n" + textwrap.indent(body, " " * 8) + "\n"
    filename = f"<{hash(source)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = {"Block": Block, "torch": torch, "F": F, "use": lambda block, x: block.conv(x), "__name__": __name__}
    exec(compile(source, filename, "exec"), scope)
    return scope["Case"]  # type: ignore[return-value]


NOT_ADJACENT = {
    "only with a flag": "y = self.conv(x)\nif self.flag:\n    y = self.bn(y)\nreturn y",
    "by a choice": "y = self.conv(x)\nreturn self.bn(y) if self.flag else y",
    "by the data": "y = self.conv(x)\nif x.mean() > 0:\n    y = self.bn(y)\nreturn y",
    "in a loop": "y = self.conv(x)\nfor _ in range(self.times + 1):\n    y = self.bn(y)\nreturn y",
    "not in every loop": "y = self.conv(x)\nfor _ in range(self.times):\n    y = self.bn(y)\nreturn y",
    "while": "y, i = self.conv(x), 0\nwhile i < self.times:\n    y = self.bn(y)\n    i += 1\nreturn y",
    "returned before": "y = self.conv(x)\nif not self.flag:\n    return y\nreturn self.bn(y)",
    "changed in place": "y = self.conv(x)\ny += 1\nreturn self.bn(y)",
    "changed by a method": "y = self.conv(x)\ny.mul_(2)\nreturn self.bn(y)",
    "changed on the way": "return self.bn(self.conv(x) + x)",
    "with another name": "y = self.conv(x)\nz = y\ny = self.bn(y)\nreturn y + z",
    "of two layers": "return self.bn(self.conv(x) if self.flag else self.conv2(x))",
    "or of none": "y = x\nif self.flag:\n    y = self.conv(x)\nreturn self.bn(y)",
    "to two norms": "y = self.conv(x)\nif self.flag:\n    return self.bn(y)\nreturn self.bn2(y)",
    "to a norm or not": "return (self.bn if self.flag else self.relu)(self.conv(x))",
    "by a function": "return self.bn(self.conv(x)) + use(self, x)",
    "by a lambda": "f = lambda t: self.conv(t)\nreturn self.bn(self.conv(x)) + f(x)",
    "in a list": "return self.bn(self.conv(x)) + sum([m(x) for m in (self.conv,)])",
    "by its weight": "return self.bn(self.conv(x)) + self.conv.weight.sum()",
    "by all weights": "return self.bn(self.conv(x)) + sum(p.sum() for p in self.parameters())",
}


@pytest.mark.parametrize("case", NOT_ADJACENT)
@torch.no_grad()
def test_a_norm_that_is_not_evidently_next_to_its_layer_is_not_folded(case: str) -> None:
    model = make(of_source(NOT_ADJACENT[case]))  # type: ignore[arg-type]
    report = ConversionReport()
    folded = fold(copy.deepcopy(model).eval(), report=report)
    assert not report.converted
    for flag in (True, False):
        for each in (model.eval(), folded):
            each.flag, each.times = flag, int(flag)
        x = torch.randn(2, 3, 4, 4, dtype=torch.float64) + (1 if flag else -1)
        assert_close(folded(x), model(x))


ADJACENT = [
    "return self.relu(self.bn(self.conv(x)))",
    "y = self.conv(x)\ny = self.bn(y)\nreturn y",
    "y = self.conv(x)\nz = self.bn(y)\nreturn self.relu(z) + x",
    "if self.bn is not None:\n    x = self.conv(x)\nif self.bn is not None:\n    x = self.bn(x)\nreturn x",
    "for _ in range(2):\n    x = self.conv(x)\n    x = self.bn(x)\nreturn x",
    "if self.flag:\n    x = self.conv(x)\n    x = self.bn(x)\nreturn x",
]


@pytest.mark.parametrize("body", ADJACENT)
@torch.no_grad()
def test_a_norm_next_to_its_layer_is_folded(body: str) -> None:
    model = make(of_source(body)).eval()  # type: ignore[arg-type]
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    expected, report = model(x), ConversionReport()
    assert_close(fold(model, report=report)(x), expected)
    assert [change.name for change in report.converted] == ["bn"]
