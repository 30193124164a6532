"""Two batch norms that are added before a ReLU, as one operation: the end of a residual block that downsamples."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normmatters.kernels import dispatch
from normmatters.nn.batchnorm_base import LpBatchNorm


def twin_fits(norm: Any, input: Tensor, other: Any, other_input: Tensor) -> bool:
    """Whether :func:`twin_batch_norm` takes these: two L1 norms in training on tensors of one kind, by a kernel."""
    return (
        all(
            isinstance(one, LpBatchNorm)
            and type(one).forward is LpBatchNorm.forward  # nothing follows the norm,
            and type(one)._batch_norm is LpBatchNorm._batch_norm  # and no other process takes part
            and "forward" not in vars(one)
            and one._compiled_call_impl is None
            and one.training
            and one.p == 1
            for one in (norm, other)
        )
        and norm is not other
        and other.act is None
        and norm.memory == other.memory
        and input.shape == other_input.shape
        and input.stride() == other_input.stride()
        and input.dtype == other_input.dtype
        and input.device == other_input.device
        and dispatch.batch_norm_backend(input, norm.norm).name == "triton"
    )


def twin_batch_norm(
    norm: LpBatchNorm, input: Tensor, other: LpBatchNorm, other_input: Tensor, *, linked: bool = False
) -> tuple[Tensor, Tensor | None]:
    """relu(norm(input) + other(other_input)) where :func:`twin_fits`, and the link to it if ``linked``, or None.

    Both norms' running statistics move as in their own forward pass.

    Shape:
        input, other_input and output: (N, C, ...)
    """
    first, second = (
        dispatch.NormedInput(x, one.norm, one.weight, one.bias, one.running_stats(x)[0])
        for one, x in ((norm, input), (other, other_input))
    )
    return dispatch.twin_batch_norm(first, second, linked=linked)
