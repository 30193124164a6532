"""An optimizer around an optimizer that torch's schedulers, `GradScaler` and hooks take for one of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class OptimizerWrapper(Optimizer):
    """Shares the wrapped optimizer's parameter groups and state and adds its own keys to `state_dict`.

    Subclasses define `step`, and `_own_state`, `_check_own_state` and `_load_own_state` for what they add.
    """

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        # The base class's __init__ would build parameter groups of its own; its __setstate__ sets up the rest: hooks.
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
        # As in torch.optim, copies have no hooks, and not the `step` that a scheduler wraps: it steps this optimizer.
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.optimizer.step(closure)

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _check_own_state(self, state: dict[str, Any]) -> None:
        """Raise on a state that does not fit; nothing has been loaded yet."""

    def _load_own_state(self, state: dict[str, Any]) -> None:
        return None

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
