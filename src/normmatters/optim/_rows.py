"""Channels of many weights side by side in one row of numbers: the shared arithmetic of `normmatters.optim`.

A *channel* is one slice of a weight along its channel dimension `dim`: `w[c]` for a convolution or a linear layer
(`dim=0`), `w[:, c]` for a transposed convolution (`dim=1`), the whole tensor for `dim=None`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normmatters.functional.statistic import compute_dtype

__all__ = ["Channels", "Named", "TestedChannels", "angular_update", "channel_norms", "effective_step_size"]


def _reduced(ndim: int, dim: int | None) -> tuple[int, ...]:
    """The dimensions that a channel's norm sums over."""
    if dim is None:
        return tuple(range(ndim))
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        raise ValueError(f"dim must lie in [{-ndim}, {ndim}) for a weight with {ndim} dimensions, got {dim}")
    return tuple(d for d in range(ndim) if d != dim % ndim)


def channel_norms(w: Tensor, dim: int | None = 0, *, out: Tensor | None = None) -> Tensor:
    """L2 norm of every channel of `w`, accumulated in float32 (float64 for a float64 weight).

    Args:
        w: a weight of any shape.
        dim: its channel dimension; `None` takes the whole tensor as one channel.

    Returns:
        `[w.shape[dim]]`, or `[1]` for `dim=None`.

    >>> channel_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    tensor([5., 2.])
    """
    reduced = _reduced(w.ndim, dim)
    if dim is None:
        w, dim, reduced = w.unsqueeze(0), 0, tuple(range(1, w.ndim + 1))
    dtype = compute_dtype(w.dtype)
    if out is not None and reduced and out.device == w.device and out.dtype == dtype:
        torch.linalg.vector_norm(w, dim=reduced, dtype=dtype, out=out)
        return out
    # A vector's channels are its elements; vector_norm takes no dimensions for all of them.
    norms = torch.linalg.vector_norm(w, dim=reduced, dtype=dtype) if reduced else w.abs().to(dtype)
    return norms if out is None else out.copy_(norms)


def shaped(row: Tensor, w: Tensor, dim: int | None) -> Tensor:
    """`row` `[channels]` as a view that broadcasts against `w`; `dim` may count from the end."""
    return row.view([-1 if d == dim % w.ndim else 1 for d in range(w.ndim)] if dim is not None else [1] * w.ndim)


def effective_step_size(w: Tensor, lr: float | Tensor, dim: int | None = 0, *, exponent: float = 2.0) -> Tensor:
    """Effective step size η/‖w‖² of every channel: how far a gradient step turns a scale-invariant weight (F2).

    Args:
        w: a weight of any shape.
        lr: learning rate η.
        dim: channel dimension; `None` for the whole layer.
        exponent: 2 for SGD. Adam divides by the gradient's size, so its step turns the weight by η/‖w‖: exponent 1.

    Returns:
        `[channels]`; `inf` for a channel of norm zero.

    >>> effective_step_size(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), lr=0.1)
    tensor([0.0040, 0.0250])
    """
    return lr / channel_norms(w.detach(), dim) ** exponent


def half_angle_tangent(a: Tensor, b: Tensor, d: Tensor) -> Tensor:
    """tan(θ/2) of the angle θ between two vectors from their lengths `a`, `b` and distance `d`; nan where one is 0.

    tan²(θ/2) = (d² − (a−b)²)/((a+b)² − d²). Factored, it keeps its digits at the tiny angles of one training step,
    where the arc cosine of a dot product in float32 returns noise; a and b must be of nearly one size for that.
    """
    difference, total = a - b, a + b
    opposite = ((d - difference) * (d + difference)).clamp_(min=0)
    adjacent = ((total - d) * (total + d)).clamp_(min=0)
    return (opposite / adjacent).sqrt_()


def triangle_angle(a: Tensor, b: Tensor, d: Tensor) -> Tensor:
    """Angle between two vectors from their lengths `a`, `b` and distance `d`; see `half_angle_tangent`."""
    return 2 * half_angle_tangent(a, b, d).atan()


def angular_update(before: Tensor, after: Tensor, dim: int | None = 0) -> Tensor:
    """Angle in radians by which every channel turned from `before` to `after`; for plain SGD tan θ = η‖∇L(ŵ)‖/‖w‖².

    Args:
        before, after: the same weight at two moments, one shape.
        dim: channel dimension; `None` for the whole layer.

    Returns:
        `[channels]`, in [0, π]; nan where either channel has norm zero.

    >>> angular_update(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]))
    tensor([0.7854])
    """
    if before.shape != after.shape:
        raise ValueError(f"before and after must have one shape, got {tuple(before.shape)} and {tuple(after.shape)}")
    # Kahan's form on unit vectors: no digit is lost at small angles, nor where the norm changes much.
    one, two = (
        w.detach().to(compute_dtype(w.dtype)) / shaped(channel_norms(w.detach(), dim), w, dim) for w in (before, after)
    )
    return 2 * torch.atan2(channel_norms(two - one, dim), channel_norms(two + one, dim))


@runtime_checkable
class TestedChannels(Protocol):
    """What `scale_invariant_parameters` returns: names, parameters, and the channel dimension the test found."""

    @property
    def dims(self) -> Mapping[str, int | None]: ...
    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


Named = nn.Module | TestedChannels | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""The ways to say which weights are meant, with their names."""

# Parts that torch.compile and checkpoint_wrapper put into names, of single blocks too. DDP's is `module`: only at the
# front, for a user may have one.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """`name` without the parts of DDP and `torch.compile`, so that a recording fits the bare model too."""
    name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    while name.startswith("module."):
        name = name.split(".", 1)[1]
    return name


def check_pairs(pairs: Iterable[object]) -> None:
    """Raise on what is no (name, tensor)."""
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            kinds = [type(part).__name__ for part in pair] if isinstance(pair, tuple) else []
            got = f"({', '.join(kinds)})" if kinds else type(pair).__name__
            raise TypeError(f"expected (name, tensor) pairs, as model.named_parameters() gives, got {got}")


def resolve(
    source: Named, dims: Mapping[str, int | None] | None = None
) -> tuple[dict[str, Tensor], dict[str, int | None]]:
    """Names, weights and channel dimensions of whatever the user passed.

    A module gives all its weights with two or more dimensions, `dim=1` for transposed convolutions.
    """
    found: dict[str, int | None] = {}
    pairs: list[tuple[str, Tensor]]
    if isinstance(source, nn.Module):
        pairs = [(n, p) for n, p in source.named_parameters() if p.ndim >= 2]
        transposed = [m for m in source.modules() if isinstance(m, nn.modules.conv._ConvTransposeNd)]
        theirs = {id(p) for m in transposed for p in m.parameters()}  # a computed weight's parameters lie deeper
        found = {plain_name(n): 1 for n, p in pairs if id(p) in theirs}
    elif isinstance(source, TestedChannels):
        pairs = [*source.named_parameters()]
        found = dict(source.dims)
    elif isinstance(source, Tensor | str) or not isinstance(source, Iterable):
        raise TypeError(f"expected a module, a mapping or (name, tensor) pairs, got {type(source).__name__}")
    else:
        pairs = [*(source.items() if isinstance(source, Mapping) else source)]
    check_pairs(pairs)
    named: dict[str, Tensor] = {}
    for pair in pairs:
        name = plain_name(pair[0])
        if name in named:
            raise ValueError(f"the name {name!r} appears twice")
        named[name] = pair[1]
    if not named:
        raise ValueError("no weights to work on: the model or the mapping has none")
    unknown = set(dims or ()) - set(named)
    if unknown:
        raise ValueError(f"dims names weights that are not here: {sorted(unknown)}")
    found |= dims or {}
    return named, {n: found.get(n, 0 if w.ndim >= 2 else None) for n, w in named.items()}


class Channels:
    """The channels of named weights as one row of `total` numbers, with the multi-tensor arithmetic on it.

    Args:
        named: name → weight.
        dims: name → channel dimension, `None` for the whole tensor.
    """

    def __init__(self, named: Mapping[str, Tensor], dims: Mapping[str, int | None]) -> None:
        for name, w in named.items():
            if hasattr(w, "full_tensor"):  # a DTensor; its class takes long to import
                raise TypeError(f"{name!r} must be a whole weight, got shards over several processes (fully_shard)")
            if not w.is_floating_point() or w.numel() == 0:
                raise ValueError(f"{name!r} must be a non-empty floating-point tensor, got {tuple(w.shape)} {w.dtype}")
            try:
                _reduced(w.ndim, dims[name])
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from None
        self.names = list(named)
        self.weights = [named[n] for n in self.names]
        self.dims = [None if (d := dims[n]) is None else d % named[n].ndim for n in self.names]
        self.sizes = [1 if d is None else w.shape[d] for w, d in zip(self.weights, self.dims)]
        self.total = sum(self.sizes)
        self.device = self.weights[0].device
        self.dtype = max((compute_dtype(w.dtype) for w in self.weights), key=lambda t: t.itemsize)

    def new_row(self) -> Tensor:
        """`[total]` zeros on the weights' device."""
        return torch.zeros(self.total, dtype=self.dtype, device=self.device)

    def split(self, row: Tensor) -> dict[str, Tensor]:
        """Views of `row` `[..., total]`, one `[..., channels]` a weight."""
        return dict(zip(self.names, row.split(self.sizes, dim=-1)))

    def norms(self) -> Tensor:
        """`[total]`, the norm of every channel: one kernel a weight, straight into its slice, no host sync."""
        row = self.new_row()
        for w, dim, out in zip(self.weights, self.dims, row.split(self.sizes)):
            channel_norms(w.detach(), dim, out=out)
        return row

    def broadcast(self, row: Tensor) -> list[Tensor]:
        """Views of `row` that broadcast against the weights."""
        parts = zip(self.weights, self.dims, row.split(self.sizes))
        return [shaped(part, w, dim).to(w.device) for w, dim, part in parts]

    def check_nonzero(self, row: Tensor, what: str) -> None:
        """Raise where `row` holds a zero or non-finite norm: a direction is not defined there."""
        for name, part in self.split(row).items():
            bad = (~(part > 0) | part.isinf()).nonzero()
            if len(bad):
                raise ValueError(
                    f"{what} of channel {int(bad[0, -1])} of {name!r} must be positive and finite, "
                    f"got {part[tuple(bad[0])].item()}: a weight of norm zero has no direction"
                )

    def groups(self, optimizer: Optimizer) -> list[int]:
        """For every weight, the index of the optimizer's parameter group that holds it."""
        where = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        missing = [n for n, w in zip(self.names, self.weights) if id(w) not in where]
        if missing:
            raise ValueError(
                f"the optimizer does not hold {missing[0]!r} ({len(missing)} of {len(self.names)} missing)"
            )
        return [where[id(w)] for w in self.weights]

    def check_norms_are_free(self, optimizer: Optimizer) -> None:
        """Raise where more than the steps moves these norms: weight decay, an angular optimizer, a second name."""
        first = dict[int, str]()
        for name, weight, index in zip(self.names, self.weights, self.groups(optimizer)):
            group = optimizer.param_groups[index]
            if group.get("angular"):
                raise ValueError(
                    f"{name!r} is turned by an angle, whatever its norm, which is kept: move the angle's learning rate "
                    "instead, or put it in a group with angular=False"
                )
            if (group.get("weight_decay") or 0) != 0:
                raise ValueError(
                    f"{name!r} must be trained without weight decay here, its group has "
                    f"weight_decay={group['weight_decay']}: put scale-invariant weights in a group with weight_decay=0 "
                    "(see split_parameters)"
                )
            if (other := first.setdefault(id(weight), name)) != name:
                raise ValueError(f"{other!r} and {name!r} are one tensor, which would be rescaled twice: name it once")

    def check_norms_stay_free(self, optimizer: Optimizer, groups: Iterable[int]) -> None:
        """Raise where one of these weights' ``groups`` decays since ``check_norms_are_free``: cheap, for every step."""
        if any(optimizer.param_groups[index].get("weight_decay") for index in groups):
            self.check_norms_are_free(optimizer)
