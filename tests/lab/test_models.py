"""Models: sizes known from the papers, every norm in every place, decoding step by step equal to all at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normmatters import precision
from normmatters.lab.config import ModelConfig, from_dict
from normmatters.lab.models import build_image_model, build_text_model
from normmatters.lab.models.lstm import AdditiveScore, Seq2Seq
from normmatters.lab.norms import ChannelBias, NormFactory
from normmatters.lab.regimes import build_regime
from normmatters.nn.activations import TReLU
from normmatters.nn.batchnorm import LpBatchNorm2d, MeanOnlyBatchNorm2d
from normmatters.nn.layernorm import LpLayerNorm
from normmatters.weight_norm.parametrizations import BoundedWeight

# CIFAR ResNets with 1×1 shortcuts; ResNet-18/50 as published, 1000 classes
PARAMETERS = {"resnet20": 272_474, "resnet56": 855_770, "resnet18": 11_689_512, "resnet50": 25_557_032}


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_are_the_published_ones(name: str) -> None:
    image_net = name in ("resnet18", "resnet50")
    with torch.device("meta"):
        model = build_image_model(
            ModelConfig(name),
            channels=3,
            classes=1000 if image_net else 10,
            size=224 if image_net else 32,  # type: ignore[arg-type]
        )
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_strides_follow_the_image_size() -> None:
    for size, expected in ((32, 32), (64, 32), (224, 56)):
        model = build_image_model(
            ModelConfig("resnet18", norm="native", width=1 / 32), channels=3, classes=7, size=size
        )
        seen: list[torch.Size] = []
        model.blocks[0].register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out.shape))  # type: ignore[index, union-attr]
        assert model(torch.randn(2, 3, size, size)).shape == (2, 7)
        assert seen[0][-1] == expected


@pytest.mark.parametrize("name", ["small_cnn", "vgg11", "resnet8"])
def test_fused_model_equals_the_plain_one(name: str) -> None:
    """Our fused L2 norms and torch.nn's give one function: outputs, gradients, state keys."""
    config = {"channels": 1, "classes": 10, "size": 8}
    ours = build_image_model(ModelConfig(name, norm="l2", width=0.25), **config).double()  # type: ignore[arg-type]
    plain = build_image_model(ModelConfig(name, norm="native", width=0.25), **config).double()  # type: ignore[arg-type]
    plain.load_state_dict(ours.state_dict())
    x, y = torch.randn(12, 1, 8, 8, dtype=torch.float64), torch.randint(0, 10, (12,))
    losses = [nn.functional.cross_entropy(m(x), y) for m in (ours, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)
    for (key, a), b in zip(ours.named_parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-10, msg=key)
    for (key, a), b in zip(ours.state_dict().items(), plain.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=key)
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "p", "k"),
    [({"norm": "l1"}, 1, None), ({"norm": "linf"}, math.inf, None), ({"norm": "topk", "k": 3}, math.inf, 3)]
    + [({"norm": "range"}, "range", None), ({"norm": "lp", "p": 1.5}, 1.5, None)],
)
def test_every_batch_norm_is_what_the_config_says(options: dict[str, object], p: object, k: int | None) -> None:
    config = ModelConfig("resnet8", constant=2.0, memory="lean", **options)  # type: ignore[arg-type]
    model = build_image_model(config, channels=1, classes=4, size=8)
    norms = [m for m in model.modules() if isinstance(m, LpBatchNorm2d)]
    assert len(norms) == 9  # a stem, three blocks of two, two shortcuts
    assert {(n.p, n.k, n.constant, n.memory) for n in norms} == {(p, k, 2.0, "lean")}
    assert sum(n.act == "relu" for n in norms) == 7
    out = model(torch.randn(6, 1, 8, 8))
    out.square().sum().backward()
    assert all(q.grad is not None and q.grad.isfinite().all() for q in model.parameters())


def _norms(**settings: Any) -> NormFactory:
    return NormFactory(ModelConfig(**settings))


def test_norm_act_without_fusion() -> None:
    x, r = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    fused = _norms(norm="l1").batch_norm(3, act=True)
    loose = _norms(norm="l1", fuse=False).batch_norm(3, act=True)
    torch.testing.assert_close(fused(x, residual=r), loose(x, residual=r))
    torch.testing.assert_close(_norms(norm="l1").batch_norm(3)(x, residual=r), loose.norm(x) + r)
    shifted = _norms(norm="none", activation="trelu").batch_norm(3, act=True)
    assert isinstance(shifted.norm, ChannelBias)
    nn.init.constant_(shifted.norm.bias, 0.5)
    torch.testing.assert_close(shifted(x, residual=r), TReLU()(x + 0.5 + r))


@pytest.mark.parametrize(("name", "p"), [("bwn", 2.0), ("l1_wn", 1.0), ("linf_wn", math.inf)])
def test_bounded_weight_norm_fixes_every_norm_but_the_classifiers(name: str, p: float) -> None:
    model = build_image_model(ModelConfig("resnet8", weight_norm=name), channels=1, classes=4, size=8)  # type: ignore[arg-type]
    assert not any(isinstance(m, LpBatchNorm2d) and not isinstance(m, MeanOnlyBatchNorm2d) for m in model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    before = [torch.linalg.vector_norm(c.weight.flatten(1), p, dim=1) for c in convs]
    nn.functional.cross_entropy(model(torch.randn(8, 1, 8, 8)), torch.randint(0, 4, (8,))).backward()
    classifier = model.classifier.weight.detach().clone()  # type: ignore[union-attr, operator]
    optimizer.step()
    for conv, norms in zip(convs, before):
        after = torch.linalg.vector_norm(conv.weight.flatten(1), p, dim=1)
        torch.testing.assert_close(after, norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(norms, norms.mean().expand_as(norms))
    assert not torch.equal(model.classifier.weight, classifier)  # type: ignore[union-attr, arg-type]


def test_rho_multiplies_the_bound() -> None:
    def norms(**options: float) -> Tensor:
        torch.manual_seed(0)
        model = build_text_model(ModelConfig("lstm", weight_norm="bwn", layers=1, d_model=8, **options), 20, 10)  # type: ignore[arg-type]
        return torch.stack([m.rho for m in model.modules() if isinstance(m, BoundedWeight)])

    assert len(norms()) > 3
    torch.testing.assert_close(norms(rho=4.0), 4 * norms(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["vgg11", "resnet56"])
def test_signal_survives_without_rescaling_norms(name: str) -> None:
    """Mean-only networks start with activations of order one, at any depth."""
    config = ModelConfig(name, weight_norm="wn", width=0.25)  # type: ignore[arg-type]
    model = build_image_model(config, channels=3, classes=10, size=32)
    seen: list[torch.Tensor] = []
    last = [m for m in model.modules() if type(m).__name__ == "NormAct"][-1]
    last.register_forward_hook(lambda _m, _a, out: seen.append(out))
    model(torch.randn(8, 3, 32, 32))
    assert 0.1 < seen[0].std().item() < 10


TEXT = [("lstm", {}), ("lstm", {"attention": "additive"}), ("transformer", {"heads": 2, "d_ff": 32})]


@pytest.mark.parametrize(("name", "sizes"), TEXT)
@pytest.mark.parametrize(
    "options", [{"layer_norm": "l2"}, {"layer_norm": "l1"}, {"layer_norm": "none", "weight_norm": "bwn"}]
)
def test_step_by_step_equals_all_at_once(name: str, sizes: dict[str, int], options: dict[str, str]) -> None:
    config = ModelConfig(name, d_model=16, layers=2, **sizes, **options)  # type: ignore[arg-type]
    model = build_text_model(config, 30, 20).double().eval()
    source, target = torch.randint(3, 30, (3, 7)), torch.randint(3, 30, (3, 5))
    source[1, 4:] = 0
    want = model(source, target)
    state, got = model.begin(source), []
    for t in range(5):
        logits, state = model.step(target[:, t], state)
        got.append(logits)
    torch.testing.assert_close(torch.stack(got, 1), want, rtol=1e-9, atol=1e-9)
    # padding is not seen, and neither is the future
    torch.testing.assert_close(model(source[1:2, :4], target[1:2]), want[1:2], rtol=1e-9, atol=1e-9)
    changed = target.clone()
    changed[:, 3:] = 5
    torch.testing.assert_close(model(source, changed)[:, :3], want[:, :3], rtol=1e-9, atol=1e-9)
    kinds = {type(m) for m in model.modules()}
    assert (nn.LayerNorm in kinds) == (options["layer_norm"] == "l2")
    assert (LpLayerNorm in kinds) == (options["layer_norm"] == "l1")


def test_transformer_base_has_the_papers_size() -> None:
    with torch.device("meta"):
        model = build_text_model(ModelConfig("transformer"), 37_000, 100)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(63e6, rel=0.02)  # "65M" with 37k tokens
    assert model.classifier.weight is model.embedding.weight  # type: ignore[union-attr]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of model.heads"):
        build_text_model(ModelConfig("transformer", d_model=30, heads=4), 10, 5)
    with pytest.raises(ValueError, match="must be even"):
        build_text_model(ModelConfig("lstm", d_model=15), 10, 5)
    assert _norms(weight_norm="wn", norm="l1").name == "mean_only"
    assert _norms(weight_norm="wn", norm="none").name == "none"


def test_scaled_attention_divides_the_scores_by_the_root_of_their_width() -> None:
    torch.manual_seed(0)
    plain, scaled = (
        build_text_model(ModelConfig("lstm", layers=1, d_model=16, attention=a), 20, 10).double().eval()
        for a in ("dot", "scaled")
    )
    scaled.load_state_dict(plain.state_dict())
    source, target = torch.randint(4, 20, (3, 7)), torch.randint(4, 20, (3, 5))
    before = scaled(source, target)
    assert not torch.allclose(before, plain(source, target), rtol=1e-3)
    with torch.no_grad():
        plain.score.weight.div_(4)  # √16
    torch.testing.assert_close(before, plain(source, target), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scaled.step(target[:, 0], scaled.begin(source))[0], before[:, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch", [1, 3])
def test_additive_scores_are_bahdanaus(batch: int) -> None:
    """e = v·tanh(W h + U m), one pair of h and m at a time, and what attention makes of it: values and gradients."""
    torch.manual_seed(0)
    model = build_text_model(ModelConfig("lstm", layers=1, d_model=6, attention="additive"), 20, 10).double().eval()
    assert isinstance(model, Seq2Seq)
    assert isinstance(model.score, AdditiveScore)
    weights = (model.score.query.weight, model.score.key.weight, model.score.value.weight, model.combine.weight)
    w, u, v, _ = weights
    h, memory = (torch.randn(batch, n, 6, dtype=torch.float64, requires_grad=True) for n in (3, 4))
    mask = torch.arange(4) < torch.tensor([[2], [4], [3]])[:batch]

    def by_hand(row: int, t: int) -> Tensor:
        words = memory[row][mask[row]]
        e = torch.stack([v[0].dot(torch.tanh(w.mv(h[row, t]) + u.mv(m))) for m in words])
        context = (e.exp() / e.exp().sum()).matmul(words)
        return model.classifier(torch.tanh(model.combine(torch.cat([context, h[row, t]]))))  # type: ignore[no-any-return]

    want = torch.stack([torch.stack([by_hand(row, t) for t in range(3)]) for row in range(batch)])
    got = model.attend(h, memory, model.keys(memory), mask)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    leaves, upstream = (h, memory, *weights), torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def _trained(norm: str, scale: float, steps: int = 3) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """Losses, state and evaluated output after a few steps with the norms' inputs times ``scale``."""
    torch.manual_seed(0)
    config = ModelConfig("resnet8", norm=norm, width=0.25, norm_input_scale=scale)  # type: ignore[arg-type]
    model = build_image_model(config, channels=1, classes=4, size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(6, 1, 8, 8), torch.randint(0, 4, (6,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model.state_dict(), model.eval()(x).detach()


@pytest.mark.parametrize("norm", ["l1", "l2", "native", "linf", "range"])
def test_other_units_change_nothing_in_float32(norm: str) -> None:
    """Bit for bit: eps and the running statistics are in the units of the norm's input."""
    losses, state, output = _trained(norm, 1.0)
    for scale in (128.0, 2.0**-16):
        others, other_state, other_output = _trained(norm, scale)
        assert losses == others
        assert torch.equal(output, other_output)
        for key, value in state.items():
            units = scale if key.endswith("running_mean") else scale**2 if key.endswith("running_var") else 1
            assert torch.equal(other_state[key], value * units), key


def test_fp16_has_room_for_l1_in_units_in_which_l2_leaves_its_range() -> None:
    torch.manual_seed(1)
    x = torch.randn(32, 4, 8, 8)

    def normalized(name: str, scale: float, accumulate: str) -> tuple[Tensor, Tensor]:
        norm, leaf = _norms(norm=name, norm_input_scale=scale).batch_norm(4), x.clone().requires_grad_()
        with precision.arithmetic("fp16", accumulate=accumulate):
            y = norm(leaf)
        torch.manual_seed(2)
        (gradient,) = torch.autograd.grad(y, leaf, torch.randn_like(y) / 64)  # times 2^16 it still fits
        return y.detach(), gradient

    for accumulate in ("fp16", "fp32"):
        for name in ("l1", "l2"):
            y, gradient = normalized(name, 1.0, accumulate)
            torch.testing.assert_close(y, _norms(norm=name).batch_norm(4)(x), rtol=0, atol=0.01)
            for scale in (128.0, 2.0**-16):
                other, other_gradient = normalized(name, scale, accumulate)
                if name == "l1":
                    torch.testing.assert_close(other, y, rtol=0, atol=0.02)
                    # not element by element: a deviation that rounds to zero has no sign
                    assert (other_gradient - gradient).norm() < 5e-3 * gradient.norm()
                elif scale > 1:  # divided by infinity: no output, no gradient
                    assert other.count_nonzero() == other_gradient.count_nonzero() == 0
                else:  # divided by a variance that is zero, or by what is left of it
                    assert not (other - y).abs().max() < 1


def test_frozen_gammas_are_not_trained_and_projected_v_keep_their_norms() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    for options in ({"norm": "l1", "gamma": "frozen"}, {"weight_norm": "bwn", "project": True}):
        config = from_dict({"model": {"name": "resnet8", "width": 0.5, **options}, "optim": {"lr": 0.5}})
        model = build_image_model(config.model, channels=3, classes=10, size=16)
        regime = build_regime(config, model, 1, None)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        bounded = [m for m in model.modules() if isinstance(m, parametrize.ParametrizationList)]
        assert (len(frozen), len(bounded)) == ((9, 0) if "gamma" in options else (0, 9))
        trained = [p for group in regime.optimizer.param_groups for p in group["params"]]
        assert len(trained) == sum(p.requires_grad for p in model.parameters())
        before = [(v.original.detach().clone(), v.original.detach().flatten(1).norm(dim=1)) for v in bounded]
        for _ in range(3):
            regime.optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            regime.optimizer.step()
        assert all((p == 1).all() for p in frozen)
        for v, (first, length) in zip(bounded, before):
            assert not torch.allclose(v.original, first)
            torch.testing.assert_close(v.original.detach().flatten(1).norm(dim=1), length)
