"""What changes in a block after its conversion counts from then on, as in the block as written."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normmatters.surgery import ConversionReport, convert, register_fusion, to_torch
from normmatters.surgery.blocks import FusedBlock


class Kind(Enum):
    PLAIN = 1
    RAISED = 2


class Block(nn.Module):
    """Its forward reads settings of every kind, and has all that a norm may take over."""

    skip = True
    unread = True

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.0)
        self.relu = nn.ReLU()
        self.none = nn.Identity()
        self.branch = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.size: tuple[int, ...] = (1, 1)
        self.factors = [1.0, 1.0]
        self.table = {"factor": 1.0}
        self.rate = np.sqrt(1.0)  # a constant of the program, which must not name NumPy
        self.shape = torch.Size((1, 1))
        self.act, self.sum = F.relu, torch.add
        self.kind = Kind.PLAIN
        self.tags = {"a"}
        self.dtype = torch.float64
        self.times = functools.partial(torch.mul, other=1.0)
        self.layers = nn.ModuleList([nn.Identity()])
        self.register_module("adapter", None)
        self.register_parameter("gain", None)
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        out = F.dropout(self.act(self.bn(self.conv(x))), self.drop.p, self.drop.training)
        out = out * (self.factors[0] * self.table["factor"] * self.rate)
        if (2, 2) in (self.size, self.shape) or self.kind is Kind.RAISED:
            out = out + 1
        out = out if self.adapter is None else self.adapter(out)
        for factor in (self.gain, self.mask, getattr(self, "late", None)):
            out = out if factor is None else out * factor
        for layer in self.layers:
            out = layer(out)
        out = self.times(out.to(self.dtype) if "a" in self.tags else -out)
        shortcut = x if self.skip and type(self.none) is nn.Identity else -x
        return self.relu(self.sum(self.none(self.branch(out)), shortcut))


def fused() -> Any:
    torch.manual_seed(0)
    block: Any = convert(Block().double(), "l2")
    assert isinstance(block, FusedBlock)
    return block


def x() -> Tensor:
    return torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


CHANGES: list[Callable[[Any], Any]] = [
    lambda block: setattr(block.drop, "p", 0.5),
    lambda block: block.drop.train(not block.training),
    lambda block: setattr(block, "drop", nn.Dropout2d(0.25)),
    lambda block: setattr(block, "skip", False),
    lambda block: setattr(block, "size", (2, 2)),
    lambda block: block.factors.__setitem__(0, 2.0),
    lambda block: block.table.update(factor=2.0),
    lambda block: setattr(block, "shape", torch.Size((2, 2))),
    lambda block: setattr(block, "act", F.gelu),
    lambda block: setattr(block, "sum", torch.mul),
    lambda block: setattr(block, "kind", Kind.RAISED),
    lambda block: setattr(block, "bn", nn.BatchNorm2d(3).double()),
    lambda block: block.branch.__setitem__(1, nn.BatchNorm2d(3).double()),
    lambda block: block.branch.append(nn.Tanh()),
    lambda block: setattr(block, "relu", nn.Tanh()),
    lambda block: block.layers.append(nn.Tanh()),
    lambda block: setattr(block, "adapter", nn.Tanh()),
    lambda block: setattr(block, "gain", nn.Parameter(torch.zeros(1))),
    lambda block: setattr(block, "mask", torch.zeros(1)),
    lambda block: setattr(block, "late", 0.5),
    lambda block: setattr(block, "dtype", torch.double),
    lambda block: setattr(block, "times", functools.partial(torch.mul, other=2.0)),
    lambda block: block.tags.clear(),
    lambda block: setattr(block, "none", nn.Tanh()),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_counts(change: Callable[[Any], Any], training: bool) -> None:
    torch.manual_seed(0)
    plain, block = Block().double().train(training), fused().train(training)
    block.load_state_dict(plain.state_dict())
    for model in (plain, block):
        model(x())
        change(model)
    results = []
    for model in (plain, block):
        torch.manual_seed(1)
        results.append(model(x()))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_other_modules_in_copies_and_compiled() -> None:
    """Also in copies, compiled, and against the block as it was written."""
    plain = Block().double()
    block = fused()
    for model in (plain, block):
        torch.manual_seed(2)
        model.conv = nn.Conv2d(3, 3, 1).double()
        model.branch[0] = nn.Conv2d(3, 3, 3, padding=1).double()
        model.relu, model.none, model.drop = nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.0)
        model.unread = False
    for training in (True, False):
        block.load_state_dict(plain.state_dict())
        expected = plain.train(training)(x())
        block.train(training)
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        for model in (block, copy.deepcopy(block), pickle.loads(pickle.dumps(block)), compiled):
            torch.testing.assert_close(model(x()), expected, rtol=1e-10, atol=1e-10)


def test_other_threads_are_not_disturbed() -> None:
    """While one thread converts, others convert the same classes, and run models."""
    errors: list[Exception] = []
    stop = threading.Event()

    def runs() -> None:
        model, norm = fused().eval(), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()).double().eval()
        expected = model(x()), norm(x())
        try:
            while not stop.is_set():
                torch.testing.assert_close((model(x()), norm(x())), expected)
                fused()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=runs) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            fused()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors


class Named(nn.Module):
    """Names that a rewritten forward might need for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.__scale = 2.0

    def forward(self, x: Tensor, link: float = 1.0, fusion: float = 1.0, *args: float, last: float = 1.0) -> Tensor:
        wanted = link * fusion * last * self.__scale * sum(args)
        return self.__relu(self.bn(self.conv(x))) * wanted

    def __relu(self, x: Tensor) -> Tensor:
        return F.relu(x)


def test_any_name_may_be_an_argument() -> None:
    plain: Any = Named()
    block: Any = convert(copy.deepcopy(plain), "l2")
    y = x().float()
    for model in (plain.eval(), block.eval()):
        model.bn.bias.data.fill_(0.5)
    torch.testing.assert_close(block(y, 2.0, 3.0, 1.0, 2.0, last=0.5), plain(y, 2.0, 3.0, 1.0, 2.0, last=0.5))
    with pytest.raises(TypeError):
        block(y, nonsense=1)


class Patched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(x))


def test_a_forward_put_on_the_class_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    block = convert(Patched().double(), "l1").eval()
    monkeypatch.setattr(Patched, "forward", lambda self, x: self.bn(x))
    assert bool((block(x()) < 0).any())


class Written(nn.Module):
    """With control flow that cannot be rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return F.relu(self.bn(self.conv(x)) + x)
        finally:
            pass


def fused_written(block: Any, x: Tensor) -> Tensor:
    output: Tensor = block.bn.forward_linked(block.conv(x), x, linked=False, relu=True)[0]
    return output


def test_register_fusion() -> None:
    torch.manual_seed(0)
    plain = Written().double()
    assert type(convert(copy.deepcopy(plain), "l2")) is Written
    register_fusion(Written, fused_written)
    report = ConversionReport()
    block = convert(copy.deepcopy(plain), "l2", report=report)
    assert [change.fused for change in report.changes] == ["registered"]
    for model in (block, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert isinstance(model, FusedBlock)
        torch.testing.assert_close(model.eval()(x()), plain.eval()(x()), rtol=1e-10, atol=1e-10)
    assert type(to_torch(block)) is Written
    with pytest.raises(TypeError, match="cls must be"):
        register_fusion(plain, fused_written)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="forward must be"):
        register_fusion(Written, None)  # type: ignore[arg-type]
