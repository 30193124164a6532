"""Weight decay, learning rate and norm as one quantity: see it, set it, replace one by another (F1-F4)."""

from normmatters.optim._rows import angular_update, channel_norms, effective_step_size
from normmatters.optim.correction import StepSizeCorrection
from normmatters.optim.invariance import (
    Invariance,
    ScaleInvariantParameters,
    scale_invariant_parameters,
    split_parameters,
)
from normmatters.optim.norm_schedule import NormSchedule
from normmatters.optim.recorder import NormRecorder
from normmatters.optim.recording import Recording

__all__ = [
    "Invariance",
    "NormRecorder",
    "NormSchedule",
    "Recording",
    "ScaleInvariantParameters",
    "StepSizeCorrection",
    "angular_update",
    "channel_norms",
    "effective_step_size",
    "scale_invariant_parameters",
    "split_parameters",
]
