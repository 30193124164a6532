"""What the weight-decay-free optimizers share: α in the state of each parameter, checks, and rescaling."""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from normmatters.optim._common import (
    Group,
    Members,
    check_own_groups,
    host_value,
    is_capturing,
    loading,
    members,
    parameter_label,
    take_numbers,
    whole,
)

# α is kept below this, early enough that BN's eps and fp16 gradients, which see the norm, hardly notice.
RESCALE_AT = 16.0
# How much w is divided by then: so little that batch norm's running statistics, which are of the last weights and know
# nothing of it, still fit. Divided by 16 at once, evaluation would be wrong for some 50 steps.
_RESCALE_BY = 1.01
# |cos(w, ∇L)| above which a weight is refused as not scale invariant; BN's eps and fp16 noise stay well below.
INVARIANCE_TOLERANCE = 1e-2

_PLACE = attrgetter("device", "dtype", "__class__")  # shards (DTensors) do not step together with whole tensors

Scalar = TypeVar("Scalar", float, Tensor)


def rescale_factor(alpha: Scalar) -> Scalar:
    """What brings α back below RESCALE_AT; 1 while it is there."""
    factor = RESCALE_AT / _RESCALE_BY / alpha
    if isinstance(factor, Tensor):
        return torch.where(alpha >= RESCALE_AT, factor, 1.0)
    return 1.0 if alpha < RESCALE_AT else factor


def rates(group: Group, on_host: bool = False) -> tuple[Any, Any]:
    """(η, λ) of a group, tensors in double: in float32 1 − ηλ is rough."""
    values = (value.double() if isinstance(value, Tensor) else value for value in (group["lr"], group["weight_decay"]))
    lr, weight_decay = map(host_value, values) if on_host else values
    return lr, weight_decay


class WeightDecayFree(Optimizer):
    """What the weight-decay-free optimizers share: α in the state of each parameter, checks, and rescaling."""

    _scalars: tuple[tuple[str, float], ...] = (("alpha", 1.0),)

    def _check_group(self, index: int, group: Group) -> None:
        """Raise if the group's numbers are unusable. Reads no device."""
        raise TypeError(f"{type(self).__name__} defines no checks")

    def _acting_lr(self, index: int, weight: Tensor) -> float | Tensor:
        """What multiplies the next update of ``weight``, of group ``index``: lr, grown by what decay would do."""
        raise TypeError(f"{type(self).__name__} defines no learning rate")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            index, group = len(self.param_groups) - 1, self.param_groups[-1]
            take_numbers(group)
            self._check_group(index, group)
            for i, p in enumerate(group["params"] if group["weight_decay_free"] else ()):
                if p.is_complex():
                    label = parameter_label(index, group, i)
                    raise ValueError(f"{label} is complex: only real weights have a weight-decay-free form here")
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_own_groups(self, state)
        super().__setstate__(state)

    def _gather(self) -> tuple[list[tuple[Group, Members]], list[tuple[Group, Members]]]:
        """What steps: (ordinary groups, cohorts of weight-decay-free groups).

        Everything that can be refused is refused here, before the first parameter changes.
        """
        capturing = is_capturing()
        plain, free = [], []
        for index, group in enumerate(self.param_groups):
            take_numbers(group)
            self._check_group(index, group)
            if capturing and not group["capturable"]:
                raise ValueError(f"group {index} is captured into a CUDA graph: pass capturable=True")
            found = members(self, index)
            if not group["weight_decay_free"]:
                plain.append((group, found))
                continue
            if group["capturable"]:
                self._check_capturable(index, group)
            if group["check_invariance"] and not capturing and not all("alpha" in state for state in found.states):
                self._check_invariance(index, group)
            free.append((group, found))
        return plain, [(group, cohort) for group, found in free for cohort in self._cohorts(group, found)]

    def _check_invariance(self, index: int, group: Group) -> None:
        """A scale-invariant weight has ⟨w, ∇L⟩ = 0; look once, at a parameter's first step."""
        for i, p in enumerate(group["params"]):
            if p.grad is None or "alpha" in self.state[p]:
                continue
            label = parameter_label(index, group, i)
            if p.ndim < 2:
                # Their cosine may be 0 by chance: BN's γ at β = 0, before another BN, is scale invariant for one step.
                raise ValueError(
                    f"{label} is a vector: biases and affine parameters are not scale invariant, put them in a group "
                    "with weight_decay_free=False (or pass check_invariance=False if you know better)"
                )
            w, g = p.detach().double(), p.grad.double()
            # Of shards, item() is each process's own part, and what is of unequal parts cannot be flattened.
            inner, norm, grad_norm = (whole(x).item() for x in ((w * g).sum(), w.norm(), g.norm()))
            if norm == 0:
                raise ValueError(
                    f"{label} is all zero, so it has no direction to keep: put it in a group with "
                    "weight_decay_free=False"
                )
            if abs(inner) > INVARIANCE_TOLERANCE * norm * grad_norm:
                raise ValueError(
                    f"{label} is not scale invariant: the cosine between it and its gradient is "
                    f"{inner / (norm * grad_norm):.3g}, expected 0 (at most {INVARIANCE_TOLERANCE:g}). Put it in a "
                    "group with weight_decay_free=False, where weight_decay is applied as usual"
                )

    def _check_capturable(self, index: int, group: Group) -> None:
        """Captured scalars are shared by the whole cohort, so its parameters must step together."""
        alphas = [self.state.get(p, {}).get("alpha") for p in group["params"]]
        stepping = {id(a) for p, a in zip(group["params"], alphas) if p.grad is not None and isinstance(a, Tensor)}
        for i, p in enumerate(group["params"]):
            if p.dtype not in (torch.float32, torch.float64):
                label = parameter_label(index, group, i)
                raise ValueError(f"capturable=True needs float32 or float64 parameters, {label} is {p.dtype}")
            if p.grad is None and id(alphas[i]) in stepping:
                raise ValueError(
                    f"{parameter_label(index, group, i)} has no gradient in a step in which its group has: with "
                    "capturable=True give it a group of its own"
                )

    def _cohorts(self, group: Group, found: Members) -> list[Members]:
        """The members split by device, dtype, class and history: those with equal α step together.

        A step without a gradient does not decay a parameter in ``torch.optim``, so its α goes its own way from there.
        """
        capturable = group["capturable"]
        one_by_one = group["foreach"] is False and not capturable
        if not one_by_one and self._is_one_cohort(capturable, found):
            return [found]
        shared: dict[Any, dict[str, Tensor]] = {}
        cohorts: dict[Any, Members] = {}
        for p, grad, state in zip(*found):
            if isinstance(state.get("alpha"), Tensor) != capturable or "alpha" not in state:
                self._settle(group, p, shared)
            history = id(state["alpha"]) if capturable else tuple(state[name] for name, _ in self._scalars)
            key = p if one_by_one else (_PLACE(p), history)
            cohort = cohorts.setdefault(key, Members([], [], []))
            cohort.params.append(p)
            cohort.grads.append(grad)
            cohort.states.append(state)
        return list(cohorts.values())

    def _is_one_cohort(self, capturable: bool, found: Members) -> bool:
        """Whether all members step together, as in nearly every step: asked by `map`, as the loop takes long."""
        if not found.params or not all("alpha" in state for state in found.states):
            return False
        alphas = [*map(itemgetter("alpha"), found.states)]
        if isinstance(alphas[0], Tensor) != capturable:
            return False
        histories = map(id, alphas) if capturable else map(itemgetter(*(n for n, _ in self._scalars)), found.states)
        return len({*histories}) == 1 and len({*map(_PLACE, found.params)}) == 1

    def _store(self, group: Group, cohort: Members, values: tuple[Any, ...]) -> None:
        """Write a cohort's new scalars; tensors (shared by the cohort) in place, so that a graph finds them again."""
        named = {name: value for (name, _), value in zip(self._scalars, values)}
        if not group["capturable"]:
            for state in cohort.states:
                state.update(named)
            return
        for name, value in named.items():
            cohort.states[0][name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim``; α stays in double and captured scalars stay shared, bit for bit."""
        with loading(self, self._load_scalars):
            super().load_state_dict(state_dict)

    def _load_scalars(self, state_dict: dict[str, Any]) -> None:
        saved_state = state_dict["state"]
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"]):
            shared: dict[Any, dict[str, Tensor]] = {}
            for p, key in zip(group["params"], saved_group["params"]):
                if "alpha" in (saved := saved_state.get(key, {})):
                    self.state[p].update((name, saved[name]) for name, _ in self._scalars)
                    self._settle(group, p, shared)

    def _settle(self, group: Group, p: Tensor, shared: dict[Any, dict[str, Tensor]]) -> None:
        """Put the scalars of ``p`` where its group has them: on the host, or in tensors that equal parameters share."""
        values = {name: host_value(self.state[p].get(name, start)) for name, start in self._scalars}
        if not group["capturable"]:
            self.state[p].update(values)
            return
        key = *_PLACE(p), *values.values()
        if key not in shared:
            shared[key] = {n: torch.full((), v, dtype=torch.float64, device=p.device) for n, v in values.items()}
        self.state[p].update(shared[key])
