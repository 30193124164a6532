"""``fold``: batch norms merged into the convolution or linear layer in front of them, for evaluation and export."""

from __future__ import annotations

import copy
import logging
import operator
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_weights

from normmatters.nn.batchnorm_act import ThenAct
from normmatters.nn.batchnorm_base import LpBatchNorm
from normmatters.nn.leaf import module_call
from normmatters.surgery.back import PLAIN_BATCH_NORMS, BatchNormAct2d, SyncBatchNormAct, ThenReLU, to_torch
from normmatters.surgery.mentioned import called_elsewhere, mentioned
from normmatters.surgery.parts import (
    WATCHED,
    blocks_of,
    called_without,
    in_watched_sequentials,
    is_plain,
    is_sequential,
    not_its_own,
    slots_of,
)
from normmatters.surgery.report import Change, ConversionReport, report_to_fill
from normmatters.surgery.swap import check_model, replace_modules
from normmatters.surgery.trace import trace_block
from normmatters.surgery.value import Untraceable
from normmatters.weight_norm.fused import WEIGHT_LAYERS

_log = logging.getLogger(__name__)

_NORMS = (*PLAIN_BATCH_NORMS, BatchNormAct2d, SyncBatchNormAct)


class AddReLU(nn.Module):
    """What a folded norm with ``act="relu"`` leaves: relu(input + residual)."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return torch.relu(input if residual is None else input + residual)


class Rows(nn.Identity):
    """What a norm leaves that was folded into a linear layer: refuses what it would have normalized otherwise.

    Behind (N, L, features) a batch norm's channels are dimension 1, which no weight of the linear layer stands for.
    """

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return module_call(self, input)
        if input.dim() != 2:
            raise ValueError(f"a norm was folded into a linear layer of (N, C) outputs, got {input.dim()}D")
        return input


def fold(model: nn.Module, *, inplace: bool = True, report: ConversionReport | None = None) -> nn.Module:
    """Merge each batch norm into the convolution or linear layer in front of it: the same outputs, one layer less.

    For deployment: first :func:`to_torch`, then every ``conv → norm`` and ``linear → norm`` becomes the layer alone,
    with the norm's scale in its weight and the rest in its bias. Where the norm was there is an ``nn.Identity``, or the
    activation that it came with. Works for the norms of this library and for ``torch.nn``'s; what cannot be folded
    stays, and the report says why.

    Args:
        model: any module in evaluation mode. Linear layers are taken to give (N, C).
        inplace: change ``model`` itself; False works on a deep copy. Folded layers get new parameters either way.
        report: an empty :class:`ConversionReport` to fill, with a line for each batch norm. It is also logged.

    Returns:
        The model: ``model`` itself unless it is a norm or ``inplace`` is False.

    Raises:
        ValueError: a batch norm is in training mode, where it cannot be a fixed scale; nothing is then changed.

    Example::

        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        >>> model = fold(convert(model, "l1").eval())
        >>> [type(module).__name__ for module in model]
        ['Conv2d', 'Identity', 'ReLU']
    """
    check_model(model)
    report = report_to_fill(report)
    for name, module in model.named_modules():
        if isinstance(module, (_BatchNorm, LpBatchNorm)) and module.training:
            raise ValueError(f"fold needs a model in evaluation mode, but {name or 'the model'} is training: eval()")
    if not inplace:
        model = copy.deepcopy(model)
    before = {name: type(module).__name__ for name, module in model.named_modules()}
    model = to_torch(model)

    pairs, reasons = _find(model)
    names = {module: name for name, module in model.named_modules()}
    new: dict[nn.Module, nn.Module] = {}
    for norm, (layer, residual) in pairs.items():
        _fold_into(layer, norm)
        new[norm] = _remainder(layer, norm, residual).eval()
    for norm, name in names.items():
        if norm in new:
            after, note = type(new[norm]).__name__, f"folded into {names[pairs[norm][0]]}"
            report.changes.append(Change(name, before[name], after, note=note))
        elif isinstance(norm, (_BatchNorm, LpBatchNorm)):
            report.changes.append(Change(name, before[name], None, note=reasons.get(norm, "no layer in front of it")))
    _log.info("%s", report)
    return replace_modules(model, new)


def _find(model: nn.Module) -> tuple[dict[nn.Module, tuple[nn.Module, bool]], dict[nn.Module, str]]:
    """The norms to fold, each with its layer and whether it is given a residual; and why others stay."""
    pairs: dict[nn.Module, tuple[nn.Module, bool]] = {}
    reasons: dict[nn.Module, str] = {}
    norms: set[nn.Module] = {module for module in model.modules() if isinstance(module, _BatchNorm)}
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    alone: set[nn.Module] = set()  # parts of a block that an outer one calls,
    read: set[Tensor] = set()  # and tensors that it reads itself
    elsewhere = [called for block in blocks_of(model, norms) for called in called_elsewhere(block)]
    for block in blocks_of(model, norms):
        sequentials = {module for _, _, module in slots_of(block, True) if is_sequential(module)}
        try:
            trace = trace_block(block, False, sequentials)
        except Untraceable as reason:
            for norm in norms.intersection(module for _, _, module in slots_of(block, False)):
                reasons[norm] = f"{type(block).__name__} cannot be traced: {reason}"
            alone |= not_its_own(block, mentioned(block))
            continue
        nodes = trace.graph.nodes
        calls = [(node, block.get_submodule(str(node.target))) for node in nodes if node.op == "call_module"]
        read |= {operator.attrgetter(str(node.target))(block) for node in nodes if node.op == "get_attr"}
        times = Counter(module for _, module in calls)
        called = dict(calls)
        for node, norm in calls:
            # A Sequential's norm was decided on by the block that calls it, if that could be traced: it may well call
            # the Sequential's modules one by one.
            if norm not in norms or norm in pairs or norm in reasons:
                continue
            source = node.args[0] if node.args else None
            layer = called.get(source) if isinstance(source, fx.Node) else None
            if layer is None or not isinstance(layer, WEIGHT_LAYERS):
                reasons[norm] = "no layer in front of it"
            elif any(places[module] != places[block] or times[module] != 1 for module in (layer, norm)):
                reasons[norm] = "it or the layer in front of it is used at several places"
            elif any(called_without(block, module, alone) for module in (layer, norm)) or any(
                (layer in called) != (norm in called) for called in elsewhere
            ):
                reasons[norm] = "a part of its block is called alone"
            elif any(
                tensor in read for module in (layer, norm) for tensor in module.state_dict(keep_vars=True).values()
            ):
                reasons[norm] = "its parameters, or those of the layer in front of it, are used on their own"
            elif len(source.users) != 1:  # type: ignore[union-attr]
                reasons[norm] = "the output of the layer in front of it is used again"
            else:
                residual = len(node.args) + len(node.kwargs) > 1
                against = _reason_against(layer, norm, residual)
                if against is None:
                    pairs[norm] = layer, residual
                else:
                    reasons[norm] = against
        alone |= not_its_own(block, trace.called)
    return pairs, dict.fromkeys(in_watched_sequentials(model), WATCHED) | reasons


def _reason_against(layer: Any, norm: Any, residual: bool) -> str | None:
    if parametrize.is_parametrized(layer):
        return "the weight in front of it is parametrized"
    if type(layer) not in WEIGHT_LAYERS or type(norm) not in _NORMS:
        odd = layer if type(layer) not in WEIGHT_LAYERS else norm
        return f"{type(odd).__name__} is a subclass: what it adds is not known"
    if not is_plain(layer) or not is_plain(norm):
        return "hooks see its input or output, or a forward was replaced"
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics"
    if isinstance(layer, _ConvTransposeNd) and layer.groups > 1:
        return "the channels of a transposed convolution with groups are no slices of its weight"
    if isinstance(layer, nn.Linear) and residual:
        return "it is given a residual behind a linear layer"
    channels = layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features
    if channels != norm.num_features:
        return f"it has {norm.num_features} channels, the layer in front of it {channels}"
    return None


def _remainder(layer: nn.Module, norm: nn.Module, residual: bool) -> nn.Module:
    """What stays in the norm's place: nothing, or what it did after normalizing."""
    parts: list[nn.Module] = [Rows()] if isinstance(layer, nn.Linear) else []
    if isinstance(norm, ThenReLU):
        parts.append(AddReLU() if residual else nn.ReLU())
    elif isinstance(norm, ThenAct):
        parts += [part for part in (norm.drop, norm.activation) if not isinstance(part, nn.Identity)]
    if len(parts) > 1:
        return nn.Sequential(*parts)
    return parts[0] if parts else nn.Identity()


def _fold_into(layer: Any, norm: Any) -> None:
    """w ← w·γ/√(running_var + eps), b ← (b − running_mean)·γ/√(running_var + eps) + β, in new parameters."""
    layer.weight, layer.bias = fuse_conv_bn_weights(
        layer.weight,
        layer.bias,
        norm.running_mean,
        norm.running_var,
        norm.eps,
        norm.weight,
        norm.bias,
        transpose=isinstance(layer, _ConvTransposeNd),
    )
