"""Weight norm of many layers in one launch: w = ρ·v/‖v‖_p for every row (F11–F13), and its gradient.

ρ belongs to a tensor, or it is learned for each row (F11, which calls it g). The results go into one flat buffer, in
the dtype that the layers compute in. The gradients of the weights, g here, are read where they are. With x̂ = v/‖v‖

    dv = (ρ/‖v‖)·(g − u·⟨g, x̂⟩),   u = ∂‖v‖/∂v = x̂ (p = 2),   sign v (p = 1),   sign v on the ties of max|v|, shared
    equally (p = ∞).   dρ = ⟨g, x̂⟩.             A row of zeros has no norm: w = 0, dv = ρ·g and dρ = 0.

There is no operator: under a compiler or a dispatch mode each layer computes its own weight. So the eager autograd node
calls the kernels directly, which is quicker than through the dispatcher.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels import backends
from normmatters.kernels.double_backward import once_differentiable
from normmatters.kernels.operators import on_device
from normmatters.kernels.triton.rows import (
    address_table,
    aligned,
    clear_gap,
    load_pointer,
    load_rows,
    load_task,
    places_of,
    store_rows,
    tables_of,
)

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
INF = 0  # p = ∞, as the kernels see it


@triton.jit
def _row_norms(v_ptr, row, rows, n, P: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """‖v‖_p of each row, [R]."""
    column = tl.arange(0, B)
    total = tl.zeros((R, B), tl.float32)
    for start in range(0, n, B):
        x = tl.abs(load_rows(v_ptr, row, start + column, rows, n))
        total = total + x if P == 1 else tl.maximum(total, x)
    if P == 1:
        return tl.sum(total, axis=1)
    largest = tl.max(total, axis=1)
    if P == 2:
        # Squares leave float32's range long before the numbers do, so take them of x/max|x|.
        unit = tl.where(largest == 0, 1.0, largest)
        squares = tl.zeros((R, B), tl.float32)
        for start in range(0, n, B):
            x = load_rows(v_ptr, row, start + column, rows, n) / unit[:, None]
            squares += x * x
        largest *= tl.sqrt_rn(tl.sum(squares, axis=1))
    return largest


@triton.jit
def _load_rho(ptr, row, rows, LEARNED: tl.constexpr):
    """ρ of each row, [R], or the one of all rows."""
    if LEARNED:
        return tl.load(ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    else:
        return tl.load(ptr)


@triton.jit
def _forward_rows(
    v_ptr,
    w_ptr,
    norm_ptr,
    rho_ptr,
    first,
    rows,
    n,
    P: tl.constexpr,
    LEARNED: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    row = first + tl.arange(0, R).to(tl.int64)
    column = tl.arange(0, B)
    rho = _load_rho(rho_ptr, row, rows, LEARNED)
    norm = _row_norms(v_ptr, row, rows, n, P, R, B)
    tl.store(norm_ptr + row, norm, mask=row < rows)
    scale = rho / tl.where(norm == 0, 1.0, norm)
    for start in range(0, n, B):
        col = start + column
        w = load_rows(v_ptr, row, col, rows, n) * scale[:, None]
        store_rows(w_ptr, w, row, col, rows, n)


@triton.jit
def _backward_rows(
    g_ptr,
    v_ptr,
    dv_ptr,
    drho_ptr,
    norm_ptr,
    rho_ptr,
    first,
    rows,
    n,
    P: tl.constexpr,
    LEARNED: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    row = first + tl.arange(0, R).to(tl.int64)
    column = tl.arange(0, B)
    norm = tl.load(norm_ptr + row, mask=row < rows, other=0.0)
    unit = tl.where(norm == 0, 1.0, norm)
    scale = _load_rho(rho_ptr, row, rows, LEARNED) / unit
    unit = unit[:, None]
    product = tl.zeros((R, B), tl.float32)
    ties = tl.zeros((R, B), tl.float32)
    for start in range(0, n, B):
        v = load_rows(v_ptr, row, start + column, rows, n)
        product += load_rows(g_ptr, row, start + column, rows, n) * (v / unit)
        if P == 0:
            ties += tl.where(tl.abs(v) == norm[:, None], 1.0, 0.0)
    along = tl.sum(product, axis=1)
    if LEARNED:
        tl.store(drho_ptr + row, along.to(drho_ptr.dtype.element_ty), mask=row < rows)
    if P == 0:
        along = along / tl.sum(ties, axis=1)
    for start in range(0, n, B):
        col = start + column
        v = load_rows(v_ptr, row, col, rows, n)
        if P == 2:
            slope = v / unit
        else:
            slope = tl.where(v > 0, 1.0, tl.where(v < 0, -1.0, 0.0))
            if P == 0:
                slope = tl.where(tl.abs(v) == norm[:, None], slope, 0.0)
        dv = (load_rows(g_ptr, row, col, rows, n) - slope * along[:, None]) * scale[:, None]
        store_rows(dv_ptr, dv, row, col, rows, n)


@triton.jit
def weight_norm_forward_kernel(
    addresses_ptr,
    layers_ptr,
    tasks_ptr,
    w_ptr,
    norm_ptr,
    tensors,
    P: tl.constexpr,
    V: tl.constexpr,
    LEARNED: tl.constexpr,
    WIDE: tl.constexpr,
):
    tensor, first, rows, n, offset, norms = load_task(layers_ptr, tasks_ptr, tensors, WIDE)
    v_ptr = load_pointer(addresses_ptr, tensor, V, WIDE)
    rho_ptr = load_pointer(addresses_ptr, tensors + tensor, V if LEARNED else tl.float32, 1)
    w_ptr += offset
    norm_ptr += norms
    if first == 0:
        clear_gap(w_ptr, rows * n)
    if n <= 128:
        _forward_rows(v_ptr, w_ptr, norm_ptr, rho_ptr, first, rows, n, P, LEARNED, 16, 128)
    elif n <= 512:
        _forward_rows(v_ptr, w_ptr, norm_ptr, rho_ptr, first, rows, n, P, LEARNED, 4, 512)
    else:
        _forward_rows(v_ptr, w_ptr, norm_ptr, rho_ptr, first, rows, n, P, LEARNED, 1, 2048)


@triton.jit
def weight_norm_backward_kernel(
    addresses_ptr,
    gradients_ptr,
    layers_ptr,
    tasks_ptr,
    dv_ptr,
    drho_ptr,
    norm_ptr,
    tensors,
    P: tl.constexpr,
    V: tl.constexpr,
    LEARNED: tl.constexpr,
    G: tl.constexpr,
    WIDE: tl.constexpr,
):
    tensor, first, rows, n, offset, norms = load_task(layers_ptr, tasks_ptr, tensors, WIDE)
    g_ptr = load_pointer(gradients_ptr, tensor, G, WIDE)
    v_ptr = load_pointer(addresses_ptr, tensor, V, WIDE)
    rho_ptr = load_pointer(addresses_ptr, tensors + tensor, V if LEARNED else tl.float32, 1)
    dv_ptr += offset
    drho_ptr += norms
    norm_ptr += norms
    if first == 0:
        clear_gap(dv_ptr, rows * n)
    if n <= 128:
        _backward_rows(g_ptr, v_ptr, dv_ptr, drho_ptr, norm_ptr, rho_ptr, first, rows, n, P, LEARNED, 16, 128)
    elif n <= 512:
        _backward_rows(g_ptr, v_ptr, dv_ptr, drho_ptr, norm_ptr, rho_ptr, first, rows, n, P, LEARNED, 4, 512)
    else:
        _backward_rows(g_ptr, v_ptr, dv_ptr, drho_ptr, norm_ptr, rho_ptr, first, rows, n, P, LEARNED, 1, 2048)


# Which weights --------------------------------------------------------------------------------------------------------


def why_not(v: Tensor, rho: Tensor, *, dim: int | None, p: float, k: int | None) -> str:
    """Why the kernels cannot take this weight; empty if they can. ``rho``: a scalar, or F11's g, one for each slice."""
    if not (v.is_cuda or (backends.INTERPRETED and v.device.type == "cpu")):
        return f"they run on a CUDA device, not on {v.device}"
    if v.dtype not in DTYPES or rho.dtype != (v.dtype if is_learned(rho) else torch.float32):
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
        order = sorted(range(v.ndim), key=v.stride, reverse=True)  # from the slowest dimension to the fastest
        if not v.permute(order).is_contiguous() or any(v.shape[d] > 1 for d in order[: order.index(0)]):
            return f"the slices of a weight with strides {v.stride()} are not dense in memory"
    if is_learned(rho) and (rho.shape != _rho_shape(v) or not rho.is_contiguous()):
        return f"they take one rho, or a dense {_rho_shape(v)} of them, not {tuple(rho.shape)}"
    return ""


def is_learned(rho: Tensor) -> bool:
    """Whether there is one for each slice, as classic weight norm learns them, and not one for all."""
    return rho.ndim > 0


def _rho_shape(v: Tensor) -> tuple[int, ...]:
    return v.shape[0], *[1] * (v.ndim - 1)


# Launches and the eager autograd node ---------------------------------------------------------------------------------


class _View(NamedTuple):
    """A part of a flat buffer: the arguments of ``as_strided``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class WeightGroup:
    """The weights ρ·v/‖v‖_p of many layers: made once for tensors of these shapes and strides, called often.

    Args:
        v: tensors of one device and dtype for which :func:`why_not` has no objection.
        p: 1, 2 or ``math.inf``.
        dtype: of the weights, each shaped and laid out as its v, and of their gradients.
        learned: :func:`is_learned` of every ρ.

    Example::

        >>> v, rho = [torch.randn(4, 3, device="cuda")], [torch.ones((), device="cuda")]
        >>> (weight,) = WeightGroup(v, 2, torch.float16)(v, rho)
    """

    def __init__(self, v: Sequence[Tensor], p: float, dtype: torch.dtype, learned: bool = False) -> None:
        self.dtype, self.learned = dtype, learned
        self._tables = tables_of(list(v))
        forward: dict[str, Any] = {"P": INF if p == math.inf else int(p), "V": DTYPES[v[0].dtype], "LEARNED": learned}
        backward = {**forward, "G": DTYPES[dtype]}
        self._forward = self._tables.launches(weight_norm_forward_kernel, forward)
        self._backward = self._tables.launches(weight_norm_backward_kernel, backward)
        places, _ = places_of([x.numel() for x in v])
        rows = itertools.accumulate([x.shape[0] for x in v], initial=0)
        self.of_v = [_View(x.shape, x.stride(), place) for x, place in zip(v, places)]
        self.of_rho = [_View(_rho_shape(x), (1,) * x.ndim, row) for x, row in zip(v, rows)] if learned else []

    def __call__(self, v: Sequence[Tensor], rho: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``rho``: for each v a float32 scalar, or a learned one for each row."""
        # Autograd looks at each argument of the node. Tensors within a sequence get no gradient.
        fixed, learned = ((), rho) if self.learned else (rho, ())
        with on_device(v[0].device):
            weights: tuple[Tensor, ...] = _Weights.apply(self, fixed, *v, *learned)
        return weights

    def forward(self, v: Sequence[Tensor], rho: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """All weights in one flat buffer, at ``places_of`` their sizes and in the memory order of v; and all norms."""
        pointers = [*map(Tensor.data_ptr, v)]
        addresses = address_table([*pointers, *map(Tensor.data_ptr, rho)], self._tables)
        w = torch.empty(self._tables.numel, dtype=self.dtype, device=v[0].device)
        norms = torch.empty(self._tables.rows, dtype=torch.float32, device=v[0].device)
        for launch, tasks in self._forward[aligned(pointers)]:
            launch((addresses, self._tables.layers, tasks, w, norms))
        return w, norms

    def backward(
        self, g: Sequence[Tensor], v: Sequence[Tensor], rho: Sequence[Tensor], norms: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of all v in one flat buffer, and those of all ρ, row after row, if they are learned.

        ``g``: the gradients of the weights, each laid out as its v.
        """
        pointers, g_pointers = [*map(Tensor.data_ptr, v)], [*map(Tensor.data_ptr, g)]
        addresses = address_table([*pointers, *map(Tensor.data_ptr, rho)], self._tables)
        gradients = address_table(g_pointers, self._tables)
        dv = torch.empty(self._tables.numel, dtype=v[0].dtype, device=v[0].device)
        drho = torch.empty(norms.shape, dtype=dv.dtype, device=dv.device) if self.learned else None
        for launch, tasks in self._backward[aligned(pointers + g_pointers)]:
            # If ρ is not learned, the kernel writes nothing there.
            launch((addresses, gradients, self._tables.layers, tasks, dv, norms if drho is None else drho, norms))
        return dv, drho


class _Weights(torch.autograd.Function):
    """The eager node of all layers' weights."""

    @staticmethod
    def forward(ctx: Any, group: WeightGroup, fixed: Sequence[Tensor], *learned: Tensor) -> tuple[Tensor, ...]:
        tensors = (*learned, *fixed)
        flat, norms = group.forward(tensors[: len(group.of_v)], tensors[len(group.of_v) :])
        ctx.save_for_backward(norms, *tensors)
        ctx.group = group
        return _split(flat, group.of_v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        norms, *tensors = ctx.saved_tensors
        group: WeightGroup = ctx.group
        v = _laid_out(tensors[: len(gradients)], group.of_v)
        rho = _laid_out(tensors[len(gradients) :], group.of_rho)
        dv, drho = group.backward(_laid_out(gradients, group.of_v), v, rho, norms)
        return None, None, *_split(dv, group.of_v), *(() if drho is None else _split(drho, group.of_rho))


def _split(flat: Tensor, views: list[_View]) -> tuple[Tensor, ...]:
    return tuple([flat.as_strided(*view) for view in views])


def _laid_out(tensors: Sequence[Tensor], views: list[_View]) -> list[Tensor]:
    """The tensors with the strides of these views. Gradients come in any order, and so may what hooks packed."""
    laid_out = [*tensors]
    for i, (stride, (_, wanted, _)) in enumerate(zip(map(Tensor.stride, laid_out), views)):
        if stride != wanted:
            laid_out[i] = _restrided(laid_out[i], wanted)
    return laid_out


def _restrided(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """``x`` with these strides; those of dimensions of size 1 do not matter."""
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), stride)):
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
