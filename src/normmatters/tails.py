"""How heavy the tails are of what a norm normalizes: σ ÷ C·mean|S|, which is 1 for a Gaussian.

An L1 norm divides by C·mean|S|, an L2 norm by σ. So this ratio is the factor by which L1's output is larger (F5), and
says what changes when one takes the other's place.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normmatters.functional.statistic import statistic
from normmatters.norm import Norm, compute_dtype
from normmatters.probe import call, cuda_devices
from normmatters.surgery.swap import is_channels_first

__all__ = ["measure_tails", "tails"]


def tails(x: Tensor, dims: list[int]) -> Tensor:
    """σ ÷ C·mean|S| over ``dims``, S being x less its mean there; NaN where all of x is the same.

    At least 0.8 (= 1/C: two values, equally often). 1 for a Gaussian, 1.13 for Laplace's distribution, and
    1/(2C·√(p(1−p))) for what is 1 with probability p and 0 otherwise: 1.3 for p = 0.1, 4 for p = 0.01.

    Args:
        x: floating point, any shape.
        dims: what a norm takes its statistics over.

    Returns:
        The other dimensions, flattened.

    Example::

        >>> x = torch.zeros(100, 2)
        >>> x[0, 0] = x[:50, 1] = 1.0
        >>> [round(ratio, 2) for ratio in tails(x, [0]).tolist()]
        [4.01, 0.8]
    """
    x = x.detach().to(compute_dtype(x.dtype))
    centered = x - x.mean(dims, keepdim=True)
    l1 = Norm(1)
    return (statistic(centered, dims, Norm(2)) / (l1.scale_constant(2) * statistic(centered, dims, l1))).flatten()


@torch.no_grad()
def measure_tails(model: nn.Module, example_input: Any) -> dict[str, Tensor]:
    """:func:`tails` of what comes into each batch and layer norm in one training step's forward pass.

    The pass is a copy's: the model, its statistics and torch's random numbers stay as they are.

    Args:
        model: any module; its norms may be ``torch.nn``'s or those of this library.
        example_input: a batch of real data: a tensor, a tuple of positional or a dict of keyword arguments.

    Returns:
        By the norm's name one number per channel (batch norm) or token (layer norm), without those whose input does not
        vary. Norms that were not called, or found nothing that varies, are left out.

    Example::

        >>> model = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2))
        >>> ratios = measure_tails(model, torch.eye(100)[:, :2])["1"]  # each one time in a hundred
        >>> [round(ratio, 2) for ratio in ratios.tolist()]
        [4.01, 4.01]
    """
    copied = copy.deepcopy(model).train()
    by_name: dict[str, list[Tensor]] = {}

    def measure(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = (*args, *kwargs.values())[0]
        by_name.setdefault(name, []).append(tails(x, _dims(module, x)))

    for name, module in copied.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm):
            if not isinstance(module, nn.modules.instancenorm._InstanceNorm):
                module.register_forward_pre_hook(partial(measure, name), with_kwargs=True)
    with torch.random.fork_rng(cuda_devices(copied)):
        call(copied, example_input)
    joined = {name: torch.cat(parts) for name, parts in by_name.items()}
    varying = {name: ratios[ratios.isfinite()] for name, ratios in joined.items()}
    return {name: ratios for name, ratios in varying.items() if len(ratios)}


def _dims(module: nn.Module, x: Tensor) -> list[int]:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return [d for d in range(x.dim()) if d != 1]
    if is_channels_first(module):
        return [1]
    return list(range(x.dim() - len(module.normalized_shape), x.dim()))  # type: ignore[arg-type]
