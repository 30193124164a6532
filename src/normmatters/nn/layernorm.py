"""Layer and RMS norm modules in every norm (F10); drop-ins for ``torch.nn.LayerNorm`` and ``torch.nn.RMSNorm``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from normmatters.kernels import dispatch
from normmatters.nn.leaf import module_call
from normmatters.norm import Norm, norm_of


class LpLayerNorm(nn.LayerNorm):
    """Layer norm in the Lp norm: (x − μ)/√(s² + eps)·weight + bias over the last ``len(normalized_shape)`` dimensions.

    Inherits ``torch.nn.LayerNorm`` for its state and so that parameter groups built by type find it. In evaluation
    ``nn.TransformerEncoderLayer`` may take it for one and not call it: put it there by :func:`normmatters.convert`.

    Args:
        normalized_shape: the sizes of the normalized dimensions, or the last one.
        p: 1, 2, any float ≥ 1, ``math.inf`` or ``"range"``.
        eps: added to s².
        elementwise_affine: learn a weight and, with ``bias``, a bias for each element.
        k: with ``p=math.inf``, the mean of the k largest deviations (F7).
        constant: ``"exact"``, ``"paper"``, ``"none"``, or a positive number that multiplies the exact constant.

    Shape:
        input and output: (..., *normalized_shape)

    Example::

        >>> LpLayerNorm(16, p=1.5)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    _default_p: float | str = 1

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        p: float | str = 1,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        k: int | None = None,
        constant: str | float = "exact",
    ) -> None:
        if Norm(p, k, constant, eps).kind == "mean":
            raise ValueError("layer norm needs a scale: p must not be 'mean'")
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)  # type: ignore[arg-type]
        self.p = p
        self.k = k
        self.constant = constant

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, (..., *normalized_shape)."""
        if isinstance(input, Proxy):
            return module_call(self, input)
        norm = norm_of(self.p, self.k, self.constant, self.eps)  # type: ignore[arg-type]
        return dispatch.layer_norm(input, self.normalized_shape, norm, self.weight, self.bias)

    def extra_repr(self) -> str:
        """``torch.nn.LayerNorm``'s, then what differs from this class's defaults."""
        ours = {"p": (self.p, self._default_p), "k": (self.k, None), "constant": (self.constant, "exact")}
        changed = [f"{name}={value!r}" for name, (value, default) in ours.items() if value != default]
        return ", ".join([super().extra_repr(), *changed])


class L1LayerNorm(LpLayerNorm):
    """L1 layer norm (F10): divides by √(π/2)·mean|x − μ| of each token. Arguments as in ``torch.nn.LayerNorm``.

    Example::

        >>> L1LayerNorm(16)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        constant: str | float = "exact",
    ) -> None:
        super().__init__(normalized_shape, 1, eps, elementwise_affine, bias, device, dtype, constant=constant)


class L1RMSNorm(nn.RMSNorm):
    """RMS norm in the L1 norm: divides by √(π/2)·mean|x|, no mean subtracted. Arguments as in ``torch.nn.RMSNorm``.

    Args:
        normalized_shape: the sizes of the normalized dimensions, or the last one.
        eps: added to the squared scale; None is the epsilon of the dtype computed in.
        elementwise_affine: learn a weight for each element.
        constant: ``"exact"``, ``"paper"``, ``"none"``, or a positive number that multiplies the exact constant.

    Shape:
        input and output: (..., *normalized_shape)

    Example::

        >>> L1RMSNorm(16)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        constant: str | float = "exact",
    ) -> None:
        Norm(1, None, constant, eps)  # checks them
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)  # type: ignore[arg-type]
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, (..., *normalized_shape)."""
        if isinstance(x, Proxy):
            return module_call(self, x)
        norm = norm_of(1, None, self.constant, self.eps)
        return dispatch.rms_norm(x, self.normalized_shape, norm, self.weight)

    def extra_repr(self) -> str:
        """``torch.nn.RMSNorm``'s, then the constant where it is not the default."""
        extra = "" if self.constant == "exact" else f", constant={self.constant!r}"
        return super().extra_repr() + extra
