"""Weight decay, learning rate and norm as one quantity: see it, set it, replace one by another (F1-F4)."""

from normmatters.optim.angular import Angular
from normmatters.optim.angular_sgd import AngularSGD
from normmatters.optim.channels import angular_update, channel_norms, effective_step_size
from normmatters.optim.corrected_decay import CorrectedWeightDecay
from normmatters.optim.correction import StepSizeCorrection
from normmatters.optim.decay_groups import weight_decay_groups
from normmatters.optim.equilibrium import (
    Equilibrium,
    adamw_equilibrium_angle,
    adamw_equilibrium_norm,
    equilibrium_angle,
    equilibrium_norm,
    norm_trajectory,
    predict_equilibrium,
    steps_to_equilibrium,
)
from normmatters.optim.invariance import (
    Invariance,
    ScaleInvariantParameters,
    scale_invariant_parameters,
    split_parameters,
)
from normmatters.optim.norm_schedule import NormSchedule
from normmatters.optim.recipe import Recipe, explain
from normmatters.optim.recorder import NormRecorder
from normmatters.optim.recording import Recording
from normmatters.optim.weight_decay_free import WeightDecayFreeSGD
from normmatters.optim.weight_decay_free_adamw import WeightDecayFreeAdamW

__all__ = [
    "Angular",
    "AngularSGD",
    "CorrectedWeightDecay",
    "Equilibrium",
    "Invariance",
    "NormRecorder",
    "NormSchedule",
    "Recipe",
    "Recording",
    "ScaleInvariantParameters",
    "StepSizeCorrection",
    "WeightDecayFreeAdamW",
    "WeightDecayFreeSGD",
    "adamw_equilibrium_angle",
    "adamw_equilibrium_norm",
    "angular_update",
    "channel_norms",
    "effective_step_size",
    "equilibrium_angle",
    "equilibrium_norm",
    "explain",
    "norm_trajectory",
    "predict_equilibrium",
    "scale_invariant_parameters",
    "split_parameters",
    "steps_to_equilibrium",
    "weight_decay_groups",
]
