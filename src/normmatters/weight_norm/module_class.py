"""What ``torch.nn.utils.parametrize`` leaves undone in the class that it makes for a parametrized module.

Torch gives such a module a class of its own, ``ParametrizedLinear``, with a property for each parametrized weight. That
class cannot be pickled. Copies share it, so that removing a parametrization from a copy breaks the original. It cannot
read a plain checkpoint. And an LSTM stores computed weights in a list, which then cannot be copied either.
``complete_class`` adds the missing methods to the class. They vanish with it when the parametrization is removed.
"""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normmatters.functional.weight import slice_norm
from normmatters.weight_norm.parametrizations import BoundedWeight, ClassicWeight, weight_norm_of
from normmatters.weight_norm.projection import watch

_WEIGHTS_OF_THIS_PASS = "_weights_of_this_pass"  # in the dictionary of a recurrent module


def complete_class(module: nn.Module) -> None:
    """Add the missing methods to the class of a parametrized module."""
    cls = type(module)
    methods: dict[str, Any] = {
        "__reduce_ex__": _reduce_ex,
        "__setstate__": _setstate,
        "_load_from_state_dict": _load_from_state_dict,
    }
    if not hasattr(cls.__bases__[0], "__deepcopy__"):
        methods["__deepcopy__"] = _deepcopy
    if isinstance(module, nn.RNNBase):
        module.__dict__.pop("_flat_weights", None)
        methods |= {
            "_flat_weights": property(_flat_weights, _ignore),
            "_init_flat_weights": _ignore,
            "_update_flat_weights": _ignore,
            "forward": _rnn_forward,
            "__delattr__": _rnn_delattr,
        }
    for name in _parametrizations(module):
        methods[name] = _precomputed_first(name, getattr(cls, name))
    for name, method in methods.items():
        setattr(cls, name, method)


def _precomputed_first(name: str, computed: property) -> property:
    """Torch's property for a parametrized weight, preceded by the weight that ``fuse`` has computed already.

    Torch's takes as long as two module calls, which is long for returning what is there.
    """
    compute = computed.fget
    assert compute is not None
    if compute.__module__ == __name__:
        return computed  # from a call for another weight of the same module

    def weight(self: nn.Module) -> Tensor:
        stack = self._modules["parametrizations"]._modules[name]  # type: ignore[union-attr] # as in `v_and_rho`
        assert stack is not None
        norm = stack._modules["0"]
        if isinstance(norm, BoundedWeight | ClassicWeight) and len(stack._modules) == 1:
            v, rho = norm.v_and_rho(stack)
            weight = None if v is None or rho is None else norm.precomputed.weight_for(v, rho)
            if weight is not None:
                return weight
        return compute(self)  # type: ignore[no-any-return]

    return property(weight, computed.fset)


def _parametrizations(module: nn.Module) -> nn.ModuleDict:
    assert isinstance(module.parametrizations, nn.ModuleDict)
    return module.parametrizations


def _completed_class(module: nn.Module) -> type:
    """The class that `complete_class` has completed. Others may stand on top of it, such as `fully_shard`'s."""
    return next(cls for cls in type(module).__mro__ if vars(cls).get("__reduce_ex__") is _reduce_ex)


def _class_before(module: nn.Module) -> Any:
    return _completed_class(module).__bases__[0]


# Pickling and copying -------------------------------------------------------------------------------------------------


def _reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    cls, base = _completed_class(self), _class_before(self)
    if cls is not type(self):
        raise TypeError(
            f"{type(self).__name__} stands on top of {cls.__name__} and would be lost in a copy: copy the module "
            "before, or its state_dict"
        )
    return _rebuild, (base, tuple(_parametrizations(self))), base.__getstate__(self)


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """An instance of ``base``, without state, whose own new class has a parametrization property for each name."""
    module = base.__new__(base)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(module, name, nn.Identity())
    complete_class(module)
    module.__dict__.clear()
    return module


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    rebuild, arguments, state = _reduce_ex(self, 4)
    replica: nn.Module = rebuild(*arguments)
    memo[id(self)] = replica
    replica.__setstate__(copy.deepcopy(state, memo))  # type: ignore[operator]
    return replica


def _setstate(self: nn.Module, state: Any) -> None:
    _class_before(self).__setstate__(self, state)
    watch(self)


# Plain checkpoints ----------------------------------------------------------------------------------------------------


def _load_from_state_dict(
    self: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    for name in _parametrizations(self):
        plain, target = prefix + name, f"{prefix}parametrizations.{name}."
        parametrization = weight_norm_of(self, name)
        if isinstance(parametrization, BoundedWeight):
            _fit_length(state_dict, target, parametrization)
        if parametrization is None or plain not in state_dict or any(key.startswith(target) for key in state_dict):
            continue
        weight = state_dict[plain]
        if isinstance(weight, Tensor) and not local_metadata.get("assign_to_params_buffers", False):
            own = next(_parametrizations(self)[name].parameters(), weight)  # lengths are not rounded on the way
            weight = weight.to(torch.promote_types(weight.dtype, own.dtype))
        try:
            state = parametrization.state_from_plain(weight)
        except (TypeError, ValueError) as error:
            error_msgs.append(f'cannot load the plain weight "{plain}" into a weight norm: {error}')
            continue
        del state_dict[plain]
        state_dict.update({target + key: value for key, value in state.items()})
    _class_before(self)._load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    )


def _fit_length(state_dict: dict[str, Any], target: str, norm: BoundedWeight) -> None:
    """Let checkpoints of bounded weight norm with and without ``project`` load into each other."""
    key, v = f"{target}0.length", state_dict.get(f"{target}original")
    if norm.length is None:
        state_dict.pop(key, None)
    elif key not in state_dict and isinstance(v, Tensor):
        state_dict[key] = slice_norm(v, dim=norm.dim, p=norm.p, k=norm.k)


# Recurrent networks ---------------------------------------------------------------------------------------------------


def _flat_weights(self: nn.RNNBase) -> list[Tensor | None]:
    """The list that the recurrent kernels read, computed when they read it; in one forward pass, once."""
    computed: list[Tensor | None] | None = self.__dict__.get(_WEIGHTS_OF_THIS_PASS)
    return [getattr(self, name, None) for name in self._flat_weights_names] if computed is None else computed


def _ignore(self: nn.RNNBase, *_: Any) -> None:
    """Does nothing: there is no list to update."""


def _rnn_delattr(self: nn.RNNBase, name: str) -> None:
    """Torch takes ``parametrizations`` away last of all, with every weight plain again: then so is the list."""
    _class_before(self).__delattr__(self, name)
    if name == "parametrizations":
        self.__dict__["_flat_weights"] = self._flat_weights


def _rnn_forward(self: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
    # The list is read several times in one forward: compute each weight once, here and not in torch's cache, which all
    # threads share. Computed weights are no part of one flat buffer, of which cuDNN warns at every call; it compacts
    # them itself.
    self.__dict__[_WEIGHTS_OF_THIS_PASS] = self._flat_weights
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            return _class_before(self).forward(self, *args, **kwargs)
    finally:
        self.__dict__.pop(_WEIGHTS_OF_THIS_PASS, None)
