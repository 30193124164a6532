"""The CPU kernels against PyTorch's own: norms, weight norm, optimizers, and a training step of ResNet-18.

The variants of a group take turns in one process, so that whatever else the machine does disturbs all of them alike. A
turn is two calls, and the second is timed: the first finds the caches and the allocator as another variant left them. A
time is the median of a variant's samples. A ratio is the median of the ratios to PyTorch's sample of the same turn.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normmatters.bench import layernorm, layers, optim, peers, timing, weightnorm
from normmatters.bench.check import BatchNormData, RowNormData
from normmatters.bench.harness import DTYPES, Case, Layer, Row, Setup, Wrong, attempt
from normmatters.bench.resnet50 import Step
from normmatters.nn.batchnorm import LpBatchNorm2d, MeanOnlyBatchNorm2d
from normmatters.surgery import convert

Sample = tuple[float, ...]
Shape = tuple[int, int, int, int]

#: ResNet-18's and ResNet-50's at batch 32, and those of CIFAR's networks at batch 128.
SHAPES: list[Shape] = [
    (32, 64, 56, 56), (32, 128, 28, 28), (32, 64, 112, 112), (32, 256, 56, 56), (32, 512, 28, 28), (32, 256, 14, 14),
    (32, 512, 7, 7), (128, 16, 32, 32), (128, 64, 8, 8),
]  # fmt: skip
SAMPLES = SHAPES[:2]  # the only ones of fp16, L2, Lp and mean-only, and of L∞, Top(k) and range with a residual
COMPILED = SHAPES[0]  # the only one of what torch.compile has to compile, and of naive L1
ROW_SHAPES = [(4096, 1024), (8192, 512), (2048, 4096)]
LINEAR_SHAPES: list[Shape] = [(10**i, 100, 10, 10) for i in range(5)]  # 1e4 to 1e8 elements in 100 channels,
CHANNEL_SHAPES: list[Shape] = [(100, 100, 10, 10), (10, 1000, 10, 10), (1, 10000, 10, 10)]  # and 1e6 in ever more
CHECKED = 2**20  # elements: of a larger tensor only the first images are checked, at least two

_BATCH_NORMS = {v.name: v for v in layers.VARIANTS}
_BATCH_NORMS |= {
    v.name: v
    for v in (
        layers.Variant("naive_l1", "l1", peers.NaiveL1BatchNormReLU, ours=False),
        layers.Variant("lp1.5", "lp1.5", lambda c: LpBatchNorm2d(c, 1.5, act="relu")),
        layers.Variant("mean", "mean", lambda c: MeanOnlyBatchNorm2d(c, act="relu")),
    )
}
_ROW_NORMS = [
    *(v for v in layernorm.VARIANTS if v.on_cpu),
    layernorm.Variant("lp1.5", "layer", 1.5, layernorm.ours(1.5)),
    layernorm.Variant("rms_lp1.5", "rms", 1.5, layernorm.our_rms(1.5)),
]
_SGD = "SGD(fused=True)"
#: The last three work beside an SGD that is the fused one, too.
_OPTIMIZERS: dict[str, optim.Build] = {
    **{name: optim.OPTIMIZERS[name][0] for name in (_SGD, "WeightDecayFreeSGD", "AngularSGD")},
    "NormRecorder": partial(optim.recorder, foreach=None, fused=True),
    "NormSchedule": partial(optim.held_norms, fused=True),
    "StepSizeCorrection": partial(optim.correction, foreach=None, fused=True),
}
_STEPS: dict[str, Callable[..., nn.Module]] = {
    "native": lambda model, **_: model,
    "l1": lambda model, **options: convert(model, "l1", **options),
    "l1_lean": lambda model, **options: convert(model, "l1", memory="lean", **options),
}

AXES: Mapping[str, Sequence[str]] = {
    "part": ["batch_norm", "layer_norm", "rms_norm", "weight_norm", "optimizer", "step", "linear"],
    "dtype": ["fp32", "bf16", "fp16"],
    "layout": ["cl", "nchw"],
    "form": ["relu", "add_relu"],
    "size": [
        "x".join(map(str, shape))
        for shape in [*SHAPES, *LINEAR_SHAPES, *CHANNEL_SHAPES, *ROW_SHAPES, *layers.SMOKE_SHAPES]
    ],
    "threads": ["1", "2", "4"],
    "variant": [
        *(name for name in _BATCH_NORMS if name != "naive_l1_compiled"),
        *("torch", "classic", "bounded", "bounded_l1"),
        *(name for name in _OPTIMIZERS if name != _SGD),
    ],
}


@dataclass(frozen=True)
class Ready:
    """A variant that passed its check: a function that takes a sample, and the rest of its row."""

    sample: Callable[[], Sample]  # seconds of the whole, or of the forward and of the backward pass
    row: Row


def _timed(*stages: Callable[[Any], Any]) -> Callable[[], Sample]:
    """A function that takes a sample: the seconds of each stage. A stage gets the result of the one before."""

    def sample() -> Sample:
        value, times = None, [time.perf_counter()]
        for stage in stages:
            value = stage(value)
            times.append(time.perf_counter())
        return tuple(end - start for start, end in itertools.pairwise(times))

    return sample


def _layer(layer: Layer, data: Any, **row: Any) -> Ready:
    """A layer, whose forward and backward pass are timed apart."""
    return Ready(_timed(lambda _: layer.forward(data), partial(layer.backward, data)), row)


Variants = Mapping[str, tuple[bool, Callable[[], Ready]]]  # name → whether it is ours, and what checks it


def rows(setup: Setup) -> Iterator[Row]:
    """Every wanted row, the small parts first."""
    setup = Setup(torch.device("cpu"), setup.smoke, setup.only)
    yield from _weight_norm(setup)
    yield from _optimizers(setup)
    yield from _row_norms(setup)
    yield from _step(setup)
    for dtype in AXES["dtype"]:
        for layout in AXES["layout"]:
            for form in AXES["form"]:
                for shape in layers.SMOKE_SHAPES if setup.smoke else SHAPES:
                    axes = {"part": "batch_norm", "dtype": dtype, "layout": layout, "form": form}
                    if names := _usual_batch_norms(setup, axes, shape):
                        yield from _batch_norms(setup, axes, shape, names)
    yield from _linear(setup)


def _linear(setup: Setup) -> Iterator[Row]:
    """How cost grows: with the elements, and at three numbers of threads with the channels."""
    elements = layers.SMOKE_SHAPES if setup.smoke else LINEAR_SHAPES
    channels = layers.SMOKE_SHAPES if setup.smoke else CHANNEL_SHAPES
    wanted = [("nchw", str(torch.get_num_threads()), shape) for shape in elements]
    wanted += itertools.product(AXES["layout"], AXES["threads"], channels)
    for layout, threads, shape in dict.fromkeys(wanted):
        axes = {"part": "linear", "dtype": "fp32", "layout": layout, "form": "relu", "threads": threads}
        yield from _batch_norms(setup, axes, shape, ["native", "l1"])


def _usual_batch_norms(setup: Setup, axes: dict[str, str], shape: Shape) -> list[str]:
    sampled = setup.smoke or shape in SAMPLES
    if axes["dtype"] == "fp16":
        return ["native", "l1", "l1_lean"] if sampled else []
    names = ["native", "l1", "l1_lean"]
    if sampled:
        names += ["l2"]
    if axes["dtype"] == "fp32" and (sampled or axes["form"] == "relu"):
        names += ["linf", "range", "top10"]
    if axes["dtype"] == "fp32" and sampled:
        names += ["lp1.5", "mean"]
    if shape == COMPILED and (axes["dtype"], axes["layout"], axes["form"]) == ("fp32", "cl", "relu"):
        names += ["naive_l1", "native_compiled"]
    return names


def _group(
    setup: Setup, axes: dict[str, str], variants: Variants, base: str, elements: int = 0, **more: Any
) -> Iterator[Row]:
    """The rows of some variants, compared with ``base``: each is checked, then all take turns."""
    picked = setup.only.words
    if any(picked & set(values) and axis not in (*axes, "variant") for axis, values in AXES.items()):
        return  # the user chose by an axis that this part does not have
    wanted = {name: v for name, v in variants.items() if setup.only.allows(AXES, {**axes, "variant": name})}
    if not wanted:
        return
    if base not in wanted:
        wanted = {base: variants[base], **wanted}
    if elements:
        more |= {"tensor_bytes": elements * DTYPES[axes["dtype"]].itemsize, "elements": elements}
    samplers: dict[str, Callable[[], Sample]] = {}
    results: dict[str, Row] = {}
    with _threads(axes.get("threads")):
        for name, (ours, prepare) in wanted.items():

            def checked(name: str = name, prepare: Callable[[], Ready] = prepare) -> Row:
                ready = prepare()
                ready.sample()  # compile and allocate, or fail, before the first sample
                samplers[name] = ready.sample
                return ready.row

            case = Case({**axes, **more, "variant": name}, checked, ours, "compiled" in name)
            results[name] = attempt(setup, case)
        samples = _take_turns(samplers, quick=setup.smoke)
    for name, row in results.items():
        if name in samples:
            row |= _numbers(samples[name], samples.get(base))
            if base in samples and "saved_bytes" in row:
                row["memory_ratio"] = row["saved_bytes"] / results[base]["saved_bytes"]
            if elements:
                row["ns_per_element"] = row["ms"] * 1e6 / elements
        yield row
    setup.free()


@contextmanager
def _threads(count: str | None) -> Iterator[None]:
    """PyTorch's number of threads for a while; None leaves it."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(count or before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _take_turns(calls: Mapping[str, Callable[[], Sample]], *, quick: bool) -> dict[str, list[Sample]]:
    """Samples of each call, one per turn; the order is reversed from turn to turn. 0.35 s for each."""
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    names = list(calls)
    end = time.perf_counter() + 0.35 * len(calls)
    for turn in range(1000):
        if turn >= (2 if quick else 5) and (quick or time.perf_counter() > end):
            break
        for name in names if turn % 2 else reversed(names):
            calls[name]()
            samples[name].append(calls[name]())
    return samples


def _numbers(samples: list[Sample], base: list[Sample] | None) -> Row:
    row: Row = {"ms": statistics.median(map(sum, samples)) * 1e3, "samples": len(samples)}
    if len(samples[0]) == 2:
        row["fwd_ms"], row["bwd_ms"] = (statistics.median(part) * 1e3 for part in zip(*samples))
    row["ratio"] = statistics.median(sum(a) / sum(b) for a, b in zip(samples, base)) if base else None
    return row


def _batch_norms(setup: Setup, axes: dict[str, str], shape: Shape, names: Sequence[str]) -> Iterator[Row]:
    images, elements = shape[0], math.prod(shape)
    if elements > CHECKED and not any(_BATCH_NORMS[name].compile for name in names):
        images = min(images, max(2, CHECKED * images // elements))
    last, residual = axes["layout"] == "cl", axes["form"] == "add_relu"

    @cache
    def draw(count: int) -> BatchNormData:
        size = (count, *shape[1:])
        return BatchNormData.random(size, DTYPES[axes["dtype"]], setup.device, last=last, residual=residual)

    def prepare(variant: layers.Variant) -> Ready:
        few = draw(images)
        layer = layers.layer_of(setup, variant, few)
        error, saved, whole = layer.check(), _saved_share(layer, few), draw(shape[0])
        ready = _layer(layer, whole, error=error, saved_share=saved)
        if axes["part"] == "linear":
            peak = timing.peak_memory(lambda: layer.backward(whole, layer.forward(whole)))
            ready.row["peak_share"] = peak and peak / (whole.x.numel() * whole.x.element_size())
        return ready

    variants = {name: (_BATCH_NORMS[name].ours, partial(prepare, _BATCH_NORMS[name])) for name in names}
    yield from _group(setup, {**axes, "size": "x".join(map(str, shape))}, variants, "native", elements)


def _saved_share(layer: Layer, data: Any) -> float:
    """Bytes that are saved for backward, as a share of the input's."""
    x: Tensor = data.x
    return layer.memory(data).saved / (x.numel() * x.element_size())


def _row_norms(setup: Setup) -> Iterator[Row]:
    for part, family in (("layer_norm", "layer"), ("rms_norm", "rms")):
        for dtype in ("fp32", "bf16"):
            for shape in layernorm.SMOKE_SHAPES if setup.smoke else ROW_SHAPES:
                compile = (dtype, shape) == ("fp32", ROW_SHAPES[0])
                draw = cache(partial(RowNormData.random, *shape, DTYPES[dtype], setup.device))
                variants = {
                    v.name.removeprefix("rms_"): (v.ours, partial(_row_norm, v, draw))
                    for v in _ROW_NORMS
                    if v.family == family and (compile or not v.compile)
                }
                axes = {"part": part, "dtype": dtype, "size": f"{shape[0]}x{shape[1]}"}
                yield from _group(setup, axes, variants, "native", math.prod(shape))


def _row_norm(variant: layernorm.Variant, draw: Callable[[], RowNormData]) -> Ready:
    one = draw()
    layer = layernorm.layer_of(variant, one)
    error, note = None, ""
    try:
        error = layer.check()
    except Wrong as wrong:
        if variant.ours or one.x.dtype == torch.float32:
            raise
        note = f"PyTorch sums in half precision: {wrong}"  # it is what users have, so it is timed nevertheless
    return _layer(layer, one, error=error, note=note, saved_share=_saved_share(layer, one))


def resnet18(setup: Setup) -> nn.Module:
    """ResNet-18, or for a smoke run a small one of the same blocks; always with the same weights."""
    torch.manual_seed(0)
    return peers.ResNet18(depths=(1, 1), width=8, classes=10) if setup.smoke else peers.ResNet18()


def _weight_norm(setup: Setup) -> Iterator[Row]:
    def prepare(name: str) -> Ready:
        model = resnet18(setup)
        weightnorm.VARIANTS[name](model)
        layer, gradients = weightnorm.weights_of(model, name, torch.float32)
        return _layer(layer, gradients, error=layer.check())

    variants = {
        name: (name != "torch", partial(prepare, name)) for name in ("torch", "classic", "bounded", "bounded_l1")
    }
    elements = sum(m.weight.numel() for m in resnet18(setup).modules() if isinstance(m, nn.Conv2d))
    yield from _group(setup, {"part": "weight_norm", "dtype": "fp32"}, variants, "torch", elements, size="ResNet-18")


def _optimizers(setup: Setup) -> Iterator[Row]:
    shapes = {name: tuple(p.shape) for name, p in resnet18(setup).named_parameters()}

    def prepare(name: str) -> Ready:
        build = _OPTIMIZERS[name]
        if wrong := optim.check(build, shapes, "cpu"):
            raise Wrong(wrong)
        optimizer = build(optim.make_parameters(shapes, "cpu", torch.float32), False)
        return Ready(_timed(lambda _: optimizer.step()), {"optimizer": type(optimizer).__name__})

    variants = {name: (name != _SGD, partial(prepare, name)) for name in _OPTIMIZERS}
    axes, elements = {"part": "optimizer", "dtype": "fp32"}, sum(map(math.prod, shapes.values()))
    yield from _group(setup, axes, variants, _SGD, elements, size="ResNet-18")


def _step(setup: Setup) -> Iterator[Row]:
    """A training step in fp32, channels_last: forward, cross entropy, backward, SGD with momentum."""
    variants = {name: (name != "native", partial(_step_of, setup, name)) for name in _STEPS}
    size = "ResNet-18, 4x3x32x32" if setup.smoke else "ResNet-18, 32x3x224x224"
    yield from _group(setup, {"part": "step", "dtype": "fp32", "layout": "cl"}, variants, "native", size=size)


def _step_of(setup: Setup, name: str) -> Ready:
    make = _STEPS[name]
    model = make(resnet18(setup)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    error = _check_step(copy.deepcopy(model), make(resnet18(setup), **({} if name == "native" else {"fuse": False})))
    step = Step(setup, model, torch.float32, compile=False, batch=32)
    saved = timing.memory(step.forward, Tensor.backward, [*model.parameters(), *model.buffers()]).saved
    model.zero_grad(set_to_none=True)
    return Ready(_timed(lambda _: step()), {"error": error, "saved_bytes": saved})


def _check_step(model: nn.Module, plain: nn.Module) -> float:
    """The largest error of loss and gradient by that of ``plain`` in float64, as a share of what is allowed.

    Allowed are a loss that is off by 1e-3 of it, and a gradient whose cosine with the right one is 0.99: rounding to
    fp32 turns some ReLUs, and lean estimates dγ.
    """
    torch.manual_seed(1)
    x, y = torch.randn(4, 3, 64, 64), torch.randint(10, (4,))
    x = x.contiguous(memory_format=torch.channels_last)
    results = []
    for network, images in ((model, x), (plain.double(), x.double())):
        loss = F.cross_entropy(network(images), y)
        loss.backward()
        gradients = [p.grad.double().flatten() for p in network.parameters() if p.grad is not None]
        results.append((float(loss.detach()), torch.cat(gradients)))
    (value, ours), (expected, theirs) = results
    off, cosine = abs(value - expected) / abs(expected), float(F.cosine_similarity(ours, theirs, dim=0))
    error = max(off / 1e-3, (1 - cosine) / 0.01)
    if not error <= 1:
        raise Wrong(f"the loss is off by {off:.2g} of it, and the gradient's cosine with the right one is {cosine:.3f}")
    return error


_L1 = {"part": ["batch_norm"], "variant": ["l1"]}
#: The rows of the summary, each with the values that its rows have. README leaves out those of ``_ONLY_IN_DOCS``.
SUMMARY: dict[str, Mapping[str, Sequence[str]]] = {
    "L1 BN+ReLU, fp32": {**_L1, "form": ["relu"], "dtype": ["fp32"]},
    "L1 BN+ReLU, bf16": {**_L1, "form": ["relu"], "dtype": ["bf16"]},
    "L1 BN+ReLU, fp16": {**_L1, "form": ["relu"], "dtype": ["fp16"]},
    "L1 BN+add+ReLU": {**_L1, "form": ["add_relu"], "dtype": ["fp32", "bf16"]},
    "L∞, range": {"part": ["batch_norm"], "variant": ["linf", "range"], "form": ["relu"]},
    "Top(10)": {"part": ["batch_norm"], "variant": ["top10"], "form": ["relu"]},
    "L1.5 BN+ReLU": {"part": ["batch_norm"], "variant": ["lp1.5"], "form": ["relu"]},
    "mean-only BN+ReLU": {"part": ["batch_norm"], "variant": ["mean"], "form": ["relu"]},
    "L1 layer norm": {"part": ["layer_norm"], "variant": ["l1"]},
    "L1 RMS norm": {"part": ["rms_norm"], "variant": ["l1"]},
    "L1.5 layer norm": {"part": ["layer_norm"], "variant": ["lp1.5"]},
    "bounded weight norm": {"part": ["weight_norm"], "variant": ["bounded"]},
    "`WeightDecayFreeSGD`": {"part": ["optimizer"], "variant": ["WeightDecayFreeSGD"]},
    "`AngularSGD`": {"part": ["optimizer"], "variant": ["AngularSGD"]},
    "`NormRecorder`": {"part": ["optimizer"], "variant": ["NormRecorder"]},
    "`NormSchedule`, each step": {"part": ["optimizer"], "variant": ["NormSchedule"]},
    "`StepSizeCorrection`": {"part": ["optimizer"], "variant": ["StepSizeCorrection"]},
    "ResNet-18 step": {"part": ["step"], "variant": ["l1"]},
    "ResNet-18 step, lean": {"part": ["step"], "variant": ["l1_lean"]},
}


_ONLY_IN_DOCS = {
    *("L1 BN+ReLU, fp16", "L1.5 BN+ReLU", "mean-only BN+ReLU", "L1.5 layer norm"),
    *("`NormRecorder`", "`NormSchedule`, each step", "`StepSizeCorrection`"),
}


def summary(rows: Sequence[Mapping[str, Any]], *, whole: bool = True) -> str:
    """Geometric mean and worst of the ratios to PyTorch's own, for each kind of row, as Markdown in two halves."""
    cells = []
    measured = [row for row in rows if row["status"] == "ok" and row.get("ratio")]
    for head, values in SUMMARY.items():
        chosen = [row for row in measured if all(row.get(key) in allowed for key, allowed in values.items())]
        ratios = [row["ratio"] for row in chosen]
        saved = [row["memory_ratio"] for row in chosen if row.get("memory_ratio")]
        memory = f" (memory {max(saved):.2f})" if saved else ""
        if ratios and (whole or head not in _ONLY_IN_DOCS):
            cells.append(f"{head} | {statistics.geometric_mean(ratios):.2f}{memory} | {max(ratios):.2f}")
    half = -(-len(cells) // 2)
    lines = ["time ÷ PyTorch's | mean | worst | | mean | worst", "--- | --: | --: | --- | --: | --:"]
    lines += [
        f"{left} | {right}" for left, right in itertools.zip_longest(cells[:half], cells[half:], fillvalue=" | | ")
    ]
    return "\n".join(f"| {line} |" for line in lines)
