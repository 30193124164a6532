"""Layer norm and RMS norm, L1 and L2: one read and one write forward, two reads and one write backward.

A whole row lives in the registers of one program, so mean and deviation are exact and cost no second read:

    y = (x−μ)/D·w + b,   D = √(s² + eps),   s = C·mean|x−μ|  (L1)  or  C·√mean(x−μ)²  (L2);   RMS norm: μ = 0.

Backward, with x̂ = (x−μ)/D, ĝ = w·g and sgn = sign(x−μ):

    dx = (1/D)[ĝ − mean ĝ − C·(s/D)·(sgn − mean sgn)·mean(ĝx̂)]     L1
    dx = (1/D)[ĝ − mean ĝ − C²·x̂·mean(ĝx̂)]                         L2          (RMS norm: no mean ĝ, no mean sgn)

Programs are persistent: each takes every P-th tile of rows, loads the next one before it finishes the last, and adds
the gradients of weight and bias in registers. Every program leaves one partial sum, and
``layer_norm_parameters_kernel`` adds those in a fixed order: no atomics, results are bitwise equal from run to run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.layer_norm import Dtypes, Options, layer_norm_by
from normmatters.kernels.triton.launch import Launch, Launches, cached_plan, wait_for_previous
from normmatters.norm import Norm

# Tilings --------------------------------------------------------------------------------------------------------------

MAX_FEATURES = 16384  # the longest row that 1024 threads hold in registers
MAX_ROWS = 2**29  # four statistics per row, with 32-bit offsets
PARTS_AT_A_TIME = 128  # partial sums that layer_norm_parameters_kernel adds at a time: one wait for memory each
# Rows up to here keep the vectors along them in registers.
MAX_KEPT = 1024
# Rows up to here keep the parameter gradients in registers while they go; above, a second kernel reads the columns.
MAX_FUSED = 8192


class Tiling(NamedTuple):
    """How rows are cut: tiles of ``block_r`` whole rows, ``programs`` programs that share them."""

    block_r: int
    block_n: int
    num_warps: int
    programs: int


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Tuning(NamedTuple):
    """What is chosen by measuring. The defaults are what was fastest on an H200.

    Attributes:
        per_thread: elements a thread: with 16, a row, its gradient, the two sums for the parameters and the next row
            fit in registers.
        registers: at most that many a thread: the least that compiles without spilling to memory.
        threads: that fit on a multiprocessor with these registers.
    """

    per_thread: int = 16
    registers: int = 64
    threads: int = 1024


def forward_tuning(cols: int, dtype: torch.dtype, l1: bool, centered: bool) -> Tuning:
    """For rows of this length. The threads of a row meet twice, for the mean and for the deviation from it."""
    if cols <= MAX_KEPT:
        return Tuning(registers=96, threads=640)
    if l1 and centered and 2048 < cols <= 4096 and dtype.itemsize == 2:
        # Half as many threads meet sooner, and five rows fit where four did: 2.28 passes, not 2.51. L2, with one sum
        # less, gains nothing by it; float32 would spill.
        return Tuning(per_thread=32, registers=96, threads=640)
    return Tuning()


def backward_tuning(cols: int) -> Tuning:
    """For rows of this length."""
    return Tuning(registers=128 if cols <= MAX_FUSED else 64, threads=512)


def tiling_of(rows: int, cols: int, device: torch.device, tuning: Tuning) -> Tiling:
    """Tiles of so many elements a thread, and as many programs as fit on the device."""
    block_n = max(16, triton.next_power_of_2(cols))
    num_warps = max(4, min(32, block_n // (32 * tuning.per_thread)))
    block_r = max(1, min(32 * num_warps * tuning.per_thread // block_n, triton.next_power_of_2(rows)))
    resident = multiprocessors(device) * max(1, tuning.threads // (32 * num_warps))
    return Tiling(block_r, block_n, num_warps, max(1, min(-(-rows // block_r), resident)))


# Kernels --------------------------------------------------------------------------------------------------------------


@triton.jit
def _add(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _sign(d):
    return tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))


@triton.jit
def _load_rows(ptr, row, col, rows, cols, WHOLE: tl.constexpr, STREAM: tl.constexpr = False):
    """A tile of rows, [BLOCK_R, BLOCK_N]; zero outside. STREAM: it leaves the cache first."""
    POLICY: tl.constexpr = "evict_first" if STREAM else ""
    offset = row.to(tl.int64)[:, None] * cols + col[None, :]
    if WHOLE:
        return tl.load(ptr + offset, mask=(row < rows)[:, None], other=0.0, eviction_policy=POLICY)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    return tl.load(ptr + offset, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def _load_columns(ptr, col, cols, WHOLE: tl.constexpr):
    """A vector along the rows, [1, BLOCK_N], in float32; zero outside.

    Loaded as a matrix of one row, for which the compiler takes the same layout as for the rows: no exchange.
    """
    if WHOLE:
        return tl.load(ptr + col[None, :]).to(tl.float32)
    return tl.load(ptr + col[None, :], mask=(col < cols)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store_rows(ptr, value, row, col, rows, cols, WHOLE: tl.constexpr):
    offset = row.to(tl.int64)[:, None] * cols + col[None, :]
    value = value.to(ptr.dtype.element_ty)
    if WHOLE:
        tl.store(ptr + offset, value, mask=(row < rows)[:, None])
    else:
        tl.store(ptr + offset, value, mask=(row < rows)[:, None] & (col < cols)[None, :])


@triton.jit
def layer_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    stats_ptr,
    rows,
    cols,
    eps,
    constant,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    L1: tl.constexpr,
    CENTERED: tl.constexpr,
    WHOLE: tl.constexpr,
    PREFETCH: tl.constexpr,
    KEEP: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    cols = cols // ALIGN * ALIGN  # nothing but a hint for wide loads: the compiler sees the factor
    col = tl.arange(0, BLOCK_N)
    step = tl.num_programs(0) * BLOCK_R
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    # Vectors that are too long to KEEP in registers come from the cache each time.
    if HAS_WEIGHT and KEEP:
        weight = _load_columns(weight_ptr, col, cols, WHOLE)
    if HAS_BIAS and KEEP:
        bias = _load_columns(bias_ptr, col, cols, WHOLE)
    if PREFETCH:
        following = _load_rows(x_ptr, row, col, rows, cols, WHOLE)
    for start in range(tl.program_id(0) * BLOCK_R, rows, step):
        row = start + tl.arange(0, BLOCK_R)
        if not PREFETCH:
            following = _load_rows(x_ptr, row, col, rows, cols, WHOLE)
        d = following.to(tl.float32)
        if PREFETCH:
            following = _load_rows(x_ptr, row + step, col, rows, cols, WHOLE)
        if CENTERED:
            mean = tl.sum(d, axis=1) / cols
            d -= mean[:, None]
            if not WHOLE:
                d = tl.where((col < cols)[None, :], d, 0.0)
        if L1:
            if CENTERED:
                deviation, balance = tl.reduce((tl.abs(d), _sign(d)), 1, _add)
            else:
                deviation = tl.sum(tl.abs(d), axis=1)
            scale = constant * (deviation / cols)
            square = scale * scale + eps
        else:
            square = constant * constant * (tl.sum(d * d, axis=1) / cols) + eps
        root = tl.sqrt_rn(square)
        inverse = 1.0 / root
        y = d * inverse[:, None]
        if HAS_WEIGHT and KEEP:
            y *= weight
        if HAS_WEIGHT and not KEEP:
            y *= _load_columns(weight_ptr, col, cols, WHOLE)
        if HAS_BIAS and KEEP:
            y += bias
        if HAS_BIAS and not KEEP:
            y += _load_columns(bias_ptr, col, cols, WHOLE)
        _store_rows(y_ptr, y, row, col, rows, cols, WHOLE)
        exists = row < rows
        tl.store(stats_ptr + row, inverse, mask=exists)
        if CENTERED:
            tl.store(stats_ptr + rows + row, mean, mask=exists)
        if L1:
            plane = 2 if CENTERED else 1
            tl.store(stats_ptr + plane * rows + row, scale * inverse, mask=exists)
            if CENTERED:
                tl.store(stats_ptr + 3 * rows + row, balance / cols, mask=exists)


@triton.jit
def _load_stats(stats_ptr, row, rows, L1: tl.constexpr, CENTERED: tl.constexpr):
    """1/D, μ, s/D and mean sgn of each row; what the kind does not have is zero."""
    exists = row < rows
    inverse = tl.load(stats_ptr + row, mask=exists, other=0.0)
    mean = tl.zeros_like(inverse)
    ratio = tl.zeros_like(inverse)
    balance = tl.zeros_like(inverse)
    if CENTERED:
        mean = tl.load(stats_ptr + rows + row, mask=exists, other=0.0)
    if L1:
        plane = 2 if CENTERED else 1
        ratio = tl.load(stats_ptr + plane * rows + row, mask=exists, other=0.0)
        if CENTERED:
            balance = tl.load(stats_ptr + 3 * rows + row, mask=exists, other=0.0)
    return inverse, mean, ratio, balance


@triton.jit
def layer_norm_backward_kernel(
    g_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    dx_ptr,
    part_ptr,
    rows,
    cols,
    constant,
    HAS_WEIGHT: tl.constexpr,
    PARAMETERS: tl.constexpr,
    L1: tl.constexpr,
    CENTERED: tl.constexpr,
    WHOLE: tl.constexpr,
    PREFETCH: tl.constexpr,
    KEEP: tl.constexpr,
    STREAM: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    cols = cols // ALIGN * ALIGN  # nothing but a hint for wide loads: the compiler sees the factor
    col = tl.arange(0, BLOCK_N)
    step = tl.num_programs(0) * BLOCK_R
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    if PARAMETERS:
        dweight = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        dbias = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    if HAS_WEIGHT and KEEP:
        weight = _load_columns(weight_ptr, col, cols, WHOLE)
    if PREFETCH:
        next_g = _load_rows(g_ptr, row, col, rows, cols, WHOLE, STREAM)
        next_x = _load_rows(x_ptr, row, col, rows, cols, WHOLE, STREAM)
    next_inverse, next_mean, next_ratio, next_balance = _load_stats(stats_ptr, row, rows, L1, CENTERED)
    for start in range(tl.program_id(0) * BLOCK_R, rows, step):
        row = start + tl.arange(0, BLOCK_R)
        if not PREFETCH:
            next_g = _load_rows(g_ptr, row, col, rows, cols, WHOLE, STREAM)
            next_x = _load_rows(x_ptr, row, col, rows, cols, WHOLE, STREAM)
        g = next_g.to(tl.float32)
        d = next_x.to(tl.float32)
        inverse, mean, ratio, balance = next_inverse, next_mean, next_ratio, next_balance
        if PREFETCH:
            next_g = _load_rows(g_ptr, row + step, col, rows, cols, WHOLE, STREAM)
            next_x = _load_rows(x_ptr, row + step, col, rows, cols, WHOLE, STREAM)
        next_inverse, next_mean, next_ratio, next_balance = _load_stats(stats_ptr, row + step, rows, L1, CENTERED)
        if CENTERED:
            d -= mean[:, None]
        # Outside the row g is zero, so x̂ needs no mask there: it enters the sums only times g.
        normalized = d * inverse[:, None]
        if PARAMETERS:
            dweight += g * normalized
            dbias += g
        if HAS_WEIGHT and KEEP:
            g *= weight
        if HAS_WEIGHT and not KEEP:
            g *= _load_columns(weight_ptr, col, cols, WHOLE)
        if CENTERED:
            total, product = tl.reduce((g, g * normalized), 1, _add)
            level = total / cols
        else:
            product = tl.sum(g * normalized, axis=1)
            level = tl.zeros_like(product)
        product = product / cols
        if L1:
            # Two numbers a row, one for each side of the mean: selecting costs less than multiplying by a sign.
            tilt = constant * ratio * product
            level -= tilt * balance
            change = tl.where(d > 0, tilt[:, None], tl.where(d < 0, -tilt[:, None], 0.0))
        else:
            change = normalized * (constant * constant * product)[:, None]
        dx = (g - level[:, None] - change) * inverse[:, None]
        _store_rows(dx_ptr, dx, row, col, rows, cols, WHOLE)
    if PARAMETERS:
        offset = tl.program_id(0) * cols + col
        plane = tl.num_programs(0) * cols
        tl.store(part_ptr + offset, tl.sum(dweight, axis=0), mask=col < cols)
        tl.store(part_ptr + plane + offset, tl.sum(dbias, axis=0), mask=col < cols)


@triton.jit
def layer_norm_columns_kernel(
    g_ptr,
    x_ptr,
    stats_ptr,
    part_ptr,
    rows,
    cols,
    L1: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Σg·x̂ and Σg down a strip of columns, for rows too long to keep these sums in registers."""
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    dweight = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    dbias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(split * BLOCK_R, rows, splits * BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        g = _load_rows(g_ptr, row, col, rows, cols, False).to(tl.float32)
        d = _load_rows(x_ptr, row, col, rows, cols, False).to(tl.float32)
        inverse, mean, _ratio, _balance = _load_stats(stats_ptr, row, rows, L1, CENTERED)
        dweight += g * (d - mean[:, None]) * inverse[:, None]
        dbias += g
    offset = split * cols + col
    tl.store(part_ptr + offset, tl.sum(dweight, axis=0), mask=col < cols)
    tl.store(part_ptr + splits * cols + offset, tl.sum(dbias, axis=0), mask=col < cols)


@triton.jit
def layer_norm_parameters_kernel(
    part_ptr,
    dweight_ptr,
    dbias_ptr,
    parts,
    cols,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Adds the partial sums of all programs, always in the same order."""
    wait_for_previous(OVERLAP)
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    dweight = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    dbias = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        dweight += _load_rows(part_ptr, part, col, parts, cols, False)
        dbias += _load_rows(part_ptr + parts * cols, part, col, parts, cols, False)
    tl.store(dweight_ptr + col, tl.sum(dweight, axis=0).to(dweight_ptr.dtype.element_ty), mask=col < cols)
    tl.store(dbias_ptr + col, tl.sum(dbias, axis=0).to(dbias_ptr.dtype.element_ty), mask=col < cols)


# Launches -------------------------------------------------------------------------------------------------------------


def statistics_shape(rows: int, options: Options) -> tuple[int, int]:
    """Planes of 1/D, and where they apply μ, s/D and mean sgn, for each row."""
    return (1 + options.centered) * (1 + (options.p == 1)), rows


class Variant(NamedTuple):
    """What the compiled kernels depend on beside the shape. The dtype of weight or bias is None if there is none."""

    dtype: torch.dtype
    weight: torch.dtype | None
    bias: torch.dtype | None
    options: Options

    def values(self, tiling: Tiling, rows: int, cols: int) -> dict[str, Any]:
        """As the kernels take them."""
        return {
            "rows": rows,
            "cols": cols,
            "eps": float(self.options.eps),
            "constant": self.options.constant,
            "HAS_WEIGHT": self.weight is not None,
            "HAS_BIAS": self.bias is not None,
            "L1": self.options.p == 1,
            "CENTERED": self.options.centered,
            "WHOLE": cols == tiling.block_n,
            "KEEP": tiling.block_n <= MAX_KEPT,
            "ALIGN": math.gcd(cols, 16),
            "BLOCK_R": tiling.block_r,
            "BLOCK_N": tiling.block_n,
        }


# The caches are bounded: batches of sentences have another number of rows each time.
@cached_plan
def forward_launch(rows: int, cols: int, device: torch.device, variant: Variant) -> Launch:
    tuning = forward_tuning(cols, variant.dtype, variant.options.p == 1, variant.options.centered)
    tiling = tiling_of(rows, cols, device, tuning)
    prefetch = tiling.block_n * variant.dtype.itemsize <= 16384
    return Launch(
        layer_norm_forward_kernel,
        (tiling.programs, 1),
        {**variant.values(tiling, rows, cols), "PREFETCH": prefetch},
        num_warps=tiling.num_warps,
        maxnreg=tuning.registers,
    )


def forward(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """y, and the statistics of the rows in float32. A row has ``shape``."""
    x, weight, bias = x.contiguous(), _contiguous(weight), _contiguous(bias)
    cols = math.prod(shape)
    rows = x.numel() // cols
    y = torch.empty_like(x)
    stats = torch.empty(statistics_shape(rows, options), dtype=torch.float32, device=x.device)
    if rows > 0:
        variant = Variant(x.dtype, _dtype(weight), _dtype(bias), options)
        forward_launch(rows, cols, x.device, variant)(
            (x, x if weight is None else weight, x if bias is None else bias, y, stats)
        )
    return y, stats


class BackwardPlan(NamedTuple):
    """The launches of :func:`backward` at one shape, and how many partial sums each column has."""

    launches: Launches
    parts: int


@cached_plan
def backward_plan(rows: int, cols: int, device: torch.device, variant: Variant, dtypes: Dtypes) -> BackwardPlan:
    tuning = backward_tuning(cols)
    tiling = tiling_of(rows, cols, device, tuning)
    fused = dtypes is not None and tiling.block_n <= MAX_FUSED
    values = variant.values(tiling, rows, cols)
    by_rows = Launch(
        layer_norm_backward_kernel,
        (tiling.programs, 1),
        {
            **values,
            "PARAMETERS": fused,
            # float32 rows fill the registers: there is no room for the next ones.
            "PREFETCH": tiling.block_n <= MAX_FUSED and variant.dtype.itemsize == 2,
            # x and g, each read once, leave the cache before the weight, which every row reads.
            "STREAM": MAX_KEPT < tiling.block_n <= MAX_FUSED,
        },
        num_warps=tiling.num_warps,
        maxnreg=tuning.registers,
    )
    if dtypes is None:
        return BackwardPlan(Launches(by_rows), 0)
    launches, parts, strip = [by_rows], tiling.programs, min(128, tiling.block_n)
    if not fused:
        parts = max(1, min(-(-rows // 16), 4 * multiprocessors(device) * strip // tiling.block_n))
        blocks = {"BLOCK_R": 16, "BLOCK_C": strip}
        launches.append(Launch(layer_norm_columns_kernel, (-(-cols // strip), parts), {**values, **blocks}))
    block_c = min(32, tiling.block_n)
    sums = {"parts": parts, "cols": cols, "BLOCK_P": PARTS_AT_A_TIME, "BLOCK_C": block_c}
    launches.append(Launch(layer_norm_parameters_kernel, (-(-cols // block_c), 1), sums))
    return BackwardPlan(Launches(*launches), parts)


def backward(
    g: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None, stats: Tensor, options: Options, dtypes: Dtypes
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, and Σg·x̂ and Σg over the rows, in the ``dtypes`` and of ``shape``; without dtypes, no sums."""
    g, x, weight = g.contiguous(), x.contiguous(), _contiguous(weight)
    cols = math.prod(shape)
    rows = x.numel() // cols
    dx = torch.empty_like(x)
    dweight = dbias = None
    if dtypes is not None:
        make = torch.empty if rows > 0 else torch.zeros
        dweight, dbias = (make(shape, dtype=dtype, device=x.device) for dtype in dtypes)
    if rows > 0:
        plan = backward_plan(rows, cols, x.device, Variant(x.dtype, _dtype(weight), None, options), dtypes)
        part = torch.empty((2, plan.parts, cols), dtype=torch.float32, device=x.device)
        tensors = {"g_ptr": g, "x_ptr": x, "weight_ptr": x if weight is None else weight, "stats_ptr": stats}
        tensors |= {"dx_ptr": dx, "part_ptr": part}
        if dweight is not None and dbias is not None:
            tensors |= {"dweight_ptr": dweight, "dbias_ptr": dbias}
        plan.launches(tensors)
    return dx, dweight, dbias


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _dtype(vector: Tensor | None) -> torch.dtype | None:
    return None if vector is None else vector.dtype


def why_not(input: Tensor, normalized_shape: Sequence[int], norm: Norm) -> str:
    """Why the kernels cannot take this call; empty if they can."""
    if norm.kind not in ("l1", "l2"):
        return "there are layer norm kernels for p = 1 and p = 2 only"
    size = math.prod(normalized_shape)
    if not 0 < size <= MAX_FEATURES:
        return f"the kernels take rows of 1 to {MAX_FEATURES} features, not {size}"
    if input.numel() // size > MAX_ROWS:
        return f"the kernels take at most {MAX_ROWS} rows, not {input.numel() // size}"
    return ""


layer_norm = layer_norm_by("layer_norm", compute=forward, differentiate=backward, statistics_shape=statistics_shape)
