"""PyTorch's own module inputs pass through ours at p = 2, with the values and gradients of PyTorch's modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import module_db

from normmatters.nn import LpBatchNorm1d, LpBatchNorm2d, LpBatchNorm3d, LpLayerNorm
from support import tolerances

# To import PyTorch's tests forbids the whole process to set cuDNN's switches, which the lab's tests do on a GPU.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

PAIRS = {
    nn.BatchNorm1d: LpBatchNorm1d,
    nn.BatchNorm2d: LpBatchNorm2d,
    nn.BatchNorm3d: LpBatchNorm3d,
    nn.LayerNorm: LpLayerNorm,
}
INFOS = [info for info in module_db if info.module_cls in PAIRS]


def results(module: nn.Module, x: Tensor) -> list[Any]:
    leaf = x.detach().clone().requires_grad_()
    y = module(leaf)
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator, dtype=y.dtype))
    return [y, leaf.grad, *(p.grad for p in module.parameters()), *module.buffers()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
def test_same_results(info: Any, dtype: torch.dtype, training: bool) -> None:
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=training)
    assert len(inputs) >= 6
    for case in inputs:
        args, kwargs = case.constructor_input.args, case.constructor_input.kwargs
        theirs = info.module_cls(*args, **kwargs, dtype=dtype).train(training)
        # p comes second in ours; everything after it keeps its order.
        mine = partial(PAIRS[info.module_cls], args[0], 2)(*args[1:], **kwargs, dtype=dtype).train(training)
        for parameter in theirs.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        mine.load_state_dict(theirs.state_dict())
        (x,) = case.forward_input.args
        # make_tensor draws from [-9, 9], and eps is at least 1e-5: everything stays of order 10.
        atol = 10 * tolerances.parameter_gradient(dtype, max(x.numel(), 1))
        for ours, expected in zip(results(mine, x), results(theirs, x), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=atol, msg=lambda m: f"{case.desc}: {m}")  # noqa: B023
