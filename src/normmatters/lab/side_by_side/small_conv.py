"""Small convolutions in half precision, by kernels of the lab's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normmatters.kernels import backends
from normmatters.kernels.operators import needs_operators, on_device

_CHANNELS = (16, 32, 64)
_LARGEST = 1 << 21  # elements of an input: a CIFAR network's first stage at 128 images. A library's kernels like more.


def use_small_convolutions(model: nn.Module) -> None:
    """Make every convolution of ``model`` that fits a :class:`SmallConv2d`; parameters and names stay."""
    for module in model.modules():
        if type(module) is nn.Conv2d and _fits(module):
            module.__class__ = SmallConv2d


def _fits(conv: nn.Conv2d) -> bool:
    geometry = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)
    channels = conv.in_channels in _CHANNELS and conv.out_channels in _CHANNELS
    return channels and geometry == ((3, 3), (1, 1), (1, 1), (1, 1), 1) and conv.padding_mode == "zeros"


class SmallConv2d(nn.Conv2d):
    """A 3 × 3 convolution of 16 to 64 channels: by kernels of ours in half precision, channels last, on a GPU.

    For inputs of up to 4 MiB, where cuDNN's take more than twice as long on an H200 (all of ResNet-56's, forward and
    backward, 128 images; ``python tools/side_by_side.py --cudnn`` compares steps); all else is ``nn.Conv2d``.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if self.bias is not None or not _can_run(input, weight) or not _in_half(input, weight):  # folding adds a bias
            return super().forward(input)
        with on_device(input.device):
            output: Tensor = _Conv3x3.apply(input, weight.to(input.dtype))
        return output


def _can_run(x: Tensor, weight: Tensor) -> bool:
    # Where batch norm's kernels do not run, these do not either; and what does not fit, PyTorch refuses.
    return (
        x.numel() <= _LARGEST
        and not backends.why_not_triton(x)
        and not needs_operators()
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.shape[1] == weight.shape[1]
        and x.device == weight.device
    )


def _in_half(x: Tensor, weight: Tensor) -> bool:
    """Whether autocast would do this convolution in the input's half precision, or both are in it already."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return False
    device = x.device.type
    chosen = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return chosen == x.dtype


class _Conv3x3(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        from normmatters.lab.side_by_side import small_conv_kernels as kernels

        weight = weight.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        return kernels.convolve(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        from normmatters.lab.side_by_side import small_conv_kernels as kernels

        # Saved tensors as well: hooks such as `save_on_cpu(pin_memory=True)` return them with other strides.
        x, weight, g = (t.contiguous(memory_format=torch.channels_last) for t in (*ctx.saved_tensors, g))
        for_x, for_weight = ctx.needs_input_grad
        return (
            kernels.input_gradient(g, x, weight) if for_x else None,
            kernels.weight_gradient(g, x, weight) if for_weight else None,
        )
