"""Two added batch norms by the twin kernels and by the plain equation in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normmatters.functional import lp_batch_norm
from normmatters.kernels import dispatch
from normmatters.norm import Norm as description_of
from normmatters.norm import RunningStats
from support import tolerances
from support.batch_norm_cases import EPS, MOMENTUM, Result, by_channel, compare, near, off_the_fence

NO_STATS = RunningStats()


@dataclass
class Norm:
    """One of the two: its input, parameters and constant."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    constant: str | float = "exact"

    def plain(self) -> Tensor:
        """Its output by the equation, in float64."""
        weight, bias = (None if t is None else t.double() for t in (self.weight, self.bias))
        x = self.x.double()
        return lp_batch_norm(x, None, None, weight, bias, True, MOMENTUM, EPS, p=1, constant=self.constant)

    def side(
        self, memory: str, running: RunningStats = NO_STATS, tensors: list[Tensor | None] | None = None
    ) -> dispatch.NormedInput:
        """As the dispatcher takes it, with other ``tensors`` for input, weight and bias if given."""
        x, weight, bias = (self.x, self.weight, self.bias) if tensors is None else tensors
        description = description_of(1, constant=self.constant, eps=EPS, memory=memory)
        return dispatch.NormedInput(x, description, weight, bias, running)


def fused(first: Norm, second: Norm, g: Tensor, memory: str, link: Tensor | None = None) -> tuple[Result, Result]:
    """What each norm gets; the output, which is one, stands in both. With ``link`` the gradient comes in two parts."""
    leaves, states, sides = [], [], []
    for norm in (first, second):
        own = [None if t is None else t.detach().requires_grad_() for t in (norm.x, norm.weight, norm.bias)]
        running = [torch.full(norm.x.shape[1:2], v, device=norm.x.device) for v in (0.5, 2.0)]
        batches = torch.full((), 6, device=norm.x.device)  # counted by the kernel
        leaves.append(own)
        states.append((*running, batches))
        sides.append(norm.side(memory, RunningStats(*running, batches, MOMENTUM), own))
    y, out = dispatch.twin_batch_norm(*sides, linked=link is not None)
    assert [int(state[-1]) for state in states] == [7, 7]
    if link is None:
        y.backward(g)
    else:
        torch.autograd.backward([y, out], [g, link])
    first, second = (
        Result(y.detach(), *state[:2], *(None if t is None else t.grad for t in own), None)
        for own, state in zip(leaves, states)
    )
    return first, second


def check(
    first: Norm, second: Norm, memory: str, *, g: Tensor | None = None, linked: bool = False
) -> tuple[Result, Result]:
    """Everything that a training step computes, each channel within a bound for its own size; what each norm got."""
    x = first.x
    parts = [first.plain(), second.plain()]
    if g is None:
        g = off_the_fence(torch.randn_like(x), x, first.weight, first.bias, parts[1], "l1", first.constant)
    link = None
    if linked:
        link = torch.where(g != 0, torch.randn_like(g), 0)
        both = fused(first, second, g, memory, link)
        g = g + link  # in the gradient's dtype
    else:
        both = fused(first, second, g, memory)
    compare_both(both, first, second, parts, memory, g)
    return both


def compare_both(both, first: Norm, second: Norm, parts: list[Tensor], memory: str, g: Tensor) -> None:
    """Raise unless both results are what the equation gives, where each norm's output is the other's residual."""
    y = (parts[0] + parts[1]).relu()
    bound, size = 0.0, 0.0
    for norm, ours, residual, part in zip((first, second), both, reversed(parts), parts):
        assert ours.y.dtype == ours.dx.dtype == norm.x.dtype
        assert ours.y.stride() == ours.dx.stride() == torch.empty_like(first.x).stride()
        masked = torch.where(ours.y > 0, g, 0)
        # The output is compared below, for it has both norms' errors.
        given = Result(y, ours.running_mean, ours.running_var, ours.dx, ours.dweight, ours.dbias, masked)
        compare(
            given, norm.x, "l1", weight=norm.weight, bias=norm.bias, residual=residual, act="relu", memory=memory,
            constant=norm.constant, g=g,
        )  # fmt: skip
        values = by_channel(norm.x)
        n = values.shape[1]
        wrong = tolerances.statistic(torch.float32, n) + (tolerances.pilot(n) if n > 4096 else 0)
        spread = (values - values.mean(1, keepdim=True)).abs().mean(1) + EPS**0.5
        wrong = wrong + tolerances.offset(torch.float32, 1.0) * values.mean(1).abs() / spread
        most = by_channel(part).abs().amax(1) + (0 if norm.bias is None else norm.bias.double().abs())
        bound, size = bound + 2 * wrong * most, size + most
    near("output", by_channel(both[0].y), by_channel(y), bound + 4 * torch.finfo(first.x.dtype).eps * size)
