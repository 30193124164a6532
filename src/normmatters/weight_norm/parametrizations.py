"""The two weight norms as ``torch.nn.utils.parametrize`` parametrizations: the equation, and the state it needs.

BoundedWeight:  w_i = ρ · v_i / ‖v_i‖_p      one fixed ρ (F12, F13)
ClassicWeight:  w_i = g_i · v_i / ‖v_i‖_p    one learned g_i for each slice (F11)
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normmatters.functional.weight import bounded_weight, check_norm, check_rho, check_slices, has_values, slice_norm
from normmatters.weight_norm.precomputed import PrecomputedWeight


def initial_rho(v: Tensor, *, dim: int | None = 0, p: float = 2, k: int | None = None) -> Tensor:
    """ρ = ‖V‖_p / N^{1/p} over the N slices of V (F12, F13): the power mean of their norms. A scalar tensor.

    For Top(k), which F13 does not cover, the plain mean of the norms: at k = slice size this is L1's ρ. Slices that are
    exactly zero (an embedding's padding row) have no norm to preserve and are left out.

    Args:
        v: a weight of any shape.
        dim, p, k: what a slice is and how its norm is taken, as in :func:`bounded_weight_norm`.

    Example:
        >>> initial_rho(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))  # √((5² + 1²)/2)
        tensor(3.6056)
    """
    norms = slice_norm(v.detach(), dim=dim, p=p, k=k).flatten()
    if has_values(norms):
        norms = norms[norms != 0]
        if norms.numel() == 0:
            raise ValueError("rho cannot be taken from a weight that is zero everywhere")
    order = 1.0 if k is not None else float(p)
    largest = norms.max()  # F13 of norms/max: their powers may leave the dtype's range
    total: Tensor = largest * torch.linalg.vector_norm(norms / largest, order)
    return total / math.pow(norms.numel(), 1 / order)


def check_options(rho: float | str, project: bool) -> None:
    """Raise unless bounded weight norm takes these."""
    if not isinstance(rho, str):
        check_rho(rho)
    elif rho != "init":
        raise ValueError(f"rho must be 'init' or a positive number, got {rho!r}")
    if not isinstance(project, bool):
        raise TypeError(f"project must be True or False, got {project!r}")


class WeightNorm(nn.Module):
    """What both have: which slices, in which norm, and a place for a weight that was computed ahead."""

    def __init__(self, dim: int | None, p: float, k: int | None) -> None:
        check_norm(p, k)
        super().__init__()
        self.dim, self.p, self.k = dim, p, k
        self.precomputed = PrecomputedWeight()
        #: The parameters of the layer that came after the weight, so that removal puts it back in its place.
        self.followed_by: tuple[str, ...] = ()

    def compute(self, v: Tensor, rho: Tensor) -> Tensor:
        """ρ·v/‖v‖, where ρ may be classic weight norm's g."""
        weight = self.precomputed.weight_for(v, rho)
        if weight is None and not torch.compiler.is_compiling():
            weight = self.precomputed.recomputed(v, rho, self.p)
        return bounded_weight(v, rho, dim=self.dim, p=self.p, k=self.k) if weight is None else weight

    def v_and_rho(self, stack: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """What the weight is computed from; ``stack`` is the ``ParametrizationList`` that holds this alone.

        None for a parameter that is not there: DataParallel, flat FSDP and pruning put it elsewhere.
        """
        raise NotImplementedError

    def state_from_plain(self, weight: Tensor) -> dict[str, Tensor]:
        """The state entries for a checkpoint that holds a plain weight."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"dim={self.dim}, p={self.p}" + (f", k={self.k}" if self.k is not None else "")


class BoundedWeight(WeightNorm):
    """w_i = ρ · v_i / ‖v_i‖_p with a fixed ρ (F12, F13).

    ``rho`` is a scalar buffer in the state dict. It stays in fp32 or better when the module is cast to fp16 or bf16, so
    that a cast does not change the scale of the network. With ``project``, ``length`` is a buffer too: the initial
    ‖v_i‖_p of each slice, shaped to broadcast against v.

    Args:
        v: the weight to begin with, of any shape; ``rho="init"`` takes ρ from it.
        dim, p, rho, k, project: as in :func:`bounded_weight_norm`.

    Example:
        >>> weight = BoundedWeight(torch.ones(2, 4), rho=2.0)
        >>> weight(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([[1.2000, 1.6000],
                [0.0000, 2.0000]])
    """

    rho: Tensor
    length: Tensor | None

    def __init__(
        self,
        v: Tensor,
        *,
        dim: int | None = 0,
        p: float = 2,
        rho: float | Literal["init"] = "init",
        k: int | None = None,
        project: bool = False,
    ) -> None:
        check_slices(v, dim=dim, p=p, k=k)
        check_options(rho, project)
        if project and v.is_meta:
            raise ValueError("project=True needs the initialised weight, got one on the meta device")
        if isinstance(rho, str):
            if v.is_meta:
                raise ValueError("rho='init' needs the initialised weight, got one on the meta device; give a number")
            value = initial_rho(v, dim=dim, p=p, k=k)
            if has_values(value) and not value.isfinite():
                raise ValueError(f"rho cannot be taken from a weight with NaN or infinite values, got rho = {value}")
        else:
            value = _given_for(v, rho)
        super().__init__(dim, p, k)
        self.given = None if isinstance(rho, str) else float(rho)
        self.ndim = v.ndim
        self.register_buffer("rho", value)
        self.register_buffer("length", slice_norm(v.detach(), dim=dim, p=p, k=k) if project else None)

    def forward(self, v: Tensor) -> Tensor:
        return self.compute(v, self.rho)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """``module.weight = w`` sets v: the directions of w are taken over, its norms are not."""
        return weight

    def v_and_rho(self, stack: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        # Straight from the dictionaries: attributes of modules take longer than all the rest.
        return stack._parameters.get("original"), self._buffers["rho"]

    def state_from_plain(self, weight: Tensor) -> dict[str, Tensor]:
        """v, and the ρ and the lengths that this weight would have given."""
        rho = self.rho
        if self.given is None:
            rho = initial_rho(weight, dim=self.dim, p=self.p, k=self.k)
        elif rho.is_meta:
            rho = _given_for(weight, self.given)
        state = {"original": weight, "0.rho": rho}
        if self.length is not None:
            state["0.length"] = slice_norm(weight, dim=self.dim, p=self.p, k=self.k)
        return state

    def extra_repr(self) -> str:
        return super().extra_repr() + (", project=True" if self.length is not None else "")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        rho, length = self.rho, self.length
        super()._apply(fn, recurse)
        if self.rho.dtype in (torch.float16, torch.bfloat16):
            self.rho = rho.to(self.rho.device)
            self.length = None if length is None else length.to(self.rho.device)
        if rho.is_meta and not self.rho.is_meta and self.given is not None:
            self.rho.fill_(self.given)  # ``to_empty`` leaves whatever was in the memory
        return self


def _given_for(v: Tensor, rho: float) -> Tensor:
    """ρ as it is kept for a weight like ``v``."""
    return torch.full((), rho, dtype=torch.promote_types(v.dtype, torch.float32), device=v.device)


class ClassicWeight(WeightNorm):
    """w_i = g_i · v_i / ‖v_i‖_p with a learned g (F11; Salimans & Kingma at p = 2).

    State keys are those of ``torch.nn.utils.parametrizations.weight_norm``: ``original0`` is g, ``original1`` is v.

    Shape: v as the weight, g with 1 in place of every dimension but ``dim``.

    Example:
        >>> ClassicWeight()(torch.tensor([[10.0], [1.0]]), torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        tensor([[6., 8.],
                [0., 1.]])
    """

    def __init__(self, *, dim: int | None = 0, p: float = 2, k: int | None = None) -> None:
        super().__init__(dim, p, k)

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return self.compute(v, g)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return slice_norm(weight, dim=self.dim, p=self.p, k=self.k).to(weight.dtype), weight

    def v_and_rho(self, stack: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        return stack._parameters.get("original1"), stack._parameters.get("original0")

    def state_from_plain(self, weight: Tensor) -> dict[str, Tensor]:
        g, v = self.right_inverse(weight)
        return {"original0": g, "original1": v}


def weight_norm_of(module: nn.Module, name: str) -> BoundedWeight | ClassicWeight | None:
    """The weight norm of this library on ``module.<name>``, if that is the only parametrization there."""
    if not parametrize.is_parametrized(module, name):
        return None
    stack = list(module.parametrizations[name].children())  # type: ignore[index, union-attr]
    return stack[0] if len(stack) == 1 and isinstance(stack[0], BoundedWeight | ClassicWeight) else None


def weight_norms(module: nn.Module) -> Iterator[tuple[str, Any, BoundedWeight | ClassicWeight]]:
    """(name, its ``ParametrizationList``, its weight norm) of each weight for which `weight_norm_of` finds one."""
    if parametrize.is_parametrized(module):
        for name, stack in module.parametrizations.items():  # type: ignore[union-attr, operator]
            if (norm := weight_norm_of(module, name)) is not None:
                yield name, stack, norm
