r"""SGD with weight decay, without the weight decay: its exact directions from a learning-rate factor alone.

Of a weight followed by a normalization only the direction matters, and ∇L(αu) = ∇L(u)/α (F1). Let u_t be the weights of
PyTorch's SGD with weight decay λ, momentum μ and learning rates η_t: b_t = μb_{t−1} + ∇L(u_t) + λu_t, and
u_{t+1} = u_t − η_t b_t. Split the old buffer into a part along the weights and the rest, b_{t−1} = κ_t u_t + d_t. Then,
with k = μκ_t + λ and s = 1 − η_t k,

    u_{t+1} = s·u_t − η_t (μd_t + ∇L(u_t)),      κ_{t+1} = k/s,      d_{t+1} = (μd_t + ∇L(u_t))/s,

so weight decay differs from plain SGD by the factor s alone. Move it into a number, w_t = α_t u_t with α_{t+1} = α_t/s,
and into the buffer, V_t = d_t/α_t. What remains is plain momentum SGD with a scaled learning rate:

    V_{t+1} = μV_t + ∇L(w_t),        w_{t+1} = w_t − η_t α_t α_{t+1} V_{t+1}.

Nothing divides by a learning rate, so warm-up may start at η = 0, and μ may change from step to step. At μ = 0 PyTorch
leaves its buffer as it is; split along the new weights, that is κ_{t+1} = κ_t/s and V_{t+1} = sV_t + η_t κ_t ∇L(w_t).

For Nesterov's form s = 1 − η(λ + μk), V_{t+1} = (1−ηλ)μV_t + (1+ημκ_t)∇L(w_t), and the weights move by
−η α_t α_{t+1} ((1+μ)∇L(w_t) + μ²V_t). With constant η, λ, μ the recursion of κ has a fixed point, and s stays positive,
if and only if ηλ ≤ (1−√μ)² (Nesterov: ((1−μ)/(1+μ))²). Beyond it α changes its sign, and αu is no rescaling of u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from normmatters.optim._base import (
    Group,
    Scalar,
    WeightDecayFree,
    evaluate,
    linear_step_,
    multiply_,
    rates,
    rescale_factor,
    sgd_,
)
from normmatters.optim.decay_groups import model_groups


def largest_decay(momentum: float, nesterov: bool = False) -> float:
    """The largest lr · weight_decay that has a weight-decay-free form: (1−√μ)², Nesterov ((1−μ)/(1+μ))².

    Example: ``largest_decay(0.9)`` is 0.00263…, so lr 0.1 allows weight decays up to 0.0263.
    """
    return ((1 - momentum) / (1 + momentum)) ** 2 if nesterov else (1 - math.sqrt(momentum)) ** 2


def next_alpha_kappa(
    alpha: Scalar, kappa: Scalar, lr: float | Tensor, weight_decay: float, momentum: float, nesterov: bool = False
) -> tuple[Scalar, Scalar]:
    """One step of the recursion: (α_t, κ_t) → (α_{t+1}, κ_{t+1}); start at (1, 0). Numbers or 0-dim tensors."""
    k = momentum * kappa + weight_decay if momentum != 0 else weight_decay
    s = 1 - lr * (weight_decay + momentum * k if nesterov else k)
    return alpha / s, (k if momentum != 0 else kappa) / s  # type: ignore[return-value]


class WeightDecayFreeSGD(WeightDecayFree):
    r"""SGD that follows exactly the directions of ``torch.optim.SGD`` with weight decay, with no weight decay.

    For scale-invariant weights: those followed by a normalization. It needs no reference run: the recursion at the top
    of this file turns ``weight_decay`` into a factor of the learning rate. State and cost are those of plain momentum
    SGD (one buffer per parameter, and a few numbers on the host).

    Args:
        params: parameters, (name, parameter) pairs or groups, as in ``torch.optim``. A group with
            ``weight_decay_free=False`` gets ordinary SGD with its ``weight_decay``: biases, affine parameters, the
            last layer.
        lr: learning rate η of the run to imitate; schedulers change it as usual.
        momentum: momentum μ of the run to imitate.
        weight_decay: λ of the run to imitate (``torch.optim.SGD``'s, added to the gradient).
        nesterov: imitate Nesterov's form.
        maximize: maximize the objective.
        foreach: multi-tensor implementation; None takes the fused one on GPUs where it applies, else this one.
        fused: one fused kernel per step (not with ``nesterov`` or ``capturable``). None takes it for parameters on CUDA
            where it applies and ``foreach`` is None; False keeps to ``foreach``.
        capturable: keep α on the device, without host reads, so that the step can be captured into a CUDA graph.
        check_invariance: refuse a weight whose gradient, in its first step, is not orthogonal to it.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
        >>> convs, others = [net[0].weight], [p for p in net.parameters() if p is not net[0].weight]
        >>> optimizer = WeightDecayFreeSGD(
        ...     [{"params": convs}, {"params": others, "weight_decay_free": False}],
        ...     lr=0.1, momentum=0.9, weight_decay=5e-4)
    """

    # pending: what the momentum buffer must still be multiplied by.
    _scalars = {"alpha": 1.0, "kappa": 0.0, "pending": 1.0}
    _numbers = ("lr", "momentum", "weight_decay")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        weight_decay_free: bool = True,
        check_invariance: bool = True,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "dampening": dampening}
        defaults |= {"weight_decay": weight_decay, "nesterov": nesterov, "maximize": maximize}
        defaults |= {"foreach": foreach, "fused": fused, "capturable": capturable}
        defaults |= {"weight_decay_free": weight_decay_free, "check_invariance": check_invariance}
        super().__init__(params, defaults)

    @classmethod
    def from_model(
        cls, model: nn.Module, example_input: Any, lr: float | Tensor, *, decay_vectors: bool = True, **options: Any
    ) -> Self:
        """The optimizer for a whole model: weight-decay-free for its scale-invariant weights, found by a test.

        The model takes the same path as under ``torch.optim.SGD(model.parameters(), lr, **options)``.

        Args:
            model, example_input: as for :func:`scale_invariant_parameters`.
            lr: as above.
            decay_vectors: whether biases and affine parameters decay, as they do under that SGD.
            options: momentum, weight_decay and the others, as above.

        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> batch = torch.randn(8, 3)
        >>> optimizer = WeightDecayFreeSGD.from_model(model, batch, lr=0.1, momentum=0.9, weight_decay=5e-4)
        """
        groups = model_groups(model, example_input, decay_vectors, {}, {"weight_decay_free": False})
        return cls(groups, lr, **options)

    def _check_group(self, index: int, group: Group, decay: float) -> None:
        momentum = group["momentum"]
        if (dampening := group["dampening"]) != 0:
            raise ValueError(f"dampening must be 0 (its first step has no weight-decay-free form), got {dampening}")
        if group["nesterov"] and momentum == 0:
            raise ValueError("nesterov=True needs momentum > 0, got momentum 0")
        if group["fused"] and (group["nesterov"] or group["capturable"]):
            raise ValueError("fused=True does not go with nesterov=True or capturable=True")
        if group["fused"] and group["foreach"]:
            raise ValueError("fused=True and foreach=True are two implementations: choose one, or leave both None")
        if not group["weight_decay_free"]:
            return
        if decay > (bound := largest_decay(momentum, group["nesterov"])):
            formula = "((1-momentum)/(1+momentum))^2" if group["nesterov"] else "(1-sqrt(momentum))^2"
            raise ValueError(
                f"group {index}: lr * weight_decay = {decay:g} is more than {formula} = {bound:g}. There the decay's "
                "own momentum overshoots zero: the scale alpha between the two runs would turn negative, and a negated "
                "weight is not the same function. Lower lr, weight_decay or momentum"
            )
        if decay == 1:
            raise ValueError(f"group {index}: lr * weight_decay must be below 1, got 1: nothing is left of the weights")

    def _acting_lr(self, index: int, weight: Tensor) -> float | Tensor:
        """η_t α_t α_{t+1}, of the step to come."""
        group, state = self.param_groups[index], {**self._scalars} | self.state.get(weight, {})
        self._check_group(index, group, self._checked_decay(group))
        (lr, weight_decay), alpha = rates(group), state["alpha"]
        settings = lr, weight_decay, group["momentum"], group["nesterov"]
        return lr * alpha * next_alpha_kappa(alpha, state["kappa"], *settings)[0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step. ``closure``, if given, reevaluates the model and returns the loss, which is returned."""
        loss = evaluate(closure)
        ordinary, cohorts = self._gather()
        # α of every cohort first: if a schedule is refused, no weight has moved yet.
        coming = [self._next_scalars(group, cohort.states[0], *rates) for group, cohort, *rates in cohorts]
        for (group, cohort, lr, weight_decay), (next_alpha, next_kappa) in zip(cohorts, coming):
            alpha, kappa, pending = (cohort.states[0][name] for name in self._scalars)
            momentum, step_size = group["momentum"], lr * alpha * next_alpha
            if momentum == 0:  # Δw = −η α_t α_{t+1} ∇L; V ← sV + ηκ∇L, of a buffer from when there was momentum
                of_weight, of_buffer = (0.0, 1.0), (alpha / next_alpha, lr * kappa)
            elif group["nesterov"]:  # Δw = −η α_t α_{t+1} ((1+μ)∇L + μ²V); V ← (1−ηλ)μV + (1+ημκ)∇L
                of_weight = (momentum**2, 1 + momentum)
                of_buffer = ((1 - lr * weight_decay) * momentum, 1 + lr * momentum * kappa)
            else:  # V ← μV + ∇L; Δw = −η α_t α_{t+1} V
                of_weight = of_buffer = (momentum, 1.0)
            parts = [cohort] if momentum != 0 else cohort.split(["momentum_buffer" in s for s in cohort.states])
            for part in parts:
                linear_step_(group, part, step_size, of_weight, of_buffer, pending)
            factor = rescale_factor(next_alpha)
            if group["capturable"] or factor != 1:  # a graph cannot branch: always multiply, mostly by 1
                multiply_(cohort.params, factor)
            # The buffers wait for the next step, which multiplies them anyway.
            self._store(group, cohort, (next_alpha * factor, next_kappa, 1 / factor))
        for group, members in ordinary:
            sgd_(group, members)
        return loss

    def _next_scalars(self, group: Group, state: dict[str, Any], lr: Any, weight_decay: Any) -> tuple[Any, Any]:
        """(α_{t+1}, κ_{t+1}) of a cohort: Python floats, or 0-dim float64 tensors when capturable."""
        settings = lr, weight_decay, group["momentum"], group["nesterov"]
        next_alpha, next_kappa = next_alpha_kappa(state["alpha"], state["kappa"], *settings)
        if not group["capturable"] and not next_alpha > 0:
            raise ValueError(
                f"lr {lr:g} and momentum {group['momentum']:g} now turn the scale alpha negative, although lr * "
                "weight_decay is within its bound: the momentum fell, or the lr rose, too fast after the last step"
            )
        return next_alpha, next_kappa
