"""Layer norm and RMS norm as PyTorch operators: ``torch.ops.normmatters.layer_norm_forward`` and ``…_backward``.

Both work on a matrix whose rows are normalized; :func:`layer_norm` brings any input to that shape and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normmatters.kernels.triton import layer_norm as kernels


def supported(input: Tensor, normalized_shape: Sequence[int]) -> str | None:
    """Why the kernels cannot take this input, or None if they can."""
    if input.dtype not in kernels.DTYPES:
        return f"the kernels take float16, bfloat16 and float32, not {input.dtype}"
    size = math.prod(normalized_shape)
    if not 0 < size <= kernels.MAX_FEATURES:
        return f"the kernels take rows of 1 to {kernels.MAX_FEATURES} features, not {size}"
    if input.numel() // size > kernels.MAX_ROWS:
        return f"the kernels take at most {kernels.MAX_ROWS} rows, not {input.numel() // size}"
    return None


@torch.library.custom_op("normmatters::layer_norm_forward", mutates_args=())
def layer_norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, constant: float, l1: bool, centered: bool
) -> tuple[Tensor, Tensor]:
    """y, shaped like the matrix x, and the statistics of its rows that the backward pass needs."""
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    with torch.cuda.device_of(x):  # kernels run on the current device
        return kernels.forward(x.contiguous(), weight, bias, eps, constant, l1, centered)


@layer_norm_forward.register_fake
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, constant: float, l1: bool, centered: bool
) -> tuple[Tensor, Tensor]:
    stats = x.new_empty((kernels.planes(l1, centered), x.shape[0]), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), stats


@torch.library.custom_op("normmatters::layer_norm_backward", mutates_args=())
def layer_norm_backward(
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
    weight = None if weight is None else weight.contiguous()
    with torch.cuda.device_of(x):
        return kernels.backward(
            g.contiguous(), x.contiguous(), weight, stats, constant, l1, centered, parameters, weight_dtype, bias_dtype
        )


@layer_norm_backward.register_fake
def _(
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
    count = x.shape[1] if parameters else 0
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(count, dtype=weight_dtype), x.new_empty(count, dtype=bias_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, constant, l1, centered = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.arguments = (constant, l1, centered)
    ctx.dtypes = tuple(x.dtype if vector is None else vector.dtype for vector in (weight, bias))


def _backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, stats = ctx.saved_tensors
    need_weight, need_bias = ctx.needs_input_grad[1:3]
    dx, dweight, dbias = layer_norm_backward(g, x, weight, stats, *ctx.arguments, need_weight or need_bias, *ctx.dtypes)
    return dx, dweight if need_weight else None, dbias if need_bias else None, None, None, None, None


layer_norm_forward.register_autograd(_backward, setup_context=_setup_context)


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
    size = math.prod(normalized_shape)
    matrix = input.reshape(input.numel() // size, size)
    weight = None if weight is None else weight.reshape(size)
    bias = None if bias is None else bias.reshape(size)
    y: Tensor = layer_norm_forward(matrix, weight, bias, eps, constant, kind == "l1", centered)[0]
    return y.view(input.shape)
