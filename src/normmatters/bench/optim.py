"""Time one step of each optimizer on ResNet-50's parameters, beside `torch.optim.SGD`.

A number is reported only for an optimizer whose steps on the device agree with its steps in float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from normmatters.bench import peers, timing
from normmatters.bench.harness import Axes, Case, Row, Setup, Wrong, compare_with, rows_of
from normmatters.optim import (
    Angular,
    AngularSGD,
    NormRecorder,
    NormSchedule,
    Recording,
    StepSizeCorrection,
    WeightDecayFreeAdamW,
    WeightDecayFreeSGD,
    channel_norms,
)

Named = dict[str, nn.Parameter]
Build = Callable[[Named, bool], Optimizer]  # of the parameters, and whether its step is captured into a CUDA graph

LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 1e-4
BASE = "SGD(foreach=True)"  # what the others are compared with
AXES: Axes = {}  # no words choose among the rows


def resnet50_shapes(
    width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of ResNet-50's parameters: 161 tensors, 25.6 million numbers."""
    with torch.device("meta"):
        model = peers.ResNet50(depths=blocks, width=width, classes=classes)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def rows(setup: Setup) -> Iterator[Row]:
    """Every optimizer, one step at a time and on a GPU as a CUDA graph; compared with ``BASE`` in the same mode.

    A smoke run has few and small tensors and few repeats.
    """
    return rows_of(setup, cases(setup), partial(compare_with, BASE))


def cases(setup: Setup) -> Iterator[Case]:
    shapes = resnet50_shapes(8, (1, 1), 10) if setup.smoke else resnet50_shapes()
    for name, (build, graph) in OPTIMIZERS.items():
        verdict = cache(partial(check, build, shapes, str(setup.device)))
        for mode in ("eager", "graph") if graph and setup.cuda else ("eager",):
            ours = not name.startswith(("SGD(", "AdamW("))
            measure = partial(_measure, setup, build, shapes, verdict, mode == "graph")
            yield Case({"variant": name, "mode": mode}, measure, ours)


def make_parameters(shapes: dict[str, tuple[int, ...]], device: str, dtype: torch.dtype) -> Named:
    """The same parameters and gradients for every device and dtype; weights' gradients orthogonal to each channel."""
    named: Named = {}
    for name, (p, g) in _numbers(tuple(shapes.items())).items():
        named[name] = nn.Parameter(p.to(device, dtype, copy=True))
        named[name].grad = g.to(device, dtype, copy=True)
    return named


@lru_cache(1)
def _numbers(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> dict[str, tuple[Tensor, Tensor]]:
    """Cached: on a CPU drawing them takes longer than the steps."""
    generator = torch.Generator().manual_seed(0)
    numbers: dict[str, tuple[Tensor, Tensor]] = {}
    for name, shape in shapes:
        p, g = (torch.randn(shape, generator=generator) for _ in range(2))
        if len(shape) > 1:
            dims = tuple(range(1, len(shape)))
            g -= (g * p).sum(dims, keepdim=True) / p.square().sum(dims, keepdim=True) * p
        numbers[name] = p, g / 100
    return numbers


def check(build: Build, shapes: dict[str, tuple[int, ...]], device: str, steps: int = 3) -> str:
    """What is wrong with some steps in float32 on the device, by the same in float64 on the CPU; empty if nothing."""
    own, reference = (make_parameters(shapes, *place) for place in ((device, torch.float32), ("cpu", torch.float64)))
    for named in (own, reference):
        optimizer = build(named, False)
        for _ in range(steps):
            optimizer.step()
    for name, p in own.items():
        error = (p.detach().cpu().double() - reference[name].detach()).abs().max().item()
        # Numbers up to 5, a handful of float32 roundings per step.
        if not error < 1e-5:
            return f"'{name}' is off by {error:.2g} after {steps} steps"
    return ""


def _measure(
    setup: Setup, build: Build, shapes: dict[str, tuple[int, ...]], verdict: Callable[[], str], graph: bool
) -> Row:
    """Milliseconds of one step, as it is called or as a CUDA graph."""
    if wrong := verdict():
        raise Wrong(wrong)
    optimizer = build(make_parameters(shapes, str(setup.device), torch.float32), graph)
    timing.wake(setup.device)  # it idled while the CPU checked
    # Ten in a row: the host's time to launch a step counts only if it is longer than the device's.
    calls = [optimizer.step] * (10 if setup.cuda else 1)
    with timing.side_stream(setup.device):
        took = timing.time_calls(calls, setup.device, quick=setup.smoke, graph=graph)
    if graph and took.graph_ms is None:
        raise RuntimeError(took.note)
    return {"ms": took.ms}


def _weights(named: Named) -> dict[str, Tensor]:
    """The convolutions: what a normalization follows."""
    return {n: p for n, p in named.items() if p.ndim == 4}


def _groups(named: Named, **rest: object) -> list[dict[str, Any]]:
    weights = _weights(named)
    return [{"params": list(weights.values())}, {"params": [p for n, p in named.items() if n not in weights], **rest}]


def _sgd(named: Named, **kwargs: Any) -> SGD:
    options = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, "foreach": True} | kwargs
    return SGD(named.values(), **options)


def _free_sgd(named: Named, graph: bool, **kwargs: Any) -> WeightDecayFreeSGD:
    groups = _groups(named, weight_decay_free=False)
    return WeightDecayFreeSGD(groups, LR, MOMENTUM, weight_decay=WEIGHT_DECAY, capturable=graph, **kwargs)


def _recording(named: Named, steps: int = 1_000_000) -> Recording:
    """A recording of constant norms, of more steps than are timed."""
    weights = _weights(named)
    return Recording(
        norms={n: channel_norms(w.detach()).repeat(2, 1).cpu() for n, w in weights.items()},
        steps=torch.tensor([0, steps]),
        lr=torch.full((1, 1), LR, dtype=torch.float64),
        weight_decay=torch.zeros(1, 1, dtype=torch.float64),
        groups=dict.fromkeys(weights, 0),
        shapes={n: tuple(w.shape) for n, w in weights.items()},
        dims=dict.fromkeys(weights, 0),
        epoch_ends=(steps,),
    )


def correction(named: Named, graph: bool, **kwargs: Any) -> Optimizer:
    """SGD with these options, its step sizes corrected."""
    return StepSizeCorrection(_sgd(named, weight_decay=0.0, **kwargs), _recording(named), _weights(named))


def _norm_schedule(named: Named, graph: bool) -> Optimizer:
    optimizer = SGD(_groups(named), LR, MOMENTUM, foreach=True)
    schedule = NormSchedule(optimizer, lambda o: MultiStepLR(o, [10**9]), _weights(named))
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def held_norms(named: Named, graph: bool, **kwargs: Any) -> Optimizer:
    """SGD with these options, which `NormSchedule` follows: it gives every channel a recorded norm at each step."""
    optimizer = SGD(_groups(named), LR, MOMENTUM, **kwargs)
    schedule = NormSchedule(optimizer, _recording(named, 10_000), _weights(named))  # it makes lists of all steps
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def recorder(named: Named, graph: bool, **kwargs: Any) -> Optimizer:
    """SGD with these options, which `NormRecorder` watches."""
    optimizer = _sgd(named, **kwargs)
    NormRecorder(_weights(named), optimizer, capacity=1000 if graph else None)  # the optimizer's hooks hold it
    return optimizer


def _angular_sgd(named: Named, graph: bool) -> Optimizer:
    return AngularSGD(_groups(named, angular=False), LR, MOMENTUM, WEIGHT_DECAY, capturable=graph)


def _angular(named: Named, graph: bool) -> Optimizer:
    return Angular(SGD(_groups(named, angular=False), LR, MOMENTUM, weight_decay=WEIGHT_DECAY, foreach=True))


def _free_adamw(named: Named, graph: bool) -> Optimizer:
    return WeightDecayFreeAdamW(_groups(named, weight_decay_free=False), 1e-3, capturable=graph)


# Name → how to build it, and whether it can be captured into a CUDA graph.
OPTIMIZERS: dict[str, tuple[Build, bool]] = {
    BASE: (lambda named, graph: _sgd(named), True),
    "SGD(fused=True)": (lambda named, graph: _sgd(named, foreach=None, fused=True), True),
    # By default fused on a GPU, and in a graph, where α must live on the device, foreach.
    "WeightDecayFreeSGD": (_free_sgd, True),
    "WeightDecayFreeSGD(foreach=True)": (partial(_free_sgd, foreach=True), False),
    "AngularSGD": (_angular_sgd, True),
    "SGD + NormRecorder": (recorder, True),
    "SGD + StepSizeCorrection": (correction, False),
    "Angular(SGD)": (_angular, True),
    "AdamW(foreach=True)": (lambda named, graph: AdamW(named.values(), 1e-3, foreach=True, capturable=graph), True),
    "WeightDecayFreeAdamW": (_free_adamw, True),
    "SGD + NormSchedule": (_norm_schedule, False),
}
