"""Bytes that a forward pass saves for backward, layer by layer, now and after a conversion.

They are counted on a *ghost*: a copy of the model whose tensors have a shape but no memory. So nothing is computed, and
a batch for a large GPU is measured on any machine. The GPU kernels are asked what they would keep, not launched.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from normmatters.kernels import backends
from normmatters.nn.batchnorm_base import LpBatchNorm
from normmatters.probe import call
from normmatters.surgery.plan import plan_fusion


class Kept(NamedTuple):
    """Bytes kept for the backward pass: now, and after ``convert`` with ``memory="exact"`` and ``"lean"`` on a GPU.

    A tensor that several layers keep is counted once, for the last of them: the input of a layer is the layer's. A norm
    that takes over a max pool is counted with it.
    ``exact`` and ``lean`` are None where no kernel can be asked (triton is not installed).

    >>> Kept(now=100, exact=112, lean=12).saved
    88
    """

    now: int
    exact: int | None
    lean: int | None

    @property
    def saved(self) -> int:
        """What the best conversion saves; 0 where none does."""
        return max(0, *(self.now - after for after in (self.exact, self.lean) if after is not None), 0)


class Ghosts:
    """Makes ghosts, and counts what they keep.

    Args:
        dtype: of their floating-point tensors; None is each tensor's own.

    >>> ghosts = Ghosts()
    >>> layer = ghosts.of(nn.BatchNorm1d(4))
    >>> ghosts.keeps(layer, torch.randn(8, 4))  # the input (8×4), mean and deviation (4 each), 4 bytes per number
    ({'': 160}, {'': (8, 4)})
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.on_gpu = False  # whether the last model was on one

    def of(self, model: nn.Module) -> nn.Module:
        """A copy of the model in training mode; no tensor of it is copied."""
        self.on_gpu = any(t.is_cuda for t in [*model.parameters(), *model.buffers()])
        memo: dict[int, Any] = {}
        # Computed tensors too, which deepcopy refuses: a hook's weight, a cache.
        for t in (leaf for module in model.modules() for leaf in tree_leaves(vars(module)) if isinstance(leaf, Tensor)):
            ghost = self._tensor(t)
            memo[id(t)] = nn.Parameter(ghost, t.requires_grad) if isinstance(t, nn.Parameter) else ghost
        try:
            return copy.deepcopy(model, memo).train()
        except TypeError as error:  # a lock, an open file
            raise ValueError(
                f"the model must allow copy.deepcopy, to be looked at without touching it: {error}"
            ) from error

    def _tensor(self, t: Tensor) -> Tensor:
        dtype = self.dtype if self.dtype is not None and t.is_floating_point() else t.dtype
        with self.mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=dtype, device="cpu")  # whatever the default is

    def compare(
        self, before: nn.Module, after: nn.Module, example_input: Any
    ) -> tuple[dict[str, Kept], dict[str, tuple[int, ...]], Kept]:
        """Bytes by layer, input shapes by layer, and the whole model's bytes; ``after`` is ``before`` converted."""
        kernels = self.on_gpu and not backends.TRITON_MISSING
        with backends.as_if_on_gpu() if kernels else contextlib.nullcontext():  # norms that are ours already
            now, inputs = self.keeps(before, example_input)
        exact: dict[str, int] | None = None
        lean: dict[str, int] | None = None
        if not backends.TRITON_MISSING:
            with backends.as_if_on_gpu():
                exact, lean = (self._with_memory(mode, after, example_input) for mode in ("exact", "lean"))
        # What a pool keeps is counted for the norm that takes it over: after the conversion they are one.
        norms = [module for module in after.modules() if isinstance(module, LpBatchNorm)]
        names = {module: name for name, module in after.named_modules()}
        for norm, pool in plan_fusion(after, norms, [n for n in norms if n.p == 1]).pools.items():
            for sizes in (now, exact, lean):
                if sizes is not None:
                    sizes[names[norm]] = sizes.get(names[norm], 0) + sizes.pop(names[pool], 0)

        def kept(total: Callable[[dict[str, int]], int]) -> Kept:
            return Kept(total(now), None if exact is None else total(exact), None if lean is None else total(lean))

        layers = {name: kept(partial(_size_of, name)) for name in inputs}
        return layers, inputs, kept(lambda sizes: sum(sizes.values()))

    def _with_memory(self, mode: str, ghost: nn.Module, example_input: Any) -> dict[str, int]:
        for module in ghost.modules():
            if isinstance(module, LpBatchNorm):
                module.memory = mode
        return self._sizes(ghost, example_input)

    def keeps(self, ghost: nn.Module, example_input: Any) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
        """Bytes that a forward pass keeps, and the shape of the first input, by the module that was running."""
        inputs: dict[str, tuple[int, ...]] = {}

        def enter(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for first in (*args, *kwargs.values())[:1]:
                if isinstance(first, Tensor):
                    inputs.setdefault(name, tuple(first.shape))

        sizes = self._sizes(ghost, example_input)  # without hooks: a module with hooks does not fuse
        handles = [
            module.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
            for name, module in ghost.named_modules()
        ]
        try:
            with self.mode, torch.no_grad():
                call(ghost, tree_map_only(Tensor, self._tensor, example_input))
        finally:
            for handle in handles:
                handle.remove()
        return sizes, inputs

    def _sizes(self, ghost: nn.Module, example_input: Any) -> dict[str, int]:
        own = {t.untyped_storage()._cdata for t in [*ghost.parameters(), *ghost.buffers()]}
        names = {module: name for name, module in ghost.named_modules()}
        kept: dict[int, tuple[str, Tensor]] = {}  # the tensors are held, so that no storage takes another's place

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()._cdata
            if storage not in own:
                kept[storage] = (_running(names), t)
            return t

        x = tree_map_only(Tensor, self._tensor, example_input)
        with self.mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.enable_grad():
            call(ghost, x)
        sizes: dict[str, int] = {}
        for name, t in kept.values():
            sizes[name] = sizes.get(name, 0) + t.untyped_storage().nbytes()
        return sizes


def _running(names: dict[nn.Module, str]) -> str:
    """The name of the module whose method runs, the innermost one."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self", frame.f_locals.get("norm"))
        if isinstance(module, nn.Module) and module in names:
            return names[module]
        frame = frame.f_back
    return ""


def _size_of(name: str, sizes: dict[str, int]) -> int:
    return sizes.get(name, 0)
