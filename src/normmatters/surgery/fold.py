"""``fold``: merge each batch norm into the convolution or linear layer before it, for deployment.

It changes the layer itself, so it serves ``forward`` alone: who calls the layer, the norm or a part of the model in
another way gets other results. A norm is folded only where the ``forward`` of the model's blocks, read as for
:func:`normmatters.convert`, shows that the norm gets the layer's output at once, and nothing else does.
"""

from __future__ import annotations

import ast
import copy
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils._pytree import tree_leaves

from normmatters.nn.batchnorm_act import ThenAct
from normmatters.nn.batchnorm_base import LpBatchNorm
from normmatters.nn.leaf import module_call
from normmatters.surgery.back import PLAIN_BATCH_NORMS, BatchNormAct2d, SyncBatchNormAct, ThenReLU, to_torch
from normmatters.surgery.blocks import fused_class
from normmatters.surgery.deferred import is_plain
from normmatters.surgery.plan import NOTHING, Reader, Values, forward_of, is_sequence, without_pairs
from normmatters.surgery.report import Change, ConversionReport, report_to_fill
from normmatters.surgery.rewrite import Unfit
from normmatters.surgery.swap import check_model, replace_modules
from normmatters.weight_norm.fused import WEIGHT_LAYERS

_log = logging.getLogger(__name__)

_NORMS = (*PLAIN_BATCH_NORMS, BatchNormAct2d, SyncBatchNormAct)


class AddReLU(nn.Module):
    """What a folded norm with ``act="relu"`` leaves: relu(input + residual)."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return torch.relu(input if residual is None else input + residual)


class Rows(nn.Identity):
    """What a norm leaves that was folded into a linear layer: refuses what it would have normalized otherwise.

    After (N, L, features) a batch norm's channels are dimension 1, which no weight of the linear layer stands for.
    """

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return module_call(self, input)
        if input.dim() != 2:
            raise ValueError(f"a norm was folded into a linear layer of (N, C) outputs, got {input.dim()}D")
        return input


def fold(
    model: nn.Module,
    *,
    example_input: Any = None,
    inplace: bool = True,
    report: ConversionReport | None = None,
) -> nn.Module:
    """Merge each batch norm into the convolution or linear layer before it: the same outputs, one layer less.

    For deployment: first :func:`to_torch`, then every ``conv → norm`` and ``linear → norm`` becomes the layer alone,
    with the norm's scale in its weight and the rest in its bias. Where the norm was there is an ``nn.Identity``, or the
    activation that it came with. Works for the norms of this library and for ``torch.nn``'s; what cannot be folded
    stays, and the report says why.

    The result serves ``model(...)``, that is ``forward``, alone: other methods of the model, and code that calls its
    parts, meet the folded layers and not the norms.

    Args:
        model: any module in evaluation mode. Linear layers are taken to give (N, C).
        example_input: what the model is called with, a tensor or a tuple of arguments. If given, the outputs for it are
            compared before ``model`` is changed.
        inplace: change ``model`` itself; False works on a deep copy. Folded layers get new parameters either way.
        report: an empty :class:`ConversionReport` to fill, with a line for each batch norm. It is also logged.

    Returns:
        The model: ``model`` itself unless ``inplace`` is False.

    Raises:
        ValueError: a batch norm is in training mode, where it cannot be a fixed scale, or the outputs for
            ``example_input`` differ; nothing is then changed.

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
    if example_input is not None:
        _check_outputs(model, fold(model, inplace=False), example_input)
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
            report.changes.append(Change(name, before[name], None, note=reasons[norm]))
    _log.info("%s", report)
    replace_modules(model, new)
    return model


def _check_outputs(model: nn.Module, folded: nn.Module, example_input: Any) -> None:
    arguments = example_input if isinstance(example_input, tuple) else (example_input,)
    with torch.no_grad():
        expected, found = (
            [t for t in tree_leaves(net(*copy.deepcopy(arguments))) if isinstance(t, Tensor) and t.is_floating_point()]
            for net in (model, folded)
        )
    for one, other in zip(expected, found, strict=True):
        scale, difference = float(one.abs().max()), float((one - other).abs().max())
        if not difference <= torch.finfo(one.dtype).eps ** 0.5 * scale:
            raise ValueError(
                f"the outputs for example_input differ by {difference:.2g} after folding, of {scale:.2g}: a layer is "
                "used in a way that its forward does not show"
            )


#: Names that lead to any module or parameter; who uses one of them may use all.
_ANY_MODULE = {
    *("children", "modules", "named_children", "named_modules", "get_submodule", "_modules", "getattr", "__dict__"),
    *("parameters", "named_parameters", "get_parameter", "state_dict", "_parameters", "buffers", "named_buffers"),
    *("forward", "__call__", "apply"),
}
_SCOPES = (ast.Lambda, ast.FunctionDef, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class _LayerReader(Reader):
    """Reads which norm gets which layer's output, and how often each module is called and mentioned.

    The norm must get it at once: in the same expression, or by the next statement. So nothing comes between that could
    use or change the output, and one does not run without the other.
    """

    def __init__(self, block: nn.Module, norms: set[nn.Module], seen: _Seen) -> None:
        super().__init__(block, norms)
        self.seen = seen

    def body(self, body: list[ast.stmt], env: dict[str, Values]) -> dict[str, Values]:
        env = {name: without_pairs(value) for name, value in env.items()}
        statements = deque(body)
        while statements:
            node = statements.popleft()
            known = self.known(node.test, env) if isinstance(node, ast.If) else None
            if isinstance(node, ast.If) and known is not None:
                statements.extendleft(reversed(node.body if known else node.orelse))
            elif ast.unparse(node) != f"{self.fusion}.flush()":
                after = super().body([node], dict(env))
                binds = isinstance(node, (ast.Assign, ast.AnnAssign))
                env = {
                    name: value if binds and value is not env.get(name) else without_pairs(value)
                    for name, value in after.items()
                }
        return env

    def value(self, node: ast.AST, env: dict[str, Values]) -> Values:
        found = super().value(node, env)
        if any(isinstance(v, nn.Module) and (v is self.block or _only_holds(v)) for v in found):
            self.unreadable()  # it is handed on
        if isinstance(node, _SCOPES):
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and any(isinstance(v, nn.Module) for v in env.get(name.id, NOTHING)):
                    self.unreadable()
        return without_pairs(found) if isinstance(node, ast.IfExp) else found

    def owners(self, node: ast.AST, env: dict[str, Values]) -> Values:
        return super().value(node, env)

    def callee(self, node: ast.AST, functions: Values, x: Values, env: dict[str, Values]) -> Values:
        names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} - {self.fusion}
        if (not functions or ... in functions) and not names.isdisjoint(env):
            self.unreadable()  # something of the block's, or a variable, that may call any of its modules
        return x if len(functions) == 1 else without_pairs(x)

    def module(self, f: nn.Module, x: Values, at: Hashable, rest: int = 0) -> Values:
        self.seen.calls[f].add(at)
        if f in self.norms:
            for value in x or [None]:
                layer = value[0] if isinstance(value, tuple) and value[1] == "" else None
                self.seen.sources[f].add(layer)
            if rest:
                self.seen.residuals.add(f)
            return NOTHING
        if rest:
            return NOTHING
        if isinstance(f, WEIGHT_LAYERS):
            return frozenset([(f, "")])
        if type(f) is nn.Identity and is_plain(f):
            return x
        if is_sequence(f) and is_plain(f):
            return self.sequence(f, x)
        return NOTHING

    def mention(self, f: Any, at: Hashable) -> None:
        if isinstance(f, nn.Module):
            self.seen.mentions[f].add(at)

    def unreadable(self) -> None:
        self.seen.unreadable.append(self.block)


def _only_holds(module: nn.Module) -> bool:
    return forward_of(module) is nn.Module.forward  # ModuleList, ModuleDict


class _Seen:
    """What all readers of a model found: by module, the places that call it and mention it, and a norm's layers."""

    def __init__(self) -> None:
        self.calls: defaultdict[nn.Module, set[Hashable]] = defaultdict(set)
        self.mentions: defaultdict[nn.Module, set[Hashable]] = defaultdict(set)
        self.sources: defaultdict[nn.Module, set[nn.Module | None]] = defaultdict(set)
        self.residuals: set[nn.Module] = set()
        self.unreadable: list[nn.Module] = []


def _find(model: nn.Module) -> tuple[dict[nn.Module, tuple[nn.Module, bool]], dict[nn.Module, str]]:
    """The norms to fold, each with its layer and whether it is given a residual; and why others stay."""
    norms: set[nn.Module] = {module for module in model.modules() if isinstance(module, _BatchNorm)}
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    owners: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
    seen = _Seen()
    reasons: dict[nn.Module, str] = {}
    reached: dict[nn.Module, set[str]] = {}  # by block, the names its forward reads, where it cannot be rewritten
    for block in model.modules():
        for name, child in block._modules.items():
            if child is not None:
                owners[child].append((block, name))
        if norms.isdisjoint(block.modules()) or block in norms or forward_of(block) is nn.Module.forward:
            continue
        reader = _LayerReader(block, norms, seen)
        try:
            cls: Any = fused_class(type(block))
            if not is_sequence(block):
                reader.function(cls.fusion_sources["forward"], cls.fusion_sources)
                if any(_names_of(one.original) & _ANY_MODULE for one in cls.fusion_sources.values()):
                    reader.unreadable()
            elif is_plain(block):
                reader.sequence(block, NOTHING)
            else:
                in_it = norms.intersection(block.children())
                reasons |= dict.fromkeys(in_it, "the Sequential that it is in has hooks, or a call of its own")
        except (Unfit, KeyError) as reason:
            reached[block] = _names_of(getattr(type(block), "forward", None))
            for norm in norms.intersection(block.children()):
                reasons[norm] = f"{type(block).__name__}.forward cannot be read: {reason}"
    anywhere = {module for block in seen.unreadable for module in block.modules()}
    layers = Counter(layer for norm in norms for layer in seen.sources[norm])

    def elsewhere(module: nn.Module) -> bool:
        """Whether the module, or what it is a part of, is reached by more than the one call."""
        (owner, name), *others = owners[module] or [(module, "")]
        in_a_row = is_sequence(owner) and owner is not module
        if (
            others
            or module in anywhere
            or len(seen.calls[module]) > 1
            or len(seen.mentions[module]) > (0 if in_a_row else 1)
        ):
            return True
        for block, names in reached.items():
            if owner is not block and module in set(block.modules()) and (name in names or names & _ANY_MODULE):
                return True
        if owner is module or owner is model:
            return False
        passed_on = forward_of(owner) is not nn.Module.forward and len(seen.mentions[owner]) > len(seen.calls[owner])
        return passed_on or (in_a_row and elsewhere(owner))

    pairs: dict[nn.Module, tuple[nn.Module, bool]] = {}
    for norm in norms:
        layer = next(iter(seen.sources[norm])) if len(seen.sources[norm]) == 1 else None
        if norm in reasons:
            continue
        if places[norm] == len(seen.calls[norm]) == 1 and layer is None:
            reasons[norm] = "no layer in front of it, or the layer's output is used again"
        elif (
            layer is None
            or layers[layer] != 1
            or places[layer] != 1
            or places[norm] != 1
            or elsewhere(layer)
            or elsewhere(norm)
        ):
            reasons[norm] = "it or the layer in front of it is used at several places"
        elif against := _reason_against(layer, norm, norm in seen.residuals):
            reasons[norm] = against
        else:
            pairs[norm] = layer, norm in seen.residuals
    others = [module for module in model.modules() if isinstance(module, LpBatchNorm)]
    return pairs, reasons | dict.fromkeys(others, "it has no running statistics")


def _names_of(function: Any) -> set[str]:
    """The names that a function, and the functions in it, read."""
    codes, names = [getattr(function, "__code__", None)], set()
    for code in codes:
        if code is not None:
            names.update(code.co_names)
            codes += [inner for inner in code.co_consts if isinstance(inner, type(code))]
    return names


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
        return "it is given a residual, after a linear layer"
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
