"""The authors' batch norms: what their state means, and the same in ours.

``models/lp_norm.py`` stores γ, β as ``scale`` and ``mean``, and the *inverse* scale in ``running_var``. The L1 norm of
``models/mean_bn.py`` stores the scale itself as ``running_scale``. ``MeanBN`` there has a mean alone. None has an eps
in evaluation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from normmatters.nn.batchnorm_base import LpBatchNorm

BATCH_NORMS = (LpBatchNorm, _BatchNorm)
_INVERSE = ("running_mean", "running_var", "scale", "mean")


def from_authors(state: dict[str, Tensor], prefix: str, module: LpBatchNorm | _BatchNorm) -> None:
    """Rewrite the entries of one batch norm, if they are the authors', for ``module``."""
    names = {name for name in (*_INVERSE, "running_scale") if f"{prefix}{name}" in state}
    if names == {"running_mean"}:  # no other batch norm has a mean alone
        if not _is_mean_only(module):
            raise ValueError(f"{prefix}running_var is missing: expected it for the model's {type(module).__name__}")
        state[f"{prefix}running_var"] = torch.ones_like(state[f"{prefix}running_mean"])
    elif names & {"scale", "mean"}:
        for name in _INVERSE:
            if name not in names:
                raise ValueError(
                    f"{prefix}{name} is missing: expected {', '.join(_INVERSE)} of the authors' batch norm"
                )
        scales = _positive(state, f"{prefix}running_var", "inverse scales", module)
        state[f"{prefix}weight"], state[f"{prefix}bias"] = state.pop(f"{prefix}scale"), state.pop(f"{prefix}mean")
        _set_scale(state, prefix, scales.double().reciprocal(), scales.dtype, module.eps)
        state.pop(f"{prefix}meanTOPK", None)  # a moving average of Top(k), which evaluation does not use
    elif "running_scale" in names:
        scales = _positive(state, f"{prefix}running_scale", "scales", module)
        _set_scale(state, prefix, scales.double(), scales.dtype, module.eps)
    else:
        return
    state[f"{prefix}num_batches_tracked"] = torch.zeros((), dtype=torch.long)


def to_authors(state: dict[str, Tensor], prefix: str, module: LpBatchNorm | _BatchNorm) -> None:
    """Rewrite the entries of one batch norm of ours for ``models/lp_norm.py``, or ``MeanBN``."""
    variance = module.running_var
    if variance is None:
        raise ValueError(f"{prefix}running_var is missing: expected running statistics, which the authors' norms have")
    state.pop(f"{prefix}num_batches_tracked", None)  # may be None, and is then no entry
    if _is_mean_only(module):
        del state[f"{prefix}running_var"]
        return
    state[f"{prefix}scale"] = state.pop(f"{prefix}weight", torch.ones_like(variance))
    state[f"{prefix}mean"] = state.pop(f"{prefix}bias", torch.zeros_like(variance))
    state[f"{prefix}running_var"] = (variance.double() + module.eps).rsqrt().to(variance.dtype)


def _is_mean_only(module: LpBatchNorm | _BatchNorm) -> bool:
    return isinstance(module, LpBatchNorm) and module.p == "mean"


def _positive(state: dict[str, Tensor], key: str, what: str, module: LpBatchNorm | _BatchNorm) -> Tensor:
    if _is_mean_only(module):
        raise ValueError(f"{key} holds {what}, but the model's {type(module).__name__} has no scale")
    values = state.pop(key)
    if not (values.isfinite() & (values > 0)).all():  # theirs are 0 before the first batch
        raise ValueError(f"{key} must hold positive, finite {what}, got {values.min():.3g} to {values.max():.3g}")
    return values


def _set_scale(state: dict[str, Tensor], prefix: str, scale: Tensor, dtype: torch.dtype, eps: float) -> None:
    """Choose ``running_var`` so that √(running_var + eps) is ``scale``.

    A scale below √eps would need a negative variance: there the weight takes on the rest.
    """
    variance = scale.square() - eps
    if (variance < 0).any():
        if f"{prefix}weight" not in state:
            raise ValueError(f"{prefix}weight is missing: expected one, for a scale below √eps = {eps**0.5:.1e}")
        weight = state[f"{prefix}weight"]
        state[f"{prefix}weight"] = torch.where(variance < 0, weight * (eps**0.5 / scale), weight).to(weight.dtype)
    state[f"{prefix}running_var"] = variance.clamp(min=0).to(dtype)
