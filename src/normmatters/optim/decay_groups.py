"""Which parameters weight decay is for: those whose length is part of the function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from normmatters.optim._base import check_number
from normmatters.optim.invariance import scale_invariant_parameters
from normmatters.probe import named_parameters
from normmatters.weight_norm import BoundedWeight, ClassicWeight

__all__ = ["weight_decay_groups"]


def weight_decay_groups(
    model: nn.Module, weight_decay: float, example_input: Any = None, **options: Any
) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: weights with weight decay, and all that should have none.

    Without weight decay are biases and the affine parameters of norms (anything of fewer than two dimensions, and what
    layer norms hold), the directions v of weight norms, bounded or classic, and, given ``example_input``, every weight
    that a normalization makes scale invariant. On the last two, weight decay changes no function, only the step size.

    Args:
        model: any module; frozen parameters are left out.
        weight_decay: of the first group.
        example_input: a small real batch, a tuple of positional or a dict of keyword arguments; None skips that test.
        options: for :func:`scale_invariant_parameters`.

    Returns:
        Two groups of ``(name, parameter)`` pairs, the first with ``weight_decay``, the second with 0. An empty group is
        left out.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> decayed, free = weight_decay_groups(model, 0.01, torch.randn(8, 3))
        >>> [name for name, _ in decayed["params"]]
        ['2.weight']
        >>> optimizer = torch.optim.AdamW([decayed, free], lr=1e-3)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_number("weight_decay", weight_decay)
    free = {id(p) for p in _without_length(model)}
    if example_input is not None:
        free |= {id(p) for p in scale_invariant_parameters(model, example_input, **options).parameters()}
    elif options:
        raise ValueError(f"{', '.join(options)}: options of the test for scale invariance, which needs example_input")
    trained = [(name, p) for name, p in named_parameters(model) if p.requires_grad]
    groups = [
        {"params": [(name, p) for name, p in trained if id(p) not in free], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in trained if id(p) in free], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _without_length(model: nn.Module) -> Iterator[Tensor]:
    """Biases, affine parameters, and directions: what the model's structure tells without running it."""
    yield from (p for p in model.parameters() if p.ndim < 2)
    for module in model.modules():
        yield from (getattr(module, f"{hook.name}_v") for hook in _torch_hooks(module))
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            yield from module.parameters()
        elif isinstance(module, parametrize.ParametrizationList) and len(module) == 1:
            if isinstance(module[0], BoundedWeight):
                yield module.original
            elif isinstance(module[0], ClassicWeight | _WeightNorm):
                yield module.original1  # type: ignore[misc]


def _torch_hooks(module: nn.Module) -> list[WeightNorm]:
    """torch's older weight norm is a hook that computes the weight before each forward pass."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
