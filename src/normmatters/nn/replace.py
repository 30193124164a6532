"""Another norm in a norm's place: what would be lost by it, and how a module becomes another one."""

from __future__ import annotations

from collections.abc import Set

from torch import nn
from torch.nn.utils import parametrize


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
    left = {*without, "_compiled_call_impl"}  # what compile() made of it calls the old class
    vars(new).update({name: value for name, value in vars(old).items() if name not in left})


def become(module: nn.Module, new: nn.Module) -> None:
    """Make ``module`` what ``new`` is, in place: everyone who holds it, in whatever way, then has the new one."""
    attributes = dict(vars(new))
    vars(module).clear()
    vars(module).update(attributes)
    object.__setattr__(module, "__class__", type(new))
