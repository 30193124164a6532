"""Any optimizer with fixed norms and a fixed angle per step; see `angular_sgd` for the idea.

The wrapped optimizer makes its step w → w + Δ without weight decay. Then every neuron is set to

    w ← ρ(cos θ·ŵ + sin θ·Δ̂⊥),        Δ⊥ = Δ − ⟨Δ, ŵ⟩ŵ,        ρ its first norm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from normmatters.optim._base import (
    Group,
    Members,
    OptimizerWrapper,
    check_number,
    evaluate,
    host_value,
    normalize_numbers,
    on_host,
)
from normmatters.optim.angular_sgd import AngularSGD, check_angle, check_turnable, first_norms, loaded_norms
from normmatters.optim.channels import ChannelRotator
from normmatters.optim.decay_groups import model_groups
from normmatters.optim.equilibrium import filter_sums


class Angular(OptimizerWrapper):
    r"""Any optimizer, made one that keeps every norm and turns every neuron by exactly one angle per step.

    The wrapped optimizer proposes an update; each neuron turns towards the part of it that is orthogonal to the neuron.
    Weight decay only sets the angle and is not applied to angular groups. ``param_groups``, ``state`` and
    ``state_dict`` are those of the wrapped optimizer, plus one norm per neuron.

    Args:
        optimizer: the optimizer to wrap; call ``step`` and ``zero_grad`` on the wrapper from here on. Its groups may
            have ``angular=False`` (left as they are), ``dim`` and ``angle`` of their own.
        angle: the angle in radians at the present lr; schedulers that change lr by a factor change it by the same
            factor. None takes the equilibrium angle of the group's lr and weight decay: SGD √(2ηλ/(1+μ)), AdamW
            √(2ηλ(1−β₁)/(1+β₁)).
        dim: dimension of the neurons; None takes each tensor as one.

    Example:
        >>> conv = nn.Conv2d(3, 8, 3, bias=False)  # a normalization follows it
        >>> optimizer = Angular(torch.optim.AdamW(conv.parameters(), lr=1e-3, weight_decay=0.05))
    """

    def __init__(self, optimizer: Optimizer, angle: float | None = None, dim: int | None = 0) -> None:
        super().__init__(optimizer)
        if isinstance(optimizer, AngularSGD | Angular):
            raise TypeError(f"{type(optimizer).__name__} sets its angle already")
        self._rotators: dict[Any, ChannelRotator] = {}
        self._norms: dict[Tensor, Tensor] = {}
        self._own_defaults = {"angle": angle, "dim": dim, "angular": True}
        self._prepare_groups()

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        example_input: Any,
        kind: Callable[..., Optimizer] = AdamW,
        *,
        angle: float | None = None,
        decay_vectors: bool = True,
        **options: Any,
    ) -> Self:
        """The optimizer for a whole model: angular for its scale-invariant weights, found by a test.

        Args:
            model, example_input: as for :func:`scale_invariant_parameters`, which finds ``dim`` too.
            kind: class of the optimizer to wrap, which also serves the other parameters.
            angle: as above.
            decay_vectors: whether biases and affine parameters decay, as they do in ``kind(model.parameters(), …)``.
            options: of ``kind``: lr, weight_decay, …

        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> optimizer = Angular.from_model(model, torch.randn(8, 3), lr=1e-3, weight_decay=0.05)
        """
        groups = model_groups(model, example_input, decay_vectors, {}, {"angular": False}, by_dim=True)
        return cls(kind(groups, **options), angle)

    def _prepared(self, index: int, group: Group) -> Group:
        for name, value in self._own_defaults.items():
            group.setdefault(name, value)
        normalize_numbers(group)
        if not group["angular"]:
            return group
        lr = group["lr"]
        if group["angle"] is not None:
            check_number("angle", group["angle"], below=math.pi / 2)
            if on_host(lr) and host_value(lr) == 0:
                raise ValueError(f"group {index}: the angle is the one at the present lr, which must not be 0")
            group.setdefault("angle_lr", host_value(lr))
        elif not group.get("weight_decay"):
            raise ValueError(
                f"group {index}: the equilibrium angle needs weight_decay > 0, got {group.get('weight_decay')}. Give "
                "the weight decay of your usual recipe to the wrapped optimizer, or an angle"
            )
        elif _turning_rate(self.optimizer, group) is None:
            raise ValueError(
                f"the equilibrium angle is known for SGD and AdamW, not for {type(self.optimizer).__name__}: give angle"
            )
        check_turnable(index, group)
        check_angle(self._angle(group))
        return group

    def _angle(self, group: Group) -> float | Tensor:
        check_number("lr", group["lr"])
        lr = group["lr"] if group.get("capturable") else host_value(group["lr"])
        if group["angle"] is not None:
            return group["angle"] / group["angle_lr"] * lr  # type: ignore[no-any-return]
        check_number("weight_decay", group["weight_decay"])
        rate = _turning_rate(self.optimizer, group) or 0.0
        return (2 * group["weight_decay"] * rate * lr) ** 0.5  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step. ``closure``, if given, reevaluates the model once and returns the loss, which is returned."""
        for i, group in enumerate(self.param_groups):
            if "angular" not in group:
                raise ValueError(
                    f"group {i} has lost its angular, dim and angle: it was loaded into, or added to, the wrapped "
                    "optimizer. Do so before it is wrapped, or by the wrapper"
                )
        loss = evaluate(closure)
        angular = [(i, group) for i, group in enumerate(self.param_groups) if group["angular"]]
        parts: list[tuple[int, Group, Members]] = []
        new: dict[Tensor, Tensor] = {}
        for i, group in angular:
            normalize_numbers(group)
            parts += [(i, group, part) for part in Members.of(i, group, defaultdict(dict)).by_kind()]
            check_angle(self._angle(group))
            new |= first_norms(i, group, self._norms)
        self._norms |= new
        before = [list(torch._foreach_mul(part.params, 1)) for _, _, part in parts]
        # PyTorch's Nesterov adds into the gradients, which are looked at after the step: a neuron may have none.
        grads = [[g.clone() for g in part.grads] if group.get("nesterov") else part.grads for _, group, part in parts]
        with self._with_decays((group, 0.0) for _, group in angular if "weight_decay" in group):
            self.optimizer.step()
        for (i, group, (params, _, _)), old, gs in zip(parts, before, grads):
            # The parameters become the update Δ, the copies turn towards it and are copied back: no third buffer.
            torch._foreach_sub_(params, old)
            rotate = self._rotators.setdefault((i, type(params[0])), ChannelRotator())
            rotate(old, params, gs, [self._norms[p] for p in params], -self._angle(group), group["dim"])
            if hasattr(params[0], "full_tensor"):  # shards (DTensors) have no multi-tensor copy
                for p, turned in zip(params, old):
                    p.copy_(turned)
            else:
                torch._foreach_copy_(params, old)
        return loss

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _own_state(self) -> dict[str, Any]:
        return {"norms": {i: self._norms[p] for i, p in enumerate(self._parameters()) if p in self._norms}}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        params = self._parameters()
        self._norms = {params[i]: loaded_norms(params[i], norm) for i, norm in state["norms"].items()}


def _turning_rate(optimizer: Optimizer, group: Group) -> float | None:
    """θ²/(2ηλ) in equilibrium; None for an optimizer whose equilibrium is not known (see `equilibrium`)."""
    if isinstance(optimizer, AdamW):
        beta1 = host_value(group["betas"][0])
        return (1 - beta1) / (1 + beta1)
    if isinstance(optimizer, SGD) and group["dampening"] == 0:
        s, q = filter_sums(group["momentum"], group["nesterov"])
        return q / s
    return None
