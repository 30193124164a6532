"""Weight norm, bounded and classic, on all convolutions of ResNet-50: what it adds to plain weights, beside torch's.

``weights`` computes every weight in fp16, as autocast would, in a forward pass of nothing else, and the gradients back
from them. ``step`` is the training step of ``resnet50`` with mean-only batch norm (F15) and fp16 autocast.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from normmatters.bench import check, peers, timing
from normmatters.bench.harness import Case, Layer, Row, Setup, compare_with, rows_of
from normmatters.bench.resnet50 import Step, build, check_same
from normmatters.functional import bounded_weight
from normmatters.functional.weight import slice_norm
from normmatters.nn.batchnorm import MeanOnlyBatchNorm2d
from normmatters.weight_norm import apply_weight_norm

DTYPE = torch.float16


def _torch_weight_norm(model: nn.Module) -> None:
    for layer in _convolutions(model):
        nn.utils.parametrizations.weight_norm(layer)


def _ours(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: apply_weight_norm(model, filter=lambda _, module: isinstance(module, nn.Conv2d), **options)


# "none" comes first: the others' cost is what they add to it.
VARIANTS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda model: None,
    "torch": _torch_weight_norm,
    "classic": _ours(kind="classic"),
    "bounded": _ours(),
    "bounded_l1": _ours(p=1),
}
_OURS = VARIANTS.keys() - {"none", "torch"}
AXES = {"part": ["weights", "step"], "mode": ["eager", "compiled"], "variant": list(VARIANTS)}
# Compiled rows come last, as they take half a minute each; of these first the steps, which say what training costs.
_ORDER = (("weights", "eager"), ("step", "eager"), ("step", "compiled"), ("weights", "compiled"))


def rows(setup: Setup) -> Iterator[Row]:
    """Every wanted row. Nothing is compiled beforehand for the eager ones, so that they are there within seconds."""
    return rows_of(setup, cases(setup), partial(compare_with, "none"), eager_first=True)


def cases(setup: Setup) -> Iterator[Case]:
    for (part, mode), variant in itertools.product(_ORDER, VARIANTS):
        names = {"part": part, "mode": mode, "variant": variant}
        if setup.only.allows(AXES, names) and _usual(setup, names):
            measure = _measure_weights if part == "weights" else _measure_step
            compile = mode == "compiled"
            yield Case(names, partial(measure, setup, variant, compile), variant in _OURS, compile)
            setup.free()


def _usual(setup: Setup, axes: dict[str, str]) -> bool:
    if axes["mode"] == "eager":
        return setup.share is None or not setup.only.default()  # eager rows have nothing to compile
    return not setup.smoke and (axes["variant"] not in ("classic", "bounded_l1") or not setup.only.default())


def _convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def weights_of(model: nn.Module, variant: str, dtype: torch.dtype, *, compile: bool = False) -> tuple[Layer, Any]:
    """A layer that computes all convolutions' weights in ``dtype`` by ``variant``, and its data: their gradients ``g``.

    The model's forward pass computes them alone, so that what it does before a forward pass is done.
    """
    layers = _convolutions(model)
    parameters: list[list[Tensor]] = []  # of each weight: [weight], [v], or [g, v]
    for layer in layers:
        parametrizations: Any = getattr(layer, "parametrizations", None)
        parameters.append([layer.weight] if parametrizations is None else list(parametrizations.weight.parameters()))
    gradients = SimpleNamespace(g=[torch.empty_like(p[-1], dtype=dtype).normal_() for p in parameters])
    leaves = [p for group in parameters for p in group]
    model.forward = lambda: [layer.weight.to(dtype) for layer in layers]

    def compute() -> list[Tensor]:
        with torch.autocast(leaves[0].device.type, dtype, enabled=dtype != torch.float32):
            return model()  # type: ignore[no-any-return]

    forward = peers.compiled(compute) if compile else compute

    def check_weights() -> float:
        weights = forward()
        flat = iter(torch.autograd.grad(weights, leaves, gradients.g))
        error = 0.0
        for group, weight, g in zip(parameters, weights, gradients.g):
            results = [weight, *(next(flat) for _ in group)]
            error = max(error, check.compare_weights(results, _reference(group, variant, g), dtype))
        return error

    return Layer(lambda _: forward(), lambda _: leaves, check_weights), gradients


def _reference(parameters: list[Tensor], variant: str, g: Tensor) -> list[Tensor]:
    """The weight and the gradients of its parameters, in float64 (F11, or F12 and F13 for the bounded)."""
    exact = [p.detach().double().requires_grad_() for p in parameters]
    if variant == "none":
        weight = exact[0] * 1
    elif variant in ("torch", "classic"):
        weight = exact[0] * exact[1] / slice_norm(exact[1])
    else:
        p = 1 if variant == "bounded_l1" else 2
        norms = slice_norm(exact[0].detach(), p=p).flatten()
        rho = float(torch.linalg.vector_norm(norms, p)) / norms.numel() ** (1 / p)
        weight = bounded_weight(exact[0], rho, p=p)
    return [weight.detach(), *torch.autograd.grad(weight, exact, g.double())]


def _model(setup: Setup, variant: str) -> nn.Module:
    torch.manual_seed(0)
    model = build(setup, MeanOnlyBatchNorm2d).to(setup.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    VARIANTS[variant](model)
    return model  # type: ignore[no-any-return]


def _measure_weights(setup: Setup, variant: str, compile: bool) -> Row:
    layer, gradients = weights_of(_model(setup, variant), variant, DTYPE, compile=compile)

    def both() -> tuple[Tensor, ...]:
        return layer.backward(gradients, layer.forward(gradients))

    if setup.share is not None:
        both()
        return {}
    with timing.side_stream(setup.device):
        error = layer.check()
        took = timing.time_calls([both], setup.device, quick=setup.smoke)
    # Launching 50 layers one by one is part of what weight norm costs in eager mode: the time is that without graphs.
    return {"error": error, "ms": took.eager_ms, "graph_ms": took.graph_ms, "peak_bytes": None, "note": took.note}


def _measure_step(setup: Setup, variant: str, compile: bool) -> Row:
    model = _model(setup, variant)
    step = Step(setup, model, DTYPE, compile=compile)
    if setup.share is not None:
        step.probe(step.model, model)
        return {}
    if compile and variant in _OURS:
        check_same(step, model, model)
    return {"error": None, **step.measure()}
