"""A whole training step of ResNet-50 at batch 256, 224², channels_last: what a norm costs where it is used.

The step is ``model(x)`` and the cross entropy under autocast, ``backward`` and SGD with momentum. There is no gradient
scaler: it costs the same for every norm. The learning rate is small, as the images are noise.

A step is timed twice: as it is called (the best median of some series), where a slow host may be the limit, and
replayed from a CUDA graph, which is what the GPU needs.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normmatters.bench import layers, peers, timing
from normmatters.bench.check import BatchNormData
from normmatters.bench.harness import DTYPES, Case, Row, Setup, Wrong, rows_of
from normmatters.surgery import convert

STEPS = 20
SERIES = (3, 10)  # at least and at most
QUIET = 1.02  # no more series when the median is within this of the fastest step


@dataclass(frozen=True)
class Variant:
    """A ResNet-50 by its norm: ``layer`` names the row of ``layers`` whose check its norm must pass.

    ``convert(model, fuse)``: with ``fuse`` what is timed, without what it is checked against.
    """

    name: str
    convert: Callable[[nn.Module, bool], nn.Module]
    layer: str | None
    ours: bool = True
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d
    modes: tuple[str, ...] = ("compiled", "eager")


def _as_it_is(model: nn.Module, fuse: bool) -> nn.Module:
    return model


VARIANTS = [
    Variant("native", _as_it_is, "native", ours=False),
    Variant("l1_lean", lambda model, fuse: convert(model, "l1", memory="lean", fuse=fuse), "l1_lean"),
    Variant("l1", lambda model, fuse: convert(model, "l1", fuse=fuse), "l1"),
    Variant("l2", lambda model, fuse: convert(model, "l2", fuse=fuse), "l2"),
    Variant("naive_l1", _as_it_is, "naive_l1_compiled", False, peers.NaiveL1BatchNorm2d, ("compiled",)),
    Variant("none", _as_it_is, None, False, lambda channels: nn.Identity()),
]
AXES = {"dtype": ["fp16", "bf16"], "mode": ["eager", "compiled"], "variant": [v.name for v in VARIANTS]}

# The others explain these. Compiling takes half a minute per model, so by default only these are compiled, and only
# these run in bf16.
_MAIN = ("native", "l1_lean")


def rows(setup: Setup) -> Iterator[Row]:
    """Every wanted row, the main ones first, and of them the eager ones: they need nothing compiled.

    A row's ratios are to rows that may come later. They are filled in then, in the rows that were given out before.
    """
    return rows_of(setup, cases(setup), _compare, eager_first=True)


def cases(setup: Setup) -> Iterator[Case]:
    order = itertools.product(AXES["mode"], AXES["dtype"], VARIANTS)
    for mode, dtype, variant in sorted(order, key=lambda row: row[2].name not in _MAIN):
        names = {"dtype": dtype, "mode": mode, "variant": variant.name}
        if mode in variant.modes and setup.only.allows(AXES, names) and _usual(setup, names):
            yield Case(names, partial(_measure, setup, variant, names), variant.ours, mode == "compiled")
            setup.free()


def _usual(setup: Setup, axes: dict[str, str]) -> bool:
    if not setup.only.default():
        return not setup.smoke or axes["mode"] == "eager" or "compiled" in setup.only.words
    if setup.smoke:
        return axes["mode"] == "eager"
    if setup.share is not None and axes["mode"] == "eager":  # the processes that compile have nothing to do for it
        return False
    return axes["variant"] in _MAIN or (axes["dtype"] == "fp16" and axes["mode"] == "eager")


def _compare(rows: Sequence[Row]) -> None:
    """Each row's ratios to the native rows there are."""
    native = {(row["dtype"], row["mode"]): row for row in rows if row["variant"] == "native"}
    for row in rows:
        compiled, same = native.get((row["dtype"], "compiled")), native.get((row["dtype"], row["mode"]))
        row["ratio"] = _ratio(row, compiled, "ms")
        row["ratio_same_mode"] = _ratio(row, same, "ms")
        row["graph_ratio_same_mode"] = _ratio(row, same, "graph_ms")
        row["memory_ratio"] = _ratio(row, compiled, "after_forward_bytes")


def _ratio(row: Row, native: Row | None, key: str) -> float | None:
    return row[key] / native[key] if native is not None and row[key] and native[key] else None


def _check_norm(setup: Setup, name: str, dtype: torch.dtype) -> float:
    """The layer check at a shape of ResNet-50 in both forms."""
    variant = replace(next(v for v in layers.VARIANTS if v.name == name), compile=False)
    error = 0.0
    for residual in (False, True):
        shape = layers.SMOKE_SHAPES[0] if setup.smoke else (256, 256, 14, 14)
        data = BatchNormData.random(shape, dtype, setup.device, last=True, residual=residual)
        error = max(error, layers.layer_of(setup, variant, data).check())
    return error


def _measure(setup: Setup, variant: Variant, axes: dict[str, str]) -> Row:
    dtype, compile = DTYPES[axes["dtype"]], axes["mode"] == "compiled"
    error = _check_norm(setup, variant.layer, dtype) if variant.layer and setup.share is None else None
    model = _model(setup, variant, fuse=True)
    step = Step(setup, model, dtype, compile=compile)
    if setup.share is not None:
        step.probe(step.model, model)
        return {}
    if variant.ours:
        check_fused(setup, variant, dtype)
        if compile:
            check_same(step, model, model)
        setup.free()
    return {"error": error, **step.measure()}


def _model(setup: Setup, variant: Variant, *, fuse: bool, depths: Sequence[int] | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = variant.convert(build(setup, variant.norm, depths), fuse)
    if variant.name == "none":
        _quieten(model)
    return model.to(setup.device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def check_fused(setup: Setup, variant: Variant, dtype: torch.dtype) -> None:
    """Check the fused norms where they are used: a small first half of the network, fused against unfused.

    It has a stem with its pool, two blocks that downsample and two that do not. The whole network is too deep for this:
    rounding adds up, and two forms in plain PyTorch disagree in the first gradient (cosine 0.3 in bf16, 0.9 in fp16).
    """
    fused, plain = (_model(setup, variant, fuse=fuse, depths=(2, 2)) for fuse in (True, False))
    check_same(Step(setup, fused, dtype, compile=False), fused, plain, first=True)


def check_same(step: Step, model: nn.Module, plain: nn.Module, *, first: bool = False) -> None:
    """What is timed, ``model`` or its compiled form, must give the plain network's loss and gradients.

    They agree as far as half precision allows: the last layer's gradient, and with ``first`` also the first layer's.
    """
    loss, *gradients = step.probe(step.model, model)
    expected, *directions = step.probe(plain, plain)
    if not abs(loss - expected) <= 0.02 * abs(expected):
        raise Wrong(f"the timed network's loss is {loss:.4f}, the plain one's {expected:.4f}")
    for name, ours, theirs in zip(("last", "first"), gradients, directions):
        cosine = float(F.cosine_similarity(ours, theirs, dim=0))
        if not cosine > 0.9 and (first or name == "last"):
            raise Wrong(f"the timed network's {name} gradient has cosine {cosine:.3f} with the plain one's")


def build(setup: Setup, norm: Callable[[int], nn.Module], depths: Sequence[int] | None = None) -> nn.Module:
    """The network: ResNet-50, or for a smoke run a small one of the same blocks."""
    if setup.smoke:
        return peers.ResNet50(norm, depths=(1, 1), width=8, classes=10)
    return peers.ResNet50(norm, depths=depths)


def _quieten(model: nn.Module) -> None:
    """Shrink the branches: without norms every block doubles the variance, and activations overflow fp16."""
    for module in model.modules():
        if isinstance(module, peers.Bottleneck):
            nn.init.normal_(module.conv3.weight, std=1e-3)


def best_series(measure: Callable[[], list[float]], count: tuple[int, int]) -> list[float]:
    """The series with the lowest median: a host that is disturbed for a second must not count as the network's time.

    It takes ``count[0]`` to ``count[1]`` series, and stops when the best median is near the fastest step of all.
    """
    series: list[list[float]] = []
    while len(series) < count[1]:
        series.append(measure())
        best = min(series, key=statistics.median)
        if len(series) >= count[0] and statistics.median(best) <= QUIET * min(map(min, series)):
            break
    return best


class Step:
    """A training step on one batch of noise, and its measurements."""

    def __init__(self, setup: Setup, model: nn.Module, dtype: torch.dtype, *, compile: bool, batch: int = 256) -> None:
        batch, size, classes = (4, 32, 10) if setup.smoke else (batch, 224, 1000)
        self.setup, self.dtype = setup, dtype
        x = torch.randn(batch, 3, size, size, device=setup.device)
        self.x = x.contiguous(memory_format=torch.channels_last)
        self.y = torch.randint(classes, (batch,), device=setup.device)
        self.model: Callable[[Tensor], Tensor] = peers.compiled(model, backward_again=False) if compile else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def forward(self, model: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        # Not `model or self.model`: a compiled module may have no truth value.
        chosen = self.model if model is None else model
        with torch.autocast(self.setup.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = chosen(self.x)
            if logits.dtype != self.dtype:
                raise Wrong(f"the network computes in {logits.dtype} where autocast asks for {self.dtype}")
            return F.cross_entropy(logits, self.y)

    def __call__(self) -> Tensor:
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def probe(self, call: Callable[[Tensor], Tensor], model: nn.Module) -> tuple[float, Tensor, Tensor]:
        """The loss, and the gradients of the last and the first weight of ``model``, which ``call`` runs; no step."""
        loss = self.forward(call)
        loss.backward()
        weights = [p.grad for p in model.parameters() if p.ndim > 1]
        last, first = (g.double().flatten() for g in (weights[-1], weights[0]) if g is not None)
        model.zero_grad(set_to_none=True)
        return float(loss.detach()), last, first

    def measure(self) -> Row:
        """Times, memory after the forward pass, and peak memory, all after a few steps of warming up."""
        for _ in range(1 if self.setup.smoke else 4):
            loss = self()
        if not bool(loss.isfinite()):
            raise RuntimeError(f"the loss became {float(loss)}: timings of a network that diverged mean nothing")
        after_forward, peak = self._memory() if self.setup.cuda else (None, None)
        times = best_series(
            lambda: self._times(3 if self.setup.smoke else STEPS), (1, 1) if self.setup.smoke else SERIES
        )
        replayed = self._replayed() if self.setup.cuda else None
        return {
            "ms": statistics.median(times),
            "fastest_ms": min(times),
            "graph_ms": replayed and replayed.graph_ms,
            "after_forward_bytes": after_forward,
            "peak_bytes": peak,
            "note": replayed.note if replayed else "",
        }

    def _memory(self) -> tuple[int, int]:
        device = self.setup.device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loss = self.forward()
        after_forward = torch.cuda.memory_allocated(device) - before
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return after_forward, torch.cuda.max_memory_allocated(device)

    def _times(self, steps: int) -> list[float]:
        """Milliseconds of each step, one right after the other: the host may run ahead, as in training."""
        if not self.setup.cuda:
            clock = [time.perf_counter()]
            for _ in range(steps):
                self()
                clock.append(time.perf_counter())
            return [(b - a) * 1e3 for a, b in zip(clock, clock[1:])]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            self()
            event.record()
        torch.cuda.synchronize(self.setup.device)
        return [float(a.elapsed_time(b)) for a, b in zip(events, events[1:])]

    def _replayed(self) -> timing.Timing:
        """A step that is replayed from a CUDA graph, where it can be captured."""
        with timing.side_stream(self.setup.device):
            return timing.time_calls([self], self.setup.device)
