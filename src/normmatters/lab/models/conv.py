"""Convolutions without a bias, and the quick way for small ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normmatters.kernels import backends
from normmatters.kernels.operators import needs_operators, on_device

_CHANNELS = (16, 32, 64)
_LARGEST = 1 << 21  # elements of an input: a CIFAR network's first stage at 128 images. A library's kernels like more.


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution with no bias, for the norm behind it brings one."""
    small = kernel == 3 and stride == 1 and inputs in _CHANNELS and outputs in _CHANNELS
    kind = SmallConv2d if small else nn.Conv2d
    return kind(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class SmallConv2d(nn.Conv2d):
    """A 3 × 3 convolution of 16 to 64 channels: by kernels of ours in half precision, channels last, on a GPU.

    For inputs of up to 4 MiB, where cuDNN's take more than twice as long on an H200 (all of ResNet-56's, forward and
    backward, 128 images: see ``conv_kernels``); everything else is ``nn.Conv2d``.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if self.bias is not None or _why_not(input, weight) or not _half(input, weight):  # folding brings a bias
            return super().forward(input)
        with on_device(input.device):
            output: Tensor = _Conv3x3.apply(input, weight.to(input.dtype))
        return output


def _why_not(x: Tensor, weight: Tensor) -> bool:
    # Where batch norm's kernels do not run, these do not either; and what does not fit, PyTorch refuses.
    return (
        x.numel() > _LARGEST
        or bool(backends.why_not_triton(x))
        or needs_operators()
        or not x.is_contiguous(memory_format=torch.channels_last)
        or x.shape[1] != weight.shape[1]
        or x.device != weight.device
    )


def _half(x: Tensor, weight: Tensor) -> bool:
    """Whether autocast would do this convolution in the input's dtype, or without it both are in it already."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return False
    device = x.device.type
    chosen = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return chosen == x.dtype


class _Conv3x3(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        from normmatters.lab.models import conv_kernels as kernels

        weight = weight.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        return kernels.convolve(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        from normmatters.lab.models import conv_kernels as kernels

        # What was saved, too: hooks such as `save_on_cpu(pin_memory=True)` give it back with other strides.
        x, weight, g = (t.contiguous(memory_format=torch.channels_last) for t in (*ctx.saved_tensors, g))
        for_x, for_weight = ctx.needs_input_grad
        return (
            kernels.input_gradient(g, x, weight) if for_x else None,
            kernels.weight_gradient(g, x, weight) if for_weight else None,
        )
