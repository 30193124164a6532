"""Bounded weight norm of many layers as one eager autograd node.

It is no operator: what watches operators (compilers, dispatch modes) has each layer compute its own weight. So the
kernels are called without the dispatcher's long way, and read the gradients where the layers left them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normmatters.functional.once import once_differentiable
from normmatters.kernels import backends
from normmatters.kernels.library import on_device
from normmatters.kernels.triton import weight_norm as kernels
from normmatters.kernels.triton.rows import places_of


def supported(v: Tensor, rho: Tensor, *, dim: int | None, p: float, k: int | None) -> str | None:
    """Why the kernels cannot take this weight, or None if they can."""
    if not (v.is_cuda or (backends.INTERPRETED and v.device.type == "cpu")):
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


def _code(p: float) -> int:
    return kernels.INF if p == math.inf else int(p)


class Together:
    """The weights ρ·v/‖v‖_p of many layers: made once for tensors of these shapes and strides, called often.

    Args:
        v: tensors of one device and dtype for which :func:`supported` has no objection.
        p: 1, 2 or ``math.inf``.
        dtype: of the weights, each shaped and laid out as its v.

    Example::

        >>> v, rho = [torch.randn(4, 3, device="cuda")], [torch.ones((), device="cuda")]
        >>> (weight,) = Together(v, 2, torch.float16)(v, rho)
    """

    def __init__(self, v: Sequence[Tensor], p: float, dtype: torch.dtype) -> None:
        self.plan = kernels.Plan(v, _code(p), dtype)
        places, _ = places_of([x.numel() for x in v])
        self._views = [(x.shape, x.stride(), place) for x, place in zip(v, places)]

    def __call__(self, v: Sequence[Tensor], rho: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``rho``: a float32 scalar for each v."""
        with on_device(v[0].device):
            weights: tuple[Tensor, ...] = _BoundedWeights.apply(self, rho, *v)
        return weights

    def cut(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The pieces of a flat buffer, each shaped and laid out as its v."""
        return tuple([flat.as_strided(*view) for view in self._views])

    def laid_out(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, each laid out as its v: gradients come in any order, and so may what hooks packed when saved."""
        laid = [*tensors]
        for i, (stride, (_, wanted, _)) in enumerate(zip(map(Tensor.stride, laid), self._views)):
            if stride != wanted:
                laid[i] = _restrided(laid[i], wanted)
        return laid


def _restrided(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """``x`` with these strides; those of dimensions of size 1 do not matter."""
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), stride)):
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


class _BoundedWeights(torch.autograd.Function):
    """The eager node of all layers' weights."""

    @staticmethod
    def forward(ctx: Any, together: Together, rho: Sequence[Tensor], *v: Tensor) -> tuple[Tensor, ...]:
        flat, norms = together.plan.forward(v, rho)
        ctx.save_for_backward(norms, *v, *rho)
        ctx.together = together
        return together.cut(flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        norms, *tensors = ctx.saved_tensors
        together: Together = ctx.together
        v, rho = together.laid_out(tensors[: len(gradients)]), tensors[len(gradients) :]
        kept = together.laid_out(gradients)
        dv = together.plan.backward([*map(Tensor.data_ptr, kept)], v, rho, norms)
        del kept  # freed memory is used again by later kernels of this stream only
        return None, None, *together.cut(dv)
