"""What may change in a fused block after its conversion, and what is an error, for its program would not follow."""

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

from normmatters.surgery import convert
from normmatters.surgery.fused import FusedBlock


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
    assert [block.bn.act, block.branch[1].act] == ["relu", "relu"]
    return block


def x() -> Tensor:
    return torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "drop.p is 0.5": lambda block: setattr(block.drop, "p", 0.5),
    "drop.training is": lambda block: block.drop.train(not block.training),
    "drop.p is None": lambda block: setattr(block, "drop", nn.Identity()),
    "skip is False": lambda block: setattr(block, "skip", False),
    r"size is \(2, 2\)": lambda block: setattr(block, "size", (2, 2)),
    r"factors is \[2.0, 1.0\]": lambda block: block.factors.__setitem__(0, 2.0),
    "table is {'factor': 2.0}": lambda block: block.table.update(factor=2.0),
    r"shape is torch\.Size\(\[2, 2\]\)": lambda block: setattr(block, "shape", torch.Size((2, 2))),
    "act is <.*gelu": lambda block: setattr(block, "act", F.gelu),
    "sum is <.*mul": lambda block: setattr(block, "sum", torch.mul),
    "kind is <Kind.RAISED": lambda block: setattr(block, "kind", Kind.RAISED),
    "bn.act is None": lambda block: setattr(block, "bn", nn.BatchNorm2d(3).double()),
    "branch.1.act is None": lambda block: block.branch.__setitem__(1, nn.BatchNorm2d(3).double()),
    "branch._modules is .*Tanh": lambda block: block.branch.append(nn.Tanh()),
    "relu.__class__ is .*Tanh": lambda block: setattr(block, "relu", nn.Tanh()),
    "layers._modules is .*Tanh": lambda block: block.layers.append(nn.Tanh()),
    "adapter is Tanh": lambda block: setattr(block, "adapter", nn.Tanh()),
    r"gain is Parameter containing:\n": lambda block: setattr(block, "gain", nn.Parameter(torch.zeros(1))),
    "mask is tensor": lambda block: setattr(block, "mask", torch.zeros(1)),
    "late is 0.5": lambda block: setattr(block, "late", 0.5),
    r"dtype is torch\.float32": lambda block: setattr(block, "dtype", torch.float32),
    "times is functools.partial.*2.0": lambda block: setattr(block, "times", functools.partial(torch.mul, other=2.0)),
    "tags is set": lambda block: block.tags.clear(),
    "none.__class__ is .*Tanh": lambda block: setattr(block, "none", nn.Tanh()),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("message", CHANGES)
def test_what_the_program_would_not_follow_is_an_error(message: str, training: bool) -> None:
    block = fused().train(training)
    block(x())
    CHANGES[message](block)
    with pytest.raises(
        RuntimeError, match=rf"^Block\.{message}.*, but was .* when normmatters\.convert fused this block"
    ):
        block(x())


def test_what_the_program_follows_may_change() -> None:
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


def test_a_trace_leaves_modules_as_they_were() -> None:
    fused()
    assert "__getattribute__" not in vars(nn.Module)


def test_two_threads_convert_at_a_time() -> None:
    inside, done = threading.Event(), threading.Event()

    class Slow(Block):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            done.wait(0.1)
            return super().forward(x)

    def other() -> None:
        inside.wait()
        fused()
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    convert(Slow().double(), "l2")
    thread.join()
    assert "__getattribute__" not in vars(nn.Module)


class Starts(nn.Module):
    """A module at its start is given the block's input, which is added at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.conv, self.bn = nn.Hardtanh(-0.1, 0.1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(self.act(x))) + x)


def test_a_module_that_may_change_the_blocks_input_is_known() -> None:
    """Its ``inplace`` may be set at any time, and the gradient of a link would pass the change by."""
    block: Any = convert(Starts(), "l1")
    assert not block.act.inplace
    assert block.bn.act == "relu"
    assert not block.fusion_program.linked
