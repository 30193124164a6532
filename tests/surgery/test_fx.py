"""``torch.fx`` on converted models, as torchvision's feature extraction uses it: each norm is one node of the graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import normmatters as nm
from normmatters.nn.batchnorm_act import LpBatchNormAct2d
from normmatters.surgery import convert, fold, to_torch
from support.models import NETS, assert_same_step, batch, make


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_a_converted_network_is_traced_to_the_same_function(name: str, fuse: bool) -> None:
    model = convert(make(name), "l1", fuse=fuse)
    for training in (True, False):
        traced = fx.symbolic_trace(copy.deepcopy(model).train(training))
        assert_same_step(traced, copy.deepcopy(model).train(training))
    torch.testing.assert_close(copy.deepcopy(traced)(batch()), model.eval()(batch()), rtol=1e-10, atol=1e-10)


def test_a_trace_shows_the_modules_as_written() -> None:
    model: Any = convert(make("resnet"), "l1")
    names = [str(node.target) for node in fx.symbolic_trace(model).graph.nodes if node.op == "call_module"]
    assert {"layer1.0.bn1", "relu", "maxpool"} <= set(names)


def test_a_graph_may_be_cleaned() -> None:
    """The modules of a shortcut are nodes of their own: those of a module that is only handed on would be deleted."""
    model = convert(make("resnet"), "l1").eval()
    traced = fx.symbolic_trace(model)
    names = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    assert "layer2.0.downsample.1" in names
    traced.delete_all_unused_submodules()
    torch.testing.assert_close(traced(batch()), model(batch()), rtol=1e-10, atol=1e-10)


class Behind(nn.Module):
    """A norm behind a linear layer, or a convolution where ``rank`` is 4."""

    def __init__(self, norm: nn.Module, rank: int) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Conv2d(4, 4, 1) if rank == 4 else nn.Linear(4, 4)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))  # type: ignore[no-any-return]


def norm_then(act: nn.Module) -> nn.Module:
    norm = LpBatchNormAct2d(4, p=1)
    norm.drop, norm.activation = nn.Identity(), act
    return norm


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nm.L1BatchNorm1d(4, act="relu"), (5, 4)),
        (nm.LInfBatchNorm2d(4), (5, 4, 3, 4)),
        (nm.SyncLpBatchNorm(4, p=1), (5, 4)),
        (norm_then(nn.SiLU()), (5, 4, 3, 4)),
        (nm.L1LayerNorm(4), (5, 4)),
        (nm.nn.L1LayerNorm2d(4), (5, 4, 3, 4)),
        (nm.L1RMSNorm(4), (5, 4)),
        (nm.TReLU(), (5, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_norm_is_one_node(norm: nn.Module, shape: tuple[int, ...]) -> None:
    """And so is what ``to_torch`` and ``fold`` put in its place."""
    x = torch.randn(shape)
    model = Behind(copy.deepcopy(norm), len(shape))
    check(model, x)
    if isinstance(norm, nm.TReLU):
        return
    nodes = fx.symbolic_trace(model).graph.nodes
    assert [str(node.target) for node in nodes if node.op == "call_module"] == ["layer", "norm"]
    if not isinstance(norm, nm.LpLayerNorm | nm.L1RMSNorm):
        check(to_torch(model.eval(), inplace=False), x)
        check(fold(model, inplace=False), x)


def check(model: nn.Module, x: Tensor) -> None:
    traced = fx.symbolic_trace(copy.deepcopy(model))
    gradients = []
    for other in (traced, copy.deepcopy(model)):
        output = other(x)
        output.square().sum().backward()
        gradients.append([output, *(p.grad for p in other.parameters()), *other.buffers()])
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


class Doubled(nm.L1BatchNorm2d):
    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return 2 * super().forward(input, residual)


def test_a_norm_of_ones_own_is_not_done_twice() -> None:
    """The node would call all of its forward, and what that does around the norm's would be recorded behind it."""
    model, x = Behind(Doubled(4), 4).eval(), torch.randn(5, 4, 3, 4)
    with pytest.raises(ValueError, match=r"Doubled\.forward.*is_leaf_module"):
        fx.symbolic_trace(model)

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Doubled) or super().is_leaf_module(m, module_qualified_name)

    torch.testing.assert_close(fx.GraphModule(model, Tracer().trace(model))(x), model(x))


def test_a_norm_alone_has_nothing_to_trace() -> None:
    with pytest.raises(ValueError, match="L1BatchNorm2d as one call: trace a module that has it as a part"):
        fx.symbolic_trace(nm.L1BatchNorm2d(4))
