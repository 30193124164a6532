"""What a model is built of: its blocks, what each holds, and the modules in it that do what their class does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx, nn
from torch.nn.modules.utils import _pair

#: Why a norm in a Sequential that is not looked into stays alone.
WATCHED = "the Sequential that it is in has hooks, or another forward"


def has_hooks(module: nn.Module) -> bool:
    """Whether someone watches the module's inputs, outputs or gradients."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def has_own_call(module: nn.Module) -> bool:
    """Whether a call of the module is more than its forward and hooks."""
    return type(module).__call__ is not nn.Module.__call__


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module is its class's forward, and unobserved."""
    return "forward" not in vars(module) and not has_hooks(module) and not has_own_call(module)


def is_sequential(module: nn.Module) -> bool:
    """Whether the module does exactly what ``nn.Sequential`` does, and unobserved."""
    return _forward(module) is nn.Sequential.forward and is_plain(module)


def in_watched_sequentials(model: nn.Module) -> set[nn.Module]:
    """What stands in a Sequential that has hooks or another forward, so that nobody looks into it."""
    rows = [module for module in model.modules() if _forward(module) is nn.Sequential.forward]
    return {child for row in rows if not is_plain(row) for child in row.children()}


def is_identity(module: nn.Module) -> bool:
    """Whether the module does nothing, and unobserved."""
    return type(module) is nn.Identity and is_plain(module)


def is_relu(module: nn.Module) -> bool:
    """Whether the module is a ReLU that a norm can take over."""
    return type(module) is nn.ReLU and is_plain(module)


def is_pool(module: nn.Module | None) -> bool:
    """Whether it is the one max pool that a norm can take over: 3×3 windows, stride 2, padding 1."""
    if type(module) is not nn.MaxPool2d or not is_plain(module) or module.return_indices or module.ceil_mode:
        return False
    return [_pair(n) for n in (module.kernel_size, module.stride, module.padding, module.dilation)] == [
        (3, 3), (2, 2), (1, 1), (1, 1)
    ]  # fmt: skip


def _forward(module: nn.Module) -> Any:
    # The class of a block with placeholders in it does what the class before does. A scripted module's has no forward.
    return getattr(getattr(type(module), "unfused_class", type(module)), "forward", None)


def _is_container(module: nn.Module) -> bool:
    return _forward(module) is nn.Module.forward  # ModuleList, ModuleDict: their owner calls what is in them


def blocks_of(model: nn.Module, norms: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules with a forward of their own that have norms in them; outer ones first, but Sequentials last."""
    blocks = [module for module in model.modules() if not _is_container(module) and module not in norms]
    # Traced blocks first: they show when the modules of a Sequential are called one by one.
    for block in sorted(blocks, key=is_sequential):
        torchs_own = type(block).__module__.split(".")[0] == "torch"  # nn layers, but also DistributedDataParallel
        traced = not torchs_own or isinstance(block, fx.GraphModule)
        if (traced or is_sequential(block)) and not norms.isdisjoint(block.modules()):
            yield block


def slots_of(block: nn.Module, sequentials: bool) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(owner, name, module) of what the block holds itself: inside containers, and Sequentials if asked."""
    for name, child in block._modules.items():
        if child is None:
            continue
        yield block, name, child
        if _is_container(child) or (sequentials and is_sequential(child)):
            yield from slots_of(child, sequentials)


def not_its_own(block: nn.Module, called: Iterable[nn.Module]) -> set[nn.Module]:
    """Which of the modules that ``block`` calls are parts of another block or of a Sequential: called alone."""
    return set(called) - {module for _, _, module in slots_of(block, False)}


def called_without(block: nn.Module, module: nn.Module, alone: Iterable[nn.Module]) -> bool:
    """Whether the module of ``block`` is also reached by a call of one of the parts ``alone``, past the block."""
    parts = [set(part.modules()) for part in alone]
    return any(module in part and block not in part for part in parts)
