"""Weight norm on every layer of a model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.nn.utils import parametrize

from normmatters.functional.weight import check_norm, check_rho
from normmatters.weight_norm.fused import fuse
from normmatters.weight_norm.register import bounded_weight_norm, classic_weight_norm, joined, parameter_for

__all__ = ["WeightNormReport", "apply_weight_norm"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_CELL_WEIGHTS = ("weight_ih", "weight_hh")
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class WeightNormReport:
    """What :func:`apply_weight_norm` did: the normalized parameters, and the reason for each one it left alone.

    >>> print(apply_weight_norm(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))))
    weight norm on 2 parameters
      0.weight
      2.weight
    """

    applied: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"weight norm on {len(self.applied)} parameters", *(f"  {name}" for name in self.applied)]
        lines += [f"skipped {len(self.skipped)}"] if self.skipped else []
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.skipped.items()])


@dataclass(frozen=True)
class _Candidate:
    path: str
    module: nn.Module
    name: str
    dim: int

    def __str__(self) -> str:
        return joined(self.path, self.name)


def apply_weight_norm(
    model: nn.Module,
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,
    p: float = 2,
    k: int | None = None,
    rho: float | Literal["init"] = "init",
    kind: Literal["bounded", "classic"] = "bounded",
    embeddings: bool = False,
    fused: bool = True,
) -> WeightNormReport:
    """Normalize the weights of all linear, convolutional, recurrent and attention layers of ``model``, in place.

    Args:
        model: any module, or a single layer.
        filter: ``filter(name, module) -> bool`` picks the layers, by their name in ``named_modules()``.
        p, k, rho: as in :func:`bounded_weight_norm`; ``rho="init"`` is taken from each weight.
        kind: ``"bounded"`` (F12, F13) or ``"classic"`` with a learned length (F11; it has no ``rho``).
        embeddings: normalize the rows of ``nn.Embedding`` too.
        fused: on a GPU compute all weights together, in a few kernels a forward pass of ``model``: see
            :func:`normmatters.weight_norm.fuse`, which also says which layers go on computing their own.

    The channels are the output channels: dimension 0, and 1 for transposed convolutions. A layer is left alone, and the
    report says why, if a weight is already parametrized, has a zero channel, fewer than ``k`` values or only one value
    in a channel, or is shared with a module that is not normalized with it.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10))
        >>> print(apply_weight_norm(model, filter=lambda name, module: name != "3"))
        weight norm on 1 parameters
          0.weight
        skipped 1
          3.weight: left out by the filter
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module, got {type(model).__name__}")
    if filter is not None and not callable(filter):
        raise TypeError(f"filter must be a callable (name, module) -> bool, got {type(filter).__name__}")
    if kind not in ("bounded", "classic"):
        raise ValueError(f"kind must be 'bounded' or 'classic', got {kind!r}")
    check_norm(p, k)
    if isinstance(rho, str):
        if rho != "init":
            raise ValueError(f"rho must be 'init' or a positive number, got {rho!r}")
    else:
        check_rho(rho)
        if kind == "classic":
            raise ValueError(f"classic weight norm learns its norms and takes no rho, got rho = {rho}")

    report = WeightNormReport()
    chosen: list[_Candidate] = []
    for path, module in model.named_modules():
        for candidate in _candidates(path, module, embeddings):
            reason = _reason_to_skip(candidate, filter)
            if reason is None:
                try:  # now, and not when those that share the parameter have been normalized
                    parameter_for(kind, module, candidate.name, candidate.dim, p, k)
                except (TypeError, ValueError, NotImplementedError) as error:  # last: quantized, sparse
                    reason = str(error).partition("\n")[0]
            if reason is not None:
                report.skipped[str(candidate)] = reason
            else:
                chosen.append(candidate)
    for candidate in _not_torn_from_shared(model, chosen, report, kind):
        try:
            if kind == "bounded":
                bounded_weight_norm(candidate.module, candidate.name, candidate.dim, p, rho, k=k)
            else:
                classic_weight_norm(candidate.module, candidate.name, candidate.dim, p, k=k)
        except (TypeError, ValueError) as error:
            report.skipped[str(candidate)] = str(error)
        else:
            report.applied.append(str(candidate))
    if fused and report.applied:
        fuse(model)
    return report


def _candidates(path: str, module: nn.Module, embeddings: bool) -> Iterator[_Candidate]:
    """The weights of a layer that weight norm is for, each with the dimension of its output channels."""
    if isinstance(module, parametrize.ParametrizationList):
        return
    names: list[str] = []
    if isinstance(module, _LAYERS) or (embeddings and isinstance(module, nn.Embedding | nn.EmbeddingBag)):
        names = ["weight"]
    elif isinstance(module, nn.MultiheadAttention):
        names = [name for name in _ATTENTION_WEIGHTS if getattr(module, name) is not None]
    elif isinstance(module, _RECURRENT):
        names = [name for name in getattr(module, "_flat_weights_names", _CELL_WEIGHTS) if name.startswith("weight")]
    dim = 0
    if isinstance(module, _TRANSPOSED):
        # Depthwise ones, (in, 1, ...), have one output channel for each input channel.
        dim = 0 if 1 < module.groups == module.in_channels == module.out_channels else 1
    yield from (_Candidate(path, module, name, dim) for name in names)


def _reason_to_skip(candidate: _Candidate, filter: Callable[[str, nn.Module], bool] | None) -> str | None:
    module = candidate.module
    if filter is not None and not filter(candidate.path, module):
        return "left out by the filter"
    if parametrize.is_parametrized(module, candidate.name):
        return "already parametrized"
    if isinstance(module, _TRANSPOSED) and module.groups > 1 and candidate.dim == 1:
        return f"its output channels are no slices of the weight (transposed convolution, groups = {module.groups})"
    weight = module._parameters.get(candidate.name)
    if weight is None:
        return "no parameter of its own (computed by a hook, such as pruning)"
    if not nn.parameter.is_lazy(weight) and weight.numel() == weight.shape[candidate.dim]:
        return "one value in a channel: only its sign would be left"
    return None


def _not_torn_from_shared(
    model: nn.Module, chosen: list[_Candidate], report: WeightNormReport, kind: str
) -> list[_Candidate]:
    """The candidates whose parameter no other module would go on to use without the norm."""
    picked = {(id(one.module), one.name): one.dim for one in chosen}
    users: dict[int, list[tuple[str, int | None]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                user = (joined(path, name), picked.get((id(module), name)))
                users.setdefault(id(parameter), []).append(user)
    kept = []
    for candidate in chosen:
        sharing = users[id(candidate.module._parameters[candidate.name])]
        # Classic weight norm makes new parameters, so that no sharing survives it.
        others = [
            name for name, dim in sharing if name != str(candidate) and (kind == "classic" or dim != candidate.dim)
        ]
        if others:
            report.skipped[str(candidate)] = f"shared with {', '.join(others)}, which would not get the same norm"
        else:
            kept.append(candidate)
    return kept
