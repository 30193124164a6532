"""3 × 3 convolutions of few channels, half precision, channels last: output, and the gradients of input and weight.

A CIFAR network's stages have 16 to 64 channels, a few megabytes a tensor. Its convolutions are bound by memory, but the
kernels that a library has for them are made for large products. Here a program takes the pixels of a tile, all
channels at once, and goes through the nine places of the window:

    y[m] = Σ_t x[m + shift(t)]·w[t]        the input's gradient: the same, the window turned by 180° and w[t] transposed
    dw[t] = Σ_m x[m + shift(t)]ᵀ·g[m]      by parts of the pixels, which a second kernel adds in a fixed order
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from normmatters.kernels.triton.launch import Launch, wait_for_previous

CHANNELS = (16, 32, 64)
_PIXELS = 128  # of a tile
_WARPS = 4
_PARTS = 256  # into which the pixels of a weight gradient are cut, at most


@triton.jit
def _window(x_ptr, m, row, column, inside, channel, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IN: tl.constexpr, PLACE):
    """x at one place of the window around each pixel, [pixels, IN]; zero outside the image."""
    down, right = PLACE // 3 - 1, PLACE % 3 - 1
    there = inside & (row + down >= 0) & (row + down < HEIGHT) & (column + right >= 0) & (column + right < WIDTH)
    at = (m + down * WIDTH + right).to(tl.int64)
    return tl.load(x_ptr + at[:, None] * IN + channel[None, :], mask=there[:, None], other=0.0)


@triton.jit
def _weight(w_ptr, c_in, c_out, IN: tl.constexpr, OUT: tl.constexpr, TURNED: tl.constexpr, PLACE: tl.constexpr):
    """w at one place of the window, [IN, OUT]."""
    if TURNED:
        return tl.load(w_ptr + c_in[:, None] * (9 * OUT) + (8 - PLACE) * OUT + c_out[None, :])
    return tl.load(w_ptr + c_out[None, :] * (9 * IN) + PLACE * IN + c_in[:, None])


@triton.jit
def convolve_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    pixels,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y from x and w, [C_out, 3, 3, C_in] in memory. TURNED: x is the output's gradient, y the input's."""
    wait_for_previous(OVERLAP)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = m < pixels
    column, row = m % WIDTH, m // WIDTH % HEIGHT
    c_in, c_out = tl.arange(0, IN), tl.arange(0, OUT)
    y = tl.zeros((BLOCK, OUT), tl.float32)
    for top in tl.static_range(0, 9, 3):  # three places at a time: their loads are on their way together
        x0 = _window(x_ptr, m, row, column, inside, c_in, HEIGHT, WIDTH, IN, top)
        x1 = _window(x_ptr, m, row, column, inside, c_in, HEIGHT, WIDTH, IN, top + 1)
        x2 = _window(x_ptr, m, row, column, inside, c_in, HEIGHT, WIDTH, IN, top + 2)
        w0 = _weight(w_ptr, c_in, c_out, IN, OUT, TURNED, top)
        w1 = _weight(w_ptr, c_in, c_out, IN, OUT, TURNED, top + 1)
        w2 = _weight(w_ptr, c_in, c_out, IN, OUT, TURNED, top + 2)
        y = tl.dot(x0, w0, y)
        y = tl.dot(x1, w1, y)
        y = tl.dot(x2, w2, y)
    at = m.to(tl.int64)[:, None] * OUT + c_out[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside[:, None])


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
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """parts[part, place, c_out, c_in] for one part of the pixels and one row of the window, three places."""
    wait_for_previous(OVERLAP)
    part, top = tl.program_id(0), 3 * tl.program_id(1)
    c_in, c_out = tl.arange(0, IN), tl.arange(0, OUT)
    left = tl.zeros((OUT, IN), tl.float32)
    middle = tl.zeros((OUT, IN), tl.float32)
    right = tl.zeros((OUT, IN), tl.float32)
    for tile in range(TILES):
        m = (part + tile * PARTS) * BLOCK + tl.arange(0, BLOCK)
        inside = m < pixels
        column, row = m % WIDTH, m // WIDTH % HEIGHT
        g = tl.load(g_ptr + m.to(tl.int64)[:, None] * OUT + c_out[None, :], mask=inside[:, None], other=0.0)
        turned = tl.trans(g)
        left = tl.dot(turned, _window(x_ptr, m, row, column, inside, c_in, HEIGHT, WIDTH, IN, top), left)
        middle = tl.dot(turned, _window(x_ptr, m, row, column, inside, c_in, HEIGHT, WIDTH, IN, top + 1), middle)
        right = tl.dot(turned, _window(x_ptr, m, row, column, inside, c_in, HEIGHT, WIDTH, IN, top + 2), right)
    at = parts_ptr + ((part * 9 + top) * OUT + c_out[:, None]) * IN + c_in[None, :]
    tl.store(at, left)
    tl.store(at + OUT * IN, middle)
    tl.store(at + 2 * OUT * IN, right)


@triton.jit
def add_parts_kernel(
    parts_ptr,
    dw_ptr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """dw, [C_out, 3, 3, C_in] in memory, from its parts."""
    wait_for_previous(OVERLAP)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, BLOCK_P)
    at = part[:, None] * (9 * OUT * IN) + element[None, :]
    total = tl.sum(tl.load(parts_ptr + at, mask=(part < PARTS)[:, None], other=0.0), axis=0)
    c_in, c_out, place = element % IN, element // IN % OUT, element // (IN * OUT)
    tl.store(dw_ptr + (c_out * 9 + place) * IN + c_in, total.to(dw_ptr.dtype.element_ty))


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
    pixels = batch * height * width
    tiles = -(-pixels // _PIXELS)
    parts = min(_PARTS, tiles)
    size = {"HEIGHT": height, "WIDTH": width}
    launch = functools.partial(Launch, overlaps=True, num_warps=_WARPS)
    block = 32
    return Plan(
        launch(
            convolve_kernel,
            (tiles, 1),
            (pixels,),
            {**size, "IN": c_in, "OUT": c_out, "TURNED": False, "BLOCK": _PIXELS},
        ),
        launch(
            convolve_kernel,
            (tiles, 1),
            (pixels,),
            {**size, "IN": c_out, "OUT": c_in, "TURNED": True, "BLOCK": _PIXELS},
        ),
        launch(
            weight_parts_kernel,
            (parts, 3),
            (pixels,),
            {**size, "IN": c_in, "OUT": c_out, "PARTS": parts, "TILES": -(-tiles // parts), "BLOCK": _PIXELS},
        ),
        launch(
            add_parts_kernel,
            (9 * c_in * c_out // block, 1),
            (),
            {"IN": c_in, "OUT": c_out, "PARTS": parts, "BLOCK_P": triton.next_power_of_2(parts), "BLOCK": block},
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
    parts = torch.empty(plan.parts * 9 * weight.shape[0] * weight.shape[1], dtype=torch.float32, device=x.device)
    dw = torch.empty_like(weight)
    plan.weight_parts((x, g, parts))
    plan.add_parts((parts, dw))
    return dw
