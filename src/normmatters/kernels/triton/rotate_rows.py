"""Turn every row of many matrices by one angle, in one launch: the kernel behind `normmatters.optim.AngularSGD`.

One program takes one row: its dot products, then the part of the direction that is orthogonal to it, then the turned
row. A row is read from DRAM once and found in cache after that, so the launch costs three reads and one write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_rows(addresses, lengths, tensor_of_row, row_in_tensor, angle, tensors, tolerance, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    t = tl.load(tensor_of_row + row)
    r = tl.load(row_in_tensor + row).to(tl.int64)
    n = tl.load(lengths + t)
    w_ptr = tl.load(addresses + t).to(tl.pointer_type(tl.float32)) + r * n
    d_ptr = tl.load(addresses + tensors + t).to(tl.pointer_type(tl.float32)) + r * n
    g_ptr = tl.load(addresses + 2 * tensors + t).to(tl.pointer_type(tl.float32)) + r * n
    norm = tl.load(tl.load(addresses + 3 * tensors + t).to(tl.pointer_type(tl.float32)) + r)

    columns = tl.arange(0, BLOCK)
    ww = tl.zeros((BLOCK,), tl.float32)
    wd = tl.zeros((BLOCK,), tl.float32)
    dd = tl.zeros((BLOCK,), tl.float32)
    gg = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + columns < n
        w = tl.load(w_ptr + start + columns, inside, 0.0)
        d = tl.load(d_ptr + start + columns, inside, 0.0)
        g = tl.load(g_ptr + start + columns, inside, 0.0)
        ww += w * w
        wd += w * d
        dd += d * d
        gg = tl.maximum(gg, tl.abs(g))  # a square could underflow to zero
    length2 = tl.sum(ww, 0)
    along = tl.sum(wd, 0) / length2

    pp = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + columns < n
        w = tl.load(w_ptr + start + columns, inside, 0.0)
        d = tl.load(d_ptr + start + columns, inside, 0.0)
        # Subtract first, square after: dd − wd²/ww would lose the digits of a direction that is nearly along w.
        p = d - along * w
        pp += p * p
    perpendicular = tl.sqrt(tl.sum(pp, 0))

    turns = (tl.max(gg, 0) > 0) & (perpendicular > tolerance * tl.sqrt(tl.sum(dd, 0)))
    theta = tl.load(angle)
    a = tl.where(turns, tl.cos(theta), 1.0) * norm / tl.sqrt(length2)
    b = tl.where(turns, tl.sin(theta) * norm / tl.where(turns, perpendicular, 1.0), 0.0)
    for start in range(0, n, BLOCK):
        inside = start + columns < n
        w = tl.load(w_ptr + start + columns, inside, 0.0)
        d = tl.load(d_ptr + start + columns, inside, 0.0)
        tl.store(w_ptr + start + columns, a * w - b * (d - along * w), inside)


def _write(addresses: Tensor, pointers: list[int]) -> None:
    # As arguments of a kernel and not as a copy from the host, which a CUDA graph would not take.
    addresses.zero_()
    torch._foreach_add_(list(addresses.unbind()), pointers)


class RowTable:
    """Where the rows of a list of float32 matrices lie. Built once; only changed addresses are sent again.

    Args:
        weights: tensors whose slices along dimension 0 are dense in memory, all on one device.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        device, counts = weights[0].device, [w.shape[0] for w in weights]
        self.rows = sum(counts)
        self._addresses = torch.zeros(4 * len(weights), dtype=torch.int64, device=device)
        self.lengths = torch.tensor([w.numel() // w.shape[0] for w in weights], dtype=torch.int32, device=device)
        self.tensor_of_row = torch.cat([torch.full((c,), i, dtype=torch.int32) for i, c in enumerate(counts)]).to(
            device
        )
        self.row_in_tensor = torch.cat([torch.arange(c, dtype=torch.int32) for c in counts]).to(device)
        self._known: list[int] = []

    def rotate_(
        self, weights: list[Tensor], directions: list[Tensor], grads: list[Tensor], norms: list[Tensor], angle: Tensor
    ) -> None:
        """Turn each row of ``weights`` by ``angle`` (0-dim float32) away from ``directions``; see `multi_tensor`."""
        pointers = [x.data_ptr() for xs in (weights, directions, grads, norms) for x in xs]
        addresses = self._addresses
        if addresses.is_cuda and torch.cuda.is_current_stream_capturing():
            # A graph keeps a table of its own, so that steps outside it cannot change what it replays.
            addresses = torch.zeros_like(addresses)
            _write(addresses, pointers)
        elif pointers != self._known:
            _write(addresses, pointers)
            self._known = pointers
        _rotate_rows[(self.rows,)](
            addresses,
            self.lengths,
            self.tensor_of_row,
            self.row_in_tensor,
            angle,
            len(weights),
            16 * torch.finfo(torch.float32).eps,
            BLOCK=1024,
        )
