r"""Norm schedule: hold the learning rate and change the norms instead (F4).

The effective step is η/‖w‖², so it is the same to divide η by 10 or to multiply ‖w‖ by √10. With v = a·w and a =
√(η₀/η_t), v − η₀∇L(v) = a·w − η₀∇L(w)/a = a·(w − η_t∇L(w)), exactly, step by step. A momentum buffer holds gradients,
which scale as 1/a: when a grows by r, the buffer shrinks by r. Then the run is exactly that of SGD with momentum and
the LR schedule. For Adam, whose effective step is η/‖w‖, a = η₀/η_t, and squared gradients shrink by r².

With the norms of a recorded run, set after every step, this is the fourth curve of the paper's figure 1. Then weights
are projected at every step, and buffers follow the factor a alone: weight decay, too, shrinks weights and not buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from normmatters.optim._base import exponents
from normmatters.optim.channels import ChannelMeter, Channels, ChannelScaler, Named, named_weights
from normmatters.optim.correction import StepSizeCorrection
from normmatters.optim.recording import Form, Recording, decays


class NormSchedule(LRScheduler):
    """A learning-rate schedule as a schedule of norms: the LR stays, and the effective steps are the schedule's.

    A torch `LRScheduler`. Rescales weights in place, so only scale-invariant ones: else the model's output changes.
    Running statistics of batch norms belong to the weights before: evaluate before `step()`, not right after it.

    Args:
        optimizer: the scheduled weights keep its present learning rates, and must not have weight decay.
        source: a function that builds an LR scheduler, `lambda opt: MultiStepLR(opt, [30, 60])`: where it would divide
            the LR by 10, norms are multiplied by √10. Call `step()` as often as you would call that scheduler's.
            Or a `Recording`: call `step()` after every optimizer step; it gives every channel the recorded norm times
            √(η₀/η_t), where η_t is the recorded learning rate.
        parameters: the result of `scale_invariant_parameters`, a mapping or (name, tensor) pairs; with a recording of
            tested weights also the model, or `None` if the optimizer knows the names.
        form: for a recording: `"paper"` uses the norms at the end of the running epoch, `"exact"` those of each step
            times √(1−ηλ), which gives plain SGD exactly the directions of the recorded run.
        others: the LR of parameter groups without scheduled weights is `"scheduled"` (follows the schedule) or
            `"constant"`.
        exponent: k of the effective step η/‖w‖ᵏ: 2 for SGD, 1 for the Adam family.
        state_powers: state name → power of the factor that it scales with. Both are known for SGD, Adam, AdamW, NAdam,
            RMSprop and Adagrad.

    To resume, build everything, then load model, optimizer and schedule: building rescales weights.

    >>> model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(8, 3)
    >>> invariant = scale_invariant_parameters(model, x)
    >>> optimizer = torch.optim.SGD(split_parameters(model, x), lr=0.1)
    >>> drop = lambda opt: torch.optim.lr_scheduler.MultiStepLR(opt, [1])  # lr ÷ 10 at step 1
    >>> schedule = NormSchedule(optimizer, drop, invariant)
    >>> before = channel_norms(model[0].weight)
    >>> optimizer.step()
    >>> schedule.step()
    >>> torch.allclose(channel_norms(model[0].weight) / before, torch.tensor(10.0).sqrt())
    True
    """

    def __init__(
        self,
        optimizer: Optimizer,
        source: Recording | Callable[[Optimizer], LRScheduler],
        parameters: Named | None = None,
        *,
        form: Form = "paper",
        others: Literal["scheduled", "constant"] = "scheduled",
        exponent: float | None = None,
        state_powers: Mapping[str, float] | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if others not in ("scheduled", "constant"):
            raise ValueError(f'others must be "scheduled" or "constant", got {others!r}')
        self._source: _FromRecording | _FromSchedule
        if isinstance(source, Recording):
            channels = source.match(optimizer, parameters)
        elif callable(source):
            if parameters is None:
                raise ValueError("parameters= must say which weights to rescale, e.g. scale_invariant_parameters(...)")
            channels = Channels(*named_weights(parameters))
        else:
            raise TypeError(f"source must be a Recording or a function of an optimizer, got {type(source).__name__}")
        if isinstance(optimizer, StepSizeCorrection):
            raise TypeError("StepSizeCorrection's steps do not depend on the norms: schedule its learning rate instead")
        channels.check_norms_are_free(optimizer)
        self._channels, self._groups = channels, channels.groups(optimizer)
        self._meter, self._scaler = ChannelMeter(channels, angle=False), ChannelScaler(channels, channels.new_row())
        self._others = others
        if others == "scheduled":
            _check_unmixed(channels, self._groups, optimizer)
        kind, (known, known_powers) = type(optimizer).__name__, exponents(optimizer) or (None, None)
        powers = known_powers if state_powers is None else state_powers
        if powers is None:
            raise ValueError(
                f"how the state of {kind} scales is not known: pass state_powers={{name: power}}, with -1 for averages "
                "of gradients, -2 for averages of their squares, 0 for what stays"
            )
        self._powers = powers
        exponent = known if exponent is None else exponent
        if exponent is None:
            raise ValueError(
                f"how the steps of {kind} scale is not known: pass exponent=2 where they grow with the gradients, as "
                "SGD's, and 1 where they do not, as Adam's"
            )
        if not exponent > 0:
            raise ValueError(f"exponent must be positive, got {exponent}")
        initial = [float(group["lr"]) for group in optimizer.param_groups]
        if isinstance(source, Recording):
            self._source = _FromRecording(source, channels, form, 1 / exponent, [initial[g] for g in self._groups])
        else:
            self._source = _FromSchedule(source, initial, self._groups, 1 / exponent)
        self._factors = [1.0] * len(channels.names)
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Rescale the weights for the next step (or epoch, if the LR schedule counts epochs)."""
        if epoch is not None:
            raise ValueError("NormSchedule cannot jump to an epoch: each norm follows from the one before")
        initial = self.last_epoch == -1
        if len(self.optimizer.param_groups) != len(self.base_lrs):
            now, then = len(self.optimizer.param_groups), len(self.base_lrs)
            raise ValueError(f"the optimizer has {now} parameter groups and had {then}: add groups before NormSchedule")
        self._channels.check_norms_stay_free(self.optimizer, {*self._groups})
        self._rescale(self._source.advance(initial))
        super().step()

    @torch.no_grad()
    def _rescale(self, factors: list[float]) -> None:
        changes: list[tuple[Tensor, float]] = []
        target = self._source.target()
        for name, w, new, old in zip(self._channels.names, self._channels.weights, factors, self._factors):
            if new == old:
                continue
            if target is None:
                changes.append((w, new / old))
            for key, value in self.optimizer.state.get(w, {}).items():
                if not isinstance(value, Tensor) or key == "step":
                    continue
                if key not in self._powers:
                    raise ValueError(f"how the state {key!r} of {name!r} scales is not known: add it to state_powers")
                changes.append((value, (new / old) ** self._powers[key]))
        for tensor, factor in changes:
            tensor.mul_(factor)
        if target is not None:
            norms = self._meter.read_()
            self._scaler.row.copy_(torch.where(norms == 0, 1.0, target / norms))  # a pruned channel stays 0
            self._scaler.scale_()
        self._factors = factors

    def get_lr(self) -> list[float | Tensor]:
        """The optimizer's learning rates; those of the other groups as scheduled."""
        lrs = [group["lr"] for group in self.optimizer.param_groups]
        if self._others == "constant":
            return lrs
        mine = set(self._groups)
        return [lr if g in mine else self._source.lr(g, cast(float, self.base_lrs[g])) for g, lr in enumerate(lrs)]

    def state_dict(self) -> dict[str, Any]:
        """Numbers only; the weights are in the model's state."""
        return {
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "base_lrs": self.base_lrs,
            "_last_lr": self._last_lr,
            "_factors": self._factors,
            "names": self._channels.names,
            "source": self._source.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`. Load the model's weights as well: this changes none."""
        if state_dict.get("names") != self._channels.names:
            raise ValueError(f"the state is of other weights: {state_dict.get('names')}, here {self._channels.names}")
        if {*state_dict["source"]} != {*self._source.state_dict()}:
            raise ValueError("the state is of another source: one is an LR schedule, the other a recording")
        self._source.load_state_dict(state_dict["source"])
        self.__dict__.update({k: v for k, v in state_dict.items() if k not in ("names", "source")})


def _check_unmixed(channels: Channels, groups: list[int], optimizer: Optimizer) -> None:
    held = {id(w) for w in channels.weights}
    for name, index in zip(channels.names, groups):
        if any(id(p) not in held for p in optimizer.param_groups[index]["params"]):
            raise ValueError(
                f'{name!r} shares parameter group {index} with weights that are not scheduled: others="scheduled" '
                'needs them apart (see split_parameters); others="constant" leaves their learning rate alone'
            )
    fixed = [optimizer.param_groups[index]["lr"] for index in groups]
    for index, group in enumerate(optimizer.param_groups):
        if index not in groups and isinstance(group["lr"], Tensor) and any(group["lr"] is lr for lr in fixed):
            raise ValueError(
                f"parameter group {index} shares its learning rate's tensor with scheduled weights, whose learning "
                "rate is to stay: give each group an lr tensor of its own"
            )


class _FromSchedule:
    """Factors from an LR scheduler that runs on a shadow optimizer."""

    def __init__(
        self, build: Callable[[Optimizer], LRScheduler], initial: list[float], groups: list[int], power: float
    ) -> None:
        self._shadow = SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in initial], lr=0.0)
        self._scheduler = build(self._shadow)
        if not isinstance(self._scheduler, LRScheduler):
            raise TypeError(f"source must build an LRScheduler, it returned {type(self._scheduler).__name__}")
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise TypeError("ReduceLROnPlateau needs a metric at each step, and NormSchedule has none")
        if any(group["momentum"] != 0 for group in self._shadow.param_groups):
            raise ValueError(
                f"{type(self._scheduler).__name__} schedules the momentum too, which no norm can replace: pass "
                "cycle_momentum=False"
            )
        self._initial, self._groups, self._power = initial, groups, power
        self._shadow.step()  # so that PyTorch does not warn of a scheduler before its optimizer
        self.advance(True)  # raises on a learning rate of 0

    def advance(self, initial: bool) -> list[float]:
        if not initial:
            self._scheduler.step()
        lrs = [self.lr(g, 0.0) for g in self._groups]
        if not min(lrs) > 0:
            raise ValueError(f"the schedule sets the learning rate {min(lrs)}: the norm would be infinite")
        return [(self._initial[g] / lr) ** self._power for g, lr in zip(self._groups, lrs)]

    def target(self) -> Tensor | None:
        return None

    def lr(self, group: int, base: float) -> float:
        return float(self._shadow.param_groups[group]["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": self._scheduler.state_dict(), "lr": [float(g["lr"]) for g in self._shadow.param_groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(state["scheduler"])
        for group, lr in zip(self._shadow.param_groups, state["lr"]):
            group["lr"] = lr


class _FromRecording:
    """Norms and factors of a recorded run."""

    def __init__(self, recording: Recording, channels: Channels, form: Form, power: float, lrs: list[float]) -> None:
        rows = recording.rows_by_step(form)
        self._steps = len(rows) - 1
        per_step = [recording.lr_by_step(n)[: self._steps] for n in channels.names]
        for name, lr in zip(channels.names, per_step):
            if not (lr > 0).all():
                raise ValueError(
                    f"{name!r} was recorded with learning rate {lr.min().item()}: the norm would be infinite"
                )
        # One more entry for the norms after the last step.
        self._lr = [torch.cat([lr, lr[-1:]]) for lr in per_step]
        factors = torch.stack([(own / lr) ** power for own, lr in zip(lrs, self._lr)], 1)  # [T+1, weights]
        scale = factors
        if form == "exact":
            decay = decays(recording, channels.names)
            scale = factors * (1 - torch.cat([decay, decay[-1:]])) ** power
        self._factors: list[list[float]] = factors.tolist()
        self._channels, self._rows, self._t = channels, rows.tolist(), 0
        self._sizes = torch.tensor(channels.sizes, device=channels.device)
        self._table = recording.table(channels).to(channels.device, channels.dtype)
        self._scale = scale.to(channels.device, channels.dtype)

    def advance(self, initial: bool) -> list[float]:
        t = 0 if initial else self._t + 1
        if t > self._steps:
            raise ValueError(f"the recording holds {self._steps} steps, all of them were taken")
        self._t = t
        return self._factors[t]

    def target(self) -> Tensor | None:
        scale = self._scale[self._t].repeat_interleave(self._sizes, output_size=self._channels.total)
        return self._table[self._rows[self._t]] * scale

    def lr(self, group: int, base: float) -> float:
        """Groups without recorded weights follow the first recorded weight's learning rate."""
        return base * (self._lr[0][self._t] / self._lr[0][0]).item()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._t}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["step"] > self._steps:
            raise ValueError(f"the state is at step {state['step']}, the recording holds {self._steps}")
        self._t = state["step"]
