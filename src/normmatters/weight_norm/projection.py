"""Projected bounded weight norm: after every optimizer step each v_i gets its initial norm back.

    v_i ← v_i · ‖v_i(0)‖_p / ‖v_i‖_p

Only the direction of v enters the weight, so this changes no output. It changes the steps: a step of size η turns v by
an angle proportional to η/‖v‖², and ‖v‖ grows in training. With ‖v‖ at its initial value the effective step stays η.

The forward pass does not write into v: checkpointed, compiled and repeated passes are those of bounded weight norm. A
hook that is common to all ``torch.optim`` optimizers projects after their steps, when sharded parameters are sharded
again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it imports the compiler only when called
from torch.optim.optimizer import register_optimizer_step_post_hook

from normmatters.functional.weight import slice_norm
from normmatters.weight_norm.parametrizations import BoundedWeight, weight_norms

_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def project_weights(model: nn.Module) -> None:
    """Give every projected v of ``model`` its initial norm back, in place.

    ``torch.optim`` optimizers do this after each step. Call it after steps of another kind, or after writing into v.

    Args:
        model: any module; weights without ``project=True`` stay as they are.

    Example:
        >>> layer = bounded_weight_norm(nn.Linear(3, 2), project=True)
        >>> v = layer.parametrizations.weight.original
        >>> before = v.detach().clone()
        >>> with torch.no_grad():
        ...     _ = v.mul_(5)
        >>> project_weights(layer)
        >>> torch.allclose(v, before)
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module, got {type(model).__name__}")
    _project_all(model.modules())


def watch(owner: nn.Module) -> None:
    """Project the weights of this parametrized module after each optimizer step from now on."""
    if any(_projected(owner)):
        _watched.add(owner)
        _hook_into_optimizers()


def _projected(owner: nn.Module) -> Iterator[tuple[Tensor, BoundedWeight]]:
    for _, stack, norm in weight_norms(owner):
        if isinstance(norm, BoundedWeight) and norm.length is not None:
            v, _ = norm.v_and_rho(stack)
            if v is not None:
                yield v, norm


@functools.cache
def _hook_into_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


@_disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _project_all(
        list(_watched), {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    )


def _project_all(owners: Iterable[nn.Module], among: set[int] | None = None) -> None:
    """Project each v once, though it may be shared; ``among`` these ids, or all."""
    found = {id(v): (v, norm) for owner in owners for v, norm in _projected(owner)}
    for key, (v, norm) in found.items():
        if among is None or key in among:
            _project(v, norm)


@torch.no_grad()
def _project(v: Tensor, norm: BoundedWeight) -> None:
    length = norm.length
    assert length is not None
    if v.ndim != norm.ndim:
        raise RuntimeError(
            f"project=True needs whole slices of v, got a shard of shape {tuple(v.shape)}: flat sharding cuts through "
            "them, use fully_shard"
        )
    if hasattr(v, "device_mesh"):  # a DTensor, with which a plain tensor does not mix
        from torch.distributed.tensor import DTensor, Replicate

        length = DTensor.from_local(length, v.device_mesh, [Replicate()] * v.device_mesh.ndim, run_check=False)
    now = slice_norm(v, dim=norm.dim, p=norm.p, k=norm.k)
    v.copy_(v.to(now.dtype) * (length / torch.where(now == 0, 1, now)))
