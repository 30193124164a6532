"""``convert``: replace the norms of a model by the paper's, with the very same parameters and statistics."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from normmatters.nn import batchnorm as bn
from normmatters.nn.batchnorm_act import LpBatchNormAct2d
from normmatters.nn.batchnorm_base import LpBatchNorm
from normmatters.nn.layernorm import L1LayerNorm, L1RMSNorm, LpLayerNorm
from normmatters.nn.layernorm2d import ChannelsFirst, L1LayerNorm2d, LpLayerNorm2d
from normmatters.nn.replace import become, keep_all
from normmatters.nn.sync import SyncLpBatchNorm
from normmatters.norm import Norm, check_memory
from normmatters.surgery.blocks import FusedBlock
from normmatters.surgery.blocks import fuse as fuse_block
from normmatters.surgery.plan import FusionPlan, plan_fusion
from normmatters.surgery.report import Change, ConversionReport, report_to_fill

_log = logging.getLogger(__name__)

TORCH_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CLASSES: dict[str, tuple[Any, Any, Any]] = {  # for BatchNorm1d, 2d and 3d
    "l1": (bn.L1BatchNorm1d, bn.L1BatchNorm2d, bn.L1BatchNorm3d),
    "linf": (bn.LInfBatchNorm1d, bn.LInfBatchNorm2d, bn.LInfBatchNorm3d),
    "topk": (bn.TopKBatchNorm1d, bn.TopKBatchNorm2d, bn.TopKBatchNorm3d),
    "range": (bn.RangeBatchNorm1d, bn.RangeBatchNorm2d, bn.RangeBatchNorm3d),
}
_ANY_P = (bn.LpBatchNorm1d, bn.LpBatchNorm2d, bn.LpBatchNorm3d)
# Subclasses of nn.LayerNorm that are known to add nothing else: over the last dimension, and over the channels of NCHW.
_LAYER_NORMS = {"timm.layers.norm.LayerNorm", "timm.layers.norm.LayerNormFp32"}
_LAYER_NORMS_2D = {
    "timm.layers.norm.LayerNorm2d",
    "timm.layers.norm.LayerNorm2dFp32",
    "timm.layers.norm.LayerNormExp2d",
    "torchvision.models.convnext.LayerNorm2d",
}
_TIMM_BATCH_NORM = "timm.layers.norm_act.BatchNormAct2d"
_TORCH_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm)


def convert(
    model: nn.Module,
    norm: str | float = "l1",
    *,
    k: int = 10,
    constant: str | float = "exact",
    memory: str = "exact",
    layer_norm: str | float | None = None,
    fuse: bool = True,
    filter: Callable[[str, nn.Module], bool] | None = None,
    inplace: bool = True,
    report: ConversionReport | None = None,
) -> nn.Module:
    """Replace the batch norms of ``model``, and run each together with the ReLU (and the residual add) after it.

    A norm becomes one of this library in place, with the very same parameters, statistics and hooks: optimizers made
    before still fit, state_dict keys stay, and whoever holds the norm has the new one. A norm stays a norm and a ReLU a
    ReLU. Only their calls change: a block in which something fuses becomes a subclass of its class whose ``forward``,
    rewritten from its source, decides at every call what to run together. It looks at what it is handed then, and
    otherwise makes the calls as they are written. So modules may be exchanged, hooked, shared or called from elsewhere
    at any time. In the stem of a ResNet an L1 norm runs together with the max pool too (3×3, stride 2, padding 1). The
    report says what fuses, and why a norm stays alone; for a ``forward`` that cannot be rewritten there is
    :func:`~normmatters.register_fusion`.

    Exactly ``nn.BatchNorm1d/2d/3d`` are replaced, ``nn.SyncBatchNorm`` by :class:`~normmatters.nn.SyncLpBatchNorm`, and
    timm's ``BatchNormAct2d`` with its activation; on request ``nn.LayerNorm`` and the layer norms of timm and
    torchvision, channels first or last. Other subclasses do something that is not known here.

    Args:
        model: any module.
        norm: ``"l1"``, ``"l2"``, ``"linf"``, ``"topk"``, ``"range"``, or a number p ≥ 1.
        k: how many deviations Top(k) averages; only for ``"topk"``.
        constant, memory: as in :class:`~normmatters.nn.LpBatchNorm2d`.
        layer_norm: None to leave layer norms alone, or what to replace it by, as ``norm``.
        fuse: run norm→ReLU, norm→add→ReLU and norm→ReLU→max pool as one operation.
        filter: ``filter(name, module)`` says of each layer that could be replaced whether it is to be.
        inplace: change ``model`` itself, so that memory is not doubled; False converts a deep copy.
        report: an empty :class:`ConversionReport` to fill. It is also logged, at level INFO.

    Returns:
        The converted model: ``model`` itself unless ``inplace`` is False.

    Raises:
        TypeError, ValueError: on a wrong argument; the model is then unchanged.

    Example::

        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> model = convert(model, "l1")
        >>> [type(module).__name__ for module in model]
        ['Conv2d', 'L1BatchNorm2d', 'ReLU']
    """
    check_model(model)
    kind = Norm.named(norm, k=k, constant=constant, memory=memory)
    layer_kind = None if layer_norm is None else Norm.named(layer_norm, k=k, constant=constant, argument="layer_norm")
    check_memory(memory)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter must be a function of a name and a module, or None, got {type(filter).__name__}")
    report = report_to_fill(report)
    model = swap(model if inplace else copy.deepcopy(model), kind, layer_kind, report, fuse=fuse, filter=filter)
    if report.converted:
        _log.info("%s", report)
    else:
        _log.warning("%s", f"no norm was converted\n{report}" if report.changes else "no norm to convert was found")
    return model


def swap(
    model: nn.Module,
    norm: Norm,
    layer_norm: Norm | None,
    report: ConversionReport,
    *,
    fuse: bool = True,
    filter: Callable[[str, nn.Module], bool] | None = None,
) -> nn.Module:
    """What :func:`convert` does to ``model`` itself; it logs nothing, for those who only ask what would be done."""
    new: dict[nn.Module, nn.Module] = {}
    skipped: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        replacement = _replacement(module, norm, layer_norm)
        if isinstance(replacement, nn.Module) and filter is not None and not filter(name, module):
            replacement = "the filter leaves it out"
        if isinstance(replacement, str):
            skipped[module] = replacement
        elif replacement is not None:
            new[module] = replacement
    names = {module: (name, type(module).__name__) for name, module in model.named_modules()}
    replace_modules(model, new)
    # A norm that came with its own activation has nothing more to take over.
    bare = [n for n in new if isinstance(n, LpBatchNorm) and type(n) not in _WITH_ACT and n.act is None]
    pooling = [n for n in bare if isinstance(n, bn.LpBatchNorm2d) and n.p == 1]
    plan = plan_fusion(model, bare, pooling) if fuse else FusionPlan()
    for block in plan.blocks:
        fuse_block(block)
        if isinstance(block, FusedBlock):
            report.forwards |= {f"{type(block).__qualname__}.{n}": s.text() for n, s in block.fusion_sources.items()}
    for module, (name, before) in names.items():
        if module in skipped:
            report.changes.append(Change(name, before, None, note=skipped[module]))
        elif module in plan.fused or module in new:
            note = "its ReLU came with it" if getattr(module, "act", None) else plan.notes.get(module, "")
            fused = plan.fused.get(module, getattr(module, "act", None) or "")
            report.changes.append(Change(name, before, type(module).__name__, fused, note))
    return model


_WITH_ACT = (LpBatchNormAct2d,)


def _batch_norm(norm: Norm, rank: int, features: int) -> LpBatchNorm:
    """A batch norm for BatchNorm1d, 2d or 3d's place; its state lies on the meta device, to be replaced."""
    cls = _CLASSES.get(norm.kind, _ANY_P)[rank - 1]
    chosen: dict[str, Any] = {"k": norm.k} if norm.kind == "topk" else {} if norm.kind in _CLASSES else {"p": norm.p}
    made: LpBatchNorm = cls(features, **chosen, constant=norm.constant, memory=norm.memory, device="meta")
    return made


def _batch_norm_act(norm: Norm, old: Any) -> LpBatchNorm:
    """A batch norm for the place of timm's BatchNormAct2d: a ReLU becomes its own, any other activation follows."""
    after = [type(module) for module in old.children() if type(module) is not nn.Identity]
    if after in ([], [nn.ReLU]):
        made = _batch_norm(norm, 2, old.num_features)
        made.act = "relu" if after else None
        return made
    then = LpBatchNormAct2d(
        old.num_features, norm.p, k=norm.k, constant=norm.constant, memory=norm.memory, device="meta"
    )
    then.drop, then.activation = old.drop, old.act
    return then


def _layer_norm(norm: Norm, shape: tuple[int, ...], channels_first: bool) -> LpLayerNorm:
    """A layer norm for LayerNorm's place."""
    if norm.kind == "l1":
        return (L1LayerNorm2d if channels_first else L1LayerNorm)(shape, constant=norm.constant, device="meta")
    cls = LpLayerNorm2d if channels_first else LpLayerNorm
    return cls(shape, norm.p, k=norm.k, constant=norm.constant, device="meta")


def _replacement(module: nn.Module, norm: Norm, layer_norm: Norm | None) -> nn.Module | str | None:
    """What takes the module's place; or why nothing does; or None for a module that is no norm."""
    made: Any
    if isinstance(module, (LpBatchNorm, LpLayerNorm, L1RMSNorm)):
        return "it is one of normmatters already: go back with to_torch first"
    if isinstance(module, torch.jit.ScriptModule):
        scripted = module.original_name in {kind.__name__ for kind in TORCH_BATCH_NORMS}
        return "a scripted module cannot be changed" if scripted else None
    kind = _qualified(module)
    first = is_channels_first(module)
    if type(module) is nn.LayerNorm or kind in _LAYER_NORMS or first:
        if layer_norm is None:
            return "layer norms are converted only if asked: layer_norm="
        made = _layer_norm(layer_norm, tuple(module.normalized_shape), first)  # type: ignore[arg-type]
    elif type(module) in TORCH_BATCH_NORMS:
        made = _batch_norm(norm, TORCH_BATCH_NORMS.index(type(module)) + 1, module.num_features)  # type: ignore[arg-type]
    elif type(module) is nn.SyncBatchNorm:
        made = SyncLpBatchNorm(module.num_features, norm.p, k=norm.k, constant=norm.constant, device="meta")
        made.memory = norm.memory
    elif kind == _TIMM_BATCH_NORM:
        if any(child.state_dict() for child in module.children()):
            return "its activation has a state, which would change its key"
        made = _batch_norm_act(norm, module)
    elif isinstance(module, nn.modules.lazy.LazyModuleMixin) and isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "it is not initialised yet: run the model once first"
    elif isinstance(module, _TORCH_NORMS):
        if type(module).__module__.startswith("torch."):
            return f"{type(module).__name__} has no counterpart here"
        return f"{type(module).__name__} is a subclass: what it adds is not known"
    else:
        return None
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    carry_over(module, made)
    return made  # type: ignore[no-any-return]


def is_channels_first(layer_norm: nn.Module) -> bool:
    """Whether a layer norm, ours, timm's or torchvision's, normalizes dimension 1 of (N, C, H, W)."""
    return isinstance(layer_norm, ChannelsFirst) or _qualified(layer_norm) in _LAYER_NORMS_2D


def _qualified(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """:func:`~normmatters.nn.replace.keep_all` but for what says which norm it is, and the parts that go with that."""
    keep_all(old, new, without={"p", "k", "constant", "act", "memory", "_modules"})
    parts = {"drop", "act", "activation"}  # of a norm that comes with an activation
    new._modules.update({name: module for name, module in old._modules.items() if name not in parts})


def replace_modules(model: nn.Module, new: dict[nn.Module, nn.Module]) -> None:
    """Let each module become its new one, also for models that look into their norms."""
    for old, made in new.items():
        become(old, made)
    for module in model.modules():
        _keep_from_fast_path(module)


def _keep_from_fast_path(module: nn.Module) -> None:
    """Keep ``nn.TransformerEncoder``'s evaluation from reading our norms' weights into its own L2 layer norm.

    Its fast path does not call the norms at all. These attributes are what it asks before it is taken.
    """
    if isinstance(module, nn.TransformerEncoderLayer):
        activation = module.activation
        usual = 0
        if activation is F.relu or isinstance(activation, nn.ReLU):
            usual = 1
        elif activation is F.gelu or isinstance(activation, nn.GELU):
            usual = 2
        ours = isinstance(module.norm1, LpLayerNorm) or isinstance(module.norm2, LpLayerNorm)
        module.activation_relu_or_gelu = 0 if ours else usual
    elif isinstance(module, nn.TransformerEncoder):
        norms = [norm for layer in module.layers for norm in layer.modules() if isinstance(norm, LpLayerNorm)]
        if norms:
            module.use_nested_tensor = False


def check_model(model: nn.Module) -> None:
    """Raise unless ``model`` is a module that can be changed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a scripted or traced model cannot be changed: convert it before torch.jit")
