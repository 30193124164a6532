"""Launches of the batch norm kernels. Three steps: statistics, normalization, gradient."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from normmatters.kernels.triton.coefficients import gradient_kernel
from normmatters.kernels.triton.input_gradient import input_gradient_kernel, scatter_kernel
from normmatters.kernels.triton.launch import Launch
from normmatters.kernels.triton.layout import (
    ROWS_PER_CODE,
    Tiling,
    View,
    apply_tiling_of,
    is_small,
    next_power_of_2,
    tiling_of,
    view_of,
)
from normmatters.kernels.triton.normalize import normalize_kernel
from normmatters.kernels.triton.reduce import reduce_kernel
from normmatters.kernels.triton.select import select_kernel
from normmatters.kernels.triton.small_stats import deviation_kernel, whole_finalize_kernel
from normmatters.kernels.triton.stats import finalize_kernel, moments_kernel, pilot_kernel

KINDS = {"l1": 0, "l2": 1, "linf": 2, "topk": 2, "range": 3, "mean": 4}

# Above these, ``select_kernel`` would need more registers or steps than it is worth.
MAX_K = 64
MAX_GROUPS = 16384

# Four programs of four warps a multiprocessor: enough loads in flight, and the grid is one wave of them.
MAX_REGISTERS = 128

# With this many samples the pilot mean is within 1.6 % of σ (one standard error); twice as many where they cost little.
PILOT_SAMPLES = 4096
# What the pilot's first-order correction misses is estimated from this many.
BEND_SAMPLES = 2048

# Half a unit in the last place, and half the smallest number: what storing an output loses.
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24}
_TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}


def kept(kind: str, k: int) -> int:
    """How many elements a channel get a term of their own in the backward pass."""
    return {"linf": 1, "topk": k, "range": 2}.get(kind, 0)


def inverts_output(*, relu: bool, residual: bool) -> bool:
    """Whether the lean backward pass finds x̂ in the output, which the layer after a ReLU keeps anyway.

    A residual hides x̂, and an output without a ReLU is often kept by nobody else: then codes of x̂ are cheaper.
    """
    return relu and not residual


def code_bits(kind: str, *, relu: bool, residual: bool, lean: bool) -> int:
    """Bits an element that the backward pass needs beside its tensor."""
    if lean and not inverts_output(relu=relu, residual=residual):
        return 4
    return 2 if relu or kind == "l1" else 0


class Saved(NamedTuple):
    """Shapes and dtypes of what the backward pass needs beside its tensor: codes, and for L1 counts above the mean."""

    code: tuple[int, int] = (0, 0)
    code_dtype: torch.dtype = torch.int8
    counts: tuple[int, int] = (0, 0)
    count_dtype: torch.dtype = torch.int32


def saved_shapes(view: View, itemsize: int, kind: str, *, relu: bool, residual: bool, lean: bool, save: bool) -> Saved:
    """What is saved; nothing unless ``save``."""
    if not save:
        return Saved()
    bits = code_bits(kind, relu=relu, residual=residual, lean=lean)
    saved = Saved((view.code_rows, view.cols) if bits else (0, 0), torch.int16 if bits == 4 else torch.int8)
    if kind != "l1":
        return saved
    tiling = apply_tiling_of(view, itemsize)
    return saved._replace(
        counts=(tiling.splits, tiling.entries(view)), count_dtype=count_dtype(tiling, ROWS_PER_CODE * tiling.group)
    )


def count_dtype(tiling: Tiling, elements: int) -> torch.dtype:
    """The least integer that holds what one program can count, with so many elements in each place of a tile."""
    most = -(-tiling.tiles // tiling.splits) * tiling.block_r * elements
    return torch.uint8 if most <= 255 else torch.int16 if most <= 32767 else torch.int32


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


_launch = functools.partial(Launch, overlaps=True)

#: The dtypes of weight and bias: a plan is for one set of dtypes, as its compiled kernels are.
Affine = tuple[torch.dtype | None, torch.dtype | None]


def affine_of(weight: Tensor | None, bias: Tensor | None) -> Affine:
    """The dtypes of weight and bias."""
    return None if weight is None else weight.dtype, None if bias is None else bias.dtype


def has_of(affine: Affine) -> dict[str, bool]:
    """Which of weight and bias there are, as the kernels ask for it."""
    return {"HAS_WEIGHT": affine[0] is not None, "HAS_BIAS": affine[1] is not None}


class Moved(NamedTuple):
    """What moves beside the statistics: the dtypes of the running ones, if there are, and whether batches count."""

    running: tuple[torch.dtype, torch.dtype] | None
    counts: bool

    @property
    def constants(self) -> dict[str, bool]:
        """As the kernels ask for it."""
        return {"HAS_RUNNING": self.running is not None, "COUNTS": self.counts}


_NOTHING_MOVES = Moved(None, counts=False)


def rounding_of(dtype: torch.dtype) -> dict[str, float]:
    """What storing an output of this dtype loses, as the kernels ask for it."""
    return {"ROUNDING": _ROUNDING[dtype], "TINY": _TINY[dtype]}


class StatisticsPlan(NamedTuple):
    """The launches of :func:`statistics` at one shape; scratch holds the pilot sums, then the partial sums."""

    pilot: Launch | None
    moments: Launch
    finish: Launch
    scratch: int
    extremes: int
    unbias: float


@functools.cache
def _statistics_plan(view: View, dtype: torch.dtype, kind: str, k: int, moved: Moved) -> StatisticsPlan:
    itemsize = dtype.itemsize
    number = KINDS[kind]
    contiguous = view.spatial > 1
    extreme = kind in ("linf", "topk", "range")
    keep = k if kind == "topk" else 1
    tiling = _extreme_tiling(view, itemsize, keep) if extreme else tiling_of(view, itemsize)
    entries, per_channel = tiling.entries(view), view.spatial // tiling.group
    pilot, pilot_splits, samples = None, 0, view.n
    if kind in ("l1", "l2"):
        pilot, pilot_splits, samples = _pilot(view)
    sizes = (view.rows, view.cols, view.spatial, view.channels, entries)
    moments = _launch(
        moments_kernel,
        (-(-view.cols // tiling.block_c), tiling.splits),
        (*sizes, samples, tiling.tiles),
        {
            "KIND": number,
            "CONTIGUOUS": contiguous,
            "EVEN": _even(view, tiling),
            "KEEP_R": keep > 1,
            "PILOT_SPLITS": pilot_splits,
            "GROUP": tiling.group,
            "BLOCK_R": tiling.block_r,
            "BLOCK_C": tiling.block_c,
        },
        num_warps=tiling.num_warps,
        maxnreg=MAX_REGISTERS,
    )
    if extreme:
        groups = groups_of(view, itemsize, keep)
        elements = (
            -(-tiling.tiles // tiling.splits) * ROWS_PER_CODE * (1 if keep > 1 else tiling.block_r) * tiling.group
        )
        finish = _launch(
            select_kernel,
            (view.channels, 1),
            (*sizes, tiling.splits, per_channel, tiling.tiles, groups, elements, view.n),
            {
                "K": keep,
                "KIND": number,
                **moved.constants,
                "KEEP_R": keep > 1,
                "GROUP": tiling.group,
                "BLOCK_R": tiling.block_r,
                "BLOCK_G": next_power_of_2(groups),
                "BLOCK_E": min(1024, next_power_of_2(elements)),
            },
        )
    else:
        block_c, block_e, programs = _channel_blocks(view)
        finish = _launch(
            finalize_kernel,
            (programs, 1),
            (*sizes, tiling.splits, per_channel, samples, min(view.n, BEND_SAMPLES), view.n),
            {
                "KIND": number,
                **moved.constants,
                "PILOT_IS_SAMPLE": samples < view.n,
                "PILOT_SPLITS": pilot_splits,
                "BLOCK_S": next_power_of_2(min(view.n, BEND_SAMPLES)),
                "BLOCK_E": block_e,
                "BLOCK_C": block_c,
            },
            num_warps=8,
        )
    planes = {"l1": 3, "l2": 2}.get(kind, 1)
    slots = tiling.splits * (tiling.block_r if keep > 1 else 1)
    return StatisticsPlan(
        pilot,
        moments,
        finish,
        pilot_splits * view.channels + planes * tiling.splits * entries,
        2 * slots * entries if extreme else 0,
        # The range does not see the mean, so it has no degree of freedom to correct for.
        1.0 if kind == "range" else view.n / (view.n - 1),
    )


def _pilot(view: View) -> tuple[Launch, int, int]:
    """The launch that samples each channel, its splits, and how many elements it takes."""
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
        step = view.rows // samples
        count = samples
        block_j = min(64, next_power_of_2(view.cols))
        blocks, work = -(-view.cols // block_j), samples
    # Tall tiles: a program waits for memory once or twice only.
    block_i = min(16384 // block_j, next_power_of_2(work))
    splits = 1 << max(0, min(16, -(-work // block_i)).bit_length() - 1)
    launch = _launch(
        pilot_kernel,
        (blocks, splits),
        (view.rows, view.cols, view.spatial, view.channels, samples, step),
        {"CONTIGUOUS": contiguous, "BLOCK_I": block_i, "BLOCK_J": block_j},
        num_warps=8,
    )
    return launch, splits, count


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
    batches: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """μ, 1/D and s/D as rows of one [3, C] tensor, and the extreme elements' offsets; moves the running statistics.

    ``batches``, an int64 in the device's memory, is raised by one.
    """
    view = view_of(x)
    out = _empty(x, 3, view.channels)
    whole = sums(x, running_mean, running_var, momentum, eps, kind, k, constant, batches)
    if whole is not None:
        launch = _whole_plan(view, x.dtype, kind, whole.moved)
        launch((x, whole.scratch, out, whole.running_mean, whole.running_var, whole.batches), whole.numbers)
        return out, None
    has_running = running_mean is not None or running_var is not None
    # Where only one of them is kept, the other one moves in vain.
    unused = _empty(x, view.channels) if has_running and (running_mean is None or running_var is None) else out
    rm = unused if running_mean is None else running_mean.contiguous()
    rv = unused if running_var is None else running_var.contiguous()
    moved = Moved((rm.dtype, rv.dtype) if has_running else None, batches is not None)
    number = out if batches is None else batches
    plan = _statistics_plan(view, x.dtype, kind, k, moved)
    scratch = _empty(x, plan.scratch)
    if plan.pilot is not None:
        plan.pilot((x, scratch))
    extremes = _empty(x, plan.extremes) if plan.extremes else scratch
    plan.moments((x, scratch, extremes))
    numbers = (constant, momentum, eps, plan.unbias)
    if not plan.extremes:
        index = None
        plan.finish((x, scratch, out, rm, rv, number), numbers)
    else:
        index = _empty(x, kept(kind, k), view.channels, dtype=torch.int64)
        plan.finish((x, scratch, extremes, out, index, rm, rv, number), numbers)
    for kept_by_caller, new in ((running_mean, rm), (running_var, rv)):
        if kept_by_caller is not None and kept_by_caller is not new:
            kept_by_caller.copy_(new)
    return out, index


class NormalizePlan(NamedTuple):
    """The launch of :func:`normalize` at one shape, and what it saves."""

    launch: Launch
    saved: Saved


@functools.cache
def _normalize_plan(
    view: View,
    dtype: torch.dtype,
    affine: Affine,
    residual: bool,
    kind: str,
    relu: bool,
    lean: bool,
    save: bool,
    early: bool,
    finalize: bool,
    moved: Moved,
) -> NormalizePlan:
    tiling = apply_tiling_of(view, dtype.itemsize)
    bits = code_bits(kind, relu=relu, residual=residual, lean=lean) if save else 0
    launch = _launch(
        normalize_kernel,
        (-(-view.cols // tiling.block_c), tiling.splits),
        (view.rows, view.cols, view.spatial, view.channels, tiling.entries(view), tiling.tiles),
        {
            "KIND": KINDS[kind],
            "FINALIZE": finalize,
            **moved.constants,
            "BLOCK_S": next_power_of_2(tiling.splits),
            "SPLITS": tiling.splits,
            "CONTIGUOUS": view.spatial > 1,
            "EVEN": _even(view, tiling),
            **has_of(affine),
            "HAS_RESIDUAL": residual,
            "RELU": relu,
            "CODE_BITS": bits,
            "COUNT": kind == "l1" and save,
            "EARLY": early,
            "GROUP": tiling.group,
            "BLOCK_R": tiling.block_r,
            "BLOCK_C": tiling.block_c,
        },
        num_warps=tiling.num_warps,
        # With a residual, two tensors are on their way at a time: fewer programs, more loads each.
        maxnreg=None if residual else MAX_REGISTERS,
    )
    saved = saved_shapes(view, dtype.itemsize, kind, relu=relu, residual=residual, lean=lean, save=save)
    return NormalizePlan(launch, saved)


class Finalize(NamedTuple):
    """Partial sums of a small tensor, of which :func:`normalize` makes the statistics itself."""

    scratch: Tensor
    running_mean: Tensor
    running_var: Tensor
    batches: Tensor
    moved: Moved
    numbers: tuple[float, float, float, float]  # constant, momentum, eps, n/(n−1)


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
    early: bool = False,
    finalize: Finalize | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, its codes, and how many elements lie above the mean (L1); the last two empty unless ``save``.

    ``early`` says that :func:`statistics` of this very ``x`` was the last thing launched: then the other tensors can be
    read before it has ended. With ``finalize``, ``statistics`` is written, not read.
    """
    has_residual, finalizes = residual is not None, finalize is not None
    if finalize is None:
        finalize = Finalize(statistics, statistics, statistics, statistics, _NOTHING_MOVES, (0.0, 0.0, 0.0, 0.0))
    scratch, rm, rv, batches, moved, numbers = finalize
    plan = _normalize_plan(
        view_of(x), x.dtype, affine_of(weight, bias), has_residual, kind, relu, lean, save, early, finalizes, moved
    )
    z = torch.empty_like(x)
    saved, device = plan.saved, x.device
    code = torch.empty(saved.code, dtype=saved.code_dtype, device=device)
    count = torch.empty(saved.counts, dtype=saved.count_dtype, device=device)
    w = statistics if weight is None else weight
    b = statistics if bias is None else bias
    r = x if residual is None else residual
    plan.launch((x, r, w, b, statistics, scratch, rm, rv, batches, z, code, count), numbers)
    return z, code, count


class SumsPlan(NamedTuple):
    """The launches of :func:`sums` at one shape."""

    sums: Launch
    deviations: Launch | None
    scratch: int
    unbias: float


@functools.cache
def _sums_plan(view: View, dtype: torch.dtype, kind: str) -> SumsPlan | None:
    if not is_small(view, dtype.itemsize) or kind not in ("l1", "l2", "mean"):
        return None
    tiling = apply_tiling_of(view, dtype.itemsize)
    grid = (-(-view.cols // tiling.block_c), tiling.splits)
    even = _even(view, tiling)
    sums = _launch(
        moments_kernel,
        grid,
        (view.rows, view.cols, 1, view.channels, view.channels, view.n, tiling.tiles),
        {
            "KIND": KINDS["mean"],
            "CONTIGUOUS": False,
            "EVEN": even,
            "KEEP_R": False,
            "PILOT_SPLITS": 0,
            "GROUP": 1,
            "BLOCK_R": tiling.block_r,
            "BLOCK_C": tiling.block_c,
        },
        num_warps=tiling.num_warps,
        maxnreg=MAX_REGISTERS,
    )
    deviations = None
    if kind != "mean":
        deviations = _launch(
            deviation_kernel,
            grid,
            (view.rows, view.cols, tiling.tiles),
            {
                "KIND": KINDS[kind],
                "EVEN": even,
                "SPLITS": tiling.splits,
                "BLOCK_S": next_power_of_2(tiling.splits),
                "BLOCK_R": tiling.block_r,
                "BLOCK_C": tiling.block_c,
            },
            num_warps=tiling.num_warps,
            maxnreg=MAX_REGISTERS,
        )
    return SumsPlan(sums, deviations, 2 * tiling.splits * view.channels, view.n / (view.n - 1))


@functools.cache
def _whole_plan(view: View, dtype: torch.dtype, kind: str, moved: Moved) -> Launch:
    tiling = apply_tiling_of(view, dtype.itemsize)
    return _launch(
        whole_finalize_kernel,
        (-(-view.cols // tiling.block_c), 1),
        (view.rows, view.cols),
        {
            "KIND": KINDS[kind],
            **moved.constants,
            "SPLITS": tiling.splits,
            "BLOCK_S": next_power_of_2(tiling.splits),
            "BLOCK_C": tiling.block_c,
        },
        num_warps=tiling.num_warps,
    )


def sums(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    kind: str,
    k: int,
    constant: float,
    batches: Tensor | None = None,
) -> Finalize | None:
    """What :func:`normalize` needs to make the statistics itself; None where that does not pay or cannot be done."""
    plan = _sums_plan(view_of(x), x.dtype, kind)
    if plan is None:
        return None
    running = None
    if running_mean is not None and running_var is not None:
        if not (running_mean.is_contiguous() and running_var.is_contiguous()):
            return None
        running = (running_mean.dtype, running_var.dtype)
    elif running_mean is not running_var:
        return None
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=x.device)
    plan.sums((x, scratch, scratch))
    if plan.deviations is not None:
        plan.deviations((x, scratch))
    numbers = (constant, momentum, eps, plan.unbias)
    if running_mean is None or running_var is None:
        running_mean = running_var = scratch
    moved = Moved(running, batches is not None)
    return Finalize(scratch, running_mean, running_var, scratch if batches is None else batches, moved, numbers)


class GradientPlan(NamedTuple):
    """The launches of :func:`gradient` at one shape; scratch holds the coefficients, then the partial sums."""

    reduce: Launch
    finish: Launch | None
    input_gradient: Launch
    scatter: Launch | None
    scratch: int


def coefficients_launch(
    view: View, dtype: torch.dtype, affine: Affine, tiling: Tiling, kind: str, k: int, source: int
) -> Launch:
    """The launch that makes dγ, dβ and dx's coefficients from the partial sums of one ``tiling``."""
    block_c, block_e, programs = _channel_blocks(view)
    return _launch(
        gradient_kernel,
        (programs, 1),
        (view.channels, tiling.entries(view), tiling.splits, view.spatial // tiling.group, view.n),
        {
            "KIND": KINDS[kind],
            "SOURCE": source,
            "K": 1 if kind == "range" else max(kept(kind, k), 1),
            **has_of(affine),
            **rounding_of(dtype),
            "BLOCK_E": block_e,
            "BLOCK_C": block_c,
        },
        num_warps=8,
    )


@functools.cache
def _gradient_plan(
    view: View,
    dtype: torch.dtype,
    affine: Affine,
    kind: str,
    k: int,
    relu: bool,
    residual: bool,
    lean: bool,
    need_dresidual: bool,
    linked: bool,
) -> GradientPlan:
    tiling = apply_tiling_of(view, dtype.itemsize)
    number = KINDS[kind]
    contiguous, even = view.spatial > 1, _even(view, tiling)
    entries = tiling.entries(view)
    source = (1 if inverts_output(relu=relu, residual=residual) else 2) if lean else 0
    bits = code_bits(kind, relu=relu, residual=residual, lean=lean)
    terms = kept(kind, k)
    solves = is_small(view, dtype.itemsize) and not terms
    has, rounding = has_of(affine), rounding_of(dtype)
    blocks = {"BLOCK_R": tiling.block_r, "BLOCK_C": tiling.block_c}
    grid = (-(-view.cols // tiling.block_c), tiling.splits)
    sizes = (view.rows, view.cols, view.spatial, view.channels)
    reduce = _launch(
        reduce_kernel,
        grid,
        (*sizes, entries, tiling.tiles),
        {
            "SOURCE": source,
            "MEAN_ONLY": kind == "mean",
            "CONTIGUOUS": contiguous,
            "EVEN": even,
            **has,
            "RELU": relu,
            "LINKED": linked,
            **rounding,
            "GROUP": tiling.group,
            **blocks,
        },
        num_warps=tiling.num_warps,
        # Three tensors on their way need more room.
        maxnreg=None if linked and source == 0 else MAX_REGISTERS,
    )
    finish = None if solves else coefficients_launch(view, dtype, affine, tiling, kind, k, source)
    # What the sums kernel wrote of a linked gradient is behind the ReLU already.
    masks = relu and not linked
    input_gradient = _launch(
        input_gradient_kernel,
        grid,
        (*sizes, tiling.tiles),
        {
            "KIND": number,
            "K": terms,
            "SOLVE": solves,
            "SOURCE": source,
            **has,
            **rounding,
            "BLOCK_S": next_power_of_2(tiling.splits),
            "SPLITS": tiling.splits,
            "CODE_BITS": bits if masks or kind == "l1" else 0,
            "CONTIGUOUS": contiguous,
            "EVEN": even,
            "RELU": masks,
            "WRITE_RESIDUAL": masks and need_dresidual,
            "EARLY": not (linked and solves),  # the sums kernel writes a linked gradient
            **blocks,
        },
        num_warps=tiling.num_warps,
        maxnreg=MAX_REGISTERS,
    )
    scatter = None
    if terms:
        block = min(128, next_power_of_2(view.channels))
        grid = (-(-view.channels // block), 1)
        scatter = _launch(scatter_kernel, grid, (view.channels,), {"K": terms, "BLOCK_C": block}, num_warps=1)
    planes = 1 if kind == "mean" else 2
    return GradientPlan(reduce, finish, input_gradient, scatter, 4 * view.channels + planes * tiling.splits * entries)


def gradient(
    g: Tensor,
    link: Tensor | None,
    saved: Tensor,
    code: Tensor,
    count: Tensor,
    statistics: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    k: int,
    constant: float,
    *,
    relu: bool,
    residual: bool,
    lean: bool,
    need_dresidual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dx, dγ, dβ and the residual's gradient (None where it is g itself or not wanted). ``link`` is added to g."""
    view = view_of(g)
    linked = link is not None
    plan = _gradient_plan(view, g.dtype, affine_of(weight, bias), kind, k, relu, residual, lean, need_dresidual, linked)
    w = statistics if weight is None else weight
    b = statistics if bias is None else bias
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=g.device)
    dweight = torch.empty(view.channels, dtype=torch.float32, device=g.device)
    dbias = torch.empty_like(dweight)
    dx = torch.empty_like(g)
    # Without a ReLU the residual's gradient is g itself: the caller hands that on.
    behind = torch.empty_like(g) if linked or (need_dresidual and relu) else dx
    extremes = statistics if index is None else index
    plan.reduce((g, g if link is None else link, behind, saved, code, w, b, statistics, scratch))
    if plan.finish is not None:
        plan.finish((scratch, count, w, b, statistics, dweight, dbias), (constant,))
    plan.input_gradient(
        (
            behind if linked else g, saved, code, statistics, scratch, count, w, b, extremes, dx, behind, dweight, dbias
        ),
        (constant,),
    )  # fmt: skip
    if plan.scatter is not None:
        plan.scatter((dx, extremes, scratch))
    return dx, dweight, dbias, behind if need_dresidual and behind is not dx else None
