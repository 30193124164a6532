"""A batch norm by the kernels and by the plain equation in float64, and how far each result of the two may differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normmatters.functional import lp_batch_norm
from normmatters.kernels.triton.batch_norm import statistics
from normmatters.norm import Norm, compute_dtype
from support import called, tolerances

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: (p, k) of every kind that has kernels on a GPU.
KINDS: dict[str, tuple[float | str, int | None]] = {
    "l1": (1, None),
    "l2": (2, None),
    "linf": (math.inf, None),
    "topk": (math.inf, 3),
    "range": ("range", None),
    "mean": ("mean", None),
}
#: (p, k) of every kind that has kernels on a CPU.
CPU_KINDS = KINDS | {"lp": (1.5, None), "l3": (3.0, None)}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
EPS, MOMENTUM = 1e-3, 0.3
STEP = 0.4  # of the 4-bit codes; 14 of them, so the outermost stand for 2.6 and reach to 2.8


@dataclass
class Result:
    """The output, what moved, and the gradients; None where there was no such argument."""

    y: Tensor
    running_mean: Tensor
    running_var: Tensor
    dx: Tensor
    dweight: Tensor | None
    dbias: Tensor | None
    dresidual: Tensor | None

    def part(self, channels: slice) -> Result:
        """What ``channels`` have of it."""
        vectors = (self.running_mean, self.running_var, self.dweight, self.dbias)
        mean, var, dweight, dbias = (None if t is None else t[channels] for t in vectors)
        y, dx, dresidual = (None if t is None else t[:, channels] for t in (self.y, self.dx, self.dresidual))
        return Result(y, mean, var, dx, dweight, dbias, dresidual)


def fused(x, weight, bias, residual, g, kind, act, memory="exact", constant="exact") -> Result:
    """By the kernels, through the dispatcher."""
    p, k = CPU_KINDS[kind]
    backend = called.backend(x, p=p, k=k, memory=memory)
    assert backend.name in ("triton", "cpu"), backend.reason
    return _step(called.batch_norm, x, weight, bias, residual, g, p, k, act, constant, memory=memory)


def plain(x, weight, bias, residual, g, kind, act, constant="exact") -> Result:
    """By the equation, in float64."""
    p, k = CPU_KINDS[kind]
    tensors = (None if t is None else t.double() for t in (x, weight, bias, residual, g))
    return _step(lp_batch_norm, *tensors, p, k, act, constant)


def _step(function, x, weight, bias, residual, g, p, k, act, constant, **more) -> Result:
    x, weight, bias, residual = (
        None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, residual)
    )
    statistics = torch.float64 if x.dtype == torch.float64 else torch.float32
    running_mean, running_var = (torch.full(x.shape[1:2], v, dtype=statistics, device=x.device) for v in (0.5, 2.0))
    y = function(
        x, running_mean, running_var, weight, bias, True, MOMENTUM, EPS,
        p=p, k=k, constant=constant, act=act, residual=residual, **more,
    )  # fmt: skip
    y.backward(g)
    gradients = [None if t is None else t.grad for t in (x, weight, bias, residual)]
    return Result(y.detach(), running_mean, running_var, *gradients)


def by_channel(t: Tensor) -> Tensor:
    """(N, C, ...) -> (C, n) in float64."""
    return t.double().transpose(0, 1).flatten(1)


def near(what: str, ours: Tensor, expected: Tensor, bound: Tensor) -> None:
    """|ours − expected| ≤ bound in each channel; rows are channels. NaN is never near."""
    error = (ours - expected).abs().reshape(len(bound), -1).amax(1)
    wrong = ~(error <= bound)
    assert not wrong.any(), f"{what}: channels {wrong.nonzero().flatten().tolist()}: {error[wrong]} > {bound[wrong]}"


def check(
    x: Tensor,
    kind: str,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
    memory: str = "exact",
    constant: str | float = "exact",
    g: Tensor | None = None,
    pilot: float | None = None,
    stored_mean: bool = True,
) -> Result:
    """Everything that a training step computes, each channel within a bound for its own size.

    ``pilot`` says how wrong an L1 scale may be that comes from a pilot mean, where the data are not Gaussian.
    ``stored_mean``: the mean is one number of the compute type, which takes digits of data far from 0.
    """
    if g is None:
        g = torch.randn_like(x)
        if act == "relu":
            g = off_the_fence(g, x, weight, bias, residual, kind, constant)
    ours = fused(x, weight, bias, residual, g, kind, act, memory, constant)
    assert ours.y.dtype == ours.dx.dtype == x.dtype
    assert ours.y.stride() == ours.dx.stride() == torch.empty_like(x).stride()
    compare(
        ours, x, kind, weight=weight, bias=bias, residual=residual, act=act, memory=memory, constant=constant, g=g,
        pilot=pilot, stored_mean=stored_mean,
    )  # fmt: skip
    return ours


def off_the_fence(g, x, weight, bias, residual, kind, constant) -> Tensor:
    """``g``, but 0 where the output is so near 0 that its rounding decides whether the ReLU lets ``g`` through."""
    p, k = CPU_KINDS[kind]
    double = (None if t is None else t.double() for t in (weight, bias))
    y = lp_batch_norm(
        x.double(), None, None, *double, True, MOMENTUM, EPS,
        p=p, k=k, constant=constant, residual=None if residual is None else residual.double(),
    )  # fmt: skip
    size = y.abs().amax([d for d in range(y.dim()) if d != 1], keepdim=True)
    return torch.where((y.abs() < 2e-3 * size) & (y != 0), 0, g)


def compare(
    ours: Result,
    x: Tensor,
    kind: str,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str | None,
    memory: str,
    constant: str | float,
    g: Tensor,
    pilot: float | None = None,
    stored_mean: bool = True,
) -> None:
    """Raise unless ``ours`` is what the equation gives."""
    reference = plain(x, weight, bias, residual, g, kind, act, constant)
    channels, n = x.shape[1], x.numel() // x.shape[1]
    one = torch.ones(channels, dtype=torch.float64, device=x.device)
    gamma = one if weight is None else weight.double()
    values = by_channel(x)
    mean = values.mean(1)
    deviation = values - mean[:, None]
    p, k = CPU_KINDS[kind]
    C = Norm(p, k, constant).scale_constant(n)
    squared = _squared_scale(deviation, kind, C)
    D = one if kind == "mean" else (squared + EPS).sqrt()
    xhat = deviation / D[:, None]

    # How wrong the statistics may be, relative to the scale.
    computed = compute_dtype(x.dtype)
    one_rounding, few = torch.finfo(computed).eps, tolerances.elementwise(computed)
    wrong = tolerances.statistic(computed, n) * one
    if stored_mean:
        wrong = wrong + tolerances.offset(computed, 1.0) * mean.abs() / D
    if kind == "l1" and uses_pilot(x):
        wrong = wrong + (tolerances.pilot(n) if pilot is None else pilot)
    rounding = 4 * torch.finfo(x.dtype).eps
    most = xhat.abs().amax(1).clamp(min=1)
    size = gamma.abs() * most + (0 if bias is None else bias.double().abs())
    if residual is not None:
        size = size + by_channel(residual).abs().amax(1)
    near("output", by_channel(ours.y), by_channel(reference.y), wrong * gamma.abs() * most + rounding * size)
    moved = wrong * D + few + 2 * one_rounding * reference.running_mean.abs()  # two products, and their sum
    near("running_mean", ours.running_mean.double(), reference.running_mean, moved)
    near("running_var", ours.running_var.double(), reference.running_var, 2 * wrong * D**2 + few)

    grads = by_channel(g)
    if act == "relu":
        grads = torch.where(by_channel(reference.y) > 0, grads, 0)
    largest = grads.abs().amax(1)
    spread = tolerances.FEW * math.sqrt(n) * largest
    if bias is not None:
        allowed = few * (1 + spread) + tolerances.elementwise(bias.dtype) * reference.dbias.abs()
        near("dbias", ours.dbias.double(), reference.dbias, allowed)
    if residual is not None:
        near("dresidual", by_channel(ours.dresidual), by_channel(reference.dresidual), 0 * one)
    expected_dx, lean = by_channel(reference.dx), memory == "lean" and kind == "l1"
    if weight is not None:
        allowed = wrong * spread * most + tolerances.elementwise(weight.dtype) * reference.dweight.abs() + few
        if lean:
            allowed = allowed + lean_error(x.dtype, act, residual, gamma, bias, xhat, grads, by_channel(ours.y))
            # The input's gradient differs by this one number only.
            sign = torch.where(deviation >= 0, 1.0, -1.0).double()
            share = gamma * C * squared.sqrt() / D**2 * (ours.dweight.double() - reference.dweight) / n
            expected_dx = expected_dx - share[:, None] * (sign - sign.mean(1, keepdim=True))
        near("dweight", ours.dweight.double(), reference.dweight, allowed)
    if not (lean and weight is None):  # without dγ there is nothing to tell the coarse part from an error by
        slope = gamma.abs() / D
        bound = slope * largest * (2 * wrong * most + rounding) + expected_dx.abs().amax(1) * (2 * wrong + rounding)
        subnormal = torch.finfo(x.dtype).smallest_normal * rounding
        near("dx", by_channel(ours.dx), expected_dx, bound + one_rounding * slope + subnormal)


def uses_pilot(x: Tensor) -> bool:
    return x.numel() // x.shape[1] > statistics.PILOT_SAMPLES


def lean_error(dtype, act, residual, gamma, bias, xhat, grads, y) -> Tensor:
    """What ``memory="lean"`` may change in dγ = Σ g·x̂, for each channel: g times what it does not know of x̂."""
    if act is None or residual is not None:
        coarse = torch.full_like(xhat, STEP / math.sqrt(12))
        clipped = (xhat.abs() - 7 * STEP).clamp(min=0)
        return tolerances.unknown(grads * coarse) + (grads.abs() * (clipped + STEP * (clipped > 0))).sum(1)
    lost = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * lost
    beta = torch.zeros_like(gamma) if bias is None else bias.double()
    vague = gamma.abs() < 16 * (lost * beta.abs() + smallest)
    from_sign = grads * (xhat.abs() - xhat.abs().mean(1, keepdim=True))
    from_output = grads * (lost * y.abs() + smallest) / torch.where(vague, torch.inf, gamma.abs())[:, None]
    return tolerances.unknown(torch.where(vague[:, None], from_sign, from_output))


def _squared_scale(deviation: Tensor, kind: str, C: float) -> Tensor:
    if kind == "mean":
        return torch.ones_like(deviation[:, 0])
    if kind == "l2":
        return C**2 * deviation.square().mean(1)
    if kind == "range":
        return (C * (deviation.amax(1) - deviation.amin(1))).square()
    p, k = CPU_KINDS[kind]
    if kind in ("l1", "lp", "l3"):
        return (C * (deviation.abs() ** p).mean(1) ** (1 / p)).square()
    return (C * deviation.abs().topk(k or 1, dim=1).values.mean(1)).square()


def made(shape: tuple[int, ...], layout: str = "contiguous", dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers about means of both signs."""
    x = torch.randn(shape, device=DEVICE) * 2
    x += torch.linspace(-3, 1, shape[1], device=DEVICE).view(1, -1, *[1] * (len(shape) - 2))
    if layout == "contiguous":
        return x.to(dtype)
    return x.to(dtype, memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def plant_extremes(x: Tensor) -> Tensor:
    """Far and distinct extremes: of several equal ones any may get the gradient, and half precision has many equals."""
    last = (-1,) * (x.dim() - 2)
    first = (0,) * (x.dim() - 2)
    for image, pixel, value in ((-1, last, 24.0), (0, first, -17.0), (1, last, 14.0), (2, first, -10.5)):
        x[(image, slice(None), *pixel)] = value
    return x


def affine(kind: str, channels: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    """A weight and a bias; mean-only has no weight."""
    weight = 0.5 + torch.rand(channels, device=DEVICE)
    return {
        "weight": None if kind == "mean" else weight.to(dtype),
        "bias": torch.randn(channels, device=DEVICE).to(dtype),
    }
