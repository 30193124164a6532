"""SGD with fixed norms that sets the angle per step directly.

Of a weight followed by a normalization only the direction matters. In equilibrium, SGD with weight decay turns each
neuron by about θ = √(2ηλ/(1+μ)) per step, whatever its gradients (see `equilibrium`). Here this angle is the setting:
every neuron turns by exactly θ, away from its momentum b, and keeps its first norm ρ. No weight decay, no transient:

    b ← μb + ∇L,        w ← ρ(cos θ·ŵ − sin θ·b̂⊥),        b⊥ = b − ⟨b, ŵ⟩ŵ.

A scheduler that changes the learning rate changes the angle, as the user's choice implies:
- a recipe (lr and weight decay): θ follows from the new lr, so it goes as √lr, as the equilibrium's angle does. (SGD
  itself needs the time constant of the equilibrium to get there: right after a drop its angle goes as lr.)
- an angle: it is the step size, and the scheduler schedules it: lr ÷ 10 is angle ÷ 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from normmatters.norm import compute_dtype
from normmatters.optim._base import (
    Group,
    Members,
    OptimizerWithState,
    check_numbers,
    evaluate,
    host_value,
    is_capturing,
    new_group,
    normalize_numbers,
    on_host,
    parameter_label,
    sgd_,
    whole,
)
from normmatters.optim.channels import ChannelRotator, Momentum, channel_norms
from normmatters.optim.decay_groups import model_groups
from normmatters.optim.equilibrium import filter_sums


class AngularSGD(OptimizerWithState):
    r"""SGD with momentum that turns every neuron by exactly one angle per step and keeps every norm.

    Args:
        params: parameters, (name, parameter) pairs or groups. A group with ``angular=False`` gets ordinary SGD with
            ``lr`` and ``weight_decay`` (the optimizer's, or with an angle its own lr and 0): biases, affine parameters,
            the last layer.
        lr, weight_decay: a usual SGD recipe; the angle is its equilibrium's, √(2ηλ/(1+μ)), at every step's lr.
        momentum: momentum μ; the direction is away from the momentum buffer.
        angle: the angle in radians, in place of ``lr`` and ``weight_decay``. It is then the group's ``lr``, so
            schedulers act on the angle itself.
        nesterov: Nesterov's direction ∇L + μb (and its equilibrium angle).
        dim: dimension of the neurons, 0 for convolutions and linear layers, 1 for transposed convolutions, None for
            the whole tensor; may be set for each group.
        maximize: maximize the objective.
        foreach: passed on to SGD for groups with ``angular=False``; the others are always multi-tensor.
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
        defaults: dict[str, Any] = {"angular": True, "lr_is_angle": angle is not None, "dim": dim}
        defaults |= {"lr": lr if angle is None else angle}
        defaults |= {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        defaults |= {"maximize": maximize, "foreach": foreach, "capturable": capturable}
        self._rotators: dict[Any, ChannelRotator] = {}  # by group and kind of tensor; no state, never saved
        super().__init__(params, defaults)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        example_input: Any,
        *,
        other_lr: float | Tensor | None = None,
        decay_vectors: bool = True,
        **options: Any,
    ) -> Self:
        """The optimizer for a whole model: angular for its scale-invariant weights, found by a test, else SGD.

        Args:
            model, example_input: as for :func:`scale_invariant_parameters`, which finds ``dim`` too.
            other_lr: the learning rate of the other parameters. Needed with ``angle``; None takes ``lr``.
            decay_vectors: whether biases and affine parameters decay, as they do under SGD.
            options: lr and weight_decay, or angle, and the others, as above.

        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> batch = torch.randn(8, 3)
        >>> optimizer = AngularSGD.from_model(model, batch, lr=0.1, weight_decay=5e-4)
        >>> optimizer = AngularSGD.from_model(model, batch, angle=0.007, other_lr=0.1)
        """
        if options.get("angle") is not None and other_lr is None:
            raise ValueError("angle is no learning rate: give other_lr for the parameters that are not scale invariant")
        others = {"angular": False} | ({} if other_lr is None else {"lr": other_lr})
        return cls(model_groups(model, example_input, decay_vectors, {}, others, by_dim=True), **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rotators = {}

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
        with new_group(self) as (index, group):
            if group["nesterov"] and group["momentum"] == 0:
                raise ValueError("nesterov=True needs momentum > 0, got momentum 0")
            if group["angular"] and not group["lr_is_angle"] and not group["weight_decay"]:
                raise ValueError(
                    f"group {index}: the angle √(2·lr·weight_decay/(1+momentum)) needs weight_decay > 0, got "
                    f"{group['weight_decay']}. Give the weight decay of your usual recipe, or an angle"
                )
            self._check_numbers(group)
            if group["angular"]:
                check_turnable(index, group)

    def _check_numbers(self, group: Group) -> None:
        """Raise if the group's numbers are unusable. Reads no device."""
        normalize_numbers(group)
        name = "angle" if group["lr_is_angle"] else "lr"
        decay = 0.0 if group["weight_decay"] is None else group["weight_decay"]
        check_numbers(**{"momentum": group["momentum"], name: group["lr"], "weight_decay": decay})
        if group["angular"]:
            check_angle(self._angle(group))

    def _angle(self, group: Group) -> float | Tensor:
        lr = group["lr"] if group["capturable"] else host_value(group["lr"])
        if group["lr_is_angle"]:
            return lr  # type: ignore[no-any-return]
        s, q = filter_sums(group["momentum"], group["nesterov"])
        return (2 * group["weight_decay"] * q / s * lr) ** 0.5  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step. ``closure``, if given, reevaluates the model and returns the loss, which is returned."""
        loss = evaluate(closure)
        # Everything that can be refused is refused first, before a parameter changes.
        all_members = [Members.of(index, group, self.state) for index, group in enumerate(self.param_groups)]
        new: dict[Tensor, Tensor] = {}
        for index, (group, members) in enumerate(zip(self.param_groups, all_members)):
            self._check_numbers(group)
            if group["angular"] and not all("norm" in state for state in members.states):
                new |= first_norms(index, group, {p for p in group["params"] if "norm" in self.state[p]})
        for p, norm in new.items():
            self.state[p]["norm"] = norm
        for index, (group, members) in enumerate(zip(self.param_groups, all_members)):
            if not group["angular"]:
                sgd_(group, members)
                continue
            sign, angle = -1.0 if group["maximize"] else 1.0, self._angle(group)
            for part in members.by_kind():
                params, grads, states = part
                norms = [state["norm"] for state in states]
                rotate = self._rotators.setdefault((index, type(params[0])), ChannelRotator())
                if group["momentum"] == 0:  # w turns by θ away from ∇L
                    rotate(params, grads, grads, norms, sign * angle, group["dim"])
                else:  # b ← μb + ∇L; w turns by θ away from b, or in Nesterov's form from μb + ∇L
                    momentum = Momentum(group["momentum"], sign, group["nesterov"])
                    rotate(params, part.momentum_buffers(), grads, norms, angle, group["dim"], momentum)
        return loss

    def _restore(self, group: Group, saved: dict[Tensor, dict[str, Any]]) -> None:
        for p, state in saved.items():
            if isinstance(norm := state.get("norm"), Tensor):  # {} in distributed checkpoints of what never stepped
                self.state[p]["norm"] = loaded_norms(p, norm)


def check_angle(angle: float | Tensor) -> None:
    """Raise unless the angle is less than a right angle. Reads no device."""
    if on_host(angle) and not 0 <= host_value(angle) < math.pi / 2:
        raise ValueError(f"the angle per step must be in [0, π/2) radians, got {host_value(angle)}")


def check_turnable(index: int, group: Group) -> None:
    """Raise if, by its shape, a parameter of the group has no neurons with a direction. Reads no device."""
    dim = group["dim"]
    for i, p in enumerate(group["params"]):
        if dim is not None and not (isinstance(dim, int) and -p.ndim <= dim < p.ndim):
            raise ValueError(f"dim {dim} is no dimension of {parameter_label(index, group, i)}")
        if p.is_complex():
            raise ValueError(f"{parameter_label(index, group, i)} is complex: only real weights have angles here")
        if p.numel() < 2 * (1 if dim is None else p.shape[dim]):
            raise ValueError(
                f"{parameter_label(index, group, i)} has fewer than two numbers per neuron, so it has no direction to "
                "turn: put it in a group with angular=False"
            )


def first_norms(index: int, group: Group, known: Container[Tensor]) -> dict[Tensor, Tensor]:
    """The norms of every neuron of the parameters that step for the first time, which they will keep.

    Waits for the device, once in a run. Raises on a neuron of norm zero: it has no direction, and if it is zero by
    mistake it would never learn. Later it may be pruned.
    """
    norms: dict[Tensor, Tensor] = {}
    for i, p in enumerate(group["params"]):
        if p.grad is None or p in known:
            continue
        if is_capturing():
            label = parameter_label(index, group, i)
            raise ValueError(f"{label} takes its first step inside a CUDA graph: take one step before the capture")
        norm = channel_norms(p.detach(), group["dim"])
        values = whole(norm)
        bad = ((values == 0) | ~values.isfinite()).nonzero().flatten().tolist()
        if bad:
            label, value = parameter_label(index, group, i), values[bad[0]].item()
            raise ValueError(
                f"{label}: neuron {bad[0]} has norm {value:g}; {len(bad)} of its {norm.numel()} neurons have no "
                "direction. Initialise them, or put it in a group with angular=False; if they are pruned, keep the "
                "mask of torch.nn.utils.prune: the weight before the mask has a direction"
            )
        norms[p] = norm
    return norms


def loaded_norms(p: Tensor, saved: Tensor) -> Tensor:
    """Loaded norms where ``p`` is, in the dtype that they are measured in."""
    return saved.detach().to(p.device, compute_dtype(p.dtype), copy=True)
