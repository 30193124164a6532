"""Change a model the user has: swap its norms, run each with the ReLU and the add after it, go back, and fold."""

from normmatters.surgery.back import to_torch
from normmatters.surgery.blocks import register_fusion
from normmatters.surgery.fold import fold
from normmatters.surgery.report import Change, ConversionReport
from normmatters.surgery.swap import convert

__all__ = ["Change", "ConversionReport", "convert", "fold", "register_fusion", "to_torch"]
