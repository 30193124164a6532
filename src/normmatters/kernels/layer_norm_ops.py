"""Layer norm and RMS norm as PyTorch operators, ``torch.ops.normmatters.layer_norm_*``, and as one eager autograd node.

The operators are for the compiler and work on a matrix whose rows are normalized. In eager mode the same kernels are
called from a :class:`torch.autograd.Function`: the dispatcher's way to a Python operator and its autograd formula costs
more time than a small layer's kernels take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normmatters.kernels.double_backward import once_differentiable
from normmatters.kernels.operators import LIBRARY, needs_operators, on_device, register, register_gradient
from normmatters.kernels.triton import layer_norm as kernels

LIBRARY.define(
    "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps, float constant, bool l1, bool centered) "
    "-> (Tensor, Tensor)"
)
LIBRARY.define(
    "layer_norm_backward(Tensor g, Tensor x, Tensor? weight, Tensor stats, float constant, bool l1, bool centered, "
    "bool parameters, ScalarType weight_dtype, ScalarType bias_dtype) -> (Tensor, Tensor, Tensor)"
)


def supported(input: Tensor, normalized_shape: Sequence[int]) -> str | None:
    """Why the kernels cannot take this input, or None if they can."""
    size = math.prod(normalized_shape)
    if not 0 < size <= kernels.MAX_FEATURES:
        return f"the kernels take rows of 1 to {kernels.MAX_FEATURES} features, not {size}"
    if input.numel() // size > kernels.MAX_ROWS:
        return f"the kernels take at most {kernels.MAX_ROWS} rows, not {input.numel() // size}"
    return None


def _dense(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    """y, shaped like the matrix x, and the statistics of its rows that the backward pass needs."""
    return kernels.forward(x.contiguous(), x.shape[1:], _dense(weight), _dense(bias), *arguments)


def _fake_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    *_, l1, centered = arguments
    stats = x.new_empty((kernels.planes(l1, centered), x.shape[0]), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), stats


def _backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    constant: float,
    l1: bool,
    centered: bool,
    parameters: bool,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias; the last two are empty unless ``parameters``."""
    dtypes = (weight_dtype, bias_dtype) if parameters else None
    dx, dweight, dbias = kernels.backward(
        g.contiguous(), x.contiguous(), x.shape[1:], _dense(weight), stats, constant, l1, centered, dtypes
    )
    return (
        dx,
        x.new_empty(0, dtype=weight_dtype) if dweight is None else dweight,
        x.new_empty(0, dtype=bias_dtype) if dbias is None else dbias,
    )


def _fake_backward(g: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, parameters, weight_dtype, bias_dtype = arguments
    count = x.shape[1] if parameters else 0
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(count, dtype=weight_dtype), x.new_empty(count, dtype=bias_dtype)


def _save(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, *kind: Any) -> None:
    ctx.save_for_backward(x, weight, stats)
    ctx.kind = kind
    ctx.dtypes = (x.dtype if weight is None else weight.dtype, x.dtype if bias is None else bias.dtype)


def _register() -> None:
    for name, kernel, fake in (
        ("layer_norm_forward", _forward, _fake_forward),
        ("layer_norm_backward", _backward, _fake_backward),
    ):
        register(name, kernel, fake)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, bias, _, constant, l1, centered = inputs
        ctx.mark_non_differentiable(output[1])
        _save(ctx, x, weight, bias, output[1], constant, l1, centered)

    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, weight, stats = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:3]
        dx, dweight, dbias = torch.ops.normmatters.layer_norm_backward(
            g, x, weight, stats, *ctx.kind, any(needs), *ctx.dtypes
        )
        return dx, dweight if needs[0] else None, dbias if needs[1] else None, None, None, None, None

    register_gradient("layer_norm_forward", setup_context, backward)


_register()


class _LayerNorm(torch.autograd.Function):
    """The eager node: input, weight and bias keep their shapes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float, *kind: Any
    ) -> Tensor:
        y, stats = kernels.forward(x.contiguous(), shape, _dense(weight), _dense(bias), eps, *kind)
        _save(ctx, x, weight, bias, stats, *kind)
        ctx.shape = shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, stats = ctx.saved_tensors
        _, need_weight, need_bias, *_ = ctx.needs_input_grad
        constant, l1, centered = ctx.kind
        dtypes = ctx.dtypes if need_weight or need_bias else None
        dx, dweight, dbias = kernels.backward(
            g.contiguous(), x.contiguous(), ctx.shape, _dense(weight), stats, constant, l1, centered, dtypes
        )
        return dx, dweight if need_weight else None, dbias if need_bias else None, None, None, None, None, None


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    kind: str,
    constant: float,
    centered: bool,
) -> Tensor:
    """Layer norm (``centered``) or RMS norm over the last dimensions; arguments are checked by the dispatcher.

    Args:
        input: (..., *normalized_shape), for which :func:`supported` has no objection.
        weight, bias: ``normalized_shape`` or None.
        kind: ``"l1"`` or ``"l2"``.
        constant: the number C of s = C·statistic.
    """
    if needs_operators():
        size = math.prod(normalized_shape)
        matrix = input.reshape(input.numel() // size, size)
        weight = None if weight is None else weight.reshape(size)
        bias = None if bias is None else bias.reshape(size)
        l1 = kind == "l1"
        y: Tensor = torch.ops.normmatters.layer_norm_forward(matrix, weight, bias, eps, constant, l1, centered)[0]
        return y.view(input.shape)
    with on_device(input.device):
        y = _LayerNorm.apply(input, weight, bias, normalized_shape, eps, constant, kind == "l1", centered)
    return y
