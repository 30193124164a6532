"""The paper's training regimes: learning-rate schedules, and the ways in which weight decay may act (E1).

Weight decay acts on weights of two or more dimensions; biases and the affine parameters of norms have none unless
``optim.decay_norms`` is set. No norm follows the classifier, so its decay (``last_layer_weight_decay``) is always
plain. All that the modes change is how decay acts on the scale-invariant weights, which are found by testing.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from normmatters.lab.config import TEXT, OptimConfig, RunConfig
from normmatters.optim.angular import Angular
from normmatters.optim.angular_sgd import AngularSGD
from normmatters.optim.channels import channel_norms
from normmatters.optim.corrected_decay import CorrectedWeightDecay
from normmatters.optim.correction import StepSizeCorrection
from normmatters.optim.invariance import Invariance, ScaleInvariantParameters, scale_invariant_parameters
from normmatters.optim.norm_schedule import NormSchedule
from normmatters.optim.recorder import NormRecorder
from normmatters.optim.recording import Form, Recording
from normmatters.optim.weight_decay_free import WeightDecayFreeSGD


def lr_factor(config: OptimConfig, step: int, steps_per_epoch: int) -> float:
    """Learning rate of step ``step`` (from 0) over ``config.lr``.

    >>> [lr_factor(OptimConfig(milestones=(1, 2)), s, 10) for s in (9, 10, 20)]
    [1.0, 0.1, 0.01]
    """
    if config.schedule == "warmup_sqrt":  # the Transformer's; config.lr is the peak
        return min((step + 1) / config.warmup_steps, math.sqrt(config.warmup_steps / (step + 1)))
    factor = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "step":
        return factor * _power(config.gamma, sum(step >= round(m * steps_per_epoch) for m in config.milestones))
    if config.schedule == "cosine":
        return factor * 0.5 * (1 + math.cos(math.pi * step / (config.epochs * steps_per_epoch)))
    return factor


def _power(gamma: float, count: int) -> float:
    return 1 / round(1 / gamma) ** count if math.isclose(1 / gamma, round(1 / gamma)) else gamma**count


def find_recording(run_dir: Path, config: RunConfig, reference_dir: str | Path | None = None) -> Recording:
    """The norms of the run that ``optim.reference`` names: a folder beside this run, the cell's same seed, a path."""
    name = config.optim.reference or ""
    run_dir = Path(os.path.abspath(run_dir))  # of "seed0" or "." nothing is above; a link stays where it is
    places = [Path(reference_dir)] if reference_dir else []
    places += [run_dir.parent / name, run_dir.parent.parent / name / run_dir.name, Path(name)]
    for place in places:
        if (place / "norms.safetensors").is_file():
            return Recording.load(place / "norms.safetensors")
        if (place / "summary.json").is_file():
            problem = f"{place} has finished, but has no norms.safetensors"
            raise ValueError(f"optim.reference={name!r}: {problem}; remove its summary.json and train it again")
    raise ValueError(
        f"optim.reference={name!r}: that run's norms are in none of {', '.join(map(str, places))}; "
        "train it first, or use `normmatters reproduce`, which trains both"
    )


_HOW = ("fused", "foreach", "capturable")  # keys of a parameter group that choose kernels, not numbers


@dataclass(eq=False)
class Regime:
    """Optimizer, schedule and recorder of one run, as one thing to step, save and load.

    ``watched``: the weights whose norms are described, with their channel dimensions.
    ``capturable``: whether a CUDA graph may hold the optimizer's step.
    """

    optimizer: Optimizer
    config: OptimConfig
    steps_per_epoch: int
    norm_schedule: NormSchedule | None
    recorder: NormRecorder | None
    watched: dict[str, tuple[Tensor, int | None]]
    capturable: bool
    _factor: float | None = None  # of the learning rate, as it is set now

    @property
    def lr(self) -> float:
        """The learning rate of the first group's next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def before_step(self, step: int) -> None:
        """Set the learning rate of step ``step``, or the norms where a norm schedule sets those instead.

        Norms move here and not after the last step: a validation between the two then sees the weights that the running
        statistics of its batch norms were made with.
        """
        if self.norm_schedule is not None:
            if step > 0:
                self.norm_schedule.step()
            return
        factor = lr_factor(self.config, step, self.steps_per_epoch)
        if factor == self._factor:
            return
        for group in self.optimizer.param_groups:
            lr = group.get("first_lr", self.config.lr) * factor ** group.get("lr_power", 1)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)  # a captured graph reads it from there
            else:
                group["lr"] = lr
        self._factor = factor

    def describe(self) -> dict[str, float]:
        """Mean norm and mean effective step η/‖w‖² (η/‖w‖ for Adam) over the watched channels, of the last step.

        η is the learning rate that acts: with the correction's ratio, or with the decay-free recursion's α². An angular
        optimizer sets the angle itself and has no such step size.
        """
        if not self.watched:
            return {}
        norms = {n: channel_norms(w.detach(), dim).double() for n, (w, dim) in self.watched.items()}
        mean = torch.cat(list(norms.values())).mean().item()
        if self.config.mode == "angular":
            return {"norm": mean}
        ratio: dict[str, Any] = dict.fromkeys(norms, 1.0)
        if isinstance(self.optimizer, StepSizeCorrection):
            ratio = self.optimizer.ratio
        elif self.config.mode == "wd_free":
            first = self.optimizer.param_groups[0]["params"][0]
            alpha = self.optimizer.state[first].get("alpha", 1.0)  # none before the first step
            ratio = dict.fromkeys(norms, float(alpha) ** 2)
        power = 2 if self.config.name == "sgd" else 1
        steps = torch.cat([self.lr * ratio[n] / norm**power for n, norm in norms.items()])
        return {"norm": mean, "effective_step": steps.mean().item()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "norm_schedule": self.norm_schedule.state_dict() if self.norm_schedule else None,
            "recorder": self.recorder.state_dict() if self.recorder else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that may come from another device, or from eager steps; this optimizer's kernels stay its own.

        A learning rate that is a tensor here stays one: a captured graph would hold a number forever.
        """
        saved = []
        for group, other in zip(self.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
            own, lr = group["lr"], float(other["lr"])
            how = {key: group[key] for key in _HOW if key in group}
            saved.append({**other, **how, "lr": torch.full_like(own, lr) if isinstance(own, Tensor) else lr})
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": saved})
        if self.norm_schedule is not None:
            self.norm_schedule.load_state_dict(state["norm_schedule"])
        if self.recorder is not None:
            self.recorder.load_state_dict(state["recorder"])
        self._factor = None


def find_invariant(config: RunConfig, model: nn.Module, example: Any) -> ScaleInvariantParameters | None:
    """The scale-invariant weights, if a mode needs them or the recorder of images could use them; else None."""
    optim = config.optim
    needed = optim.mode not in ("wd_on", "wd_off") or optim.invariant_lr is not None
    text = config.data.name in TEXT
    if not needed and (text or config.runtime.record == "none"):
        return None  # testing a large translator takes long, and nothing depends on it
    if optim.invariant == "all":
        return _all_convolutions(model)
    invariant = scale_invariant_parameters(model, example)
    if needed and not len(invariant):
        raise ValueError(f"optim.mode={optim.mode} acts on scale-invariant weights, and {config.model.name} has none")
    return invariant if len(invariant) else None


def _all_convolutions(model: nn.Module) -> ScaleInvariantParameters:
    """All convolutions' weights, treated as invariant by channel without a test: a control."""
    names = {f"{n}.weight": m.weight for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    every = {n: torch.ones(len(w), dtype=torch.bool, device="cpu") for n, w in names.items()}
    untested = {n: Invariance("channel", 0, mask, (), math.nan, math.nan) for n, mask in every.items()}
    return ScaleInvariantParameters(model, untested)


def build_regime(
    config: RunConfig,
    model: nn.Module,
    steps_per_epoch: int,
    invariant: ScaleInvariantParameters | None,
    recording: Recording | None = None,
) -> Regime:
    """Optimizer, schedule and recorder for ``model`` (not wrapped by DDP or compile)."""
    optim = config.optim
    needed = optim.epochs * steps_per_epoch
    if recording is not None:
        half = config.precision.amp == "fp16"  # leaves out steps that overflow, in this run not the same ones
        missing = needed - int(recording.steps[-1])
        longest = max((b - a for a, b in zip((0, *recording.epoch_ends), recording.epoch_ends)), default=0)
        problem = ""
        if longest > steps_per_epoch or (longest < steps_per_epoch and not half):
            problem = f"its epochs have {longest} steps, this run's {steps_per_epoch}"
        elif missing > 0 and (missing >= steps_per_epoch or not half):
            problem = f"its norms were recorded for {needed - missing} steps, this run takes {needed}"
        if problem:
            raise ValueError(f"optim.reference={optim.reference!r}: {problem}")
        recording = _lengthened(recording, missing) if missing > 0 else recording
    device = next(model.parameters()).device
    capture = device.type == "cuda" and config.runtime.compile == "cudagraph"
    # Only torch's fused SGD and Adam look at fp16's overflow themselves; for the others the scaler asks on the host.
    own = optim.mode in ("wd_on", "wd_off", "norm_schedule")
    capture = capture and (own or config.precision.amp != "fp16") and config.runtime.record != "step"
    capture = capture and optim.angle is None and optim.mode != "wd_follows_lr"  # these read numbers on the host
    groups = _groups(config, model, invariant)
    optimizer = _optimizer(optim, groups, device, capture)
    norm_schedule = None
    form: Form = "paper" if optim.correction == "epoch" else "exact"
    if optim.mode == "corrected":
        assert recording is not None
        optimizer = StepSizeCorrection(optimizer, recording, invariant, form=form)
    elif optim.mode == "wd_follows_lr":
        optimizer = CorrectedWeightDecay(optimizer)
    elif optim.mode == "norm_schedule":
        source = recording or (lambda shadow: LambdaLR(shadow, lambda s: lr_factor(optim, s, steps_per_epoch)))
        norm_schedule = NormSchedule(optimizer, source, invariant, form=form)
    record = config.runtime.record
    watched: dict[str, tuple[Tensor, int | None]]
    recorder = None
    if invariant is not None:
        watched = {n: (p, invariant.dims[n]) for n, p in invariant.named_parameters()}
    else:
        last = {id(p) for p in _classifier(model)}
        watched = {n: (p, 0) for n, p in model.named_parameters() if p.ndim >= 2 and id(p) not in last}
    if record != "none":
        about = {"experiment": config.experiment, "cell": config.cell, "seed": str(config.seed)}
        weights = invariant or {n: p for n, (p, _) in watched.items()}
        recorder = NormRecorder(weights, optimizer, every=record, angle=record == "step", metadata=about)
    return Regime(optimizer, optim, steps_per_epoch, norm_schedule, recorder, watched, capture)


def _lengthened(recording: Recording, steps: int) -> Recording:
    """The recording with ``steps`` more in its last epoch, at the last norms and learning rates."""

    def held(rows: Tensor) -> Tensor:
        return torch.cat([rows, rows[-1:].expand(steps, -1)])

    end = int(recording.steps[-1]) + steps
    return replace(
        recording,
        norms={name: held(norms) for name, norms in recording.norms.items()},
        angles={},
        steps=torch.cat(
            [recording.steps, recording.steps[-1:] + torch.arange(1, steps + 1, device=recording.steps.device)]
        ),
        lr=held(recording.lr),
        weight_decay=held(recording.weight_decay),
        epoch_ends=(*recording.epoch_ends[:-1], end),
    )


def _classifier(model: nn.Module) -> list[nn.Parameter]:
    return list(model.classifier.parameters())  # type: ignore[union-attr]


def _groups(config: RunConfig, model: nn.Module, invariant: ScaleInvariantParameters | None) -> list[dict[str, Any]]:
    """Parameter groups, with names: scale-invariant weights, other weights, weight norms' g, classifier, vectors."""
    optim = config.optim
    decays = optim.mode in ("wd_on", "wd_follows_lr", "wd_free", "angular")
    decay = optim.weight_decay if decays else 0.0
    last_decay = decay if optim.last_layer_weight_decay is None else optim.last_layer_weight_decay
    last = {id(p) for p in _classifier(model)}
    names = set(invariant) if invariant is not None else set()
    gains = {id(m.original0) for m in model.modules() if isinstance(m, ParametrizationList) and hasattr(m, "original0")}
    kinds = ("invariant", "weights", "gains", "last", "vectors")
    parts: dict[str, list[tuple[str, nn.Parameter]]] = {kind: [] for kind in kinds}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if name in names:
            parts["invariant"].append((name, p))
        elif p.ndim < 2:
            parts["vectors"].append((name, p))
        elif id(p) in gains and optim.gain_weight_decay is not None:
            parts["gains"].append((name, p))
        else:
            parts["last" if id(p) in last else "weights"].append((name, p))
    decay_of = {"invariant": decay, "weights": decay, "last": last_decay, "vectors": decay * optim.decay_norms}
    decay_of["gains"] = optim.gain_weight_decay or 0.0
    groups: list[dict[str, Any]] = []
    for part, members in parts.items():
        if not members:
            continue
        group: dict[str, Any] = {"params": members, "weight_decay": decay_of[part]}
        if optim.mode == "wd_free":
            group["weight_decay_free"] = part == "invariant"
        elif optim.mode == "wd_follows_lr":
            group["corrected"] = part == "invariant"
            group["max_lr"] = optim.lr
        elif optim.mode == "angular":
            group["angular"] = part == "invariant"
            if group["angular"]:  # the angle goes as the root of its group's learning rate
                group["lr_power"] = 2 * optim.angle_power
        if part == "invariant":
            if optim.invariant_lr is not None:
                group["first_lr"] = optim.invariant_lr
        groups.append(group)
    return groups


def _optimizer(optim: OptimConfig, groups: list[dict[str, Any]], device: torch.device, capture: bool) -> Optimizer:
    cuda = device.type == "cuda"
    if capture:
        for group in groups:  # one tensor per group: a norm schedule moves the learning rate of some groups only
            group["lr"] = torch.tensor(optim.lr, device=device)
    sgd: dict[str, Any] = {"lr": optim.lr, "momentum": optim.momentum, "nesterov": optim.nesterov}
    if optim.mode == "wd_free":
        tested = optim.invariant == "tested"
        return WeightDecayFreeSGD(groups, **sgd, capturable=capture, check_invariance=tested)
    if optim.mode == "angular" and optim.name == "sgd" and optim.angle is None:
        return AngularSGD(groups, **sgd, capturable=capture)
    optimizer: Optimizer
    if optim.name == "sgd":
        optimizer = SGD(groups, **sgd, fused=cuda)
        if cuda and optim.momentum:
            # If fp16's first step overflows, torch's fused SGD skips it, but keeps momenta that were never set.
            for parameter in (p for group in groups for p in group["params"]):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    else:
        kind = Adam if optim.name == "adam" else AdamW
        optimizer = kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=cuda, capturable=capture)  # type: ignore[arg-type]
        if capture:
            optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]  # the warm-up knows it
    return Angular(optimizer, optim.angle) if optim.mode == "angular" else optimizer
