"""Modules with state: the normalizations of the paper as drop-ins for ``torch.nn``'s."""

from normmatters.nn.activations import TReLU
from normmatters.nn.batchnorm import (
    L1BatchNorm1d,
    L1BatchNorm2d,
    L1BatchNorm3d,
    LInfBatchNorm1d,
    LInfBatchNorm2d,
    LInfBatchNorm3d,
    LpBatchNorm1d,
    LpBatchNorm2d,
    LpBatchNorm3d,
    MeanOnlyBatchNorm1d,
    MeanOnlyBatchNorm2d,
    MeanOnlyBatchNorm3d,
    RangeBatchNorm1d,
    RangeBatchNorm2d,
    RangeBatchNorm3d,
    TopKBatchNorm1d,
    TopKBatchNorm2d,
    TopKBatchNorm3d,
)
from normmatters.nn.layernorm import L1LayerNorm, L1RMSNorm, LpLayerNorm
from normmatters.nn.layernorm2d import L1LayerNorm2d, LpLayerNorm2d
from normmatters.nn.sync import SyncLpBatchNorm, convert_sync_batchnorm
from normmatters.nn.update_bn import update_bn

__all__ = [
    "L1BatchNorm1d",
    "L1BatchNorm2d",
    "L1BatchNorm3d",
    "L1LayerNorm",
    "L1LayerNorm2d",
    "L1RMSNorm",
    "LInfBatchNorm1d",
    "LInfBatchNorm2d",
    "LInfBatchNorm3d",
    "LpBatchNorm1d",
    "LpBatchNorm2d",
    "LpBatchNorm3d",
    "LpLayerNorm",
    "LpLayerNorm2d",
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
    "convert_sync_batchnorm",
    "update_bn",
]
