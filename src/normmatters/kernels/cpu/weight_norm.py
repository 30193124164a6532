"""Weight norm of many layers in one call on a CPU: w = ρ·v/‖v‖_p for every row (F11–F13), and its gradient.

The same interface as :mod:`normmatters.kernels.triton.weight_norm`; the kernels are in native/weight_norm.cpp. Weights
and gradients of one pass are written where those of an earlier pass were, if nobody holds these any more: to map fresh
memory and fill it with zeros costs as much as the kernels take.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normmatters.functional.weight import bounded_weight
from normmatters.kernels import backends
from normmatters.kernels.cpu import DTYPES, library
from normmatters.norm import compute_dtype

LONGEST_ROW = 2**20  # one thread works along a whole row
_ORDERS = {1.0: 0, 2.0: 1, math.inf: 2}  # by p; 3 is any other


@functools.cache
def _function(name: str) -> Any:
    opened = library()
    assert opened is not None, "why_not was not asked"
    return opened.function(name, "ppiiiid")


def why_not(v: Tensor, rho: Tensor, *, dim: int | None, p: float, k: int | None) -> str:
    """Why the kernels cannot take this weight; empty if they can. ``rho``: a scalar, or F11's g, one for each slice."""
    if v.device.type != "cpu" or rho.device.type != "cpu":
        return f"they run on a CPU, not on {v.device} with a rho on {rho.device}"
    if backends.NATIVE_MISSING or backends.INTERPRETED:
        return backends.NATIVE_MISSING or "NORMMATTERS_KERNELS=interpret asks for Triton's interpreter"
    if v.dtype not in DTYPES or (is_learned(rho) and rho.dtype != v.dtype):
        return f"they take one rho, or one for each slice in the dtype of v, not {v.dtype} with {rho.dtype}"
    if dim is None or dim % v.ndim != 0 or k is not None:
        return f"they take norms of slices along dimension 0, not {dim}, and no Top(k)"
    if v.numel() == 0 or v.numel() > LONGEST_ROW * v.shape[0]:
        return f"they take slices of 1 to {LONGEST_ROW} numbers"
    extent = 1 + sum((size - 1) * stride for size, stride in zip(v.shape[1:], v.stride()[1:]))
    length = v.numel() // v.shape[0]
    if extent != length or (v.shape[0] > 1 and v.stride(0) != length):
        return f"the slices of a weight with strides {v.stride()} are not dense in memory"
    if v.is_neg() or rho.is_neg():
        return "the memory of a negative view holds the other sign"
    if is_learned(rho) and (rho.numel() != v.shape[0] or rho.ndim != v.ndim or not rho.is_contiguous()):
        return f"they take one rho, or a dense one for each slice, not {tuple(rho.shape)}"
    return ""


def is_learned(rho: Tensor) -> bool:
    """Whether there is one for each slice, as classic weight norm learns them, and not one for all."""
    return rho.ndim > 0


class _Slot(NamedTuple):
    """Memory for one output. Only this tensor, which nobody is given, holds it while it is free."""

    tensor: Tensor
    address: int
    storage: int  # the C++ object's; whoever asks for its Python object gets the same one, and would not be counted

    def is_free(self) -> bool:
        # Resized, or moved to shared memory, where other processes may read it, it has another address.
        return self.tensor.data_ptr() == self.address and torch._C._storage_Use_Count(self.storage) == 1


class _Memory:
    """Outputs of given layouts, in the memory of earlier ones that nobody holds any more."""

    def __init__(self, layouts: Sequence[tuple[torch.Size, tuple[int, ...]]], dtype: torch.dtype) -> None:
        self._layouts, self._dtype = layouts, dtype
        self._sets: list[list[_Slot]] = []  # a thread takes one out while it looks for what is free in it

    def outputs(self) -> list[Tensor]:
        if torch.is_inference_mode_enabled():  # its tensors are of no use outside of it
            return [slot.tensor for slot in map(self._slot, self._layouts)]
        try:
            slots = [s if s.is_free() else self._slot(layout) for s, layout in zip(self._sets.pop(), self._layouts)]
        except IndexError:
            slots = [*map(self._slot, self._layouts)]
        outputs = [slot.tensor.data for slot in slots]
        self._sets.append(slots)
        return outputs

    def _slot(self, layout: tuple[torch.Size, tuple[int, ...]]) -> _Slot:
        tensor = torch.empty_strided(*layout, dtype=self._dtype)
        return _Slot(tensor, tensor.data_ptr(), torch._C._storage_address(tensor))  # type: ignore[attr-defined]


class WeightGroup:
    """The weights ρ·v/‖v‖_p of many layers: made once for tensors of these shapes and strides, called often.

    Args:
        v: CPU tensors of one dtype for which :func:`why_not` has no objection.
        p: a number ≥ 1 or ``math.inf``.
        dtype: of the weights, each shaped and laid out as its v, and of their gradients.
        learned: :func:`is_learned` of every ρ.
    """

    def __init__(self, v: Sequence[Tensor], p: float, dtype: torch.dtype, learned: bool = False) -> None:
        self.p, self.dtype, self.learned = p, dtype, learned
        self.layouts = [(x.shape, x.stride()) for x in v]
        self._rows = [x.shape[0] for x in v]
        self._lengths = [x.numel() // x.shape[0] for x in v]
        starts = [*accumulate(map(Tensor.numel, v), initial=0)]
        self._starts = (ctypes.c_int64 * len(starts))(*starts)
        self._w, self._dv = _Memory(self.layouts, dtype), _Memory(self.layouts, v[0].dtype)
        self._kind = DTYPES[v[0].dtype], DTYPES[dtype], _ORDERS.get(float(p), 3), float(p)

    def __call__(self, v: Sequence[Tensor], rho: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``rho``: for each v a scalar, or a learned one for each row."""
        # Autograd looks at each argument of the node. Tensors within a sequence get no gradient.
        fixed, learned = ((), rho) if self.learned else (rho, ())
        weights: tuple[Tensor, ...] = _Weights.apply(self, fixed, *v, *learned)
        return weights

    def _run(self, name: str, columns: Sequence[Sequence[Tensor]], rho: Sequence[Tensor], norms: Tensor) -> None:
        """Call a kernel with these tensors, then ρ, the norms, and ρ's values where there is one for all rows."""
        count = len(self._rows)
        values = (ctypes.c_double * count)(*([0.0] * count if self.learned else map(float, rho)))
        first = ctypes.addressof(values)
        pointers = [[*map(Tensor.data_ptr, column)] if column else [0] * count for column in columns]
        offsets = accumulate(self._rows[:-1], initial=0)
        table: Any = (ctypes.c_int64 * ((len(columns) + 4) * count))()
        rest = [
            [norms.data_ptr() + norms.element_size() * offset for offset in offsets],
            [first + 8 * i for i in range(count)],
            self._rows,
            self._lengths,
        ]
        for i, column in enumerate((*pointers, *rest)):
            table[i :: len(columns) + 4] = column
        _function(name)(table, self._starts, count, *self._kind)

    def forward(self, v: Sequence[Tensor], rho: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The weights, and the norms of all rows."""
        w = self._w.outputs()
        norms = torch.empty(sum(self._rows), dtype=compute_dtype(v[0].dtype))
        self._run("nm_weight_norm", (v, w, rho if self.learned else ()), rho, norms)
        return w, norms

    def backward(
        self, g: Sequence[Tensor], v: Sequence[Tensor], rho: Sequence[Tensor], norms: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients of all v, and those of all ρ if they are learned. ``g``: each laid out as its v."""
        dv = self._dv.outputs()
        drho = [torch.empty_like(r) for r in rho] if self.learned else []
        self._run("nm_weight_norm_backward", (g, v, dv, rho if self.learned else (), drho), rho, norms)
        return dv, drho


class _Weights(torch.autograd.Function):
    """The eager node of all layers' weights."""

    @staticmethod
    def forward(ctx: Any, group: WeightGroup, fixed: Sequence[Tensor], *learned: Tensor) -> tuple[Tensor, ...]:
        tensors = (*learned, *fixed)
        count = len(group.layouts)
        w, norms = group.forward(tensors[:count], tensors[count:])
        ctx.save_for_backward(norms, *tensors)
        ctx.group = group
        return tuple(w)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        norms, *tensors = ctx.saved_tensors
        group: WeightGroup = ctx.group
        v, rho = tensors[: len(gradients)], tensors[len(gradients) :]
        if torch.is_grad_enabled():  # the gradient is to be differentiated again: by the plain equation
            weights = [bounded_weight(x, r, p=group.p).to(group.dtype) for x, r in zip(v, rho)]
            inputs = [t for t in (tensors if group.learned else v) if t.requires_grad]
            found = iter(torch.autograd.grad(weights, inputs, gradients, create_graph=True))
            return None, None, *[next(found) if t.requires_grad else None for t in (tensors if group.learned else v)]
        layouts = group.layouts
        dense = [x.contiguous() for x in rho]
        dv, drho = group.backward(_laid_out(gradients, layouts), _laid_out(v, layouts), dense, norms)
        return None, None, *dv, *drho


def _laid_out(tensors: Sequence[Tensor], layouts: Sequence[Any]) -> list[Tensor]:
    """The tensors with these strides. Gradients come in any order, and so may what hooks packed."""
    return [
        x if x.stride() == stride and not x.is_neg() else torch.empty_strided(shape, stride, dtype=x.dtype).copy_(x)
        for x, (shape, stride) in zip(tensors, layouts)
    ]
