"""What the optimizers here share: how a parameter is named in an error, and checks made before any state changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.sgd import sgd

Group = dict[str, Any]
Loss = TypeVar("Loss")

# Where SGD's fused kernel is chosen unasked. On a CPU it is there too, but gains nothing over foreach's plain loop.
_FUSED_BY_DEFAULT = ("cuda",)
_LAYOUT, _DTYPE = attrgetter("layout"), attrgetter("dtype")


def parameter_label(group_index: int, group: Group, index: int) -> str:
    """``"'conv1.weight' (parameter 0 of group 1, shape (8, 1, 3, 3))"``: names a parameter in an error message."""
    place = f"parameter {index} of group {group_index}, shape {tuple(group['params'][index].shape)}"
    names = group.get("param_names")
    return f"'{names[index]}' ({place})" if names else place


def loss_of(closure: Callable[[], Loss] | None) -> Loss | None:
    """What a step's ``closure`` returns, which reevaluates the model; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def host_value(value: float | Tensor) -> float:
    """A number that may live in a tensor, as a Python float (waits for the device when it lives on one)."""
    return value.item() if isinstance(value, Tensor) else value


def host_known(value: float | Tensor) -> bool:
    """Whether the number can be read without waiting for a device."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def whole(x: Tensor) -> Tensor:
    """``x``, or what all processes have of it together where it is in shards (a DTensor)."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[no-any-return]


def check_number(name: str, value: float | Tensor, below: float = math.inf) -> None:
    """Raise unless ``value`` is a real number (or a one-element tensor of it) in [0, below)."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be a number or a tensor of one element, got shape {tuple(value.shape)}")
        if not host_known(value):
            return
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | Real):  # NumPy's are of the last kind
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 <= value < below:
        bound = ">= 0 and finite" if below == math.inf else f"in [0, {below:g})"
        raise ValueError(f"{name} must be {bound}, got {value}")


def take_numbers(group: Group) -> None:
    """Make NumPy's numbers Python's. PyTorch takes either for a double; but 1 − ηλ with a float32 is a float32.

    A tensor of one element becomes a view without dimensions: what is filled into the user's own is seen here.
    """
    for name in ("lr", "momentum", "weight_decay", "angle", "eps"):
        value = group.get(name)
        if isinstance(value, Tensor) and value.ndim and value.numel() == 1:
            group[name] = value.view(())
        if isinstance(value, Real) and not isinstance(value, int | float):
            group[name] = float(value)


def check_dense_gradients(index: int, group: Group) -> None:
    """Raise on a sparse gradient, naming its parameter."""
    for i, p in enumerate(group["params"]):
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ValueError(
                f"{parameter_label(index, group, i)} has a {p.grad.layout} gradient; a direction needs the whole "
                "vector, so only dense gradients are supported"
            )


def check_own_groups(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Raise on groups that another optimizer saved: in ``__setstate__``, before they take the place of its own."""
    if "defaults" in state:  # unpickled: all of it is one optimizer's
        return
    for index, (own, group) in enumerate(zip(optimizer.param_groups, state["param_groups"])):
        # Torch adds defaults that no group has, and schedulers options that are no default.
        missing = [name for name in optimizer.defaults if name in own and name not in group]
        if missing:
            raise ValueError(
                f"not a state of {type(optimizer).__name__}: its group {index} has no {', '.join(missing)}. To go on "
                "with another optimizer than before, load the model alone"
            )


@contextmanager
def loading(optimizer: Optimizer, finish: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """While ``torch.optim`` loads: ``finish`` gets the state as the user's pre-hooks left it, before his post-hooks."""
    state: dict[str, Any] = {}
    handles = (
        optimizer.register_load_state_dict_pre_hook(lambda _, hooked: state.update(hooked)),
        optimizer.register_load_state_dict_post_hook(lambda _: finish(state), prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Members(NamedTuple):
    """The parameters of a group that step, with their gradients and states side by side."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]

    def by_kind(self) -> list[Members]:
        """Parts of one class each: multi-tensor operations do not take shards (DTensors) beside whole tensors."""
        kinds = dict.fromkeys(map(type, self.params))
        if len(kinds) <= 1:
            return [self]
        parts = [[member for member in zip(*self) if type(member[0]) is kind] for kind in kinds]
        return [Members(*map(list, zip(*part))) for part in parts]

    def momentum_buffers(self) -> list[Tensor]:
        """One buffer a parameter; from zero the first step gives μ·0 + ∇L = ∇L, PyTorch's first buffer."""
        try:
            return [*map(itemgetter("momentum_buffer"), self.states)]
        except KeyError:
            for p, state in zip(self.params, self.states):
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
        return [*map(itemgetter("momentum_buffer"), self.states)]

    def takes_fused(self, group: Group) -> bool:
        """The user's word, or else whether PyTorch's fused kernel, the fastest, takes these tensors as they are."""
        if group.get("fused") is not None or group["foreach"] is not None:
            return bool(group.get("fused"))
        if not self.params or self.params[0].device.type not in _FUSED_BY_DEFAULT or not self._of_one_place():
            return False
        if type(self.params[0]) not in (Tensor, nn.Parameter):  # shards (DTensors) have no such kernel
            return False
        lists = [self.params, self.grads, *([self.momentum_buffers()] if group["momentum"] != 0 else [])]
        if len({*map(_DTYPE, lists[-1])} | {self.params[0].dtype}) > 1:  # the parameters were cast since
            return False
        if all(all(map(Tensor.is_contiguous, tensors)) for tensors in lists):
            return True
        # The kernel refuses tensors that are not strided alike, or have gaps. A buffer was made without any.
        strides = zip(*(map(Tensor.stride, tensors) for tensors in lists))
        doubtful = [i for i, found in enumerate(strides) if len(lists) < 3 or found.count(found[0]) < 3]
        return all(_strided_alike(*(tensors[i] for tensors in lists)) for i in doubtful)

    def _of_one_place(self) -> bool:
        """Whether all tensors are of one device and one real dtype: what one call of the kernel takes."""
        dtypes = {*map(_DTYPE, self.params), *map(_DTYPE, self.grads)}
        devices = {*map(Tensor.get_device, self.params)}
        return len(dtypes) == len(devices) == 1 and dtypes.pop().is_floating_point


def _strided_alike(*tensors: Tensor) -> bool:
    """Whether all are contiguous, or all channels_last."""
    formats = (torch.contiguous_format, torch.channels_last)
    return any(all(x.is_contiguous(memory_format=f) for x in tensors) for f in formats)


def members(optimizer: Optimizer, index: int) -> Members:
    """The members of group ``index`` that have gradients; raises on a sparse gradient, naming its parameter.

    One pass, because on a GPU the host's time for a step is easily longer than the device's.
    """
    group, state = optimizer.param_groups[index], optimizer.state
    params, grads = [*group["params"]], [p.grad for p in group["params"]]
    if type(None) in map(type, grads):
        params = [p for p, grad in zip(params, grads) if grad is not None]
        grads = [grad for grad in grads if grad is not None]
    if {*map(_LAYOUT, grads)} - {torch.strided}:
        check_dense_gradients(index, group)
    return Members(params, grads, [state[p] for p in params])


def sgd_(group: Group, group_members: Members, lr: float | Tensor, weight_decay: float) -> None:
    """``torch.optim.SGD``'s own step. A tensor as ``lr`` is not read by the host, so a CUDA graph may capture it.

    Where the group names neither ``foreach`` nor ``fused``, the fused kernel is taken where it can be.
    """
    params, grads, _ = group_members
    if not params:
        return
    if len(parts := group_members.by_kind()) > 1:
        for part in parts:
            sgd_(group, part, lr, weight_decay)
        return
    momentum, nesterov, sign = group["momentum"], group["nesterov"], -1.0 if group["maximize"] else 1.0
    buffers = group_members.momentum_buffers() if momentum != 0 else []
    if not isinstance(lr, Tensor):
        options = {
            "weight_decay": weight_decay,
            "momentum": momentum,
            "lr": lr,
            "dampening": 0.0,
            "nesterov": nesterov,
            "maximize": group["maximize"],
        }
        fused = group_members.takes_fused(group)
        if fused and (not group.get("fused") or group_members._of_one_place()):
            # What PyTorch's `sgd` comes to, without sorting the tensors by device and dtype.
            torch._fused_sgd_(params, grads, buffers, **options, is_first_step=False)
            return
        if nesterov and weight_decay == 0 and not fused:
            grads = list(torch._foreach_mul(grads, 1))  # PyTorch would add into p.grad itself: no decay made a copy
        unused = [None] * len(params)
        sgd(params, grads, list(buffers) or unused, **options, foreach=group["foreach"], fused=fused or None)  # type: ignore[arg-type]
        return
    updates = list(torch._foreach_mul(params, weight_decay))
    torch._foreach_add_(updates, grads, alpha=sign)
    if momentum != 0:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, updates)
        if nesterov:
            torch._foreach_add_(updates, buffers, alpha=momentum)
        else:
            updates = buffers
    if params[0].dtype in (torch.float32, torch.float64):  # where foreach is fast; half precision would round it
        lr = lr.to(params[0].dtype)
    torch._foreach_sub_(params, torch._foreach_mul(updates, lr))


def is_capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
