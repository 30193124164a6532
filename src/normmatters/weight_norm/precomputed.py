"""A weight that was computed before its layer uses it, together with those of all other layers (see ``fused.py``)."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from normmatters.kernels import backends


def kernels_on(device: torch.device) -> Any:
    """The module whose kernels compute weights on this device, or None."""
    if device.type == "cpu" and not backends.INTERPRETED:
        return None if backends.NATIVE_MISSING else importlib.import_module("normmatters.kernels.cpu.weight_norm")
    return None if backends.TRITON_MISSING else importlib.import_module("normmatters.kernels.triton.weight_norm")


class PrecomputedWeight:
    """Holds a layer's weight during one forward pass of the model. It is never copied or saved with the layer.

    After the pass it holds nothing. A weight leads to its graph, and the graph to the nodes that accumulate v's
    gradients, which belong to the stream of the pass: a step on another stream that met them could not be captured.

    A checkpointed part of the model runs again in the backward pass, and must then save what it saved before. It saved
    nothing of how the weight was computed. For that this remembers the dtype, and the versions of v and ρ.

    ρ is bounded weight norm's, or classic weight norm's g.
    """

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._versions: tuple[int, int] | None = None
        self._group: Any = None

    def put(self, weight: Tensor, v: Tensor, rho: Tensor) -> None:
        """Hold ``weight``, computed from ``v`` and ``rho``, for the forward pass that begins."""
        self._weight = weight
        self._dtype = weight.dtype if weight.requires_grad else None
        self._versions = (v._version, rho._version) if weight.requires_grad else None

    def clear(self) -> None:
        """The forward pass has ended."""
        self._weight = None

    def weight_for(self, v: Tensor, rho: Tensor) -> Tensor | None:
        """The weight, if it equals what would be computed from ``v`` and ``rho`` here and now."""
        weight = self._weight
        if weight is None:
            return None
        # Gradients may be recorded in a part of a forward pass that records none.
        if not weight.requires_grad and (v.requires_grad or rho.requires_grad) and torch.is_grad_enabled():
            return None
        return weight if _dtype_fits(weight.dtype, v) else None

    def recomputed(self, v: Tensor, rho: Tensor, p: float) -> Tensor | None:
        """In a backward pass: the weight once more, by the kernels alone, if the last forward pass held it."""
        dtype = self._dtype
        if dtype is None or torch._C._current_graph_task_id() == -1:
            return None
        if self._versions != (v._version, rho._version) or not _dtype_fits(dtype, v):
            return None
        kernels = kernels_on(v.device)
        if kernels is None or kernels.why_not(v, rho, dim=0, p=p, k=None):
            return None
        key = (v.device, v.dtype, v.shape, v.stride(), dtype)
        if self._group is None or self._group[0] != key:
            self._group = key, kernels.WeightGroup([v], p, dtype, kernels.is_learned(rho))
        # Saved past the hooks of the checkpoint, which count what is saved.
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            weight: Tensor = self._group[1]([v], [rho])[0]
        return weight

    def __deepcopy__(self, memo: Any) -> PrecomputedWeight:
        return PrecomputedWeight()

    def __reduce__(self) -> tuple[type[PrecomputedWeight], tuple[()]]:
        return PrecomputedWeight, ()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _dtype_fits(dtype: torch.dtype, v: Tensor) -> bool:
    """Whether a layer that runs now gets the same from a weight of ``dtype`` as from one computed from v.

    Autocast may be off by now.
    """
    if dtype == v.dtype:
        return True
    device = v.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype
