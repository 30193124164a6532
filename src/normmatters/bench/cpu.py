"""The CPU kernels against PyTorch's own: norms, weight norm, optimizers, and a training step of ResNet-18.

The variants of a group take turns in one process, so that whatever else the machine does disturbs all of them alike. A
time is the median of a variant's samples. A ratio is the median of the ratios to PyTorch's sample of the same turn.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normmatters.bench import check, layernorm, layers, optim, peers, timing, weightnorm
from normmatters.bench.check import BatchNormData, BatchNormReference, RowNormData
from normmatters.bench.harness import DTYPES, Row, Setup, Skip, Wrong, attempt
from normmatters.surgery import convert

Sample = tuple[float, ...]
Shape = tuple[int, int, int, int]

#: ResNet-18's and ResNet-50's at batch 32, and those of CIFAR's networks at batch 128.
SHAPES: list[Shape] = [
    (32, 64, 56, 56), (32, 128, 28, 28), (32, 64, 112, 112), (32, 256, 56, 56), (32, 512, 28, 28), (32, 256, 14, 14),
    (32, 512, 7, 7), (128, 16, 32, 32), (128, 64, 8, 8),
]  # fmt: skip
SAMPLES = SHAPES[:2]  # the only ones of L2, L∞, Top(k) and range
COMPILED = SHAPES[0]  # the only one of what torch.compile has to compile, and of naive L1
ROW_SHAPES = [(4096, 1024), (8192, 512), (2048, 4096)]
#: 1e4 to 1e8 elements in 100 channels, then a million elements in more channels.
LINEAR_SHAPES: list[Shape] = [(10**i, 100, 10, 10) for i in range(5)] + [(10, 1000, 10, 10), (1, 10000, 10, 10)]
CHECKED = 2**20  # elements: of a larger tensor only the first images are checked, of which there are two at least

_BATCH_NORMS = {v.name: v for v in layers.VARIANTS}
_BATCH_NORMS["naive_l1"] = layers.Variant("naive_l1", "l1", peers.NaiveL1BatchNormReLU, ours=False)
_OPTIMIZERS = ("SGD(fused=True)", "WeightDecayFreeSGD", "AngularSGD")
_STEPS: dict[str, Callable[..., nn.Module]] = {
    "native": lambda model, **_: model,
    "l1": lambda model, **options: convert(model, "l1", **options),
    "l1_lean": lambda model, **options: convert(model, "l1", memory="lean", **options),
}

AXES: Mapping[str, Sequence[str]] = {
    "part": ["batch_norm", "layer_norm", "rms_norm", "weight_norm", "optimizer", "step", "linear"],
    "dtype": ["fp32", "bf16"],
    "layout": ["cl", "nchw"],
    "form": ["relu", "add_relu"],
    "size": ["x".join(map(str, shape)) for shape in [*SHAPES, *LINEAR_SHAPES, *ROW_SHAPES, *layers.SMOKE_SHAPES]],
    "variant": [
        *(name for name in _BATCH_NORMS if name != "naive_l1_compiled"),
        *("torch", "classic", "bounded", "bounded_l1"),
        *(name for name in _OPTIMIZERS if "(" not in name),
    ],
}


@dataclass(frozen=True)
class Ready:
    """A variant that passed its check: how to take a sample, and what its row says besides the time."""

    sample: Callable[[], Sample]  # seconds of the whole, or of the forward and of the backward pass
    row: Row


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
                    yield from _batch_norms(setup, axes, shape, _usual_batch_norms(setup, axes, shape))
    for shape in layers.SMOKE_SHAPES if setup.smoke else LINEAR_SHAPES:
        axes = {"part": "linear", "dtype": "fp32", "layout": "nchw", "form": "relu"}
        yield from _batch_norms(setup, axes, shape, ["native", "l1"])


def _usual_batch_norms(setup: Setup, axes: dict[str, str], shape: Shape) -> list[str]:
    names = ["native", "l1", "l1_lean"]
    if setup.smoke or shape in SAMPLES:
        names += ["l2"]
        if axes["dtype"] == "fp32":
            names += ["linf", "range", "top10"]
    if shape == COMPILED and (axes["dtype"], axes["layout"], axes["form"]) == ("fp32", "cl", "relu"):
        names += ["naive_l1", "native_compiled"]
    return names


def _group(
    setup: Setup, axes: dict[str, str], variants: Mapping[str, tuple[bool, Callable[[], Ready]]], base: str, **more: Any
) -> Iterator[Row]:
    """The rows of variants that are compared with ``base``: each is checked, then all take turns."""
    picked = setup.only.words
    if any(picked & set(values) and axis not in (*axes, "variant") for axis, values in AXES.items()):
        return  # a word for an axis that this part does not have
    wanted = {name: v for name, v in variants.items() if setup.only.allows(AXES, {**axes, "variant": name})}
    if not wanted:
        return
    if base not in wanted:
        wanted = {base: variants[base], **wanted}
    ready: dict[str, Ready] = {}
    found: dict[str, Row] = {}
    for name, (ours, prepare) in wanted.items():

        def checked(name: str = name, prepare: Callable[[], Ready] = prepare) -> Row:
            if "compiled" in name and setup.no_compiler:
                raise Skip(setup.no_compiler)
            ready[name] = prepare()
            ready[name].sample()  # whatever is compiled or allocated on first use, or fails
            return ready[name].row

        found[name] = attempt({**axes, **more, "variant": name, "ours": ours}, checked)
        if found[name]["status"] != "ok":
            ready.pop(name, None)
    samples = _take_turns({name: variant.sample for name, variant in ready.items()}, quick=setup.smoke)
    for name, row in found.items():
        if name in samples:
            row |= _numbers(samples[name], samples.get(base))
            if base in ready and "saved_bytes" in row:
                row["memory_ratio"] = row["saved_bytes"] / found[base]["saved_bytes"]
            if more.get("elements"):
                row["ns_per_element"] = row["ms"] * 1e6 / more["elements"]
        yield row
    setup.free()


def _take_turns(calls: Mapping[str, Callable[[], Sample]], *, quick: bool) -> dict[str, list[Sample]]:
    """Samples of each call, one per turn; the order is reversed from turn to turn. A third of a second for each."""
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    names = list(calls)
    end = time.perf_counter() + 0.33 * len(calls)
    for turn in range(1000):
        if turn >= (2 if quick else 5) and (quick or time.perf_counter() > end):
            break
        for name in names if turn % 2 else reversed(names):
            samples[name].append(calls[name]())
    return samples


def _numbers(samples: list[Sample], base: list[Sample] | None) -> Row:
    row: Row = {"ms": statistics.median(map(sum, samples)) * 1e3, "samples": len(samples)}
    if len(samples[0]) == 2:
        row["fwd_ms"], row["bwd_ms"] = (statistics.median(part) * 1e3 for part in zip(*samples))
    row["ratio"] = statistics.median(sum(a) / sum(b) for a, b in zip(samples, base)) if base else None
    return row


def _fwd_bwd(forward: Callable[[], Tensor], backward: Callable[[Tensor], Any]) -> Sample:
    start = time.perf_counter()
    output = forward()
    middle = time.perf_counter()
    backward(output)
    return middle - start, time.perf_counter() - middle


def _whole(call: Callable[[], Any]) -> Sample:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start,)


def _batch_norms(setup: Setup, axes: dict[str, str], shape: Shape, names: Sequence[str]) -> Iterator[Row]:
    images, elements = shape[0], math.prod(shape)
    if elements > CHECKED and not any(_BATCH_NORMS[name].compile for name in names):
        images = min(images, max(2, CHECKED * images // elements))
    options = {"last": axes["layout"] == "cl", "residual": axes["form"] == "add_relu"}
    dtype = DTYPES[axes["dtype"]]
    data: list[BatchNormData] = []
    references: dict[str, BatchNormReference] = {}

    def prepare(variant: layers.Variant) -> Ready:
        if not data:
            small = (images, *shape[1:])
            data.append(BatchNormData.random(small, dtype, setup.device, **options))
            data.append(data[0] if images == shape[0] else BatchNormData.random(shape, dtype, setup.device, **options))
        few, many = data
        if variant.kind not in references:
            references[variant.kind] = BatchNormReference.of(few, variant.kind)
        module, norm = layers.build(setup, variant, few)
        error = check.check_batch_norm(module, norm, few, references[variant.kind], lean=variant.lean)
        parameters = [norm.weight, norm.bias]

        def backward(one: BatchNormData, output: Tensor) -> Any:
            return torch.autograd.grad(output, [*one.inputs(), *parameters], one.g)

        free = [*parameters, norm.running_mean, norm.running_var]
        saved = timing.memory(lambda: module(*few.inputs()), partial(backward, few), free).saved
        row = {"error": error, "saved_share": saved / (few.x.numel() * few.x.element_size())}
        return Ready(lambda: _fwd_bwd(lambda: module(*many.inputs()), partial(backward, many)), row)

    variants = {name: (_BATCH_NORMS[name].ours, partial(prepare, _BATCH_NORMS[name])) for name in names}
    axes = {**axes, "size": "x".join(map(str, shape))}
    more = {"tensor_bytes": elements * dtype.itemsize, "elements": elements}
    yield from _group(setup, axes, variants, "native", **more)


def _row_norms(setup: Setup) -> Iterator[Row]:
    for part, family in (("layer_norm", "layer"), ("rms_norm", "rms")):
        for dtype in AXES["dtype"]:
            for shape in layernorm.SMOKE_SHAPES if setup.smoke else ROW_SHAPES:
                draw = cache(partial(RowNormData.random, *shape, DTYPES[dtype], setup.device))
                references = cache(partial(_row_norm_reference, draw, family == "rms"))
                compile = (dtype, shape) == ("fp32", ROW_SHAPES[0])
                variants = {
                    v.name.removeprefix("rms_"): (v.ours, partial(_row_norm, v, draw, references))
                    for v in layernorm.VARIANTS
                    if v.family == family and v.needs is None and (compile or not v.compile)
                }
                axes = {"part": part, "dtype": dtype, "size": f"{shape[0]}x{shape[1]}"}
                elements = math.prod(shape)
                more = {"tensor_bytes": elements * DTYPES[dtype].itemsize, "elements": elements}
                yield from _group(setup, axes, variants, "native", **more)


def _row_norm_reference(draw: Callable[[], RowNormData], rms: bool, p: float) -> list[Tensor]:
    return check.row_norm_reference(draw(), p, rms=rms, eps=layernorm.EPS)


def _row_norm(
    variant: layernorm.Variant, draw: Callable[[], RowNormData], references: Callable[[float], list[Tensor]]
) -> Ready:
    one, rms = draw(), variant.family == "rms"
    norm = peers.compiled(variant.norm) if variant.compile else variant.norm

    def backward(output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, (one.x, one.weight) if rms else (one.x, one.weight, one.bias), one.g)

    output = norm(one)
    error, note = None, ""
    try:
        error = check.check_row_norm([output, *backward(output)], references(variant.p), one)
    except Wrong as wrong:
        if variant.ours or one.x.dtype == torch.float32:
            raise
        note = f"PyTorch sums in half precision: {wrong}"  # it is what users have, so it is timed nevertheless
    saved = timing.memory(lambda: norm(one), backward, [one.weight, one.bias]).saved
    row = {"error": error, "note": note, "saved_share": saved / (one.x.numel() * one.x.element_size())}
    return Ready(lambda: _fwd_bwd(lambda: norm(one), backward), row)


def resnet18(setup: Setup) -> nn.Module:
    """ResNet-18, or for a smoke run a small one of the same blocks; always with the same weights."""
    torch.manual_seed(0)
    return peers.ResNet18(depths=(1, 1), width=8, classes=10) if setup.smoke else peers.ResNet18()


def _weight_norm(setup: Setup) -> Iterator[Row]:
    names = ("torch", "classic", "bounded", "bounded_l1")
    variants = {name: (name != "torch", partial(_weight_norm_of, setup, name)) for name in names}
    size = sum(m.weight.numel() for m in resnet18(setup).modules() if isinstance(m, nn.Conv2d))
    more = {"size": "ResNet-18", "tensor_bytes": 4 * size, "elements": size}
    yield from _group(setup, {"part": "weight_norm", "dtype": "fp32"}, variants, "torch", **more)


def _weight_norm_of(setup: Setup, variant: str) -> Ready:
    model = resnet18(setup)
    weightnorm.VARIANTS[variant](model)
    convolutions, parameters = weightnorm.layers_of(model), weightnorm.parameters_of(model)
    gradients = [torch.randn_like(p[-1]) for p in parameters]
    leaves = [p for group in parameters for p in group]
    model.forward = lambda: [layer.weight for layer in convolutions]  # called by the model, with what it does before

    def backward(weights: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(weights, leaves, gradients)

    weights = model()
    flat = iter(backward(weights))
    error = 0.0
    for layer, group, weight, g in zip(convolutions, parameters, weights, gradients):
        results = [weight, *(next(flat) for _ in group)]
        reference = weightnorm.reference(layer, group, variant, g)
        error = max(error, check.compare_weights(results, reference, torch.float32))
    return Ready(lambda: _fwd_bwd(model, backward), {"error": error})  # type: ignore[arg-type]


def _optimizers(setup: Setup) -> Iterator[Row]:
    shapes = {name: tuple(p.shape) for name, p in resnet18(setup).named_parameters()}
    size = sum(map(math.prod, shapes.values()))

    def prepare(name: str) -> Ready:
        build, _ = optim.OPTIMIZERS[name]
        if wrong := optim.check(build, shapes, "cpu"):
            raise Wrong(wrong)
        optimizer, step = build(optim.make_parameters(shapes, "cpu", torch.float32), False)
        return Ready(lambda: _whole(step), {"optimizer": type(optimizer).__name__})

    variants = {name: ("SGD(" not in name, partial(prepare, name)) for name in _OPTIMIZERS}
    more = {"size": "ResNet-18", "tensor_bytes": 4 * size, "elements": size}
    yield from _group(setup, {"part": "optimizer", "dtype": "fp32"}, variants, _OPTIMIZERS[0], **more)


def _step(setup: Setup) -> Iterator[Row]:
    """A training step in fp32, channels_last: forward, cross entropy, backward, SGD with momentum."""
    variants = {name: (name != "native", partial(_step_of, setup, name)) for name in _STEPS}
    size = {"size": "ResNet-18, 4x3x32x32" if setup.smoke else "ResNet-18, 32x3x224x224"}
    yield from _group(setup, {"part": "step", "dtype": "fp32", "layout": "cl"}, variants, "native", **size)


def _step_of(setup: Setup, name: str) -> Ready:
    make = _STEPS[name]
    model = make(resnet18(setup)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    error = _check_step(copy.deepcopy(model), make(resnet18(setup), **({} if name == "native" else {"fuse": False})))
    images, size = (4, 32) if setup.smoke else (32, 224)
    x = torch.randn(images, 3, size, size).contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (images,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    free = [*model.parameters(), *model.buffers()]
    saved = timing.memory(lambda: F.cross_entropy(model(x), y), Tensor.backward, free).saved
    optimizer.zero_grad(set_to_none=True)
    return Ready(lambda: _whole(step), {"error": error, "saved_bytes": saved})


def _check_step(model: nn.Module, plain: nn.Module) -> float:
    """The largest error of loss and gradient by that of ``plain`` in float64, as a share of what is allowed.

    Allowed are a loss that is off by 1e-3 of it, and a gradient whose cosine with the right one is 0.99: rounding to
    fp32 turns some ReLUs, and lean estimates dγ.
    """
    torch.manual_seed(1)
    x, y = torch.randn(4, 3, 64, 64), torch.randint(10, (4,))
    x = x.contiguous(memory_format=torch.channels_last)
    found = []
    for network, images in ((model, x), (plain.double(), x.double())):
        loss = F.cross_entropy(network(images), y)
        loss.backward()
        gradients = [p.grad.double().flatten() for p in network.parameters() if p.grad is not None]
        found.append((float(loss.detach()), torch.cat(gradients)))
    (value, ours), (expected, theirs) = found
    off, cosine = abs(value - expected) / abs(expected), float(F.cosine_similarity(ours, theirs, dim=0))
    error = max(off / 1e-3, (1 - cosine) / 0.01)
    if not error <= 1:
        raise Wrong(f"the loss is off by {off:.2g} of it, and the gradient's cosine with the right one is {cosine:.3f}")
    return error


@dataclass(frozen=True)
class Line:
    """One column of the summary: the rows with these values."""

    head: str
    rows: Mapping[str, Sequence[str]]

    def chosen(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those of the rows that have numbers."""
        good = [row for row in rows if row["status"] == "ok" and row.get("ratio")]
        return [row for row in good if all(row.get(key) in values for key, values in self.rows.items())]


_L1 = {"part": ["batch_norm"], "variant": ["l1"]}
SUMMARY = [
    Line("L1 BN+ReLU, fp32", {**_L1, "form": ["relu"], "dtype": ["fp32"]}),
    Line("in bf16", {**_L1, "form": ["relu"], "dtype": ["bf16"]}),
    Line("L1 BN+add+ReLU", {**_L1, "form": ["add_relu"]}),
    Line("L∞, range", {"part": ["batch_norm"], "variant": ["linf", "range"], "form": ["relu"]}),
    Line("Top(10)", {"part": ["batch_norm"], "variant": ["top10"], "form": ["relu"]}),
    Line("L1 layer norm", {"part": ["layer_norm"], "variant": ["l1"]}),
    Line("L1 RMS norm", {"part": ["rms_norm"], "variant": ["l1"]}),
    Line("bounded weight norm", {"part": ["weight_norm"], "variant": ["bounded"]}),
    Line("`WeightDecayFreeSGD`", {"part": ["optimizer"], "variant": ["WeightDecayFreeSGD"]}),
    Line("`AngularSGD`", {"part": ["optimizer"], "variant": ["AngularSGD"]}),
    Line("ResNet-18 step", {"part": ["step"], "variant": ["l1"]}),
    Line("with lean", {"part": ["step"], "variant": ["l1_lean"]}),
]


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Geometric mean and worst of the ratios to PyTorch's own, for each kind of row, as Markdown."""
    heads, means, worst = ["time ÷ PyTorch's"], ["geometric mean"], ["worst"]
    for line in SUMMARY:
        found = line.chosen(rows)
        ratios = [row["ratio"] for row in found]
        kept = [row["memory_ratio"] for row in found if row.get("memory_ratio")]
        heads.append(line.head)
        memory = f" (memory {max(kept):.2f})" if kept else ""
        means.append(f"{statistics.geometric_mean(ratios):.2f}{memory}" if ratios else "–")
        worst.append(f"{max(ratios):.2f}" if ratios else "–")
    ruler = ["---", *["--:"] * len(SUMMARY)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ruler, means, worst))
