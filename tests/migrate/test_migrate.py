"""Checkpoints of nn.BatchNorm, of the authors' repository and of torch's weight norm, into ours and back: one function.

The authors' layers are written here again, evaluation only, from what their state means.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm as torch_weight_norm

import normmatters as nm

C = 5
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def images() -> Tensor:
    return torch.randn(3, C, 4, 4, dtype=torch.float64) + 0.5


def channels(v: Tensor) -> Tensor:
    return v.view(1, -1, 1, 1)


class TheirLpNorm(nn.Module):
    """``lp_norm.py``: every batch norm there evaluates so, with the inverse scale under the name running_var."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.randn(C))
        self.register_buffer("running_var", torch.tensor([1e-2, 0.5, 1.0, 40.0, 1e5]))  # the last: below √eps
        self.mean, self.scale = nn.Parameter(torch.randn(C)), nn.Parameter(torch.randn(C))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - channels(self.running_mean)) * channels(self.running_var)
        return x * channels(self.scale) + channels(self.mean)


class TheirTopK(TheirLpNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("meanTOPK", torch.rand(C))


class TheirL1(nn.Module):
    """``mean_bn.py``'s L1: the scale itself."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.randn(C))
        self.register_buffer("running_scale", torch.tensor([1e-4 if affine else 1e-2, 0.5, 1.0, 40.0, 3.0]))
        self.weight, self.bias = (nn.Parameter(torch.randn(C)) if affine else None for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - channels(self.running_mean)) / channels(self.running_scale)
        return x if self.weight is None else x * channels(self.weight) + channels(self.bias)


class TheirMeanBN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.randn(C))
        self.bias = nn.Parameter(torch.randn(C))

    def forward(self, x: Tensor) -> Tensor:
        return x - channels(self.running_mean) + channels(self.bias)


class TheirBWN(nn.Module):
    """``bwn.py`` on a convolution: lengths g whose own norm is bounded, directions v."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_g, self.weight_v = nn.Parameter(torch.rand(4, 1, 1, 1)), nn.Parameter(torch.randn(4, C, 2, 2))
        self.register_buffer("weight_g_prenorm", torch.tensor([1.7]))
        self.bias = nn.Parameter(torch.randn(4))

    def weight(self) -> Tensor:
        norm = self.weight_v.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        return self.weight_v * (self.weight_g_prenorm / self.weight_g.norm() * self.weight_g / norm)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight(), self.bias)


class TheirScalarBWN(TheirBWN):
    """``bwn_alt.py``: one length for all channels."""

    def __init__(self) -> None:
        super().__init__()
        del self.weight_g, self.weight_g_prenorm
        self.register_buffer("weight_v_prenorm", torch.tensor([1.7]))

    def weight(self) -> Tensor:
        return self.weight_v * (self.weight_v_prenorm / self.weight_v.flatten(1).norm(dim=1).view(-1, 1, 1, 1))


def conv() -> nn.Conv2d:
    return nn.Conv2d(C, 4, 2)


INTO: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "lp into l1": (TheirLpNorm, lambda: nm.L1BatchNorm2d(C)),
    "lp into l2, another eps": (TheirLpNorm, lambda: nm.LpBatchNorm2d(C, p=2, eps=1e-3)),
    "lp into torch": (TheirLpNorm, lambda: nn.BatchNorm2d(C)),
    "topk": (TheirTopK, lambda: nm.TopKBatchNorm2d(C)),
    "lp into sync": (TheirLpNorm, lambda: nm.SyncLpBatchNorm(C)),
    "l1": (TheirL1, lambda: nm.L1BatchNorm2d(C)),
    "l1 without affine": (lambda: TheirL1(affine=False), lambda: nm.L1BatchNorm2d(C, affine=False)),
    "mean-only": (TheirMeanBN, lambda: nm.MeanOnlyBatchNorm2d(C)),
    "bwn into classic": (TheirBWN, lambda: nm.classic_weight_norm(conv())),
    "bwn into classic, p = 1": (TheirBWN, lambda: nm.classic_weight_norm(conv(), p=1)),
    "bwn into a plain weight": (TheirBWN, conv),
    "scalar bwn into bounded": (TheirScalarBWN, lambda: nm.bounded_weight_norm(conv())),
    "scalar bwn into classic": (TheirScalarBWN, lambda: nm.classic_weight_norm(conv())),
    "scalar bwn into a plain weight": (TheirScalarBWN, conv),
}


@pytest.mark.parametrize("case", INTO)
def test_authors_checkpoints_load_exactly(case: str) -> None:
    make_theirs, make_ours = INTO[case]
    theirs, ours = make_theirs().double().eval(), make_ours().double().eval()
    state = theirs.state_dict()
    untouched = {key: value.clone() for key, value in state.items()}
    result = nm.migrate.load(ours, state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    x = images()
    torch.testing.assert_close(ours(x), theirs(x), **EXACT)
    torch.testing.assert_close(dict(state), untouched, rtol=0, atol=0)


def test_weights_keep_their_meaning_in_training() -> None:
    """γ, β stay as they are where the scale is above √eps; directions v stay, so effective step sizes do."""
    theirs, ours = TheirLpNorm(), nm.L1BatchNorm2d(C)
    nm.migrate.load(ours, theirs.state_dict())
    torch.testing.assert_close(ours.weight[:4], theirs.scale[:4], rtol=0, atol=0)
    torch.testing.assert_close(ours.bias, theirs.mean, rtol=0, atol=0)
    assert (ours.running_var >= 0).all()
    torch.testing.assert_close(ours.running_var[1], torch.tensor(4.0))
    for source, make in ((TheirScalarBWN(), nm.bounded_weight_norm), (TheirBWN(), nm.classic_weight_norm)):
        layer = make(conv())
        nm.migrate.load(layer, source.state_dict())
        stack = layer.parametrizations.weight
        v = stack.original if make is nm.bounded_weight_norm else stack.original1
        torch.testing.assert_close(v, source.weight_v, rtol=0, atol=0)


BACK: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "l1": (lambda: nm.L1BatchNorm2d(C), TheirLpNorm),
    "torch": (lambda: nn.BatchNorm2d(C), TheirLpNorm),
    "without affine": (lambda: nm.RangeBatchNorm2d(C, affine=False), TheirLpNorm),
    "mean-only": (lambda: nm.MeanOnlyBatchNorm2d(C), TheirMeanBN),
    "bounded": (lambda: nm.bounded_weight_norm(conv()), TheirScalarBWN),
    "bounded, p = 1": (lambda: nm.bounded_weight_norm(conv(), p=1), TheirBWN),
    "classic": (lambda: nm.classic_weight_norm(conv()), TheirBWN),
}


@pytest.mark.parametrize("case", BACK)
def test_back_to_the_authors_layers(case: str) -> None:
    make_ours, make_theirs = BACK[case]
    ours, theirs = make_ours().double(), make_theirs().double()
    for _ in range(3):
        ours(images() * 3)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.3 * torch.rand_like(parameter))
    theirs.load_state_dict(nm.migrate.to_norm_matters(ours))
    x = images()
    torch.testing.assert_close(theirs.eval()(x), ours.eval()(x), **EXACT)
    again = make_ours().double().eval()
    nm.migrate.load(again, theirs.state_dict(), strict=case != "without affine")
    torch.testing.assert_close(again(x), ours(x), **EXACT)


def hooked(module: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, but what old checkpoints were made with
        return nn.utils.weight_norm(module, **options)


TORCHS = {"hook": hooked, "parametrization": torch_weight_norm}


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize(
    ("layout", "target"),
    # our classic weight norm has the keys of torch's parametrization: with another p it is refused, see the errors
    [("hook", "classic"), ("hook", "classic, p = 3"), ("hook", "plain")]
    + [("parametrization", "classic"), ("parametrization", "plain")],
)
def test_torch_weight_norm_into_ours(layout: str, dim: int | None, target: str) -> None:
    theirs = TORCHS[layout](nn.Linear(4, 3), dim=dim).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter))  # lengths of both signs
    model: Any = nn.Sequential(nn.Linear(4, 3)).double()
    if target != "plain":
        nm.classic_weight_norm(model[0], dim=dim, p=3.0 if "3" in target else 2)
    nm.migrate.load(model, {f"0.{key}": value for key, value in theirs.state_dict().items()})
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(model(x), theirs(x), **EXACT)


@pytest.mark.parametrize("layout", TORCHS)
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("make", ["bounded", "bounded, p = 1", "bounded, top 2", "classic", "classic, p = inf"])
def test_ours_into_torch_weight_norm_and_back(layout: Any, dim: int | None, make: str) -> None:
    def ours() -> nn.Module:
        layer = nn.Linear(4, 3).double()
        if make.startswith("bounded"):
            p, k = {"bounded": (2, None), "bounded, p = 1": (1, None), "bounded, top 2": (math.inf, 2)}[make]
            return nm.bounded_weight_norm(layer, dim=dim, p=p, k=k)
        return nm.classic_weight_norm(layer, dim=dim, p=math.inf if "inf" in make else 2)

    model = ours()
    theirs = TORCHS[layout](nn.Linear(4, 3), dim=dim).double()
    theirs.load_state_dict(nm.migrate.to_torch_weight_norm(model, layout))
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(theirs(x), model(x), **EXACT)
    if not (layout == "parametrization" and "inf" in make):
        again = ours()
        nm.migrate.load(again, theirs.state_dict())
        torch.testing.assert_close(again(x), model(x), **EXACT)


@pytest.mark.parametrize("length", [2.0, -2.0])
@pytest.mark.parametrize("p", [2, 1])
def test_equal_lengths_load_into_bounded_weight_norm(length: float, p: float) -> None:
    theirs = hooked(nn.Linear(4, 3)).double()
    with torch.no_grad():
        theirs.weight_g.fill_(length)
        if p == 1:  # the same L1 norm in every channel, whatever the signs
            theirs.weight_v.copy_(torch.tensor([[1.0, -2, 3, 4], [4, 3, -2, -1], [-3, 1, 4, 2]]))
    ours = nm.bounded_weight_norm(nn.Linear(4, 3).double(), p=p)
    nm.migrate.load(ours, theirs.state_dict())
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), **EXACT)
    if p == 2 and length > 0:
        torch.testing.assert_close(ours.parametrizations.weight.original, theirs.weight_v, rtol=0, atol=0)


def test_recurrent_layers_by_name() -> None:
    theirs = hooked(nn.LSTM(3, 4), name="weight_hh_l0")
    ours = nm.classic_weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    nm.migrate.load(ours, theirs.state_dict())
    x = torch.randn(6, 2, 3)
    torch.testing.assert_close(ours(x)[0], theirs(x)[0])


def test_batch_norm_checkpoints_need_nothing() -> None:
    theirs = nn.Sequential(nn.Conv2d(C, 4, 2), nn.BatchNorm2d(4)).double()
    theirs(images())
    ours = nn.Sequential(nn.Conv2d(C, 4, 2), nm.L1BatchNorm2d(4)).double()
    state = theirs.state_dict()
    torch.testing.assert_close(nm.migrate.translate(ours, state), dict(state), rtol=0, atol=0)
    ours.load_state_dict(state)
    x = images()
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), **EXACT)
    back = nn.Sequential(nn.Conv2d(C, 4, 2), nn.BatchNorm2d(4)).double()
    back.load_state_dict(ours.state_dict())
    torch.testing.assert_close(back.eval()(x), ours(x), **EXACT)


def test_a_whole_model_by_prefix() -> None:
    """A converted and fused model, weight norms and batch norms at once, and other layers left as they are."""
    theirs = nn.ModuleDict({"conv": TheirScalarBWN(), "bn": TheirL1(), "fc": nn.Linear(4, 2)}).double().eval()
    ours = nn.ModuleDict({"conv": conv(), "bn": nn.BatchNorm2d(C), "fc": nn.Linear(4, 2)}).double().eval()
    nm.bounded_weight_norm(ours["conv"])
    ours = nm.convert(ours)
    nm.migrate.load(ours, theirs.state_dict())
    x = images()
    for name, input in (("conv", x), ("bn", x), ("fc", x)):
        torch.testing.assert_close(ours[name](input), theirs[name](input), **EXACT)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_what_the_models_modules_keep_themselves_stays() -> None:
    """State of another type than a tensor, versions, and parameters that are only called like a weight norm's."""

    class Attention(nn.Linear):
        _version = 3

        def __init__(self) -> None:
            super().__init__(3, 2)
            self.query, self.query_v = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2))
            self.seen: list[Any] = []

        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 7}

        def set_extra_state(self, state: Any) -> None:
            self.seen.append(state)

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
            self.seen.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    theirs, ours = nn.utils.weight_norm(Attention()), Attention()
    nm.migrate.load(ours, theirs.state_dict())
    assert ours.seen == [3, {"calls": 7}]
    torch.testing.assert_close(ours.query_v, theirs.query_v)
    x = torch.randn(4, 3)
    torch.testing.assert_close(ours(x), theirs(x))


def lp_state(**changes: Tensor | None) -> dict[str, Any]:
    state = {f"bn.{key}": value for key, value in TheirLpNorm().state_dict().items()}
    state.update({f"bn.{key}": value for key, value in changes.items()})
    return {key: value for key, value in state.items() if value is not None}


def with_norm(norm: nn.Module) -> nn.Module:
    return nn.ModuleDict({"bn": norm})


ERRORS: list[tuple[nn.Module, Callable[[], dict[str, Any]], type[Exception], str]] = [
    (with_norm(nm.L1BatchNorm2d(C)), lambda: {"epoch": 3}, TypeError, "expected a tensor under 'epoch', got int"),
    (
        with_norm(nm.L1BatchNorm2d(C)),
        lambda: lp_state(running_var=torch.zeros(C)),
        ValueError,
        r"bn.running_var must hold positive, finite inverse scales, got 0 to 0",
    ),
    (with_norm(nm.L1BatchNorm2d(C)), lambda: lp_state(scale=None), ValueError, "bn.scale is missing: expected"),
    (with_norm(nm.L1BatchNorm2d(C)), lambda: lp_state(running_var=None), ValueError, "bn.running_var is missing"),
    (with_norm(nm.MeanOnlyBatchNorm2d(C)), lp_state, ValueError, "bn.running_var holds inverse scales, but the model"),
    (
        with_norm(nm.L1BatchNorm2d(C)),
        lambda: {"bn.running_mean": torch.zeros(C), "bn.bias": torch.zeros(C)},
        ValueError,
        "bn.running_var is missing: expected it for the model's L1BatchNorm2d",
    ),
    (
        nm.L1BatchNorm2d(C, affine=False),
        lambda: {"running_mean": torch.zeros(C), "running_scale": torch.full((C,), 1e-4)},
        ValueError,
        "weight is missing: expected one, for a scale below",
    ),
    (nn.Linear(2, 3), lambda: {"weight_v": torch.ones(3, 2)}, ValueError, "weight_g is missing: expected it beside"),
    (nn.Linear(2, 3), lambda: {"weight_g": torch.ones(3, 1)}, ValueError, "weight_v is missing: expected it beside"),
    (
        nn.Linear(2, 3),
        lambda: {"weight_v": torch.ones(3, 2), "weight_g": torch.ones(2, 1)},
        ValueError,
        r"weight_g must broadcast against weight_v of \(3, 2\), got \(2, 1\)",
    ),
    (
        nn.Linear(3, 3),
        lambda: {"weight_v": torch.ones(3, 3), "weight_g": torch.ones(3)},  # a row would be taken for a column
        ValueError,
        r"weight_g must broadcast against weight_v of \(3, 3\), got \(3,\)",
    ),
    (
        nm.bounded_weight_norm(nn.Linear(2, 3)),
        lambda: {
            "weight_v": torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]),
            "weight_g": torch.tensor(2.0),
        },  # dim=None
        ValueError,
        "weight: expected channels of one length for bounded weight norm, got",
    ),
    (
        nm.bounded_weight_norm(nn.Linear(2, 3)),
        lambda: {"weight_v": torch.ones(3, 2), "weight_g": torch.tensor([[1.0], [2.0], [1.0]])},
        ValueError,
        "weight: expected channels of one length for bounded weight norm, got 1 to 2",
    ),
    (
        nm.classic_weight_norm(nn.Linear(2, 3, bias=False), p=1),
        lambda: dict(torch_weight_norm(nn.Linear(2, 3, bias=False)).state_dict()),
        ValueError,
        "original0 is expected to be torch's, with p = 2, but the model's has p = 1",
    ),
    (with_norm(nm.L1BatchNorm2d(3)), lp_state, RuntimeError, "size mismatch for bn.weight"),
    (
        nm.classic_weight_norm(nn.Linear(2, 3, bias=False)),
        lambda: dict(nn.utils.spectral_norm(nn.Linear(2, 3, bias=False)).state_dict()),  # weight_v: another
        RuntimeError,
        '"weight_orig", "weight_u", "weight_v"',
    ),
]


@pytest.mark.parametrize(("model", "state", "error", "message"), ERRORS)
def test_errors_name_the_key_and_change_nothing(
    model: nn.Module, state: Callable[[], dict[str, Any]], error: type[Exception], message: str
) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        nm.migrate.load(model, state())
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_a_norm_that_counts_no_batches_is_written() -> None:
    norm = nm.L1BatchNorm2d(3)
    norm.num_batches_tracked = None
    assert sorted(nm.migrate.to_norm_matters(norm)) == ["mean", "running_mean", "running_var", "scale"]


def test_other_errors() -> None:
    for given_both in (nm.migrate.translate, nm.migrate.load):
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
            given_both([], {})  # type: ignore[operator]
    for function in (nm.migrate.to_norm_matters, nm.migrate.to_torch_weight_norm):
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
            function([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state_dict must be a mapping of names to tensors, got str"):
        nm.migrate.load(nn.Linear(2, 3), "model_best.pth.tar")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout must be 'parametrization' or 'hook', got 'hooks'"):
        nm.migrate.to_torch_weight_norm(nn.Linear(2, 3), "hooks")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"0.running_var is missing: expected running statistics"):
        nm.migrate.to_norm_matters(nn.Sequential(nm.L1BatchNorm2d(3, track_running_stats=False)))
    embedding = nm.bounded_weight_norm(nn.Embedding(4, 3, padding_idx=0))
    with pytest.raises(ValueError, match="weight has a channel of zeros"):
        nm.migrate.to_torch_weight_norm(embedding)
