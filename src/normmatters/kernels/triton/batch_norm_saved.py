"""What the forward pass keeps for the backward pass: how many bits an element, and in what shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from normmatters.kernels.triton.layout import ROWS_PER_CODE, Tiling, View, apply_tiling_of


def kept(kind: str, k: int) -> int:
    """How many elements a channel get a term of their own in the backward pass."""
    return {"linf": 1, "topk": k, "range": 2}.get(kind, 0)


def inverts_output(*, relu: bool, residual: bool) -> bool:
    """Whether the lean backward pass finds x̂ in the output, which the layer after a ReLU keeps anyway.

    A residual hides x̂, and an output without a ReLU is often kept by nobody else: then codes of x̂ are cheaper.
    """
    return relu and not residual


def code_bits(kind: str, *, relu: bool, residual: bool, lean: bool) -> int:
    """Bits an element that the backward pass needs beside its tensor."""
    if lean and not inverts_output(relu=relu, residual=residual):
        return 4
    return 2 if relu or kind == "l1" else 0


class Saved(NamedTuple):
    """Shapes and dtypes of what the backward pass needs beside its tensor: codes, and for L1 counts above the mean."""

    code: tuple[int, int] = (0, 0)
    code_dtype: torch.dtype = torch.int8
    counts: tuple[int, int] = (0, 0)
    count_dtype: torch.dtype = torch.int32


def saved_shapes(view: View, itemsize: int, kind: str, *, relu: bool, residual: bool, lean: bool, save: bool) -> Saved:
    """What is saved; nothing unless ``save``."""
    if not save:
        return Saved()
    bits = code_bits(kind, relu=relu, residual=residual, lean=lean)
    saved = Saved((view.code_rows, view.cols) if bits else (0, 0), torch.int16 if bits == 4 else torch.int8)
    if kind != "l1":
        return saved
    tiling = apply_tiling_of(view, itemsize)
    return saved._replace(
        counts=(tiling.splits, tiling.entries(view)), count_dtype=count_dtype(tiling, ROWS_PER_CODE * tiling.group)
    )


def count_dtype(tiling: Tiling, elements: int) -> torch.dtype:
    """The least integer that holds what one program can count, with so many elements in each place of a tile."""
    most = -(-tiling.tiles // tiling.splits) * tiling.block_r * elements
    return torch.uint8 if most <= 255 else torch.int16 if most <= 32767 else torch.int32
