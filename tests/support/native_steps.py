"""Layers that run on the native CPU kernels, and training steps of them.

``python native_steps.py OUT`` saves the results of all: for a process with another build, or another instruction set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD

from normmatters import nn as norms
from normmatters.kernels import cpu
from normmatters.optim import (
    AngularSGD,
    NormRecorder,
    NormSchedule,
    Recording,
    StepSizeCorrection,
    WeightDecayFreeSGD,
    channel_norms,
)
from normmatters.weight_norm import apply_weight_norm
from support import tolerances

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CHANNELS, WIDTH = 11, 9  # odd: rows and planes end within a vector
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Added(nn.Module):
    """act(norm(x) + residual), the residual being the batch turned round."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, residual=x.flip(0))  # type: ignore[no-any-return]


def _with_weight_norm(layer: nn.Module, **options: object) -> nn.Module:
    apply_weight_norm(layer, **options)  # type: ignore[arg-type]
    return layer


BATCH_NORMS: dict[str, Callable[[], nn.Module]] = {
    "l1": lambda: norms.L1BatchNorm2d(CHANNELS, act="relu"),
    "l1 added": lambda: Added(norms.L1BatchNorm2d(CHANNELS, act="relu")),
    "lean": lambda: norms.L1BatchNorm2d(CHANNELS, act="relu", memory="lean"),
    "lean added": lambda: Added(norms.L1BatchNorm2d(CHANNELS, act="relu", memory="lean")),
    "l2": lambda: norms.LpBatchNorm2d(CHANNELS, 2),
    "lp": lambda: norms.LpBatchNorm2d(CHANNELS, 1.5),
    "linf": lambda: norms.LInfBatchNorm2d(CHANNELS),
    "topk": lambda: norms.TopKBatchNorm2d(CHANNELS, k=3),
    "range": lambda: norms.RangeBatchNorm2d(CHANNELS),
    "mean": lambda: norms.MeanOnlyBatchNorm2d(CHANNELS, act="relu"),
}
#: What each row gives depends on that row alone: the same bits for any number of threads.
ROW_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: norms.L1LayerNorm(WIDTH),
    "layer lp": lambda: norms.LpLayerNorm((WIDTH, WIDTH), p=1.5),
    "rms": lambda: norms.L1RMSNorm(WIDTH),
    "bounded": lambda: _with_weight_norm(nn.Conv2d(CHANNELS, 5, 3)),
    "classic": lambda: _with_weight_norm(nn.Linear(WIDTH, 300), kind="classic"),
}
LAYERS = BATCH_NORMS | ROW_LAYERS
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "free": lambda ps: WeightDecayFreeSGD(ps, 0.1, 0.9, weight_decay=0.01, check_invariance=False),
    "angular": lambda ps: AngularSGD(ps, angle=0.1),
    "recorded": lambda ps: _Recorded(ps, 0.1),
    "corrected": lambda ps: StepSizeCorrection(SGD(ps, 0.1), recording_of(_named(ps)), _named(ps)),
    "held": lambda ps: _Held(ps, 0.1),
}


def _named(params: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    return {str(i): p for i, p in enumerate(params)}


def recording_of(named: dict[str, nn.Parameter], steps: int = 10) -> Recording:
    """A recording of norms that grow by a tenth per step.

    More or less: of 1.1 times a half-precision number, ties are frequent, and the last bit of a norm would decide them.
    """
    growth = 1.1373 ** torch.arange(0.5, steps + 1)[:, None]
    return Recording(
        norms={n: growth * channel_norms(w.detach()) for n, w in named.items()},
        steps=torch.arange(steps + 1),
        lr=torch.full((steps, 1), 0.1, dtype=torch.float64),
        weight_decay=torch.zeros(steps, 1, dtype=torch.float64),
        groups=dict.fromkeys(named, 0),
        shapes={n: tuple(w.shape) for n, w in named.items()},
        dims=dict.fromkeys(named, 0),
        epoch_ends=tuple(range(1, steps + 1)),
        tested=True,
    )


class _Recorded(SGD):
    """SGD beside a recorder of norms and angles."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, lr)
        self.recorder = NormRecorder(_named(params), self)


class _Held(SGD):
    """SGD that gives every channel a recorded norm after each step."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, lr)
        self.schedule = NormSchedule(self, recording_of(_named(params)), _named(params))
        self.register_step_post_hook(lambda *_: self.schedule.step())


class Network(nn.Module):
    """Every layer on the same input, all outputs in one row. ``exact``: without the layers whose gradients are not."""

    def __init__(self, exact: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = [name for name in LAYERS if not (exact and name.startswith("lean"))]
        self.layers = nn.ModuleList(LAYERS[name]() for name in names)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x).flatten(1) for layer in self.layers], 1)


def data(batch: int = 4, layout: str = "contiguous", dtype: torch.dtype = torch.float32) -> Tensor:
    """(batch, CHANNELS, WIDTH, WIDTH)"""
    x = torch.randn(batch, CHANNELS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    return (2 * x + 1).to(dtype, memory_format=LAYOUTS[layout])


def weights_of(y: Tensor) -> Tensor:
    """A gradient for y."""
    return torch.sin(torch.arange(y.numel(), dtype=torch.float64)).view_as(y).to(y.dtype)


def step(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Output, gradients of the input and of all parameters, and the buffers as they are then."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x) if call is None else call(x)
    y.backward(weights_of(y))
    gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    return [y.detach(), x.grad, *gradients, *[b.clone() for b in model.buffers()]]  # type: ignore[list-item]


def optimized(name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Weights after three steps, and what was recorded of them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 700), (300, 128, 3), (7, 11)]
    params = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    optimizer = OPTIMIZERS[name](params)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()
    recording = optimizer.recorder.recording() if isinstance(optimizer, _Recorded) else None
    recorded = [] if recording is None else [*recording.norms.values(), *recording.angles.values()]
    return [*[p.detach() for p in params], *recorded]


def native_nodes(y: Tensor) -> set[str]:
    """The autograd nodes of native kernels that made ``y``: those of `NATIVE` which were used."""
    seen, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in seen} & NATIVE


NATIVE = {"CpuBatchNormBackward", "NativeLayerNormBackward", "_WeightsBackward"}


def instruction_sets() -> tuple[str, ...]:
    """Those that this processor has."""
    library = cpu.library()
    assert library is not None, cpu.why_not()
    return ("baseline", "avx2", "avx512")[: 1 + library.function("nm_processor", "", "i")()]


def results() -> dict[str, list[Tensor]]:
    """Everything here, by name."""
    found = {f"{name}, {dtype}": optimized(name, dtype) for name in OPTIMIZERS for dtype in DTYPES}
    for dtype in DTYPES:
        for layout in LAYOUTS:
            for name, make in LAYERS.items():
                torch.manual_seed(0)
                layer, x = make().to(dtype), data(4, layout, dtype)
                assert native_nodes(layer(x.detach().requires_grad_())), f"{name} ran without native kernels"
                found[f"{name}, {layout}, {dtype}"] = step(layer, x)
    return found


def compare(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]], what: str) -> None:
    """Raise unless :func:`results` of two builds are the same to rounding."""
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        for i, (ours, theirs) in enumerate(zip(found[name], tensors, strict=True)):
            error, size = (ours.double() - theirs.double()).abs(), theirs.double().abs()
            if not theirs.is_floating_point():
                assert torch.equal(ours, theirs), f"{what}: {name} {i}"
            elif theirs.dtype.itemsize == 2:
                # A number may be rounded to its neighbour. Where that opens a ReLU the gradient differs: hardly ever.
                rounding = torch.finfo(theirs.dtype).eps
                far = (error > rounding * (0.1 + size)).sum()
                assert far <= 3 + theirs.numel() // 10_000, f"{what}: {name} {i}: {far} of {theirs.numel()}"
            else:
                bound = tolerances.gradient(theirs.dtype, 4 * WIDTH**2) * max(1.0, size.max().item())
                assert error.max() <= bound, f"{what}: {name} {i}: {error.max():.3g} > {bound:.3g}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save(results(), sys.argv[1])
