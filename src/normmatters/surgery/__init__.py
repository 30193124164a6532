"""Swap the norms of any model, merge the ReLU and the residual add behind each into it, go back again, and fold."""

from normmatters.surgery.back import to_torch
from normmatters.surgery.fold import fold
from normmatters.surgery.report import Change, ConversionReport
from normmatters.surgery.swap import convert

__all__ = ["Change", "ConversionReport", "convert", "fold", "to_torch"]
