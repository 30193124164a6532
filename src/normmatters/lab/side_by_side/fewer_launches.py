"""Fewer kernels in a captured step: what a network does layer by layer, done for all layers at once.

A CIFAR network's kernels take a few microseconds each, so their number is its time. ResNet-56 under autocast casts
57 weights to half, casts 57 gradients back and, where its norms are torch's, counts a batch 57 times (the kernels of
ours count by themselves): 171 launches that become three. The numbers are the same, bit for bit. Only a capture can do
this: it runs the Python once and puts everything back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normmatters.lab.side_by_side.small_conv import SmallConv2d

_CAST = (nn.Conv2d, SmallConv2d, nn.Linear)  # whose weights and biases autocast casts


@contextlib.contextmanager
def fewer_launches(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """One forward and backward pass of ``model`` inside: weights cast to ``dtype`` and batches counted together.

    ``dtype`` is autocast's, None without autocast. Afterwards the parameters have the
    passes' gradients in place of any older ones.
    """
    # Our norms count in their kernels. Without the counter they would need other kernels than are compiled by now.
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.momentum is not None]
    counters = {m: m.num_batches_tracked for m in norms if m.num_batches_tracked is not None}
    weights = [] if dtype is None else _cast_weights(model)
    masters = [parameters[name] for parameters, name in weights]
    halves = [torch.empty_like(p, dtype=dtype) for p in masters]
    if halves:
        torch._foreach_copy_(halves, [p.detach() for p in masters])
    try:
        for (parameters, name), half in zip(weights, halves):
            parameters[name] = half.requires_grad_()  # type: ignore[assignment]
        for m in counters:
            m.num_batches_tracked = None
        yield
    finally:
        for (parameters, name), master in zip(weights, masters):
            parameters[name] = master
        for m, counter in counters.items():
            m.num_batches_tracked = counter
    if counters:
        torch._foreach_add_(list(counters.values()), 1)
    used = [(p, half.grad) for p, half in zip(masters, halves) if half.grad is not None]
    if used:
        grads = [torch.empty_like(p) for p, _ in used]
        torch._foreach_copy_(grads, [g for _, g in used])
        for (p, _), grad in zip(used, grads):
            p.grad = grad


def _cast_weights(model: nn.Module) -> list[tuple[dict[str, Tensor], str]]:
    """Where the parameters are that autocast would cast. Shared and computed ones are left to autocast."""
    places = [
        (m._parameters, name)
        for m in model.modules()
        if type(m) in _CAST
        for name, p in m._parameters.items()
        if p is not None and p.requires_grad and p.dtype == torch.float32
    ]
    uses: dict[int, int] = {}
    for m in model.modules():
        for p in m._parameters.values():
            uses[id(p)] = uses.get(id(p), 0) + 1
    return [(d, name) for d, name in places if uses[id(d[name])] == 1]  # type: ignore[misc]
