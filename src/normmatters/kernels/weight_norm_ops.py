"""Bounded weight norm of many layers: an eager node, and ``torch.ops.normmatters.bounded_weights`` for dispatch modes.

Modes of ``__torch_dispatch__`` (tracers, counters) must see operators. These speak of one flat buffer, because the
outputs of an operator may not share memory; :func:`bounded_weights_of` cuts it into weights, and autograd joins their
gradients again. Otherwise :class:`Together` calls the same kernels from a :class:`torch.autograd.Function`, without the
dispatcher's long way to a Python operator, and the kernels read the gradients where the layers left them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normmatters.kernels import backends
from normmatters.kernels.library import LIBRARY, on_device, register
from normmatters.kernels.triton import weight_norm as kernels
from normmatters.kernels.triton.rows import places_of

LIBRARY.define("bounded_weights(Tensor[] v, Tensor[] rho, int p, ScalarType dtype) -> (Tensor, Tensor)")
LIBRARY.define("bounded_weights_backward(Tensor g, Tensor[] v, Tensor[] rho, Tensor norms, int p) -> Tensor")


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


def _bounded_weights(v: list[Tensor], rho: list[Tensor], p: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """ρ·v/‖v‖_p of all tensors as one flat buffer of ``dtype``, and the norms of all rows. p: 1, 2, or 0 for ∞."""
    return _plan_of(v, p, dtype).forward(v, rho)


def _fake_bounded_weights(v: list[Tensor], rho: list[Tensor], p: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    numel, rows = kernels.sizes(v)
    return v[0].new_empty(numel, dtype=dtype), v[0].new_empty(rows, dtype=torch.float32)


def _bounded_weights_backward(g: Tensor, v: list[Tensor], rho: list[Tensor], norms: Tensor, p: int) -> Tensor:
    """The gradients of all v as one flat buffer."""
    g = g.contiguous()
    begin, size = g.data_ptr(), g.element_size()
    places, _ = places_of([x.numel() for x in v])
    return _plan_of(v, p, g.dtype).backward([begin + place * size for place in places], v, rho, norms)


def _fake_bounded_weights_backward(g: Tensor, v: list[Tensor], rho: list[Tensor], norms: Tensor, p: int) -> Tensor:
    return v[0].new_empty(kernels.sizes(v)[0])


_plans: OrderedDict[Any, kernels.Plan] = OrderedDict()
_MAX_PLANS = 256


def _plan_of(v: list[Tensor], p: int, dtype: torch.dtype) -> kernels.Plan:
    key = (v[0].device, v[0].dtype, p, dtype, tuple([x.shape for x in v]))
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = kernels.Plan(v, p, dtype)
        if len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)
    return plan


def _cut(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The pieces of the flat buffer, each with the shape and memory order of its tensor."""
    places, end = places_of([x.numel() for x in like])
    # Split, and not sliced: its gradient is one concatenation. What lies between the pieces is split off as well.
    sizes: list[int] = []
    first: list[int] = []
    for x, place, following in zip(like, places, [*places[1:], end]):
        first.append(len(sizes))
        gap = following - place - x.numel()
        sizes += [x.numel(), gap] if gap else [x.numel()]
    pieces = flat.split(sizes)
    return [_shaped(pieces[i], x) for i, x in zip(first, like)]


def _shaped(piece: Tensor, like: Tensor) -> Tensor:
    order = _memory_order(like)
    if order == list(range(like.ndim)):
        return piece.view(like.shape)
    inverse = [order.index(d) for d in range(like.ndim)]
    return piece.view([like.shape[d] for d in order]).permute(inverse)


def _register() -> None:
    for name, kernel, fake in (
        ("bounded_weights", _bounded_weights, _fake_bounded_weights),
        ("bounded_weights_backward", _bounded_weights_backward, _fake_bounded_weights_backward),
    ):
        register(name, kernel, fake)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        v, rho, p, _ = inputs
        ctx.save_for_backward(*v, *rho, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.p, ctx.strides = p, [x.stride() for x in v]

    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[list[Tensor], list[None], None, None]:
        *tensors, norms = ctx.saved_tensors
        v, rho = _laid_out(tensors[: len(tensors) // 2], ctx.strides), tensors[len(tensors) // 2 :]
        dv = torch.ops.normmatters.bounded_weights_backward(g, v, rho, norms, ctx.p)
        return _cut(dv, v), [None] * len(rho), None, None

    def differentiated_twice(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("the backward pass of bounded weights computed together can be differentiated only once")

    torch.library.register_autograd("normmatters::bounded_weights", backward, setup_context=setup_context, lib=LIBRARY)
    torch.library.register_autograd("normmatters::bounded_weights_backward", differentiated_twice, lib=LIBRARY)


_register()


def _code(p: float) -> int:
    return kernels.INF if p == math.inf else int(p)


def bounded_weights_of(v: list[Tensor], rho: list[Tensor], p: float, dtype: torch.dtype) -> list[Tensor]:
    """The weights ρ·v/‖v‖_p of many layers, each shaped and laid out as its v, in ``dtype``; by the operators.

    Args:
        v: tensors of one device and dtype for which :func:`supported` has no objection.
        rho: a scalar for each.
        p: 1, 2 or ``math.inf``.
    """
    return _cut(torch.ops.normmatters.bounded_weights(v, rho, _code(p), dtype)[0], v)


class Together:
    """:func:`bounded_weights_of` for eager mode: made once for tensors of these shapes and strides, called often.

    Example::

        >>> v, rho = [torch.randn(4, 3, device="cuda")], [torch.ones((), device="cuda")]
        >>> (weight,) = Together(v, 2, torch.float16)(v, rho)
    """

    def __init__(self, v: Sequence[Tensor], p: float, dtype: torch.dtype) -> None:
        self.plan = kernels.Plan(v, _code(p), dtype)
        places, _ = places_of([x.numel() for x in v])
        self._views = [(x.shape, x.stride(), place) for x, place in zip(v, places)]
        self._strides = [x.stride() for x in v]

    def __call__(self, v: Sequence[Tensor], rho: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with on_device(v[0].device):
            weights: tuple[Tensor, ...] = _BoundedWeights.apply(self, rho, *v)
        return weights

    def cut(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The pieces of a flat buffer, each shaped and laid out as its v."""
        return tuple([flat.as_strided(*view) for view in self._views])

    def laid_out(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of v's shapes, each laid out as its v."""
        return _laid_out(tensors, self._strides)


def _laid_out(tensors: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The tensors with these strides: gradients come with any, and what was saved may, where hooks packed it."""
    laid = [*tensors]
    for i, (stride, wanted) in enumerate(zip(map(Tensor.stride, laid), strides)):
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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # With gradients enabled, as for create_graph=True, the results say that they cannot be differentiated again.
        return (_gradients_once if torch.is_grad_enabled() else _gradients)(ctx, *gradients)


def _gradients(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    norms, *tensors = ctx.saved_tensors
    together: Together = ctx.together
    v, rho = together.laid_out(tensors[: len(gradients)]), tensors[len(gradients) :]
    kept = together.laid_out(gradients)
    dv = together.plan.backward([*map(Tensor.data_ptr, kept)], v, rho, norms)
    del kept  # freed memory is used again by later kernels of this stream only
    return None, None, *together.cut(dv)


_gradients_once = torch.autograd.function.once_differentiable(_gradients)
