"""The lab's own small convolutions against PyTorch's in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("triton")

from normmatters.kernels import backends
from normmatters.lab.models.layers import conv as plain_conv
from normmatters.lab.side_by_side.fewer_launches import fewer_launches
from normmatters.lab.side_by_side.small_conv import SmallConv2d, use_small_convolutions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "INTERPRETED", not torch.cuda.is_available())


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    layer = plain_conv(inputs, outputs, kernel, stride)
    use_small_convolutions(layer)
    return layer


def made(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype, memory_format=torch.channels_last)


def close(ours: Tensor, expected: Tensor, terms: int) -> None:
    """To the rounding of the result, and of a sum of so many products in float32."""
    size = float(expected.abs().max())
    bound = (torch.finfo(ours.dtype).eps + terms**0.5 * 2e-7) * size
    assert ours.shape == expected.shape
    assert float((ours.double() - expected).abs().max()) <= bound


def check(x: Tensor, weight: Tensor, g: Tensor) -> None:
    layer = SmallConv2d(*weight.shape[1::-1], 3, padding=1, bias=False).to(DEVICE)
    layer.weight = nn.Parameter(weight)
    mine = x.detach().requires_grad_()
    y = layer(mine)
    assert "Conv3x3" in type(y.grad_fn).__name__
    y.backward(g)
    exact, w = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = F.conv2d(exact, w, padding=1)
    expected.backward(g.double())
    pixels = x.numel() // x.shape[1]
    assert y.is_contiguous(memory_format=torch.channels_last)
    for ours, theirs, terms in (
        (y.detach(), expected.detach(), 9 * x.shape[1]),
        (mine.grad, exact.grad, 9 * weight.shape[0]),
        (layer.weight.grad, w.grad, pixels),
    ):
        assert ours is not None
        assert theirs is not None
        close(ours, theirs, terms)


@pytest.mark.parametrize(
    ("batch", "height", "width", "c_in", "c_out"),
    [(3, 5, 6, 16, 16), (2, 8, 8, 32, 64), (1, 1, 3, 16, 32), (5, 7, 1, 64, 16)],
)
def test_values_and_gradients(batch: int, height: int, width: int, c_in: int, c_out: int) -> None:
    check(made(batch, c_in, height, width), made(c_out, c_in, 3, 3), made(batch, c_out, height, width))


@pytest.mark.parametrize("joint", [True, False])
def test_many_tiles_of_pixels(joint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from normmatters.lab.side_by_side import small_conv_kernels as kernels

    monkeypatch.setitem(kernels.TILES, 16, kernels.Tiles(16, 2, 16, 3, joint))
    kernels.plan_of.cache_clear()
    check(made(3, 16, 7, 5), made(16, 16, 3, 3), made(3, 16, 7, 5))
    kernels.plan_of.cache_clear()


def test_a_weight_in_any_layout_and_a_gradient_too() -> None:
    check(made(2, 16, 4, 4), made(16, 16, 3, 3).contiguous(), made(2, 16, 4, 4).contiguous())


def test_only_what_fits() -> None:
    assert type(conv(16, 32, 3)) is SmallConv2d
    for odd in (conv(3, 16, 3), conv(16, 32, 3, 2), conv(16, 32, 1), conv(128, 128, 3)):
        assert type(odd) is nn.Conv2d
    dilated = nn.Conv2d(16, 16, 3, padding=1, dilation=2, bias=False)
    use_small_convolutions(dilated)
    assert type(dilated) is nn.Conv2d
    layer = conv(16, 16, 3).to(DEVICE)
    for x in (made(2, 16, 4, 4, dtype=torch.float32), made(2, 16, 4, 4).contiguous().float()):
        assert "Conv3x3" not in type(layer(x).grad_fn).__name__
    large = torch.empty(129, 16, 32, 32, device=DEVICE, dtype=torch.float16, memory_format=torch.channels_last)
    assert "Conv3x3" not in type(conv(16, 16, 3).half().to(DEVICE)(large).grad_fn).__name__
    with torch.autocast(DEVICE, torch.bfloat16):  # the input is in another half, and maybe the weight
        for other in (layer, conv(16, 16, 3).half().to(DEVICE)):
            assert other(made(2, 16, 4, 4)).dtype == torch.bfloat16


def test_what_does_not_fit_is_left_to_pytorch() -> None:
    layer = conv(16, 16, 3).half().to(DEVICE)
    with pytest.raises(RuntimeError, match=r"expected input.* to have 16 channels"):
        layer(made(2, 32, 4, 4))
    # And no kernel gets an address of another device.
    assert "Conv3x3" not in type(layer.to("meta")(made(2, 16, 4, 4)).grad_fn).__name__


def test_a_bias_that_came_later_counts() -> None:
    """Folding a norm into its convolution gives it one."""
    layer, x = conv(16, 16, 3).half().to(DEVICE), made(2, 16, 4, 4)
    before = layer(x)
    layer.bias = nn.Parameter(torch.full((16,), 8.0, dtype=torch.float16, device=DEVICE))
    close(layer(x).detach(), before.detach().double() + 8, 9 * 16)


def test_saved_tensors_that_come_back_in_another_layout() -> None:
    """As `save_on_cpu(pin_memory=True)` gives them."""
    layer, x = conv(16, 16, 3).half().to(DEVICE), made(2, 16, 4, 4)
    found = []
    for pack in (lambda t: t, lambda t: t.contiguous()):
        mine = x.detach().requires_grad_()
        layer.weight.grad = None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = layer(mine)
        y.square().sum().backward()
        found.append((mine.grad, layer.weight.grad))
    for ours, expected in zip(found[1], found[0]):
        assert torch.equal(ours, expected)


def test_the_kernels_run_on_the_inputs_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextlib.contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr("normmatters.lab.side_by_side.small_conv.on_device", on_device)
    x = made(2, 16, 4, 4)
    conv(16, 16, 3).half().to(DEVICE)(x)
    assert entered == [x.device]


def test_under_autocast_and_fewer_launches() -> None:
    """The captured step's way to the same gradients: weights cast before, gradients after."""
    layer, x = conv(16, 16, 3).to(DEVICE, memory_format=torch.channels_last), made(2, 16, 4, 4)

    def step() -> Tensor:
        with torch.autocast(DEVICE, torch.float16):
            y = layer(x)
        assert y.dtype == torch.float16
        y.square().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32
        grad, layer.weight.grad = layer.weight.grad, None
        return grad

    eager = step()
    with fewer_launches(layer, torch.float16):
        with torch.autocast(DEVICE, torch.float16):
            y = layer(x)
        y.square().sum().backward()
    assert torch.equal(layer.weight.grad, eager)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("channels", "size"), [(16, 32), (32, 16), (64, 8)])
def test_real_sizes(channels: int, size: int, dtype: torch.dtype) -> None:
    x, w, g = (
        made(*s, dtype=dtype)
        for s in ((128, channels, size, size), (channels, channels, 3, 3), (128, channels, size, size))
    )
    check(x, w, g)
    check(x[:77], w, g[:77])


@pytest.mark.gpu
@needs_gpu
def test_runs_are_equal_to_the_bit() -> None:
    layer, x, g = (
        conv(16, 16, 3).half().to(DEVICE, memory_format=torch.channels_last),
        made(128, 16, 32, 32),
        made(128, 16, 32, 32),
    )
    found = []
    for _ in range(5):
        torch.cuda._sleep(500_000)
        mine = x.detach().requires_grad_()
        layer.weight.grad = None
        y = layer(mine)
        y.backward(g)
        found.append((y.detach(), mine.grad, layer.weight.grad))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0]))
