"""Batch norm + ReLU and batch norm + add + ReLU in training, one layer at a time, at the shapes of ResNet-50."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from normmatters.bench import peers, timing
from normmatters.bench.check import BatchNormData, BatchNormReference, check_batch_norm
from normmatters.bench.harness import DTYPES, Row, Setup, Skip, attempt, measured
from normmatters.nn.batchnorm import L1BatchNorm2d, LInfBatchNorm2d, LpBatchNorm2d, RangeBatchNorm2d, TopKBatchNorm2d

Shape = tuple[int, int, int, int]

_SIZES = [
    (64, 112), (64, 56), (256, 56), (128, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7),
]  # fmt: skip
SHAPES: list[Shape] = [(256, channels, size, size) for channels, size in _SIZES]
# Large and of middle size: what precisions and layouts other than the usual ones are sampled at.
SAMPLE: list[Shape] = [(256, 256, 56, 56), (256, 128, 28, 28)]
SMOKE_SHAPES: list[Shape] = [(4, 16, 6, 6)]


@dataclass(frozen=True)
class Variant:
    """One way to compute the layer. ``kind`` names the equation that it is checked against."""

    name: str
    kind: str
    build: Callable[[int], nn.Module]
    ours: bool = True
    lean: bool = False
    compile: bool = False


# The native forms come first: the others' ratios refer to the faster of them.
VARIANTS = [
    Variant("native", "l2", peers.NativeBatchNormReLU, ours=False),
    Variant("native_compiled", "l2", peers.NativeBatchNormReLU, ours=False, compile=True),
    Variant("naive_l1_compiled", "l1", peers.NaiveL1BatchNormReLU, ours=False, compile=True),
    Variant("l1_lean", "l1", lambda c: L1BatchNorm2d(c, act="relu", memory="lean"), lean=True),
    Variant("l1", "l1", lambda c: L1BatchNorm2d(c, act="relu")),
    Variant("l2", "l2", lambda c: LpBatchNorm2d(c, 2, act="relu")),
    Variant("linf", "linf", lambda c: LInfBatchNorm2d(c, act="relu")),
    Variant("range", "range", lambda c: RangeBatchNorm2d(c, act="relu")),
    Variant("top10", "top10", lambda c: TopKBatchNorm2d(c, 10, act="relu")),
]
NATIVE = ("native", "native_compiled")

AXES = {
    "dtype": ["fp16", "bf16"],
    "layout": ["cl", "nchw"],
    "form": ["relu", "add_relu"],
    "size": ["x".join(map(str, shape)) for shape in SHAPES + SMOKE_SHAPES],
    "variant": [v.name for v in VARIANTS],
}


def rows(setup: Setup) -> Iterator[Row]:
    """Every wanted row, one at a time. The default is fp16 channels_last whole, and the rest at two shapes."""
    first = True
    for dtype in AXES["dtype"]:
        for layout in AXES["layout"]:
            for shape in SMOKE_SHAPES if setup.smoke else SHAPES:
                for form in AXES["form"]:
                    if setup.only.default() and not setup.smoke and not _usual(dtype, layout, shape):
                        continue
                    axes = {"dtype": dtype, "layout": layout, "form": form, "size": "x".join(map(str, shape))}
                    wanted = [v for v in VARIANTS if setup.only.allows(AXES, {**axes, "variant": v.name})]
                    if setup.smoke:  # one compiled peer shows that it works; each takes many seconds
                        wanted = [v for v in wanted if not v.compile or (first and v.name == "native_compiled")]
                        first = first and not wanted
                    elif setup.only.default() and shape not in SAMPLE:
                        wanted = [v for v in wanted if v.name != "naive_l1_compiled"]
                    yield from group(setup, shape, axes, wanted)


def _usual(dtype: str, layout: str, shape: Shape) -> bool:
    odd = (dtype != "fp16") + (layout != "cl")
    return odd == 0 or (odd == 1 and shape in SAMPLE)


def group(setup: Setup, shape: Shape, axes: dict[str, str], variants: list[Variant]) -> Iterator[Row]:
    """The variants of one layer, all on the same data."""
    if not variants:
        return
    data: list[BatchNormData] = []
    references: dict[str, BatchNormReference] = {}
    best: float | None = None
    tensor_bytes = math.prod(shape) * DTYPES[axes["dtype"]].itemsize
    for variant in variants:
        # Our kernels are compiled for a kind of layer, the peers for every shape.
        if not setup.mine(*(axes[key] for key in axes if key != "size" or variant.compile), variant.name):
            continue

        def measure(variant: Variant = variant) -> Row:
            if variant.compile and setup.no_compiler:
                raise Skip(setup.no_compiler)
            if not data:
                data.extend(_data(setup, shape, axes, tensor_bytes))
            if setup.share is not None:
                return _run_once(setup, variant, data[0])
            if variant.kind not in references:
                references[variant.kind] = BatchNormReference.of(data[0], variant.kind)
            return _measure(setup, variant, data, references[variant.kind], tensor_bytes)

        row: Row = {**axes, "variant": variant.name, "ours": variant.ours, "tensor_bytes": tensor_bytes}
        row = attempt(row, measure)
        if row["status"] == "ok" and setup.share is None:
            total = row["fwd_ms"] + row["bwd_ms"]
            if variant.name in NATIVE:
                best = min(total, best or math.inf)
            row["ratio"] = total / best if best else None
        yield row
        if variant.compile:
            setup.free()
    data.clear()
    references.clear()
    setup.free()


def _data(setup: Setup, shape: Shape, axes: dict[str, str], tensor_bytes: int) -> list[BatchNormData]:
    one = BatchNormData.random(
        shape,
        DTYPES[axes["dtype"]],
        setup.device,
        last=axes["layout"] == "cl",
        residual=axes["form"] == "add_relu",
    )
    copies = timing.rotation(tensor_bytes, setup.device) if setup.share is None else 1
    return [one] + [one.copies() for _ in range(copies - 1)]


def build(setup: Setup, variant: Variant, data: BatchNormData) -> tuple[Any, Any]:
    """The layer with the data's parameters, and the norm inside it."""
    module = variant.build(data.x.shape[1]).to(setup.device)
    norm: Any = module.norm if isinstance(module, peers.NativeBatchNormReLU) else module
    with torch.no_grad():
        norm.weight.copy_(data.weight)
        norm.bias.copy_(data.bias)
    return peers.compiled(module) if variant.compile else module, norm


def _run_once(setup: Setup, variant: Variant, data: BatchNormData) -> Row:
    forward, norm = build(setup, variant, data)
    torch.autograd.grad(forward(*data.inputs()), [*data.inputs(), norm.weight, norm.bias], data.g)
    return {}


def _measure(
    setup: Setup, variant: Variant, data: list[BatchNormData], reference: BatchNormReference, tensor_bytes: int
) -> Row:
    forward, norm = build(setup, variant, data[0])
    with timing.side_stream(setup.device):
        error = check_batch_norm(forward, norm, data[0], reference, lean=variant.lean)
        parameters = [norm.weight, norm.bias]
        buffers = [norm.running_mean, norm.running_var]

        def backward(output: torch.Tensor, one: BatchNormData) -> Any:
            return torch.autograd.grad(output, [*one.inputs(), *parameters], one.g, retain_graph=True)

        memory = timing.memory(
            lambda: forward(*data[0].inputs()), lambda output: backward(output, data[0]), [*parameters, *buffers]
        )
        fwd = timing.time_calls([partial(forward, *one.inputs()) for one in data], setup.device, quick=setup.smoke)
        outputs = [forward(*one.inputs()) for one in data]
        calls = [partial(backward, output, one) for output, one in zip(outputs, data)]
        bwd = timing.time_calls(calls, setup.device, quick=setup.smoke)
    return measured(error, fwd, bwd, memory, tensor_bytes)
