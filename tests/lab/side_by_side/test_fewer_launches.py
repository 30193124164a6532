"""A captured step's shortcuts: the same numbers from fewer kernels."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import normmatters as nm
from normmatters.kernels import backends
from normmatters.lab.config import ModelConfig
from normmatters.lab.models import build_image_model
from normmatters.lab.side_by_side.fewer_launches import fewer_launches
from normmatters.lab.side_by_side.small_conv import use_small_convolutions


class _Count(TorchDispatchMode):
    """How often an operator ran."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.count = names, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith(self.names)
        return func(*args, **(kwargs or {}))


class _Net(nn.Module):
    """Convolutions with and without bias, two kinds of batch norm; a weight used twice, one frozen, one computed."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 3),
            nm.L1BatchNorm2d(8),
            nn.Conv2d(8, 8, 1),
            nn.BatchNorm2d(8, momentum=None),  # type: ignore[arg-type]
        )
        self.features[4].weight.requires_grad_(False)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.bounded = nm.bounded_weight_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).mean((2, 3))
        return self.bounded(self.two(self.one(x).relu()).relu())  # type: ignore[no-any-return]


def _pass(net: nn.Module, dtype: torch.dtype | None, shortcut: bool) -> int:
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    autocast = torch.autocast("cpu", dtype, cache_enabled=False) if dtype else contextlib.nullcontext()
    with _Count("aten._to_copy", "aten.add_.Tensor") as counted, contextlib.ExitStack() as stack:
        if shortcut:
            stack.enter_context(fewer_launches(net, dtype))
        with autocast:
            loss = net(x).float().square().mean()
        loss.backward()
    return counted.count


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_the_numbers_are_the_same_bit_for_bit(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    plain = _Net()
    short = copy.deepcopy(plain)
    many, few = (_pass(net, dtype, net is short) for net in (plain, short))
    assert few < many
    assert short.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(short.state_dict()[name], value), name
    assert int(short.features[1].num_batches_tracked) == 1  # type: ignore[arg-type]
    for (name, p), (_, q) in zip(plain.named_parameters(), short.named_parameters()):
        assert isinstance(q, nn.Parameter)
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert q.grad.dtype == torch.float32
            assert torch.equal(p.grad, q.grad), name


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    net = _Net()
    before = dict(net.named_parameters())
    with pytest.raises(ZeroDivisionError), fewer_launches(net, torch.bfloat16):
        raise ZeroDivisionError
    assert all(p is before[name] for name, p in net.named_parameters())
    assert int(net.features[1].num_batches_tracked) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [{"norm": "l1"}, {"norm": "topk"}, {"norm": "l2"}, {"weight_norm": "wn"}], ids=str)
def test_a_capture_launches_the_kernels_of_the_steps_before_it(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other runs wait for a capture, and to compile eight kernels in one took eight seconds."""
    pytest.importorskip("triton")
    from normmatters.kernels.triton.launch import Launch

    launched: set[Any] = set()

    def note(self: Launch, device: int, tensors: dict[str, Tensor], numbers: tuple[float, ...]) -> None:
        dtypes = [tensors[name].dtype for name in self.tensors]
        launched.add((id(self.kernel), str(self.named), str(self.options), *dtypes))

    monkeypatch.setattr(backends, "INTERPRETED", True)
    monkeypatch.setattr(Launch, "by_triton", note)
    net = build_image_model(ModelConfig(name="resnet8", **model), channels=3, classes=10, size=16)
    use_small_convolutions(net)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(16, 3, 16, 16).to(memory_format=torch.channels_last)

    def step() -> set[Any]:
        launched.clear()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = net(x).float().square().mean()
        loss.backward()
        return set(launched)

    eager = step()
    with fewer_launches(net, torch.bfloat16):
        captured = step()
    assert len(eager) > 5
    assert captured == eager
