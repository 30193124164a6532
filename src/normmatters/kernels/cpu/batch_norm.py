"""Training batch norm by the native CPU kernels: an eager autograd node, and operators for compilers.

``native/batch_norm.h`` computes; here its arguments are laid out, and what the backward pass needs is saved: the input
(exact), or with ``memory="lean"`` the output and one bit per element, or four bits where the output cannot tell. A ReLU
after a residual costs one bit per element more. The mask of a ReLU without a residual follows from the input.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import torch
from torch import Tensor

from normmatters.functional.batch_norm import batch_norm as plain_batch_norm
from normmatters.kernels import cpu
from normmatters.kernels.double_backward import once_differentiable
from normmatters.kernels.operators import (
    LIBRARY,
    any_requires_grad,
    in_dtype,
    needs_operators,
    register,
    register_gradient,
)
from normmatters.norm import Norm, RunningStats, compute_dtype

__all__ = ["batch_norm"]

_KINDS = {"l1": 0, "l2": 1, "lp": 2, "linf": 3, "topk": 4, "range": 5, "mean": 6}
_TOPK, _RANGE, _MEAN = 4, 5, 6
_PACK = 16  # elements whose bits are saved together (kPack in native/pack.h)

#: BatchNormArgs in native/batch_norm.h.
_ARGUMENTS = struct.Struct("=5q4d3q15q")

LIBRARY.define(
    "cpu_batch_norm_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, float momentum, int kind, int k, float p, float constant, float eps, bool relu, "
    "int mask, int code) -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "cpu_batch_norm_backward(Tensor g, Tensor? saved, Tensor statistics, Tensor bits, Tensor positions, "
    "Tensor? weight, Tensor? bias, bool rows, int kind, int k, float p, float constant, float eps, bool relu, "
    "int mask, int code, bool need_dresidual) -> (Tensor, Tensor, Tensor, Tensor)"
)


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
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if rows else x.contiguous()


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
    return None if tensor is None else tensor.to(dtype).contiguous()


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    kind: int,
    k: int,
    p: float,
    constant: float,
    eps: float,
    relu: bool,
    mask: int,
    code: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, and for the backward pass statistics (4, C), bits, and the positions of extremes (C, k)."""
    rows = _in_rows(x)
    x = _dense(x, rows)
    y, statistics, bits, positions = _fake_forward(
        x, weight, bias, residual, running_mean, running_var, momentum, kind, k, p, constant, eps, relu, mask, code
    )
    dtype = statistics.dtype
    residual = None if residual is None else _dense(residual, rows)
    weight, bias = _vector(weight, dtype), _vector(bias, dtype)
    mean, var = _vector(running_mean, dtype), _vector(running_var, dtype)
    _functions(x.dtype)[0](
        _ARGUMENTS.pack(
            *_geometry(x, rows), kind, k, p, constant, eps, momentum, relu, mask, code,
            *map(_pointer, (x, residual, weight, bias, mean, var, y, statistics, bits, positions)), 0, 0, 0, 0, 0,
        )
    )  # fmt: skip
    for running, moved in ((running_mean, mean), (running_var, var)):
        if running is not None and moved is not running:
            assert moved is not None
            running.copy_(moved)
    return y, statistics, bits, positions


def _fake_forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, k, _, _, _, _, mask, code = arguments
    rows = _in_rows(x)
    statistics = x.new_empty((4, x.shape[1]), dtype=compute_dtype(x.dtype))
    bits = x.new_empty((_packs(x, rows) if mask + code else 0, mask + code), dtype=torch.int16)
    positions = x.new_empty((x.shape[1], k), dtype=torch.int64)
    return torch.empty_like(_dense(x, rows)), statistics, bits, positions


def _backward(
    g: Tensor,
    saved: Tensor | None,
    statistics: Tensor,
    bits: Tensor,
    positions: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the input, γ, β and the residual (empty where that is g itself, or not wanted)."""
    g = _dense(g, rows)
    saved = None if saved is None else _dense(saved, rows)
    dtype = statistics.dtype
    weight, bias = _vector(weight, dtype), _vector(bias, dtype)
    dx, dresidual = torch.empty_like(g), torch.empty_like(g) if need_dresidual and relu else None
    dweight, dbias = statistics.new_empty((2, g.shape[1])).unbind()
    _functions(g.dtype)[1](
        _ARGUMENTS.pack(
            *_geometry(g, rows), kind, k, p, constant, eps, 0.0, relu, mask, code,
            *map(_pointer, (saved, None, weight, bias, None, None, None, statistics.contiguous(), bits.contiguous(),
            positions.contiguous(), g, dx, dresidual, dweight, dbias)),
        )
    )  # fmt: skip
    return dx, dweight, dbias, g.new_empty(0) if dresidual is None else dresidual


def _fake_backward(g: Tensor, saved: Tensor | None, statistics: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *_, rows, _, _, _, _, _, relu, _, _, need_dresidual = arguments
    dx = torch.empty_like(_dense(g, rows))
    dweight, dbias = statistics.new_empty((2, g.shape[1])).unbind()
    return dx, dweight, dbias, torch.empty_like(dx) if need_dresidual and relu else g.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, _, _, _, *options = inputs
    kind, *_, code = options
    y, statistics, bits, positions = output
    saved = None if kind == _MEAN or code == 4 else y if code == 1 else x
    ctx.linear = kind == _MEAN
    ctx.save_for_backward(saved, statistics, bits, positions, weight, bias)
    ctx.arguments = (_in_rows(x), *options, any_requires_grad(residual))


def _gradients(ctx: Any, g: Tensor, backward: Any) -> tuple[Tensor | None, ...]:
    """Gradients of the input, γ, β and the residual."""
    saved, statistics, bits, positions, weight, bias = ctx.saved_tensors
    *_, relu, _, _, need_dresidual = ctx.arguments
    dx, dweight, dbias, dresidual = backward(g, saved, statistics, bits, positions, weight, bias, *ctx.arguments)
    return (
        dx,
        None if weight is None else in_dtype(dweight, weight.dtype),
        None if bias is None else in_dtype(dbias, bias.dtype),
        None if not need_dresidual else dresidual if relu else g,
    )


def _register() -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[1])
        _save(ctx, inputs, output)

    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, g, torch.ops.normmatters.cpu_batch_norm_backward), *[None] * 11

    register("cpu_batch_norm_forward", _forward, _fake_forward)
    register("cpu_batch_norm_backward", _backward, _fake_backward)
    register_gradient("cpu_batch_norm_forward", save, backward)


_register()


class _BatchNorm(torch.autograd.Function):
    """The eager node: shorter than the way through the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        options: tuple[Any, ...],
    ) -> Tensor:
        inputs = (x, weight, bias, residual, *options)
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch._C._functorch.is_batchedtensor(g) or torch._C._functorch.is_legacy_batchedtensor(g):
            return *_gradients_of_many(ctx, g), None
        return *_gradients(ctx, g, _backward), None


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
    needs_grad = torch.is_grad_enabled() and any_requires_grad(input, weight, bias, residual)
    mask = needs_grad and relu and (residual is not None or kind == _MEAN)
    lean = needs_grad and norm.memory == "lean" and norm.kind == "l1"  # the others' gradients need the input itself
    code = 0 if not lean else 1 if relu and residual is None else 4
    options = (
        running.mean, running.var, float(running.momentum), kind, norm.selected,
        float(norm.p) if norm.kind == "lp" else 0.0, norm.scale_constant(input.numel() // input.shape[1]),
        norm.epsilon(input.dtype), relu, int(mask), code,
    )  # fmt: skip
    if needs_operators():
        output: Tensor = torch.ops.normmatters.cpu_batch_norm_forward(input, weight, bias, residual, *options)[0]
        return output
    if not needs_grad:
        output = _forward(input, weight, bias, residual, *options)[0]
    else:
        output = _BatchNorm.apply(input, weight, bias, residual, options)
    torch.autograd.graph.increment_version([t for t in (running.mean, running.var) if t is not None])
    return output
