"""Training batch norm by the native CPU kernels: an eager autograd node, and operators for compilers.

``native/batch_norm.h`` computes; here its arguments are laid out, and what the backward pass needs is saved: the input
(exact), or with ``memory="lean"`` the output and one bit per element, or four bits where the output cannot tell. A ReLU
after a residual costs one bit per element more. The mask of a ReLU without a residual follows from the input.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normmatters.functional.batch_norm import batch_norm as plain_batch_norm
from normmatters.kernels import cpu
from normmatters.kernels.cpu import memory
from normmatters.kernels.operators import Operator, any_requires_grad, in_dtype, needs_grad, needs_operators
from normmatters.norm import Norm, RunningStats, compute_dtype

__all__ = ["batch_norm"]

_KINDS = {"l1": 0, "l2": 1, "lp": 2, "linf": 3, "topk": 4, "range": 5, "mean": 6}
_TOPK, _RANGE, _MEAN = 4, 5, 6
_PACK = 16  # elements whose bits are saved together (kPack in native/pack.h)

#: BatchNormArgs in native/batch_norm.h.
_ARGUMENTS = struct.Struct("=5q4d3q15q")


class Options(NamedTuple):
    """What a forward pass is called with beside its tensors."""

    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float
    kind: int
    k: int
    p: float
    constant: float
    eps: float
    relu: bool
    mask: int  # bits per element that are saved of the ReLU,
    code: int  # and of x


@functools.cache
def _functions(dtype: torch.dtype) -> tuple[Any, Any]:
    library = cpu.library()
    assert library is not None, cpu.why_not()
    name = str(dtype).removeprefix("torch.")
    forward, backward = (library.function(f"nm_batch_norm_{way}_{name}", "s") for way in ("forward", "backward"))
    return forward, backward


def _in_rows(x: Tensor) -> bool:
    """Whether the channels of a pixel lie, or by a copy will lie, beside each other in memory."""
    return x.dim() > 2 and x.stride(1) == 1 and x.shape[1] > 1 and not x.is_contiguous()


def _dense(x: Tensor, rows: bool) -> Tensor:
    if not rows:
        return x.contiguous()
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x  # quicker than the three calls below, which small layers feel
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _geometry(x: Tensor, rows: bool) -> tuple[int, int, int]:
    """(N, C, S) of planes, or (N·S, C, 1) of rows."""
    n, channels = x.shape[:2]
    pixels = math.prod(x.shape[2:])
    return (n * pixels, channels, 1) if rows or pixels == 1 else (n, channels, pixels)


def _packs(x: Tensor, rows: bool) -> int:
    n, channels, pixels = _geometry(x, rows)
    return n * channels * -(-pixels // _PACK) if pixels > 1 else n * -(-channels // _PACK)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _vector(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or (tensor.dtype is dtype and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).contiguous()


Results = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, options: Options
) -> Results:
    """The output, and for the backward pass statistics (4, C), bits, and the positions of extremes (C, k)."""
    running_mean, running_var, momentum, *kind, relu, mask, code = options
    rows = _in_rows(x)
    x = _dense(x, rows)
    y = torch.empty_like(x) if x.nbytes < memory.SMALLEST else memory.empty_like(x)  # small layers feel a call
    statistics, bits, positions = _results(x, rows, options)
    dtype = statistics.dtype
    residual = None if residual is None else _dense(residual, rows)
    weight, bias = _vector(weight, dtype), _vector(bias, dtype)
    mean, var = _vector(running_mean, dtype), _vector(running_var, dtype)
    _functions(x.dtype)[0](
        _ARGUMENTS.pack(
            *_geometry(x, rows), *kind, momentum, relu, mask, code,
            *map(_pointer, (x, residual, weight, bias, mean, var, y, statistics, bits, positions)), 0, 0, 0, 0, 0,
        )
    )  # fmt: skip
    for running, moved in ((running_mean, mean), (running_var, var)):
        if running is not None and moved is not running:
            assert moved is not None
            running.copy_(moved)
    return y, statistics, bits, positions


def _fake_forward(x: Tensor, weight: Any, bias: Any, residual: Any, options: Options) -> Results:
    rows = _in_rows(x)
    x = _dense(x, rows)
    return torch.empty_like(x), *_results(x, rows, options)


def _results(x: Tensor, rows: bool, options: Options) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What the forward pass fills beside the output."""
    words = options.mask + options.code
    statistics = x.new_empty((4, x.shape[1]), dtype=compute_dtype(x.dtype))
    bits = x.new_empty((_packs(x, rows), words), dtype=torch.int16) if words else None
    positions = x.new_empty((x.shape[1], options.k), dtype=torch.int64) if options.k else None
    return statistics, bits, positions


def _backward(
    g: Tensor,
    saved: Tensor | None,
    statistics: Tensor,
    bits: Tensor | None,
    positions: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: bool,
    kind: int,
    k: int,
    p: float,
    constant: float,
    eps: float,
    relu: bool,
    mask: int,
    code: int,
    need_dresidual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the input, γ, β and the residual (None where that is g itself, or not wanted)."""
    g = _dense(g, rows)
    saved = None if saved is None else _dense(saved, rows)
    dtype = statistics.dtype
    weight, bias = _vector(weight, dtype), _vector(bias, dtype)
    made = [None if t is None else t.contiguous() for t in (statistics, bits, positions)]
    dx, dresidual = memory.empty_like(g), memory.empty_like(g) if need_dresidual and relu else None
    dweight, dbias = statistics.new_empty(g.shape[1]), statistics.new_empty(g.shape[1])  # results must not alias
    _functions(g.dtype)[1](
        _ARGUMENTS.pack(
            *_geometry(g, rows), kind, k, p, constant, eps, 0.0, relu, mask, code,
            *map(_pointer, (saved, None, weight, bias, None, None, None, *made, g, dx, dresidual, dweight, dbias)),
        )
    )  # fmt: skip
    return dx, dweight, dbias, dresidual


def _fake_backward(g: Tensor, saved: Any, statistics: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    *_, rows, _, _, _, _, _, relu, _, _, need_dresidual = arguments
    dx = torch.empty_like(_dense(g, rows))
    dweight, dbias = statistics.new_empty(g.shape[1]), statistics.new_empty(g.shape[1])
    return dx, dweight, dbias, torch.empty_like(dx) if need_dresidual and relu else None


def _save(ctx: Any, tensors: tuple[Any, ...], options: Options, results: Results) -> None:
    x, weight, bias, residual = tensors
    _, _, _, *numbers = options
    y, statistics, bits, positions = results
    ctx.linear = options.kind == _MEAN
    saved = None if ctx.linear or options.code == 4 else y if options.code == 1 else x
    ctx.save_for_backward(saved, statistics, bits, positions, weight, bias)
    ctx.arguments = (_in_rows(x), *numbers, any_requires_grad(residual))


def _gradients(ctx: Any, backward: Any, g: Tensor, _: None) -> tuple[Tensor | None, ...]:
    """Gradients of the input, γ, β and the residual."""
    if torch._C._functorch.is_batchedtensor(g) or torch._C._functorch.is_legacy_batchedtensor(g):
        return _gradients_of_many(ctx, g)
    saved, statistics, bits, positions, weight, bias = ctx.saved_tensors
    *_, relu, _, _, need_dresidual = ctx.arguments
    dx, dweight, dbias, dresidual = backward(g, saved, statistics, bits, positions, weight, bias, *ctx.arguments)
    return (
        dx,
        None if weight is None else in_dtype(dweight, weight.dtype),
        None if bias is None else in_dtype(dbias, bias.dtype),
        None if not need_dresidual else dresidual if relu else g,
    )


def _gradients_of_many(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """:func:`_gradients` for a batch of gradients (``vmap``, ``is_grads_batched=True``), by the plain equation."""
    saved, _, bits, _, weight, bias = ctx.saved_tensors
    rows, kind, k, p, constant, eps, relu, mask, code, need_dresidual = ctx.arguments
    if code:
        raise RuntimeError('memory="lean" saves no input, which several gradients at once need: use memory="exact"')
    x = torch.zeros_like(g[0] if saved is None else saved) if saved is None else saved.detach()
    x.requires_grad_()
    weight, bias = (t if t is None else t.detach().requires_grad_() for t in (weight, bias))
    with torch.enable_grad():
        exact = {0: 1, 1: 2, 2: p, _RANGE: "range", _MEAN: "mean"}.get(kind, math.inf)
        largest = k if kind == _TOPK else None
        multiplier = constant / Norm(exact, largest).scale_constant(x.numel() // x.shape[1])
        norm = Norm(exact, largest, multiplier, eps)
        y = plain_batch_norm(x, norm, weight, bias, RunningStats(), True)
    if mask:
        open_ = (bits[:, 0, None] >> torch.arange(_PACK)).bitwise_and(1).bool().view(-1)
        n, channels, pixels = _geometry(x, rows)
        if pixels > 1:
            open_ = open_.view(n, channels, -1)[..., :pixels].reshape(x.shape)
        else:
            open_ = open_.view(n, -1)[:, :channels].reshape(x.movedim(1, -1).shape).movedim(-1, 1)
        g = torch.where(open_, g, 0)
    elif relu:
        g = torch.where(y > 0, g, 0)
    wanted = [x, *[t for t in (weight, bias) if t is not None]]
    found = iter(torch.autograd.grad(y, wanted, g))
    return next(found), *[t if t is None else next(found) for t in (weight, bias)], g if need_dresidual else None


_batch_norm = Operator(
    "cpu_batch_norm",
    options=Options,
    forward=_forward,
    fake_forward=_fake_forward,
    save=_save,
    backward=_backward,
    fake_backward=_fake_backward,
    gradients=_gradients,
    changes=("running_mean", "running_var"),
)


def batch_norm(
    input: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStats,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """A training step's batch norm; the dispatcher has checked the arguments and raises ``running.num_batches``."""
    rows = _in_rows(input)
    input = _dense(input, rows)  # here, where autograd sees a copy made: what the node saves then leads to the input
    if residual is not None and residual.dtype != input.dtype:
        residual = residual.to(input.dtype)
    kind, relu = _KINDS[norm.kind], act == "relu"
    saves = needs_grad(input, weight, bias, residual)
    lean = saves and norm.memory == "lean" and norm.kind == "l1"  # the others' gradients need the input itself
    options = Options(
        running.mean,
        running.var,
        float(running.momentum),
        kind,
        norm.selected,
        float(norm.p) if norm.kind == "lp" else 0.0,
        norm.scale_constant(input.numel() // input.shape[1]),
        norm.epsilon(input.dtype),
        relu,
        mask=int(saves and relu and (residual is not None or kind == _MEAN)),
        code=0 if not lean else 1 if relu and residual is None else 4,
    )
    output: Tensor = _batch_norm(input, weight, bias, residual, options, needs_grad=saves)
    if not needs_operators():  # which count the changes by themselves
        for buffer in (running.mean, running.var):
            if buffer is not None:
                torch.autograd.graph.increment_version(buffer)
    return output
