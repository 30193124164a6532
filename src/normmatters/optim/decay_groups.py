"""Which parameters weight decay is for, and parameter groups made from a model.

Weight decay shortens weights. A weight followed by a norm has no length that matters, but there weight decay sets the
step size: it brings the norm to an equilibrium (see `equilibrium`), and without it the norm grows and the steps shrink
for ever. So these weights keep their decay, and so does the direction v of a weight norm. Biases and the affine
parameters of norms lose it: they are neither many nor scale invariant.
"""

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


def weight_decay_groups(
    model: nn.Module, weight_decay: float, example_input: Any = None, *, decay_invariant: bool = True, **options: Any
) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: weights with weight decay, and parameters without.

    Without weight decay are biases and the affine parameters of norms: anything of fewer than two dimensions, and what
    layer norms hold. All weights have it. On a weight followed by a norm, and on the direction v of a weight norm, it
    changes no function but controls the step size: without it, training is that of the paper's "WD off".

    Args:
        model: any module; frozen parameters are left out.
        weight_decay: of the first group.
        example_input: with ``decay_invariant=False``, a small real batch to find the scale-invariant weights: a tensor,
            a tuple of positional or a dict of keyword arguments. None takes v of weight norms alone.
        decay_invariant: False takes the decay from scale-invariant weights and from v of weight norms too. That is for
            runs whose step size something else controls, such as `StepSizeCorrection` or `NormSchedule`; not for plain
            SGD or AdamW. The weight-decay-free and angular optimizers have a ``from_model`` of their own.
        options: for :func:`scale_invariant_parameters`.

    Returns:
        Two groups of ``(name, parameter)`` pairs, the first with ``weight_decay``, the second with 0. An empty group is
        left out.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> decayed, free = weight_decay_groups(model, 0.01)
        >>> [name for name, _ in decayed["params"]]
        ['0.weight', '2.weight']
        >>> optimizer = torch.optim.AdamW([decayed, free], lr=1e-3)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_number("weight_decay", weight_decay)
    free = {id(p) for p in _vectors(model)}
    if decay_invariant and (example_input is not None or options):
        unused = ", ".join(options) or "example_input"
        raise ValueError(
            f"{unused} needs decay_invariant=False: by default, weights followed by a norm keep their decay"
        )
    if options and example_input is None:
        raise ValueError(f"{', '.join(options)}: options of the test for scale invariance, which needs example_input")
    if not decay_invariant:
        free |= {id(p) for p in _directions(model)}
    if example_input is not None:
        free |= {id(p) for p in scale_invariant_parameters(model, example_input, **options).parameters()}
    trained = [(name, p) for name, p in named_parameters(model) if p.requires_grad]
    groups = [
        {"params": [(name, p) for name, p in trained if id(p) not in free], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in trained if id(p) in free], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def model_groups(
    model: nn.Module, example_input: Any, decay_vectors: bool, invariant: Any, others: Any, by_dim: bool = False
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer's ``from_model``: scale-invariant weights first, then the others.

    Args:
        decay_vectors: False gives biases and affine parameters a group of their own with weight decay 0.
        invariant, others: settings of these groups.
        by_dim: one group per channel dimension of the invariant weights, with its ``dim``.
    """
    result = scale_invariant_parameters(model, example_input)
    if not len(result):
        raise ValueError("model has no scale-invariant weights: none of them is followed by a normalization")
    groups: dict[Any, dict[str, Any]] = {}
    undecayed = set() if decay_vectors else {id(p) for p in _vectors(model)}
    for name, p in result.named_parameters():
        dim = {"dim": result.dims[name]} if by_dim else {}
        groups.setdefault((*dim.values(),), {"params": [], **invariant, **dim})["params"].append((name, p))
    rest = [(n, p) for n, p in named_parameters(model) if n not in result]
    ordinary = {"params": [(n, p) for n, p in rest if id(p) not in undecayed], **others}
    free = {"params": [(n, p) for n, p in rest if id(p) in undecayed], **others, "weight_decay": 0.0}
    return [group for group in (*groups.values(), ordinary, free) if group["params"]]


def _vectors(model: nn.Module) -> Iterator[Tensor]:
    """Biases and affine parameters."""
    yield from (p for p in model.parameters() if p.ndim < 2)
    yield from (p for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm) for p in m.parameters())


def _directions(model: nn.Module) -> Iterator[Tensor]:
    """The directions v of weight norms, bounded or classic, ours or torch's."""
    for module in model.modules():
        # torch's older weight norm is a hook that computes the weight before each forward pass
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
        yield from (getattr(module, f"{hook.name}_v") for hook in hooks)
        if isinstance(module, parametrize.ParametrizationList) and len(module) == 1:
            if isinstance(module[0], BoundedWeight):
                yield module.original
            elif isinstance(module[0], ClassicWeight | _WeightNorm):
                yield module.original1  # type: ignore[misc]
