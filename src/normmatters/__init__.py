"""Norm-aware training for PyTorch: the normalizations of "Norm matters" (Hoffer, Banner, Golan, Soudry 2018), faster.

>>> import normmatters as nm
>>> bn = nm.L1BatchNorm2d(64, act="relu")  # nn.BatchNorm2d(64) and nn.ReLU() in one, in L1
>>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.BatchNorm2d(64), torch.nn.ReLU())
>>> model = nm.convert(model)  # or this, for every batch norm of a model
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from normmatters import constants, functional, precision, weight_norm
from normmatters.nn import (
    L1BatchNorm1d,
    L1BatchNorm2d,
    L1BatchNorm3d,
    L1LayerNorm,
    L1RMSNorm,
    LInfBatchNorm1d,
    LInfBatchNorm2d,
    LInfBatchNorm3d,
    LpBatchNorm1d,
    LpBatchNorm2d,
    LpBatchNorm3d,
    LpLayerNorm,
    MeanOnlyBatchNorm1d,
    MeanOnlyBatchNorm2d,
    MeanOnlyBatchNorm3d,
    RangeBatchNorm1d,
    RangeBatchNorm2d,
    RangeBatchNorm3d,
    SyncLpBatchNorm,
    TopKBatchNorm1d,
    TopKBatchNorm2d,
    TopKBatchNorm3d,
    TReLU,
    convert_sync_batchnorm,
    update_bn,
)
from normmatters.surgery import ConversionReport, convert, fold, register_fusion, to_torch
from normmatters.weight_norm import (
    apply_weight_norm,
    bounded_weight_norm,
    classic_weight_norm,
    move_rho_to_last_layer,
    remove_weight_norm,
)

if TYPE_CHECKING:
    from normmatters import migrate, optim
else:

    def __getattr__(name):
        # The optimizers take as long to import as everything else together, and many programs need none of them.
        if name in ("migrate", "optim"):
            return importlib.import_module(f"normmatters.{name}")
        raise AttributeError(f"module 'normmatters' has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "ConversionReport",
    "L1BatchNorm1d",
    "L1BatchNorm2d",
    "L1BatchNorm3d",
    "L1LayerNorm",
    "L1RMSNorm",
    "LInfBatchNorm1d",
    "LInfBatchNorm2d",
    "LInfBatchNorm3d",
    "LpBatchNorm1d",
    "LpBatchNorm2d",
    "LpBatchNorm3d",
    "LpLayerNorm",
    "MeanOnlyBatchNorm1d",
    "MeanOnlyBatchNorm2d",
    "MeanOnlyBatchNorm3d",
    "RangeBatchNorm1d",
    "RangeBatchNorm2d",
    "RangeBatchNorm3d",
    "SyncLpBatchNorm",
    "TReLU",
    "TopKBatchNorm1d",
    "TopKBatchNorm2d",
    "TopKBatchNorm3d",
    "__version__",
    "apply_weight_norm",
    "bounded_weight_norm",
    "classic_weight_norm",
    "constants",
    "convert",
    "convert_sync_batchnorm",
    "fold",
    "functional",
    "migrate",
    "move_rho_to_last_layer",
    "optim",
    "precision",
    "register_fusion",
    "remove_weight_norm",
    "to_torch",
    "update_bn",
    "weight_norm",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
