"""Launches of the batch norm kernels. Three steps: statistics, normalization, gradient."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from normmatters.kernels.triton import apply, select, stats
from normmatters.kernels.triton.layout import ROWS_PER_CODE, Tiling, View, memory_format, next_power_of_2, tiling_of, view_of

KINDS = {"l1": 0, "l2": 1, "linf": 2, "topk": 2, "range": 3, "mean": 4}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAXNREG = None
MAX_K = 64
MAX_GROUPS = 16384

# With this many samples the pilot mean is within 1.1 % of σ (one standard error).
PILOT_SAMPLES = 8192

# Half a unit in the last place, and half the smallest number: what storing an output loses.
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24}
_TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}


def kept(kind: str, k: int | None) -> int:
    """How many elements a channel get a term of their own in the backward pass."""
    return {"linf": 1, "topk": k or 0, "range": 2}.get(kind, 0)


def code_bits(kind: str, *, relu: bool, residual: bool, lean: bool) -> int:
    """Bits an element that the backward pass needs beside its tensor."""
    if lean and kind != "mean":
        return 4 if residual else 2
    return 2 if relu or kind == "l1" else 0


def code_dtype(bits: int) -> torch.dtype:
    """Of a word that holds the codes of ROWS_PER_CODE rows."""
    return {8: torch.int8, 16: torch.int16, 32: torch.int32}[max(bits, 2) * ROWS_PER_CODE]


def extreme_tiling(view: View, itemsize: int, k: int) -> Tiling:
    """Fewer programs, so that a channel's group extremes fit into one program of ``select_kernel``."""
    return tiling_of(view, itemsize, programs=1056 if k == 1 else 264)


def groups_of(view: View, tiling: Tiling, k: int) -> int:
    """Groups a channel."""
    slots = tiling.splits * (tiling.block_r if k > 1 else 1)
    return slots * view.spatial // tiling.group


def _even(view: View, tiling: Tiling) -> bool:
    return view.cols % tiling.block_c == 0 and view.rows % (ROWS_PER_CODE * tiling.block_r) == 0


def _pilot(x: Tensor, view: View) -> tuple[Tensor, int, int, bool]:
    """Sums of a sample, its splits, its size, and whether it is less than the whole."""
    contiguous = view.spatial > 1
    exact = view.n <= 2 * PILOT_SAMPLES
    if contiguous:
        samples = view.spatial if exact else min(view.spatial, max(32, -(-PILOT_SAMPLES // view.rows)))
        step = 1 + int(0.618 * view.spatial)
        count = samples * view.rows
        block_i, block_j = 16, min(64, next_power_of_2(samples))
        blocks = view.channels
        splits = max(1, min(16, -(-view.rows // block_i), 1056 // blocks))
    else:
        samples = view.rows if exact else PILOT_SAMPLES
        step = view.rows // samples
        count = samples
        block_j = min(64, next_power_of_2(view.cols))
        block_i = 1024 // block_j
        blocks = -(-view.cols // block_j)
        splits = max(1, min(32, -(-samples // block_i), 1056 // blocks))
    out = torch.empty((splits, view.channels), dtype=torch.float32, device=x.device)
    stats.pilot_kernel[(blocks, splits)](
        x, out, view.rows, view.cols, view.spatial, view.channels, samples, step,
        CONTIGUOUS=contiguous, BLOCK_I=block_i, BLOCK_J=block_j, num_warps=4,
    )  # fmt: skip
    return out, splits, count, count < view.n


def _moments(
    x: Tensor, view: View, tiling: Tiling, kind: int, planes: int, pilot: tuple[Tensor, int, int, bool] | None, keep_r: bool
) -> tuple[Tensor, Tensor]:
    contiguous = view.spatial > 1
    entries = tiling.entries(view)
    part = torch.empty((planes, tiling.splits, entries), dtype=torch.float32, device=x.device)
    extreme = part
    if kind in (2, 3):
        slots = tiling.splits * (tiling.block_r if keep_r else 1)
        extreme = torch.empty((2, slots, entries), dtype=torch.float32, device=x.device)
    sums, pilot_splits, pilot_count, _ = pilot or (part, 0, 1, False)
    stats.moments_kernel[(-(-view.cols // tiling.block_c), tiling.splits)](
        x, sums, part, extreme, view.rows, view.cols, view.spatial, view.channels, entries,
        pilot_splits, pilot_count, tiling.tiles,
        KIND=kind, CONTIGUOUS=contiguous, EVEN=_even(view, tiling), KEEP_R=keep_r,
        GROUP=tiling.group, BLOCK_R=tiling.block_r, BLOCK_C=tiling.block_c, num_warps=tiling.num_warps, maxnreg=MAXNREG,
    )  # fmt: skip
    return part, extreme


def _channel_blocks(view: View) -> tuple[int, int, int]:
    """Channels and partial sums a program of the small per-channel kernels takes, and its programs."""
    block_c = 2 if view.spatial > 1 else 8
    block_e = 256 if view.spatial > 1 else 128
    return block_c, block_e, -(-view.channels // block_c)


def statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    kind: str,
    k: int,
    constant: float,
) -> tuple[Tensor, Tensor]:
    """μ, 1/D and s/D as rows of one [3, C] tensor, and the extreme elements' offsets; moves the running statistics."""
    view = view_of(x)
    code = KINDS[kind]
    contiguous = view.spatial > 1
    out = torch.empty((3, view.channels), dtype=torch.float32, device=x.device)
    index = torch.empty((kept(kind, k), view.channels), dtype=torch.int64, device=x.device)
    has_running = running_mean is not None
    # The range does not see the mean, so it has no degree of freedom to correct for.
    unbias = 1.0 if kind == "range" else view.n / (view.n - 1)
    rm = running_mean if running_mean is not None else out
    rv = running_var if running_var is not None else out
    if code in (2, 3):
        keep = kept(kind, k) if kind == "topk" else 1
        tiling = extreme_tiling(view, x.element_size(), keep)
        part, extreme = _moments(x, view, tiling, code, 1, None, keep > 1)
        per_channel = view.spatial // tiling.group
        groups = groups_of(view, tiling, keep)
        tile_rows = ROWS_PER_CODE * (1 if keep > 1 else tiling.block_r)
        elements = -(-tiling.tiles // tiling.splits) * tile_rows * tiling.group
        select.select_kernel[(view.channels,)](
            x, part, extreme, out, index, rm, rv, view.rows, view.cols, view.spatial, view.channels,
            tiling.entries(view), tiling.splits, per_channel, tiling.tiles, groups, elements,
            view.n, constant, momentum, eps, unbias,
            K=keep, KIND=code, HAS_RUNNING=has_running, KEEP_R=keep > 1, GROUP=tiling.group,
            BLOCK_R=tiling.block_r, BLOCK_G=next_power_of_2(groups), BLOCK_E=min(1024, next_power_of_2(elements)),
            num_warps=4,
        )  # fmt: skip
        return out, index
    pilot = _pilot(x, view) if kind != "mean" else None
    tiling = tiling_of(view, x.element_size())
    part, _ = _moments(x, view, tiling, code, {"l1": 3, "l2": 2, "mean": 1}[kind], pilot, False)
    sums, pilot_splits, pilot_count, sampled = pilot or (part, 0, 1, False)
    block_c, block_e, programs = _channel_blocks(view)
    stats.finalize_kernel[(programs,)](
        x, sums, part, out, rm, rv, view.rows, view.cols, view.spatial, view.channels,
        tiling.entries(view), tiling.splits, view.spatial // tiling.group, pilot_splits, pilot_count,
        view.n, constant, momentum, eps, unbias,
        KIND=code, CONTIGUOUS=contiguous, HAS_RUNNING=has_running, PILOT_IS_SAMPLE=sampled,
        BLOCK_E=block_e, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return out, index


def saved_shapes(x: Tensor, kind: str, *, relu: bool, residual: bool, lean: bool) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Shape and bits of the code, and the shape of the count, for the fake kernel too."""
    view = view_of(x)
    bits = code_bits(kind, relu=relu, residual=residual, lean=lean)
    tiling = tiling_of(view, x.element_size())
    count = (tiling.splits, tiling.entries(view)) if kind == "l1" else (0, 0)
    return (view.code_rows, view.cols) if bits else (0, 0), bits, count


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: Tensor,
    kind: str,
    *,
    relu: bool,
    lean: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, its codes, and how many elements lie above the mean (L1)."""
    view = view_of(x)
    tiling = tiling_of(view, x.element_size())
    z = torch.empty_like(x)
    code_shape, bits, count_shape = saved_shapes(x, kind, relu=relu, residual=residual is not None, lean=lean)
    if not save:
        code_shape, bits, count_shape = (0, 0), 0, (0, 0)
    code = torch.empty(code_shape, dtype=code_dtype(bits), device=x.device)
    count = torch.empty(count_shape, dtype=torch.int32, device=x.device)
    apply.normalize_kernel[(-(-view.cols // tiling.block_c), tiling.splits)](
        x, residual if residual is not None else x, weight if weight is not None else x, bias if bias is not None else x,
        statistics, z, code, count, view.rows, view.cols, view.spatial, view.channels, tiling.entries(view), tiling.tiles,
        CONTIGUOUS=view.spatial > 1, EVEN=_even(view, tiling),
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        RELU=relu, CODE_BITS=bits, COUNT=kind == "l1" and save,
        GROUP=tiling.group, BLOCK_R=tiling.block_r, BLOCK_C=tiling.block_c, num_warps=tiling.num_warps, maxnreg=MAXNREG,
    )  # fmt: skip
    return z, code, count


def gradient(
    g: Tensor,
    saved: Tensor,
    code: Tensor,
    count: Tensor,
    statistics: Tensor,
    index: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    constant: float,
    *,
    relu: bool,
    residual: bool,
    lean: bool,
    need_dresidual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dγ, dβ and the residual's gradient (empty where it is g itself or not wanted)."""
    view = view_of(g)
    tiling = tiling_of(view, g.element_size())
    number = KINDS[kind]
    contiguous, even = view.spatial > 1, _even(view, tiling)
    entries = tiling.entries(view)
    source = 0 if not lean or kind == "mean" else (2 if residual else 1)
    bits = code_bits(kind, relu=relu, residual=residual, lean=lean)
    planes = 1 if kind == "mean" else 2
    part = torch.empty((planes, tiling.splits, entries), dtype=torch.float32, device=g.device)
    grid = (-(-view.cols // tiling.block_c), tiling.splits)
    w = weight if weight is not None else statistics
    b = bias if bias is not None else statistics
    rounding, tiny = _ROUNDING[g.dtype], _TINY[g.dtype]
    has_weight, has_bias = weight is not None, bias is not None
    apply.reduce_kernel[grid](
        g, saved, code, w, b, statistics, part, view.rows, view.cols, view.spatial, view.channels, entries, tiling.tiles,
        SOURCE=source, MEAN_ONLY=kind == "mean", CONTIGUOUS=contiguous, EVEN=even, HAS_WEIGHT=has_weight, HAS_BIAS=has_bias,
        RELU=relu, ROUNDING=rounding, TINY=tiny, GROUP=tiling.group, BLOCK_R=tiling.block_r, BLOCK_C=tiling.block_c,
        num_warps=tiling.num_warps, maxnreg=MAXNREG,
    )  # fmt: skip
    dweight = torch.empty(view.channels, dtype=torch.float32, device=g.device)
    dbias = torch.empty_like(dweight)
    coefficient = torch.empty((4, view.channels), dtype=torch.float32, device=g.device)
    block_c, block_e, programs = _channel_blocks(view)
    terms = index.shape[0]
    apply.gradient_kernel[(programs,)](
        part, count, w, b, statistics, dweight, dbias, coefficient, view.channels, entries, tiling.splits,
        count.shape[0], view.spatial // tiling.group, view.n, constant,
        KIND=number, SOURCE=source, K=1 if kind == "range" else max(terms, 1), HAS_WEIGHT=has_weight, HAS_BIAS=has_bias,
        ROUNDING=rounding, TINY=tiny, BLOCK_E=block_e, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    dx = torch.empty_like(g)
    # Without a ReLU the residual's gradient is g itself: the caller hands that on.
    write_residual = need_dresidual and relu
    dresidual = torch.empty_like(g) if write_residual else torch.empty(0, dtype=g.dtype, device=g.device)
    apply.input_gradient_kernel[grid](
        g, saved, code, statistics, coefficient, index, dx, dresidual if write_residual else dx,
        view.rows, view.cols, view.spatial, view.channels, tiling.tiles,
        KIND=number, K=terms, CODE_BITS=bits if relu or kind == "l1" else 0,
        CONTIGUOUS=contiguous, EVEN=even, RELU=relu, WRITE_RESIDUAL=write_residual,
        BLOCK_R=tiling.block_r, BLOCK_C=tiling.block_c, num_warps=tiling.num_warps, maxnreg=MAXNREG,
    )  # fmt: skip
    if terms:
        block = min(128, triton.next_power_of_2(view.channels))
        apply.scatter_kernel[(-(-view.channels // block),)](
            dx, index, coefficient, view.channels, K=terms, BLOCK_C=block, num_warps=1
        )
    return dx, dweight, dbias, dresidual


__all__ = ["DTYPES", "KINDS", "MAX_GROUPS", "MAX_K", "gradient", "memory_format", "normalize", "saved_shapes", "statistics"]
