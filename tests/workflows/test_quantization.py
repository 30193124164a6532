"""Static int8 of a folded L1 network through PT2E: int8 weights, and no accuracy lost on held-out digits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normmatters as nm


def digits() -> tuple[Tensor, Tensor]:
    data = pytest.importorskip("sklearn.datasets").load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return images[order], torch.tensor(data.target)[order]


def trained(images: Tensor, labels: Tensor) -> nn.Module:
    """A small VGG with L1 batch norm; about 98 % on the digits that it has not seen."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.Conv2d(16, 24, 3, stride=2), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10)]
    model = nm.convert(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_int8_after_folding() -> None:
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    images, labels = digits()
    train, test = slice(0, 1200), slice(1200, None)
    model = trained(images[train], labels[train])
    with torch.no_grad():
        expected = model(images[test])

    graph = torch.export.export(nm.fold(model), (images[:64],), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = pt2e.prepare_pt2e(graph.module(), quantizer)
    with torch.no_grad():
        prepared(images[:512])
        quantized = pt2e.convert_pt2e(prepared)
        output = quantized(images[test])

    operations = [str(node.target) for node in quantized.graph.nodes if node.op == "call_function"]
    assert not any("batch_norm" in operation for operation in operations)
    assert sum(tensor.dtype == torch.int8 for tensor in quantized.state_dict().values()) == 3  # two Conv, one Linear
    noise, signal = (output - expected).square().mean(), expected.square().mean()
    assert 10 * (signal / noise).log10() > 35  # decibels: 8 bits through three layers; 42 were measured
    accuracy = [float((scores.argmax(1) == labels[test]).float().mean()) for scores in (expected, output)]
    assert accuracy[0] > 0.96
    assert accuracy[1] > accuracy[0] - 0.01
