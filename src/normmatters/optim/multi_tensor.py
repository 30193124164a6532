"""Row arithmetic over lists of weights: the one place where optimizers and the recorder touch the numbers.

`ChannelTurner`, `ChannelMeter` and `ChannelScaler` are the boundary: plain PyTorch for any tensor, one Triton launch
for all weights on a GPU whose channels are rows.
"""

from __future__ import annotations

import abc
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normmatters.functional.statistic import compute_dtype
from normmatters.kernels.backends import TRITON_MISSING
from normmatters.kernels.operators import on_device
from normmatters.optim._rows import Channels, _reduced, channel_norms, half_angle_tangent

_LAUNCH_ON = () if TRITON_MISSING else ("cuda",)  # devices whose weights go to the kernels
_ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LONGEST_ROW = 2**16  # one program goes along a whole row; a longer one is better off with many
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


def rotate_channel_(
    weight: Tensor, direction: Tensor, grad: Tensor, norm: Tensor, angle: float | Tensor, dim: int | None = 0
) -> None:
    """Turn every channel w of ``weight`` by ``angle`` away from its channel d of ``direction``, in place.

    w ← ρ(cos θ·ŵ − sin θ·d̂⊥), where d⊥ = d − ⟨d, ŵ⟩ŵ. The angle is exact and so is the new norm ρ. A channel with no
    gradient, or whose direction lies along w, keeps its direction. One that is 0 (pruned since its norm was taken) has
    none, and stays 0.

    Args:
        weight, direction, grad: one shape.
        norm: ρ of every channel, `[weight.shape[dim]]`, or `[1]` for ``dim=None``.
        angle: θ in radians, a number or a 0-dim tensor.
        dim: channel dimension; None takes the whole tensor as one channel.

    >>> w = torch.tensor([[1.0, 0.0]])
    >>> rotate_channel_(w, torch.tensor([[5.0, 5.0]]), torch.ones(1, 2), torch.ones(1), 0.5235988)
    >>> w
    tensor([[ 0.8660, -0.5000]])
    """
    dims, dtype = _reduced(weight.ndim, dim), compute_dtype(weight.dtype)
    w, d = weight.to(dtype), direction.to(dtype)
    shape = [1] * weight.ndim
    if dim is not None:
        shape[dim] = -1
    length = torch.linalg.vector_norm(w, dim=dims, keepdim=True)
    still = length.square() == 0  # 0 · w below
    length, rho = torch.where(still, 1.0, length), torch.where(still, 0.0, norm.to(dtype).view(shape))
    along = (w * d).sum(dims, keepdim=True) / length.square()
    # Subtract first, square after: ‖d‖² − ⟨d, ŵ⟩² would lose the digits of a direction that is nearly along w.
    perpendicular = d - along * w
    size = torch.linalg.vector_norm(perpendicular, dim=dims, keepdim=True)
    rounding = 16 * torch.finfo(dtype).eps * torch.linalg.vector_norm(d, dim=dims, keepdim=True)
    turns = (grad != 0).any(dims, keepdim=True) & (size > rounding)
    theta = torch.where(turns, torch.as_tensor(angle, dtype=dtype, device=weight.device), 0.0)
    size = torch.where(turns, size, 1.0)
    weight.copy_(theta.cos() * (rho / length) * w - theta.sin() * (rho / size) * perpendicular)


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


class ChannelTurner:
    """`rotate_channel_` for lists of tensors, one launch for all that one launch can take.

    It remembers from step to step which these are, and looks again only where a shape, a stride, a dtype or a device is
    another one. What it remembers is no state: nothing of it need be saved.
    """

    def __init__(self) -> None:
        self._known: Any = None
        self._launches: list[tuple[list[int], Any]] = []
        self._plain: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

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
        layouts = [[*map(read, chain(*lists))] for read in (Tensor.stride, Tensor.get_device, _DTYPE)]
        known = (layouts, [*map(_SHAPE, weights)], dim, momentum is not None and (momentum.nesterov,))
        if known != self._known:
            self._plan(*lists, norms, dim, momentum)
            self._known = known
        if self._plain:
            ws, ds, gs = ([xs[i] for i in self._plain] for xs in lists)
            ds = ds if momentum is None else momentum.take_in_(ds, gs)
            for i, w, d, g in zip(self._plain, ws, ds, gs):
                rotate_channel_(w, d, g, norms[i], angle, dim)
        decay, sign = (0.0, 1.0) if momentum is None else momentum[:2]
        for members, plan in self._launches:
            chosen = ([xs[i] for i in members] for xs in (*lists, norms))
            with on_device(weights[members[0]].device):
                plan(*chosen, angle, decay, sign)

    def _plan(
        self,
        weights: list[Tensor],
        directions: list[Tensor],
        grads: list[Tensor],
        norms: list[Tensor],
        dim: int | None,
        momentum: Momentum | None,
    ) -> None:
        by_device: dict[torch.device, list[int]] = {}
        self._plain = []
        for i, weight in enumerate(weights):
            # The kernel has nothing but addresses: numbers of another dtype or device must not be there.
            others = (directions[i], grads[i], norms[i])
            together = norms[i].dtype == torch.float32 and all(x.device == weight.device for x in others)
            if dim == 0 and together and _is_rows(weight, torch.float32) and _one_layout(weight, *others[:2]):
                by_device.setdefault(weight.device, []).append(i)
            else:
                self._plain.append(i)
        self._launches = []
        for members in by_device.values():
            from normmatters.kernels.triton import rotate_rows  # triton is there only where GPUs are

            form = rotate_rows.GIVEN
            if momentum is not None:
                form = rotate_rows.NESTEROV if momentum.nesterov else rotate_rows.MOMENTUM
            self._launches.append((members, rotate_rows.RotationPlan([weights[i] for i in members], form)))


class _ByRows(abc.ABC):
    """Work on the channels of many weights, in one launch for all weights of a dtype that a kernel takes.

    Subclasses define `_launch_of` the kernel and `_plainly` for the rest.
    """

    def __init__(self, channels: Channels, row: Tensor) -> None:
        self.row = row
        self._channels = channels
        self._places: Any = None
        self._launches: list[Any] = []
        self._plain: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_places": None, "_launches": []}  # a copy makes its own launches

    def _run(self, others: list[Tensor]) -> None:
        """``others``: strided as the weights are, or empty."""
        # A model may be moved or change its memory format; asking is cheaper than planning anew every time.
        places = [[*map(read, self._channels.weights)] for read in (Tensor.data_ptr, Tensor.stride, _DTYPE)]
        if places != self._places:
            self._plan(others)
            self._places = places
        if self._plain:
            self._plainly(self._plain)
        if self._launches:
            with on_device(self.row.device):
                for launch in self._launches:
                    launch()

    def _plan(self, others: list[Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        self._plain = []
        for i, weight in enumerate(self._channels.weights):
            if (
                self._channels.dims[i] == 0
                and _is_rows(weight, *_ROW_DTYPES)
                and weight.device == self.row.device
                and self.row.dtype == torch.float32
                and weight.numel() <= _LONGEST_ROW * weight.shape[0]
                and _one_layout(weight, *others[i : i + 1])
            ):
                by_dtype.setdefault(weight.dtype, []).append(i)
            else:
                self._plain.append(i)
        self._launches = [self._launch_of(members) for members in by_dtype.values()]

    @abc.abstractmethod
    def _launch_of(self, members: list[int]) -> Any: ...

    @abc.abstractmethod
    def _plainly(self, members: list[int]) -> None: ...


class ChannelMeter(_ByRows):
    """Norm of every channel of many weights, and how far it turned since the last reading: one row of numbers.

    Attributes:
        row: `[total]` norms, with ``angle`` followed by `[total]` tangents of half the angle, tan(θ/2); their arc
            tangent is for whoever looks at them.
        previous: with ``angle`` the weights of the last reading; empty before `start`.
    """

    def __init__(self, channels: Channels, angle: bool) -> None:
        total = channels.total
        row = torch.zeros(total * (2 if angle else 1), dtype=channels.dtype, device=channels.device)
        super().__init__(channels, row)
        self.previous: list[Tensor] = []
        self._angle = angle
        self._distance = channels.new_row() if angle else row

    def start(self) -> None:
        """Take the weights of now as those of the last reading."""
        if self._angle:
            self.previous = [w.detach().clone() for w in self._channels.weights]
        self._places = None

    @torch.no_grad()
    def read_(self) -> Tensor:
        """Measure all channels; returns `row`, which the next reading overwrites. No host sync."""
        self._run(self.previous)
        return self.row

    def _launch_of(self, members: list[int]) -> Any:
        from normmatters.kernels.triton.row_norms import RowNormsPlan  # triton is there only where GPUs are

        norms, *tangents = self._parts(self.row)
        lists = [self._channels.weights, norms, *((self.previous, *tangents) if self._angle else ())]
        return RowNormsPlan(*([xs[i] for i in members] for xs in lists))

    def _parts(self, row: Tensor) -> list[tuple[Tensor, ...]]:
        """Views of each weight's numbers. Made when they are needed: a pickled copy's would be of other memory."""
        return [part.split(self._channels.sizes) for part in row.split(self._channels.total)]

    def _plainly(self, members: list[int]) -> None:
        weights, dims, norms = self._channels.weights, self._channels.dims, self._parts(self.row)[0]
        if not self._angle:
            for i in members:
                channel_norms(weights[i], dims[i], out=norms[i])
            return
        now, before = [weights[i] for i in members], [self.previous[i] for i in members]
        total = self._channels.total
        old = self.row[:total].clone()
        distances = self._parts(self._distance)[0]
        torch._foreach_sub_(before, now)
        for i in members:
            channel_norms(self.previous[i], dims[i], out=distances[i])
            channel_norms(weights[i], dims[i], out=norms[i])
        torch._foreach_copy_(before, now)
        # On the whole row, in few operations; what the kernel measures is written over by it.
        self.row[total:] = half_angle_tangent(old, self.row[:total], self._distance)


class ChannelScaler(_ByRows):
    """Multiply every channel of many weights by its own number, in place.

    Args:
        channels: the channels of the weights.
        ratio: `[total]`, the factor of each channel.
    """

    @torch.no_grad()
    def scale_(self) -> None:
        """Scale the weights by what ``ratio`` holds now. No host sync."""
        self._run([])

    def _launch_of(self, members: list[int]) -> Any:
        from normmatters.kernels.triton.scale_rows import ScaledRowsPlan  # triton is there only where GPUs are

        ratios = self.row.split(self._channels.sizes)
        return ScaledRowsPlan(*([xs[i] for i in members] for xs in (self._channels.weights, ratios)))

    def _plainly(self, members: list[int]) -> None:
        ratios = self._channels.broadcast(self.row)
        torch._foreach_mul_([self._channels.weights[i] for i in members], [ratios[i] for i in members])


def _is_rows(weight: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether it is a whole tensor of one of these dtypes in a place where the kernels run."""
    whole = not hasattr(weight, "full_tensor")  # no shard of a DTensor
    return weight.device.type in _LAUNCH_ON and weight.dtype in dtypes and whole


def _one_layout(weight: Tensor, *others: Tensor) -> bool:
    """Whether all are of one dtype, strided alike, and each slice along dimension 0 fills one stretch of memory."""
    if weight.numel() == 0 or any(x.dtype != weight.dtype for x in others):
        return False
    if weight.is_contiguous() and all(x.is_contiguous() for x in others):
        return True
    strides = weight.stride()
    if any(x.stride() != strides for x in others):
        return False
    # Any order inside the slice will do: a channels_last weight is dense in this sense.
    extent = 1 + sum((n - 1) * s for n, s in zip(weight.shape[1:], strides[1:]))
    return extent == strides[0] == weight.numel() // weight.shape[0]
