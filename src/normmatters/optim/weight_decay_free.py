r"""SGD with weight decay, without the weight decay: its exact directions from a learning-rate factor alone.

Behind a normalization only the direction of w matters, and ∇L(αu) = ∇L(u)/α (F1). Let u_t be the weights of SGD with
weight decay λ, momentum μ and learning rates η_t (PyTorch's: b_t = μb_{t−1} + ∇L(u_t) + λu_t, u_{t+1} = u_t − η_t b_t).
Split the old buffer into a part along the weights and the rest, b_{t−1} = κ_t u_t + d_t. Then, with k = μκ_t + λ and
s = 1 − η_t k,

    u_{t+1} = s·u_t − η_t (μd_t + ∇L(u_t)),      κ_{t+1} = k/s,      d_{t+1} = (μd_t + ∇L(u_t))/s,

so all that weight decay does to u besides plain SGD is the factor s. Carry it in a number, w_t = α_t u_t with
α_{t+1} = α_t/s, and in the buffer V_t = d_t/α_t, and what is left is plain momentum SGD with a scaled learning rate:

    V_{t+1} = μV_t + ∇L(w_t),        w_{t+1} = w_t − η_t α_t α_{t+1} V_{t+1}.

Nothing divides by a learning rate, so warm-up may start at η = 0, and μ may change from step to step. At μ = 0 PyTorch
leaves its buffer as it is; split along the new weights that is κ_{t+1} = κ_t/s and V_{t+1} = sV_t + η_t κ_t ∇L(w_t).

For Nesterov's form s = 1 − η(λ + μk), V_{t+1} = (1−ηλ)μV_t + (1+ημκ_t)∇L(w_t), and the weights move by
−η α_t α_{t+1} ((1+μ)∇L(w_t) + μ²V_t). With constant η, λ, μ the recursion of κ has a fixed point, and s stays positive,
if and only if ηλ ≤ (1−√μ)² (Nesterov: ((1−μ)/(1+μ))²); beyond it α changes its sign and αu is no rescaling of u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from normmatters.optim._common import Group, Members, check_number, host_known, host_value, loss_of, sgd_
from normmatters.optim._decay_free import Scalar, WeightDecayFree, rates, rescale_factor


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

    For scale-invariant weights: those that a normalization follows. It needs no reference run: the recursion at the top
    of this file turns ``weight_decay`` into a factor of the learning rate. State and cost are those of plain momentum
    SGD (one buffer a parameter, and a few numbers on the host).

    Args:
        params: parameters, (name, parameter) pairs or groups, as in ``torch.optim``. A group with
            ``weight_decay_free=False`` gets ordinary SGD with its ``weight_decay``: biases, affine parameters, the
            last layer.
        lr: learning rate η of the run to imitate; schedulers change it as usual.
        momentum: momentum μ of the run to imitate.
        weight_decay: λ of the run to imitate (``torch.optim.SGD``'s, added to the gradient).
        nesterov: imitate Nesterov's form.
        maximize: maximize the objective.
        foreach: multi-tensor implementation; None chooses the fused one or it on GPUs.
        fused: one fused kernel a step (not with ``nesterov`` or ``capturable``). None takes it for parameters on CUDA
            where it applies and ``foreach`` is None; False keeps to ``foreach``.
        capturable: keep α on the device, without host reads, so that the step can be captured into a CUDA graph.
        check_invariance: at its first step refuse a weight whose gradient is not orthogonal to it.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
        >>> convs, others = [net[0].weight], [p for p in net.parameters() if p is not net[0].weight]
        >>> optimizer = WeightDecayFreeSGD(
        ...     [{"params": convs}, {"params": others, "weight_decay_free": False}],
        ...     lr=0.1, momentum=0.9, weight_decay=5e-4)
    """

    _scalars = (("alpha", 1.0), ("kappa", 0.0), ("pending", 1.0))

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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "weight_decay_free": weight_decay_free,
            "check_invariance": check_invariance,
        }
        super().__init__(params, defaults)

    def _check_group(self, index: int, group: Group) -> None:
        lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
        check_number("lr", lr)
        check_number("momentum", momentum, below=1.0)
        check_number("weight_decay", weight_decay)
        if group["dampening"] != 0:
            raise ValueError(
                f"dampening must be 0 (its first step has no weight-decay-free form), got {group['dampening']}"
            )
        if group["nesterov"] and momentum == 0:
            raise ValueError("nesterov=True needs momentum > 0, got momentum 0")
        if group["fused"] and (group["nesterov"] or group["capturable"]):
            raise ValueError("fused=True does not go with nesterov=True or capturable=True")
        if group["fused"] and group["foreach"]:
            raise ValueError("fused=True and foreach=True are two implementations: choose one, or leave both None")
        if not group["weight_decay_free"]:
            return
        bound = largest_decay(momentum, group["nesterov"])
        decay = host_value(lr) * weight_decay if host_known(lr) else 0.0
        if decay > bound:
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
        group, state = self.param_groups[index], self.state.get(weight, {})
        self._check_group(index, group)
        lr, weight_decay = rates(group)
        settings = lr, weight_decay, group["momentum"], group["nesterov"]
        alpha = state.get("alpha", 1.0)
        return lr * alpha * next_alpha_kappa(alpha, state.get("kappa", 0.0), *settings)[0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step. ``closure``, if given, reevaluates the model and returns the loss, which is returned."""
        loss = loss_of(closure)
        plain, cohorts = self._gather()
        # α of every group first: if a schedule is refused, no weight has moved yet.
        plans = [(group, cohort, self._next(group, cohort)) for group, cohort in cohorts]
        for group, found in plain:
            lr = group["lr"] if group["capturable"] else host_value(group["lr"])
            sgd_(group, found, lr, group["weight_decay"])
        for group, cohort, (lr, weight_decay, new_alpha, new_kappa) in plans:
            self._move(group, cohort, lr, weight_decay, new_alpha)
            factor = rescale_factor(new_alpha)
            pending: float | Tensor = 1.0
            if group["capturable"]:
                # A graph cannot ask whether to rescale: multiply always, mostly by 1; the buffers with the next step.
                _scale_(cohort.params, factor)
                pending = 1 / factor
            elif factor != 1:
                _scale_(cohort.params, factor)
                if kept := [state["momentum_buffer"] for state in cohort.states if "momentum_buffer" in state]:
                    _scale_(kept, 1 / factor)
            self._store(group, cohort, (new_alpha * factor, new_kappa, pending))
        return loss

    def _next(self, group: Group, cohort: Members) -> tuple[Any, Any, Any, Any]:
        """(η_t, λ, α_{t+1}, κ_{t+1}) of a cohort: Python floats, or 0-dim float64 tensors when capturable."""
        lr, weight_decay = rates(group, on_host=not group["capturable"])
        alpha, kappa = cohort.states[0]["alpha"], cohort.states[0]["kappa"]
        new = next_alpha_kappa(alpha, kappa, lr, weight_decay, group["momentum"], group["nesterov"])
        if not group["capturable"] and not new[0] > 0:
            raise ValueError(
                f"lr {lr:g} and momentum {group['momentum']:g} now turn the scale alpha negative, although lr * "
                "weight_decay is within its bound: the momentum fell, or the lr rose, too fast after the last step"
            )
        return lr, weight_decay, *new

    def _move(self, group: Group, cohort: Members, lr: Any, weight_decay: Any, new_alpha: Any) -> None:
        """V ← μV + ∇L and w ← w − η α_t α_{t+1} V, or Nesterov's form of it."""
        params, grads, (state, *_) = cohort
        step_size = lr * state["alpha"] * new_alpha
        momentum, pending, sign = group["momentum"], state["pending"], -1.0 if group["maximize"] else 1.0
        if momentum == 0 and (kept := [i for i, one in enumerate(cohort.states) if "momentum_buffer" in one]):
            buffers = [cohort.states[i]["momentum_buffer"] for i in kept]
            _scale_(buffers, pending * state["alpha"] / new_alpha)
            _add_(buffers, [grads[i] for i in kept], sign * lr * state["kappa"])
        if not group["nesterov"] and not group["capturable"] and cohort.takes_fused(group):
            if momentum != 0 and pending != 1:  # left by a run on the device, where it waits for the next step
                _scale_(cohort.momentum_buffers(), pending)
            sgd_(group | {"fused": True}, cohort, step_size, 0.0)
            return
        if momentum == 0:
            _add_(params, grads, -sign * step_size)
            return
        buffers = cohort.momentum_buffers()
        if group["nesterov"]:
            _add_(params, grads, -sign * (1 + momentum) * step_size)
            _add_(params, buffers, -(momentum**2) * pending * step_size)
            _scale_(buffers, momentum * pending * (1 - lr * weight_decay))
            _add_(buffers, grads, sign * (1 + lr * momentum * state["kappa"]))
        else:
            _scale_(buffers, momentum * pending)
            _add_(buffers, grads, sign)
            _add_(params, buffers, -step_size)


def _scale_(xs: list[Tensor], scale: float | Tensor) -> None:
    torch._foreach_mul_(xs, scale.to(xs[0].dtype) if isinstance(scale, Tensor) else scale)


def _add_(xs: list[Tensor], ys: list[Tensor], scale: float | Tensor) -> None:
    """xs += scale · ys; a device scalar cannot be ``alpha`` without a host read, so it is multiplied in first."""
    if isinstance(scale, Tensor):
        torch._foreach_add_(xs, torch._foreach_mul(ys, scale.to(xs[0].dtype)))
    else:
        torch._foreach_add_(xs, ys, alpha=scale)
