"""Layer norm and RMS norm over the last dimension, forward and backward."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from normmatters.bench import peers
from normmatters.bench.check import RowNormData, check_row_norm, row_norm_reference
from normmatters.bench.harness import DTYPES, Case, Layer, Row, Setup, Skip, compare_with_native, layer_cases, rows_of
from normmatters.kernels import dispatch
from normmatters.norm import Norm

SHAPES = [(32768, 1024), (16384, 4096), (8192, 8192)]
SMOKE_SHAPES = [(8, 64)]
EPS = 1e-5

Forward = Callable[[RowNormData], Tensor]


def _shape(d: RowNormData) -> list[int]:
    return [d.x.shape[1]]


def ours(p: float) -> Forward:
    """Our layer norm in Lp."""
    norm = Norm(p, eps=EPS)
    return lambda d: dispatch.layer_norm(d.x, _shape(d), norm, d.weight, d.bias)


def our_rms(p: float) -> Forward:
    """Our RMS norm in Lp."""
    norm = Norm(p, eps=EPS)
    return lambda d: dispatch.rms_norm(d.x, _shape(d), norm, d.weight)


def _native(d: RowNormData) -> Tensor:
    return F.layer_norm(d.x, _shape(d), d.weight, d.bias, EPS)


def _native_rms(d: RowNormData) -> Tensor:
    return F.rms_norm(d.x, _shape(d), d.weight, EPS)


def peer(package: str, module: str, name: str) -> Any:
    """Another package's kernel; :class:`Skip` where there is none."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:  # without a GPU their import fails too
        raise Skip(f"{package}'s kernels are not installed, or do not run here") from None


def _liger(d: RowNormData) -> Tensor:
    function = peer("Liger", "liger_kernel.ops.layer_norm", "LigerLayerNormFunction")
    return function.apply(d.x, d.weight, d.bias, EPS)  # type: ignore[no-any-return]


def _liger_rms(d: RowNormData) -> Tensor:
    function = peer("Liger", "liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    # Its backward may overwrite the incoming gradient, which is used again here: the last argument forbids it.
    return function.apply(d.x, d.weight, EPS, 0.0, "llama", False)  # type: ignore[no-any-return]


def _quack_rms(d: RowNormData) -> Tensor:
    return peer("quack", "quack.rmsnorm", "rmsnorm")(d.x, d.weight, eps=EPS)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Variant:
    """One norm; ``family`` names those that are compared with each other."""

    name: str
    family: str
    p: float
    norm: Forward
    ours: bool = True
    compile: bool = False
    on_cpu: bool = True


# The native forms of a family come first: the others' ratios refer to the fastest of them.
VARIANTS = [
    Variant("native", "layer", 2, _native, ours=False),
    Variant("native_compiled", "layer", 2, _native, ours=False, compile=True),
    Variant("liger", "layer", 2, _liger, ours=False, on_cpu=False),
    Variant("l1", "layer", 1, ours(1)),
    Variant("l2", "layer", 2, ours(2)),
    Variant("rms_native", "rms", 2, _native_rms, ours=False),
    Variant("rms_native_compiled", "rms", 2, _native_rms, ours=False, compile=True),
    Variant("rms_liger", "rms", 2, _liger_rms, ours=False, on_cpu=False),
    # quack has a layer norm too, but without a backward pass
    Variant("rms_quack", "rms", 2, _quack_rms, ours=False, on_cpu=False),
    Variant("rms_l1", "rms", 1, our_rms(1)),
    Variant("rms_l2", "rms", 2, our_rms(2)),
]

AXES = {
    "dtype": ["bf16", "fp16"],
    "size": [f"{rows}x{features}" for rows, features in SHAPES + SMOKE_SHAPES],
    "variant": [v.name for v in VARIANTS],
}


def rows(setup: Setup) -> Iterator[Row]:
    """Every wanted row; bf16 unless fp16 is asked for."""
    families = {v.name: v.family for v in VARIANTS}
    return rows_of(setup, cases(setup), partial(compare_with_native, family=families.__getitem__))


def cases(setup: Setup) -> Iterator[Case]:
    for dtype in AXES["dtype"]:
        if dtype == "fp16" and not setup.only.words & {"fp16", "all"}:
            continue
        for shape in SMOKE_SHAPES if setup.smoke else SHAPES:
            axes = {"dtype": dtype, "size": f"{shape[0]}x{shape[1]}"}
            wanted = [v for v in VARIANTS if setup.only.allows(AXES, {**axes, "variant": v.name})]
            wanted = [v for v in wanted if not (setup.smoke and v.compile)]
            draw = partial(RowNormData.random, *shape, DTYPES[dtype], setup.device)
            yield from layer_cases(setup, axes, math.prod(shape) * DTYPES[dtype].itemsize, wanted, draw, layer_of)
            setup.free()


def layer_of(variant: Variant, data: RowNormData) -> Layer:
    """The variant, with the data's parameters."""
    norm = peers.compiled(variant.norm) if variant.compile else variant.norm
    rms = variant.family == "rms"

    def sources(one: RowNormData) -> Sequence[Tensor]:
        return (one.x, one.weight) if rms else (one.x, one.weight, one.bias)

    def check() -> float:
        output = norm(data)
        results = [output, *torch.autograd.grad(output, sources(data), data.g)]
        return check_row_norm(results, row_norm_reference(data, variant.p, rms=rms, eps=EPS), data)

    return Layer(norm, sources, check, [data.weight, data.bias])
