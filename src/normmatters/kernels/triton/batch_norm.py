"""Launches of the batch norm kernels. Three steps: statistics, normalization, gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normmatters.kernels.triton import apply, select, stats
from normmatters.kernels.triton.launch import launch
from normmatters.kernels.triton.layout import (
    ROWS_PER_CODE,
    Tiling,
    View,
    next_power_of_2,
    tiling_of,
    view_of,
)

KINDS = {"l1": 0, "l2": 1, "linf": 2, "topk": 2, "range": 3, "mean": 4}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Above these, ``select_kernel`` would need more registers or steps than it is worth.
MAX_K = 64
MAX_GROUPS = 16384

# Four programs of four warps a multiprocessor: enough loads in flight, and the grid is one wave of them.
MAX_REGISTERS = 128

# With this many samples the pilot mean is within 1.6 % of σ (one standard error); twice as many where they cost little.
PILOT_SAMPLES = 4096

# Half a unit in the last place, and half the smallest number: what storing an output loses.
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24}
_TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}


class Pilot(NamedTuple):
    """Sums of a sample of each channel."""

    sums: Tensor
    splits: int
    count: int


def kept(kind: str, k: int) -> int:
    """How many elements a channel get a term of their own in the backward pass."""
    return {"linf": 1, "topk": k, "range": 2}.get(kind, 0)


def code_bits(kind: str, *, relu: bool, residual: bool, lean: bool) -> int:
    """Bits an element that the backward pass needs beside its tensor."""
    if lean and residual:
        return 4
    return 2 if relu or kind == "l1" else 0


def code_dtype(bits: int) -> torch.dtype:
    """Of a word that holds the codes of ROWS_PER_CODE = 4 rows."""
    return torch.int16 if bits == 4 else torch.int8


def saved_shapes(
    x: Tensor, kind: str, *, relu: bool, residual: bool, lean: bool
) -> tuple[tuple[int, int], int, tuple[int, int]]:
    """Shape and bits of the code, and the shape of the count (L1)."""
    view = view_of(x)
    bits = code_bits(kind, relu=relu, residual=residual, lean=lean)
    tiling = tiling_of(view, x.element_size())
    count = (tiling.splits, tiling.entries(view)) if kind == "l1" else (0, 0)
    return (view.code_rows, view.cols) if bits else (0, 0), bits, count


def groups_of(view: View, itemsize: int, k: int) -> int:
    """Groups a channel whose extremes ``select_kernel`` must hold."""
    tiling = _extreme_tiling(view, itemsize, k)
    return tiling.splits * (tiling.block_r if k > 1 else 1) * view.spatial // tiling.group


def _extreme_tiling(view: View, itemsize: int, k: int) -> Tiling:
    # Top(k) keeps more groups a program, so it gets fewer programs: a channel's groups must fit into one.
    return tiling_of(view, itemsize, 528 if k == 1 else 264)


def _even(view: View, tiling: Tiling) -> bool:
    return view.cols % tiling.block_c == 0 and view.rows % (ROWS_PER_CODE * tiling.block_r) == 0


def _empty(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def _pilot(x: Tensor, view: View) -> Pilot:
    contiguous = view.spatial > 1
    wanted = PILOT_SAMPLES * (2 if view.n >= 32 * PILOT_SAMPLES else 1)
    if contiguous:
        samples = min(view.spatial, max(16, -(-wanted // view.rows)))
        step = 1 + int(0.618 * view.spatial)
        count = samples * view.rows
        block_j = min(64, next_power_of_2(samples))
        blocks, work = view.channels, view.rows
    else:
        samples = min(view.rows, wanted)
        step = 1
        count = samples
        block_j = min(64, next_power_of_2(view.cols))
        blocks, work = -(-view.cols // block_j), samples
    # Tall tiles: a program waits for memory a few times only.
    block_i = min(4096 // block_j, next_power_of_2(work))
    splits = 1 << max(0, min(16, -(-work // block_i)).bit_length() - 1)
    sums = _empty(x, splits, view.channels)
    launch(
        stats.pilot_kernel,
        (blocks, splits),
        (view, x.dtype, x.device),
        (x, sums, view.rows, view.cols, view.spatial, view.channels, samples, step),
        {"CONTIGUOUS": contiguous, "BLOCK_I": block_i, "BLOCK_J": block_j},
        num_warps=8,
    )
    return Pilot(sums, splits, count)


def _moments(
    x: Tensor, view: View, tiling: Tiling, kind: int, planes: int, pilot: Pilot | None, keep_r: bool
) -> tuple[Tensor, Tensor]:
    entries = tiling.entries(view)
    part = _empty(x, planes, tiling.splits, entries)
    extreme = part
    if kind in (2, 3):
        extreme = _empty(x, 2, tiling.splits * (tiling.block_r if keep_r else 1), entries)
    pilot = pilot or Pilot(part, 1, 1)
    launch(
        stats.moments_kernel,
        (-(-view.cols // tiling.block_c), tiling.splits),
        (view, tiling, x.dtype, x.device, kind, keep_r, pilot.splits),
        (
            x, pilot.sums, part, extreme,
            view.rows, view.cols, view.spatial, view.channels, entries, pilot.count, tiling.tiles,
        ),
        {
            "KIND": kind,
            "CONTIGUOUS": view.spatial > 1,
            "EVEN": _even(view, tiling),
            "KEEP_R": keep_r,
            "PILOT_SPLITS": pilot.splits,
            "GROUP": tiling.group,
            "BLOCK_R": tiling.block_r,
            "BLOCK_C": tiling.block_c,
        },
        num_warps=tiling.num_warps,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return part, extreme


def _channel_blocks(view: View) -> tuple[int, int, int]:
    """Channels and partial sums that a program of the small per-channel kernels takes at a time, and its programs."""
    block_c, block_e = (2, 2048) if view.spatial > 1 else (8, 1024)
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
    number = KINDS[kind]
    out = _empty(x, 3, view.channels)
    index = _empty(x, kept(kind, k), view.channels, dtype=torch.int64)
    has_running = running_mean is not None
    # The range does not see the mean, so it has no degree of freedom to correct for.
    unbias = 1.0 if kind == "range" else view.n / (view.n - 1)
    rm = running_mean if running_mean is not None else out
    rv = running_var if running_var is not None else out
    key = (view, x.dtype, x.device, kind, k, has_running, rm.dtype)
    if number in (2, 3):
        keep = k if kind == "topk" else 1
        tiling = _extreme_tiling(view, x.element_size(), keep)
        part, extreme = _moments(x, view, tiling, number, 1, None, keep > 1)
        groups = groups_of(view, x.element_size(), keep)
        tile_rows = ROWS_PER_CODE * (1 if keep > 1 else tiling.block_r)
        elements = -(-tiling.tiles // tiling.splits) * tile_rows * tiling.group
        launch(
            select.select_kernel,
            (view.channels,),
            key,
            (
                x, part, extreme, out, index, rm, rv, view.rows, view.cols, view.spatial, view.channels,
                tiling.entries(view), tiling.splits, view.spatial // tiling.group, tiling.tiles, groups, elements,
                view.n, constant, momentum, eps, unbias,
            ),
            {
                "K": keep,
                "KIND": number,
                "HAS_RUNNING": has_running,
                "KEEP_R": keep > 1,
                "GROUP": tiling.group,
                "BLOCK_R": tiling.block_r,
                "BLOCK_G": next_power_of_2(groups),
                "BLOCK_E": min(1024, next_power_of_2(elements)),
            },
        )  # fmt: skip
        return out, index
    pilot = None if kind == "mean" else _pilot(x, view)
    tiling = tiling_of(view, x.element_size())
    part, _ = _moments(x, view, tiling, number, {"l1": 3, "l2": 2, "mean": 1}[kind], pilot, False)
    pilot = pilot or Pilot(part, 1, view.n)
    block_c, block_e, programs = _channel_blocks(view)
    launch(
        stats.finalize_kernel,
        (programs,),
        key,
        (
            x, pilot.sums, part, out, rm, rv, view.rows, view.cols, view.spatial, view.channels,
            tiling.entries(view), tiling.splits, view.spatial // tiling.group, pilot.count,
            view.n, constant, momentum, eps, unbias,
        ),
        {
            "KIND": number,
            "CONTIGUOUS": view.spatial > 1,
            "HAS_RUNNING": has_running,
            "PILOT_IS_SAMPLE": pilot.count < view.n,
            "PILOT_SPLITS": pilot.splits,
            "BLOCK_E": block_e,
            "BLOCK_C": block_c,
        },
        num_warps=8,
    )  # fmt: skip
    return out, index


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
    """The output, its codes, and how many elements lie above the mean (L1); the last two empty unless ``save``."""
    view = view_of(x)
    tiling = tiling_of(view, x.element_size())
    code_shape, bits, count_shape = saved_shapes(x, kind, relu=relu, residual=residual is not None, lean=lean)
    if not save:
        code_shape, bits, count_shape = (0, 0), 0, (0, 0)
    z = torch.empty_like(x)
    code = _empty(x, *code_shape, dtype=code_dtype(bits))
    count = _empty(x, *count_shape, dtype=torch.int32)
    w, b, r = (t if t is not None else statistics for t in (weight, bias, residual))
    has = (weight is not None, bias is not None, residual is not None)
    launch(
        apply.normalize_kernel,
        (-(-view.cols // tiling.block_c), tiling.splits),
        (view, x.dtype, x.device, w.dtype, b.dtype, has, relu, bits, kind == "l1"),
        (
            x, r, w, b, statistics, z, code, count,
            view.rows, view.cols, view.spatial, view.channels, tiling.entries(view), tiling.tiles,
        ),
        {
            "CONTIGUOUS": view.spatial > 1,
            "EVEN": _even(view, tiling),
            "HAS_WEIGHT": has[0],
            "HAS_BIAS": has[1],
            "HAS_RESIDUAL": has[2],
            "RELU": relu,
            "CODE_BITS": bits,
            "COUNT": kind == "l1" and save,
            "GROUP": tiling.group,
            "BLOCK_R": tiling.block_r,
            "BLOCK_C": tiling.block_c,
        },
        num_warps=tiling.num_warps,
        # With a residual, two tensors are on their way at a time: fewer programs, more loads each.
        maxnreg=None if has[2] else MAX_REGISTERS,
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
    source = (2 if residual else 1) if lean else 0
    bits = code_bits(kind, relu=relu, residual=residual, lean=lean)
    terms = index.shape[0]
    w = weight if weight is not None else statistics
    b = bias if bias is not None else statistics
    affine = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    rounding = {"ROUNDING": _ROUNDING[g.dtype], "TINY": _TINY[g.dtype]}
    blocks = {"BLOCK_R": tiling.block_r, "BLOCK_C": tiling.block_c}
    grid = (-(-view.cols // tiling.block_c), tiling.splits)
    key = (view, g.dtype, g.device, w.dtype, b.dtype, *affine.values(), kind, source, bits, relu, terms, need_dresidual)

    part = _empty(g, 1 if kind == "mean" else 2, tiling.splits, entries)
    launch(
        apply.reduce_kernel,
        grid,
        key,
        (
            g, saved, code, w, b, statistics, part,
            view.rows, view.cols, view.spatial, view.channels, entries, tiling.tiles,
        ),
        {
            "SOURCE": source,
            "MEAN_ONLY": kind == "mean",
            "CONTIGUOUS": contiguous,
            "EVEN": even,
            **affine,
            "RELU": relu,
            **rounding,
            "GROUP": tiling.group,
            **blocks,
        },
        num_warps=tiling.num_warps,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    dweight, dbias, coefficient = _empty(g, view.channels), _empty(g, view.channels), _empty(g, 4, view.channels)
    block_c, block_e, programs = _channel_blocks(view)
    launch(
        apply.gradient_kernel,
        (programs,),
        key,
        (
            part, count, w, b, statistics, dweight, dbias, coefficient,
            view.channels, entries, tiling.splits, view.spatial // tiling.group, view.n, constant,
        ),
        {
            "KIND": number,
            "SOURCE": source,
            "K": 1 if kind == "range" else max(terms, 1),
            **affine,
            **rounding,
            "BLOCK_E": block_e,
            "BLOCK_C": block_c,
        },
        num_warps=8,
    )  # fmt: skip
    dx = torch.empty_like(g)
    # Without a ReLU the residual's gradient is g itself: the caller hands that on.
    write_residual = need_dresidual and relu
    dresidual = torch.empty_like(g) if write_residual else _empty(g, 0, dtype=g.dtype)
    launch(
        apply.input_gradient_kernel,
        grid,
        key,
        (
            g, saved, code, statistics, coefficient, index, dx, dresidual,
            view.rows, view.cols, view.spatial, view.channels, tiling.tiles,
        ),
        {
            "KIND": number,
            "K": terms,
            "CODE_BITS": bits if relu or kind == "l1" else 0,
            "CONTIGUOUS": contiguous,
            "EVEN": even,
            "RELU": relu,
            "WRITE_RESIDUAL": write_residual,
            **blocks,
        },
        num_warps=tiling.num_warps,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    if terms:
        block = min(128, next_power_of_2(view.channels))
        launch(
            apply.scatter_kernel,
            (-(-view.channels // block),),
            key,
            (dx, index, coefficient, view.channels),
            {"K": terms, "BLOCK_C": block},
            num_warps=1,
        )
    return dx, dweight, dbias, dresidual
