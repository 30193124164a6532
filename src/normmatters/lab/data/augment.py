"""Pad-crop-flip and resized crops for a whole batch at once, on whatever device holds the images.

All randomness of an epoch is drawn beforehand from (seed, epoch) on the CPU, so the same examples in the same crops
come out on every device, resident or streamed, from any number of processes, and after any resume.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def draw_epoch(n: int, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
    """Order (n,) and random numbers (n, 5), uniform in [0, 1), of one epoch."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    return torch.randperm(n, generator=generator), torch.rand(n, 5, generator=generator)


def pad_crop(padded: Tensor, index: Tensor, u: Tensor, size: int, flip: bool) -> Tensor:
    """Random windows of padded images, in one gather.

    ``padded`` is (N, S, S, C) with S ≥ ``size``; ``index`` (n,) selects images; ``u`` (n, 5): row, column, flip.
    Returns (n, size, size, C).
    """
    span = padded.shape[1] - size + 1
    offset = (u[:, :2] * span).long()
    line = torch.arange(size, device=padded.device)
    rows = offset[:, :1] + line
    columns = offset[:, 1:2] + line
    if flip:
        columns = torch.where(u[:, 2:3] < 0.5, columns.flip(1), columns)
    return padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]


def pad(images: Tensor, margin: int) -> Tensor:
    """(N, H, W, C) with a black border of ``margin`` pixels, as cropping before normalization has it."""
    return F.pad(images, (0, 0, margin, margin, margin, margin))


def crop_box(u: Tensor, height: Tensor | int, width: Tensor | int, min_scale: float) -> Tensor:
    """Boxes (n, 4) = top, left, height, width in pixels: area ``min_scale`` to 1, aspect 3/4 to 4/3, anywhere."""
    scale = min_scale + (1 - min_scale) * u[:, 0]
    ratio = torch.exp((2 * u[:, 1] - 1) * 0.28768207245178085)  # log(4/3)
    area = scale * height * width
    h = torch.minimum((area / ratio).sqrt(), torch.as_tensor(float(height), device=u.device))
    w = torch.minimum((area * ratio).sqrt(), torch.as_tensor(float(width), device=u.device))
    return torch.stack([u[:, 3] * (height - h), u[:, 4] * (width - w), h, w], dim=1)


def resized_crop(images: Tensor, u: Tensor, size: int, min_scale: float) -> Tensor:
    """Random resized crops and flips of uint8 (n, H, W, C) to uint8 (n, size, size, C), bilinear."""
    n, height, width, _ = images.shape
    top, left, h, w = crop_box(u, height, width, min_scale).unbind(1)
    w_scale = torch.where(u[:, 2] < 0.5, -w / width, w / width)
    theta = torch.zeros(n, 2, 3, device=images.device)
    theta[:, 0, 0], theta[:, 0, 2] = w_scale, (2 * left + w) / width - 1
    theta[:, 1, 1], theta[:, 1, 2] = h / height, (2 * top + h) / height - 1
    grid = F.affine_grid(theta, [n, images.shape[3], size, size], align_corners=False)
    sampled = F.grid_sample(images.permute(0, 3, 1, 2).float(), grid, padding_mode="border", align_corners=False)
    return sampled.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def resize(images: Tensor, size: int) -> Tensor:
    """uint8 (n, H, W, C) to uint8 (n, size, size, C), antialiased; the same tensor where nothing changes."""
    if images.shape[1] == images.shape[2] == size:
        return images
    x = images.permute(0, 3, 1, 2).float()
    x = F.interpolate(x, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
    return x.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
