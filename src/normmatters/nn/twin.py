"""Two batch norms that are added before a ReLU, as one operation: the end of a residual block that downsamples."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normmatters.functional.checks import check_batch_norm
from normmatters.kernels import dispatch
from normmatters.kernels.dispatch import _check_plain, _constant, _count, _who_counts
from normmatters.nn.batchnorm_base import LpBatchNorm


def fit(norm: Any, input: Tensor, other: Any, other_input: Tensor) -> bool:
    """Whether :func:`twin_batch_norm` takes these: two L1 norms in training, on tensors of one kind, by a kernel."""
    return (
        all(
            isinstance(one, LpBatchNorm)
            and type(one).forward is LpBatchNorm.forward  # nothing follows the norm,
            and type(one)._batch_norm is LpBatchNorm._batch_norm  # and no other process takes part
            and "forward" not in vars(one)
            and one._compiled_call_impl is None
            and one.training
            and one.p == 1
            and one.pool is None
            for one in (norm, other)
        )
        and norm is not other
        and (norm.act, other.act) == ("relu", None)
        and norm.memory == other.memory
        and input.shape == other_input.shape
        and input.stride() == other_input.stride()
        and input.dtype == other_input.dtype
        and input.device == other_input.device
        and dispatch.batch_norm_backend(input, p=1, memory=norm.memory).name == "triton"
    )


def twin_batch_norm(
    norm: LpBatchNorm, input: Tensor, other: LpBatchNorm, other_input: Tensor, *, linked: bool = False
) -> tuple[Tensor, Tensor | None]:
    """relu(norm(input) + other(other_input)) where they :func:`fit`, and the link to it if ``linked``, or None.

    Both norms' running statistics move as in their own forward pass.

    Shape:
        input, other_input and output: (N, C, ...)
    """
    from normmatters.kernels import twin_ops

    states, late = [], []
    for one, x in ((norm, input), (other, other_input)):
        running_mean, running_var, count, training, momentum = one._state(x)
        tensors = (running_mean, running_var, one.weight, one.bias)
        check_batch_norm(x, *tensors, training, one.eps, kind="l1")
        _check_plain(*tensors)
        constant = _constant(1, int(x.numel() // x.shape[1]), None, one.constant)
        batches, behind = _who_counts(count, x)
        late.append(behind)
        states.append((*tensors, momentum, one.eps, constant, batches))
    output = twin_ops.twin_batch_norm(input, states[0], other_input, states[1], memory=norm.memory, linked=linked)
    for count in late:
        _count(count)
    return output
