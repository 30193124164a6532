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

from normmatters.kernels.cpu import DTYPES, library, memory
from normmatters.kernels.layer_norm import Dtypes, Options, layer_norm_by
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
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """The output, and the statistics of each row."""
    eps, constant, p, centered, _ = options
    x, dtype, (rows, size) = x.contiguous(), compute_dtype(x.dtype), _rows(x, shape)
    y, statistics = memory.empty_like(x), torch.empty(rows, _STATISTICS, dtype=dtype)
    weight, bias = _computed(weight, dtype), _computed(bias, dtype)
    tensors = [_pointer(t) for t in (x, y, weight, bias, statistics)]
    _functions()[0](*tensors, rows, size, DTYPES[x.dtype], _KINDS.get(p, 2), centered, p, constant, eps)
    return y, statistics


def backward(
    g: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None, statistics: Tensor, options: Options,
    dtypes: Dtypes,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x, and if their ``dtypes`` are given of weight and bias."""
    _, constant, p, centered, _ = options
    g, x, dtype, (rows, size) = g.contiguous(), x.contiguous(), compute_dtype(x.dtype), _rows(x, shape)
    dx, weight = memory.empty_like(x), _computed(weight, dtype)
    # Parts of the rows that are summed each by itself; the same for any number of threads. Each has its own sums, whose
    # memory is small beside that of its rows.
    parts = max(1, min(128, max(rows // 64, min(16, rows // 16)), max(16, 2**20 // size)))
    dweight = dbias = scratch = None
    if dtypes is not None:
        dweight, dbias = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
        scratch = torch.empty(4 * parts * size, dtype=torch.float64)
    tensors = [_pointer(t) for t in (g, x, dx, weight, statistics, dweight, dbias, scratch)]
    kind = DTYPES[x.dtype], _KINDS.get(p, 2), centered, p, constant
    _functions()[1](*tensors, parts, rows, size, *kind, 0.0)
    if dtypes is None or dweight is None or dbias is None:
        return dx, None, None
    return dx, dweight.view(*shape).to(dtypes[0]), dbias.view(*shape).to(dtypes[1])


def why_not(input: Tensor, normalized_shape: Sequence[int], norm: Norm) -> str:
    """Why the kernels cannot take this call; empty if they can."""
    if norm.kind not in ("l1", "l2", "lp"):
        return f"the native layer norm takes L1, L2 and Lp, not {norm.kind}"
    size = math.prod(normalized_shape)
    if not 0 < size <= MAX_FEATURES:
        return f"the kernels take rows of 1 to {MAX_FEATURES} features, not {size}"
    return ""


layer_norm = layer_norm_by(
    "native_layer_norm",
    compute=forward,
    differentiate=backward,
    statistics_shape=lambda rows, options: (rows, _STATISTICS),
    twice=True,
)
