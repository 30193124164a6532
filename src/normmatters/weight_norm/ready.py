"""A weight that was computed ahead of its use, together with those of all other layers (see ``fused.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["ReadyWeight"]


class ReadyWeight:
    """Holds a layer's weight during one forward pass of the model. It is never copied or saved with the layer.

    After the pass nothing is held: a weight leads to its graph, and that to the nodes that collect v's gradients, which
    belong to the stream of the pass. A step on another stream that met them could not be captured.

    A checkpointed part of the model runs again in the backward pass, and must then save for it what it saved before,
    which is nothing of how the weight was computed. For that, the dtype is remembered and the versions of v and ρ.

    ρ is bounded weight norm's, or classic weight norm's g.
    """

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._versions: tuple[int, int] | None = None
        self._alone: Any = None

    def put(self, weight: Tensor, v: Tensor, rho: Tensor) -> None:
        """Make ``weight``, computed from ``v`` and ``rho``, ready for the forward pass that begins."""
        self._weight = weight
        self._dtype = weight.dtype if weight.requires_grad else None
        self._versions = (v._version, rho._version) if weight.requires_grad else None

    def clear(self) -> None:
        """The forward pass has ended."""
        self._weight = None

    def weight_for(self, v: Tensor, rho: Tensor) -> Tensor | None:
        """The weight, if there is one that can stand for the one computed from ``v`` and ``rho`` here and now."""
        weight = self._weight
        if weight is None:
            return None
        # Gradients may be recorded in a part of a forward pass that records none.
        if not weight.requires_grad and (v.requires_grad or rho.requires_grad) and torch.is_grad_enabled():
            return None
        return weight if _taken_as(weight.dtype, v) else None

    def again(self, v: Tensor, rho: Tensor, p: float) -> Tensor | None:
        """In a backward pass: the weight once more, computed by the kernels alone, if it was ready in the last pass."""
        dtype = self._dtype
        if dtype is None or torch._C._current_graph_task_id() == -1:
            return None
        if self._versions != (v._version, rho._version) or not _taken_as(dtype, v):
            return None
        from normmatters.kernels.triton.weight_norm import WeightGroup, is_learned, why_not

        if why_not(v, rho, dim=0, p=p, k=None):
            return None
        key = (v.device, v.dtype, v.shape, v.stride(), dtype)
        if self._alone is None or self._alone[0] != key:
            self._alone = key, WeightGroup([v], p, dtype, is_learned(rho))
        # Saved past the hooks of the checkpoint, which count what is saved.
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            weight: Tensor = self._alone[1]([v], [rho])[0]
        return weight

    def __deepcopy__(self, memo: Any) -> ReadyWeight:
        return ReadyWeight()

    def __reduce__(self) -> tuple[type[ReadyWeight], tuple[()]]:
        return ReadyWeight, ()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _taken_as(dtype: torch.dtype, v: Tensor) -> bool:
    """Whether a layer that runs now takes a weight of ``dtype`` as it would take one computed from v here and now.

    Autocast may be off by now.
    """
    if dtype == v.dtype:
        return True
    device = v.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype
