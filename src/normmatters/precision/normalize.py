"""The norms in emulated low-precision arithmetic, and their gradient: one rounded operation after the other.

Tensors are float32 and hold values of the rounded formats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it imports the compiler only when called

from normmatters.functional.batch_norm import batch_norm as plain_batch_norm
from normmatters.functional.checks import check_batch_norm, check_layer_norm
from normmatters.kernels.double_backward import once_differentiable
from normmatters.kernels.memory_format import memory_format
from normmatters.norm import Norm, RunningStats
from normmatters.precision.rounding import (
    add,
    constant,
    divide,
    multiply,
    rounded,
    running_mean,
    split_count,
    subtract,
    tree_mean,
)


@dataclass(frozen=True)
class Arithmetic:
    """What is rounded to which format. While it is active, it computes every norm of this library.

    >>> with nm.precision.arithmetic("fp16", accumulate="fp32") as setting:
    ...     setting.dtype, setting.accumulate
    (torch.float16, torch.float32)
    """

    dtype: torch.dtype  # results of operations on elements
    accumulate: torch.dtype  # partial sums, and the scalars of a channel
    storage: torch.dtype  # activations between operations
    gradient: torch.dtype  # gradients between operations
    sums: Literal["tree", "running"] = "tree"  # in which order numbers are added up

    def mean(self, x: Tensor, dim: int) -> Tensor:
        """Mean over ``dim`` (kept, size 1), by a tree of averages or by a running sum, in the accumulator's format."""
        return (running_mean if self.sums == "running" else tree_mean)(x, dim, self.accumulate)

    # Nothing here is compiled: a graph would drop the round trips through fp16, which are the point.

    @_disable_dynamo
    def batch_norm(
        self,
        input: Tensor,
        norm: Norm,
        weight: Tensor | None,
        bias: Tensor | None,
        running: RunningStats,
        training: bool,
        *,
        residual: Tensor | None = None,
        act: str | None = None,
    ) -> Tensor:
        """Batch norm in this arithmetic. input and residual: (N, C, ...); the other tensors: (C,)."""
        _check_supported(norm)
        check_batch_norm(input, norm, weight, bias, running, training, residual=residual, act=act)
        if input.numel() == 0:  # nothing to round
            return plain_batch_norm(input, norm, weight, bias, running, training, residual=residual, act=act)
        n = input.numel() // input.shape[1]
        C = norm.scale_constant(n) if training else 1.0  # for fixed statistics n may be less than k
        rule = Rule(self, norm, C, norm.epsilon(input.dtype), relu=act == "relu")
        fixed = None
        if not training:
            assert running.mean is not None  # checked above
            fixed = _running_scale(running.mean, running.var, rule)

        def rows(x: Tensor | None) -> Tensor | None:  # (N, C, ...) -> (C, n)
            return None if x is None else x.transpose(0, 1).reshape(x.shape[1], -1)

        def column(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, None]

        y: Tensor
        y, mean, scale = Normalize.apply(rows(input), column(weight), column(bias), rows(residual), fixed, rule)
        if training:
            squared = None if norm.kind == "mean" else scale.flatten().square()
            running.update(norm, mean.flatten(), squared, n)
        shape = input.shape
        y = y.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1)
        return y.contiguous(memory_format=memory_format(input))

    @_disable_dynamo
    def layer_norm(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        norm: Norm,
        weight: Tensor | None,
        bias: Tensor | None,
        *,
        centered: bool = True,
    ) -> Tensor:
        """Layer norm, or with ``centered=False`` RMS norm, in this arithmetic. input: (..., *normalized_shape)."""
        _check_supported(norm)
        check_layer_norm(input, normalized_shape, norm, weight, bias)
        n = math.prod(normalized_shape)
        rule = Rule(self, norm, norm.scale_constant(n), norm.epsilon(input.dtype), center=centered, weight_dim=1)
        weight, bias = (None if x is None else x.reshape(1, n) for x in (weight, bias))
        rows = input.reshape(input.numel() // max(n, 1), n)
        y: Tensor = Normalize.apply(rows, weight, bias, None, None, rule)[0]
        return y.reshape(input.shape)


def _check_supported(norm: Norm) -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "precision.arithmetic does not go through the transforms of torch.func (vmap, grad, jvp): take gradients "
            "by backward() or torch.autograd.grad here, or leave the arithmetic"
        )
    if norm.kind == "lp":
        raise ValueError(f"precision.arithmetic supports p = 1, 2, math.inf, 'range' and 'mean', got p = {norm.p!r}")


def _running_scale(mean: Tensor, var: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    scale = torch.ones_like(mean) if var is None or rule.norm.kind == "mean" else (var.float() + rule.eps).sqrt()
    return mean.float()[:, None], scale.float()[:, None]


@dataclass(frozen=True)
class Rule:
    """Which normalization, in which arithmetic."""

    arithmetic: Arithmetic
    norm: Norm
    C: float
    eps: float
    center: bool = True  # subtract the mean
    weight_dim: int = 0  # of (rows, n), the dimension that weight and bias run along
    relu: bool = False

    @property
    def kind(self) -> str:
        return self.norm.kind

    @property
    def k(self) -> int:
        """1 for L∞, which is Top(1)."""
        return self.norm.k or 1

    def scales(self, x: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        """s and √(s² + eps) of every row, in the accumulator's format. x, deviation: (rows, n)."""
        dtype, acc = self.arithmetic.dtype, self.arithmetic.accumulate
        C = constant(self.C, acc)
        if self.kind == "mean":
            one = deviation.new_ones(deviation.shape[0], 1)
            return one, one
        if self.kind == "l2":
            variance = self.arithmetic.mean(multiply(deviation, deviation, dtype), 1)
            if C != 1:
                variance = multiply(variance, constant(C * C, acc), acc)
            return rounded(variance.sqrt(), acc), rounded(add(variance, constant(self.eps, acc), acc).sqrt(), acc)
        if self.kind == "l1":
            statistic = self.arithmetic.mean(deviation.abs(), 1)
        elif self.kind == "range":
            statistic = rounded(subtract(x.amax(1, keepdim=True), x.amin(1, keepdim=True), dtype), acc)
        else:
            statistic = self.arithmetic.mean(deviation.abs().topk(self.k, 1).values, 1)
        s = multiply(statistic, C, acc)
        return s, _hypotenuse(s, constant(math.sqrt(self.eps), acc), acc)

    def slope(self, x: Tensor, deviation: Tensor, x_hat: Tensor) -> tuple[Tensor, Tensor, bool]:
        """e, its sum over the row, and whether the statistic is a mean over all: its slope is then e/n, otherwise e.

        Where elements tie for the extreme they share its gradient, so that no order of elements matters.
        """
        dtype, acc = self.arithmetic.dtype, self.arithmetic.accumulate
        if self.kind == "l2":
            return x_hat, x_hat.new_zeros(x_hat.shape[0], 1), True
        sign = deviation.sign()
        if self.kind == "l1":
            return sign, sign.sum(1, keepdim=True), True
        if self.kind == "range":
            ends = [(x == end).float() for end in (x.amax(1, keepdim=True), x.amin(1, keepdim=True))]
            high, low = (divide(end, end.sum(1, keepdim=True), dtype) for end in ends)
            return high - low, sign.new_zeros(sign.shape[0], 1), False
        size = deviation.abs()
        threshold = size.topk(self.k, 1).values[:, -1:]
        inside, tied = (size > threshold).float(), (size == threshold).float()
        share = divide(self.k - inside.sum(1, keepdim=True), tied.sum(1, keepdim=True), dtype)
        inside, tied = inside * sign, tied * sign
        total = divide(inside.sum(1, keepdim=True) + share * tied.sum(1, keepdim=True), self.k, acc)
        return divide(inside + share * tied, self.k, dtype), total, False


def _hypotenuse(s: Tensor, root_eps: float, acc: torch.dtype) -> Tensor:
    """√(s² + eps) as m·√(1 + (l/m)²) with m = max(s, √eps), l = min(s, √eps): no square of s."""
    if root_eps == 0:
        return s
    large, small = s.clamp(min=root_eps), s.clamp(max=root_eps)
    ratio = divide(small, large, acc)
    root = rounded(add(multiply(ratio, ratio, acc), 1, acc).sqrt(), acc)
    return multiply(large, root, acc)


class Normalize(torch.autograd.Function):
    """y = relu((x − μ)/D·weight + bias + residual) over the rows of (rows, n), with D = √(s² + eps)."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        fixed: tuple[Tensor, Tensor] | None,
        rule: Rule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, storage = rule.arithmetic.dtype, rule.arithmetic.storage
        x = rounded(input.float(), storage)
        if fixed is not None:
            mean, D = fixed
            s = D
            deviation = subtract(x, rounded(mean, dtype), dtype)
        else:
            mean = rule.arithmetic.mean(x, 1) if rule.center else x.new_zeros(x.shape[0], 1)
            deviation = subtract(x, rounded(mean, dtype), dtype) if rule.center else x
            s, D = rule.scales(x, deviation)
        y = deviation if rule.kind == "mean" else divide(deviation, rounded(D, dtype), dtype)
        if weight is not None:
            y = multiply(y, rounded(weight.float(), dtype), dtype)
        if bias is not None:
            y = add(y, rounded(bias.float(), dtype), dtype)
        if residual is not None:
            y = add(y, rounded(residual.float(), storage), dtype)
        if rule.relu:
            y = y.relu()
        output = rounded(y, storage).to(input.dtype)
        ctx.save_for_backward(x.to(storage), weight, mean, s, D, output if rule.relu else None)
        ctx.rule, ctx.fixed, ctx.input_dtype = rule, fixed is not None, input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.mark_non_differentiable(mean, s)
        return output, mean, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """dx = (ĝ − mean ĝ − (s/D)·C·A·(e − mean e))/D, with ĝ = g·weight, A = mean(ĝ·x̂), e the statistic's slope."""
        rule: Rule = ctx.rule
        dtype, acc, store = rule.arithmetic.dtype, rule.arithmetic.accumulate, rule.arithmetic.gradient
        saved, weight, mean, s, D, output = ctx.saved_tensors
        x, n = saved.float(), saved.shape[1]
        g = rounded(grad.float(), store)
        if output is not None:
            g = g.masked_fill(output <= 0, 0.0)
        deviation = subtract(x, rounded(mean, dtype), dtype) if rule.center or ctx.fixed else x
        D_element = rounded(D, dtype)
        x_hat = deviation if rule.kind == "mean" else divide(deviation, D_element, dtype)

        g_hat = g if weight is None else multiply(g, rounded(weight.float(), dtype), dtype)
        g_x = multiply(g, x_hat, dtype)
        over_weight = 1 - rule.weight_dim  # the dimension that the parameters' gradients sum over
        sums = rule.arithmetic.mean(torch.stack([g, g_x]), 1 + over_weight)
        if rule.weight_dim == 0:  # a row has one weight, which leaves its means as a factor
            means = sums if weight is None else multiply(sums, rounded(weight.float(), acc), acc)
        else:
            means = rule.arithmetic.mean(torch.stack([g_hat, multiply(g_hat, x_hat, dtype)]), 2)

        dx = g_hat
        if not ctx.fixed:
            shift = means[0] if rule.center else None
            if rule.kind != "mean":
                slope, total, averaged = rule.slope(x, deviation, x_hat)
                factor = multiply(means[1], constant(rule.C if rule.kind != "l2" else rule.C**2, acc), acc)
                if rule.kind != "l2":  # for L2, (s/D)·∂s/∂x is x̂/n: s cancels
                    factor = multiply(factor, divide(s, D, acc), acc)
                fraction, power = split_count(n, acc)
                if rule.center:
                    total = divide(total, n, acc) if averaged else total
                    shift = subtract(means[0], multiply(factor, total, acc), acc)
                if not averaged:
                    factor = multiply(factor * fraction, power, acc)
                term = multiply(rounded(factor, dtype), slope, dtype)
            if shift is not None:
                dx = subtract(dx, rounded(shift, dtype), dtype)
            if rule.kind != "mean":
                dx = subtract(dx, term, dtype)
        if rule.kind != "mean":
            dx = divide(dx, D_element, dtype)
        count = x.shape[over_weight]
        return (
            rounded(dx, store).to(ctx.input_dtype),
            None if weight is None else (sums[1] * count).to(weight.dtype),
            None if ctx.bias_dtype is None else (sums[0] * count).to(ctx.bias_dtype),
            None if ctx.residual_dtype is None else g.to(ctx.residual_dtype),
            None,
            None,
        )
