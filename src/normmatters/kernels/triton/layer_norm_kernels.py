"""Layer norm and RMS norm, L1 and L2: one read and one write forward, two reads and one write backward.

A whole row lives in the registers of one program, so mean and deviation are exact and cost no second read:

    y = (x−μ)/D·w + b,   D = √(s² + eps),   s = C·mean|x−μ|  (L1)  or  C·√mean(x−μ)²  (L2);   RMS norm: μ = 0.

Backward, with x̂ = (x−μ)/D, ĝ = w·g and sgn = sign(x−μ):

    dx = (1/D)[ĝ − mean ĝ − C·(s/D)·(sgn − mean sgn)·mean(ĝx̂)]     L1
    dx = (1/D)[ĝ − mean ĝ − C²·x̂·mean(ĝx̂)]                         L2          (RMS norm: no mean ĝ, no mean sgn)

Programs are persistent: each takes every P-th tile of rows, loads the next one before it finishes the last, and adds
the gradients of weight and bias in registers. Every program leaves one partial sum, and ``parameters_kernel`` adds
those in a fixed order: no atomics, results are bitwise equal from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normmatters.kernels.triton.launch import wait_for_previous


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
def forward_kernel(
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
def backward_kernel(
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
def columns_kernel(
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
def parameters_kernel(
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
