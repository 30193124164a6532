"""Batch norm followed by any activation, as timm's ``BatchNormAct2d``, under the norm's own state_dict keys."""

from __future__ import annotations

from torch import Tensor, nn
from torch.fx import Proxy

from normmatters.kernels import dispatch
from normmatters.nn.batchnorm import LpBatchNorm2d
from normmatters.nn.leaf import module_call


class ThenAct:
    """For a norm with two more modules: ``drop``, then ``activation``, follow its output.

    ``activation`` is no ``act``: that one is a name, and a part of the norm's own operation.
    """

    drop: nn.Module
    activation: nn.Module

    def forward(self, input: Tensor, *residual: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return module_call(self, input, *residual)
        output: Tensor = self.activation(self.drop(super().forward(input, *residual)))  # type: ignore[misc]
        return output

    def forward_linked(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        link: Tensor | None = None,
        linked: bool = True,
        *,
        relu: bool = False,
        pooled: bool = False,
    ) -> tuple[Tensor, None]:
        """:meth:`forward`, and no link: it would belong to what the activation has not seen yet."""
        output = self.forward(input, *(() if residual is None else (residual,)))
        output = output.relu() if relu else output
        return dispatch.max_pool(output) if pooled else output, None


class LpBatchNormAct2d(ThenAct, LpBatchNorm2d):  # type: ignore[misc]
    """``activation(drop(norm(x)))`` in one module; :func:`normmatters.convert` makes it of timm's ``BatchNormAct2d``.

    Example::

        >>> bn = LpBatchNormAct2d(8, p=1)
        >>> bn.drop, bn.activation = nn.Identity(), nn.SiLU()
        >>> bn(torch.randn(2, 8, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
    """
