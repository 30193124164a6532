"""Bounded weight norm of many layers as operators: ``torch.ops.normmatters.bounded_weights`` and its backward.

One autograd node for all layers. The operators speak of one flat buffer, because the outputs of an operator may not
share memory; :func:`bounded_weights_of` cuts it into weights, and autograd joins their gradients again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normmatters.kernels import dispatch
from normmatters.kernels.triton import weight_norm as kernels


def supported(v: Tensor, rho: Tensor, *, dim: int | None, p: float, k: int | None) -> str | None:
    """Why the kernels cannot take this weight, or None if they can."""
    if not (v.is_cuda or (dispatch._INTERPRETED and v.device.type == "cpu")):
        return f"they run on a CUDA device, not on {v.device}"
    if v.dtype not in kernels.DTYPES or rho.dtype != torch.float32:
        return f"they take float16, bfloat16 and float32 with a float32 rho, not {v.dtype} with {rho.dtype}"
    if v.device != rho.device:
        return f"the weight is on {v.device} and its rho on {rho.device}"
    if dim is None or dim % v.ndim != 0:
        return f"they take the slices along dimension 0, not {dim}"
    if k is not None or p not in (1, 2, math.inf):
        return f"they take p = 1, 2 and infinity, not p = {p} with k = {k}"
    if not v.is_contiguous():
        order = _memory_order(v)
        if not v.permute(order).is_contiguous() or any(v.shape[d] > 1 for d in order[: order.index(0)]):
            return f"the slices of a weight with strides {v.stride()} are not dense in memory"
    return None


def _memory_order(v: Tensor) -> list[int]:
    """The dimensions of ``v`` from the slowest to the fastest."""
    strides = v.stride()
    return sorted(range(v.ndim), key=lambda d: -strides[d])


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """A stretch of the flat buffer with the shape and memory order of ``like``."""
    order = _memory_order(like)
    if order == list(range(like.ndim)):
        return flat.view(like.shape)
    inverse = [order.index(d) for d in range(like.ndim)]
    return flat.view([like.shape[d] for d in order]).permute(inverse)


def _cut(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    return [_shaped(piece, one) for piece, one in zip(flat.split([x.numel() for x in like]), like)]


@torch.library.custom_op("normmatters::bounded_weights", mutates_args=())
def bounded_weights(v: list[Tensor], rho: list[Tensor], p: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """ρ·v/‖v‖_p of all tensors as one flat buffer of ``dtype``, and the norms of all rows. p: 1, 2, or 0 for ∞."""
    with torch.cuda.device_of(v[0]):  # kernels run on the current device
        return kernels.forward(v, rho, p, dtype)


@bounded_weights.register_fake
def _(v: list[Tensor], rho: list[Tensor], p: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    numel, rows = kernels.sizes(v)
    return v[0].new_empty(numel, dtype=dtype), v[0].new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("normmatters::bounded_weights_backward", mutates_args=())
def bounded_weights_backward(g: Tensor, v: list[Tensor], rho: list[Tensor], norms: Tensor, p: int) -> Tensor:
    """The gradients of all v as one flat buffer."""
    with torch.cuda.device_of(v[0]):
        return kernels.backward(g.contiguous(), v, rho, norms, p)


@bounded_weights_backward.register_fake
def _(g: Tensor, v: list[Tensor], rho: list[Tensor], norms: Tensor, p: int) -> Tensor:
    return v[0].new_empty(kernels.sizes(v)[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    v, rho, p, _ = inputs
    ctx.save_for_backward(*v, *rho, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.p = p


def _backward(ctx: Any, g: Tensor, _: Any) -> tuple[list[Tensor], list[None], None, None]:
    *tensors, norms = ctx.saved_tensors
    v, rho = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    return _cut(bounded_weights_backward(g, v, rho, norms, ctx.p), v), [None] * len(rho), None, None


bounded_weights.register_autograd(_backward, setup_context=_setup_context)


def bounded_weights_of(v: list[Tensor], rho: list[Tensor], p: float, dtype: torch.dtype) -> list[Tensor]:
    """The weights ρ·v/‖v‖_p of many layers, each shaped and laid out as its v, in ``dtype``.

    Args:
        v: tensors of one device and dtype for which :func:`supported` has no objection.
        rho: a scalar for each.
        p: 1, 2 or ``math.inf``.
    """
    # Rows of odd lengths last: they would push all that follow them out of line for wide loads.
    order = sorted(range(len(v)), key=lambda i: v[i].numel() // v[i].shape[0] % 4 != 0)
    tensors = [v[i] for i in order]
    code = kernels.INF if p == math.inf else int(p)
    flat: Tensor = bounded_weights(tensors, [rho[i] for i in order], code, dtype)[0]
    weights = dict(zip(order, _cut(flat, tensors)))
    return [weights[i] for i in range(len(v))]
