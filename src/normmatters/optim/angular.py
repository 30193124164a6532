"""Fixed norms, and the angle a step set directly.

Behind a normalization only directions matter, and in equilibrium SGD with weight decay turns each neuron by about
θ = √(2ηλ/(1+μ)) a step, whatever its gradients (see `equilibrium`). Here that is no outcome but the setting: every
neuron turns by exactly θ, away from its momentum, and keeps the norm it started with. No weight decay, no transient.

What a scheduler's change of the learning rate does follows from what the user gave:
- a recipe (lr and weight decay): θ is recomputed from the new lr, so it goes as √lr, as the equilibrium's angle does.
  (SGD itself needs the time constant of the equilibrium to get there: right after a drop its angle goes as lr.)
- an angle: it is the step size, and the scheduler schedules it as such: lr ÷ 10 is angle ÷ 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from normmatters.functional.statistic import compute_dtype
from normmatters.optim._common import (
    Group,
    Members,
    check_dense_gradients,
    check_number,
    check_own_groups,
    host_known,
    host_value,
    loading,
    loss_of,
    members,
    sgd_,
    take_numbers,
)
from normmatters.optim._turning import check_angle, check_turnable, first_norms
from normmatters.optim._wrapper import OptimizerWrapper
from normmatters.optim.equilibrium import filter_sums
from normmatters.optim.multi_tensor import ChannelTurner, Momentum


class AngularSGD(Optimizer):
    r"""SGD with momentum that turns every neuron by exactly one angle a step and keeps every norm.

    Args:
        params: parameters, (name, parameter) pairs or groups. A group with ``angular=False`` gets ordinary SGD with
            ``lr`` and ``weight_decay`` (without an angle the optimizer's, else its own lr and 0): biases, affine
            parameters, the last layer.
        lr, weight_decay: a usual SGD recipe; the angle is its equilibrium's, √(2ηλ/(1+μ)), at every step's lr.
        momentum: momentum μ; the direction is away from the momentum buffer.
        angle: the angle in radians, in place of ``lr`` and ``weight_decay``. It is then the group's ``lr``, so
            schedulers act on the angle itself.
        nesterov: Nesterov's direction ∇L + μb (and its equilibrium angle).
        dim: dimension of the neurons, 0 for convolutions and linear layers, 1 for transposed convolutions, None for
            the whole tensor; may be set for each group.
        maximize: maximize the objective.
        foreach: passed on to SGD for groups with ``angular=False``; the rest is always multi-tensor.
        capturable: read nothing back from the device, so that the step can be captured into a CUDA graph.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
        >>> convs, others = [net[0].weight], [p for p in net.parameters() if p is not net[0].weight]
        >>> optimizer = AngularSGD(
        ...     [{"params": convs}, {"params": others, "angular": False, "lr": 0.1}], angle=0.007)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        momentum: float = 0.9,
        weight_decay: float | None = None,
        angle: float | Tensor | None = None,
        nesterov: bool = False,
        dim: int | None = 0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> None:
        if (angle is None) == (lr is None):
            raise ValueError(f"give either angle, or lr and weight_decay; got angle={angle}, lr={lr}")
        if angle is not None and weight_decay is not None:
            raise ValueError(f"angle takes the place of weight_decay; got angle={angle}, weight_decay={weight_decay}")
        defaults = {
            "lr": lr if angle is None else angle,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "dim": dim,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "angular": True,
            # With it the group's lr is the angle itself.
            "lr_is_angle": angle is not None,
        }
        self._turners: dict[Any, ChannelTurner] = {}  # of each group and kind of tensor; no state, never saved
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_own_groups(self, state)
        super().__setstate__(state)
        self._turners = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        param_group = dict(param_group)
        angle = param_group.pop("angle", None)
        if angle is not None:
            if "lr" in param_group or "weight_decay" in param_group:
                raise ValueError("a group with angle takes no lr and no weight_decay: the angle replaces both")
            param_group.update(lr=angle, weight_decay=None, lr_is_angle=True)
        elif "lr" in param_group:
            param_group["lr_is_angle"] = False
        if not param_group.get("angular", True) and param_group.get("lr_is_angle", self.defaults["lr_is_angle"]):
            raise ValueError("a group with angular=False is ordinary SGD and needs an lr of its own, not an angle")
        super().add_param_group(param_group)
        index, group = len(self.param_groups) - 1, self.param_groups[-1]
        take_numbers(group)
        try:
            self._check_numbers(group)
            if group["nesterov"] and group["momentum"] == 0:
                raise ValueError("nesterov=True needs momentum > 0, got momentum 0")
            if group["angular"]:
                if not group["lr_is_angle"] and not group["weight_decay"]:
                    raise ValueError(
                        f"group {index}: the angle √(2·lr·weight_decay/(1+momentum)) needs weight_decay > 0, got "
                        f"{group['weight_decay']}. Give the weight decay of your usual recipe, or an angle"
                    )
                check_turnable(index, group)
                check_angle(self._angle(group))
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_numbers(self, group: Group) -> None:
        """Raise if they are unusable. Reads no device."""
        check_number("momentum", group["momentum"], below=1.0)
        check_number("angle" if group["lr_is_angle"] else "lr", group["lr"])
        if group["weight_decay"] is not None:
            check_number("weight_decay", group["weight_decay"])

    def _angle(self, group: Group) -> float | Tensor:
        lr = group["lr"] if group["capturable"] else host_value(group["lr"])
        if group["lr_is_angle"]:
            return lr  # type: ignore[no-any-return]
        check_number("weight_decay", group["weight_decay"])
        s, q = filter_sums(group["momentum"], group["nesterov"])
        return (2 * group["weight_decay"] * q / s * lr) ** 0.5  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step. ``closure``, if given, reevaluates the model and returns the loss, which is returned."""
        loss = loss_of(closure)
        # Everything that can be refused is refused first, before a parameter changes.
        found = [members(self, index) for index in range(len(self.param_groups))]
        new: dict[Tensor, Tensor] = {}
        for index, group in enumerate(self.param_groups):
            take_numbers(group)
            self._check_numbers(group)
            if group["angular"]:
                check_angle(self._angle(group))
                if not all("norm" in state for state in found[index].states):
                    new |= first_norms(index, group, {p for p in group["params"] if "norm" in self.state[p]})
        for p, norm in new.items():
            self.state[p]["norm"] = norm
        for index, group in enumerate(self.param_groups):
            if not group["angular"]:
                lr = group["lr"] if group["capturable"] else host_value(group["lr"])
                sgd_(group, found[index], lr, group["weight_decay"] or 0.0)
            elif found[index].params:
                for part in found[index].by_kind():
                    self._turn(index, group, part)
        return loss

    def _turn(self, index: int, group: Group, found: Members) -> None:
        params, grads, states = found
        sign, angle = -1.0 if group["maximize"] else 1.0, self._angle(group)
        norms = [state["norm"] for state in states]
        turn = self._turners.setdefault((index, type(params[0])), ChannelTurner())
        if group["momentum"] == 0:
            turn(params, grads, grads, norms, sign * angle, group["dim"])
            return
        momentum = Momentum(group["momentum"], sign, group["nesterov"])
        turn(params, found.momentum_buffers(), grads, norms, angle, group["dim"], momentum)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim``; norms keep float32 beside parameters of half precision."""
        with loading(self, self._load_norms):
            super().load_state_dict(state_dict)

    def _load_norms(self, state_dict: dict[str, Any]) -> None:
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            for p, key in zip(group["params"], saved["params"]):
                norm = state_dict["state"].get(key, {}).get("norm")
                if isinstance(norm, Tensor):  # distributed checkpoints put {} where a parameter never stepped
                    self.state[p]["norm"] = _norms_of(p, norm)


class Angular(OptimizerWrapper):
    r"""Any optimizer, turned into one that keeps every norm and turns every neuron by exactly one angle a step.

    The wrapped optimizer proposes an update; the part of it orthogonal to each neuron gives the direction to turn to.
    Its weight decay only sets the angle and is not applied to angular groups. ``param_groups``, ``state`` and
    ``state_dict`` are those of the wrapped optimizer, plus one norm a neuron.

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
        self._turners: dict[int, ChannelTurner] = {}
        self._norms: dict[Tensor, Tensor] = {}
        self._own_defaults = {"angle": angle, "dim": dim, "angular": True}
        # All groups are checked before the first is changed.
        groups = [self._with_defaults(i, dict(group)) for i, group in enumerate(optimizer.param_groups)]
        for shared, group in zip(optimizer.param_groups, groups):
            shared.update(group)

    def _with_defaults(self, index: int, group: Group) -> Group:
        """The group with what Angular needs in it; raises if it cannot be turned."""
        for name, value in self._own_defaults.items():
            group.setdefault(name, value)
        take_numbers(group)
        if not group["angular"]:
            return group
        lr = group["lr"]
        if group["angle"] is not None:
            check_number("angle", group["angle"], below=math.pi / 2)
            if host_known(lr) and host_value(lr) == 0:
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)
        try:
            self._with_defaults(len(self.param_groups) - 1, self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

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
        loss = loss_of(closure)
        angular = [(i, group) for i, group in enumerate(self.param_groups) if group["angular"]]
        params: dict[int, list[Tensor]] = {}
        new: dict[Tensor, Tensor] = {}
        for i, group in angular:
            take_numbers(group)
            check_dense_gradients(i, group)
            check_angle(self._angle(group))
            new |= first_norms(i, group, self._norms)
            params[i] = [p for p in group["params"] if p.grad is not None]
        self._norms |= new
        # Multi-tensor operations do not take shards (DTensors) beside whole tensors, nor copy them.
        sharded = {i: any(hasattr(p, "full_tensor") for p in params[i]) for i, _ in angular}
        # By 1: a copy of all in few launches.
        before = {
            i: [p.clone() for p in params[i]] if sharded[i] else list(torch._foreach_mul(params[i], 1))
            for i, _ in angular
            if params[i]
        }
        # PyTorch's Nesterov adds into the gradients, and whether a neuron had one is asked after the step.
        grads: dict[int, list[Tensor]] = {}
        for i, group in angular:
            grads[i] = [p.grad for p in params[i] if p.grad is not None]
            if group.get("nesterov"):
                grads[i] = [g.clone() for g in grads[i]]
        decays = [group.get("weight_decay") for _, group in angular]
        try:
            for _, group in angular:
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            self.optimizer.step()
        finally:
            for (_, group), decay in zip(angular, decays):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        for i, group in angular:
            if not params[i]:
                continue
            # The parameters become the update, the copies turn towards it, and come back: no third buffer.
            if sharded[i]:
                for p, old in zip(params[i], before[i]):
                    p.sub_(old)
            else:
                torch._foreach_sub_(params[i], before[i])
            norms, turn = [self._norms[p] for p in params[i]], self._turners.setdefault(i, ChannelTurner())
            turn(before[i], params[i], grads[i], norms, -self._angle(group), group["dim"])
            if sharded[i]:
                for p, turned in zip(params[i], before[i]):
                    p.copy_(turned)
            else:
                torch._foreach_copy_(params[i], before[i])
        return loss

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _own_state(self) -> dict[str, Any]:
        return {"norms": {i: self._norms[p] for i, p in enumerate(self._parameters()) if p in self._norms}}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        params = self._parameters()
        self._norms = {params[i]: _norms_of(params[i], norm) for i, norm in state["norms"].items()}


def _norms_of(p: Tensor, saved: Tensor) -> Tensor:
    """Loaded norms where ``p`` is, in the dtype that they are measured in."""
    return saved.detach().to(p.device, compute_dtype(p.dtype), copy=True)


def _turning_rate(optimizer: Optimizer, group: Group) -> float | None:
    """θ²/(2ηλ) in equilibrium; None for an optimizer whose equilibrium is not known (see `equilibrium`)."""
    if isinstance(optimizer, AdamW):
        beta1 = host_value(group["betas"][0])
        return (1 - beta1) / (1 + beta1)
    if isinstance(optimizer, torch.optim.SGD) and group["dampening"] == 0:
        s, q = filter_sums(group["momentum"], group["nesterov"])
        return q / s
    return None
