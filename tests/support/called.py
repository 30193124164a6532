"""The batch norm functions of the library, called with the arguments of ``lp_batch_norm`` and a few more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from normmatters.kernels import dispatch
from normmatters.kernels import hand_derived as by_hand
from normmatters.kernels.backends import Backend
from normmatters.norm import Norm, RunningStats


def _called(function: Callable[..., Any], with_training: bool = True) -> Callable[..., Any]:
    def call(
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: Any = 0.1,
        eps: float = 1e-5,
        *,
        p: float | str = 1,
        k: int | None = None,
        constant: str | float = "exact",
        memory: str = "exact",
        num_batches_tracked: Tensor | None = None,
        **options: Any,
    ) -> Any:
        norm = Norm(p, k, constant, eps, memory)
        running = RunningStats(running_mean, running_var, num_batches_tracked, momentum)
        assert training or with_training
        arguments = (training,) if with_training else ()
        return function(input, norm, weight, bias, running, *arguments, **options)

    return call


batch_norm = _called(dispatch.batch_norm)
linked_batch_norm = _called(dispatch.linked_batch_norm)
pooled_batch_norm = _called(dispatch.pooled_batch_norm)
hand_derived = _called(by_hand.batch_norm, with_training=False)


def backend(
    input: Tensor, *, training: bool = True, p: float | str = 1, k: int | None = None, memory: str = "exact"
) -> Backend:  # fmt: skip
    return dispatch.batch_norm_backend(input, Norm(p, k, memory=memory), training=training)
