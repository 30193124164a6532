"""torch.export and ONNX: the same outputs, plain ATen operations, and one Conv for each folded norm."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import normmatters as nm
from normmatters.kernels import backends, dispatch
from normmatters.norm import Norm
from support.models import ResNet

BATCH = torch.export.Dim("batch", min=2)


def every_norm() -> nn.Module:
    """All batch norms, layer norms and weight norms in one network, in evaluation, after some training."""
    norms: list[nn.Module] = [nm.L1BatchNorm2d(4), nm.LpBatchNorm2d(4, p=3.0), nm.LInfBatchNorm2d(4)]
    norms += [nm.TopKBatchNorm2d(4, k=3), nm.RangeBatchNorm2d(4, act="relu"), nm.MeanOnlyBatchNorm2d(4)]
    norms += [nm.SyncLpBatchNorm(4), nm.TReLU(), nm.L1LayerNorm(6), nm.LpLayerNorm(6, p=3.0), nm.L1RMSNorm(6)]
    norms += [nm.LpLayerNorm(6, p=math.inf), nm.LpLayerNorm(6, p="range")]
    first, last = nm.bounded_weight_norm(nn.Conv2d(3, 4, 3)), nm.classic_weight_norm(nn.Linear(6, 2), p=1)
    return trained(nn.Sequential(first, *norms, last))


def trained(model: nn.Module) -> nn.Module:
    for _ in range(4):
        model(2 * torch.randn(4, 3, 8, 8) + 1)
    return model.eval()


def converted_resnet() -> nn.Module:
    return trained(nm.convert(ResNet()))


@pytest.mark.parametrize("make", [every_norm, converted_resnet])
def test_export_gives_the_same_outputs_in_operations_of_torch(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = make()
    exported = torch.export.export(model, (torch.randn(4, 3, 8, 8),), dynamic_shapes=({0: BATCH},))
    operations = {str(node.target).split(".")[0] for node in exported.graph.nodes if node.op == "call_function"}
    assert operations <= {"aten", "_operator", "<built-in function getitem>"}  # it runs without this library
    torch.export.save(exported, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for size in (4, 7):
        x = torch.randn(size, 3, 8, 8)
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-6, atol=1e-6)


def test_export_leaves_the_kernels_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they would run, as on a GPU: a layer norm is exported as the equation."""
    monkeypatch.setattr(backends, "INTERPRETED", True)
    x = torch.randn(4, 16)
    if dispatch.layer_norm_backend(x, [16], Norm()).name != "triton":
        pytest.skip("triton is not installed")
    exported = torch.export.export(nm.L1LayerNorm(16), (x,))
    operations = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert operations
    assert all(operation.startswith("aten.") for operation in operations)


@pytest.mark.gpu
def test_export_on_a_gpu() -> None:
    model, x = every_norm().cuda(), torch.randn(4, 3, 8, 8, device="cuda")
    exported = torch.export.export(model, (x,))
    operations = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert not any("normmatters" in operation for operation in operations)
    torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-3, atol=1e-3)


def test_a_folded_model_exports_without_a_trace_of_its_norms() -> None:
    model = converted_resnet()
    x = torch.randn(4, 3, 8, 8)
    exported = torch.export.export(nm.fold(model, inplace=False), (x,))
    operations = Counter(str(node.target) for node in exported.graph.nodes if node.op == "call_function")
    assert operations["aten.conv2d.default"] == 8
    assert not any("norm" in operation for operation in operations)
    torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-5, atol=1e-6)


def onnx_session(model: nn.Module, path: Path) -> tuple[Counter[str], Callable[[Tensor], Tensor]]:
    """Export with a free batch size; the operations of the graph, and a function that runs it in onnxruntime."""
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    program = torch.onnx.export(
        model, (torch.randn(4, 3, 8, 8),), dynamo=True, dynamic_shapes=({0: BATCH},), verbose=False
    )
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])

    return Counter(node.op_type for node in onnx.load(path).graph.node), run


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_onnx_of_a_folded_layer_is_one_conv(tmp_path: Path) -> None:
    layer = nn.Sequential(nm.bounded_weight_norm(nn.Conv2d(3, 4, 3, bias=False)), nm.L1BatchNorm2d(4, act="relu"))
    model = trained(layer)
    operations, run = onnx_session(nm.fold(copy.deepcopy(model)), tmp_path / "layer.onnx")
    assert operations == {"Conv": 1, "Relu": 1}
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_onnx_of_every_norm_gives_the_same_outputs(tmp_path: Path) -> None:
    model = every_norm()
    _, run = onnx_session(model, tmp_path / "norms.onnx")
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(run(x), model(x).detach(), rtol=1e-4, atol=1e-5)
