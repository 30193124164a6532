"""The paper's equations as stateless functions in plain PyTorch: the reference for everything else."""

from normmatters.functional.batch_norm import lp_batch_norm
from normmatters.functional.layer_norm import lp_layer_norm, lp_rms_norm
from normmatters.functional.weight import bounded_weight

__all__ = ["bounded_weight", "lp_batch_norm", "lp_layer_norm", "lp_rms_norm"]
