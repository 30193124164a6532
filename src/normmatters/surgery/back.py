"""``to_torch``: back to the modules of ``torch.nn``, with the same outputs in evaluation."""

from __future__ import annotations

import copy
import logging
import warnings

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from normmatters.functional.torch_batch_norm import TINY
from normmatters.nn import batchnorm as bn
from normmatters.nn.batchnorm_act import ThenAct
from normmatters.nn.batchnorm_base import LpBatchNorm
from normmatters.nn.layernorm import L1RMSNorm, LpLayerNorm
from normmatters.nn.layernorm2d import ChannelsFirst
from normmatters.nn.leaf import module_call
from normmatters.nn.replace import changed
from normmatters.nn.sync import SyncLpBatchNorm
from normmatters.surgery.blocks import unfuse
from normmatters.surgery.report import Change, ConversionReport, report_to_fill
from normmatters.surgery.swap import carry_over, check_model, replace_modules
from normmatters.weight_norm import BoundedWeight, ClassicWeight, remove_weight_norm

_log = logging.getLogger(__name__)


class ThenReLU:
    """For norms that were written with ``act="relu"`` by hand: PyTorch's batch norm, then the add and the ReLU."""

    act = "relu"  # as our norms say it

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        if isinstance(input, Proxy):
            return module_call(self, input, *(() if residual is None else (residual,)))
        output: Tensor = super().forward(input)  # type: ignore[misc]
        return torch.relu(output if residual is None else output + residual)


class BatchNormReLU1d(ThenReLU, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` and a ReLU, in PyTorch's own operations and under the same state_dict keys."""


class BatchNormReLU2d(ThenReLU, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` and a ReLU, in PyTorch's own operations and under the same state_dict keys."""


class BatchNormReLU3d(ThenReLU, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` and a ReLU, in PyTorch's own operations and under the same state_dict keys."""


class SyncBatchNormReLU(ThenReLU, nn.SyncBatchNorm):
    """``nn.SyncBatchNorm`` and a ReLU, in PyTorch's own operations and under the same state_dict keys."""


class BatchNormAct2d(ThenAct, nn.BatchNorm2d):
    """``nn.BatchNorm2d``, then a dropout and an activation, in PyTorch's own operations: timm's class of this name."""


class SyncBatchNormAct(ThenAct, nn.SyncBatchNorm):
    """``nn.SyncBatchNorm``, then a dropout and an activation, in PyTorch's own operations."""


class LayerNorm2d(ChannelsFirst, nn.LayerNorm):
    """``nn.LayerNorm`` of each pixel of (N, C, H, W) over its channels, in PyTorch's own operations."""


_PLAIN: dict[type[nn.Module], tuple[type[nn.Module], type[nn.Module]]] = {
    bn.LpBatchNorm1d: (nn.BatchNorm1d, BatchNormReLU1d),
    bn.LpBatchNorm2d: (nn.BatchNorm2d, BatchNormReLU2d),
    bn.LpBatchNorm3d: (nn.BatchNorm3d, BatchNormReLU3d),
    SyncLpBatchNorm: (nn.SyncBatchNorm, SyncBatchNormReLU),
}
PLAIN_BATCH_NORMS = tuple(plain for classes in _PLAIN.values() for plain in classes)


def to_torch(
    model: nn.Module,
    *,
    remove_weight_norms: bool = True,
    inplace: bool = True,
    report: ConversionReport | None = None,
) -> nn.Module:
    """Replace the norms of this library by ``torch.nn``'s, for deployment: the outputs in evaluation are the same.

    Undoes :func:`convert`: blocks get their class and forward back, and state_dict keys stay. A norm that was written
    with ``act="relu"`` by hand becomes a ``BatchNormReLU2d``, a subclass of ``nn.BatchNorm2d`` that takes the residual
    too. From then on the model trains in L2.

    Kept, with a warning, is what PyTorch has nothing equal for: layer and RMS norms with p ≠ 2, batch norms without
    running statistics, which normalize by the batch in evaluation too, and norms with a parametrization or a forward
    of your own.

    Args:
        model: any module.
        remove_weight_norms: also turn weight norms of this library into plain weights.
        inplace: change ``model`` itself; False works on a deep copy.
        report: an empty :class:`ConversionReport` to fill. It is also logged, at level INFO.

    Returns:
        The model: ``model`` itself unless ``inplace`` is False.

    Example::

        >>> model = to_torch(convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), "l1"))
        >>> [type(module).__name__ for module in model]
        ['Conv2d', 'BatchNorm2d', 'ReLU']
    """
    check_model(model)
    report = report_to_fill(report)
    if not inplace:
        model = copy.deepcopy(model)
    if remove_weight_norms and any(isinstance(module, (BoundedWeight, ClassicWeight)) for module in model.modules()):
        remove_weight_norm(model)

    new: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        unfuse(module)
        plain = _plain(module)
        if isinstance(plain, str):
            report.changes.append(Change(name, type(module).__name__, None, note=plain))
        elif plain is not None:
            new[module] = plain
            report.changes.append(Change(name, type(module).__name__, type(plain).__name__))
    replace_modules(model, new)
    _log.info("%s", report)
    if report.skipped:
        kept = ", ".join(f"{change.name or '(model)'} ({change.before}: {change.note})" for change in report.skipped)
        warnings.warn(f"to_torch kept modules that torch.nn has nothing equal for: {kept}", stacklevel=2)
    return model


def _plain(module: nn.Module) -> nn.Module | str | None:
    """The module of ``torch.nn`` for this one; or why there is none; or None for a module that is not ours."""
    made: nn.Module
    if not isinstance(module, (LpLayerNorm, L1RMSNorm, LpBatchNorm)):
        return None
    if reason := changed(module, "normmatters"):
        return reason
    if isinstance(module, LpLayerNorm):
        if module.p != 2 or not (isinstance(module.constant, str) or module.constant == 1):
            return "torch.nn has only L2"
        made = (LayerNorm2d if isinstance(module, ChannelsFirst) else nn.LayerNorm)(
            module.normalized_shape, device="meta"
        )
    elif isinstance(module, L1RMSNorm):
        return "torch.nn has only L2"
    else:
        if module.running_mean is None and not (module.p == 2 and module.constant in ("exact", "paper", "none", 1)):
            return "it normalizes by the batch in evaluation too, and torch.nn has only L2"
        if isinstance(module, ThenAct):
            made = (SyncBatchNormAct if isinstance(module, SyncLpBatchNorm) else BatchNormAct2d)(
                module.num_features, device="meta"
            )
            made.drop, made.activation = module.drop, module.activation
        else:
            plain, with_relu = next(classes for ours, classes in _PLAIN.items() if isinstance(module, ours))
            made = (plain if module.act is None else with_relu)(module.num_features, device="meta")  # type: ignore[call-arg]
    carry_over(module, made)
    if isinstance(made, nn.modules.batchnorm._NormBase):
        made.eps = max(made.eps, TINY)
    return made
