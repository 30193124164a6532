"""Weight norm on one parameter of one module: add it and take it away."""

from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from normmatters.functional.weight import check_slices, has_values, slice_norm
from normmatters.weight_norm.fused import unfuse
from normmatters.weight_norm.parametrizations import BoundedWeight, ClassicWeight
from normmatters.weight_norm.parametrized import complete_class, own_parametrization

__all__ = ["bounded_weight_norm", "classic_weight_norm", "remove_weight_norm"]

M = TypeVar("M", bound=nn.Module)


def bounded_weight_norm(
    module: M,
    name: str = "weight",
    dim: int | None = 0,
    p: float = 2,
    rho: float | Literal["init"] = "init",
    *,
    k: int | None = None,
) -> M:
    """Give every output channel of ``module.<name>`` the same fixed norm: w_i = ρ · v_i / ‖v_i‖_p (F12, F13).

    Args:
        module: any module with a floating-point parameter; changed in place.
        name: the parameter, e.g. ``"weight"`` or an LSTM's ``"weight_hh_l0"``.
        dim: the dimension of the output channels (1 for transposed convolutions); ``None``: one norm for the tensor.
        p: norm order, a number ≥ 1 or ``math.inf``.
        rho: the norm, or ``"init"`` for ‖V‖_p / N^{1/p} of the weight as it is now (N channels).
        k: with ``p=math.inf``, Top(k): the sum of the k largest magnitudes.

    Returns:
        ``module``. Its parameter object lives on as ``module.parametrizations.<name>.original`` (v), so an optimizer
        made before goes on to train it. ``rho`` is a buffer beside it. A checkpoint with a plain ``<name>`` loads into
        it, with ρ taken from the loaded weight unless a number was given here.

    v enters only by its direction: its gradient is orthogonal to it, its norm grows in training, and weight decay on
    it changes nothing but the step size. The same holds in an average of models: averaged are the v.

    Raises:
        ValueError: no such parameter, already parametrized, a channel that is zero (it has no direction; an
            embedding's padding row may be), bad ``dim``, ``p``, ``k`` or ``rho``. The module is then unchanged.

    Example:
        >>> layer = bounded_weight_norm(nn.Linear(20, 40), rho=1.0)
        >>> layer.weight.norm(dim=1).allclose(torch.ones(40))
        True
    """
    v = parameter_for("bounded", module, name, dim, p, k)
    parametrization = BoundedWeight(v, dim=dim, p=p, rho=rho, k=k)
    parametrize.register_parametrization(module, name, parametrization)
    complete_class(module)
    return module


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
    parameter_for("classic", module, name, dim, p, k)
    parametrize.register_parametrization(module, name, ClassicWeight(dim=dim, p=p, k=k))
    complete_class(module)
    return module


def remove_weight_norm(module: M) -> M:
    """Turn every bounded or classic weight norm in ``module`` and its submodules into a plain parameter, in place.

    The outputs stay the same. With bounded weight norm the parameter object stays the same too, so optimizers go on.

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
    found = []
    for path, owner in module.named_modules():
        if not parametrize.is_parametrized(owner):
            continue
        for name, stack in list(owner.parametrizations.items()):  # type: ignore[union-attr, operator]
            if not any(isinstance(one, BoundedWeight | ClassicWeight) for one in stack):
                continue
            norm = own_parametrization(owner, name)
            if norm is None:
                raise ValueError(f"other parametrizations share {joined(path, name)} with its weight norm; remove them")
            if name not in vars(type(owner)):
                raise ValueError(
                    f"{type(owner).__name__} stands on top of the class that computes {joined(path, name)}, as "
                    "fully_shard's does: remove weight norm before"
                )
            if isinstance(norm, BoundedWeight) and "original" not in stack._parameters:
                raise ValueError(
                    f"{joined(path, name)} is computed from no parameter, so none would be left: make pruning "
                    "permanent first (prune.remove), or take off the wrapper that keeps the parameters"
                )
            found.append((owner, name))
    if not found:
        raise ValueError(f"found no weight norm to remove in {type(module).__name__}")
    _check_sharing(module, found)
    for part in module.modules():
        unfuse(part)
    for owner, name in found:
        trained = any(p.requires_grad for p in owner.parametrizations[name].parameters())  # type: ignore[index, union-attr]
        parametrize.remove_parametrizations(owner, name)
        if name in owner._buffers:  # torch's way with what was frozen, or computed under no_grad
            setattr(owner, name, nn.Parameter(owner._buffers[name], requires_grad=trained))
        if isinstance(owner, nn.RNNBase) and not parametrize.is_parametrized(owner):
            owner._init_flat_weights()
    return module


def parameter_for(kind: str, module: nn.Module, name: str, dim: int | None, p: float, k: int | None) -> Tensor:
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
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        raise ValueError(
            f"{type(module).__name__} has sparse gradients, which cannot pass through a norm: sparse=False"
        )
    return parameter


def _check_sharing(module: nn.Module, found: list[tuple[nn.Module, str]]) -> None:
    """Raise if the weight that would be left in a v is not what all its users compute with."""
    first: dict[int, tuple[nn.Module, str]] = {}  # who uses a parameter; weights are computed only where two do
    for part in module.modules():
        if not isinstance(part, parametrize.ParametrizationList):
            first |= {id(parameter): (part, name) for name, parameter in part._parameters.items()}
    for owner, name in found:
        v = owner.parametrizations[name]._parameters.get("original")  # type: ignore[union-attr, index]
        if v is None or not has_values(v):  # classic weight norm has new parameters
            continue
        other = first.setdefault(id(v), (owner, name))
        if other != (owner, name) and not torch.equal(getattr(*other), getattr(owner, name)):
            raise ValueError(
                f"{type(owner).__name__}.{name} shares its parameter with a layer whose weight differs: "
                "without weight norm both would be the same"
            )


def _check_no_zero_slice(module: nn.Module, v: Tensor, dim: int | None) -> None:
    if not has_values(v):
        return
    zero = slice_norm(v.detach(), dim=dim, p=float("inf")).flatten() == 0
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None and dim in (0, -v.ndim):
        zero[module.padding_idx] = False
    if zero.any():
        where = "the weight" if dim is None else f"slice {int(zero.nonzero()[0])} along dim {dim}"
        raise ValueError(f"{where} of {type(module).__name__} is zero everywhere: it has no direction to normalize")


def joined(path: str, name: str) -> str:
    """The name of a module's parameter in the model."""
    return f"{path}.{name}" if path else name
