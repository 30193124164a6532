"""Channel arithmetic: norms, angles, rotation and rescaling of the channels of weights.

A *channel* is one slice of a weight along its channel dimension ``dim``: ``w[c]`` for a convolution or a linear layer
(``dim=0``), ``w[:, c]`` for a transposed convolution (``dim=1``), the whole tensor for ``dim=None``.

The file goes from one weight to many:

1. the equations for one weight (`channel_norms`, `effective_step_size`, `angular_update`, `rotate_channel_`);
2. how a user names weights (`named_weights`), and `Channels`, the channels of many weights side by side in one row;
3. work on many weights at once (`ChannelRotator`, `ChannelMeter`, `ChannelScaler`), by the backend in `BACKENDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normmatters.kernels.backends import TRITON_MISSING
from normmatters.kernels.operators import on_device
from normmatters.norm import compute_dtype
from normmatters.optim.invariance import ScaleInvariantParameters
from normmatters.probe import plain_name


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
    # The channels of a vector are its elements; vector_norm does not take an empty list of dimensions for that.
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

    tan²(θ/2) = (d² − (a−b)²)/((a+b)² − d²). In factors it keeps its digits at the tiny angles of one training step,
    where the arc cosine of a float32 dot product is noise. For that, a and b must be of nearly the same size.
    """
    difference, total = a - b, a + b
    opposite = ((d - difference) * (d + difference)).clamp_(min=0)
    adjacent = ((total - d) * (total + d)).clamp_(min=0)
    return (opposite / adjacent).sqrt_()


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


def rotate_channel_(
    weight: Tensor, direction: Tensor, grad: Tensor, norm: Tensor, angle: float | Tensor, dim: int | None = 0
) -> None:
    """Turn every channel w of ``weight`` by ``angle`` away from its channel d of ``direction``, in place.

    w ← ρ(cos θ·ŵ − sin θ·d̂⊥), where d⊥ = d − ⟨d, ŵ⟩ŵ. The angle and the new norm ρ are exact. A channel without a
    gradient, or with a direction parallel to w, does not turn. A channel that is 0 (pruned since its norm was taken)
    has no direction and stays 0.

    Args:
        weight, direction, grad: one shape.
        norm: ρ of every channel, `[weight.shape[dim]]`, or `[1]` for ``dim=None``.
        angle: θ in radians, a number or a 0-dim tensor.
        dim: channel dimension; None takes the whole tensor as one channel.
    """
    dims, dtype = _reduced(weight.ndim, dim), compute_dtype(weight.dtype)
    w, d, rho = weight.to(dtype), direction.to(dtype), shaped(norm.to(dtype), weight, dim)
    length = torch.linalg.vector_norm(w, dim=dims, keepdim=True)
    pruned = length.square() == 0
    length, rho = torch.where(pruned, 1.0, length), torch.where(pruned, 0.0, rho)
    along = (w * d).sum(dims, keepdim=True) / length.square()
    # Subtract first, square then: ‖d‖² − ⟨d, ŵ⟩² would lose the digits of a direction that is nearly parallel to w.
    perpendicular = d - along * w
    size = torch.linalg.vector_norm(perpendicular, dim=dims, keepdim=True)
    rounding = 16 * torch.finfo(dtype).eps * torch.linalg.vector_norm(d, dim=dims, keepdim=True)
    turns = (grad != 0).any(dims, keepdim=True) & (size > rounding)
    theta = torch.where(turns, torch.as_tensor(angle, dtype=dtype, device=weight.device), 0.0)
    size = torch.where(turns, size, 1.0)
    weight.copy_(theta.cos() * (rho / length) * w - theta.sin() * (rho / size) * perpendicular)


Named = nn.Module | ScaleInvariantParameters | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""The ways to name weights."""


def check_pairs(pairs: Iterable[object]) -> None:
    """Raise on anything but (name, tensor)."""
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            kinds = [type(part).__name__ for part in pair] if isinstance(pair, tuple) else []
            got = f"({', '.join(kinds)})" if kinds else type(pair).__name__
            raise TypeError(f"expected (name, tensor) pairs, as model.named_parameters() gives, got {got}")


def named_weights(
    source: Named, dims: Mapping[str, int | None] | None = None
) -> tuple[dict[str, Tensor], dict[str, int | None]]:
    """Name → weight and name → channel dimension of what the user passed.

    A module gives all its weights of two or more dimensions, with `dim=1` for transposed convolutions. ``dims``
    overrides.
    """
    known: dict[str, int | None] = {}
    pairs: list[tuple[str, Tensor]]
    if isinstance(source, nn.Module):
        pairs = [(n, p) for n, p in source.named_parameters() if p.ndim >= 2]
        # All parameters below a transposed convolution: a weight that is computed has its parameters deeper.
        transposed = (m for m in source.modules() if isinstance(m, nn.modules.conv._ConvTransposeNd))
        theirs = {id(p) for m in transposed for p in m.parameters()}
        known = {plain_name(n): 1 for n, p in pairs if id(p) in theirs}
    elif isinstance(source, ScaleInvariantParameters):
        pairs, known = [*source.named_parameters()], dict(source.dims)
    elif isinstance(source, Tensor | str) or not isinstance(source, Iterable):
        raise TypeError(f"expected a module, a mapping or (name, tensor) pairs, got {type(source).__name__}")
    else:
        pairs = [*(source.items() if isinstance(source, Mapping) else source)]
    check_pairs(pairs)
    named: dict[str, Tensor] = {}
    for name, weight in pairs:
        if (name := plain_name(name)) in named:
            raise ValueError(f"the name {name!r} appears twice")
        named[name] = weight
    if not named:
        raise ValueError("no weights to work on: the model or the mapping has none")
    if unknown := set(dims or ()) - set(named):
        raise ValueError(f"dims names weights that are not here: {sorted(unknown)}")
    known |= dims or {}
    return named, {n: known.get(n, 0 if w.ndim >= 2 else None) for n, w in named.items()}


class Channels:
    """The channels of many weights, side by side in one row of `total` numbers.

    Args:
        named: name → weight.
        dims: name → channel dimension, `None` for the whole tensor.
    """

    def __init__(self, named: Mapping[str, Tensor], dims: Mapping[str, int | None]) -> None:
        for name, w in named.items():
            if hasattr(w, "full_tensor"):  # a DTensor; importing its class takes long
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
        """`[total]` zeros on the device of the weights."""
        return torch.zeros(self.total, dtype=self.dtype, device=self.device)

    def split(self, row: Tensor) -> dict[str, Tensor]:
        """Name → view `[..., channels]` of ``row`` `[..., total]`."""
        return dict(zip(self.names, row.split(self.sizes, dim=-1)))

    def broadcast(self, row: Tensor) -> list[Tensor]:
        """Views of `row` that broadcast against the weights."""
        parts = zip(self.weights, self.dims, row.split(self.sizes))
        return [shaped(part, w, dim).to(w.device) for w, dim, part in parts]

    def check_nonzero(self, row: Tensor, what: str) -> None:
        """Raise where `row` holds a norm that is zero or not finite: there is no direction."""
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
        """Raise where more than steps moves these norms, or one is 0: weight decay, an angle, a second name."""
        first = dict[int, str]()
        for name, weight, index in zip(self.names, self.weights, self.groups(optimizer)):
            group = optimizer.param_groups[index]
            if group.get("angular"):
                raise ValueError(
                    f"{name!r} is turned by a fixed angle and keeps its norm: schedule the angle's learning rate "
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
        norms = [channel_norms(w.detach(), dim).to(self.device) for w, dim in zip(self.weights, self.dims)]
        self.check_nonzero(torch.cat(norms), "the norm")

    def check_norms_stay_free(self, optimizer: Optimizer, groups: Iterable[int]) -> None:
        """Raise where one of these weights' ``groups`` has weight decay by now: cheap enough for every step."""
        if any(optimizer.param_groups[index].get("weight_decay") for index in groups):
            self.check_norms_are_free(optimizer)


# The backend on each kind of device: the module with `RotationPlan`, `RowNormsPlan` and `RowScalesPlan`, each of which
# works on all its weights in one call, and the dtypes that they take. What is not listed, or not laid out in rows, gets
# the plain PyTorch below.
BACKENDS: dict[str, str] = {"cpu": "normmatters.kernels.cpu.optimizer_rows"}
if not TRITON_MISSING:
    BACKENDS["cuda"] = "normmatters.kernels.triton.rows"
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
_Work = Literal["ROTATED", "MEASURED"]


def _backend_for(work: _Work, weight: Tensor, dim: int | None, number: Tensor, alike: Sequence[Tensor]) -> Any:
    """The module of `BACKENDS` that takes the weight: its channels are rows in memory. None where none does.

    A backend gets addresses alone, so ``alike`` must agree with the weight in dtype, device and strides, and the
    numbers of its channels must be of the dtype that it is computed in.
    """
    if dim != 0 or weight.device.type not in BACKENDS or weight.numel() == 0 or hasattr(weight, "full_tensor"):
        return None  # the last is a shard (DTensor)
    backend = importlib.import_module(BACKENDS[weight.device.type])
    dtypes = [*map(_DTYPE, alike), number.dtype]
    if dtypes != [weight.dtype] * len(alike) + [compute_dtype(weight.dtype)]:
        return None
    if any(x.device != weight.device for x in (*alike, number)):
        return None
    length = weight.numel() // weight.shape[0]
    if weight.dtype not in getattr(backend, work) or length > backend.LONGEST_ROW:
        return None
    if all(x.is_contiguous() for x in (weight, *alike)):
        return backend
    # Each slice along dimension 0 must fill one stretch of memory, in any order inside: channels_last is dense too.
    rows = weight.stride(0) == length and torch.ops.aten.is_non_overlapping_and_dense(weight)
    return backend if rows and all(x.stride() == weight.stride() for x in alike) else None


class Momentum(NamedTuple):
    """How a buffer b takes in the gradient before its weight turns away from it: b ← decay·b + sign·g.

    In Nesterov's form the weight turns away from decay·b + sign·g.
    """

    decay: float
    sign: float = 1.0
    nesterov: bool = False

    def take_in_(self, buffers: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """The directions; the buffers themselves, or in Nesterov's form new tensors."""
        torch._foreach_mul_(buffers, self.decay)
        torch._foreach_add_(buffers, grads, alpha=self.sign)
        if not self.nesterov:
            return buffers
        directions = list(torch._foreach_mul(buffers, self.decay))
        torch._foreach_add_(directions, grads, alpha=self.sign)
        return directions


class _PlannedWork:
    """Work on the channels of many weights: one launch for all that a backend takes at once, plain PyTorch for others.

    The split is remembered, and renewed when the layout changes. It is no state: a copy makes its own.

    Attributes:
        launches: (indices of weights, plan of a backend).
        plain: indices of the weights that plain PyTorch works on.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[list[int], Any]] = []
        self.plain: list[int] = []
        self._layout: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"launches": [], "plain": [], "_layout": None}

    def _split(
        self,
        work: _Work,
        weights: list[Tensor],
        dims: Sequence[int | None],
        numbers: Sequence[Tensor],
        alike: Sequence[list[Tensor]],
        plan: Callable[[Any, list[int]], Any],
    ) -> None:
        """Plan anew. ``plan`` makes a backend's plan for some weights; the others are as in `_backend_for`."""
        taken: dict[Any, list[int]] = {}
        for i, (weight, dim, number) in enumerate(zip(weights, dims, numbers)):
            backend = _backend_for(work, weight, dim, number, [xs[i] for xs in alike])
            taken.setdefault(backend and (backend, weight.device, weight.dtype), []).append(i)
        self.plain = taken.pop(None, [])
        self.launches = [(indices, plan(backend, indices)) for (backend, *_), indices in taken.items()]


class ChannelRotator(_PlannedWork):
    """`rotate_channel_` for lists of tensors."""

    def __call__(
        self,
        weights: list[Tensor],
        directions: list[Tensor],
        grads: list[Tensor],
        norms: list[Tensor],
        angle: float | Tensor,
        dim: int | None,
        momentum: Momentum | None = None,
    ) -> None:
        """As in `rotate_channel_`; with ``momentum`` the directions are buffers that take in the gradients first."""
        lists = (weights, directions, grads)
        # By `map`: for the many tensors of a model this is most of the host's time for a step.
        layout = [[*map(read, chain(*lists))] for read in (Tensor.stride, Tensor.get_device, _DTYPE)]
        layout += [[*map(_SHAPE, weights)], [dim, momentum is not None and (momentum.nesterov,)]]
        if layout != self._layout:
            form = "GIVEN" if momentum is None else "NESTEROV" if momentum.nesterov else "MOMENTUM"

            def plan(backend: Any, indices: list[int]) -> Any:
                return backend.RotationPlan([weights[i] for i in indices], getattr(backend, form))

            self._split("ROTATED", weights, [dim] * len(weights), norms, (directions, grads), plan)
            self._layout = layout
        if self.plain:
            ws, ds, gs = ([xs[i] for i in self.plain] for xs in lists)
            ds = ds if momentum is None else momentum.take_in_(ds, gs)
            for i, w, d, g in zip(self.plain, ws, ds, gs):
                rotate_channel_(w, d, g, norms[i], angle, dim)
        decay, sign = (0.0, 1.0) if momentum is None else momentum[:2]
        for indices, rotate in self.launches:
            chosen = ([xs[i] for i in indices] for xs in (*lists, norms))
            with on_device(weights[indices[0]].device):
                rotate(*chosen, angle, decay, sign)


class _RowWork(_PlannedWork):
    """Work with one row of numbers for the channels of many weights, which stay where they are."""

    def __init__(self, channels: Channels, row: Tensor) -> None:
        super().__init__()
        self.channels, self.row = channels, row
        self.previous: list[Tensor] = []

    def _plan(self, backend: Any, indices: list[int]) -> Any:
        """The backend's plan for some of the weights."""
        raise NotImplementedError

    def _work(self, indices: list[int]) -> None:
        """The work on the others in plain PyTorch."""
        raise NotImplementedError

    def _run(self) -> None:
        """The plain work, then the launches, which overwrite what it did to the whole row."""
        weights = self.channels.weights
        # A model may be moved or change its memory format; to look is cheaper than to plan every time.
        layout = [[*map(read, weights)] for read in (Tensor.data_ptr, Tensor.stride, _DTYPE)]
        if layout != self._layout:
            alike = [self.previous] if self.previous else []
            self._split("MEASURED", weights, self.channels.dims, [self.row] * len(weights), alike, self._plan)
            self._layout = layout
        if self.plain:
            self._work(self.plain)
        with on_device(self.row.device):
            for _, launch in self.launches:
                launch()


class ChannelMeter(_RowWork):
    """Norm of every channel of many weights, and how far it turned since the last reading: one row of numbers.

    Attributes:
        row: `[total]` norms, with ``angle`` followed by `[total]` tangents of half the angle, tan(θ/2). The arc tangent
            is left to the reader of the recording, because not every step is looked at.
        previous: with ``angle`` the weights of the last reading; empty before `start`.
    """

    def __init__(self, channels: Channels, angle: bool) -> None:
        row = torch.zeros(channels.total * (2 if angle else 1), dtype=channels.dtype, device=channels.device)
        super().__init__(channels, row)
        self._angle = angle

    def start(self) -> None:
        """Take the present weights as those of the last reading."""
        if self._angle:
            self.previous = [w.detach().clone() for w in self.channels.weights]
        self._layout = None

    @torch.no_grad()
    def read_(self) -> Tensor:
        """Measure all channels; returns `row`, which the next reading overwrites. No host sync."""
        self._run()
        return self.row

    def _plan(self, backend: Any, indices: list[int]) -> Any:
        norms, *tangents = [part.split(self.channels.sizes) for part in self.row.split(self.channels.total)]
        lists = [self.channels.weights, norms, *((self.previous, *tangents) if self._angle else ())]
        return backend.RowNormsPlan(*([xs[i] for i in indices] for xs in lists))

    def _work(self, indices: list[int]) -> None:
        channels, total = self.channels, self.channels.total
        weights, old = [channels.weights[i] for i in indices], self.row[:total].clone() if self._angle else None

        def measure(tensors: list[Tensor], row: Tensor) -> None:
            parts = row.split(channels.sizes)
            for i, tensor in zip(indices, tensors):
                channel_norms(tensor, channels.dims[i], out=parts[i])

        measure(weights, self.row[:total])
        if old is not None:
            previous, distance = [self.previous[i] for i in indices], channels.new_row()
            torch._foreach_sub_(previous, weights)
            measure(previous, distance)
            torch._foreach_copy_(previous, weights)
            # On the whole row, in few operations; a backend overwrites the tangents of its weights afterwards.
            self.row[total:] = half_angle_tangent(old, self.row[:total], distance)


class ChannelScaler(_RowWork):
    """Multiply every channel of many weights by its own factor, in place.

    Args:
        channels: the channels of the weights.
        row: `[total]`, the factor of each channel.
    """

    @torch.no_grad()
    def scale_(self) -> None:
        """Scale the weights by what ``row`` holds now. No host sync."""
        self._run()

    def _plan(self, backend: Any, indices: list[int]) -> Any:
        lists = (self.channels.weights, self.row.split(self.channels.sizes))
        return backend.RowScalesPlan(*([xs[i] for i in indices] for xs in lists))

    def _work(self, indices: list[int]) -> None:
        factors = self.channels.broadcast(self.row)
        torch._foreach_mul_([self.channels.weights[i] for i in indices], [factors[i] for i in indices])
