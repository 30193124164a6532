"""apply_weight_norm: which weights, along which dimension, and what it says of the others."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize, prune

from normmatters.functional.weight import slice_norm
from normmatters.weight_norm import (
    BoundedWeight,
    ClassicWeight,
    apply_weight_norm,
    bounded_weight_norm,
    classic_weight_norm,
    initial_rho,
    remove_weight_norm,
)


def test_every_kind_of_layer_and_its_output_dimension():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 3),
            "bilinear": nn.Bilinear(2, 3, 4),
            "conv": nn.Conv2d(4, 6, 3, groups=2),
            "up": nn.ConvTranspose1d(4, 3, 2),
            "depthwise_up": nn.ConvTranspose2d(4, 4, 2, groups=4),
            "lstm": nn.LSTM(3, 2, proj_size=1),
            "cell": nn.RNNCell(3, 2),
            "attention": nn.MultiheadAttention(4, 2),
            "cross": nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
            "norm": nn.BatchNorm2d(4),
            "embedding": nn.Embedding(7, 4),
        }
    )
    inits = {name: value.detach().clone() for name, value in model.named_parameters()}
    report = apply_weight_norm(model)
    dims = dict.fromkeys(report.applied, 0) | {"up.weight": 1}
    assert set(report.applied) == {
        *(f"{name}.weight" for name in ("linear", "bilinear", "conv", "up", "depthwise_up")),
        *(f"lstm.weight_{name}_l0" for name in ("ih", "hr")),
        *(f"cell.weight_{name}" for name in ("ih", "hh")),
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        *(f"cross.{name}_proj_weight" for name in "qkv"),
        "cross.out_proj.weight",
    }
    assert list(report.skipped) == ["lstm.weight_hh_l0"]  # proj_size = 1: one value in a channel
    assert "only its sign" in report.skipped["lstm.weight_hh_l0"]
    for name in report.applied:
        path, leaf = name.rsplit(".", 1)
        norms = slice_norm(getattr(model.get_submodule(path), leaf), dim=dims[name])
        torch.testing.assert_close(norms, initial_rho(inits[name], dim=dims[name]).expand_as(norms), msg=name)
    assert not parametrize.is_parametrized(model["norm"])
    assert "embedding.weight" in dict(model.named_parameters())
    assert apply_weight_norm(model, embeddings=True).applied == ["embedding.weight"]


def test_attention_uses_the_bounded_weights_in_training_and_in_the_fast_path():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 8)
    plain = layer(x)
    apply_weight_norm(layer, rho=0.3)
    bounded = layer(x)
    assert not torch.allclose(bounded, plain)
    with torch.inference_mode():
        torch.testing.assert_close(layer.eval()(x), bounded)
    torch.testing.assert_close(remove_weight_norm(layer)(x), bounded)


def test_filter_and_report():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    seen = []
    report = apply_weight_norm(model, filter=lambda name, module: seen.append((name, module)) or name != "2")
    assert report.applied == ["0.weight"]
    assert report.skipped == {"2.weight": "left out by the filter"}
    assert seen == [("0", model[0]), ("2", model[2])]
    assert not parametrize.is_parametrized(model[2])
    assert str(report) == "weight norm on 1 parameters\n  0.weight\nskipped 1\n  2.weight: left out by the filter"
    again = apply_weight_norm(model)
    assert again.applied == ["2.weight"]
    assert again.skipped == {"0.weight": "already parametrized"}


def test_single_layer_and_options():
    layer = nn.Linear(6, 3)
    assert apply_weight_norm(layer, p=math.inf, k=2, rho=0.5).applied == ["weight"]
    torch.testing.assert_close(slice_norm(layer.weight, p=math.inf, k=2), torch.full((3, 1), 0.5))
    assert isinstance(layer.parametrizations.weight[0], BoundedWeight)
    layer = nn.Linear(6, 3)
    before = layer.weight.detach().clone()
    apply_weight_norm(layer, kind="classic", p=1)
    assert isinstance(layer.parametrizations.weight[0], ClassicWeight)
    torch.testing.assert_close(layer.parametrizations.weight.original0, before.abs().sum(1, keepdim=True))
    torch.testing.assert_close(layer.weight, before)


def test_layers_that_cannot_be_normalized_are_named_and_left_alone():
    model = nn.ModuleDict(
        {
            "zero": nn.Linear(3, 2),
            "small": nn.Conv2d(1, 4, 1),
            "short": nn.Linear(4, 3),
            "grouped_up": nn.ConvTranspose2d(4, 4, 2, groups=2),
            "two_for_one": nn.ConvTranspose2d(4, 2, 4, groups=2),  # (4, 1, 4, 4): two slices make a channel
            "lazy": nn.LazyLinear(3),
            "lazy_up": nn.LazyConvTranspose2d(4, 2, groups=2),
            "pruned": prune.random_unstructured(nn.Linear(8, 3), "weight", 0.5),
            "good": nn.Linear(8, 3),
        }
    )
    nn.init.zeros_(model["zero"].weight)
    report = apply_weight_norm(model, p=math.inf, k=5)
    assert report.applied == ["good.weight"]
    reasons = {
        "zero": "slice size 3",
        "small": "sign",
        "short": "slice size 4",
        "grouped_up": "groups = 2",
        "two_for_one": "groups = 2",
        "lazy": "init",
        "lazy_up": "groups = 2",
        "pruned": "hook",
    }
    assert set(report.skipped) == {f"{name}.weight" for name in reasons}
    for name, reason in reasons.items():
        assert reason in report.skipped[f"{name}.weight"]
        assert not parametrize.is_parametrized(model[name])
    assert "zero everywhere" in apply_weight_norm(model).skipped["zero.weight"]


class Tied(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(5, 4, **options)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        return self.out(self.embedding(tokens))


def test_tied_weights_are_normalized_together_or_not_at_all():
    model = Tied()
    report = apply_weight_norm(model)
    assert report.applied == []
    assert "shared with embedding.weight" in report.skipped["out.weight"]
    assert model.out.weight is model.embedding.weight
    assert set(apply_weight_norm(model, kind="classic", embeddings=True).skipped) == {"out.weight", "embedding.weight"}
    assert len(apply_weight_norm(model, embeddings=True).applied) == 2
    assert len(list(model.parameters())) == 1
    torch.testing.assert_close(model.out.weight, model.embedding.weight)
    model(torch.arange(5)).sum().backward()
    remove_weight_norm(model)
    torch.testing.assert_close(model.out.weight, model.embedding.weight)
    assert model.out.weight is model.embedding.weight


@pytest.mark.parametrize("options", [{"padding_idx": 0}, {"sparse": True}])
def test_tied_weights_of_which_one_is_refused_are_both_left(options):
    """A padding row of zeros is an embedding's, but no linear layer's; sparse gradients are an embedding's alone."""
    model = Tied(**options)
    report = apply_weight_norm(model, embeddings=True)
    assert report.applied == []
    assert set(report.skipped) == {"out.weight", "embedding.weight"}
    assert any("shared with" in reason for reason in report.skipped.values())
    assert model.out.weight is model.embedding.weight


def test_weights_in_which_nothing_can_be_computed_are_left():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[1].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    model[2].weight = nn.Parameter(model[2].weight.detach().to_sparse())
    report = apply_weight_norm(model)
    assert report.applied == ["0.weight"]
    assert "float8_e4m3fn" in report.skipped["1.weight"]
    assert "layout torch.sparse_coo" in report.skipped["2.weight"]


@pytest.mark.parametrize("make", [Tensor.to_sparse, Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_a_sparse_weight_is_refused_with_a_sentence(make):
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(make(layer.weight.detach()))
    for add in (bounded_weight_norm, classic_weight_norm):
        with pytest.raises(TypeError, match="dense"):
            add(layer)
    assert type(layer) is nn.Linear
    assert apply_weight_norm(layer).applied == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kind": "spectral"}, ValueError, "'bounded' or 'classic'"),
        ({"kind": "classic", "rho": 1.0}, ValueError, "takes no rho"),
        ({"rho": 0.0}, ValueError, "positive"),
        ({"rho": "initial"}, ValueError, "'init'"),
        ({"p": 0}, ValueError, "at least 1"),
        ({"p": 2, "k": 3}, ValueError, "math.inf"),
        ({"filter": "0"}, TypeError, "callable"),
    ],
)
def test_bad_input_changes_nothing(arguments, error, message):
    model = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(error, match=message):
        apply_weight_norm(model, **arguments)
    assert type(model[0]) is nn.Linear
    with pytest.raises(TypeError, match="module"):
        apply_weight_norm([nn.Linear(3, 2)])


@pytest.mark.parametrize("options", [{}, {"rho": 0.5, "p": 1}, {"p": math.inf, "k": 2}, {"kind": "classic"}])
def test_fake_tensors_have_what_real_ones_have_but_values(options):
    def run() -> dict[str, tuple[torch.Size, torch.dtype, tuple[int, ...]]]:
        half = nn.Linear(16, 5, dtype=torch.bfloat16)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), half, nn.Embedding(6, 3, 0))
        assert len(apply_weight_norm(model, embeddings=True, **options).applied) == 3
        y = model[2](model[1](model[0](torch.randn(2, 3, 4, 4))).bfloat16())
        (y.sum() + model[3](torch.tensor([1, 2])).sum()).backward()
        gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
        found = {"y": y, **model.state_dict(), **gradients}
        return {name: (x.shape, x.dtype, x.stride()) for name, x in found.items()}

    with FakeTensorMode():
        fake = run()
    assert fake == run()
