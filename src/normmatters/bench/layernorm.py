"""Layer norm and RMS norm over the last dimension, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from normmatters.bench import peers, timing
from normmatters.bench.check import RowNormData, check_row_norm, row_norm_reference
from normmatters.bench.harness import DTYPES, Row, Setup, Skip, attempt, measured
from normmatters.kernels import dispatch
from normmatters.norm import Norm

SHAPES = [(32768, 1024), (16384, 4096), (8192, 8192)]
SMOKE_SHAPES = [(8, 64)]
EPS = 1e-5

Forward = Callable[[RowNormData], Tensor]


def _shape(d: RowNormData) -> list[int]:
    return [d.x.shape[1]]


def _ours(p: float) -> Forward:
    norm = Norm(p, eps=EPS)
    return lambda d: dispatch.layer_norm(d.x, _shape(d), norm, d.weight, d.bias)


def _our_rms(p: float) -> Forward:
    norm = Norm(p, eps=EPS)
    return lambda d: dispatch.rms_norm(d.x, _shape(d), norm, d.weight)


def _native(d: RowNormData) -> Tensor:
    return F.layer_norm(d.x, _shape(d), d.weight, d.bias, EPS)


def _native_rms(d: RowNormData) -> Tensor:
    return F.rms_norm(d.x, _shape(d), d.weight, EPS)


def _liger(d: RowNormData) -> Tensor:
    result: Tensor = peers.liger("LigerLayerNormFunction").apply(d.x, d.weight, d.bias, EPS)
    return result


def _liger_rms(d: RowNormData) -> Tensor:
    # Its backward may overwrite the incoming gradient, which is used again here: the last argument forbids it.
    result: Tensor = peers.liger("LigerRMSNormFunction").apply(d.x, d.weight, EPS, 0.0, "llama", False)
    return result


@dataclass(frozen=True)
class Variant:
    """One norm; ``family`` names those that are compared with each other."""

    name: str
    family: str
    p: float
    norm: Forward
    ours: bool = True
    compile: bool = False
    needs: str | None = None


# The native forms of a family come first: the others' ratios refer to the fastest of them.
VARIANTS = [
    Variant("native", "layer", 2, _native, ours=False),
    Variant("native_compiled", "layer", 2, _native, ours=False, compile=True),
    Variant("liger", "layer", 2, _liger, ours=False, needs="LigerLayerNormFunction"),
    Variant("l1", "layer", 1, _ours(1)),
    Variant("l2", "layer", 2, _ours(2)),
    Variant("rms_native", "rms", 2, _native_rms, ours=False),
    Variant("rms_native_compiled", "rms", 2, _native_rms, ours=False, compile=True),
    Variant("rms_liger", "rms", 2, _liger_rms, ours=False, needs="LigerRMSNormFunction"),
    Variant("rms_l1", "rms", 1, _our_rms(1)),
    Variant("rms_l2", "rms", 2, _our_rms(2)),
]

AXES = {
    "dtype": ["bf16", "fp16"],
    "size": [f"{rows}x{features}" for rows, features in SHAPES + SMOKE_SHAPES],
    "variant": [v.name for v in VARIANTS],
}


def rows(setup: Setup) -> Iterator[Row]:
    """Every wanted row; bf16 unless fp16 is asked for."""
    for dtype in AXES["dtype"]:
        if dtype == "fp16" and not setup.only.words & {"fp16", "all"}:
            continue
        for shape in SMOKE_SHAPES if setup.smoke else SHAPES:
            axes = {"dtype": dtype, "size": f"{shape[0]}x{shape[1]}"}
            wanted = [v for v in VARIANTS if setup.only.allows(AXES, {**axes, "variant": v.name})]
            yield from _group(setup, shape, axes, [v for v in wanted if not (setup.smoke and v.compile)])


def _group(setup: Setup, shape: tuple[int, int], axes: dict[str, str], variants: list[Variant]) -> Iterator[Row]:
    if not variants:
        return
    dtype = DTYPES[axes["dtype"]]
    tensor_bytes = shape[0] * shape[1] * dtype.itemsize
    first = RowNormData.random(*shape, dtype, setup.device)
    data = [first] + [first.copies() for _ in range(timing.rotation(tensor_bytes, setup.device) - 1)]
    best: dict[str, float] = {}
    for variant in variants:
        if not setup.mine(axes["dtype"], axes["size"], variant.name):
            continue
        row: Row = {**axes, "variant": variant.name, "ours": variant.ours, "tensor_bytes": tensor_bytes}
        row = attempt(row, partial(_measure, setup, variant, data, tensor_bytes))
        if row["status"] == "ok" and setup.share is None:
            total = row["fwd_ms"] + row["bwd_ms"]
            if "native" in variant.name:
                best[variant.family] = min(total, best.get(variant.family, total))
            row["ratio"] = total / best[variant.family] if variant.family in best else None
        yield row
        if variant.compile:
            setup.free()
    data.clear()
    setup.free()


def _measure(setup: Setup, variant: Variant, data: list[RowNormData], tensor_bytes: int) -> Row:
    if variant.compile and setup.no_compiler:
        raise Skip(setup.no_compiler)
    if variant.needs is not None and peers.liger(variant.needs) is None:
        raise Skip("Liger's kernels are not installed, or do not run here")
    norm = peers.compiled(variant.norm) if variant.compile else variant.norm
    rms = variant.family == "rms"

    def backward(output: Tensor, one: RowNormData) -> tuple[Tensor, ...]:
        inputs = (one.x, one.weight) if rms else (one.x, one.weight, one.bias)
        return torch.autograd.grad(output, inputs, one.g, retain_graph=True)

    first = data[0]
    if setup.share is not None:
        backward(norm(first), first)
        return {}
    with timing.side_stream(setup.device):
        output = norm(first)
        results = [output, *backward(output, first)]
        error = check_row_norm(results, row_norm_reference(first, variant.p, rms=rms, eps=EPS), first)
        del output, results
        memory = timing.memory(lambda: norm(first), lambda out: backward(out, first), [first.weight, first.bias])
        fwd = timing.time_calls([partial(norm, one) for one in data], setup.device, quick=setup.smoke)
        outputs = [norm(one) for one in data]
        calls = [partial(backward, output, one) for output, one in zip(outputs, data)]
        bwd = timing.time_calls(calls, setup.device, quick=setup.smoke)
    return measured(error, fwd, bwd, memory, tensor_bytes)
