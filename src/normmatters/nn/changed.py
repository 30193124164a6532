"""What a user may have made of a norm, which would be lost if another class took its place."""

from __future__ import annotations

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
