"""``convert``: replace the norms of a model by the paper's, with the very same parameters and statistics."""

from __future__ import annotations

import copy
import difflib
import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from normmatters.nn import batchnorm as bn
from normmatters.nn.batchnorm_act import LpBatchNormAct2d
from normmatters.nn.batchnorm_base import LpBatchNorm
from normmatters.nn.layernorm import L1LayerNorm, L1RMSNorm, LpLayerNorm
from normmatters.nn.layernorm2d import ChannelsFirst, L1LayerNorm2d, LpLayerNorm2d
from normmatters.nn.replace import keep_all, replace
from normmatters.nn.sync import SyncLpBatchNorm
from normmatters.norm import check_memory
from normmatters.surgery.fuse import FusionPlan, plan_fusion
from normmatters.surgery.fused import link_sequentials
from normmatters.surgery.report import Change, ConversionReport, report_to_fill

_log = logging.getLogger(__name__)

TORCH_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_TORCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)
_NORMS: dict[str, float | str] = {"l1": 1, "l2": 2, "linf": math.inf, "topk": math.inf, "range": "range"}
_CLASSES: dict[str, tuple[Any, Any, Any]] = {  # for BatchNorm1d, 2d and 3d
    "l1": (bn.L1BatchNorm1d, bn.L1BatchNorm2d, bn.L1BatchNorm3d),
    "linf": (bn.LInfBatchNorm1d, bn.LInfBatchNorm2d, bn.LInfBatchNorm3d),
    "topk": (bn.TopKBatchNorm1d, bn.TopKBatchNorm2d, bn.TopKBatchNorm3d),
    "range": (bn.RangeBatchNorm1d, bn.RangeBatchNorm2d, bn.RangeBatchNorm3d),
    "lp": (bn.LpBatchNorm1d, bn.LpBatchNorm2d, bn.LpBatchNorm3d),
}
# Subclasses of nn.LayerNorm that are known to add nothing else: over the last dimension, and over the channels of NCHW.
_LAYER_NORMS = {"timm.layers.norm.LayerNorm", "timm.layers.norm.LayerNormFp32"}
_LAYER_NORMS_2D = {
    "timm.layers.norm.LayerNorm2d",
    "timm.layers.norm.LayerNorm2dFp32",
    "timm.layers.norm.LayerNormExp2d",
    "torchvision.models.convnext.LayerNorm2d",
}
_TIMM_BATCH_NORM = "timm.layers.norm_act.BatchNormAct2d"


def convert(
    model: nn.Module,
    norm: str | float = "l1",
    *,
    k: int = 10,
    constant: str | float = "exact",
    memory: str = "exact",
    layer_norm: str | float | None = None,
    fuse: bool = True,
    inplace: bool = True,
    report: ConversionReport | None = None,
) -> nn.Module:
    """Replace the batch norms of ``model`` and merge the ReLU (and the residual add) behind each into it.

    The new norms hold the very same parameters, statistics and hooks, so optimizers made before go on, and state_dict
    keys stay. A block in which a norm takes something over becomes a subclass of its class: ``isinstance``, attributes,
    copying, pickling and ``torch.compile`` go on working. What cannot be fused safely is
    converted without, and the report says why. A fused norm returns the ReLU's output: to look at what a norm itself
    gives, convert with ``fuse=False``, or put a hook on it before. In the stem of a ResNet an L1 norm takes over the
    max pool too (3×3, stride 2, padding 1), and returns the pool's output. Exchange norms, ReLUs and pools for other
    modules before, or after :func:`to_torch`: what a norm took over stays with it, and its block raises an error.

    Exactly ``nn.BatchNorm1d/2d/3d`` are replaced, ``nn.SyncBatchNorm`` by :class:`~normmatters.nn.SyncLpBatchNorm`, and
    timm's ``BatchNormAct2d`` with its activation; on request ``nn.LayerNorm`` and the layer norms of timm and
    torchvision, channels first or last. Other subclasses do something that is not known here.

    Args:
        model: any module; if it is itself a norm, use the result.
        norm: ``"l1"``, ``"l2"``, ``"linf"``, ``"topk"``, ``"range"``, or a number p ≥ 1.
        k: how many deviations Top(k) averages; only for ``"topk"``.
        constant, memory: as in :class:`~normmatters.nn.LpBatchNorm2d`.
        layer_norm: None to leave layer norms alone, or what to replace it by, as ``norm``.
        fuse: merge norm→ReLU, norm→add→ReLU and norm→ReLU→max pool.
        inplace: change ``model`` itself, so that memory is not doubled; False converts a deep copy.
        report: an empty :class:`ConversionReport` to fill. It is also logged, at level INFO.

    Returns:
        The converted model: ``model`` itself unless it is a norm or ``inplace`` is False.

    Raises:
        TypeError, ValueError: on a wrong argument; the model is then unchanged.

    Example::

        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> model = convert(model, "l1")
        >>> type(model[1]).__name__, model[1].act
        ('L1BatchNorm2d', 'relu')
    """
    check_model(model)
    spec = NormSpec.of("norm", norm, k, constant)
    layer_spec = None if layer_norm is None else NormSpec.of("layer_norm", layer_norm, k, constant)
    check_memory(memory)
    report = report_to_fill(report)
    model = swap(model if inplace else copy.deepcopy(model), spec, layer_spec, report, memory=memory, fuse=fuse)
    if report.converted:
        _log.info("%s", report)
    else:
        _log.warning("%s", f"no norm was converted\n{report}" if report.changes else "no norm to convert was found")
    return model


def swap(
    model: nn.Module,
    spec: NormSpec,
    layer_spec: NormSpec | None,
    report: ConversionReport,
    *,
    memory: str = "exact",
    fuse: bool = True,
) -> nn.Module:
    """What :func:`convert` does to ``model`` itself; it logs nothing, for those who only ask what would be done."""
    new: dict[nn.Module, nn.Module] = {}
    skipped: dict[nn.Module, str] = {}
    for module in model.modules():
        replacement = _replacement(module, spec, layer_spec, memory)
        if isinstance(replacement, str):
            skipped[module] = replacement
        elif replacement is not None:
            new[module] = replacement
    # A norm that came with its own activation has nothing more to take over.
    bare = [
        old
        for old, norm in new.items()
        if isinstance(norm, LpBatchNorm) and not isinstance(norm, LpBatchNormAct2d) and norm.act is None
    ]
    pooling = [old for old in bare if isinstance(new[old], bn.LpBatchNorm2d) and new[old].p == 1]
    plan = plan_fusion(model, bare, pooling) if fuse else FusionPlan()

    for name, module in model.named_modules():
        before = type(module).__name__
        if module in skipped:
            report.changes.append(Change(name, before, None, note=skipped[module]))
        elif module in new:
            act = getattr(new[module], "act", None) or ""
            note = "its ReLU came with it" if act else plan.notes.get(module, "")
            report.changes.append(Change(name, before, type(new[module]).__name__, plan.fused.get(module, act), note))

    plan.apply()
    link_sequentials(model)
    for old in plan.fused:
        new[old].act = "relu"  # type: ignore[assignment]
    for old in plan.pools:
        new[old].pool = "max"  # type: ignore[assignment]
    return replace_modules(model, new)


@dataclass(frozen=True)
class NormSpec:
    """Which norm to build: ``kind`` is a key of ``_CLASSES``."""

    kind: str
    p: float | str
    k: int | None
    constant: str | float

    @classmethod
    def of(cls, argument: str, norm: str | float, k: int = 10, constant: str | float = "exact") -> NormSpec:
        """Resolve and check what the user asked for."""
        if isinstance(norm, bool) or not isinstance(norm, (str, int, float)):
            raise TypeError(f"{argument} must be a string or a number p >= 1, got {type(norm).__name__}")
        if isinstance(norm, str) and norm not in _NORMS:
            names = ", ".join(map(repr, _NORMS))
            close = difflib.get_close_matches(norm.lower().replace("_", ""), _NORMS, 1, 0.4)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            if norm.startswith("mean"):
                hint = "; mean-only batch norm has no weight to carry over: build the model with MeanOnlyBatchNorm"
            raise ValueError(f"{argument} must be one of {names} or a number p >= 1, got {norm!r}{hint}")
        p = _NORMS[norm] if isinstance(norm, str) else norm
        kind = norm if norm == "topk" else {1: "l1", math.inf: "linf", "range": "range"}.get(p, "lp")
        spec = cls(str(kind), p, k if norm == "topk" else None, constant)
        bn.LpBatchNorm1d(1, p, k=spec.k, constant=constant, device="meta")  # refuses a wrong p, k or constant
        return spec

    def batch_norm(self, rank: int, features: int, memory: str) -> LpBatchNorm:
        """A batch norm for BatchNorm1d, 2d or 3d's place; its state lies on the meta device, to be replaced."""
        cls = _CLASSES[self.kind][rank - 1]
        chosen: dict[str, Any] = {"p": self.p} if self.kind == "lp" else {"k": self.k} if self.kind == "topk" else {}
        made: LpBatchNorm = cls(features, **chosen, constant=self.constant, memory=memory, device="meta")
        return made

    def sync_batch_norm(self, features: int, memory: str) -> SyncLpBatchNorm:
        """A batch norm for SyncBatchNorm's place."""
        made = SyncLpBatchNorm(features, self.p, k=self.k, constant=self.constant, device="meta")
        made.memory = memory
        return made

    def batch_norm_act(self, old: nn.Module, memory: str) -> LpBatchNorm:
        """A batch norm for the place of timm's BatchNormAct2d: its ReLU is merged, any other activation follows."""
        after = [type(module) for module in old.children() if type(module) is not nn.Identity]
        if after in ([], [nn.ReLU]):
            made = self.batch_norm(2, old.num_features, memory)  # type: ignore[arg-type]
            made.act = "relu" if after else None
            return made
        chosen: dict[str, Any] = {"k": self.k, "constant": self.constant, "memory": memory, "device": "meta"}
        then = LpBatchNormAct2d(old.num_features, self.p, **chosen)  # type: ignore[arg-type]
        then.drop, then.activation = old.drop, old.act  # type: ignore[assignment]
        return then

    def layer_norm(self, shape: tuple[int, ...], channels_first: bool) -> LpLayerNorm:
        """A layer norm for LayerNorm's place."""
        if self.kind == "l1":
            return (L1LayerNorm2d if channels_first else L1LayerNorm)(shape, constant=self.constant, device="meta")
        cls = LpLayerNorm2d if channels_first else LpLayerNorm
        return cls(shape, self.p, k=self.k, constant=self.constant, device="meta")


def _replacement(module: nn.Module, spec: NormSpec, layer_spec: NormSpec | None, memory: str) -> nn.Module | str | None:
    """What takes the module's place; or why nothing does; or None for a module that is no norm."""
    if isinstance(module, (LpBatchNorm, LpLayerNorm, L1RMSNorm)):
        return "it is one of normmatters already: go back with to_torch first"
    if isinstance(module, torch.jit.ScriptModule):
        scripted = module.original_name in {kind.__name__ for kind in TORCH_BATCH_NORMS}
        return "a scripted module cannot be changed" if scripted else None
    kind = _qualified(module)
    first = is_channels_first(module)
    if layer_spec is not None and (type(module) is nn.LayerNorm or kind in _LAYER_NORMS or first):
        made: nn.Module = layer_spec.layer_norm(tuple(module.normalized_shape), first)  # type: ignore[arg-type]
    elif type(module) in TORCH_BATCH_NORMS:
        made = spec.batch_norm(TORCH_BATCH_NORMS.index(type(module)) + 1, module.num_features, memory)  # type: ignore[arg-type]
    elif type(module) is nn.SyncBatchNorm:
        made = spec.sync_batch_norm(module.num_features, memory)
    elif kind == _TIMM_BATCH_NORM:
        if any(child.state_dict() for child in module.children()):
            return "its activation has a state, which would change its key"
        made = spec.batch_norm_act(module, memory)
    elif isinstance(module, nn.modules.lazy.LazyModuleMixin) and isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "it is not initialised yet: run the model once first"
    elif isinstance(module, nn.modules.batchnorm._BatchNorm if layer_spec is None else _TORCH_NORMS):
        return f"{type(module).__name__} is a subclass: what it adds is not known"
    else:
        return None
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    carry_over(module, made)
    return made


def is_channels_first(layer_norm: nn.Module) -> bool:
    """Whether a layer norm, ours, timm's or torchvision's, normalizes dimension 1 of (N, C, H, W)."""
    return isinstance(layer_norm, ChannelsFirst) or _qualified(layer_norm) in _LAYER_NORMS_2D


def _qualified(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """:func:`~normmatters.nn.replace.keep_all` but for what says which norm it is, and the parts that go with that."""
    keep_all(old, new, without={"p", "k", "constant", "act", "memory", "pool", "_modules"})
    parts = {"drop", "act", "activation"}  # of a norm that comes with an activation
    new._modules.update({name: module for name, module in old._modules.items() if name not in parts})


def replace_modules(model: nn.Module, new: dict[nn.Module, nn.Module]) -> nn.Module:
    """:func:`~normmatters.nn.replace.replace`, for models that look into their norms."""
    model = replace(model, new)
    for module in model.modules():
        _keep_from_fast_path(module)
    return model


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
