"""Bounded and classic weight norm as torch parametrizations (F11–F14)."""

from normmatters.weight_norm.fused import fuse, unfuse
from normmatters.weight_norm.move_rho import move_rho_to_last_layer
from normmatters.weight_norm.parametrizations import BoundedWeight, ClassicWeight, initial_rho
from normmatters.weight_norm.projection import project_weights
from normmatters.weight_norm.register import (
    WeightNormReport,
    apply_weight_norm,
    bounded_weight_norm,
    classic_weight_norm,
    remove_weight_norm,
)

__all__ = [
    "BoundedWeight",
    "ClassicWeight",
    "WeightNormReport",
    "apply_weight_norm",
    "bounded_weight_norm",
    "classic_weight_norm",
    "fuse",
    "initial_rho",
    "move_rho_to_last_layer",
    "project_weights",
    "remove_weight_norm",
    "unfuse",
]
