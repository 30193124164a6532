"""A weight that was computed ahead of its use, together with those of all other layers (see ``fused.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["ReadyWeight"]


class ReadyWeight:
    """Holds a layer's weight during one forward pass of the model. It is never copied or saved with the layer.

    A checkpointed part of the model runs again in the backward pass, and must then see the weight that it saw before:
    so after the forward pass the weight is kept aside, for use inside a backward pass and as long as v is unchanged.
    """

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._kept: Tensor | None = None
        self._version = 0
        self._recorded = False

    def put(self, weight: Tensor) -> None:
        """Make ``weight`` ready for the forward pass that begins."""
        self._weight, self._kept, self._recorded = weight, None, False

    def forget(self) -> None:
        """Let go of what was kept for a backward pass."""
        self._kept = None

    def clear(self, v: Tensor | None) -> None:
        """The forward pass has ended; v is None where the weight norm is no more."""
        # Reentrant checkpoints run without recording first, and again with a graph of their own: a weight that belongs
        # to the outer graph would be in their way.
        if v is not None and self._recorded and self._weight is not None and self._weight.requires_grad:
            self._kept, self._version = self._weight, v._version
        self._weight = None

    def weight_for(self, v: Tensor) -> Tensor | None:
        """The weight, if there is one that can stand for the one computed from ``v`` here and now."""
        weight = self._weight
        if torch.compiler.is_compiling():
            return weight if weight is not None and _stands_for(weight, v) else None
        if weight is None and self._kept is not None and torch._C._current_graph_task_id() != -1:
            weight = self._kept if self._version == v._version else None
        if weight is None or not _stands_for(weight, v):
            return None
        self._recorded |= torch.is_grad_enabled()
        return weight

    def __deepcopy__(self, memo: Any) -> ReadyWeight:
        return ReadyWeight()

    def __reduce__(self) -> tuple[type[ReadyWeight], tuple[()]]:
        return ReadyWeight, ()


def _stands_for(weight: Tensor, v: Tensor) -> bool:
    """Whether a layer that runs now takes ``weight`` as it would take one computed from v here and now.

    Autocast may be off by now, and gradients may be recorded in a part of a forward pass that records none.
    """
    if v.requires_grad and not weight.requires_grad and torch.is_grad_enabled():
        return False
    if weight.dtype == v.dtype:
        return True
    device = v.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == weight.dtype
