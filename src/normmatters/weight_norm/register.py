"""Add weight norm to one parameter or to every layer of a model, and take it away."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.nn.utils import parametrize

from normmatters.functional.weight import check_norm, check_slices, has_values, slice_norm
from normmatters.weight_norm.fused import fuse, unfuse
from normmatters.weight_norm.module_class import complete_class
from normmatters.weight_norm.parametrizations import (
    BoundedWeight,
    ClassicWeight,
    WeightNorm,
    check_options,
    weight_norm_of,
)
from normmatters.weight_norm.projection import watch

M = TypeVar("M", bound=nn.Module)

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_CELL_WEIGHTS = ("weight_ih", "weight_hh")
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")

# One parameter --------------------------------------------------------------------------------------------------------


def bounded_weight_norm(
    module: M,
    name: str = "weight",
    dim: int | None = 0,
    p: float = 2,
    rho: float | Literal["init"] = "init",
    *,
    k: int | None = None,
    project: bool = False,
) -> M:
    """Give every output channel of ``module.<name>`` the same fixed norm: w_i = ρ · v_i / ‖v_i‖_p (F12, F13).

    Args:
        module: any module with a floating-point parameter; changed in place.
        name: the parameter, e.g. ``"weight"`` or an LSTM's ``"weight_hh_l0"``.
        dim: the dimension of the output channels (1 for transposed convolutions); ``None``: one norm for the tensor.
        p: norm order, a number ≥ 1 or ``math.inf``.
        rho: the norm, or ``"init"`` for ‖V‖_p / N^{1/p} of the weight as it is now (N channels).
        k: with ``p=math.inf``, Top(k): the sum of the k largest magnitudes.
        project: give every v_i its initial norm back after each step of a ``torch.optim`` optimizer, so that the
            effective step size stays η. (:func:`normmatters.weight_norm.project_weights` does it after other steps.)

    Returns:
        ``module``. Its parameter object becomes ``module.parametrizations.<name>.original`` (v), so an optimizer made
        before still trains it. ``rho`` is a buffer beside it. A checkpoint with a plain ``<name>`` loads into it, with
        ρ taken from the loaded weight unless a number was given here.

    v enters only by its direction: its gradient is orthogonal to it, its norm grows in training (unless you
    ``project``), and weight decay on it changes nothing but the step size. In an average of models the v are averaged.

    Raises:
        ValueError: no such parameter, already parametrized, a channel that is zero (it has no direction; an
            embedding's padding row may be), bad ``dim``, ``p``, ``k`` or ``rho``. The module is then unchanged.

    Example:
        >>> layer = bounded_weight_norm(nn.Linear(20, 40), rho=1.0)
        >>> layer.weight.norm(dim=1).allclose(torch.ones(40))
        True
    """
    v = _parameter_for("bounded", module, name, dim, p, k)
    return _register(module, name, BoundedWeight(v, dim=dim, p=p, rho=rho, k=k, project=project))


def classic_weight_norm(
    module: M, name: str = "weight", dim: int | None = 0, p: float = 2, *, k: int | None = None
) -> M:
    """The weight norm with a learned length, w_i = g_i · v_i / ‖v_i‖_p (F11), for comparison.

    At p = 2 it equals ``torch.nn.utils.parametrizations.weight_norm``, with the same state keys, and can be pickled and
    loaded from a plain checkpoint. g and v are new parameters: make the optimizer after this call.

    Example:
        >>> sorted(dict(classic_weight_norm(nn.Linear(2, 3, bias=False)).named_parameters()))
        ['parametrizations.weight.original0', 'parametrizations.weight.original1']
    """
    _parameter_for("classic", module, name, dim, p, k)
    return _register(module, name, ClassicWeight(dim=dim, p=p, k=k))


def _register(module: M, name: str, norm: BoundedWeight | ClassicWeight) -> M:
    names = [*module._parameters]
    norm.followed_by = (*names[names.index(name) + 1 :],)
    parametrize.register_parametrization(module, name, norm)
    complete_class(module)
    watch(module)
    return module


def _parameter_for(kind: str, module: nn.Module, name: str, dim: int | None, p: float, k: int | None) -> Tensor:
    """The plain parameter to normalize, or an error that says why it cannot be."""
    v = _parameter(module, name)
    check_slices(v, dim=dim, p=p, k=k)
    if kind == "bounded":
        _check_no_zero_slice(module, v, dim)
    return v


def _parameter(module: nn.Module, name: str) -> Tensor:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module, got {type(module).__name__}")
    if parametrize.is_parametrized(module, name):
        raise ValueError(f"{type(module).__name__}.{name} is already parametrized")
    parameter = module._parameters.get(name)
    if parameter is None:
        names = ", ".join(n for n, value in module._parameters.items() if value is not None) or "none"
        raise ValueError(f"{type(module).__name__} has no parameter {name!r}; it has: {names}")
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(f"{type(module).__name__}.{name} is not initialised yet; run a forward pass first")
    if isinstance(module, _EMBEDDINGS) and module.sparse:
        raise ValueError(
            f"{type(module).__name__} has sparse gradients, which cannot pass through a norm: sparse=False"
        )
    return parameter


def _check_no_zero_slice(module: nn.Module, v: Tensor, dim: int | None) -> None:
    if not has_values(v):
        return
    zero = slice_norm(v.detach(), dim=dim, p=float("inf")).flatten() == 0
    if isinstance(module, _EMBEDDINGS) and module.padding_idx is not None and dim in (0, -v.ndim):
        zero[module.padding_idx] = False
    if zero.any():
        where = "the weight" if dim is None else f"slice {int(zero.nonzero()[0])} along dim {dim}"
        raise ValueError(f"{where} of {type(module).__name__} is zero everywhere: it has no direction to normalize")


# A whole model --------------------------------------------------------------------------------------------------------


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


def apply_weight_norm(
    model: nn.Module,
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,
    p: float = 2,
    k: int | None = None,
    rho: float | Literal["init"] = "init",
    kind: Literal["bounded", "classic"] = "bounded",
    project: bool = False,
    embeddings: bool = False,
    fused: bool = True,
) -> WeightNormReport:
    """Normalize the weights of all linear, convolutional, recurrent and attention layers of ``model``, in place.

    Args:
        model: any module, or a single layer.
        filter: ``filter(name, module) -> bool`` picks the layers, by their name in ``named_modules()``.
        p, k, rho: as in :func:`bounded_weight_norm`; ``rho="init"`` is taken from each weight.
        kind: ``"bounded"`` (F12, F13) or ``"classic"`` with a learned length (F11; it has no ``rho``).
        project: hold every v at its initial norm, as in :func:`bounded_weight_norm`.
        embeddings: normalize the rows of ``nn.Embedding`` too.
        fused: on a GPU compute all weights together, in a few kernels per forward pass of ``model``: see
            :func:`normmatters.weight_norm.fuse`, which also says which layers still compute their own.

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
    check_options(rho, project)
    if kind == "classic" and rho != "init":
        raise ValueError(f"classic weight norm learns its norms and takes no rho, got rho = {rho}")
    if kind == "classic" and project:
        raise ValueError("project=True needs kind='bounded', got kind='classic'")

    report = WeightNormReport()
    chosen: list[_Candidate] = []
    for path, module in model.named_modules():
        for candidate in _candidates(path, module, embeddings):
            reason = _reason_to_skip(candidate, filter)
            if reason is None:
                try:  # before those that share the parameter are normalized
                    _parameter_for(kind, module, candidate.name, candidate.dim, p, k)
                except (TypeError, ValueError, NotImplementedError) as error:  # the last one: quantized
                    reason = str(error).partition("\n")[0]
            if reason is not None:
                report.skipped[candidate.full_name] = reason
            else:
                chosen.append(candidate)
    for candidate in _without_torn_ties(model, chosen, report, kind):
        try:
            if kind == "bounded":
                bounded_weight_norm(candidate.module, candidate.name, candidate.dim, p, rho, k=k, project=project)
            else:
                classic_weight_norm(candidate.module, candidate.name, candidate.dim, p, k=k)
        except (TypeError, ValueError) as error:
            report.skipped[candidate.full_name] = str(error)
        else:
            report.applied.append(candidate.full_name)
    if fused and report.applied:
        fuse(model)
    return report


class _Candidate(NamedTuple):
    path: str
    module: nn.Module
    name: str
    dim: int

    @property
    def full_name(self) -> str:
        return _joined(self.path, self.name)


def _candidates(path: str, module: nn.Module, embeddings: bool) -> Iterator[_Candidate]:
    """The weights of a layer that weight norm is for, each with the dimension of its output channels."""
    if isinstance(module, parametrize.ParametrizationList):
        return
    names: list[str] = []
    dim = 0
    if isinstance(module, _LAYERS) or (embeddings and isinstance(module, _EMBEDDINGS)):
        names = ["weight"]
    elif isinstance(module, nn.MultiheadAttention):
        names = [name for name in _ATTENTION_WEIGHTS if getattr(module, name) is not None]
    elif isinstance(module, _RECURRENT):
        names = [name for name in getattr(module, "_flat_weights_names", _CELL_WEIGHTS) if name.startswith("weight")]
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
    if weight.layout == torch.strided and not is_lazy(weight) and weight.numel() == weight.shape[candidate.dim]:
        return "one value in a channel: only its sign would be left"
    return None


def _without_torn_ties(
    model: nn.Module, chosen: list[_Candidate], report: WeightNormReport, kind: str
) -> list[_Candidate]:
    """The candidates whose parameter no other module would still use without the norm."""
    picked = {(id(one.module), one.name): one.dim for one in chosen}
    users: dict[int, list[tuple[str, int | None]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                user = (_joined(path, name), picked.get((id(module), name)))
                users.setdefault(id(parameter), []).append(user)
    tied_as_before = []
    for candidate in chosen:
        # Classic weight norm makes new parameters, so that no sharing survives it.
        others = [
            name
            for name, dim in users[id(candidate.module._parameters[candidate.name])]
            if name != candidate.full_name and (kind == "classic" or dim != candidate.dim)
        ]
        if others:
            report.skipped[candidate.full_name] = f"shared with {', '.join(others)}, which would not get the same norm"
        else:
            tied_as_before.append(candidate)
    return tied_as_before


# Removal --------------------------------------------------------------------------------------------------------------


def remove_weight_norm(module: M) -> M:
    """Turn every bounded or classic weight norm in ``module`` and its submodules into a plain parameter, in place.

    The outputs stay the same, and the parameters are in the order of before weight norm was added: an optimizer state
    that was saved by index fits. With bounded weight norm the parameter object stays the same too, so optimizers still
    train it.

    Raises:
        ValueError: there is none, or another parametrization was stacked on one, or a class (``fully_shard``), or its
            parameter is pruned (masked), or shared with a layer whose weight differs, so that no one tensor can stand
            for both; nothing is then removed.

    Example:
        >>> layer = remove_weight_norm(bounded_weight_norm(nn.Linear(2, 3)))
        >>> type(layer).__name__, type(layer.weight).__name__, sorted(layer.state_dict())
        ('Linear', 'Parameter', ['bias', 'weight'])
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module, got {type(module).__name__}")
    to_remove: list[tuple[nn.Module, str, BoundedWeight | ClassicWeight]] = []
    for path, owner in module.named_modules():
        if not parametrize.is_parametrized(owner):
            continue
        for name, stack in list(owner.parametrizations.items()):  # type: ignore[union-attr, operator]
            if not any(isinstance(one, WeightNorm) for one in stack):
                continue
            norm = weight_norm_of(owner, name)
            if norm is None:
                raise ValueError(
                    f"other parametrizations share {_joined(path, name)} with its weight norm; remove them"
                )
            if name not in vars(type(owner)):
                raise ValueError(
                    f"{type(owner).__name__} stands on top of the class that computes {_joined(path, name)}, as "
                    "fully_shard's does: remove weight norm before"
                )
            if isinstance(norm, BoundedWeight) and "original" not in stack._parameters:
                raise ValueError(
                    f"{_joined(path, name)} is computed from no parameter, so none would be left: make pruning "
                    "permanent first (prune.remove), or take off the wrapper that keeps the parameters"
                )
            to_remove.append((owner, name, norm))
    if not to_remove:
        raise ValueError(f"found no weight norm to remove in {type(module).__name__}")
    _check_sharing(module, [(owner, name) for owner, name, _ in to_remove])
    for part in module.modules():
        unfuse(part)
    for owner, name, _ in to_remove:
        trained = any(p.requires_grad for p in owner.parametrizations[name].parameters())  # type: ignore[index, union-attr]
        parametrize.remove_parametrizations(owner, name)
        if name in owner._buffers:  # torch's way with what was frozen, or computed under no_grad
            setattr(owner, name, nn.Parameter(owner._buffers[name], requires_grad=trained))  # type: ignore[arg-type]
        if isinstance(owner, nn.RNNBase) and not parametrize.is_parametrized(owner):
            owner._init_flat_weights()
    for owner, name, norm in reversed(to_remove):  # a weight may be followed by one that was normalized after it
        _move_before(owner._parameters, name, norm.followed_by)
    return module


def _check_sharing(module: nn.Module, weights: list[tuple[nn.Module, str]]) -> None:
    """Raise if the weight that would be left in a v is not what all its users compute with."""
    first: dict[int, tuple[nn.Module, str]] = {}  # the first user of each parameter
    for part in module.modules():
        if not isinstance(part, parametrize.ParametrizationList):
            first |= {id(parameter): (part, name) for name, parameter in part._parameters.items()}
    for owner, name in weights:
        v = owner.parametrizations[name]._parameters.get("original")  # type: ignore[union-attr, index]
        if v is None or not has_values(v):  # classic weight norm has new parameters
            continue
        other = first.setdefault(id(v), (owner, name))
        if other != (owner, name) and not torch.equal(getattr(*other), getattr(owner, name)):
            raise ValueError(
                f"{type(owner).__name__}.{name} shares its parameter with a layer whose weight differs: "
                "without weight norm both would be the same"
            )


def _move_before(parameters: dict[str, nn.Parameter | None], name: str, followed_by: tuple[str, ...]) -> None:
    """Move ``name`` to the place before the first of ``followed_by``."""
    names = [other for other in parameters if other != name]
    place = next((i for i, other in enumerate(names) if other in followed_by), len(names))
    for other in (*names[:place], name, *names[place:]):
        parameters[other] = parameters.pop(other)


def _joined(path: str, name: str) -> str:
    """The name of a module's parameter in the model."""
    return f"{path}.{name}" if path else name
