"""Classes whose ``forward`` is a rewritten one, and how an instance gets such a class and its own one back.

The class of a fused block is a subclass of the block's own, made once per class. So ``isinstance``, ``super()``,
attributes, hooks and ``state_dict`` stay as they are, and ``type(block)(...)`` builds a block whose norms are plain.
Copying and pickling go by the block's own class.
"""

from __future__ import annotations

import abc
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from normmatters.surgery.deferred import Fusion, is_iterated_plainly
from normmatters.surgery.rewrite import Rewritten, Unfit, rewrite

_REGISTERED: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()
_CLASSES: weakref.WeakValueDictionary[type, Any] = weakref.WeakValueDictionary()  # by the block's own class
_LOCK = threading.RLock()
_COPYING = ("__reduce__", "__reduce_ex__")


class FusedBlock:
    """First base of every class with a rewritten ``forward``."""

    own_class: ClassVar[type[nn.Module]]
    fusion_forward: ClassVar[Any]  # called with a Fusion, then as forward
    fusion_original: ClassVar[Any]  # the forward that was rewritten
    fusion_methods: ClassVar[dict[str, tuple[Any, Any]]]  # the methods that it calls: as written, and rewritten
    fusion_takes_link: ClassVar[bool]
    fusion_sources: ClassVar[dict[str, Rewritten]]  # what was rewritten, by name

    def __init_subclass__(cls, **_: Any) -> None:
        """Nothing: a user's class may keep a register of its subclasses, which ours is none of."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, _, *state = cast(tuple[Any, ...], object.__reduce_ex__(self, protocol))
        if "own_class" not in vars(type(self)):  # someone put a class of theirs on top
            return (made, (type(self),), *state)
        return (new_block, (self.own_class,), *state)


def new_block(base: Any) -> Any:
    """An empty fused instance of ``base``; copying and unpickling fill in its state."""
    try:
        cls: Any = fused_class(base)
    except Unfit:  # its source is not at hand here: the block does the same without
        cls = base
    return cls.__new__(cls)


def register_fusion(cls: type[nn.Module], forward: Callable[..., Any]) -> None:
    """Let :func:`normmatters.convert` give blocks of ``cls`` this ``forward``, for a class that it cannot rewrite.

    ``forward(block, ...)`` takes the place of ``cls.forward`` in converted models, and must compute the same for norms
    of this library, with and without a GPU. The norms stay plain, so it passes the residual and the ReLU with the call:
    ``norm.forward_linked(x, residual, linked=False, relu=True)[0]``.

    Args:
        cls: exactly the class of the blocks; subclasses are not meant.
        forward: a function of a module that can be imported, so that the blocks can be pickled.

    Example::

        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        ...     def forward(self, x):
        ...         return torch.relu(self.norm(self.conv(x)) + x)
        >>> def fused(block, x):
        ...     return block.norm.forward_linked(block.conv(x), x, linked=False, relu=True)[0]
        >>> register_fusion(Block, fused)
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"cls must be a subclass of torch.nn.Module, got {cls!r}")
    if not callable(forward):
        raise TypeError(f"forward must be a function, got {type(forward).__name__}")
    with _LOCK:
        _REGISTERED[cls] = forward
        _CLASSES.pop(cls, None)


def is_registered(cls: type) -> bool:
    """Whether :func:`register_fusion` was called for exactly this class."""
    return cls in _REGISTERED


def fused_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``base`` with the rewritten ``forward``; raises :class:`Unfit` where there is none."""
    with _LOCK:
        cls = _CLASSES.get(base)
        if cls is None:
            cls = _CLASSES[base] = _make(base)
        return cls  # type: ignore[no-any-return]


def _make(base: Any) -> Any:
    original = base.forward
    if any(getattr(base, name) is not getattr(object, name) for name in _COPYING):
        raise Unfit("its class defines its own copying")
    if type(base) not in (type, abc.ABCMeta):
        raise Unfit("its metaclass may look at each new class")
    methods: dict[str, tuple[Any, Any]] = {}
    sources: dict[str, Rewritten] = {}
    takes_link = False
    run: Any
    if base in _REGISTERED:
        run = functools.partial(_registered, _REGISTERED[base])
    elif original is nn.Sequential.forward:
        run = _sequential
    else:
        sources["forward"] = rewrite(original, base)
        names = list(sources["forward"].methods)
        while names:
            name = names.pop()
            try:
                if name not in sources:
                    sources[name] = rewrite(getattr(base, name), base)
                    names += sources[name].methods
            except Unfit:  # it is called as it is
                continue
        methods = {name: (one.original, one.function) for name, one in sources.items() if name != "forward"}
        run, takes_link = sources["forward"].function, sources["forward"].adds

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if base.forward is not original:  # it was replaced since
            return base.forward(self, *args, **kwargs)
        return Fusion().run(run, self, *args, **kwargs)

    body = {
        "forward": forward,
        "own_class": base,
        "fusion_forward": staticmethod(run),
        "fusion_original": staticmethod(original),
        "fusion_methods": methods,
        "fusion_sources": sources,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    if takes_link:
        body["fusion_takes_link"] = True
    return types.new_class(base.__name__, (FusedBlock, base), exec_body=lambda space: space.update(body))


def _registered(function: Any, fusion: Fusion, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return function(block, *args, **kwargs)


def _sequential(fusion: Fusion, block: nn.Sequential, input: Any) -> Any:
    if isinstance(input, Tensor) and is_iterated_plainly(block):
        return fusion.done(fusion.sequence(block, input))
    return nn.Sequential.forward(block, input)  # for a tracer's stand-in for a tensor


def own_class(module: nn.Module) -> Any:
    """The module's class, or what it was before the fusion."""
    return _without(type(module))


def _without(cls: Any) -> Any:
    """The class before the fusion; what others put on top of the fused one since (parametrize, FSDP) stays on top."""
    if not issubclass(cls, FusedBlock):
        return cls
    if "own_class" in vars(cls):
        return cls.own_class
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, tuple(map(_without, cls.__bases__)), body)


def fuse(module: nn.Module) -> None:
    """Give the module the class with the rewritten forward."""
    if not isinstance(module, FusedBlock):
        object.__setattr__(module, "__class__", fused_class(type(module)))


def unfuse(module: nn.Module) -> None:
    """Give the module its own class back."""
    if isinstance(module, FusedBlock):
        object.__setattr__(module, "__class__", own_class(module))
