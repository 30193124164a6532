"""Batch norm over the processes of ``torch.distributed``: each rank normalizes by the whole batch's statistics."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it imports the compiler only when called
from torch.nn.modules.batchnorm import _BatchNorm

from normmatters.functional.checks import check_batch_norm, check_residual
from normmatters.kernels import emulation
from normmatters.kernels.dispatch import max_pool
from normmatters.kernels.double_backward import once_differentiable
from normmatters.nn.batchnorm_act import ThenAct
from normmatters.nn.batchnorm_base import LpBatchNorm
from normmatters.nn.replace import become, changed, keep_all
from normmatters.norm import Norm, compute_dtype


class SyncLpBatchNorm(LpBatchNorm):
    """Batch norm in any norm of the paper over all processes of a group; ``torch.nn.SyncBatchNorm`` for every p.

    In training each rank may bring a different number of elements, or none; the result and its gradients are those of
    one process with the whole batch. As with ``torch.nn.SyncBatchNorm``, the gradients of weight and bias are each
    rank's own (``DistributedDataParallel`` averages them). In evaluation, without an initialised process group, or in
    a group of one, it is :class:`~normmatters.nn.LpBatchNorm2d` for inputs of any rank.

    A step costs two reductions forward (mean, then statistic; general p and Top(k) one more) and one backward. The
    constants of L∞, Top(k) and range depend on the number of elements, which is then read back once a step; L1, L2, Lp
    and mean-only never wait for the device.

    Args:
        num_features, p, eps, momentum, affine, track_running_stats, k, constant, act: as in
            :class:`~normmatters.nn.LpBatchNorm2d`.
        process_group: the processes to normalize over; None is all of them.

    Shape:
        input, residual and output: (N, C, ...), N ≥ 0

    Example::

        >>> bn = SyncLpBatchNorm(16, p=1)           # in each process, after dist.init_process_group
        >>> bn(torch.randn(8, 16, 4, 4)).shape
        torch.Size([8, 16, 4, 4])
    """

    def __init__(
        self,
        num_features: int,
        p: float | str = 1,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        *,
        k: int | None = None,
        constant: str | float = "exact",
        act: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            p,
            eps,
            momentum,
            affine,
            track_running_stats,
            k=k,
            constant=constant,
            act=act,
            device=device,
            dtype=dtype,
        )
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels in dimension 1, got shape {tuple(input.shape)}")

    def _batch_norm(
        self,
        input: Tensor,
        residual: Tensor | None,
        act: str | None,
        link: Tensor | None = None,
        linked: bool = False,
        pooled: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        distributed = self.training and dist.is_available() and dist.is_initialized()
        if not distributed or dist.get_world_size(self.process_group) == 1:
            return super()._batch_norm(input, residual, act, link, linked, pooled)
        if emulation.active() is not None:
            raise RuntimeError("precision.arithmetic does not reach over several processes; leave it or the group")
        norm, weight, bias = self.norm, self.weight, self.bias
        running, _ = self.running_stats(input)
        # Counts can be checked only once the whole batch is known; everything else about the input is checked here.
        check_batch_norm(input[:0], norm, weight, bias, running, True, act=act)
        if residual is not None:
            check_residual(residual, input)
        output, mean, s, count = _sync_normalize(
            input, weight, bias, residual, _Reduction(norm, act == "relu", self.process_group)
        )
        # A batch that is empty on every rank moves nothing, as in one process.
        weighted = running._replace(momentum=(count > 0).to(mean.dtype) * running.momentum)
        weighted.update(norm, mean, None if norm.kind == "mean" else s.square(), count.clamp(min=2))
        if running.num_batches is not None:
            running.num_batches.add_(1)
        return (max_pool(output) if pooled else output), None


class SyncLpBatchNormAct(ThenAct, SyncLpBatchNorm):  # type: ignore[misc]
    """:class:`~normmatters.nn.batchnorm_act.LpBatchNormAct2d` over all processes of a group."""


def convert_sync_batchnorm(module: nn.Module, process_group: Any = None) -> nn.Module:
    """Replace this library's batch norms in ``module`` by :class:`SyncLpBatchNorm`, with their parameters and state.

    PyTorch's own batch norms become ``torch.nn.SyncBatchNorm``, as in its function of the same name. Norms with a
    parametrization or a forward of their own, such as timm's ``BatchNormAct2d``, are kept as they are, with a warning:
    it would be lost.

    Args:
        module: a model, or one batch norm.
        process_group: the processes to normalize over; None is all of them.

    Example::

        >>> model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), L1BatchNorm2d(8)))
        >>> type(model[1]).__name__
        'SyncLpBatchNorm'
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module, got {type(module).__name__}")
    norms = [(name, one) for name, one in module.named_modules() if isinstance(one, (LpBatchNorm, _BatchNorm))]
    packages = {norm: "normmatters" if isinstance(norm, LpBatchNorm) else "torch" for _, norm in norms}
    reasons = {name: reason for name, norm in norms if (reason := changed(norm, packages[norm]))}
    if reasons:
        kept = ", ".join(f"{name or '(model)'} ({reason})" for name, reason in reasons.items())
        warnings.warn(f"convert_sync_batchnorm kept norms that are more than a batch norm: {kept}", stacklevel=2)
    for norm, new in [(norm, _synchronized(norm, process_group)) for name, norm in norms if name not in reasons]:
        become(norm, new)
    return module


def _synchronized(module: nn.Module, process_group: Any) -> nn.Module:
    if not isinstance(module, LpBatchNorm):
        torchs: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
        return torchs
    cls = SyncLpBatchNormAct if isinstance(module, ThenAct) else SyncLpBatchNorm
    result = cls(module.num_features, device="meta")  # what it allocates is replaced by the module's own tensors
    keep_all(module, result)
    result.process_group = process_group
    return result


# --- The equations, with their reductions over the processes ---


@dataclass(frozen=True)
class _Reduction:
    """Which normalization, over which processes, and the sums over them."""

    norm: Norm
    relu: bool
    group: Any

    def reduce(self, local: Tensor, op: Any = None) -> Tensor:
        """The sum (or ``op``) of every rank's ``local``, on every rank."""
        total = local.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, dist.ReduceOp.SUM if op is None else op, group=self.group)
        return total

    def count_on_host(self, count: Tensor) -> int | None:
        """n, where the constant depends on it or reading it is free; checked, on every rank alike."""
        if self.norm.kind not in ("linf", "topk", "range") and not count.is_cpu:
            return None
        n = int(count)
        if n == 1:
            raise ValueError("Expected more than 1 value per channel when training, got 1 over all processes")
        if self.norm.k is not None and 0 < n < self.norm.k:
            raise ValueError(f"Top(k) needs k <= the {n} values per channel of all processes, got k={self.norm.k}")
        return n

    def statistic(self, x: Tensor, deviation: Tensor, count: Tensor) -> tuple[Tensor, Tensor | None]:
        """The statistic of the whole batch, (C,), and what the backward pass needs to find its slope.

        x, deviation: (n_local, C). The second result is for L∞ and Top(k) the smallest deviation that counts and how
        many exceed it, (2, C); for range the largest and the smallest value, (2, C).
        """
        MAX = dist.ReduceOp.MAX
        if self.norm.kind == "range":
            ends = x.new_full((2, x.shape[1]), -math.inf)
            if x.shape[0] > 0:
                ends = torch.stack([x.amax(0), -x.amin(0)])
            high, low = self.reduce(ends, MAX)
            return high + low, torch.stack([high, -low])
        size = deviation.abs()
        if self.norm.kind == "l1":
            return self.reduce(size.sum(0)) / count, None
        if self.norm.kind == "l2":
            return (self.reduce(size.square().sum(0)) / count).sqrt(), None
        if self.norm.kind == "topk":
            assert self.norm.k is not None
            top = self._top(size, self.norm.k).mT.contiguous()
            gathered = [torch.empty_like(top) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(gathered, top, group=self.group)
            top = torch.cat(gathered, 1).topk(self.norm.k, 1).values
            return top.mean(1), torch.stack([top[:, -1], (top > top[:, -1:]).sum(1).to(top.dtype)])
        largest = self.reduce(self._top(size, 1)[0].clamp(min=0), MAX)
        if self.norm.kind == "linf":
            return largest, torch.stack([largest, torch.zeros_like(largest)])
        assert not isinstance(self.norm.p, str)
        unit = torch.where(largest == 0, 1.0, largest)  # relative to the largest, |x|^p cannot overflow
        return (self.reduce((size / unit).pow(self.norm.p).sum(0)) / count).pow(1 / self.norm.p) * unit, None

    @staticmethod
    def _top(size: Tensor, k: int) -> Tensor:
        """The k largest sizes of each channel, (k, C), with -1 where this rank has fewer."""
        top = size.topk(min(k, size.shape[0]), 0).values
        return torch.cat([top, top.new_full((k - top.shape[0], size.shape[1]), -1.0)])

    def slope(
        self, x: Tensor, deviation: Tensor, statistic: Tensor, extremes: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The parts of ∂statistic/∂deviation on this rank, (n_local, C) each, and their sums and counts, (C,) each.

        Elements that tie for an extreme share its gradient, over all ranks; for this each part of an extreme comes
        with the number of its elements.
        """
        if self.norm.kind == "l2":  # its slope is x̂ itself, whose mean is 0
            return [], []
        sign = deviation.sign()
        if self.norm.kind == "l1":
            return [sign], [sign.sum(0)]
        if self.norm.kind == "lp":
            assert not isinstance(self.norm.p, str)
            unit = torch.where(statistic == 0, 1.0, statistic)
            part = (deviation.abs() / unit).pow(self.norm.p - 1) * sign
            return [part], [part.sum(0)]
        assert extremes is not None
        if self.norm.kind == "range":
            ends = [(x == end).to(x.dtype) for end in extremes]
            return ends, [end.sum(0) for end in ends]
        size = deviation.abs()
        inside, ties = (size > extremes[0]) * sign, (size == extremes[0]).to(size.dtype)
        tied = ties * sign
        return [inside, tied], [inside.sum(0), tied.sum(0), ties.sum(0)]

    def assemble(
        self, parts: list[Tensor], sums: Tensor, extremes: Tensor | None, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """∂statistic/∂deviation on this rank, (n_local, C), and its mean over the whole batch, (C,)."""
        if self.norm.kind in ("l1", "lp"):
            return parts[0] / count, sums[0] / count.square()
        if self.norm.kind == "range":
            return parts[0] / sums[0] - parts[1] / sums[1], torch.zeros_like(sums[0])
        assert extremes is not None
        k = self.norm.k or 1
        share = (k - extremes[1]) / sums[2]
        return (parts[0] + share * parts[1]) / k, (sums[0] + share * sums[1]) / (k * count)


class _SyncNormalize(torch.autograd.Function):
    """relu((x − μ)/√(s² + eps)·weight + bias + residual), with μ and s of the whole batch; also returns μ, s and n."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        reduction: _Reduction,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = _rows(input)
        totals = reduction.reduce(torch.cat([x.sum(0), x.new_full((1,), x.shape[0])]))
        count, C = totals[-1], 1.0
        n = reduction.count_on_host(count)
        mean = totals[:-1] / count.clamp(min=1)
        y = deviation = x - mean
        statistic, extremes, D = torch.zeros_like(mean), None, None
        if reduction.norm.kind != "mean" and n != 0:
            C = reduction.norm.scale_constant(2 if n is None else n)
            statistic, extremes = reduction.statistic(x, deviation, count.clamp(min=1))
            s = C * statistic
            D = torch.hypot(s, s.new_full((), math.sqrt(reduction.norm.eps or 0.0)))
            y = deviation / D
        if weight is not None:
            y = y * weight
        if bias is not None:
            y = y + bias
        if residual is not None:
            y = y + _rows(residual)
        if reduction.relu:
            y = y.relu()
        output = _like(y, input)
        ctx.save_for_backward(input, weight, mean, statistic, D, extremes, count, output if reduction.relu else None)
        ctx.reduction, ctx.C = reduction, C
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        s = C * statistic
        ctx.mark_non_differentiable(mean, s, count)
        return output, mean, s, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """dx = (ĝ − mean ĝ − (s/D)·C·Σĝx̂·(e − mean e))/D, with ĝ = g·weight, e = ∂statistic/∂(x − μ)."""
        reduction: _Reduction = ctx.reduction
        input, weight, mean, statistic, D, extremes, count, output = ctx.saved_tensors
        if output is not None:
            grad = grad.masked_fill(output <= 0, 0.0)
        x, g = _rows(input), _rows(grad)
        deviation = x - mean
        x_hat = deviation if D is None else deviation / D
        own = torch.stack([g.sum(0), (g * x_hat).sum(0)])  # also the gradients of this rank's bias and weight
        dx = None
        if ctx.needs_input_grad[0]:
            # D is None without a scale: mean-only, or nothing on any rank.
            parts, sums = ([], []) if D is None else reduction.slope(x, deviation, statistic, extremes)
            total = reduction.reduce(torch.cat([own, *(t[None] for t in sums)]))
            dx = g - total[0] / count
            if D is not None and reduction.norm.kind == "l2":  # (s/D)·∂s/∂x is C²·x̂/n
                dx = (dx - x_hat * (ctx.C**2 * total[1] / count)) / D
            elif D is not None:
                e, e_mean = reduction.assemble(parts, total[2:], extremes, count)
                dx = (dx - (e - e_mean) * (ctx.C**2 * statistic / D * total[1])) / D
            dx = _like(dx if weight is None else dx * weight, input)
        return (
            dx,
            None if weight is None else own[1].to(weight.dtype),
            None if ctx.bias_dtype is None else own[0].to(ctx.bias_dtype),
            None if ctx.residual_dtype is None else grad.to(ctx.residual_dtype),
            None,
        )


def _rows(x: Tensor) -> Tensor:
    """(N, C, ...) as (n, C), in the dtype that statistics are computed in; a view where the layout allows it."""
    return x.to(compute_dtype(x.dtype)).movedim(1, -1).reshape(-1, x.shape[1])


def _like(rows: Tensor, input: Tensor) -> Tensor:
    """The inverse of :func:`_rows`, in the dtype and memory layout of ``input``."""
    result = rows.reshape(input.movedim(1, -1).shape).movedim(-1, 1)
    return torch.empty_like(input).copy_(result)


# A compiled graph may not move collectives, whose order every rank must share.
@_disable_dynamo
def _sync_normalize(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, reduction: _Reduction
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _SyncNormalize.apply(input, weight, bias, residual, reduction)
    return result
