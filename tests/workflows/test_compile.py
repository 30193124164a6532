"""torch.compile without graph breaks: a transformer block by aot_eager, a small model through the C++ compiler."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import normmatters as nm
from support.workflow_nets import MODELS, gradients

MODE = "max-autotune-no-cudagraphs"


def assert_same_training(compiled: nn.Module, eager: nn.Module, x: Tensor, **tolerance: float) -> None:
    """Two steps: outputs, gradients and statistics."""
    for _ in range(2):
        outputs = []
        for model in (compiled, eager):
            model.zero_grad()
            output = model(x)
            output.square().sum().backward()
            outputs.append(output)
        assert_close(*outputs, **tolerance)
        assert_close(gradients(compiled), gradients(eager), **tolerance)
    assert_close(list(compiled.state_dict().values()), list(eager.state_dict().values()), **tolerance)


def test_one_graph() -> None:
    """A transformer block; tests/test_convert.py does the same with a convnet."""
    build, shape = MODELS["transformer"]
    compiled = torch.compile(build().double(), fullgraph=True, backend="aot_eager")
    assert_same_training(compiled, build().double(), torch.randn(shape, dtype=torch.float64))


def test_new_batch_sizes_are_compiled_once_in_l1() -> None:
    from torch._dynamo.testing import CompileCounter  # brings the compiler along, which takes a second

    counter = CompileCounter()
    bn, eager = nm.L1BatchNorm2d(3), nm.L1BatchNorm2d(3)
    compiled = torch.compile(bn, fullgraph=True, backend=counter)
    for size in (4, 6, 8, 10):
        x = torch.randn(size, 3, 2, 2)
        assert_close(compiled(x), eager(x))
    assert counter.frame_count <= 2  # one for 4, one for all others; or one, where sizes were seen to vary before
    assert_close(bn.running_var, eager.running_var)


class Small(nn.Module):
    """Each kind of norm once, since C++ compilers are slow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.norm, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(x))).flatten(2).transpose(1, 2)
        return x + self.mlp(self.norm(x))


def _compiler_is_missing() -> bool:
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return not headers.exists() or not any(map(shutil.which, compilers))


def small() -> nn.Module:
    torch.manual_seed(0)
    model = nm.convert(Small(), "l1", layer_norm="l1")
    assert nm.apply_weight_norm(model, filter=lambda name, _: name == "mlp").applied == ["mlp.weight"]
    return model


@pytest.mark.skipif(_compiler_is_missing(), reason="no C++ compiler, or no Python headers, for torch.compile's backend")
def test_max_autotune_on_a_cpu() -> None:
    compiled = torch.compile(small(), fullgraph=True, mode=MODE)
    assert_same_training(compiled, small(), torch.randn(4, 3, 6, 6), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_max_autotune_on_a_gpu() -> None:
    """Convolutions and matrix products are torch's own: trying all kernels for them takes minutes and tests others."""
    from torch._inductor import config  # brings the compiler along

    eager, x = small().cuda(), torch.randn(4, 3, 6, 6, device="cuda")
    compiled = torch.compile(small().cuda(), fullgraph=True, mode=MODE)
    with config.patch(max_autotune_gemm_backends="ATEN", max_autotune_conv_backends="ATEN"):
        assert_same_training(compiled, eager, x, rtol=1e-2, atol=1e-2)  # convolutions may be computed in TF32


@pytest.mark.gpu
def test_compiled_evaluation_on_a_gpu() -> None:
    model, x = small().cuda(), torch.randn(4, 3, 6, 6, device="cuda")
    model(x)
    model.eval()
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True)(x), model(x), rtol=1e-2, atol=1e-2)
