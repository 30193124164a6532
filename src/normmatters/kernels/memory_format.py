"""The memory format that kernels take a tensor in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format


def memory_format(x: Tensor) -> torch.memory_format:
    """The format in which ``x`` (and everything shaped like it) is handed to the kernels."""
    if x.is_contiguous():
        return torch.contiguous_format
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return suggest_memory_format(x)  # it is copied: into the layout that torch's batch norm would take
