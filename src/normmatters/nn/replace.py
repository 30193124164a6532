"""Another module in a norm's place: what would be lost by it, and where the norm has to be looked for."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map_only


def changed(norm: nn.Module, package: str) -> str | None:
    """Why ``norm`` is not what a class of ``package`` (``"torch"`` or ``"normmatters"``) makes it; None if it is."""
    if parametrize.is_parametrized(norm):
        return "it is parametrized"
    if "forward" in vars(norm):
        return "its forward was replaced on the instance"
    home = next(cls for cls in type(norm).__mro__ if "forward" in vars(cls))
    if home.__module__.split(".")[0] != package:
        return f"{type(norm).__name__} has a forward of its own"
    return None


def keep_all(old: nn.Module, new: nn.Module, *, without: Set[str] = frozenset()) -> None:
    """Give ``new`` all that ``old`` holds: the same tensors, flags, hooks, modules and whatever else was set on it.

    Norms here hold what ``torch.nn``'s hold and the few attributes that say which norm it is, so that is all.
    """
    left = {*without, "_compiled_call_impl"}  # what compile() made of it is bound to the old one
    vars(new).update({name: value for name, value in vars(old).items() if name not in left})
    for hook in new._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)  # type: ignore[attr-defined]


def held_beside(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Module]]:
    """(attributes, name, module) for each module in a plain list, dict or attribute, which PyTorch knows nothing of."""
    for owner in model.modules():
        for name, value in vars(owner).items():
            if name != "_modules":
                yield from ((vars(owner), name, leaf) for leaf in tree_leaves(value) if isinstance(leaf, nn.Module))


def replace(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put the new modules wherever the old ones are; one that is at several places stays one."""
    for owner in list(model.modules()):
        for name, child in owner._modules.items():
            if child is not None and child in new:
                owner._modules[name] = new[child]
    for attributes, name, module in list(held_beside(model)):
        if module in new:
            attributes[name] = tree_map_only(nn.Module, lambda held: new.get(held, held), attributes[name])
    return new.get(model, model)
