"""Load checkpoints of others into this library's models, and save ours for others. Only names and layouts change.

It knows the layers of the authors' repository ``norm_matters`` (batch norms that store the inverse scale, mean-only
batch norm, both forms of bounded weight norm) and ``torch``'s weight norm in its two layouts. Checkpoints of
``torch.nn``'s batch norms need only ``model.load_state_dict``: keys and meaning are the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from normmatters.migrate import batch_norms, weight_norms

__all__ = ["load", "to_norm_matters", "to_torch_weight_norm", "translate"]


def load(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load a checkpoint of the authors, or of torch's weight norm, into ``model``: :func:`translate`, then load.

    Args:
        model: a model of this library's norms, with the checkpoint's names.
        state_dict: its tensors (the authors keep them under ``checkpoint["state_dict"]``).
        strict: as in ``model.load_state_dict``, whose result is returned.

    Raises:
        ValueError, TypeError: a key is missing, or its values cannot be; names it, before the model is changed.
        RuntimeError: from ``load_state_dict``; names the keys that are missing, left over or of another shape.

    Example::

        >>> theirs = {"scale": torch.ones(2), "mean": torch.zeros(2)}
        >>> theirs |= {"running_mean": torch.zeros(2), "running_var": torch.tensor([0.5, 0.1])}  # 1/scale
        >>> bn = nm.L1BatchNorm2d(2)
        >>> nm.migrate.load(bn, theirs)
        <All keys matched successfully>
        >>> bn.running_var
        tensor([  4.0000, 100.0000])
    """
    translated = translate(model, state_dict)  # checks its arguments before anything is loaded
    return model.load_state_dict(translated, strict=strict)


def translate(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """The checkpoint under the names, and with the meanings, of ``model``'s own state; entries not known stay.

    Arguments and errors as in :func:`load`. Neither ``model`` nor ``state_dict`` is changed.

    The model's layer decides what a weight norm becomes: a plain weight gets the product, classic weight norm g and v,
    bounded weight norm v and ρ. Bounded weight norm has one length for all channels, so all of theirs must be equal.

    Example::

        >>> theirs = torch.nn.utils.weight_norm(nn.Linear(3, 2, bias=False)).state_dict()
        >>> sorted(theirs), sorted(nm.migrate.translate(nn.Linear(3, 2, bias=False), theirs))
        (['weight_g', 'weight_v'], ['weight'])
    """
    _check_model(model)
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping of names to tensors, got {type(state_dict).__name__}")
    for key, value in state_dict.items():
        if not isinstance(value, Tensor) and not str(key).endswith(_EXTRA_STATE_KEY_SUFFIX):  # a module's, of any type
            raise TypeError(f"expected a tensor under {key!r}, got {type(value).__name__}: is this the state_dict?")
    state = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):  # the versions that modules were saved in
        state._metadata = state_dict._metadata  # type: ignore[attr-defined]
    for prefix, module in _modules(model):
        if isinstance(module, batch_norms.BATCH_NORMS):
            batch_norms.from_authors(state, prefix, module)
        weight_norms.from_others(state, prefix, module)
    return state


def to_norm_matters(model: nn.Module) -> dict[str, Tensor]:
    """The state of ``model`` for the authors' layers, under their names and with their meanings.

    Batch norms become those of ``models/lp_norm.py``, mean-only ones ``MeanBN``, bounded weight norm with p = 2
    ``models/bwn_alt.py``'s, every other weight norm ``models/bwn.py``'s at p = 2. Outputs in evaluation are the same; a
    ReLU that was merged into a norm must be a layer of its own there.

    Raises:
        ValueError: a batch norm has no running statistics, which theirs always have.

    Example::

        >>> sorted(nm.migrate.to_norm_matters(nm.L1BatchNorm2d(2)))
        ['mean', 'running_mean', 'running_var', 'scale']
    """
    _check_model(model)
    state = dict(model.state_dict())
    for prefix, module in _modules(model):
        if isinstance(module, batch_norms.BATCH_NORMS):
            batch_norms.to_authors(state, prefix, module)
        weight_norms.to_authors(state, prefix, module)
    return state


def to_torch_weight_norm(
    model: nn.Module, layout: Literal["parametrization", "hook"] = "parametrization"
) -> dict[str, Tensor]:
    """The state of ``model`` for torch's weight norm in the place of each bounded or classic one.

    Args:
        model: any model.
        layout: ``"parametrization"`` for ``torch.nn.utils.parametrizations.weight_norm``, ``"hook"`` for the older
            ``torch.nn.utils.weight_norm`` (``weight_g``, ``weight_v``); both with the ``dim`` of this model's.

    Example::

        >>> layer = nm.bounded_weight_norm(nn.Linear(3, 2, bias=False), rho=1.0)
        >>> nm.migrate.to_torch_weight_norm(layer, "hook")["weight_g"]
        tensor([[1.],
                [1.]])
    """
    if layout not in ("parametrization", "hook"):
        raise ValueError(f"layout must be 'parametrization' or 'hook', got {layout!r}")
    _check_model(model)
    state = dict(model.state_dict())
    for prefix, module in _modules(model):
        weight_norms.to_torch(state, prefix, module, layout)
    return state


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with the prefix of its keys; a module at several places has its keys at each."""
    for path, module in model.named_modules(remove_duplicate=False):
        yield f"{path}." if path else "", module
