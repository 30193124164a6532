"""TEMPORARY: the fused calls of a norm in terms of today's methods, until the batch norm modules have them."""
from __future__ import annotations
import inspect
from normmatters.nn import twin
from normmatters.nn.batchnorm_base import LpBatchNorm

if "relu" in inspect.signature(LpBatchNorm.forward_linked).parameters:
    def forward_linked(norm, *a, **k): return norm.forward_linked(*a, **k)
    twin_fits, twin_batch_norm = twin.twin_fits, twin.twin_batch_norm
else:
    def forward_linked(norm, input, residual=None, link=None, linked=True, *, relu=False, pooled=False):
        act, norm.act = norm.act, "relu"
        norm.pool = "max" if pooled else None
        try:
            return norm.forward_linked(input, residual, link, linked)
        finally:
            norm.act = act
            norm.pool = None
    def twin_fits(norm, input, other, other_input):
        act, norm.act = norm.act, "relu"
        try:
            return twin.fit(norm, input, other, other_input)
        finally:
            norm.act = act
    def twin_batch_norm(norm, input, other, other_input, *, linked=False):
        return twin.twin_batch_norm(norm, input, other, other_input, linked=linked)
