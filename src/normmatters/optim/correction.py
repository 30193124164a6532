r"""Eq. 5: train without weight decay and take the effective steps of a run with it (F3).

A step of plain SGD on a weight followed by a normalization depends on its length only through η/‖w‖² (F2). Let w be the
weights of a reference run with weight decay λ, and v those of a run without. The reference has
w_{t+1} = (1−ηλ)w_t − η∇L(w_t), which has the direction of w_t − η/(1−ηλ)·∇L(w_t). For equal directions
∇L(v) = ∇L(w)·‖w‖/‖v‖. So the run without decay keeps the same directions if, per channel, it uses

    η̂_t = η_t · ‖v_t‖² / ‖w_t‖² · 1/(1−η_tλ)          (exact form: norms of every step)
    η̂_t = η_t · ‖v_t‖² / ‖w_e‖²                        (Eq. 5, paper form: norms at the end of the running epoch e)

Where v has grown far above w, an update that is yet to be multiplied by R² = ‖v‖²/‖w‖² is lost in the rounding of v.
And a momentum buffer would multiply old gradients, from before v grew, by today's factor. So the optimizer works at the
reference's norms: it gets the weights v/R and the gradients R·∇L(v), which are the reference's; then the weights are
multiplied by R again. For plain SGD this is Eq. 5. It carries Eq. 5 over to any optimizer: Adam's step does not depend
on the gradient's length and gets R where SGD gets R². The exact form is exact for plain SGD. With momentum both forms
are approximations, because the reference's decay term enters its buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from normmatters.optim._base import OptimizerWrapper, cosine_to_gradient, evaluate, exponents, is_capturing
from normmatters.optim.channels import ChannelMeter, Channels, ChannelScaler, Named
from normmatters.optim.invariance import ScaleInvariantParameters
from normmatters.optim.recording import Form, Recording, decays

# |cos(w, ∇L)| above which a weight is refused as not scale invariant; batch norm's eps stays far below.
_NOT_INVARIANT = 0.02
# Above this ‖v‖/‖w‖ a channel stops growing. Only its direction matters, and batch norm squares what it computes, which
# might overflow. Weight decay alone stays far below. But a channel that died in the reference, with hardly a norm
# there, may be alive in this run: it then turns by more than a right angle per step, and grows as much. It is held at
# this ratio, not brought back, because running statistics would take a while to follow.
LARGEST_RATIO = 2.0**16

_PLACE = attrgetter("device", "dtype")


class StepSizeCorrection(OptimizerWrapper):
    """Correct every channel's learning rate so that its effective step is that of a recorded run (Eq. 5, F3).

    Wraps any torch optimizer, which takes its step on the weights brought to the reference's norms, with the gradients
    that they would have there. Weights and gradients then go back to their own scale. It is an `Optimizer` itself: give
    it to LR schedulers, `GradScaler` and hooks in place of the wrapped one. Needs the memory of one more gradient.

    Args:
        optimizer: the optimizer, without weight decay on the corrected weights; it must step without a closure.
        recording: the reference run's norms; its step t is this run's step t.
        parameters: the result of `scale_invariant_parameters`, a mapping or (name, tensor) pairs of the weights to
            correct; or the model, when the recording is of tested weights. `None` asks the optimizer for the names.
            Untested weights are checked by their gradient at the first step.
        form: `"paper"` holds the norms of an epoch's end through that epoch; `"exact"` takes the norms of each step and
            the factor 1/(1−ηλ).

    >>> model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(8, 3)
    >>> invariant = scale_invariant_parameters(model, x)
    >>> reference = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    >>> recorder = NormRecorder(invariant, reference)
    >>> for _ in range(3):
    ...     model(x).square().mean().backward()
    ...     reference.step()
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)  # of another run, without weight decay
    >>> optimizer = StepSizeCorrection(sgd, recorder.recording(), invariant, form="exact")
    """

    def __init__(
        self,
        optimizer: Optimizer,
        recording: Recording,
        parameters: Named | None = None,
        *,
        form: Form = "paper",
    ) -> None:
        super().__init__(optimizer)
        if not isinstance(recording, Recording):
            raise TypeError(
                f"recording must be a Recording (of a file: Recording.load(path)), got {type(recording).__name__}"
            )
        channels = recording.match(optimizer, parameters)
        channels.check_norms_are_free(optimizer)
        rows = recording.rows_by_step(form)[:-1]
        table = 1 / recording.table(channels)
        growth = torch.ones_like(table)  # 1/(1−ηλ)
        if form == "exact":
            sizes = torch.tensor(channels.sizes, device="cpu")
            table = table[:-1]
            growth = 1 / (1 - decays(recording, channels.names).repeat_interleave(sizes, dim=1))
        self._form, self._signature = form, recording.signature
        known = exponents(optimizer)
        self._power = 1.0 if known is None else known[0] - 1
        self._channels, self._groups = channels, sorted(set(channels.groups(optimizer)))
        # Everything that a step reads is on the device, the step number too, so that a CUDA graph can capture the step.
        self._table = table.to(channels.device, channels.dtype)
        self._growth = growth.to(channels.device, channels.dtype)
        self._rows = rows.to(channels.device)
        self._step = torch.zeros(1, dtype=torch.int64, device=channels.device)
        self._taken = 0
        self._meter = ChannelMeter(channels, angle=False)
        self._learning_rate = channels.new_row()
        self._factor = channels.new_row()
        self._scaler = ChannelScaler(channels, self._factor)
        # At fixed places, so that one planned launch scales them all.
        self._grads = [torch.zeros_like(w) for w in channels.weights]
        scaled = Channels(dict(zip(channels.names, self._grads)), dict(zip(channels.names, channels.dims)))
        self._grad_scaler = ChannelScaler(scaled, self._meter.row)
        # Weights that scale_invariant_parameters has not tested are checked by their first gradients.
        self._checked = isinstance(parameters, ScaleInvariantParameters) or recording.tested

    @property
    def ratio(self) -> dict[str, Tensor]:
        """Name → `[channels]`, the factor that the last step's learning rate was multiplied by.

        R² = ‖v‖²/‖w‖² for SGD and optimizers that are not known here, R for the Adam family.
        """
        return {n: r.clone() for n, r in self._channels.split(self._learning_rate).items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimizer, its updates corrected.

        In a CUDA graph the length of the recording cannot be checked: steps beyond its end use its last row.
        """
        if self._taken >= len(self._rows) and not is_capturing():
            raise ValueError(f"the recording holds {len(self._rows)} steps, all of them were taken")
        self._channels.check_norms_stay_free(self.optimizer, self._groups)
        loss = evaluate(closure)
        if not self._checked and not is_capturing():
            self._check_invariance()
        row = self._rows[self._step.clamp(max=len(self._rows) - 1)]
        ratio = self._meter.read_().mul_(self._table[row].squeeze(0))
        ratio.clamp_(min=torch.finfo(ratio.dtype).tiny)  # a pruned channel stays 0 instead of 0 · 1/0
        growth = self._growth[row].squeeze(0)
        torch.mul(ratio, growth, out=self._factor).reciprocal_()
        own_grads = self._scale_gradients()  # first, because it may refuse, and weights must not have changed then
        self._scale_weights()
        try:
            self.optimizer.step()
        finally:
            for weight, grad in own_grads:
                weight.grad = grad
            torch.mul(ratio, growth, out=self._factor)
            torch.mul(ratio.pow(self._power), self._factor, out=self._learning_rate)
            self._factor.mul_((ratio / LARGEST_RATIO).log2_().floor_().clamp_(min=0).neg_().exp2_())
            self._scale_weights()
        self._step.add_(1)
        self._taken += 1
        return loss

    def _scale_weights(self) -> None:
        """Multiply by the factors; weights without a gradient take no step and stay equal to the bit."""
        idle = [weight.grad is None for weight in self._channels.weights]
        if any(idle):
            for part in itertools.compress(self._factor.split(self._channels.sizes), idle):
                part.fill_(1.0)
        self._scaler.scale_()

    def _scale_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Give the optimizer R times the gradients; returns the weights with their own gradients."""
        like = [w if w.grad is None else w.grad for w in self._channels.weights]
        for name, grad in zip(self._channels.names, like):
            if grad.layout != torch.strided:
                raise ValueError(f"{name!r} has a {grad.layout} gradient: only dense ones can be scaled by channel")
        if [*map(_PLACE, self._grads)] != [*map(_PLACE, like)]:  # the model was cast or moved
            for own, w, grad in zip(self._grads, self._channels.weights, like):
                own.data = torch.zeros_like(w, dtype=grad.dtype)
        triples = [(w, w.grad, scaled) for w, scaled in zip(self._channels.weights, self._grads) if w.grad is not None]
        if triples:
            torch._foreach_copy_([scaled for _, _, scaled in triples], [grad for _, grad, _ in triples])
            self._grad_scaler.scale_()
            for weight, _, scaled in triples:
                weight.grad = scaled
        return [(weight, grad) for weight, grad, _ in triples]

    def _check_invariance(self) -> None:
        """⟨w, ∇L⟩ = 0 (F1), looked at once, in the first step with gradients; the only host sync."""
        for name, w in zip(self._channels.names, self._channels.weights):
            if w.grad is None:
                continue
            if abs(cosine := cosine_to_gradient(w)) > _NOT_INVARIANT:
                raise ValueError(
                    f"{name!r} is not scale invariant: cos(w, grad) is {cosine:.2g}, not 0. Eq. 5 holds only for "
                    "weights followed by a normalization: pass the result of scale_invariant_parameters"
                )
        self._checked = any(w.grad is not None for w in self._channels.weights)

    def _own_state(self) -> dict[str, Any]:
        return {"step": int(self._step), "form": self._form, "recording": self._signature}

    def _check_own_state(self, state: dict[str, Any]) -> None:
        for key, mine in (("form", self._form), ("recording", self._signature)):
            if state[key] != mine:
                raise ValueError(f"the state was made with {key} {state[key]!r}, this correction has {mine!r}")

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self._step.fill_(state["step"])
        self._taken = state["step"]
