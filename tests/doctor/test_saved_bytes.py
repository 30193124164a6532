"""Bytes counted without memory are those that a real pass keeps, through the kernels as well."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import normmatters as nm
from normmatters.doctor.saved_bytes import Ghosts, Kept
from normmatters.kernels import backends
from support import called
from support.models import ResNet, batch


def really_kept(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes of all storages that a real forward pass saves, the model's own left out."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(*inputs)
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in own and pointer != 0)


def test_a_native_network_keeps_what_a_real_pass_keeps() -> None:
    model, x = ResNet(width=4), batch().float()
    ghosts = Ghosts()
    sizes, inputs = ghosts.keeps(ghosts.of(model), x)
    assert sum(sizes.values()) == really_kept(model, x)
    assert inputs["layer2.0.bn2"] == (4, 8, 2, 2)
    n = 4 * 4 * 4 * 4  # elements that enter the first block
    assert sizes["layer1.0.bn1"] == 4 * n + 2 * 4 * 4  # its input, and two numbers a channel
    assert sizes["layer1.0.conv2"] == 4 * n  # the ReLU's output is kept by both, and counted for the last


@pytest.mark.parametrize("memory", ["exact", "lean"])
@pytest.mark.parametrize("act", [None, "relu"])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_kernels_keep_what_they_say(
    memory: str, act: str | None, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nm.L1BatchNorm2d(4, act=act, memory=memory)
    x = torch.randn(8, 4, 4, 4, requires_grad=True)
    inputs = (x, torch.randn_like(x)) if residual else (x,)
    ghosts = Ghosts()
    monkeypatch.setattr(backends, "INTERPRETED", True)
    sizes, _ = ghosts.keeps(ghosts.of(layer), inputs)
    assert called.backend(x).name == "triton"
    assert sizes == {"": really_kept(layer, *inputs)}
    whole = x.numel() * 4
    needs_a_tensor = memory == "exact" or (act == "relu" and not residual)
    assert (sizes[""] > whole) == needs_a_tensor


def test_a_conversion_is_compared_layer_by_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    x = torch.randn(8, 3, 6, 6)
    ghosts = Ghosts()
    converted = nm.convert(ghosts.of(model), "l1")
    layers, inputs, total = ghosts.compare(ghosts.of(model), converted, x)
    assert inputs["1"] == (8, 4, 4, 4)
    norm = layers["1"]
    assert norm.exact is not None
    assert norm.lean is not None
    element = 8 * 4 * 4 * 4
    # exact keeps 2 bits an element beside the input, lean these alone; both a few numbers a channel
    assert 4 * element < norm.now < norm.exact
    assert element // 4 <= norm.lean < element
    assert norm.exact - norm.lean == 4 * element
    assert layers["0"] == layers["0"]._replace(exact=layers["0"].now, lean=layers["0"].now)
    assert total.saved == norm.saved == norm.now - norm.lean
    assert called.backend(x).name != "triton"  # the dispatcher is itself again


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_norm_that_is_lean_already_is_counted_as_exact_and_lean(device: str) -> None:
    with FakeTensorMode():  # a GPU is not needed
        model = nn.Sequential(nm.L1BatchNorm2d(4, act="relu", memory="lean", device=device), nn.Conv2d(4, 4, 1))
    ghosts = Ghosts()
    x = torch.randn(8, 4, 4, 4, requires_grad=True)
    norm = ghosts.compare(ghosts.of(model), ghosts.of(model), x)[0]["0"]
    assert norm.exact is not None
    assert norm.lean is not None
    assert norm.exact - norm.lean == 4 * x.numel()
    assert (norm.now == norm.lean) == (device == "cuda")  # on a CPU there are no kernels that keep less


def test_a_pool_is_counted_for_the_norm_that_took_it_over() -> None:
    class Stems(nn.Module):  # pools in another order than norms
        def __init__(self) -> None:
            super().__init__()
            self.thin, self.wide = nn.BatchNorm2d(4), nn.BatchNorm2d(16)
            self.wide_pool, self.thin_pool = nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 2, 1)

        def forward(self, thin: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
            return self.thin_pool(self.thin(thin).relu()), self.wide_pool(self.wide(wide).relu())

    ghosts = Ghosts()
    model = Stems()
    x = tuple(torch.randn(4, n, 8, 8).to(memory_format=torch.channels_last).requires_grad_() for n in (4, 16))
    converted = nm.convert(ghosts.of(model), "l1")
    layers, _, total = ghosts.compare(ghosts.of(model), converted, x)
    assert total.now == layers["thin"].now + layers["wide"].now
    assert layers["wide"].now == 4 * layers["thin"].now


def test_activations_in_half_precision_take_half() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(16, 6)
    whole, half = (Ghosts(dtype) for dtype in (torch.float32, torch.float16))
    (sizes, _), (halves, _) = whole.keeps(whole.of(model), x), half.keeps(half.of(model), x)
    assert {name: size // 2 for name, size in sizes.items()} == halves
    assert model[0].weight.dtype == torch.float32


def test_ghosts_copy_no_data_and_keep_ties_and_hooks_away() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[1].weight = model[0].weight
    ghost = Ghosts().of(model)
    assert ghost[0].weight is ghost[1].weight
    assert ghost[0].weight is not model[0].weight
    assert ghost.training
    assert not model.training
    ghosts = Ghosts()
    ghost = ghosts.of(model)
    _, inputs = ghosts.keeps(ghost, {"input": torch.randn(3, 4)})
    assert inputs[""] == (3, 4)  # by name, too
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in ghost.modules())


@pytest.mark.parametrize(("kept", "saved"), [((100, 90, 20), 80), ((100, 120, None), 0), ((100, None, None), 0)])
def test_saved_is_what_the_best_conversion_gives(kept: tuple[int, int | None, int | None], saved: int) -> None:
    assert Kept(*kept).saved == saved
