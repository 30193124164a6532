"""How an optimizer's step and state answer to a rescaled weight.

Behind a normalization ∇L(a·w) = ∇L(w)/a (F1). SGD's step is the gradient, so it turns the weight by η/‖w‖²; Adam
divides the gradient by its own size, so its step does not depend on the scale and turns the weight by η/‖w‖. The state
follows: what is a gradient scales as a⁻¹, what is a squared gradient as a⁻².
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import optim

_ADAM = {"exp_avg": -1.0, "exp_avg_sq": -2.0, "max_exp_avg_sq": -2.0}
_KNOWN: tuple[tuple[type[optim.Optimizer], float, Mapping[str, float]], ...] = (
    (optim.SGD, 2.0, {"momentum_buffer": -1.0}),
    (optim.Adam, 1.0, _ADAM),
    (optim.AdamW, 1.0, _ADAM),
    (optim.NAdam, 1.0, _ADAM | {"mu_product": 0.0}),
    (optim.Adagrad, 1.0, {"sum": -2.0}),
    (optim.RMSprop, 1.0, {"square_avg": -2.0, "grad_avg": -1.0, "momentum_buffer": 0.0}),
)


def innermost(optimizer: optim.Optimizer) -> optim.Optimizer:
    """The optimizer inside any wrappers that keep theirs as `.optimizer`."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), optim.Optimizer):
        optimizer = inner
    return optimizer


def exponents(optimizer: optim.Optimizer) -> tuple[float, Mapping[str, float]] | None:
    """k of the effective step size η/‖w‖ᵏ, and state name → j where the state scales as aʲ when the weight is
    multiplied by a; `None` if they are not known.
    """
    inner = innermost(optimizer)
    return next(((k, powers) for kind, k, powers in _KNOWN if isinstance(inner, kind)), None)
