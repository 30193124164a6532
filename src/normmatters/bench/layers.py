"""Batch norm + ReLU and batch norm + add + ReLU in training, one layer at a time, at the shapes of ResNet-50."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from normmatters.bench import peers
from normmatters.bench.check import BatchNormData, check_batch_norm
from normmatters.bench.harness import DTYPES, Case, Layer, Row, Setup, compare_with_native, layer_cases, rows_of
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

AXES = {
    "dtype": ["fp16", "bf16"],
    "layout": ["cl", "nchw"],
    "form": ["relu", "add_relu"],
    "size": ["x".join(map(str, shape)) for shape in SHAPES + SMOKE_SHAPES],
    "variant": [v.name for v in VARIANTS],
}


def rows(setup: Setup) -> Iterator[Row]:
    """Every wanted row, one at a time. The default is fp16 channels_last whole, and the rest at two shapes."""
    return rows_of(setup, cases(setup), compare_with_native)


def cases(setup: Setup) -> Iterator[Case]:
    first = True
    shapes = SMOKE_SHAPES if setup.smoke else SHAPES
    for dtype, layout, shape, form in itertools.product(AXES["dtype"], AXES["layout"], shapes, AXES["form"]):
        if setup.only.default() and not setup.smoke and not _usual(dtype, layout, shape):
            continue
        axes = {"dtype": dtype, "layout": layout, "form": form, "size": "x".join(map(str, shape))}
        wanted = [v for v in VARIANTS if setup.only.allows(AXES, {**axes, "variant": v.name})]
        if setup.smoke:  # one compiled peer shows that it works; each takes many seconds
            wanted = [v for v in wanted if not v.compile or (first and v.name == "native_compiled")]
            first = first and not wanted
        elif setup.only.default() and shape not in SAMPLE:
            wanted = [v for v in wanted if v.name != "naive_l1_compiled"]
        dtype_, last, residual = DTYPES[dtype], layout == "cl", form == "add_relu"
        draw = partial(BatchNormData.random, shape, dtype_, setup.device, last=last, residual=residual)
        tensor_bytes = math.prod(shape) * dtype_.itemsize
        yield from layer_cases(setup, axes, tensor_bytes, wanted, draw, partial(layer_of, setup))
        setup.free()


def _usual(dtype: str, layout: str, shape: Shape) -> bool:
    odd = (dtype != "fp16") + (layout != "cl")
    return odd == 0 or (odd == 1 and shape in SAMPLE)


def layer_of(setup: Setup, variant: Variant, data: BatchNormData) -> Layer:
    """The variant with the data's parameters."""
    module = variant.build(data.x.shape[1]).to(setup.device)
    norm: Any = module.norm if isinstance(module, peers.NativeBatchNormReLU) else module
    with torch.no_grad():
        for own, given in ((norm.weight, data.weight), (norm.bias, data.bias)):
            if own is not None:
                own.copy_(given)
    forward = peers.compiled(module) if variant.compile else module
    parameters = [*module.parameters()]
    return Layer(
        forward=lambda one: forward(*one.inputs()),
        sources=lambda one: [*one.inputs(), *parameters],
        check=lambda: check_batch_norm(forward, norm, data, data.reference(variant.kind), lean=variant.lean),
        state=[*parameters, norm.running_mean, norm.running_var],
    )
