r"""A weight decay that follows the learning rate on normalized layers (AdamC and SGDC, arXiv 2506.02285).

Weight decay brings the norm of a weight followed by a normalization to an equilibrium: ‖w‖⁴ ∝ η/λ for SGD, ‖w‖² ∝ η/λ
for AdamW (see `equilibrium`). So when a schedule lowers η, the norm falls too, slowly, and
gradients, which go as 1/‖w‖, grow towards the end of training. With

    λ_t = λ · η_t / η_max

the ratio η/λ_t is constant, and so is the norm that weights are at. The steps are the wrapped optimizer's, with λ_t:

    AdamW:  w ← (1 − η_t λ_t) w − η_t Δ_t            SGD:  b ← μb + ∇L + λ_t w,   w ← w − η_t b
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from normmatters.optim._base import Group, OptimizerWrapper, check_number, host_value, is_capturing
from normmatters.optim.angular import Angular
from normmatters.optim.angular_sgd import AngularSGD
from normmatters.optim.decay_groups import model_groups


class CorrectedWeightDecay(OptimizerWrapper):
    """An optimizer with its weight decay proportional to the learning rate: AdamC around AdamW, SGDC around SGD.

    For weights followed by a normalization. Groups with ``corrected=False`` keep their weight decay as it is: the last
    layer, embeddings. It is an `Optimizer` itself: give it to LR schedulers in place of the wrapped one.

    Args:
        optimizer: the optimizer to wrap. Its groups hold λ as ``weight_decay``; they may have ``corrected=False`` and a
            ``max_lr`` of their own.
        max_lr: η_max, the largest learning rate of the schedule. None takes each group's ``max_lr``, its
            ``initial_lr``, which schedulers set, or else its present lr.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    >>> normalized, others = split_parameters(model, torch.randn(8, 3))
    >>> adamw = torch.optim.AdamW([normalized, others | {"corrected": False}], lr=1e-3, weight_decay=0.1)
    >>> optimizer = CorrectedWeightDecay(adamw)
    >>> schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    """

    def __init__(self, optimizer: Optimizer, max_lr: float | None = None) -> None:
        super().__init__(optimizer)
        if isinstance(optimizer, AngularSGD | Angular):
            raise TypeError(f"{type(optimizer).__name__} applies no weight decay, so there is none to correct")
        if max_lr is not None:
            check_number("max_lr", max_lr)
        self._max_lr = max_lr
        self._prepare_groups()

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        example_input: Any,
        kind: Callable[..., Optimizer] = AdamW,
        *,
        max_lr: float | None = None,
        decay_vectors: bool = True,
        **options: Any,
    ) -> Self:
        """The optimizer for a whole model: the decay of its scale-invariant weights is corrected, found by a test.

        Args:
            model, example_input: as for :func:`scale_invariant_parameters`.
            kind: class of the optimizer to wrap.
            max_lr: as above.
            decay_vectors: whether biases and affine parameters decay, as they do in ``kind(model.parameters(), …)``.
            options: of ``kind``: lr, weight_decay, …

        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> optimizer = CorrectedWeightDecay.from_model(model, torch.randn(8, 3), lr=1e-3, weight_decay=0.1)
        """
        groups = model_groups(model, example_input, decay_vectors, {"corrected": True}, {"corrected": False})
        return cls(kind(groups, **options), max_lr)

    def _prepared(self, index: int, group: Group) -> Group:
        if not group.setdefault("corrected", True):
            return group
        if group.get("weight_decay_free") or not group.get("weight_decay"):
            raise ValueError(f"group {index} needs a weight_decay to correct: give it one, or corrected=False")
        present: float = host_value(group.get("max_lr") or group.get("initial_lr") or group["lr"])
        max_lr = group["max_lr"] = present if self._max_lr is None else self._max_lr
        if not 0 < max_lr < math.inf:
            raise ValueError(f"max_lr of group {index} must be positive, got {max_lr}: give max_lr")
        return group

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimizer with λ_t = λ·η_t/η_max in the corrected groups."""
        if is_capturing():
            raise ValueError("CorrectedWeightDecay reads the learning rate on the host: it cannot be captured")
        decays = []
        for group in (group for group in self.param_groups if group.get("corrected")):
            lr, max_lr = host_value(group["lr"]), group["max_lr"]
            if lr > max_lr * (1 + 1e-6):  # schedules round
                raise ValueError(f"lr {lr:g} is above max_lr {max_lr:g}: give max_lr, the largest of the schedule")
            decays.append((group, group["weight_decay"] * lr / max_lr))
        with self._with_decays(decays):
            return self.optimizer.step(closure)
