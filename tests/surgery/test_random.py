"""Networks written at random, as users write them: converted ones do what the reference does, whatever was fused."""

from __future__ import annotations

import copy
import linecache
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from normmatters.surgery import ConversionReport, convert, to_torch

NORM, CONV = "nn.BatchNorm2d(3)", "nn.Conv2d(3, 3, 3, padding=1)"
RELU_MODULES = ["nn.ReLU()", "nn.ReLU(inplace=True)"]
RELUS = ["F.relu({a})", "torch.relu({a})", "{a}.relu()", "F.relu({a}, inplace=True)", "{a}.relu_()"]
ADDS = [
    "{a} + {b}",
    "{b} + {a}",
    "torch.add({a}, {b})",
    "{a}.add({b})",
    "{a}.add_({b})",
    "torch.add({a}, {b}, alpha=2)",
]
OTHERS = [
    "{a} * 0.5",
    "{a}.clone()",
    "{a}[:]",
    "{a} if self.training else {a} * 2",
    "{a}.mul_(0.5)",
    "{a} + self.scale",
]
SEQUENTIALS = [
    f"{CONV}, {NORM}",
    f"{CONV}, {NORM}, nn.ReLU()",
    f"{NORM}, nn.ReLU(), {CONV}",
    f"nn.ReLU(), {CONV}, {NORM}",
    f"nn.Sequential(nn.ReLU(), {CONV}), {NORM}",
    f"nn.Identity(), nn.ReLU(inplace=True), nn.Sequential({CONV}, {NORM})",
    f"nn.Sequential({CONV}, {NORM}), nn.Identity(), nn.ReLU(inplace=True)",
    f"{CONV}, nn.Sequential({NORM}), nn.Dropout(0.0)",
    f"{CONV}, nn.BatchNorm2d(3, affine=False), nn.ReLU(), nn.MaxPool2d(3, 1, 1)",
]


class Writer:
    """Writes one block: every value has the same shape, and later lines rather use the values of the last ones."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.modules: dict[str, list[str]] = {}
        self.values = ["x"]
        self.lines: list[str] = []

    def module(self, kind: str, made: str) -> str:
        """A new module, or one of before: norms and convolutions are seldom called twice, ReLUs often."""
        known = self.modules.setdefault(kind, [])
        if not known or self.choose.random() > (0.5 if kind == "relu" else 0.05):
            known.append(made)
            return f"self.{kind}{len(known) - 1}"
        return f"self.{kind}{self.choose.randrange(len(known))}"

    def relu(self, value: str) -> str:
        if self.choose.random() < 0.4:
            return f"{self.module('relu', self.choose.choice(RELU_MODULES))}({value})"
        return self.choose.choice(RELUS).format(a=value)

    def line(self) -> None:
        last, other = self.values[-1], self.choose.choice(self.values)
        kind = self.choose.choices(["norm", "conv", "relu", "add", "seq", "end", "other"], [2, 1, 2, 2, 6, 6, 1])[0]
        if kind in ("norm", "conv"):
            value = f"{self.module(kind, NORM if kind == 'norm' else CONV)}({last})"
        elif kind == "seq":
            value = f"{self.module('seq', f'nn.Sequential({self.choose.choice(SEQUENTIALS)})')}({last})"
        elif kind == "relu":
            value = self.relu(last)
        elif kind == "end":  # of a residual block
            norm, conv = self.module("norm", NORM), self.module("conv", CONV)
            value = f"({norm}({conv}({last})) + {other})"
            value = self.relu(value) if self.choose.random() < 0.5 else value
        else:
            value = self.choose.choice(ADDS if kind == "add" else OTHERS).format(a=last, b=other)
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {value}")
        self.values = [*self.values[-2:], name]

    def source(self) -> str:
        for _ in range(self.choose.randint(3, 7)):
            self.line()
        made = [
            f"self.{kind}{i} = {made}" for kind, all_made in self.modules.items() for i, made in enumerate(all_made)
        ]
        return "\n".join(
            [
                "class Net(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                "        self.scale = nn.Parameter(torch.rand(3, 1, 1))",
                *(f"        {line}" for line in made),
                "    def forward(self, x):",
                *(f"        {line}" for line in self.lines),
                f"        return {self.values[-1]}",
            ]
        )


class ReferenceL1(nn.BatchNorm2d):
    """F5 by PyTorch's own operations."""

    def forward(self, input: Tensor) -> Tensor:
        mean, square = self.running_mean, self.running_var
        if self.training:
            n = input.numel() // 3
            mean = input.mean((0, 2, 3))
            scale = math.sqrt(math.pi / 2) * (input - mean.view(-1, 1, 1)).abs().mean((0, 2, 3))
            square = scale.square()
            with torch.no_grad():
                self.num_batches_tracked += 1
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(square * n / (n - 1), self.momentum)
        assert mean is not None
        assert square is not None
        y = (input - mean.view(-1, 1, 1)) / (square.view(-1, 1, 1) + self.eps).sqrt()
        return y if self.weight is None else y * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def network(source: str) -> nn.Module:
    names: dict[str, Any] = {"nn": nn, "torch": torch, "F": F, "__name__": __name__}
    filename = f"<{hash(source)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), names)
    net: nn.Module = nn.Sequential(*(names["Net"]() for _ in range(2))).double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.normal_(module.weight, 1, 0.5)
            nn.init.normal_(module.bias)
    return net


def step(net: nn.Module, x: Tensor, gradients: bool) -> list[Any]:
    """All that a step gives: output, gradients and what it left in the buffers."""
    x = x.clone().requires_grad_(gradients)
    net.zero_grad()
    with torch.set_grad_enabled(gradients):
        y = net(x * 1)
    if gradients:
        (y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum().backward()
    return [y, x.grad, *(p.grad for p in net.parameters()), *(b.clone() for b in net.buffers())]


def same_step(net: nn.Module, reference: nn.Module, x: Tensor) -> None:
    expected = step(reference, x, False)
    assert_close(step(net, x, False), expected, rtol=1e-8, atol=1e-9)
    try:
        expected = step(copy.deepcopy(reference), x, True)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return  # it writes over what a gradient needs
    scale = max(float(g.detach().abs().max()) for g in expected if g is not None)
    assert_close(step(copy.deepcopy(net), x, True), expected, rtol=1e-8, atol=1e-9 * (1 + scale))


@pytest.mark.parametrize("seeds", [range(first, first + 12) for first in range(0, 48, 12)], ids=str)
def test_converted_is_the_reference(seeds: range) -> None:
    fused: list[str] = []
    for seed in seeds:
        torch.manual_seed(seed)
        source = Writer(random.Random(seed)).source()
        original = network(source)
        reference = copy.deepcopy(original)
        norm = "l1" if seed % 2 else "l2"
        if norm == "l1":
            for module in reference.modules():
                module.__class__ = ReferenceL1 if isinstance(module, nn.BatchNorm2d) else type(module)
        report = ConversionReport()
        net = convert(copy.deepcopy(original), norm, report=report)
        fused += [change.fused for change in report.fused]
        try:
            for training in (True, False, True):
                same_step(net.train(training), reference.train(training), torch.randn(3, 3, 4, 4).double())
            back = to_torch(net.eval())
            assert [type(module) for module in back.modules()] == [type(module) for module in original.modules()]
            same_step(back, reference.eval(), torch.randn(3, 3, 4, 4).double())
        except Exception as error:
            error.add_note(f"seed {seed}, {norm}\n{source}\n{report}")
            raise
    assert {"relu", "add + relu"} <= set(fused)
