"""Weight norms of torch and of the authors: g and v with w = g·v/‖v‖₂, under several names, and the same in ours.

torch's hooks write ``weight_g`` and ``weight_v``; its parametrizations write ``original0`` and ``original1``. The
authors' ``models/bwn.py`` adds ``weight_g_prenorm``, the norm of all g together, to the hooks' names. Their
``models/bwn_alt.py`` has one length, ``weight_v_prenorm``, in place of g.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normmatters.functional.weight import slice_norm
from normmatters.weight_norm.parametrizations import BoundedWeight, ClassicWeight, weight_norm_of

AnyWeightNorm = BoundedWeight | ClassicWeight


def from_others(state: dict[str, Tensor], prefix: str, module: nn.Module) -> None:
    """Rewrite the weight norms of one module for what the model has there: a plain weight, or a weight norm of ours."""
    ours: dict[str, AnyWeightNorm] = dict(_weight_norms(module))
    for name in (*module._parameters, *ours):
        if f"{name}_v" in module._parameters:  # a parameter of the model's own, and no half of a weight norm
            continue
        norm = ours.get(name)
        own = f"{prefix}parametrizations.{name}."
        if isinstance(norm, ClassicWeight) and norm.p != 2 and f"{own}original0" in state:
            reason = f"the model's has p = {norm.p}; a state of this library needs only load_state_dict"
            raise ValueError(f"{own}original0 is expected to be torch's, with p = 2, but {reason}")
        g_and_v = _take_g_and_v(state, prefix, name, 0 if norm is None else norm.dim)
        if g_and_v is None:
            continue
        g, v = g_and_v
        if norm is None:
            state[f"{prefix}{name}"] = _product(g, v)
        else:
            entries = (
                _classic_entries(g, v, norm)
                if isinstance(norm, ClassicWeight)
                else _bounded_entries(g, v, norm, prefix + name)
            )
            state.update({f"{own}{key}": value for key, value in entries.items()})


def to_authors(state: dict[str, Tensor], prefix: str, module: nn.Module) -> None:
    """Rewrite the weight norms of one module for ``models/bwn_alt.py`` (bounded, p = 2) or ``models/bwn.py``."""
    for name, norm in _weight_norms(module):
        key = f"{prefix}{name}"
        g, state[f"{key}_v"] = _take_ours_as_g_and_v(state, prefix, name, module, norm)
        if isinstance(norm, BoundedWeight) and norm.p == 2:
            state[f"{key}_v_prenorm"] = norm.rho.reshape(1)
        else:
            state[f"{key}_g"], state[f"{key}_g_prenorm"] = g, g.norm().reshape(1)


def to_torch(state: dict[str, Tensor], prefix: str, module: nn.Module, layout: str) -> None:
    """Rewrite the weight norms of one module for torch's, in either layout."""
    for name, norm in _weight_norms(module):
        g, v = _take_ours_as_g_and_v(state, prefix, name, module, norm)
        own = f"{prefix}parametrizations.{name}.original"
        keys = (f"{prefix}{name}_g", f"{prefix}{name}_v") if layout == "hook" else (f"{own}0", f"{own}1")
        state[keys[0]], state[keys[1]] = (g.reshape(()) if norm.dim is None else g), v


def _weight_norms(module: nn.Module) -> Iterator[tuple[str, AnyWeightNorm]]:
    if parametrize.is_parametrized(module):
        for name in module.parametrizations:  # type: ignore[union-attr]
            norm = weight_norm_of(module, name)
            if norm is not None:
                yield name, norm


def _take_g_and_v(state: dict[str, Tensor], prefix: str, name: str, dim: int | None) -> tuple[Tensor, Tensor] | None:
    """Take g and v out of ``state``, from whichever layout is there; ``dim`` is for lengths that are one number."""
    key, own = f"{prefix}{name}", f"{prefix}parametrizations.{name}.original"
    if f"{key}_v_prenorm" in state:
        length, direction = f"{key}_v_prenorm", f"{key}_v"
    elif f"{key}_orig" not in state and (f"{key}_g" in state or f"{key}_v" in state):  # that is a spectral norm's
        length, direction = f"{key}_g", f"{key}_v"
    elif f"{own}0" in state or f"{own}1" in state:
        length, direction = f"{own}0", f"{own}1"
    else:
        return None
    for missing, there in ((length, direction), (direction, length)):
        if missing not in state:
            raise ValueError(f"{missing} is missing: expected it beside {there}, the other half of a weight norm")
    g, v = state.pop(length), state.pop(direction)
    if length == f"{key}_v_prenorm":
        g = g.reshape(()).expand_as(slice_norm(v, dim=dim))
    total = state.pop(f"{key}_g_prenorm", None)
    if total is not None:
        g = g * (total / g.norm())
    if g.numel() == 1:
        g = g.reshape([1] * v.ndim)
    if g.ndim != v.ndim or any(size not in (1, v.shape[d]) for d, size in enumerate(g.shape)):
        raise ValueError(f"{length} must broadcast against {direction} of {tuple(v.shape)}, got {tuple(g.shape)}")
    return g, v


def _product(g: Tensor, v: Tensor) -> Tensor:
    """g·v/‖v‖₂, with the norm over the dimensions in which g has one value."""
    others = [d for d, size in enumerate(g.shape) if size == 1]
    norm = torch.linalg.vector_norm(v.double(), 2, others, keepdim=True) if others else v.double().abs()
    return (v * (g / norm)).to(v.dtype)


def _classic_entries(g: Tensor, v: Tensor, norm: ClassicWeight) -> dict[str, Tensor]:
    if norm.p == 2 and g.shape == slice_norm(v, dim=norm.dim).shape:
        return {"original0": g.contiguous(), "original1": v}
    return norm.state_from_plain(_product(g, v))


def _bounded_entries(g: Tensor, v: Tensor, norm: BoundedWeight, key: str) -> dict[str, Tensor]:
    first = g.flatten()[0]
    if norm.p == 2 and g.shape == slice_norm(v, dim=norm.dim).shape and first > 0 and (g == first).all():
        return {"original": v, "0.rho": first.clone()}
    weight = _product(g, v)
    lengths = slice_norm(weight, dim=norm.dim, p=norm.p, k=norm.k)
    rho = lengths.mean()
    if (lengths - rho).abs().max() > 32 * torch.finfo(weight.dtype).eps * rho:
        span = f"{lengths.min():.3g} to {lengths.max():.3g}"
        raise ValueError(f"{key}: expected channels of one length for bounded weight norm, got {span}: use classic")
    return {"original": weight, "0.rho": rho}


def _take_ours_as_g_and_v(
    state: dict[str, Tensor], prefix: str, name: str, module: Any, norm: AnyWeightNorm
) -> tuple[Tensor, Tensor]:
    """Take our entries out of ``state``; g and v with weight = g·v/‖v‖₂, v as it is where ours is that norm too."""
    own = f"{prefix}parametrizations.{name}."
    entries = {key: state.pop(key).detach() for key in list(state) if key.startswith(own)}
    if norm.p != 2:
        v = getattr(module, name).detach()
        g = slice_norm(v, dim=norm.dim).to(v.dtype)
    elif isinstance(norm, ClassicWeight):
        g, v = entries[f"{own}original0"], entries[f"{own}original1"]
    else:
        v = entries[f"{own}original"]
        g = norm.rho.to(v.dtype).expand_as(slice_norm(v, dim=norm.dim)).contiguous()
    if (slice_norm(v, dim=norm.dim) == 0).any():
        raise ValueError(f"{prefix}{name} has a channel of zeros: expected a direction, others' weight norms give NaN")
    return g, v
