"""3 × 3 convolutions of few channels, half precision, channels last: output, and the gradients of input and weight.

A CIFAR network's stages have 16 to 64 channels, a few megabytes per tensor. Its convolutions are bound by what passes
through a multiprocessor's load units, and the kernels that a library has for them are made for large products. So a
program reads few values more than once, and lets the matrix units multiply zeros instead, of which they have plenty:

    y[m] = Σ x[m + shift(ky, kx)]·w[ky, kx]     several rows of an image at once: a row of x is read for all rows of y
                                                that it belongs to, which stand side by side in one product
    the input's gradient                        the same, the window turned by 180° and w transposed
    dw[ky, kx] = Σ x[p + kx − 1]ᵀ·g[p − (ky − 1)·W]   three shifts of x (neighbours in memory) by three shifts of g, all
                                                nine in one product; by parts of the pixels, added in a fixed order
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.triton.launch import Launch, wait_for_previous


class Tiles(NamedTuple):
    """How the work is cut for a number of channels (the larger of input's and output's)."""

    columns: int  # of images side by side, times
    rows: int  # of an image: a program's pixels of y
    pixels: int  # of a tile of a weight gradient
    parts: int  # into which the pixels are cut, at most
    joint: bool  # all nine places of the window in one product, or the three of one ky
    warps: tuple[int, int] = (4, 4)


# Measured on an H200 at the sizes of a CIFAR network, 128 images.
TILES = {
    16: Tiles(128, 2, 128, 128, True),
    32: Tiles(128, 1, 32, 128, True, (4, 8)),
    64: Tiles(64, 1, 64, 32, False, (4, 8)),
}


@triton.jit
def _pixels(x_ptr, pixel, column, there, kx: tl.constexpr, WIDTH: tl.constexpr, IN: tl.constexpr):
    """x at the neighbours of these pixels to which kx points, [pixels, IN]; zero outside the image."""
    inside = there & (column + kx >= 1) & (column + kx <= WIDTH)
    at = (pixel + (kx - 1))[:, None] * IN + tl.arange(0, IN)[None, :]
    return tl.load(x_ptr + at, mask=inside[:, None], other=0.0)


@triton.jit
def _weights(
    w_ptr, row, c_out, down: tl.constexpr, kx: tl.constexpr, IN, OUT, TURNED: tl.constexpr, ROWS: tl.constexpr
):
    """w[ky, kx], [IN, ROWS·OUT], with the ky by which the row ``down`` of x belongs to each row of y; zero for none."""
    ky = down - row
    c_in = tl.arange(0, IN)[:, None]
    if TURNED:
        at = c_in * (9 * OUT) + ((8 - ky * 3 - kx) * OUT + c_out)[None, :]
    else:
        at = (c_out * (9 * IN) + (ky * 3 + kx) * IN)[None, :] + c_in
    if ROWS == 1:
        return tl.load(w_ptr + at)
    return tl.load(w_ptr + at, mask=((ky >= 0) & (ky < 3))[None, :], other=0.0)


@triton.jit
def convolve_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    columns,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y from x and w, [C_out, 3, 3, C_in] in memory. TURNED: x is the output's gradient, y the input's.

    A program has ROWS rows of BLOCK columns of y; ``columns`` counts them over all images. y is [BLOCK, ROWS·OUT].
    """
    wait_for_previous(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image, column, top = at // WIDTH, at % WIDTH, tl.program_id(1) * ROWS
    first = (image.to(tl.int64) * HEIGHT + top) * WIDTH + column  # the pixel in the uppermost row
    row, c_out = tl.arange(0, ROWS * OUT) // OUT, tl.arange(0, ROWS * OUT) % OUT
    y = tl.zeros((BLOCK, ROWS * OUT), tl.float32)
    for down in tl.static_range(ROWS + 2):  # the rows of x, from the one above
        there = (at < columns) & (top + down >= 1) & (top + down <= HEIGHT)
        pixel = first + (down - 1) * WIDTH
        x0 = _pixels(
            x_ptr, pixel, column, there, 0, WIDTH, IN
        )  # three at a time: their loads are on their way together
        x1 = _pixels(x_ptr, pixel, column, there, 1, WIDTH, IN)
        x2 = _pixels(x_ptr, pixel, column, there, 2, WIDTH, IN)
        w0 = _weights(w_ptr, row, c_out, down, 0, IN, OUT, TURNED, ROWS)
        w1 = _weights(w_ptr, row, c_out, down, 1, IN, OUT, TURNED, ROWS)
        w2 = _weights(w_ptr, row, c_out, down, 2, IN, OUT, TURNED, ROWS)
        y = tl.dot(x0, w0, y)
        y = tl.dot(x1, w1, y)
        y = tl.dot(x2, w2, y)
    pixel = first[:, None] + row[None, :] * WIDTH
    inside = (at < columns)[:, None] & (top + row < HEIGHT)[None, :]
    tl.store(y_ptr + pixel * OUT + c_out[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weight_parts_kernel(
    x_ptr,
    g_ptr,
    parts_ptr,
    pixels,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    JOINT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """parts[part] of dw, [C_out, 3, 3, C_in] in memory, from one part of the pixels: all of it, or one ky's."""
    wait_for_previous(OVERLAP)
    part = tl.program_id(0)
    k = tl.arange(0, 4 * IN)  # three neighbours, of which the fourth makes a power of two
    kx = k // IN
    if JOINT:
        n = tl.arange(0, 4 * OUT)
        ky, c_out = n // OUT, n % OUT
    else:
        n = tl.arange(0, OUT)
        ky, c_out = n * 0 + tl.program_id(1), n
    dw = tl.zeros((k.shape[0], n.shape[0]), tl.float32)
    for tile in range(TILES):
        p = (part + tile * PARTS) * BLOCK + tl.arange(0, BLOCK)
        column, row = p % WIDTH, p // WIDTH % HEIGHT
        neighbour, other = column[:, None] + kx[None, :], row[:, None] - ky[None, :]
        inside = (p < pixels)[:, None] & (kx < 3)[None, :] & (neighbour >= 1) & (neighbour <= WIDTH)
        x = tl.load(x_ptr + (p.to(tl.int64)[:, None] * IN + (k - IN)[None, :]), mask=inside, other=0.0)
        inside = (p < pixels)[:, None] & (ky < 3)[None, :] & (other >= -1) & (other < HEIGHT - 1)
        pixel = p.to(tl.int64)[:, None] + (1 - ky)[None, :] * WIDTH
        g = tl.load(g_ptr + pixel * OUT + c_out[None, :], mask=inside, other=0.0)
        dw = tl.dot(tl.trans(x), g, dw)
    at = (c_out * 9 + ky * 3)[None, :] * IN + k[:, None]
    tl.store(parts_ptr + part * (9 * IN * OUT) + at, dw, mask=(kx < 3)[:, None] & (ky < 3)[None, :])


@triton.jit
def add_parts_kernel(
    parts_ptr,
    dw_ptr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """dw from its parts."""
    wait_for_previous(OVERLAP)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, BLOCK_P)
    at = part[:, None] * SIZE + element[None, :]
    total = tl.sum(tl.load(parts_ptr + at, mask=(part < PARTS)[:, None], other=0.0), axis=0)
    tl.store(dw_ptr + element, total.to(dw_ptr.dtype.element_ty))


class Plan(NamedTuple):
    """The launches of a convolution at one shape."""

    forward: Launch
    input_gradient: Launch
    weight_parts: Launch
    add_parts: Launch
    parts: int


@functools.cache
def plan_of(batch: int, height: int, width: int, c_in: int, c_out: int, dtype: torch.dtype) -> Plan:
    """For x of (batch, c_in, height, width) and a weight of (c_out, c_in, 3, 3)."""
    cut = TILES[max(c_in, c_out)]
    size = {"HEIGHT": height, "WIDTH": width}

    def convolve(inputs: int, outputs: int, turned: bool) -> Launch:
        grid = (-(-batch * width // cut.columns), -(-height // cut.rows))
        shape = {**size, "IN": inputs, "OUT": outputs, "TURNED": turned, "ROWS": cut.rows, "BLOCK": cut.columns}
        return Launch(convolve_kernel, grid, {"columns": batch * width, **shape}, num_warps=cut.warps[0])

    pixels = batch * height * width
    tiles = -(-pixels // cut.pixels)
    parts = min(cut.parts, tiles)
    work = {"PARTS": parts, "TILES": -(-tiles // parts), "JOINT": cut.joint, "BLOCK": cut.pixels}
    total, block = 9 * c_in * c_out, 32
    return Plan(
        convolve(c_in, c_out, turned=False),
        convolve(c_out, c_in, turned=True),
        Launch(
            weight_parts_kernel,
            (parts, 1 if cut.joint else 3),
            {"pixels": pixels, **size, "IN": c_in, "OUT": c_out, **work},
            num_warps=cut.warps[1],
        ),
        Launch(
            add_parts_kernel,
            (total // block, 1),
            {"SIZE": total, "PARTS": parts, "BLOCK_P": triton.next_power_of_2(parts), "BLOCK": block},
        ),
        parts,
    )


def _plan(x: Tensor, weight: Tensor) -> Plan:
    batch, c_in, height, width = x.shape
    return plan_of(batch, height, width, c_in, weight.shape[0], x.dtype)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution of x (N, C_in, H, W) with weight (C_out, C_in, 3, 3), both channels last, padded by one."""
    batch, _, height, width = x.shape
    y = torch.empty(
        (batch, weight.shape[0], height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
    )
    _plan(x, weight).forward((x, weight, y))
    return y


def input_gradient(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """What the gradient g of the output makes of x."""
    dx = torch.empty_like(x)
    _plan(x, weight).input_gradient((g, weight, dx))
    return dx


def weight_gradient(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """What the gradient g of the output makes of the weight."""
    plan = _plan(x, weight)
    parts = torch.empty(plan.parts * weight.numel(), dtype=torch.float32, device=x.device)
    dw = torch.empty_like(weight)
    plan.weight_parts((x, g, parts))
    plan.add_parts((parts, dw))
    return dw
