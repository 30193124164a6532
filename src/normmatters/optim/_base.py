"""What the optimizers share, read from the top:

- numbers in parameter groups: reading and checking them (`check_number`, `normalize_numbers`, `host_value`, …);
- `Members`: the parameters of a group that step now, beside their gradients and states, and `sgd_`, SGD's step on them;
- `WeightDecayFree`: base class of the two weight-decay-free optimizers;
- `OptimizerWrapper`: base class of the optimizers around another optimizer;
- `exponents`: how steps and states of known optimizers scale with the length of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from numbers import Real
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from normmatters.kernels.cpu.optimizer_rows import STEPPED, momentum_step_

Group = dict[str, Any]
Loss = TypeVar("Loss")
Scalar = TypeVar("Scalar", float, Tensor)

_LAYOUT, _DTYPE, _DEVICE = attrgetter("layout"), attrgetter("dtype"), attrgetter("device")
_PLACE = attrgetter("device", "dtype", "__class__")  # shards (DTensors) do not step together with whole tensors


def parameter_label(group_index: int, group: Group, index: int) -> str:
    """``"'conv1.weight' (parameter 0 of group 1, shape (8, 1, 3, 3))"``: names a parameter in an error message."""
    place = f"parameter {index} of group {group_index}, shape {tuple(group['params'][index].shape)}"
    names = group.get("param_names")
    return f"'{names[index]}' ({place})" if names else place


def evaluate(closure: Callable[[], Loss] | None) -> Loss | None:
    """The loss of a step's ``closure``, which evaluates the model again; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def host_value(value: float | Tensor) -> float:
    """A number that may be in a tensor, as a Python float (waits for the tensor's device)."""
    return value.item() if isinstance(value, Tensor) else value


def on_host(value: float | Tensor) -> bool:
    """Whether the number can be read without waiting for a device."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def whole(x: Tensor) -> Tensor:
    """``x``; the whole tensor where ``x`` is in shards over processes (a DTensor)."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[no-any-return]


def cosine_to_gradient(w: Tensor) -> float:
    """cos(w, ∇L), which is 0 for a scale-invariant weight (F1); 0 where either is zero. Waits for the device."""
    assert w.grad is not None
    weight, grad = w.detach().double(), w.grad.double()
    # Of shards, item() gives the part of this process only, and shards of unequal size cannot be flattened.
    inner, *norms = (whole(x).item() for x in ((weight * grad).sum(), weight.norm(), grad.norm()))
    return inner / math.prod(norms) if all(norms) else 0.0


def check_number(name: str, value: float | Tensor, below: float = math.inf) -> None:
    """Raise unless ``value`` is a real number (or a one-element tensor of it) in [0, below). Reads no device."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be a number or a tensor of one element, got shape {tuple(value.shape)}")
        if not on_host(value):
            return
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | Real):  # NumPy's are of the last kind
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 <= value < below:
        bound = ">= 0 and finite" if below == math.inf else f"in [0, {below:g})"
        raise ValueError(f"{name} must be {bound}, got {value}")


def check_numbers(**numbers: float | Tensor) -> None:
    """`check_number` for several; momentum and Adam's β must stay below 1."""
    for name, value in numbers.items():
        check_number(name, value, below=1.0 if name in ("momentum", "beta1") else math.inf)


def normalize_numbers(group: Group) -> None:
    """Make NumPy's numbers Python's: PyTorch takes both for doubles, but 1 − ηλ with a NumPy float32 is a float32.

    A tensor of one element becomes a view without dimensions, so that what the user fills into his own is seen here.
    """
    for name in ("lr", "momentum", "weight_decay", "angle", "eps"):
        value = group.get(name)
        if isinstance(value, Tensor) and value.ndim and value.numel() == 1:
            group[name] = value.view(())
        if isinstance(value, Real) and not isinstance(value, int | float):
            group[name] = float(value)


def is_capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def new_group(optimizer: Optimizer) -> Iterator[tuple[int, Group]]:
    """Index and settings of the group that was just added. It is dropped again if they are refused."""
    try:
        yield len(optimizer.param_groups) - 1, optimizer.param_groups[-1]
    except (TypeError, ValueError):
        optimizer.param_groups.pop()
        raise


class OptimizerWithState(Optimizer):
    """Base class of the optimizers with a state that ``torch.optim`` would round to the dtype of the parameters."""

    def _restore(self, group: Group, saved: dict[Tensor, dict[str, Any]]) -> None:
        """Take over what must not be rounded from the saved states of the group's parameters."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim``; what this optimizer adds to the state keeps its dtype."""
        loaded: dict[str, Any] = {}

        def finish(_: Optimizer) -> None:
            for group, saved in zip(self.param_groups, loaded["param_groups"]):
                states = [loaded["state"].get(key, {}) for key in saved["params"]]
                self._restore(group, dict(zip(group["params"], states)))

        # After the user's own pre-hooks, which may replace the state, and before his post-hooks.
        handles = (
            self.register_load_state_dict_pre_hook(lambda _, hooked: loaded.update(hooked)),
            self.register_load_state_dict_post_hook(finish, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Raise on parameter groups that another kind of optimizer saved."""
        groups = [] if "defaults" in state else state["param_groups"]  # unpickled, all belongs to one optimizer
        for index, (own, group) in enumerate(zip(self.param_groups if groups else (), groups)):
            # Look only at what its own groups have: torch adds defaults that no group has.
            missing = [name for name in self.defaults if name in own and name not in group]
            if missing:
                raise ValueError(
                    f"not a state of {type(self).__name__}: its group {index} has no {', '.join(missing)}. To "
                    "continue with another optimizer than before, load the model alone"
                )
        super().__setstate__(state)


# Kinds of device where SGD's fused kernel is taken by default; on a CPU it is otherwise the native kernel.
FUSED_ON = {"cuda"}


class Members(NamedTuple):
    """The parameters of a group that step now, with their gradients and states side by side."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]

    @classmethod
    def of(cls, index: int, group: Group, state: Mapping[Tensor, dict[str, Any]]) -> Members:
        """The members of group ``index`` that have gradients; raises on a sparse gradient, naming its parameter.

        In few passes: on a GPU the host easily takes longer for a step than the device.
        """
        params, grads = [*group["params"]], [p.grad for p in group["params"]]
        if type(None) in map(type, grads):
            params = [p for p, grad in zip(params, grads) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        for p, layout in zip(params, map(_LAYOUT, grads)):
            if layout != torch.strided:
                i = next(i for i, own in enumerate(group["params"]) if own is p)
                raise ValueError(
                    f"{parameter_label(index, group, i)} has a {layout} gradient; a direction needs the whole "
                    "vector, so only dense gradients are supported"
                )
        return cls(params, grads, [state[p] for p in params])

    def split(self, keys: Iterable[Any]) -> list[Members]:
        """The members in parts of equal key; there is one key per member."""
        keys = [*keys]
        if len({*keys}) == 1:
            return [self]
        parts: dict[Any, list[Any]] = {}
        for key, member in zip(keys, zip(*self)):
            parts.setdefault(key, []).append(member)
        return [Members(*map(list, zip(*part))) for part in parts.values()]

    def by_kind(self) -> list[Members]:
        """Parts of one class each: multi-tensor operations do not take shards (DTensors) beside whole tensors."""
        return self.split(map(type, self.params))

    def momentum_buffers(self) -> list[Tensor]:
        """One buffer per parameter, first of zeros: the first step gives μ·0 + ∇L = ∇L, PyTorch's first buffer."""
        for p, state in zip(self.params, self.states):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
        return [*map(itemgetter("momentum_buffer"), self.states)]

    def kernel(self, group: Group, buffers: list[Tensor]) -> str:
        """Which kernel steps: "native", "fused", or "" for PyTorch's choice. The group's own wish, or the fastest."""
        fused, device = group.get("fused"), self.params[0].device.type
        if fused is False or (fused is None and group["foreach"] is not None):
            return ""
        if not fused and device not in FUSED_ON | {"cpu"}:
            return ""
        if not one_kernel_takes(self.params, self.grads, *([buffers] if buffers else [])):
            return ""
        if fused or device in FUSED_ON:
            return "fused"
        return "native" if self.params[0].dtype in STEPPED else ""


def one_kernel_takes(*lists: list[Tensor]) -> bool:
    """Whether one call may work on parameters, gradients and buffers element by element: it sees their memory alone.

    There is no such kernel for shards (DTensors). After a cast of the model, buffers have another dtype.
    """
    tensors = [*chain(*lists)]
    places = {*zip(map(_DEVICE, tensors), map(_DTYPE, tensors))}
    if {*map(type, tensors)} - {Tensor, nn.Parameter} or len(places) > 1 or not tensors[0].is_floating_point():
        return False
    return all(map(Tensor.is_contiguous, tensors)) or all(map(_laid_out_alike, zip(*lists)))


def _laid_out_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether the elements of tensors of one shape are in one order in memory, without gaps."""
    if len({x.stride() for x in tensors}) == 1 and torch.ops.aten.is_non_overlapping_and_dense(tensors[0]):
        return True  # the strides of dimensions of size 1 may differ all the same
    formats = (torch.contiguous_format, torch.channels_last)
    return any(all(x.is_contiguous(memory_format=f) for x in tensors) for f in formats)


def sgd_(group: Group, members: Members) -> None:
    """``torch.optim.SGD``'s own step.

    The host does not read the learning rate of a ``capturable`` group, so a CUDA graph may capture the step.
    """
    lr = group["lr"] if group["capturable"] else host_value(group["lr"])
    decay, momentum, nesterov = group["weight_decay"] or 0.0, group["momentum"], group["nesterov"]
    sign = -1.0 if group["maximize"] else 1.0
    options = {name: group[name] for name in ("momentum", "nesterov", "maximize")}
    options |= {"lr": lr, "weight_decay": decay, "dampening": 0.0}
    for part in members.by_kind():
        params, grads, _ = part
        buffers = part.momentum_buffers() if momentum != 0 else []
        kernel = part.kernel(group, buffers)
        if isinstance(lr, Tensor):
            updates = list(torch._foreach_mul(params, decay))
            add_(updates, grads, sign)
            if momentum != 0:
                multiply_(buffers, momentum)
                add_(buffers, updates, 1.0)
            if nesterov:
                add_(updates, buffers, momentum)
            add_(params, updates if nesterov or momentum == 0 else buffers, -lr)
        elif kernel == "native":
            # b ← μb + g′ with g′ = sign·∇L + λw, and the weight moves by −η times b, g′ + μb or g′.
            reach = 1 + momentum if nesterov else 1.0
            of_weight = (-lr * reach * decay, -lr * momentum ** (2 if nesterov else 1), -lr * reach * sign)
            momentum_step_(params, grads, buffers, of_weight, (decay, momentum, sign))
        elif kernel == "fused":  # what PyTorch's `sgd` ends in, without sorting the tensors by device and dtype
            torch._fused_sgd_(params, grads, buffers, **options, is_first_step=False)
        else:
            if nesterov and decay == 0:
                grads = list(torch._foreach_mul(grads, 1))  # a copy: PyTorch would add into p.grad itself
            choice = {"foreach": group["foreach"], "fused": group.get("fused") or None}
            sgd(params, grads, [*buffers] or [None] * len(params), **options, **choice)  # type: ignore[arg-type]


def linear_step_(
    group: Group,
    members: Members,
    step_size: float | Tensor,
    of_weight: tuple[float | Tensor, float | Tensor],
    of_buffer: tuple[float | Tensor, float | Tensor],
    pending: float | Tensor,
) -> None:
    """w ← w − step_size·(a·V + b·∇L) and V ← c·V + d·∇L, in the fastest way there is.

    Args:
        of_weight, of_buffer: (a, b) and (c, d).
        pending: what the buffers must be multiplied by to hold V.
    """
    params, grads, states = members
    momentum, sign = group["momentum"], -1.0 if group["maximize"] else 1.0
    buffers = members.momentum_buffers() if momentum != 0 or "momentum_buffer" in states[0] else []
    heavy_ball = momentum != 0 and not group["nesterov"]
    (a, b), (c, d) = ((of_v * pending, of_gradient * sign) for of_v, of_gradient in (of_weight, of_buffer))
    kernel = "" if group["capturable"] else members.kernel(group, buffers)
    if kernel == "native":
        momentum_step_(params, grads, buffers, (0.0, -step_size * a, -step_size * b), (0.0, c, d))  # type: ignore[arg-type]
    elif kernel == "fused" and (heavy_ball or not buffers):
        if buffers and pending != 1:  # left by captured steps
            multiply_(buffers, pending)
        options = {"weight_decay": 0.0, "momentum": momentum, "lr": step_size, "dampening": 0.0, "nesterov": False}
        torch._fused_sgd_(params, grads, buffers, **options, maximize=group["maximize"], is_first_step=False)
    elif heavy_ball:  # moves by the new V
        multiply_(buffers, c)
        add_(buffers, grads, d)
        add_(params, buffers, -step_size)
    else:
        add_(params, grads, -step_size * b)
        if momentum != 0:
            add_(params, buffers, -step_size * a)
        if buffers:
            multiply_(buffers, c)
            add_(buffers, grads, d)


def multiply_(xs: list[Tensor], factor: float | Tensor) -> None:
    """xs ← factor · xs."""
    torch._foreach_mul_(xs, factor.to(xs[0].dtype) if isinstance(factor, Tensor) else factor)


def add_(xs: list[Tensor], ys: list[Tensor], factor: float | Tensor) -> None:
    """xs ← xs + factor · ys. A tensor is multiplied in first, because the host would have to read it as ``alpha``."""
    if isinstance(factor, Tensor):
        if xs[0].dtype in (torch.float32, torch.float64):  # where foreach is fast; half precision would round it
            factor = factor.to(xs[0].dtype)
        torch._foreach_add_(xs, torch._foreach_mul(ys, factor))
    else:
        torch._foreach_add_(xs, ys, alpha=factor)


# α is held below this, early enough that BN's eps and fp16 gradients, which depend on the norm, hardly notice.
RESCALE_AT = 16.0
# A rescaling divides w by this. It is so little that batch norm's running statistics, which are of earlier weights,
# still fit. After a division by 16, evaluation would be wrong for some 50 steps.
_RESCALE_BY = 1.01
# |cos(w, ∇L)| above which a weight is refused as not scale invariant; BN's eps and fp16 noise stay well below.
INVARIANCE_TOLERANCE = 1e-2


def rescale_factor(alpha: Scalar) -> Scalar:
    """The factor that brings α back below RESCALE_AT; 1 while it is there."""
    factor = RESCALE_AT / _RESCALE_BY / alpha
    if isinstance(factor, Tensor):
        return torch.where(alpha >= RESCALE_AT, factor, 1.0)
    return 1.0 if alpha < RESCALE_AT else factor


def rates(group: Group, read: bool = False) -> tuple[Any, Any]:
    """(η, λ) of a group; ``read`` brings tensors to the host. Tensors are in double: in float32 1 − ηλ is rough."""
    values = (value.double() if isinstance(value, Tensor) else value for value in (group["lr"], group["weight_decay"]))
    lr, weight_decay = map(host_value, values) if read else values
    return lr, weight_decay


class WeightDecayFree(OptimizerWithState):
    """Base class: α in the state of each parameter, checks before each step, and parameters with equal α together.

    A step of a subclass is: `_gather`, then for each cohort its equation, `rescale_factor` and `_store`.
    """

    # Numbers in the state of a parameter, with their first values.
    _scalars: Mapping[str, float] = {"alpha": 1.0}
    # Numbers of a group, checked before each step.
    _numbers: tuple[str, ...] = ()

    def _check_group(self, index: int, group: Group, decay: float) -> None:
        """Raise if the group's settings do not fit together; ``decay`` is lr · weight_decay, or 0 on a device."""
        raise NotImplementedError

    def _acting_lr(self, index: int, weight: Tensor) -> float | Tensor:
        """What multiplies the next update of ``weight``, of group ``index``: lr and what replaces the decay."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        with new_group(self) as (index, group):
            self._check_group(index, group, self._checked_decay(group))
            for i, p in enumerate(group["params"] if group["weight_decay_free"] else ()):
                if p.is_complex():
                    label = parameter_label(index, group, i)
                    raise ValueError(f"{label} is complex: only real weights have a weight-decay-free form here")

    def _checked_decay(self, group: Group) -> float:
        """lr · weight_decay, or 0 where only a device knows it; raises on numbers that are out of range."""
        normalize_numbers(group)
        check_numbers(**{name: group[name] for name in self._numbers})
        lr, weight_decay = group["lr"], group["weight_decay"]
        return host_value(lr) * host_value(weight_decay) if on_host(lr) and on_host(weight_decay) else 0.0

    def _gather(self) -> tuple[list[tuple[Group, Members]], list[tuple[Group, Members, Any, Any]]]:
        """What steps now: (ordinary groups, cohorts of weight-decay-free groups, each with its η and λ).

        Everything that can be refused is refused here, before the first parameter changes.
        """
        ordinary: list[tuple[Group, Members]] = []
        free: list[tuple[Group, Members]] = []
        capturing = is_capturing()
        decays = [*map(self._checked_decay, self.param_groups)]
        for index, (group, decay) in enumerate(zip(self.param_groups, decays)):
            self._check_group(index, group, decay)
        for index, group in enumerate(self.param_groups):
            if capturing and not group["capturable"]:
                raise ValueError(f"group {index} is captured into a CUDA graph: pass capturable=True")
            members = Members.of(index, group, self.state)
            (free if group["weight_decay_free"] else ordinary).append((group, members))
            if group["weight_decay_free"] and group["capturable"]:
                self._check_capturable(index, group)
            new = group["weight_decay_free"] and not all("alpha" in state for state in members.states)
            if new and group["check_invariance"] and not capturing:
                self._check_invariance(index, group)
        cohorts = []
        for group, members in free:
            lr, weight_decay = rates(group, read=not group["capturable"])
            cohorts += [(group, cohort, lr, weight_decay) for cohort in self._cohorts(group, members)]
        return ordinary, cohorts

    def _check_invariance(self, index: int, group: Group) -> None:
        """A scale-invariant weight has ⟨w, ∇L⟩ = 0; looked at once, in the parameter's first step."""
        for i, p in enumerate(group["params"]):
            if p.grad is None or "alpha" in self.state[p]:
                continue
            label = parameter_label(index, group, i)
            if p.ndim < 2:
                # Its cosine may be 0 by chance: BN's γ at β = 0, followed by another BN, is invariant for one step.
                raise ValueError(
                    f"{label} is a vector: biases and affine parameters are not scale invariant, put them in a group "
                    "with weight_decay_free=False (or pass check_invariance=False if you know better)"
                )
            if not whole(p.detach().any()):
                raise ValueError(
                    f"{label} is all zero, so it has no direction to keep: put it in a group with "
                    "weight_decay_free=False"
                )
            if abs(cosine := cosine_to_gradient(p)) > INVARIANCE_TOLERANCE:
                raise ValueError(
                    f"{label} is not scale invariant: the cosine between it and its gradient is {cosine:.3g}, expected "
                    f"0 (at most {INVARIANCE_TOLERANCE:g}). Put it in a group with weight_decay_free=False, where "
                    "weight_decay is applied as usual"
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

    def _cohorts(self, group: Group, members: Members) -> list[Members]:
        """The members split by device, dtype, class and history: those with equal α step together.

        In a step without its gradient, ``torch.optim`` does not decay a parameter; its α then differs from the others'.
        """
        params, _, states = members
        capturable = group["capturable"]
        # By `map` and comprehensions: for the many parameters of a model, loops take long.
        misplaced = [isinstance(state.get("alpha"), Tensor) != capturable or "alpha" not in state for state in states]
        if any(misplaced):
            self._place_scalars(group, [*compress(params, misplaced)])
        if group["foreach"] is False and not capturable:
            return members.split(params)
        histories = map(id, map(itemgetter("alpha"), states)) if capturable else map(itemgetter(*self._scalars), states)
        return members.split(zip(map(_PLACE, params), histories))

    def _store(self, group: Group, cohort: Members, values: tuple[Any, ...]) -> None:
        """Write a cohort's new scalars; tensors (shared by the cohort) in place, so that a graph finds them again."""
        named = dict(zip(self._scalars, values))
        if group["capturable"]:
            for name, value in named.items():
                cohort.states[0][name].copy_(value)
        else:
            for state in cohort.states:
                state.update(named)

    def _restore(self, group: Group, saved: dict[Tensor, dict[str, Any]]) -> None:
        stepped = [p for p, state in saved.items() if "alpha" in state]
        for p in stepped:
            self.state[p].update((name, saved[p][name]) for name in self._scalars)
        self._place_scalars(group, stepped)

    def _place_scalars(self, group: Group, params: list[Tensor]) -> None:
        """Put the scalars where their group has them: on the host, or in tensors that equal parameters share."""
        shared: dict[Any, dict[str, Any]] = {}
        for p in params:
            values = {name: host_value(self.state[p].get(name, start)) for name, start in self._scalars.items()}
            if group["capturable"]:
                key = *_PLACE(p), *values.values()
                if key not in shared:
                    at = p.device
                    shared[key] = {n: torch.full((), v, dtype=torch.float64, device=at) for n, v in values.items()}
                values = shared[key]
            self.state[p].update(values)


class OptimizerWrapper(Optimizer):
    """Base class of an optimizer around an optimizer, which torch's schedulers, `GradScaler` and hooks accept.

    Shares the wrapped optimizer's parameter groups and state and adds one key to its `state_dict`. Subclasses define
    `step`, `_prepared` for what they add to a group, and `_own_state` and `_load_own_state` for what they add to the
    state.
    """

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        # The base class's __init__ would make parameter groups of its own. Its __setstate__ makes the rest: hooks.
        super().__setstate__({})

    # Properties, because the wrapped optimizer replaces these objects in load_state_dict.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def __getstate__(self) -> dict[str, Any]:
        # As in torch.optim, copies have no hooks. Nor do they have the `step` of a scheduler, which steps this object.
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def _prepared(self, index: int, group: Group) -> Group:
        """``group`` with the settings that this wrapper needs; raises if they do not fit."""
        return group

    def _prepare_groups(self) -> None:
        """Check all groups before the first is changed."""
        prepared = [self._prepared(index, dict(group)) for index, group in enumerate(self.param_groups)]
        for group, settings in zip(self.param_groups, prepared):
            group.update(settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)
        with new_group(self) as (index, group):
            self._prepared(index, group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.optimizer.step(closure)

    @contextmanager
    def _with_decays(self, decays: Iterable[tuple[Group, float]]) -> Iterator[None]:
        """Groups with these weight decays for one step."""
        given = [(group, group["weight_decay"], decay) for group, decay in decays]
        try:
            for group, _, decay in given:
                group["weight_decay"] = decay
            yield
        finally:
            for group, own, _ in given:
                group["weight_decay"] = own

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _check_own_state(self, state: dict[str, Any]) -> None:
        """Raise on a state that does not fit; nothing has been loaded yet."""

    def _load_own_state(self, state: dict[str, Any]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's `state_dict` with one more key, this class's name. Hooks as in ``torch.optim``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self.optimizer.state_dict() | {type(self).__name__: self._own_state()}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        key, state_dict = type(self).__name__, state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        if key not in state_dict:
            raise ValueError(
                f"not a state of {key}: it has {sorted(state_dict)}; load a plain one into the optimizer before it is "
                "wrapped"
            )
        self._check_own_state(state_dict[key])
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != key})  # which checks it first
        self._load_own_state(state_dict[key])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


# How steps and states scale when a normalized weight is multiplied by a. Then ∇L(a·w) = ∇L(w)/a (F1). SGD's step is the
# gradient, so it turns the weight by η/‖w‖². Adam divides the gradient by its own size, so it turns it by η/‖w‖. In the
# states, gradients scale as a⁻¹ and squared gradients as a⁻².
_ADAM = {"exp_avg": -1.0, "exp_avg_sq": -2.0, "max_exp_avg_sq": -2.0}
_EXPONENTS: tuple[tuple[type[Optimizer], float, Mapping[str, float]], ...] = (
    (optim.SGD, 2.0, {"momentum_buffer": -1.0}),
    (optim.Adam, 1.0, _ADAM),
    (optim.AdamW, 1.0, _ADAM),
    (optim.NAdam, 1.0, _ADAM | {"mu_product": 0.0}),
    (optim.Adagrad, 1.0, {"sum": -2.0}),
    (optim.RMSprop, 1.0, {"square_avg": -2.0, "grad_avg": -1.0, "momentum_buffer": 0.0}),
)


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside any wrappers that hold theirs as `.optimizer`."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def exponents(optimizer: Optimizer) -> tuple[float, Mapping[str, float]] | None:
    """(k, powers): the effective step size is η/‖w‖ᵏ, and state ``name`` scales as a to ``powers[name]``.

    `None` for an optimizer that is not in the table.
    """
    inner = innermost(optimizer)
    return next(((k, powers) for kind, k, powers in _EXPONENTS if isinstance(inner, kind)), None)
