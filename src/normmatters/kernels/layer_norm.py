"""Layer norm and RMS norm by kernels: what the backends share around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normmatters.functional.layer_norm import layer_norm as plain_layer_norm
from normmatters.kernels.operators import Operator, needs_grad
from normmatters.norm import Norm, compute_dtype

#: Those of the gradients of weight and bias; None if there are to be none.
Dtypes = tuple[torch.dtype, torch.dtype] | None


class Options(NamedTuple):
    """What a layer norm is called with beside its tensors. A row is the last ``dims`` dimensions of the input."""

    eps: float
    constant: float
    p: float
    centered: bool  # layer norm; RMS norm subtracts no mean
    dims: int


def layer_norm_by(
    name: str,
    *,
    compute: Callable[..., tuple[Tensor, Tensor]],
    differentiate: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]],
    statistics_shape: Callable[[int, Options], tuple[int, int]],
    twice: bool = False,
) -> Callable[..., Tensor]:
    """Layer norm by the kernels of one backend.

    Args:
        name: of the operators.
        compute: ``(x, shape, weight, bias, options) -> (output, statistics)``. A row has ``shape``.
        differentiate: ``(g, x, shape, weight, statistics, options, dtypes)``, the gradients of x, and of weight and
            bias if their dtypes are not None.
        statistics_shape: of what ``differentiate`` needs of so many rows.
        twice: whether the gradient can be differentiated.
    """

    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
        return compute(x, x.shape[-options.dims :], weight, bias, options)

    def fake_forward(x: Tensor, weight: Any, bias: Any, options: Options) -> tuple[Tensor, Tensor]:
        shape = statistics_shape(x.numel() // math.prod(x.shape[-options.dims :]), options)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        return y, x.new_empty(shape, dtype=compute_dtype(x.dtype))

    def backward(
        g: Tensor,
        x: Tensor,
        weight: Tensor | None,
        statistics: Tensor,
        eps: float,
        constant: float,
        p: float,
        centered: bool,
        dims: int,
        parameters: bool,
        weight_dtype: torch.dtype,
        bias_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dtypes = (weight_dtype, bias_dtype) if parameters else None
        options = Options(eps, constant, p, centered, dims)
        return differentiate(g, x, x.shape[-dims:], weight, statistics, options, dtypes)

    def fake_backward(g: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        *_, dims, parameters, weight_dtype, bias_dtype = arguments
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not parameters:
            return dx, None, None
        shape = x.shape[-dims:]
        return dx, x.new_empty(shape, dtype=weight_dtype), x.new_empty(shape, dtype=bias_dtype)

    def save(ctx: Any, tensors: Sequence[Any], options: Options, results: tuple[Tensor, ...]) -> None:
        x, weight, bias = tensors
        ctx.save_for_backward(x, weight, results[1])
        ctx.options = options
        ctx.dtypes = (x.dtype if weight is None else weight.dtype, x.dtype if bias is None else bias.dtype)

    def gradients(ctx: Any, backward: Callable[..., Any], g: Tensor, _: None) -> tuple[Tensor | None, ...]:
        _, for_weight, for_bias, *_ = ctx.needs_input_grad
        dx, dweight, dbias = backward(g, *ctx.saved_tensors, *ctx.options, for_weight or for_bias, *ctx.dtypes)
        return dx, dweight if for_weight else None, dbias if for_bias else None

    def gradients_by_equation(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """As functions of g, x and weight."""
        x, weight, _ = ctx.saved_tensors
        eps, constant, p, centered, dims = ctx.options
        shape = x.shape[-dims:]
        norm = Norm(p, None, constant / Norm(p).scale_constant(math.prod(shape)), eps)
        inputs = [t for t in (x, weight) if t is not None and t.requires_grad]
        y = plain_layer_norm(x, shape, norm, weight, centered=centered)
        found = torch.autograd.grad(y, inputs, g, create_graph=True) if inputs else ()
        by_input = dict(zip(map(id, inputs), found))
        dbias = g.to(compute_dtype(g.dtype)).sum_to_size(shape).to(ctx.dtypes[1])
        return by_input.get(id(x)), by_input.get(id(weight)), dbias if ctx.needs_input_grad[2] else None

    operator = Operator(
        name,
        options=Options,
        forward=forward,
        fake_forward=fake_forward,
        save=save,
        backward=backward,
        fake_backward=fake_backward,
        gradients=gradients,
        twice=gradients_by_equation if twice else None,
    )

    def layer_norm(
        input: Tensor,
        normalized_shape: Sequence[int],
        norm: Norm,
        weight: Tensor | None,
        bias: Tensor | None,
        *,
        centered: bool = True,
    ) -> Tensor:
        constant = norm.scale_constant(math.prod(normalized_shape))
        options = Options(norm.epsilon(input.dtype), constant, float(norm.p), centered, len(normalized_shape))
        output: Tensor = operator(input, weight, bias, options, needs_grad=needs_grad(input, weight, bias))
        return output

    return layer_norm
