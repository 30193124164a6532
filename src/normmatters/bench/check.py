"""The check that comes before every number: each result against the plain equation in float64.

Two things would make a right kernel look wrong, and the data avoid them. Where the input of the ReLU is 0 but for
rounding, its side is a matter of luck: there the incoming gradient is set to 0. Where two elements share the largest
deviation, L∞, Top(k) and range have no one gradient: ``EXTREMES`` elements of each channel get distinct large values.

Tolerances, with ε the machine epsilon of the data's dtype and n the reduced elements:

- elementwise results (output, dx, dresidual): (4ε + √n·2⁻²²)(1 + magnitude), a few roundings of numbers of order 1 to
  10 and those of the statistics, which are kept in fp32; running statistics 1e-3;
- dγ = Σ g·x̂ and dβ = Σ g: t·√n·rms(g), as errors of n terms add up like √n. t = 2⁻¹⁰ + √n·2⁻²⁰, fp32's summation; for
  dγ plus 8ε where x̂ comes from a rounded tensor (lean, layer norm); mean-only has no dγ;
- dγ of lean with a residual, which keeps x̂ in 14 steps of 0.4: if e is what a code is off by, which is most for the
  extremes that it clips, then Σ g·e has random signs and exceeds 6·√Σ(g·e)² once in 3·10⁷ channels (Hoeffding);
- where x is μ to within fp32's rounding, its sign is a matter of luck: there dx may be off by what the sign does in L1;
- where one element carries the whole statistic (L∞, Top(k), range), dx there is dγ times the constant C: that much
  of dγ's tolerance is allowed in addition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normmatters.bench.harness import Wrong
from normmatters.functional import lp_batch_norm, lp_layer_norm, lp_rms_norm
from normmatters.norm import Norm

#: p and k of every kind of statistic.
KINDS: dict[str, tuple[float | str, int | None]] = {
    "l1": (1, None),
    "l2": (2, None),
    "lp1.5": (1.5, None),
    "mean": ("mean", None),
    "linf": (math.inf, None),
    "range": ("range", None),
    "top10": (math.inf, 10),
}
EXTREMES = 12
_SHIFT = 0.5  # of the data: a mean that is not zero
_FAR = 5.5  # standard deviations: extremes lie beyond
_CODE_STEP, _CODE_REACH = 0.4, 2.6  # of lean's 4-bit codes of x̂, and the outermost of them


@dataclass
class BatchNormData:
    """Input, parameters and incoming gradient of one batch norm. x, g and residual: (N, C, H, W)."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    g: Tensor
    residual: Tensor | None
    references: dict[str, BatchNormReference] = field(default_factory=dict)

    @classmethod
    def random(
        cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, last: bool, residual: bool
    ) -> BatchNormData:
        """Fresh data: x ~ N(0.5, 1) with distinct extremes, ±γ in 0.5 … 1.5, g and residual ~ N(0, 1)."""
        layout = torch.channels_last if last else torch.contiguous_format
        x = torch.empty(shape, dtype=dtype, device=device, memory_format=layout).normal_().add_(_SHIFT)
        batch, channels, height, width = shape
        places = torch.randperm(batch * height * width, device=device)[:EXTREMES]
        rank = torch.rand(places.numel(), channels, device=device).argsort(0)  # each channel's own order
        values = (6 + rank / 8) * torch.where(rank % 2 == 0, 1, -1) + _SHIFT
        image, pixel = places // (height * width), places % (height * width)
        x[image, :, pixel // width, pixel % width] = values.to(dtype)
        sign = torch.where(torch.rand(channels, device=device) < 0.5, -1.0, 1.0)
        return cls(
            x=x.requires_grad_(),
            weight=sign * (0.5 + torch.rand(channels, device=device)),
            bias=torch.randn(channels, device=device) / 2,
            g=torch.empty_like(x).normal_(),
            residual=torch.empty_like(x).normal_().requires_grad_() if residual else None,
        )

    def copies(self) -> BatchNormData:
        """The same values in other memory: timed calls take turns with copies."""
        residual = None if self.residual is None else self.residual.detach().clone().requires_grad_()
        return BatchNormData(self.x.detach().clone().requires_grad_(), self.weight, self.bias, self.g.clone(), residual)

    def inputs(self) -> tuple[Tensor, ...]:
        return (self.x,) if self.residual is None else (self.x, self.residual)

    def reference(self, kind: str) -> BatchNormReference:
        """The right results, computed once for each kind."""
        if kind not in self.references:
            self.references[kind] = BatchNormReference.of(self, kind)
        return self.references[kind]


@dataclass
class BatchNormReference:
    """What relu(batch norm (+ residual)) and its gradients are, in float64."""

    kind: str
    g: Tensor
    before_relu: Tensor
    dx: Tensor
    dweight: Tensor  # zeros for mean-only, which has no weight
    dbias: Tensor
    running: tuple[Tensor, Tensor]

    @property
    def mean(self) -> Tensor:
        """μ; the running mean has moved from 0 by a tenth of it."""
        return self.running[0] / 0.1

    @classmethod
    def of(cls, data: BatchNormData, kind: str) -> BatchNormReference:
        p, k = KINDS[kind]
        x, weight, bias = (t.detach().double().requires_grad_() for t in (data.x, data.weight, data.bias))
        running = torch.zeros_like(weight).detach(), torch.ones_like(weight).detach()
        y = lp_batch_norm(x, *running, None if kind == "mean" else weight, bias, training=True, p=p, k=k)
        if data.residual is not None:
            y = y + data.residual.detach()
        with torch.no_grad():
            margin = 4 * _element_tolerance(data.x) * _size(y, data.residual)
            g = data.g * (y.abs() > margin)
        dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), g * (y > 0), materialize_grads=True)
        return cls(kind, g, y.detach(), dx, dweight, dbias, running)


def check_batch_norm(module: Any, norm: Any, data: BatchNormData, ref: BatchNormReference, *, lean: bool) -> float:
    """Run ``module``, whose norm is ``norm``, and compare: the largest error as a share of its tolerance.

    Raises:
        Wrong: if any result is off by more than its tolerance or not finite.
    """
    parameters = [p for p in (norm.weight, norm.bias) if p is not None]
    output = module(*data.inputs())
    grads = torch.autograd.grad(output, [*data.inputs(), *parameters], ref.g)
    eps, element = torch.finfo(data.x.dtype).eps, _element_tolerance(data.x)
    n = data.x.numel() // data.x.shape[1]
    open_g = (ref.g * (ref.before_relu > 0)).double()
    spread = open_g.square().sum((0, 2, 3)).sqrt()  # √n·rms(g)
    allowed = (_sum_tolerance(n) + (8 * eps if lean else 0)) * spread
    if lean and data.residual is not None:
        allowed = allowed + 6 * (open_g * _code_error(data, ref)).square().sum((0, 2, 3)).sqrt()
    p, k = KINDS[ref.kind]
    # The largest |x̂|, 8, is raised to p − 1: an element carries at most that share of the whole statistic.
    kept = {"l1": n, "l2": n / 8, "lp1.5": n / 3, "top10": k}.get(ref.kind, 1)
    # A wrong Σg·x̂ moves dx by γ/D·C/kept of it; γ/D is at most about 1.5.
    constant = 0.0 if norm.weight is None else Norm(p, k).scale_constant(n)
    carried = 1.5 * constant / (kept or 1) * allowed[:, None, None]
    if ref.kind == "l1":
        at_mean = (data.x.detach() - ref.mean.view(-1, 1, 1)).abs() < 1e-5
        carried = carried + at_mean * (4 * Norm(1).scale_constant(n) / n * ref.dweight.abs().view(-1, 1, 1))
    elif ref.kind not in ("l2", "lp1.5"):
        carried = carried * ((data.x.detach() - _SHIFT).abs() > _FAR)
    size = element * _size(ref.before_relu, data.residual)
    parts: dict[str, tuple[Tensor, Tensor, Tensor | float]] = {
        "output": (output, ref.before_relu.relu(), size),
        "dx": (grads[0], ref.dx, element * (1 + ref.dx.abs()) + carried),
        "dbias": (grads[-1], ref.dbias, _sum_tolerance(n) * spread),
        "running_mean": (norm.running_mean, ref.running[0], 1e-3),
        "running_var": (norm.running_var, ref.running[1], 1e-3 * ref.running[1]),
    }
    if norm.weight is not None:
        parts["dweight"] = grads[-2], ref.dweight, allowed
    if data.residual is not None:
        parts["dresidual"] = (grads[1], open_g, element * (1 + ref.g.double().abs()))
    return _compare(parts)


def _code_error(data: BatchNormData, ref: BatchNormReference) -> Tensor:
    """The error of lean's 4-bit codes, which are odd multiples of half a step: x̂ − the nearest code, in float64."""
    residual = 0.0 if data.residual is None else data.residual.detach()
    x_hat = (ref.before_relu - residual - data.bias.view(-1, 1, 1)) / data.weight.view(-1, 1, 1)
    code = ((x_hat / _CODE_STEP).floor() + 0.5) * _CODE_STEP
    return x_hat - code.clamp(-_CODE_REACH, _CODE_REACH)


@dataclass
class RowNormData:
    """Input, parameters and incoming gradient of a layer or RMS norm. x and g: (rows, features)."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    g: Tensor

    @classmethod
    def random(cls, rows: int, features: int, dtype: torch.dtype, device: torch.device) -> RowNormData:
        """Fresh data: x ~ N(0.5, 1), γ in 0.5 … 1.5, g ~ N(0, 1), all of one dtype."""
        x = torch.empty(rows, features, dtype=dtype, device=device).normal_().add_(_SHIFT)
        weight = 0.5 + torch.rand(features, device=device)
        bias = torch.randn(features, device=device) / 2
        return cls(
            x.requires_grad_(),
            weight.to(dtype).requires_grad_(),
            bias.to(dtype).requires_grad_(),
            torch.empty_like(x).normal_(),
        )

    def copies(self) -> RowNormData:
        return RowNormData(self.x.detach().clone().requires_grad_(), self.weight, self.bias, self.g.clone())


def row_norm_reference(data: RowNormData, p: float, *, rms: bool, eps: float) -> list[Tensor]:
    """Output, dx, dγ and (not for RMS norm) dβ in float64."""
    x, weight, bias = (t.detach().double().requires_grad_() for t in (data.x, data.weight, data.bias))
    shape = x.shape[1:]
    if rms:
        y = lp_rms_norm(x, shape, weight, eps, p=p)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), data.g.double())]
    y = lp_layer_norm(x, shape, weight, bias, eps, p=p)
    return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), data.g.double())]


def check_row_norm(results: list[Tensor], reference: list[Tensor], data: RowNormData) -> float:
    """As :func:`check_batch_norm`, for output, dx, dγ and dβ of a layer or RMS norm."""
    eps, rows = torch.finfo(data.x.dtype).eps, data.x.shape[0]
    sums = (8 * eps + _sum_tolerance(rows)) * math.sqrt(rows)
    names, offsets = ["output", "dx", "dweight", "dbias"], [4 * eps, 4 * eps, sums, sums]
    return _compare(
        {
            name: (result, ref, 4 * eps * ref.abs() + offset)
            for name, result, ref, offset in zip(names, results, reference, offsets)
        }
    )


def compare_weights(results: list[Tensor], reference: list[Tensor], dtype: torch.dtype) -> float:
    """Normalized weights or their gradients: relative to each tensor's largest element, 8ε of the compute dtype."""
    eps = torch.finfo(dtype).eps
    return _compare(
        {f"tensor {i}": (a, b, 8 * eps * b.abs().max()) for i, (a, b) in enumerate(zip(results, reference))}
    )


def _element_tolerance(x: Tensor) -> float:
    return 4 * torch.finfo(x.dtype).eps + math.sqrt(x.numel() // x.shape[1]) * 2.0**-22


def _sum_tolerance(n: int) -> float:
    return 2.0**-10 + math.sqrt(n) * 2.0**-20


def _size(y: Tensor, residual: Tensor | None) -> Tensor:
    """1 + the magnitude of everything that is rounded on the way to y."""
    return 1 + y.abs() if residual is None else 1 + y.abs() + residual.detach().abs()


def _compare(parts: dict[str, tuple[Tensor, Tensor, Tensor | float]]) -> float:
    shares = {}
    for name, (result, reference, allowed) in parts.items():
        off = (result.detach().double() - reference).abs()
        shares[name] = float(torch.where(off == 0, 0, off / allowed).max())  # of a channel that is closed, 0/0
    wrong = [f"{name} is off by {share:.3g} × its tolerance" for name, share in shares.items() if not share <= 1]
    if wrong:
        raise Wrong("; ".join(wrong))
    return max(shares.values())
