"""Layer norm and RMS norm in L1, L2 and Lp on a CPU; the kernels are in native/layer_norm.cpp.

The forward pass reads the input and writes the output; the backward pass reads gradient and input and writes dx: a row
stays in the cache for whatever else is done to it. The gradients of weight and bias are summed on the way, in an order
that depends on the shape alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normmatters.functional.layer_norm import layer_norm as plain_layer_norm
from normmatters.kernels.cpu import DTYPES, library
from normmatters.kernels.operators import LIBRARY, needs_operators, register, register_gradient
from normmatters.norm import Norm, compute_dtype

MAX_FEATURES = 2**22  # one thread works along a whole row
_STATISTICS = 5  # numbers of a row that the backward pass needs: `Row` in the C++ file
_KINDS = {1.0: 0, 2.0: 1}  # by p; 2 is a general p


@functools.cache
def _functions() -> tuple[Any, Any]:
    opened = library()
    assert opened is not None, "why_not_native was not asked"
    return (
        opened.function("nm_layer_norm", "pppppiiiiiddd"),
        opened.function("nm_layer_norm_backward", "ppppppppiiiiiiddd"),
    )


def _computed(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Weight or bias as the kernels take them."""
    return None if vector is None else vector.to(dtype).contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows(x: Tensor, shape: Sequence[int]) -> tuple[int, int]:
    size = math.prod(shape)
    return x.numel() // size, size


def forward(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, *kind: Any
) -> tuple[Tensor, Tensor]:
    """The output, and the statistics of each row. ``kind``: constant, p, centered."""
    constant, p, centered = kind
    x, dtype, (rows, size) = x.contiguous(), compute_dtype(x.dtype), _rows(x, shape)
    y, statistics = torch.empty_like(x), torch.empty(rows, _STATISTICS, dtype=dtype)
    weight, bias = _computed(weight, dtype), _computed(bias, dtype)
    tensors = [_pointer(t) for t in (x, y, weight, bias, statistics)]
    _functions()[0](*tensors, rows, size, DTYPES[x.dtype], _KINDS.get(p, 2), centered, p, constant, eps)
    return y, statistics


def backward(
    g: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None, statistics: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, and if their ``dtypes`` are given of weight and bias.

    ``arguments``: constant, p, centered, dtypes.
    """
    constant, p, centered, dtypes = arguments
    g, x, dtype, (rows, size) = g.contiguous(), x.contiguous(), compute_dtype(x.dtype), _rows(x, shape)
    dx, weight = torch.empty_like(x), _computed(weight, dtype)
    # Parts of the rows that are summed each by itself; the same for any number of threads.
    parts = max(1, min(128, rows // 16, max(16, 2**20 // size)))
    dweight = dbias = scratch = None
    if dtypes is not None:
        dweight, dbias = torch.empty(2, size, dtype=dtype).unbind()
        scratch = torch.empty(4 * parts * size, dtype=torch.float64)
    tensors = [_pointer(t) for t in (g, x, dx, weight, statistics, dweight, dbias, scratch)]
    kind = DTYPES[x.dtype], _KINDS.get(p, 2), centered, p, constant
    _functions()[1](*tensors, parts, rows, size, *kind, 0.0)
    if dweight is None or dbias is None:
        return dx, None, None
    return dx, dweight.view(*shape).to(dtypes[0]), dbias.view(*shape).to(dtypes[1])


# Operators, for compilers ---------------------------------------------------------------------------------------------

LIBRARY.define(
    "native_layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, float constant, float p, bool centered) "
    "-> (Tensor, Tensor)"
)
LIBRARY.define(
    "native_layer_norm_backward(Tensor g, Tensor x, Tensor? weight, Tensor statistics, float constant, float p, "
    "bool centered, bool parameters, ScalarType weight_dtype, ScalarType bias_dtype) -> (Tensor, Tensor, Tensor)"
)


def _forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return forward(x, x.shape[1:], *arguments)


def _fake_forward(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    statistics = x.new_empty((x.shape[0], _STATISTICS), dtype=compute_dtype(x.dtype))
    return torch.empty_like(x, memory_format=torch.contiguous_format), statistics


def _backward(g: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias; the last two are empty unless ``parameters``."""
    *before, parameters, weight_dtype, bias_dtype = arguments
    dtypes = (weight_dtype, bias_dtype) if parameters else None
    dx, dweight, dbias = backward(g, x, x.shape[1:], *before, dtypes)
    if dweight is None or dbias is None:
        return dx, x.new_empty(0, dtype=weight_dtype), x.new_empty(0, dtype=bias_dtype)
    return dx, dweight, dbias


def _fake_backward(g: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, parameters, weight_dtype, bias_dtype = arguments
    count = x.shape[1] if parameters else 0
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(count, dtype=weight_dtype), x.new_empty(count, dtype=bias_dtype)


def _save(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, *kind: Any) -> None:
    ctx.save_for_backward(x, weight, statistics)
    ctx.kind = kind  # constant, p, centered
    ctx.dtypes = (x.dtype if weight is None else weight.dtype, x.dtype if bias is None else bias.dtype)


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, *kind = inputs
    ctx.mark_non_differentiable(output[1])
    _save(ctx, x, weight, bias, output[1], *kind)


def _operator_gradient(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, statistics = ctx.saved_tensors
    needs = ctx.needs_input_grad[1:3]
    dx, dweight, dbias = torch.ops.normmatters.native_layer_norm_backward(
        g, x, weight, statistics, *ctx.kind, any(needs), *ctx.dtypes
    )
    return dx, dweight if needs[0] else None, dbias if needs[1] else None, None, None, None, None


register("native_layer_norm", _forward, _fake_forward)
register("native_layer_norm_backward", _backward, _fake_backward)
register_gradient("native_layer_norm", _save_operator, _operator_gradient)

# Eager mode -----------------------------------------------------------------------------------------------------------


class _LayerNorm(torch.autograd.Function):
    """The eager node. The dispatcher's way to a Python operator takes longer than a small layer's kernels run."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], norm: Norm, *kind: Any
    ) -> Tensor:
        y, statistics = forward(x, shape, weight, bias, norm.epsilon(x.dtype), *kind)
        _save(ctx, x, weight, bias, statistics, *kind)
        ctx.shape, ctx.norm = shape, norm
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, statistics = ctx.saved_tensors
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # the gradient is to be differentiated again: by the plain equation
            dx, dweight, dbias = _differentiable(ctx, g, x, weight)
        else:
            dtypes = ctx.dtypes if needs_weight or needs_bias else None
            dx, dweight, dbias = backward(g, x, ctx.shape, weight, statistics, *ctx.kind, dtypes)
        return dx, dweight if needs_weight else None, dbias if needs_bias else None, *[None] * 5


def _differentiable(ctx: Any, g: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients as functions of g, x and weight."""
    inputs = [t for t in (x, weight) if t is not None and t.requires_grad]
    y = plain_layer_norm(x, ctx.shape, ctx.norm, weight, centered=ctx.kind[-1])
    gradients = dict(zip(map(id, inputs), torch.autograd.grad(y, inputs, g, create_graph=True) if inputs else ()))
    dbias = g.to(compute_dtype(g.dtype)).sum_to_size(list(ctx.shape)).to(ctx.dtypes[1])
    return gradients.get(id(x)), gradients.get(id(weight)), dbias


def why_not(input: Tensor, normalized_shape: Sequence[int], norm: Norm) -> str:
    """Why the kernels cannot take this call; empty if they can."""
    if norm.kind not in ("l1", "l2", "lp"):
        return f"the native layer norm takes L1, L2 and Lp, not {norm.kind}"
    size = math.prod(normalized_shape)
    if not 0 < size <= MAX_FEATURES:
        return f"the kernels take rows of 1 to {MAX_FEATURES} features, not {size}"
    return ""


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    centered: bool = True,
) -> Tensor:
    """Layer norm, or with ``centered=False`` RMS norm, over the last dimensions. The caller checks the arguments.

    Args:
        input: (..., *normalized_shape), for which :func:`why_not` has no objection.
        weight, bias: ``normalized_shape`` or None.
    """
    size = math.prod(normalized_shape)
    kind = norm.scale_constant(size), float(norm.p), centered
    if needs_operators():
        matrix = input.reshape(input.numel() // size, size)
        weight = None if weight is None else weight.reshape(size)
        bias = None if bias is None else bias.reshape(size)
        eps = norm.epsilon(input.dtype)
        y: Tensor = torch.ops.normmatters.native_layer_norm(matrix, weight, bias, eps, *kind)[0]
        return y.view(input.shape)
    y = _LayerNorm.apply(input, weight, bias, normalized_shape, norm, *kind)
    return y
