r"""The norm that learning rate and weight decay bring a scale-invariant weight to, and how far it turns per step there.

Gradients are orthogonal to w, so each step makes the norm grow. Weight decay makes it shrink, and they come to a
balance. Let the update be η Σ_i c_i g_{t−i}, S = Σ c_i, Q = Σ c_i², gradients uncorrelated, and g̃ the gradient at norm
one:

    SGD      decay passes the same filter:   2ηSλ‖w‖² = η²S²‖g‖², ‖g‖ = ‖g̃‖/‖w‖   ⇒  ‖w‖⁴ = ηS‖g̃‖²/(2λ),  θ² = 2ηλQ/S
    AdamW    decay does not:                 2ηλ‖w‖² = η²S²d, |Δ_i| ≈ 1            ⇒  ‖w‖² = ηd/(2λ),         θ² = 2ηλQ

Heavy ball has S = 1/(1−μ), Q = 1/(1−μ²): ‖w‖⁴ = η‖g̃‖²/(2λ(1−μ)) and θ = √(2ηλ/(1+μ)). Nesterov has the same S and
Q = (1+μ)² + μ⁴/(1−μ²). Adam's first moment has S = 1, Q = (1−β₁)/(1+β₁), and d is the number of weights.

On the way there, q = ‖w‖⁴ obeys q' = −4ηSλ(q − q_∞), so its time constant is 1/(4ηSλ) steps; a norm far above its
equilibrium first falls as e^{−ηSλt}. For AdamW, ‖w‖² has 1/(2ηλ). An old direction is forgotten as e^{−ηSλt}.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normmatters.optim._base import check_numbers
from normmatters.optim.channels import channel_norms, check_pairs


def filter_sums(momentum: float, nesterov: bool = False) -> tuple[float, float]:
    """(S, Q): the sum, and the sum of squares, of one gradient's coefficients in all later steps of SGD."""
    check_numbers(momentum=momentum)
    q = 1 / (1 - momentum**2)
    return 1 / (1 - momentum), (1 + momentum) ** 2 + momentum**4 * q if nesterov else q


def equilibrium_angle(lr: float, weight_decay: float, momentum: float = 0.0, *, nesterov: bool = False) -> float:
    """Angle per step (radians, root mean square) of SGD in equilibrium: √(2ηλ/(1+μ)).

    >>> round(equilibrium_angle(0.1, 5e-4, 0.9), 6)
    0.007255
    """
    check_numbers(lr=lr, weight_decay=weight_decay)
    s, q = filter_sums(momentum, nesterov)
    return math.sqrt(2 * lr * weight_decay * q / s)


def equilibrium_norm(
    unit_gradient: Tensor, lr: float, weight_decay: float, momentum: float = 0.0, *, nesterov: bool = False
) -> Tensor:
    """Norm that SGD with weight decay brings weights to: (η‖g̃‖²/(2λ(1−μ)))^¼.

    Args:
        unit_gradient: ‖g̃‖ = ‖w‖·‖∇L(w)‖, root mean square over batches, any shape.

    >>> equilibrium_norm(torch.tensor([2.0, 8.0]), lr=0.1, weight_decay=5e-4, momentum=0.9)
    tensor([ 7.9527, 15.9054])
    """
    if not isinstance(unit_gradient, Tensor):
        raise TypeError(f"unit_gradient must be a tensor, got {type(unit_gradient).__name__}")
    check_numbers(lr=lr, weight_decay=weight_decay)
    _check_decay(weight_decay)
    s, _ = filter_sums(momentum, nesterov)
    return unit_gradient.sqrt() * math.sqrt(math.sqrt(lr * s / (2 * weight_decay)))


def adamw_equilibrium_angle(lr: float, weight_decay: float, beta1: float = 0.9) -> float:
    """Angle per step (radians, root mean square) of AdamW in equilibrium: √(2ηλ(1−β₁)/(1+β₁)).

    >>> round(adamw_equilibrium_angle(1e-3, 0.1, 0.9), 6)
    0.003244
    """
    check_numbers(lr=lr, weight_decay=weight_decay, beta1=beta1)
    return math.sqrt(2 * lr * weight_decay * (1 - beta1) / (1 + beta1))


def adamw_equilibrium_norm(numel: int, lr: float, weight_decay: float) -> float:
    """Norm that AdamW brings ``numel`` weights to, whatever their gradients: √(ηd/(2λ)).

    >>> round(adamw_equilibrium_norm(576, lr=1e-3, weight_decay=0.1), 4)
    1.6971
    """
    check_numbers(numel=numel, lr=lr, weight_decay=weight_decay)
    _check_decay(weight_decay)
    return math.sqrt(lr * numel / (2 * weight_decay))


def _check_decay(weight_decay: float) -> None:
    if weight_decay == 0:
        raise ValueError("without weight decay there is no equilibrium: the norm grows for ever")


def steps_to_equilibrium(lr: float, weight_decay: float, momentum: float = 0.0) -> float:
    """Time constant 1/(4ηSλ) = (1−μ)/(4ηλ), in steps, with which ‖w‖⁴ reaches its equilibrium.

    >>> round(steps_to_equilibrium(0.1, 5e-4, 0.9))
    500
    """
    check_numbers(lr=lr, weight_decay=weight_decay)
    rate = 4 * lr * weight_decay * filter_sums(momentum)[0]
    return 1 / rate if rate > 0 else math.inf


def norm_trajectory(
    lrs: Iterable[float], weight_decay: float, momentum: float, unit_gradient: float, norm: float
) -> tuple[list[float], list[float]]:
    """Norms and angles of an SGD run with these learning rates, one per step, from ``norm``, at a constant ‖g̃‖.

    When the learning rate falls, the angle falls with it, and then climbs back towards √lr as the norm shrinks.

    Returns:
        (norm before each step, angle of each step): two lists as long as ``lrs``.

    >>> norms, angles = norm_trajectory([0.1] * 9000, 5e-4, 0.9, unit_gradient=2.0, norm=1.0)
    >>> round(angles[-1] / equilibrium_angle(0.1, 5e-4, 0.9), 6)
    1.0
    """
    check_numbers(weight_decay=weight_decay, unit_gradient=unit_gradient, norm=norm)
    if norm == 0:
        raise ValueError("norm must be positive: a weight of norm zero has no direction to turn")
    s, q = filter_sums(momentum)
    norms, angles, fourth = [], [], norm**4
    for lr in lrs:
        check_numbers(lr=lr)
        lr = float(lr)  # a NumPy float32 would make everything after it float32
        norms.append(fourth**0.25)
        angles.append(lr * math.sqrt(q / fourth) * unit_gradient)
        rate = 4 * lr * s * weight_decay
        # q' = −4ηSλq + 2η²S²g̃², solved over one step; the last factor is (1 − e^{−rate})/rate, which is 1 at rate 0.
        grown = 2 * (lr * s * unit_gradient) ** 2
        fourth = fourth * math.exp(-rate) + grown * (-math.expm1(-rate) / rate if rate > 0 else 1.0)
    return norms, angles


@dataclass(frozen=True)
class Equilibrium:
    """What SGD with weight decay will make of one weight.

    Attributes:
        norm: norm of every channel now, `[channels]`.
        unit_gradient: ‖g̃‖ of every channel, root mean square over the batches, `[channels]`.
        equilibrium_norm: the norm it goes to, `[channels]`; 0 for a channel without gradient.
        angle: angle per step there, radians.
        steps: time constant of the way there, in steps.

    >>> weight = torch.eye(2).requires_grad_()
    >>> weight.grad = torch.tensor([[0.0, 3.0], [1.0, 0.0]])
    >>> found = predict_equilibrium({"conv": weight}, lr=0.1, weight_decay=0.5)["conv"]
    >>> found.norm, found.unit_gradient, round(found.angle, 4), found.steps
    (tensor([1., 1.]), tensor([3., 1.]), 0.3162, 5.0)
    """

    norm: Tensor
    unit_gradient: Tensor
    equilibrium_norm: Tensor
    angle: float
    steps: float


def predict_equilibrium(
    parameters: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
    lr: float,
    weight_decay: float,
    momentum: float = 0.0,
    *,
    gradients: Sequence[Mapping[str, Tensor]] | None = None,
    dim: int | None = 0,
    nesterov: bool = False,
) -> dict[str, Equilibrium]:
    """Predict equilibrium norms and angles of scale-invariant weights from the gradients of one or more batches.

    Args:
        parameters: names and weights (``model.named_parameters()`` or a dict) that are followed by a normalization.
        lr, weight_decay, momentum, nesterov: the recipe.
        gradients: one dict from name to gradient per batch, all at the present weights; None takes ``.grad``.
        dim: channel dimension; None treats each weight as one channel.

    Returns:
        Name → `Equilibrium`. It holds for gradients as large as the given ones: give batches from the phase of training
        that you ask about.

    >>> weight = torch.eye(2).requires_grad_()
    >>> weight.grad = torch.tensor([[0.0, 3.0], [1.0, 0.0]])
    >>> predict_equilibrium({"conv": weight}, lr=0.1, weight_decay=0.5)["conv"].equilibrium_norm
    tensor([0.9740, 0.5623])
    """
    given: Any = [parameters] if isinstance(parameters, nn.Module) else parameters
    pairs = [*(given.items() if isinstance(given, Mapping) else given)]
    check_pairs(pairs)
    named = dict(pairs)
    batches = [{n: p.grad for n, p in named.items() if p.grad is not None}] if gradients is None else list(gradients)
    if not batches:
        raise ValueError("gradients must hold at least one batch, got none")
    if not all(isinstance(batch, Mapping) for batch in batches):
        raise TypeError(f"gradients must be a list of dicts, one for each batch, got {type(gradients).__name__}")
    result: dict[str, Equilibrium] = {}
    for name, weight in named.items():
        squares = []
        for batch in batches:
            if name not in batch:
                raise ValueError(f"no gradient for '{name}': call backward() first, or leave it out of parameters")
            if batch[name].shape != weight.shape:
                shapes = f"{tuple(weight.shape)}, got {tuple(batch[name].shape)}"
                raise ValueError(f"the gradient of '{name}' must have its shape {shapes}")
            squares.append(channel_norms(batch[name].detach(), dim).square())
        norm = channel_norms(weight.detach(), dim)
        unit_gradient = norm * torch.stack(squares).mean(0).sqrt()
        result[name] = Equilibrium(
            norm,
            unit_gradient,
            equilibrium_norm(unit_gradient, lr, weight_decay, momentum, nesterov=nesterov),
            equilibrium_angle(lr, weight_decay, momentum, nesterov=nesterov),
            steps_to_equilibrium(lr, weight_decay, momentum),
        )
    return result
