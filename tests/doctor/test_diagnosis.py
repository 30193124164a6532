"""The doctor's findings: norms, invariance, steps, memory; and that the patient is unchanged."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import normmatters as nm
from normmatters.doctor import Spread, diagnose
from normmatters.kernels import backends
from normmatters.tails import tails
from support.models import ResNet, batch


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 2)
    )


def test_a_resnet_is_known_layer_by_layer() -> None:
    model, x = ResNet(width=4), batch().float()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = diagnose(model, x, lr=0.2, weight_decay=1e-3, momentum=0.5)
    report = nm.ConversionReport()
    nm.convert(ResNet(width=4), report=report)
    assert [(n.name, n.norm, n.becomes, n.fused, n.note) for n in found.norms] == [
        (c.name, c.before, c.after, c.fused, c.note) for c in report.changes
    ]
    convolutions = [f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    assert [w.name for w in found.weights if w.step is not None] == convolutions  # a norm follows each
    first = found.weights[0]
    lengths = model.conv1.weight.detach().flatten(1).norm(dim=1)
    assert first.length == pytest.approx(Spread.of(lengths))
    assert first.step == pytest.approx(Spread.of(0.2 / lengths**2))
    assert found.weights[-1].name == "fc.weight"
    assert found.weights[-1].invariant == "no"
    assert found.kept is not None
    assert found.kept.lean is not None
    norms = sum(n.kept.now - n.kept.lean for n in found.norms if n.kept and n.kept.lean is not None)
    assert 0 < found.kept.now - found.kept.lean <= norms * 1.5
    assert math.isclose(found.recipe.angle, math.sqrt(2 * 0.2 * 1e-3 / 1.5))
    assert f"{found.recipe.angle:.4g} rad" in str(found)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_layer_norms_are_left_or_converted_as_asked() -> None:
    model, x = small(), torch.randn(4, 3, 6, 6)
    left = {n.name: n for n in diagnose(model, x, invariance=False).norms}
    assert left["4"].becomes is None
    assert "layer_norm" in left["4"].note
    asked = {n.name: n for n in diagnose(model, x, norm="topk", layer_norm=1, invariance=False).norms}
    assert (asked["1"].becomes, asked["4"].becomes) == ("TopKBatchNorm2d", "L1LayerNorm")
    assert all(w.invariant is None and w.step is not None for w in diagnose(model, x, invariance=False).weights)


def test_invariance_by_channel_and_by_tensor() -> None:
    weights = {w.name: w for w in diagnose(small(), torch.randn(20, 3, 6, 6), lr=0.1).weights}
    assert weights["0.weight"].invariant == "channel, dim 0"
    assert weights["5.weight"].step is None
    linear = nn.Sequential(nn.Linear(8, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 2))
    (whole, last) = diagnose(linear, torch.randn(5, 8), lr=0.1).weights
    assert (whole.invariant, whole.dim) == ("tensor", None)
    length = linear[0].weight.norm().item()
    assert whole.step == pytest.approx((0.1 / length**2,) * 3)
    assert last.length is not None


def test_what_is_counted_as_invariant_is_what_the_optimizers_take() -> None:
    """Not a weight that is invariant only together with its bias, nor one of which some channels are."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.joint, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
            self.part, self.batch_norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            normed, plain = self.part(self.norm(self.joint(x))).chunk(2, 1)
            return torch.cat([self.batch_norm(normed), plain], 1)

    model, x = Half(), torch.randn(8, 4)
    found = diagnose(model, x)
    assert [w.invariant for w in found.weights] == ["tensor, with joint.bias", "channel, dim 0, 4 of 8"]
    assert [w.step for w in found.weights] == [None, None]
    assert list(nm.optim.scale_invariant_parameters(model, x)) == []
    assert "0 of 2 weights are scale invariant" in str(found)


def test_norms_of_weights_and_of_other_packages_are_named() -> None:
    class LlamaRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * x.square().mean(-1, keepdim=True).rsqrt() * self.weight

    class NormedBlock(nn.Module):  # its name says so, but the norm is its child
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)  # type: ignore[no-any-return]

    class NoLayerNormConv(nn.Sequential):  # nor is this one
        pass

    model = nn.Sequential(
        nm.bounded_weight_norm(nn.Linear(4, 4)),
        weight_norm(nn.Linear(4, 4)),
        LlamaRMSNorm(),
        NormedBlock(),
        NoLayerNormConv(nn.Linear(4, 4)),
        spectral_norm(nn.Linear(4, 4)),
    )
    found = diagnose(model, torch.randn(3, 4), invariance=False)
    assert [(n.name, n.norm) for n in found.norms] == [
        ("0.weight", "BoundedWeight"),
        ("1.weight", "_WeightNorm"),
        ("2", "LlamaRMSNorm"),
        ("3.norm", "GroupNorm"),
        ("5.weight", "_SpectralNorm"),
    ]


def test_a_checkpoint_alone_gives_names_and_lengths() -> None:
    model = small()
    found = diagnose({f"module.{name}": t for name, t in model.state_dict().items()}, lr=0.1)
    assert [(n.name, n.norm) for n in found.norms] == [("1", "batch norm"), ("4", "layer, group or RMS norm")]
    assert [w.name for w in found.weights] == ["0.weight", "5.weight"]
    lengths = model[0].weight.detach().flatten(1).norm(dim=1)
    assert found.weights[0].step == pytest.approx(Spread.of(0.1 / lengths**2))
    assert found.kept is None
    assert "give the model" in found.notes[0]
    assert "(kept)" not in str(found)  # a checkpoint cannot tell what convert would do, and does not say that it can
    assert "convert would replace" not in str(found)
    assert "convert would replace" not in str(diagnose({"weight": torch.ones(2, 3)}))  # without any norm
    with pytest.raises(ValueError, match="no tensors"):
        diagnose({"epoch": 3})  # type: ignore[dict-item]


def test_what_cannot_be_found_is_said() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.norm(self.linear(x)) * (self.count if x.sum().item() > 0 else 1)  # type: ignore[no-any-return]

    found = diagnose(Branches(), torch.ones(6, 4))
    assert found.kept is None
    assert len(found.notes) == 2
    assert "memory was not measured: DataDependentOutputException" in found.notes[0]
    assert "different outputs" in found.notes[1]
    assert found.norms[0].becomes == "L1BatchNorm1d"  # what needs no input is there
    assert diagnose(nn.BatchNorm1d(4), torch.randn(6, 4)).weights == ()
    assert diagnose(small()).notes == ("without an input neither memory nor scale invariance is found",)


def test_without_triton_memory_after_convert_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "TRITON_MISSING", "triton is not installed")
    found = diagnose(small(), torch.randn(4, 3, 6, 6), invariance=False)
    assert found.kept is not None
    assert found.kept.now > 0
    assert found.kept[1:] == (None, None)
    assert "memory after convert was not measured: triton is not installed" in str(found)


def test_a_model_without_memory_is_measured() -> None:
    with torch.device("meta"):
        model = small()
    found = diagnose(model, torch.empty(4, 3, 6, 6, device="meta"))
    assert found.kept == diagnose(small(), torch.randn(4, 3, 6, 6), invariance=False).kept
    assert all(w.length is None for w in found.weights)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_what_is_kept_does_not_depend_on_where_it_is_asked(context: Any) -> None:
    model, x = small(), torch.randn(4, 3, 6, 6)
    expected = diagnose(model, x, invariance=False)
    with context():
        found = diagnose(model, x, invariance=False)
    assert (found.kept, found.norms) == (expected.kept, expected.norms)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_model_that_cannot_be_copied_is_measured() -> None:
    """A hook's weight norm keeps a computed weight, of which there is no deep copy; neither of a cache."""
    model = small()
    expected = diagnose(model, torch.randn(4, 3, 6, 6), invariance=False)
    model[0].caches = {"a": [model[0].weight * 2]}
    found = diagnose(model, torch.randn(4, 3, 6, 6))
    assert (found.kept, found.norms) == (expected.kept, expected.norms)
    assert "scale invariance was not tested: ValueError: the model must allow copy.deepcopy" in found.notes[0]
    nn.utils.weight_norm(model[0])
    assert diagnose(model, torch.randn(4, 3, 6, 6)).norms == expected.norms


def test_a_model_that_holds_a_lock_is_refused_with_the_reason() -> None:
    model = small()
    model.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"copy\.deepcopy.*_thread\.lock"):
        diagnose(model)


def test_an_input_beside_the_samples_is_not_cut() -> None:
    """Invariance is tested on 8 samples: of a mask, (T, T), there are none to take the first of."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    found = diagnose(layer, {"src": torch.randn(12, 3, 8), "src_mask": mask})
    assert found.notes == ()
    assert all(w.invariant is not None for w in found.weights)


def test_weights_that_have_no_norm_are_listed_without() -> None:
    state = {
        "0.weight": torch.ones(2, 4),
        "1.weight": torch.ones(2, 4).to(torch.float8_e4m3fn),
        "adjacency": torch.eye(3).to_sparse(),
    }
    found = diagnose(state)
    assert [(w.name, w.length is None, w.step is None) for w in found.weights] == [
        ("0.weight", False, False),
        ("1.weight", True, True),
        ("adjacency", True, True),
    ]


@pytest.mark.parametrize("norms", [[nn.BatchNorm2d(4)], []])
def test_it_logs_nothing_where_there_is_nothing_to_convert(
    norms: list[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), *norms)
    if norms:
        model = nm.convert(model, "l1")
    found = diagnose(model)
    assert caplog.messages == []
    notes = ["it is one of normmatters already: go back with to_torch first"]
    assert [(layer.becomes, layer.note) for layer in found.norms] == [(None, note) for note in notes[: len(norms)]]


def test_it_prints_and_is_plain_data() -> None:
    model = small()
    nn.init.zeros_(model[0].weight[0])
    found = diagnose(model, torch.randn(4, 3, 6, 6), invariance=False)
    assert found.weights[0].step is not None
    assert found.weights[0].step.largest == math.inf
    data: Any = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert data["weights"][0]["step"]["largest"] is None
    assert data["norms"][0]["kept"] == found.norms[0].kept._asdict()  # type: ignore[union-attr]
    assert data["recipe"]["weight_decay"] == 5e-4
    text = str(found)
    assert "1      BatchNorm2d  4×4×4×4" in text
    assert "convert would replace 1 of 2 norms and fuse 1 with" in text
    still = diagnose(model, weight_decay=0.0)
    assert "rad a step" not in str(still)


def test_tails_are_measured_where_asked() -> None:
    model, x = small(), torch.randn(16, 3, 6, 6).pow(5)
    assert all(n.tails is None for n in diagnose(model, x, invariance=False).norms)
    found = diagnose(model, x, invariance=False, tails=True)
    with torch.no_grad():
        after_conv = model[0](x)
    ratio = tails(after_conv, [0, 2, 3])
    assert found.norms[0].tails == pytest.approx(Spread.of(ratio))
    assert ratio.median() > 1.1
    assert found.norms[1].tails is not None  # the layer norm's, a token
    assert f"{ratio.median().item():.3g}" in str(found).splitlines()[2]
    heaviest = max(found.norms, key=lambda n: n.tails.median)  # type: ignore[union-attr]
    assert f"Tails are heaviest in {heaviest.name}:" in str(found)
    assert found.as_dict()["norms"][0]["tails"]["median"] == pytest.approx(ratio.median().item())
    plain = diagnose(nn.BatchNorm1d(4), torch.special.ndtri(torch.rand(4000, 4)), tails=True)
    assert plain.norms[0].tails is not None
    assert "Tails" not in str(plain)


def test_tails_that_cannot_be_measured_are_said() -> None:
    found = diagnose(small(), torch.randn(4, 3, 7, 7), invariance=False, tails=True)  # the classifier wants 6 × 6
    assert any(note.startswith("tails were not measured: RuntimeError") for note in found.notes)
    assert all(n.tails is None for n in found.norms)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="lr"):
        diagnose(small(), lr=-1.0)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        diagnose(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names for keys, got 1"):
        diagnose({1: torch.ones(2, 2)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="norm must be one of"):
        diagnose(small(), norm="l7")
    with pytest.raises(ValueError, match="run it once first"):
        diagnose(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ValueError, match="run it once first"):
        diagnose(nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d(affine=False)))
    for dtype in (torch.int8, "float16"):
        with pytest.raises(TypeError, match="dtype must be a floating-point"):
            diagnose(small(), dtype=dtype)  # type: ignore[arg-type]
