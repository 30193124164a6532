"""Swap the norms of any model, merge the ReLU and the residual add behind each into it, go back again, and fold."""

from normmatters.convert.back import to_torch
from normmatters.convert.fold import fold
from normmatters.convert.report import Change, ConversionReport
from normmatters.convert.swap import convert

__all__ = ["Change", "ConversionReport", "convert", "fold", "to_torch"]
