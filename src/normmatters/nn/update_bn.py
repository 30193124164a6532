"""``update_bn``: batch norm statistics of an averaged model, for this library's norms and PyTorch's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from normmatters.nn.batchnorm_base import LpBatchNorm


@torch.no_grad()
def update_bn(loader: Iterable[Any], model: nn.Module, device: torch.device | str | int | None = None) -> None:
    """Replace the running statistics of all batch norms of ``model`` by their averages over one pass of ``loader``.

    An average of models (SWA, EMA) has the weights of no model that was trained, so it needs statistics of its own.
    ``torch.optim.swa_utils.update_bn`` does this for ``torch.nn``'s batch norms and silently skips others; this one
    finds both kinds. As there, batches count alike, whatever their size. Norms that ``model.train()`` leaves in
    evaluation mode keep their statistics. Afterwards each module is in the mode it was in.

    Args:
        loader: gives batches: tensors, or lists and tuples with the input first.
        model: called with each input, in training mode and without gradients.
        device: where to move the inputs first; None leaves them.

    Raises:
        ValueError: ``loader`` gives no batch; the statistics are then as before.

    Example::

        >>> model = nn.Sequential(nn.Linear(4, 8), L1BatchNorm1d(8))
        >>> averaged = torch.optim.swa_utils.AveragedModel(model)
        >>> update_bn([torch.randn(32, 4) for _ in range(3)], averaged)
        >>> int(averaged.module[1].num_batches_tracked)
        3
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    norms = [m for m in model.modules() if isinstance(m, (_BatchNorm, LpBatchNorm)) and m.running_mean is not None]
    if not norms:
        return
    batches = iter(loader)
    try:
        first = next(batches)
    except StopIteration:
        raise ValueError("loader must give at least one batch to take statistics from, got none") from None

    momenta = [norm.momentum for norm in norms]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        for norm in norms:
            if norm.training:  # a model's own train() may keep some of them frozen
                norm.reset_running_stats()
                norm.momentum = None  # the plain average of all batches
        for batch in itertools.chain([first], batches):
            input = batch[0] if isinstance(batch, (list, tuple)) else batch
            model(input if device is None else input.to(device))
    finally:
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum
        for module, mode in modes:
            module.training = mode
