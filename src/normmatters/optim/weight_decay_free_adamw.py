r"""AdamW without the weight decay: its exact directions for scale-invariant weights.

AdamW moves u by u_{t+1} = (1 − η_tλ)u_t − η_t Δ_t, where Δ_t = m̂/(√v̂ + eps) depends on the past gradients ∇L(u) alone.
With w_t = α_t u_t and α_{t+1} = α_t/(1 − η_tλ), and because ∇L(u_t) = α_t ∇L(w_t) (F1),

    w_{t+1} = w_t − η_t α_{t+1} Δ_t,        Δ_t from the gradients α_t ∇L(w_t).

So the moments stay in the frame of the decayed run, eps means there what it means in AdamW, and the directions are
exact. (Adam's step is the same for any gradient scale, so the direction of a weight turns by η/‖w‖ a step and the
factor of the learning rate is α_{t+1}; SGD's is α_t α_{t+1}, for it turns by η/‖w‖².) Adam with coupled L2 has no such
form: λu enters √v, so the decay is not a factor on the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from normmatters.optim._common import Group, Members, check_number, host_known, host_value, loss_of
from normmatters.optim._decay_free import WeightDecayFree, rates, rescale_factor


class WeightDecayFreeAdamW(WeightDecayFree):
    r"""Adam that follows exactly the directions of ``torch.optim.AdamW`` with weight decay, with no weight decay.

    For scale-invariant weights: those that a normalization follows. State and cost are AdamW's.

    Args:
        params: parameters, (name, parameter) pairs or groups. A group with ``weight_decay_free=False`` gets ordinary
            AdamW with its ``weight_decay``: biases, affine parameters, embeddings, the last layer.
        lr, betas, eps, weight_decay, amsgrad: those of the ``torch.optim.AdamW`` run to imitate.
        maximize, foreach, capturable: as in ``torch.optim.AdamW``.
        check_invariance: at its first step refuse a weight whose gradient is not orthogonal to it.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
        >>> convs, others = [net[0].weight], [p for p in net.parameters() if p is not net[0].weight]
        >>> optimizer = WeightDecayFreeAdamW(
        ...     [{"params": convs}, {"params": others, "weight_decay_free": False}], lr=1e-3, weight_decay=0.05)
    """

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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "weight_decay_free": weight_decay_free,
            "check_invariance": check_invariance,
        }
        super().__init__(params, defaults)

    def _check_group(self, index: int, group: Group) -> None:
        check_number("lr", group["lr"])
        check_number("eps", group["eps"])
        check_number("weight_decay", group["weight_decay"])
        if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
            raise ValueError(f"betas must be two numbers, got {group['betas']}")
        for i, beta in enumerate(group["betas"]):
            check_number(f"betas[{i}]", beta, below=1.0)
        if not host_known(group["lr"]) or not group["weight_decay_free"]:
            return
        decay = host_value(group["lr"]) * group["weight_decay"]
        if decay >= 1:
            raise ValueError(
                f"group {index}: lr * weight_decay must be below 1, got {decay:g}: the decay alone would take the "
                "weights to zero or beyond, and a negated weight is not the same function"
            )

    def _acting_lr(self, index: int, weight: Tensor) -> float | Tensor:
        """η_t α_{t+1}, of the step to come."""
        group = self.param_groups[index]
        self._check_group(index, group)
        lr, weight_decay = rates(group)
        alpha = self.state.get(weight, {}).get("alpha", 1.0)
        return lr * alpha / (1 - lr * weight_decay)  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step. ``closure``, if given, reevaluates the model and returns the loss, which is returned."""
        loss = loss_of(closure)
        plain, cohorts = self._gather()
        for group, found in plain:
            plain_lr = group["lr"] if group["capturable"] else host_value(group["lr"])
            for part in found.by_kind():
                self._adamw(group, part, plain_lr, group["weight_decay"])
        for group, cohort in cohorts:
            params, grads, (state, *_) = cohort
            lr, weight_decay = rates(group, on_host=not group["capturable"])
            alpha = state["alpha"]
            new_alpha = alpha / (1 - lr * weight_decay)
            scale, step_size = alpha, lr * new_alpha
            if group["capturable"]:
                scale, step_size = alpha.to(params[0].dtype), step_size.float()
            self._adamw(group, cohort._replace(grads=list(torch._foreach_mul(grads, scale))), step_size, 0.0)
            factor = rescale_factor(new_alpha)
            if group["capturable"]:
                torch._foreach_mul_(params, factor.to(params[0].dtype))
            elif factor != 1:
                torch._foreach_mul_(params, factor)
            self._store(group, cohort, (new_alpha * factor,))
        return loss

    def _adamw(self, group: Group, found: Members, lr: float | Tensor, weight_decay: float) -> None:
        """``torch.optim.AdamW``'s own step."""
        params, grads, states = found
        for p, state in zip(params, states):
            if "step" not in state:
                # As in torch.optim: the count lives on the device only where a graph needs it there.
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if group["capturable"] else "cpu")
                for name in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())):
                    state[name] = torch.zeros_like(p)
        adamw(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            capturable=group["capturable"],
            has_complex=any(p.is_complex() for p in params),
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=lr,
            weight_decay=weight_decay,
            eps=group["eps"],
            maximize=group["maximize"],
        )
