"""Record norms, effective step sizes and angles of a run, at a cost below one percent of the training step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from normmatters.optim._base import WeightDecayFree, innermost, is_capturing
from normmatters.optim.channels import ChannelMeter, Channels, Named, named_weights
from normmatters.optim.invariance import ScaleInvariantParameters
from normmatters.optim.recording import Recording, layout_signature

CHUNK = 256  # rows that stay on the device before they move to the host, asynchronously


class _History:
    """Rows appended on a device without a host sync.

    Without a capacity, full chunks move to pinned host memory. With one, all rows stay in one preallocated tensor, and
    the row number is on the device too, so that a CUDA graph can capture and replay `append`.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, capacity: int | None) -> None:
        self.capacity = capacity
        self._chunk = torch.zeros(capacity or CHUNK, width, dtype=dtype, device=device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)
        self._full: list[Tensor] = []
        self._used = 0

    def append(self, row: Tensor) -> None:
        if self.capacity is not None:
            self._chunk.index_copy_(0, self._next.clamp(max=self.capacity - 1), row.unsqueeze(0))
            self._next.add_(1)
            return
        self._chunk[self._used].copy_(row)
        self._used += 1
        if self._used == CHUNK:
            pinned = torch.empty(self._chunk.shape, dtype=row.dtype, pin_memory=row.device.type == "cuda")
            self._full.append(pinned.copy_(self._chunk, non_blocking=True))
            self._used = 0

    def stack(self) -> Tensor:
        """All rows on the host, `[rows, width]`."""
        if self.capacity is not None:
            rows = int(self._next)
            if rows > self.capacity:
                raise ValueError(f"{rows} rows were recorded, capacity={self.capacity} was reserved for them")
            return self._chunk[:rows].to("cpu", copy=True)
        last = self._chunk[: self._used].cpu()  # on a GPU this also waits for the copies before it
        return torch.cat([*self._full, last])

    def load(self, rows: Tensor) -> None:
        if self.capacity is not None:
            self._chunk[: len(rows)].copy_(rows)
            self._next.fill_(len(rows))
            return
        whole = len(rows) // CHUNK * CHUNK
        self._full = [rows[:whole].clone()] if whole else []
        self._used = len(rows) - whole
        self._chunk[: self._used].copy_(rows[whole:])


class NormRecorder:
    """Record the norm of every channel, its angular update and its learning rate, step by step or epoch by epoch.

    Everything stays on the device and waits for nothing. On a GPU one launch measures all weights and one copy stores
    the result; elsewhere it is one norm per weight (two with angles). Given an optimizer, it records by itself after
    each `optimizer.step()`. A step that AMP's `GradScaler` skips is not recorded; to know that, the host waits for a
    fused optimizer's steps under `GradScaler`, and for nothing else.

    Args:
        weights: the result of `scale_invariant_parameters`, a module (all weights of two or more dimensions), a mapping
            name → tensor or (name, tensor) pairs.
        optimizer: gives steps, learning rates and weight decay; without one, call `step()` after every step.
        every: `"step"`, a number of steps, or `"epoch"` (a row at every `end_epoch()`).
        angle: also record the angle between consecutive rows; needs one copy of the weights.
        dims: name → channel dimension, where it is not that of `weights` (0, or 1 for transposed convolutions of a
            module); `None` takes a whole tensor as one channel.
        capacity: reserve this many rows in advance and never grow, for CUDA graphs; needs `every="step"`.
        metadata: strings to save in the recording.

    >>> model = torch.nn.Linear(4, 3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> recorder = NormRecorder(model, optimizer)
    >>> model(torch.ones(2, 4)).sum().backward(); optimizer.step()
    >>> recorder.recording().effective_step_size("weight").shape
    torch.Size([1, 3])
    """

    def __init__(
        self,
        weights: Named,
        optimizer: Optimizer | None = None,
        *,
        every: Literal["step", "epoch"] | int = "step",
        angle: bool = True,
        dims: Mapping[str, int | None] | None = None,
        capacity: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if every not in ("step", "epoch") and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f'every must be "step", "epoch" or a positive number of steps, got {every!r}')
        if capacity is not None and (every not in ("step", 1) or capacity < 2):
            raise ValueError(f'capacity needs every="step" and room for 2 rows or more, got {every!r} and {capacity}')
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        for key, value in (metadata or {}).items():  # checked now, because `save` comes when the run has ended
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(f"metadata must map strings to strings, got {key!r}: {value!r}")
        self._channels = Channels(*named_weights(weights, dims))
        self._shapes = {n: tuple(w.shape) for n, w in zip(self._channels.names, self._channels.weights)}
        self._dims = dict(zip(self._channels.names, self._channels.dims))
        self._tested = isinstance(weights, ScaleInvariantParameters) and dims is None
        self._interval = every if isinstance(every, int) else {"step": 1, "epoch": 0}[every]
        self._angle, self._capacity, self._metadata = angle, capacity, dict(metadata or {})
        self._optimizer = optimizer
        self._group_of = self._channels.groups(optimizer) if optimizer else []
        self._used_groups = sorted(set(self._group_of))
        own = [*zip(self._channels.weights, self._group_of)]
        self._weights_of = {index: [w for w, its in own if its == index] for index in self._used_groups}
        self._handles: list[RemovableHandle] = []
        self._coming: list[float | Tensor] = []  # settings of the step that has begun
        self.reset()
        self._attach()

    def _attach(self) -> None:
        if self._optimizer is not None:
            self._handles.append(self._optimizer.register_step_pre_hook(lambda *_: self._start()))
            self._handles.append(self._optimizer.register_step_post_hook(lambda *_: self._stepped()))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handles": bool(self._handles)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy records the copy of its optimizer, whose hooks ``torch.optim`` does not copy."""
        self.__dict__.update(state | {"_handles": []})
        if state["_handles"]:
            self._attach()

    def reset(self) -> None:
        """Drop all rows and begin again at step 0."""
        channels = self._channels
        self._meter = ChannelMeter(channels, self._angle)
        self._rows = _History(len(self._meter.row), channels.dtype, channels.device, self._capacity)
        self._settings = _History(2 * len(self._used_groups), torch.float64, channels.device, self._capacity)
        self._setting = torch.zeros(2 * len(self._used_groups), dtype=torch.float64, device=channels.device)
        self._written: list[float | Tensor] | None = None
        self._steps, self._row_steps, self._epoch_ends = 0, list[int](), list[int]()
        # With an optimizer row 0 is taken at the first step, because weights may still be loaded or moved before it.
        if self._optimizer is None:
            self._record()

    def remove(self) -> None:
        """Detach from the optimizer; the rows stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def steps(self) -> int:
        """Optimizer steps so far; steps of a replayed CUDA graph are not counted here, only recorded."""
        return self._steps

    def step(self) -> None:
        """Count one optimizer step, and record a row if one is due. The optimizer's hook calls it."""
        self._steps += 1
        if self._interval and self._steps % self._interval == 0:
            self._record()

    def end_epoch(self) -> None:
        """Mark the end of an epoch; with `every="epoch"` this records the row."""
        if self._capacity is not None and self._row_steps:
            self._steps = int(self._rows._next) - 1
        if self._steps == (self._epoch_ends or [0])[-1]:
            raise ValueError(f"end_epoch() at step {self._steps}: no step was taken since the last epoch ended")
        self._epoch_ends.append(self._steps)
        if self._row_steps[-1] != self._steps and self._capacity is None:
            self._record()

    @torch.no_grad()
    def _start(self) -> None:
        self._coming = self._present_settings()  # before a row, because it raises on settings that will be refused
        if self._row_steps and not self._steps:
            self.reset()  # the first step raised, and the weights may have been replaced since
        if not self._row_steps:
            self._record()

    @torch.no_grad()
    def _stepped(self) -> None:
        # GradScaler calls a fused optimizer even for a step to skip, with this attribute, which only the device knows.
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is None or is_capturing() or not found_inf.item():
            self._keep_settings(self._coming)
            self.step()

    @torch.no_grad()
    def _record(self) -> None:
        if not self._row_steps:
            self._meter.start()
        self._rows.append(self._meter.read_())
        self._settings.append(self._setting)
        self._row_steps.append(self._steps)

    def _keep_settings(self, values: list[float | Tensor]) -> None:
        """Write the learning rate and weight decay of the step just taken to the device, if they changed.

        Not when the row is recorded: a scheduler may have set the next ones by then.
        """
        if self._written is None or any(isinstance(v, Tensor) for v in values) or values != self._written:
            for place, value in zip(self._setting, values):
                place.copy_(value.reshape(())) if isinstance(value, Tensor) else place.fill_(value)
            self._written = None if any(isinstance(v, Tensor) for v in values) else values

    def _present_settings(self) -> list[float | Tensor]:
        """The learning rates of the groups (in weight-decay-free ones, those that act), then their weight decays."""
        assert self._optimizer is not None
        inner, settings = innermost(self._optimizer), []
        for index in self._used_groups:
            group = self._optimizer.param_groups[index]
            lr, decay = group["lr"], group.get("weight_decay")
            if group.get("weight_decay_free"):
                lr = decay = math.nan  # if it is wrapped by something without .optimizer, such as torch's ZeRO
                if isinstance(inner, WeightDecayFree):
                    weights = self._weights_of[index]
                    weight = max(weights, key=lambda w: (w.grad is not None, w.requires_grad))  # not a frozen one
                    lr = inner._acting_lr(index, weight)
            elif group.get("angular"):
                decay = math.nan
            settings.append((lr, 0.0 if decay is None else decay))
        return [lr for lr, _ in settings] + [decay for _, decay in settings]

    def recording(self) -> Recording:
        """All rows so far, on the host. Waits for the device."""
        rows, settings = self._rows.stack(), self._settings.stack()[1:]
        if not len(rows):
            raise ValueError("nothing was recorded yet: no step was taken")
        channels, count = self._channels, len(self._used_groups)
        angles = 2 * rows[1:, channels.total :].atan()  # the device stores tan(θ/2)
        steps = range(len(rows)) if self._capacity is not None else self._row_steps
        return Recording(
            norms={n: t.clone() for n, t in channels.split(rows[:, : channels.total]).items()},
            angles={n: t.clone() for n, t in channels.split(angles).items()} if self._angle else {},
            steps=torch.tensor(list(steps), device="cpu"),
            lr=settings[:, :count].clone(),
            weight_decay=settings[:, count:].clone(),
            groups={n: self._used_groups.index(g) for n, g in zip(channels.names, self._group_of)},
            shapes=self._shapes,
            dims=self._dims,
            epoch_ends=tuple(self._epoch_ends),
            tested=self._tested,
            metadata=self._metadata,
        )

    def save(self, path: str) -> None:
        """`recording().save(path)`."""
        self.recording().save(path)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only, for `torch.save`: a run that stops and resumes records bit for bit the same."""
        return {
            "signature": layout_signature(self._shapes, self._dims),
            "angle": self._angle,
            "interval": self._interval,
            "rows": self._rows.stack(),
            "settings": self._settings.stack(),
            "setting": self._setting.to("cpu", copy=True),
            "previous": [p.to("cpu", copy=True) for p in self._meter.previous],
            "steps": self._steps,
            "row_steps": list(self._row_steps),
            "epoch_ends": list(self._epoch_ends),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a recording of the same weights."""
        own = self.state_dict()
        for key in ("signature", "angle", "interval"):
            if state.get(key) != own[key]:
                raise ValueError(
                    f"the state is of another recorder: its {key} is {state.get(key)!r}, here it is {own[key]!r}"
                )
        if lacking := [key for key in own if key not in state]:
            raise ValueError(f"the state is damaged: it has no {', '.join(lacking)}")
        if (theirs := state["settings"].shape[1] // 2) != len(self._used_groups):
            raise ValueError(f"the state has {theirs} parameter groups, here are {len(self._used_groups)}")
        if self._capacity is not None and len(state["rows"]) > self._capacity:
            raise ValueError(f"the state has {len(state['rows'])} rows, capacity={self._capacity} was reserved")
        self.reset()
        self._rows.load(state["rows"])
        self._settings.load(state["settings"])
        if len(state["rows"]):
            self._meter.start()
            self._meter.row.copy_(state["rows"][-1])
            self._setting.copy_(state["setting"])
        for previous, saved in zip(self._meter.previous, state["previous"]):
            previous.copy_(saved)
        self._steps, self._row_steps = state["steps"], list(state["row_steps"])
        self._epoch_ends = list(state["epoch_ends"])
