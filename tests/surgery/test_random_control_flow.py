"""500 random networks with awkward control flow: converted to L2 they are the originals, whatever was fused."""

from __future__ import annotations

import copy
import linecache
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from normmatters.surgery import ConversionReport, convert

SETUP = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.conv2 = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.norm, self.norm2, self.norm3 = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.relu, self.act = nn.ReLU(inplace=True), nn.ReLU()
        self.none, self.flag, self.count = None, True, 0
        self.slot = nn.Identity()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), self.relu, nn.Conv2d(3, 3, 1), self.norm3)
        self.down = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.layers = nn.ModuleList([nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1)])
        self.held = {"norm": self.norm}

    def part(self, v, w=None):
        v = self.norm2(self.conv2(v))
        return v if w is None else self.act(v + w)

"""
# {a} is the value of before, {b} another one, {v} the new one.
LINES = [
    "{v} = self.{n}({a})",
    "{v} = self.{n}(self.{c}({a}))",
    "{v} = self.{r}({a})",
    "{v} = self.{r}(self.{n}({a}))",
    "{v} = self.{r}(self.{n}(self.{c}({a})) + {b})",
    "{v} = self.{n}(self.{c}({a})); {v} += {b}; {v} = self.{r}({v})",
    "{v} = self.{n}(self.{c}({a})); {v} += self.down({b}); {v} = F.relu({v}, inplace=True)",
    "{v} = {b} + self.{n}({a})",
    "{v} = self.{n}({a}) + self.norm2({b})",
    "{v} = {a} + 0.5",
    "{v} = F.relu({a})",
    "{v} = torch.relu({a})",
    "{v} = {a}.relu()",
    "{v} = {a}.clone().relu_()",
    "{v} = self.body({a})",
    "{v} = self.relu(self.body({a}) + {b})",
    "{v} = self.body[:3]({a})",
    "{v} = self.body[1]({a}) + self.body[2]({b} * 1)",
    "{v} = self.down({a}); {w} = self.act({v}); {v} = {v} + {w}",
    "{v} = self.get_submodule('body.1')({a})",
    "{v} = helper(self.{n}, {a})",
    "{v} = helper(self.down, self.{n}({a}))",
    "{v} = checkpoint(self.conv2, {a}, use_reentrant=False)",
    "{v} = self.held['norm']({a})",
    "{v} = self.norm.forward({a})",
    "{v} = self.slot(self.{n}({a})); {v} = self.{r}({v})",
    "{v} = self.part({a})",
    "{v} = self.part({a}, {b})",
    "{v} = self.act(self.part({a}))",
    "{v} = self.{n}({a}); {w} = self.{n}.running_mean.clone(); {v} = self.{r}({v}) + {w}.view(-1, 1, 1)",
    "{v} = self.{n}({a}); self.{n}.running_var.mul_(0.9); {v} = self.{r}({v})",
    "{v} = self.{n}({a}); {w} = self.{n}({b}); {v} = self.{r}({v} + {w})",
    "{w} = self.{c}({a}); {v} = self.{n}({w}); {w}.mul_(0.5); {v} = self.{r}({v} + {w})",
    "{w} = {a}.clone(); {v} = self.{n}(self.{c}({a})); {w}[0] = 0; {v} = self.{r}({v} + {w})",
    "{w} = {a} * 1; {v} = self.{n}({w}); {w}.requires_grad or torch.mul({w}, 2, out={w}); {v} = self.{r}({v})",
    "{w} = {a} * 1; {v} = self.{n}(self.{c}({w})); self.relu({w}); {v} = self.{r}({v} + {w})",
    "{w} = {a} * 1; {v} = {w}; {v} += self.{n}({a}); {v} = self.{r}({v}) + {w}",
    "{v} = self.{n}({a}); {w} = {v}; {v} = self.{r}({v}); {v} = {v} + {w}",
    "{w} = self.down({a}); {v} = self.{n}({a}); {w} = {v}; {v} = self.{r}({v}); {v} = {v} + {w}",
    "{w} = self.down({a}); {v} = self.{n}({a}); {w} = {v} if self.flag else {w}; {v} = self.{r}({v}); {v} = {v} + {w}",
    "{w} = self.{n}({a}); {v} = (lambda t: t + {w})(self.{r}({a} * 1))",
    "{w} = self.{n}({a}); {v} = self.{r}(sum([{w} for _ in range(2)]))",
    "{w} = [self.{n}({a}), {b}]; {v} = self.{r}({w}[0] + {w}[1])",
    "{v} = self.{r}({w} + {b}) if ({w} := self.{n}({a})) is not None else {a}",
    "{v} = self.{r}(self.{n}({a})) if self.flag else self.{n}({a})",
    "{v} = {w} = self.{n}({a}); {v} = self.act({v}) + {w}",
    "{v}, {w} = self.{n}({a}), {b}; {v} = self.{r}({v} + {w})",
    "{v} = self.{n}(*[{a}]); {v} = self.{r}(input={v})",
    "{v} = self.{n}({a}); self.last = {v}; {v} = self.act({v}) + self.last",
    "{w} = {a} * 1; {v} = self.{n}({w}); {w} = self.relu({w}); {v} = self.{r}({v} + {w})",
    "{w} = {a} * 1; {v} = self.{n}({w}); {w} = doubled({w}); {v} = self.{r}({v} + {w})",
    "{v} = self.{n}({a}); {w} = reset(self.{n}); {v} = self.{r}({v} + {b})",
    "self.{n}({a}); {v} = {a}",
    "{v} = self.{n}({a}).mean((2, 3), keepdim=True) + {b}",
    "{v} = self.{r}(self.{n}({a}) + self.norm.weight.view(-1, 1, 1))",
    "{v} = self.{n}({a}); assert {v}.shape == {a}.shape; {v} = self.{r}({v})",
    "self.count += 1; {v} = self.{n}({a}) * self.count",
]
AROUND = [
    "if self.training:\n    {x}\nelse:\n    {v} = self.{r}(self.{n}({a}))",
    "if {a}.shape[0] > 1:\n    {x}\nelse:\n    {v} = {a}",
    "{v} = self.{n}({a})\nif self.none is not None:\n    {v} = self.none({v})\n{v} = self.{r}({v})",
    "{v} = self.{n}({a})\nif self.training and self.flag:\n    {v} = self.{r}({v})\nelse:\n    {v} = {v} + {b}",
    "{v} = self.{n}({a})\nif {v}.mean() > 0:\n    {v} = self.{r}({v})",
    "{v} = self.{n}({a})\nif self.{n}.num_batches_tracked > 1:\n    {v} = self.{r}({v})",
    "{v} = {a}\nfor m in self.layers:\n    {v} = m({v})",
    "{v} = {a}\nfor m in (self.conv, self.{n}, self.act):\n    {w} = {v}\n    {v} = m({v})\n{v} = {v} + {w}",
    "{v} = {a}\nfor i in range(3):\n    {v} = self.{n}({v})\n    if i == 1:\n        continue\n    {v} = self.{r}({v})",
    "{v} = {a}\nfor m in self.body.children():\n    {v} = m({v})\n    if m is self.relu:\n        break",
    "{v}, i = {a}, 0\nwhile i < 2:\n    {v} = self.{r}(self.{n}({v}) + {b})\n    i += 1",
    "with torch.no_grad():\n    {v} = self.{n}({a})\n{v} = self.{r}({v})",
    "with torch.set_grad_enabled(self.training):\n    {x}",
    "{v} = self.{n}({a})\nif {v}.abs().max() > 1e9:\n    return {v}\n{v} = self.{r}({v})",
    "{w} = self.{n}({a})\ndef inner(t):\n    return t + {w}\n{v} = self.{r}(inner({b}))",
    "{v} = self.{n}({a})\nif self.flag is False:\n    return {v}\n{v} = self.{r}({v})",
]
RESULTS = [
    "{v}",
    "dict(out={v}, aux=self.relu({w} * 1))",
    "({v}, {w})",
    "self.norm2({v})",
    "self.act(self.norm2({v}) + {w})",
]


def source_of(choose: random.Random) -> str:
    values, lines = ["x"], []
    for number in range(choose.randint(2, 5)):
        names = {"a": values[-1], "b": choose.choice(values), "v": f"v{number}", "w": f"w{number}"}
        names |= {"n": choose.choice(["norm", "norm2", "norm3"]), "c": choose.choice(["conv", "conv2"])}
        names |= {"r": choose.choice(["relu", "act"])}
        text = choose.choice(LINES)
        if choose.random() < 0.4:
            text = choose.choice(AROUND).replace("{x}", choose.choice(LINES))
        lines += text.format(**names).split("\n")
        values.append(names["v"])
    result = choose.choice(RESULTS).format(v=values[-1], w=choose.choice(values))
    return SETUP + "    def forward(self, x):\n" + "".join(f"        {line}\n" for line in [*lines, f"return {result}"])


def helper(norm: Any, x: Tensor) -> Any:
    return norm(x)


def doubled(x: Tensor) -> Tensor:
    """In place, where that is allowed."""
    return x.mul_(2)


def reset(norm: nn.BatchNorm2d) -> None:
    assert norm.running_mean is not None
    norm.running_mean.mul_(0.5)


def network(source: str) -> Any:
    names: dict[str, Any] = {"nn": nn, "torch": torch, "F": F, "checkpoint": checkpoint, "helper": helper}
    names |= {"doubled": doubled, "reset": reset}
    filename = f"<{hash(source)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = {**names, "__name__": __name__}
    exec(compile(source, filename, "exec"), scope)
    net = scope["Net"]().double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.5)
            nn.init.normal_(module.bias)
    return net


# The native kernels sum in another order than PyTorch's. A norm of nearly equal values multiplies a rounding of float64
# by up to 1/√eps = 316, and a chain of four norms by 316⁴. What control flow changes is of the order of 1.
TOLERANCE = 1e-5**-2 * torch.finfo(torch.float64).eps


def hooked(net: nn.Module, names: list[str]) -> list[Tensor]:
    seen: list[Tensor] = []
    for name in names:
        net.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    return seen


def run(net: Any, x: Tensor, gradients: bool) -> Any:
    """Outputs, gradients and what a pass left in the buffers; or the error it raised."""
    net.zero_grad()
    x = x.clone().requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        out = net(x * 1)
    parts = list(out.values()) if isinstance(out, dict) else list(out) if isinstance(out, tuple) else [out]
    if gradients and any(part.requires_grad for part in parts):
        try:
            sum((p * torch.linspace(-1, 2, p.numel()).view_as(p)).sum() for p in parts).backward()  # type: ignore[union-attr]
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            return None  # it writes over what a gradient needs
    found = [*(p.detach() for p in parts), x.grad, *(p.grad for p in net.parameters())]
    return [type(out), len(parts), *found, *(b.clone() for b in net.buffers())]


@pytest.mark.parametrize("seeds", [range(first, first + 100) for first in range(0, 500, 100)], ids=str)
def test_converted_is_the_original(seeds: range) -> None:
    fused = rewritten = 0
    for seed in seeds:
        torch.manual_seed(seed)
        choose = random.Random(seed)
        source = source_of(choose)
        original = network(source)
        report = ConversionReport()
        net = convert(copy.deepcopy(original), "l2", report=report)
        fused += len(report.fused)
        rewritten += bool(report.forwards)
        names = [name for name, _ in original.named_modules() if name and choose.random() < 0.05]
        x = torch.randn(3, 3, 2, 2, dtype=torch.float64)
        try:
            seen, expected_seen = hooked(net, names), hooked(original, names)
            for training, gradients in ((True, False), (True, True), (False, True)):
                net.train(training), original.train(training)
                expected = run(original, x, gradients)
                found = run(net, x, gradients)
                if expected is not None and found is not None:
                    assert_close(found[2:], expected[2:], rtol=TOLERANCE, atol=TOLERANCE * (1 + scale(expected)))
                    assert found[:2] == expected[:2]
            assert_close(seen, expected_seen, rtol=TOLERANCE, atol=TOLERANCE)
            assert list(net.state_dict()) == list(original.state_dict())
        except Exception as error:
            error.add_note(f"seed {seed}\n{source}\n{report}\n" + "\n".join(report.forwards.values()))
            raise
    assert fused > len(seeds)
    assert rewritten > len(seeds) // 2


def scale(values: list[Any]) -> float:
    return max(float(v.detach().abs().max()) for v in values if isinstance(v, Tensor))
