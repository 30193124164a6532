"""Launches of the layer norm kernels: one forward; backward the rows, where rows are long the columns, and the sums."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normmatters.kernels import MAX_PLANS
from normmatters.kernels.triton.launch import Launch
from normmatters.kernels.triton.layer_norm_kernels import (
    backward_kernel,
    columns_kernel,
    forward_kernel,
    parameters_kernel,
)
from normmatters.kernels.triton.layer_norm_tiling import (
    MAX_FUSED,
    MAX_KEPT,
    backward_tuning,
    forward_tuning,
    multiprocessors,
    tiling_of,
)

MAX_FEATURES = 16384  # the longest row that 1024 threads hold in registers
MAX_ROWS = 2**29  # four numbers a row, with 32-bit offsets
FINISH = 128  # partial sums that parameters_kernel adds at a time: one wait for memory each


def planes(l1: bool, centered: bool) -> int:
    """How many numbers a row the backward pass needs: 1/D, and where they apply μ, s/D and mean sgn."""
    return (1 + centered) * (1 + l1)


#: What a compiled kernel depends on beside the shape: the dtypes of x, weight and bias (None: there is none), and
#: whether the norm is L1 and centered.
Kind = tuple[torch.dtype, torch.dtype | None, torch.dtype | None, bool, bool]


# A shape's launches are kept, but not of every number of rows that ever came: with sentences it is another each time.
@functools.lru_cache(MAX_PLANS)
def _forward_launch(rows: int, cols: int, device: torch.device, kind: Kind) -> Launch:
    dtype, weight, bias, l1, centered = kind
    tuning = forward_tuning(cols, dtype, l1, centered)
    tiling = tiling_of(rows, cols, device, tuning)
    return Launch(
        forward_kernel,
        (tiling.programs, 1),
        (rows, cols),
        {
            "HAS_WEIGHT": weight is not None,
            "HAS_BIAS": bias is not None,
            "L1": l1,
            "CENTERED": centered,
            "WHOLE": cols == tiling.block_n,
            "PREFETCH": tiling.block_n * dtype.itemsize <= 16384,
            "KEEP": tiling.block_n <= MAX_KEPT,
            "ALIGN": math.gcd(cols, 16),
            "BLOCK_R": tiling.block_r,
            "BLOCK_N": tiling.block_n,
        },
        num_warps=tiling.num_warps,
        maxnreg=tuning.registers,
        overlaps=True,
    )


def forward(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    constant: float,
    l1: bool,
    centered: bool,
) -> tuple[Tensor, Tensor]:
    """y, and the statistics of the rows, [planes, rows] float32. All tensors are contiguous; a row has ``shape``."""
    cols = math.prod(shape)
    rows = x.numel() // cols
    y = torch.empty_like(x)
    stats = torch.empty((planes(l1, centered), rows), dtype=torch.float32, device=x.device)
    if rows == 0:
        return y, stats
    dtypes = (x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    w = x if weight is None else weight
    b = x if bias is None else bias
    launch = _forward_launch(rows, cols, x.device, (*dtypes, l1, centered))
    launch((x, w, b, y, stats), (eps, constant))
    return y, stats


class BackwardPlan(NamedTuple):
    """The launches of :func:`backward` at one shape, and how many partial sums each column has."""

    rows: Launch
    columns: Launch | None
    finish: Launch | None
    parts: int


@functools.lru_cache(MAX_PLANS)
def _backward_plan(
    rows: int,
    cols: int,
    device: torch.device,
    kind: Kind,
    parameters: tuple[torch.dtype, torch.dtype] | None,
) -> BackwardPlan:
    dtype, weight, _, l1, centered = kind
    tuning = backward_tuning(cols)
    tiling = tiling_of(rows, cols, device, tuning)
    fused = parameters is not None and tiling.block_n <= MAX_FUSED
    parts, strip = tiling.programs, min(128, tiling.block_n)
    by_rows = Launch(
        backward_kernel,
        (tiling.programs, 1),
        (rows, cols),
        {
            "HAS_WEIGHT": weight is not None,
            "PARAMETERS": fused,
            "L1": l1,
            "CENTERED": centered,
            "WHOLE": cols == tiling.block_n,
            # float32 rows fill the registers: there is no room for the next ones.
            "PREFETCH": tiling.block_n <= MAX_FUSED and dtype.itemsize == 2,
            "KEEP": tiling.block_n <= MAX_KEPT,
            # x and g, each read once, leave the cache before the weight, which every row reads.
            "STREAM": MAX_KEPT < tiling.block_n <= MAX_FUSED,
            "ALIGN": math.gcd(cols, 16),
            "BLOCK_R": tiling.block_r,
            "BLOCK_N": tiling.block_n,
        },
        num_warps=tiling.num_warps,
        maxnreg=tuning.registers,
        overlaps=True,
    )
    if parameters is None:
        return BackwardPlan(by_rows, None, None, 0)
    columns = None
    if not fused:
        parts = max(1, min(-(-rows // 16), 4 * multiprocessors(device) * strip // tiling.block_n))
        constants = {"L1": l1, "CENTERED": centered, "BLOCK_R": 16, "BLOCK_C": strip}
        columns = Launch(columns_kernel, (-(-cols // strip), parts), (rows, cols), constants)
    block_c = min(32, tiling.block_n)
    constants = {"BLOCK_P": FINISH, "BLOCK_C": block_c}
    finish = Launch(parameters_kernel, (-(-cols // block_c), 1), (parts, cols), constants, overlaps=True)
    return BackwardPlan(by_rows, columns, finish, parts)


def backward(
    g: Tensor,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    stats: Tensor,
    constant: float,
    l1: bool,
    centered: bool,
    parameters: tuple[torch.dtype, torch.dtype] | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, and Σg·x̂ and Σg over the rows, in the dtypes ``parameters`` and of ``shape``; without dtypes, no sums."""
    cols = math.prod(shape)
    rows = x.numel() // cols
    dx = torch.empty_like(x)
    dweight = dbias = None
    if parameters is not None:
        dweight = torch.empty(shape, dtype=parameters[0], device=x.device)
        dbias = torch.empty(shape, dtype=parameters[1], device=x.device)
    if rows == 0:
        return dx, None if dweight is None else dweight.zero_(), None if dbias is None else dbias.zero_()
    kind = (x.dtype, None if weight is None else weight.dtype, None, l1, centered)
    plan = _backward_plan(rows, cols, x.device, kind, parameters)
    w = x if weight is None else weight
    part = torch.empty((2, plan.parts, cols), dtype=torch.float32, device=x.device)
    plan.rows((g, x, w, stats, dx, part), (constant,))
    if plan.columns is not None:
        plan.columns((g, x, stats, part))
    if plan.finish is not None and dweight is not None and dbias is not None:
        plan.finish((part, dweight, dbias))
    return dx, dweight, dbias
