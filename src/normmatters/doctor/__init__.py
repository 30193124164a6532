"""What a model's norms do, to which weights, at what cost; and what ``convert`` would change.

The names below are imported when they are first used: the command line reads its options without loading any of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normmatters.doctor.diagnosis import Diagnosis, NormLayer, Spread, Table, Weight, diagnose
    from normmatters.doctor.saved_bytes import Kept
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'normmatters.doctor' has no attribute {name!r}")
        return getattr(importlib.import_module("normmatters.doctor.diagnosis"), name)


__all__ = ["Diagnosis", "Kept", "NormLayer", "Spread", "Table", "Weight", "diagnose"]
