"""The operations of low-precision hardware: on float32 tensors that hold values of a format, rounded to a format.

On a GPU with Triton each operation and its rounding are one kernel, and a mean is one or two
(:mod:`normmatters.kernels.triton.rounding`). They give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from normmatters.kernels import backends, operators

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
STORAGE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the nearest values of ``dtype``: to infinity beyond fp16 and bf16, to the largest number beyond fp8."""
    if dtype == torch.float32:
        return x
    if _can_use_kernels(x):
        from normmatters.kernels.triton import rounding

        if rounding.takes(x):
            return rounding.operate("none", x, 0.0, dtype)
    if dtype in STORAGE.values():
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype).float()


def add(x: Tensor, y: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x + y, rounded."""
    return _operate("add", torch.add, x, y, dtype)


def subtract(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x − y, rounded."""
    return _operate("subtract", torch.sub, x, y, dtype)


def multiply(x: Tensor, y: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x·y, rounded."""
    return _operate("multiply", torch.mul, x, y, dtype)


def divide(x: Tensor, y: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x/y, rounded."""
    return _operate("divide", _divide, x, y, dtype)


def _divide(x: Tensor, y: Tensor | float) -> Tensor:
    # By a number, CUDA would multiply with its rounded reciprocal.
    return x / (y if isinstance(y, Tensor) else torch.full((), y, dtype=x.dtype, device=x.device))


def _operate(
    name: str,
    operation: Callable[[Tensor, Tensor | float], Tensor],
    x: Tensor,
    y: Tensor | float,
    dtype: torch.dtype,
) -> Tensor:
    if dtype != torch.float32 and _can_use_kernels(x):
        from normmatters.kernels.triton import rounding

        if rounding.takes(x, y):
            return rounding.operate(name, x, y, dtype)
    return rounded(operation(x, y), dtype)


def _can_use_kernels(x: Tensor) -> bool:
    # There are no operators of them, which is what the compiler and dispatch modes must see.
    return not operators.needs_operators() and not backends.why_not_triton(x)


@lru_cache(maxsize=4096)
def constant(value: float, dtype: torch.dtype) -> float:
    """A constant in ``dtype``."""
    return float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype))


def split_count(n: int, dtype: torch.dtype) -> tuple[float, int]:
    """n as f·2^m with f in (1/2, 1] rounded to ``dtype``: an fp16 scalar cannot hold n = 1e5, but can hold f."""
    power = (n - 1).bit_length()
    return constant(n / 2**power, dtype), 2**power


def tree_mean(x: Tensor, dim: int, accumulate: torch.dtype) -> Tensor:
    """Mean over ``dim`` (kept, size 1) by a tree of averages (a + b)/2, each rounded to ``accumulate``.

    n is padded with zeros to a power of two 2^m, which gives Σx/2^m; one division by n/2^m ends it.
    """
    n = x.shape[dim]
    if n == 0:
        return x.sum(dim, keepdim=True)
    x = _even_levels(x, dim, accumulate)
    while (size := x.shape[dim]) > 1:
        pairs = size // 2
        left, right = x.narrow(dim, 0, size - pairs), x.narrow(dim, size - pairs, pairs)
        if size % 2:
            left = left.clone()
            left.narrow(dim, 0, pairs).add_(right)
        else:
            left = left + right
        x = rounded(left.mul_(0.5), accumulate)
    fraction, _ = split_count(n, accumulate)
    return x if fraction == 1 else divide(x, fraction, accumulate)


def running_mean(x: Tensor, dim: int, accumulate: torch.dtype) -> Tensor:
    """Mean over ``dim`` (kept, size 1) by one running sum from 0: r ← r + x_i, each rounded to ``accumulate``.

    The numbers are rounded as they enter, the sum is divided by n in the end. It may overflow, and it stagnates: in
    fp16 a sum of equal numbers stops to grow at 2048 of them, whatever their size.
    """
    n = x.shape[dim]
    if n == 0:
        return x.sum(dim, keepdim=True)
    rows = x.movedim(dim, -1).contiguous()
    total = _running_sum(rows.view(-1, n), accumulate).view(rows.shape[:-1]).unsqueeze(-1).movedim(-1, dim)
    return divide(total, n, accumulate)


def _running_sum(rows: Tensor, accumulate: torch.dtype) -> Tensor:
    if _can_use_kernels(rows):
        from normmatters.kernels.triton import rounding as kernels

        return kernels.running_sum(rows, accumulate)
    if rows.device.type == "cpu" and accumulate != torch.bfloat16:  # which numpy does not have
        dtype = np.float16 if accumulate == torch.float16 else np.float32
        with np.errstate(over="ignore", invalid="ignore"):
            sums = np.add.accumulate(
                rows.detach().numpy().astype(dtype), axis=1
            )  # one after the other; `sum` is a tree
        return torch.from_numpy(sums[:, -1].astype(np.float32)) + 0.0  # of -0 alone: 0 as from 0
    total = rows.new_zeros(rows.shape[0])
    for column in rounded(rows, accumulate).unbind(1):
        total = rounded(total + column, accumulate)
    return total


def _even_levels(x: Tensor, dim: int, accumulate: torch.dtype) -> Tensor:
    """x rounded, and if a kernel can, after all levels that have a pair for every number: of a power of two, all."""
    if _can_use_kernels(x):
        from normmatters.kernels.triton import rounding as kernels

        if kernels.takes_mean(x, dim):
            return kernels.tree_mean(x, dim, accumulate)
    return rounded(x, accumulate)
