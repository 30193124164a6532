"""Layer norm over the channels of (N, C, H, W): what ConvNeXt calls ``LayerNorm2d``."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Proxy

from normmatters.nn.layernorm import L1LayerNorm, LpLayerNorm
from normmatters.nn.leaf import module_call


class ChannelsFirst:
    """For a layer norm: the normalized dimension is dimension 1 of four."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each pixel of ``input``, (N, C, H, W), over its channels."""
        if isinstance(input, Proxy):
            return module_call(self, input)
        channels: int = self.normalized_shape[-1]  # type: ignore[attr-defined]
        if input.dim() != 4 or input.shape[1] != channels:
            raise ValueError(f"expected 4D input, (N, {channels}, H, W), got shape {tuple(input.shape)}")
        output: Tensor = super().forward(input.permute(0, 2, 3, 1))  # type: ignore[misc]
        return output.permute(0, 3, 1, 2)


class LpLayerNorm2d(ChannelsFirst, LpLayerNorm):
    """:class:`LpLayerNorm` of each pixel of (N, C, H, W) over its channels. Fastest in channels_last.

    Example::

        >>> LpLayerNorm2d(16, p=1.5)(torch.randn(2, 16, 4, 4)).shape
        torch.Size([2, 16, 4, 4])
    """


class L1LayerNorm2d(ChannelsFirst, L1LayerNorm):
    """:class:`L1LayerNorm` of each pixel of (N, C, H, W) over its channels. Fastest in channels_last.

    Example::

        >>> L1LayerNorm2d(16)(torch.randn(2, 16, 4, 4)).shape
        torch.Size([2, 16, 4, 4])
    """
