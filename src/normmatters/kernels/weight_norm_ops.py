"""Weight norm of many layers as one eager autograd node.

It is no operator: what watches operators (compilers, dispatch modes) has each layer compute its own weight. So the
kernels are called without the dispatcher's long way, and read the gradients where the layers left them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normmatters.kernels import backends
from normmatters.kernels.double_backward import once_differentiable
from normmatters.kernels.operators import on_device
from normmatters.kernels.triton import weight_norm as kernels
from normmatters.kernels.triton.rows import places_of


def supported(v: Tensor, rho: Tensor, *, dim: int | None, p: float, k: int | None) -> str | None:
    """Why the kernels cannot take this weight, or None if they can. ``rho``: a scalar, or F11's g for all slices."""
    if not (v.is_cuda or (backends.INTERPRETED and v.device.type == "cpu")):
        return f"they run on a CUDA device, not on {v.device}"
    if v.dtype not in kernels.DTYPES or rho.dtype != (v.dtype if is_learned(rho) else torch.float32):
        return (
            "they take float16, bfloat16 and float32 with a float32 rho, or with one for each slice in the same dtype, "
            f"not {v.dtype} with {rho.dtype}"
        )
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
    if is_learned(rho) and (rho.shape != _one_for_each_row(v) or not rho.is_contiguous()):
        return f"they take one rho, or a dense {_one_for_each_row(v)} of them, not {tuple(rho.shape)}"
    return None


def is_learned(rho: Tensor) -> bool:
    """Whether there is one for each slice, as classic weight norm learns them, and not one for all."""
    return rho.ndim > 0


def _one_for_each_row(v: Tensor) -> tuple[int, ...]:
    return v.shape[0], *[1] * (v.ndim - 1)


def _memory_order(v: Tensor) -> list[int]:
    """The dimensions of ``v`` from the slowest to the fastest."""
    strides = v.stride()
    return sorted(range(v.ndim), key=lambda d: -strides[d])


def _code(p: float) -> int:
    return kernels.INF if p == math.inf else int(p)


class _View(NamedTuple):
    """A piece of a flat buffer: the arguments of ``as_strided``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    place: int


class Together:
    """The weights ρ·v/‖v‖_p of many layers: made once for tensors of these shapes and strides, called often.

    Args:
        v: tensors of one device and dtype for which :func:`supported` has no objection.
        p: 1, 2 or ``math.inf``.
        dtype: of the weights, each shaped and laid out as its v.
        learned: :func:`is_learned` of every ρ.

    Example::

        >>> v, rho = [torch.randn(4, 3, device="cuda")], [torch.ones((), device="cuda")]
        >>> (weight,) = Together(v, 2, torch.float16)(v, rho)
    """

    def __init__(self, v: Sequence[Tensor], p: float, dtype: torch.dtype, learned: bool = False) -> None:
        self.plan = kernels.Plan(v, _code(p), dtype, learned)
        places, _ = places_of([x.numel() for x in v])
        rows = itertools.accumulate([x.shape[0] for x in v], initial=0)
        self.of_v = [_View(x.shape, x.stride(), place) for x, place in zip(v, places)]
        self.of_rho = [_View(_one_for_each_row(x), (1,) * x.ndim, row) for x, row in zip(v, rows)] if learned else []

    def __call__(self, v: Sequence[Tensor], rho: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``rho``: for each v a float32 scalar, or a learned one for each row."""
        # Arguments of the node are looked at one by one, both ways; those within a sequence get no gradient.
        fixed, learned = ((), rho) if self.of_rho else (rho, ())
        with on_device(v[0].device):
            weights: tuple[Tensor, ...] = _Weights.apply(self, fixed, *v, *learned)
        return weights


def _cut(flat: Tensor, views: list[_View]) -> tuple[Tensor, ...]:
    """The pieces of a flat buffer."""
    return tuple([flat.as_strided(*view) for view in views])


def _laid_out(tensors: Sequence[Tensor], views: list[_View]) -> list[Tensor]:
    """The tensors, laid out as these views: gradients come in any order, and so may what hooks packed when saved."""
    laid = [*tensors]
    for i, (stride, (_, wanted, _)) in enumerate(zip(map(Tensor.stride, laid), views)):
        if stride != wanted:
            laid[i] = _restrided(laid[i], wanted)
    return laid


def _restrided(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """``x`` with these strides; those of dimensions of size 1 do not matter."""
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), stride)):
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


class _Weights(torch.autograd.Function):
    """The eager node of all layers' weights."""

    @staticmethod
    def forward(ctx: Any, together: Together, fixed: Sequence[Tensor], *learned: Tensor) -> tuple[Tensor, ...]:
        tensors = (*learned, *fixed)
        flat, norms = together.plan.forward(tensors[: len(together.of_v)], tensors[len(together.of_v) :])
        ctx.save_for_backward(norms, *tensors)
        ctx.together = together
        return _cut(flat, together.of_v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        norms, *tensors = ctx.saved_tensors
        together: Together = ctx.together
        v = _laid_out(tensors[: len(gradients)], together.of_v)
        rho = _laid_out(tensors[len(gradients) :], together.of_rho)
        kept = _laid_out(gradients, together.of_v)
        dv, drho = together.plan.backward([*map(Tensor.data_ptr, kept)], v, rho, norms)
        del kept  # freed memory is used again by later kernels of this stream only
        return None, None, *_cut(dv, together.of_v), *(() if drho is None else _cut(drho, together.of_rho))
