r"""AdamW without the weight decay: its exact directions for scale-invariant weights.

AdamW moves its weights u by u_{t+1} = (1 − η_tλ)u_t − η_t Δ_t, where Δ_t = m̂/(√v̂ + eps) depends on the past gradients
∇L(u) alone. With w_t = α_t u_t, α_{t+1} = α_t/(1 − η_tλ) and ∇L(u_t) = α_t ∇L(w_t) (F1),

    w_{t+1} = w_t − η_t α_{t+1} Δ_t,        Δ_t from the gradients α_t ∇L(w_t).

So the moments are those of the decayed run, eps means what it means in AdamW, and the directions are exact. The factor
of the learning rate is α_{t+1}, because Adam's step does not depend on the gradient's length and turns a weight by
η/‖w‖. SGD turns it by η/‖w‖² and has α_t α_{t+1}. Adam with coupled L2 has no such form: λu enters √v, so the decay is
not a factor on the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from normmatters.optim._base import (
    Group,
    Members,
    WeightDecayFree,
    check_number,
    evaluate,
    host_value,
    multiply_,
    rates,
    rescale_factor,
)
from normmatters.optim.decay_groups import model_groups


class WeightDecayFreeAdamW(WeightDecayFree):
    r"""Adam that follows exactly the directions of ``torch.optim.AdamW`` with weight decay, with no weight decay.

    For scale-invariant weights: those followed by a normalization. State and cost are AdamW's.

    Args:
        params: parameters, (name, parameter) pairs or groups. A group with ``weight_decay_free=False`` gets ordinary
            AdamW with its ``weight_decay``: biases, affine parameters, embeddings, the last layer.
        lr, betas, eps, weight_decay, amsgrad: those of the ``torch.optim.AdamW`` run to imitate.
        maximize, foreach, capturable: as in ``torch.optim.AdamW``.
        check_invariance: refuse a weight whose gradient, in its first step, is not orthogonal to it.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
        >>> convs, others = [net[0].weight], [p for p in net.parameters() if p is not net[0].weight]
        >>> optimizer = WeightDecayFreeAdamW(
        ...     [{"params": convs}, {"params": others, "weight_decay_free": False}], lr=1e-3, weight_decay=0.05)
    """

    _numbers = ("lr", "eps", "weight_decay")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        weight_decay_free: bool = True,
        check_invariance: bool = True,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach, "capturable": capturable}
        defaults |= {"weight_decay_free": weight_decay_free, "check_invariance": check_invariance}
        super().__init__(params, defaults)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        example_input: Any,
        lr: float | Tensor = 1e-3,
        *,
        decay_vectors: bool = True,
        **options: Any,
    ) -> Self:
        """The optimizer for a whole model: weight-decay-free for its scale-invariant weights, found by a test.

        The model takes the same path as under ``torch.optim.AdamW(model.parameters(), lr, **options)``. Arguments are
        those of :meth:`WeightDecayFreeSGD.from_model`, and AdamW's.
        """
        groups = model_groups(model, example_input, decay_vectors, {}, {"weight_decay_free": False})
        return cls(groups, lr, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # As in torch.optim: old and converted checkpoints hold the count as a Python number.
        for group in self.param_groups:
            for p in group["params"]:
                if not isinstance(count := self.state.get(p, {}).get("step", p), Tensor):
                    self.state[p]["step"] = _step_count(group, p, float(count))

    def _check_group(self, index: int, group: Group, decay: float) -> None:
        if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
            raise ValueError(f"betas must be two numbers, got {group['betas']}")
        for i, beta in enumerate(group["betas"]):
            check_number(f"betas[{i}]", beta, below=1.0)
        if decay >= 1 and group["weight_decay_free"]:
            raise ValueError(
                f"group {index}: lr * weight_decay must be below 1, got {decay:g}: the decay alone would take the "
                "weights to zero or beyond, and a negated weight is not the same function"
            )

    def _acting_lr(self, index: int, weight: Tensor) -> float | Tensor:
        """η_t α_{t+1}, of the step to come."""
        group = self.param_groups[index]
        self._check_group(index, group, self._checked_decay(group))
        lr, weight_decay = rates(group)
        return lr * self.state.get(weight, {}).get("alpha", 1.0) / (1 - lr * weight_decay)  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step. ``closure``, if given, reevaluates the model and returns the loss, which is returned."""
        loss = evaluate(closure)
        ordinary, cohorts = self._gather()
        for group, members in ordinary:
            own_lr = group["lr"] if group["capturable"] else host_value(group["lr"])
            for part in members.by_kind():
                self._adamw(group, part, own_lr, group["weight_decay"])
        for group, cohort, lr, weight_decay in cohorts:
            alpha = cohort.states[0]["alpha"]
            next_alpha = alpha / (1 - lr * weight_decay)
            scale, step_size = alpha, lr * next_alpha
            if group["capturable"]:
                scale, step_size = alpha.to(cohort.params[0].dtype), step_size.float()
            scaled = cohort._replace(grads=list(torch._foreach_mul(cohort.grads, scale)))
            self._adamw(group, scaled, step_size, 0.0)  # w ← w − η α_{t+1} Δ, Δ from the gradients α_t ∇L(w)
            factor = rescale_factor(next_alpha)
            if group["capturable"] or factor != 1:
                multiply_(cohort.params, factor)
            self._store(group, cohort, (next_alpha * factor,))
        return loss

    def _adamw(self, group: Group, members: Members, lr: float | Tensor, weight_decay: float) -> None:
        """``torch.optim.AdamW``'s own step."""
        params, grads, states = members
        for p, state in zip(params, states):
            if "step" not in state:
                state["step"] = _step_count(group, p, 0.0)
                for name in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())):
                    state[name] = torch.zeros_like(p)
        adamw(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            **{name: group[name] for name in ("foreach", "capturable", "amsgrad", "eps", "maximize")},
            has_complex=any(p.is_complex() for p in params),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=lr,
            weight_decay=weight_decay,
        )


def _step_count(group: Group, p: Tensor, value: float) -> Tensor:
    """The number of steps as ``torch.optim`` has it: on the device only where a graph needs it there."""
    return torch.full((), value, dtype=torch.float32, device=p.device if group["capturable"] else "cpu")
