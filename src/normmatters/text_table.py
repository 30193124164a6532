"""Rows of text, aligned."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines, their columns side by side.

    >>> print(aligned([("layer", "norm"), ("1", "BatchNorm2d")]))
    layer  norm
    1      BatchNorm2d
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
