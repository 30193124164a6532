"""The frozen result of a `NormRecorder`: norms, angles and learning rates of a run; on disk as safetensors."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normmatters.optim.channels import Channels, Named, half_angle_tangent, named_weights
from normmatters.optim.invariance import ScaleInvariantParameters
from normmatters.probe import plain_name

Form = Literal["paper", "exact"]
_FORMAT = "normmatters.recording"


@dataclass(frozen=True, eq=False, repr=False)
class Recording:
    """Norms of every channel through a run. Row r was taken after `steps[r]` optimizer steps; row 0 before the first.

    Attributes:
        norms: name → `[R, channels]`.
        angles: name → `[R-1, channels]`, the angle in radians from row r to row r+1, nan where a norm is 0; empty
            if it was not recorded.
        steps: `[R]` int64, optimizer steps taken before each row.
        lr: `[R-1, groups]` float64, learning rate of the step that led to row r+1; `[R-1, 0]` without an optimizer.
        weight_decay: `[R-1, groups]` float64; nan under a weight-decay-free or angular optimizer, which does something
            else in its place.
        groups: name → column of `lr` and `weight_decay`.
        shapes: name → shape of the weight.
        dims: name → channel dimension, `None` where the whole tensor is one channel.
        epoch_ends: steps taken at the end of every epoch.
        tested: whether the weights came from `scale_invariant_parameters`.
        metadata: the user's own strings, saved in the file.

    >>> layer = nn.Linear(3, 4)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> recorder = NormRecorder(layer, optimizer)
    >>> optimizer.step()
    >>> recording = recorder.recording()
    >>> recording.norms["weight"].shape, recording.effective_step_size("weight").shape
    (torch.Size([2, 4]), torch.Size([1, 4]))
    """

    norms: Mapping[str, Tensor]
    steps: Tensor
    lr: Tensor
    weight_decay: Tensor
    groups: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    dims: Mapping[str, int | None]
    angles: Mapping[str, Tensor] = field(default_factory=dict)
    epoch_ends: tuple[int, ...] = ()
    tested: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = len(self.steps)
        for table in (self.lr, self.weight_decay):
            if rows < 1 or table.ndim != 2 or len(table) != rows - 1:
                shape = tuple(table.shape)
                raise ValueError(f"{rows} rows need lr and weight_decay of [{rows - 1}, groups], got {shape}")
        for name, norms in self.norms.items():
            if name not in self.shapes or name not in self.dims:
                raise ValueError(f"the recording has norms of {name!r} but not its shape and dim")
            shape, dim = self.shapes[name], self.dims[name]
            channels = 1 if dim is None else shape[dim]
            if tuple(norms.shape) != (rows, channels):
                raise ValueError(
                    f"norms of {name!r} (shape {tuple(shape)}, dim {dim}) must be [{rows}, {channels}], "
                    f"got {list(norms.shape)}: channels or rows are missing"
                )
            if self.angles and (name not in self.angles or tuple(self.angles[name].shape) != (rows - 1, channels)):
                raise ValueError(f"angles of {name!r} must be [{rows - 1}, {channels}]")
            if self.lr.shape[1] and not 0 <= self.groups.get(name, -1) < self.lr.shape[1]:
                raise ValueError(f"{name!r} has no learning rate: its group is {self.groups.get(name)}")
        for key in ("norms", "groups", "shapes", "dims", "angles", "metadata"):
            object.__setattr__(self, key, MappingProxyType(dict(getattr(self, key))))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made from plain dictionaries, because read-only views cannot be copied or pickled."""
        values = [getattr(self, one.name) for one in fields(self)]
        return type(self), tuple(dict(value) if isinstance(value, MappingProxyType) else value for value in values)

    def __repr__(self) -> str:
        channels = sum(norms.shape[1] for norms in self.norms.values())
        rows = f"{len(self.steps)} rows up to step {int(self.steps[-1])}, {len(self.epoch_ends)} epochs"
        angles = "with angles" if self.angles else "without angles"
        return f"<Recording of {len(self.norms)} weights, {channels} channels, {rows}, {angles}>"

    @property
    def names(self) -> list[str]:
        """Names of the recorded weights."""
        return list(self.norms)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps per epoch, `None` where epochs differ or none was marked."""
        lengths = {b - a for a, b in zip((0, *self.epoch_ends), self.epoch_ends)}
        return lengths.pop() if len(lengths) == 1 else None

    @property
    def signature(self) -> str:
        """Hash of the names, shapes and channel dimensions: equal for equal models."""
        return layout_signature(self.shapes, self.dims)

    def norm(self, name: str, *, layer: bool = False) -> Tensor:
        """`[R, channels]`; with `layer=True` `[R]`, the norm of the whole weight."""
        norms = self.norms[self._known(name)]
        return torch.linalg.vector_norm(norms, dim=1) if layer else norms

    def learning_rate(self, name: str) -> Tensor:
        """`[R-1]` float64, the learning rate of this weight's parameter group."""
        self._known(name)
        if self.lr.shape[1] == 0:
            raise ValueError("this run was recorded without an optimizer, so it has no learning rates")
        return self.lr[:, self.groups[name]]

    def effective_step_size(self, name: str, *, layer: bool = False, exponent: float = 2.0) -> Tensor:
        """η/‖w‖² (F2) `[R-1, channels]`, or `[R-1]` with `layer=True`; `exponent=1` for the Adam family."""
        norms = self.norm(name, layer=layer)[:-1]
        lr = self.learning_rate(name)
        return lr.view(-1, *[1] * (norms.ndim - 1)) / norms.double() ** exponent

    def angle(self, name: str, *, layer: bool = False) -> Tensor:
        """Angle from row to row in radians, `[R-1, channels]`, or `[R-1]` of the whole weight with `layer=True`."""
        if not self.angles:
            raise ValueError("this run was recorded without angles: build the NormRecorder with angle=True")
        angles = self.angles[self._known(name)]
        if not layer:
            return angles
        norms = self.norms[name].double()
        a, b = norms[:-1], norms[1:]
        # The distance of two channels from their lengths and angle, without the cancellation of the cosine rule.
        # A channel of norm 0 has no angle (nan), and its distance needs none.
        turned = torch.where(a * b == 0, 0.0, 4 * a * b * torch.sin(angles.double() / 2) ** 2)
        squared = (a - b) ** 2 + turned
        return 2 * half_angle_tangent(a.norm(dim=1), b.norm(dim=1), squared.sum(1).sqrt()).atan()

    def at_epochs(self, name: str) -> Tensor:
        """`[epochs, channels]` norms at the end of every epoch."""
        return self.norms[self._known(name)][self._epoch_rows()]

    def _known(self, name: str) -> str:
        if name not in self.norms:
            raise ValueError(f"the recording has no {name!r}; it has {self.names}")
        return name

    def _epoch_rows(self) -> list[int]:
        if not self.epoch_ends:
            raise ValueError("the recording has no epochs: call recorder.end_epoch() at the end of each")
        where = {step: row for row, step in enumerate(self.steps.tolist())}
        missing = [e for e in self.epoch_ends if e not in where]
        if missing:
            raise ValueError(f"no row was recorded at an epoch's end, step {missing[0]}: record every step or epoch")
        return [where[e] for e in self.epoch_ends]

    def rows_by_step(self, form: Form) -> Tensor:
        """`[T+1]` row of the norms that hold during step t (t = T: after the last one).

        `"paper"`: the norms at the end of the epoch that step t is part of. `"exact"`: the norms just before step t.
        """
        if self.steps[-1] < 1:
            raise ValueError("the recording is empty: it holds no step")
        if form == "exact":
            rows = torch.arange(len(self.steps), device=self.steps.device)
            if not torch.equal(self.steps, rows):
                raise ValueError('form="exact" needs the norms of every step: record with every="step"')
            return rows
        if form != "paper":
            raise ValueError(f'form must be "paper" or "exact", got {form!r}')
        device = self.steps.device
        rows = torch.tensor(self._epoch_rows(), device=device)
        lengths = torch.tensor([b - a for a, b in zip((0, *self.epoch_ends), self.epoch_ends)], device=device)
        return torch.cat([rows.repeat_interleave(lengths), rows[-1:]])

    def lr_by_step(self, name: str) -> Tensor:
        """`[T]` float64 learning rate of every step, held constant between rows."""
        return self.learning_rate(name).repeat_interleave(self.steps.diff())

    def match(self, optimizer: Optimizer, parameters: Named | None = None) -> Channels:
        """The channels of `parameters` that this recording describes; raises, naming it, on one that does not fit.

        Args:
            optimizer: must hold all of them; its names are used where `parameters` is `None`.
            parameters: the result of `scale_invariant_parameters`, a mapping or (name, tensor) pairs; or a whole
                module, where every recorded weight was tested for scale invariance.
        """
        if parameters is None or isinstance(parameters, nn.Module):
            pairs: Iterable[tuple[str, Tensor]]
            if parameters is not None:
                pairs = parameters.named_parameters()
            elif all("param_names" in group for group in optimizer.param_groups):
                pairs = [pair for g in optimizer.param_groups for pair in zip(g["param_names"], g["params"])]
            else:
                raise ValueError(
                    "the optimizer does not know the names of its parameters: build it from model.named_parameters() "
                    "or split_parameters(...), or pass parameters="
                )
            if not self.tested:
                raise ValueError(
                    f"{self.names[0]!r} and the other recorded weights were never tested for scale invariance: "
                    "pass parameters=scale_invariant_parameters(model, example_input), or record with it"
                )
            known, wanted = {plain_name(n): p for n, p in pairs}, self.names
        else:
            known, dims = named_weights(parameters)
            wanted = [self._known(name) for name in known]
            for name in wanted:
                if isinstance(parameters, ScaleInvariantParameters) and dims[name] != self.dims[name]:
                    raise ValueError(
                        f"{name!r} was recorded along dim {self.dims[name]} and is invariant along {dims[name]}"
                    )
        for name in wanted:
            if name not in known:
                raise ValueError(f"the recording is of another model: it has {name!r}, the parameters given do not")
            if tuple(known[name].shape) != tuple(self.shapes[name]):
                raise ValueError(
                    f"the recording is of another model: {name!r} was {tuple(self.shapes[name])} there "
                    f"and is {tuple(known[name].shape)} here"
                )
            if self.lr.shape[1] and self.weight_decay[:, self.groups[name]].isnan().any():
                raise ValueError(
                    f"{name!r} was recorded under a weight-decay-free or angular optimizer, whose norms are not those "
                    "of weight decay: record a run with weight decay of an ordinary optimizer, such as SGD"
                )
        return Channels({n: known[n] for n in wanted}, {n: self.dims[n] for n in wanted})

    def table(self, channels: Channels) -> Tensor:
        """`[R, total]` norms of `channels`, side by side, in float64; raises where one is zero."""
        table = torch.cat([self.norms[n].double() for n in channels.names], dim=1)
        channels.check_nonzero(table, "the recorded norm")
        return table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: tensors plus a JSON description of names, shapes, dims and groups."""
        tensors = {f"norm/{n}": t for n, t in self.norms.items()} | {f"angle/{n}": t for n, t in self.angles.items()}
        tensors |= {"steps": self.steps, "lr": self.lr, "weight_decay": self.weight_decay}
        layout = {n: [list(self.shapes[n]), self.dims[n], self.groups.get(n)] for n in self.names}
        header = {
            "format": _FORMAT,
            "version": "1",
            "parameters": json.dumps(layout),
            "signature": self.signature,
            "epoch_ends": json.dumps(self.epoch_ends),
            "tested": json.dumps(self.tested),
            "metadata": json.dumps(dict(self.metadata)),
        }
        own = {k: t.clone(memory_format=torch.contiguous_format) for k, t in tensors.items()}  # shares no memory
        _safetensors().save_file(own, os.fspath(path), metadata=header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read what `save` wrote. Raises on a file of another kind or with missing tensors."""
        _safetensors()
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                header = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a dict)
        except SafetensorError as error:
            raise ValueError(f"{os.fspath(path)} is no safetensors file, or not all of one: {error}") from None
        if header.get("format") != _FORMAT or header.get("version") != "1":
            raise ValueError(f"{os.fspath(path)} is not a {_FORMAT} file of version 1, its header says {header}")
        needed = {"parameters", "signature", "epoch_ends", "tested", "metadata", "steps", "lr", "weight_decay"}
        if lacking := needed - {*header, *tensors}:
            raise ValueError(f"{os.fspath(path)} is damaged: it has no {', '.join(sorted(lacking))}")
        layout = json.loads(header["parameters"])
        if lost := [n for n in layout if f"norm/{n}" not in tensors]:
            raise ValueError(f"{os.fspath(path)} describes {lost[0]!r} and holds no norms of it")
        recording = cls(
            norms={n: tensors[f"norm/{n}"] for n in layout},
            angles={n: tensors[f"angle/{n}"] for n in layout if f"angle/{n}" in tensors},
            steps=tensors["steps"],
            lr=tensors["lr"],
            weight_decay=tensors["weight_decay"],
            groups={n: group for n, (_, _, group) in layout.items() if group is not None},
            shapes={n: tuple(shape) for n, (shape, _, _) in layout.items()},
            dims={n: dim for n, (_, dim, _) in layout.items()},
            epoch_ends=tuple(json.loads(header["epoch_ends"])),
            tested=json.loads(header["tested"]),
            metadata=json.loads(header["metadata"]),
        )
        if recording.signature != header["signature"]:
            raise ValueError(f"{os.fspath(path)} is damaged: its names and shapes do not give its signature")
        return recording

    def plot(self, path: str | os.PathLike[str] | None = None, *, names: list[str] | None = None) -> Any:
        """Draw norms, effective step sizes and angles: see :func:`normmatters.optim.plotting.plot`."""
        return importlib.import_module("normmatters.optim.plotting").plot(self, path, names=names)

    def to_tensorboard(self, writer: Any, *, prefix: str = "norms", every: int = 1) -> None:
        """Write them as scalars: see :func:`normmatters.optim.plotting.to_tensorboard`."""
        importlib.import_module("normmatters.optim.plotting").to_tensorboard(self, writer, prefix=prefix, every=every)


def decays(recording: Recording, names: list[str]) -> Tensor:
    """`[T, weights]`, η_tλ_t of every step; raises where it is not below 1. Every step must have its row."""
    products = [recording.learning_rate(n) * recording.weight_decay[:, recording.groups[n]] for n in names]
    for name, product in zip(names, products):
        if (product >= 1).any():
            largest = product.max().item()
            raise ValueError(f"lr · weight_decay of {name!r} was {largest} in the recording: it must be below 1")
    return torch.stack(products, 1)


def layout_signature(shapes: Mapping[str, tuple[int, ...]], dims: Mapping[str, int | None]) -> str:
    """SHA-256 of names, shapes and channel dimensions."""
    text = json.dumps([[n, list(shapes[n]), dims[n]] for n in sorted(shapes)])
    return hashlib.sha256(text.encode()).hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("saving and loading recordings needs safetensors: pip install safetensors") from error
    return safetensors.torch
