"""scale_invariant_parameters: right on architectures whose answer is known, and it touches nothing."""

from __future__ import annotations

import copy
import threading
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, relu
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from normmatters import precision
from normmatters.optim import scale_invariant_parameters, split_parameters
from normmatters.optim.invariance import bisect
from support.optim_nets import INVARIANT, batch, convnet


class Zoo(nn.Module):
    """One of each kind of layer before one of each kind of normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.grouped, self.gn = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False), nn.GroupNorm(2, 8)
        self.up, self.bn_up = nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2), nn.BatchNorm2d(6)
        self.before_relu, self.bn_relu = nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4)
        self.to_ln, self.ln = nn.Linear(4, 16), nn.LayerNorm(16)
        self.to_functional = nn.Linear(16, 16)
        self.dropout, self.tanh = nn.Dropout(0.2), nn.Linear(16, 16)
        self.part, self.part_bn = nn.Linear(16, 10), nn.BatchNorm1d(5)
        self.last, self.unused = nn.Linear(16, 5), nn.Linear(2, 2)
        nn.init.zeros_(self.to_ln.bias)

    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
        x = relu(self.bn(self.conv(x)))
        x = relu(self.gn(self.grouped(x)))
        x = relu(self.bn_up(self.up(x)))
        x = self.bn_relu(relu(self.before_relu(x))).mean((2, 3))
        x = self.dropout(self.ln(self.to_ln(x)))
        x = layer_norm(relu(self.to_functional(x)), (16,))  # an eps that no attribute shows
        x = torch.tanh(3 * self.tanh(x))
        part = self.part(x)
        return {"a": (self.last(x), torch.cat([self.part_bn(part[:, :5]), part[:, 5:]], 1))}


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def test_every_kind_of_layer(images: Tensor) -> None:
    torch.manual_seed(0)
    result = scale_invariant_parameters(Zoo(), images)
    assert {n: result[n].granularity for n in result} == {
        "conv.weight": "channel",
        "grouped.weight": "tensor",  # a group norm spans channels
        "up.weight": "channel",
    }
    assert result.dims == {"conv.weight": 0, "grouped.weight": None, "up.weight": 1}
    joint = {n: (one.granularity, one.jointly_with) for n, one in result.found.items() if one.jointly_with}
    assert joint["before_relu.weight"] == ("channel", ("before_relu.bias",))
    assert joint["to_ln.weight"] == ("tensor", ("to_ln.bias",))  # although the bias is zero now
    assert joint["to_functional.weight"] == ("tensor", ("to_functional.bias",))
    assert joint["bn.weight"] == ("tensor", ("bn.bias",))  # affine, relu, conv, group norm
    part = result["part.weight"]
    assert part.granularity == "channel"
    assert part.mask.tolist() == [True] * 5 + [False] * 5
    assert "part.weight" not in result
    for name in ("conv.bias", "up.bias", "unused.weight", "unused.bias"):
        assert not result[name].influence
    for name in ("tanh.weight", "last.weight", "ln.weight", "bn_relu.weight"):
        assert result[name].granularity is None
        assert result[name].influence
    assert all(result[n].cosine < 1e-10 and result[n].change < 1e-10 for n in result)
    table = str(result)
    assert "part.weight" in table
    assert "channel, dim 0, 5 of 10" in table
    assert "tensor, with to_ln.bias" in table


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(20, 12), nn.Embedding(20, 8)
        self.ln, self.bn, self.lstm = nn.LayerNorm(12), nn.BatchNorm1d(8), nn.LSTM(12, 8, batch_first=True)

    def forward(self, tokens: Tensor, scale: float) -> Tensor:
        states, _ = self.lstm(self.ln(self.rows(tokens)))
        return scale * states + self.bn(self.columns(tokens).transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("kind", [tuple, dict, "named"])
def test_embeddings_and_lstm_with_tuple_and_dict_inputs(kind: Any) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 15, (8, 6))  # five tokens never occur
    batch = namedtuple("batch", "tokens scale")(tokens, 2.0)
    given = batch if kind == "named" else batch._asdict() if kind is dict else tuple(batch)
    result = scale_invariant_parameters(Sequences(), given)
    assert result.dims == {"rows.weight": 0, "columns.weight": 1}


def test_parametrized_weights_are_invariant_by_construction() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(weight_norm(nn.Linear(5, 6)), nn.ReLU(), spectral_norm(nn.Linear(6, 4)), nn.Tanh())
    result = scale_invariant_parameters(model, torch.randn(8, 5))
    assert result.dims == {"0.parametrizations.weight.original1": 0, "2.parametrizations.weight.original": None}


def test_zero_initialised_residual_branch_is_seen() -> None:
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.bn = nn.Linear(6, 6), nn.BatchNorm1d(6)
            nn.init.zeros_(self.bn.weight)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.bn(self.fc(x))

    assert list(scale_invariant_parameters(Block(), torch.randn(8, 6))) == ["fc.weight"]


def test_leaves_model_and_random_state_untouched(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    # Of a model on the host: its GPU's generator would have this seed once the model is there, not the user's.
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail(f"all GPUs were seeded with {seed}"))
    model = Zoo()
    model.eval()
    model.bn.train()
    model.last.weight.requires_grad_(False)
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    random = torch.get_rng_state()
    scale_invariant_parameters(model, images)
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == modes
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
        assert value.dtype == before[key].dtype
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["last.weight"]
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["conv.weight"]
    assert model.conv.weight.grad.eq(1).all()
    assert model.bn.eps == 1e-5


def test_sparse_gradients_are_gradients() -> None:
    def net(sparse: bool) -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.LayerNorm(4), nn.Linear(4, 2))

    state, tokens = net(False).state_dict(), torch.arange(10).view(2, 5)
    nets = [net(False), net(True)]
    for one in nets:
        one.load_state_dict(state)
    dense, sparse = (scale_invariant_parameters(one, tokens) for one in nets)
    assert list(sparse) == ["0.weight"]
    assert str(sparse) == str(dense)


def test_a_model_may_change_its_input_and_the_users_own_stays() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(10, 4), nn.Linear(4, 3)

        def forward(self, tokens: Tensor, others: dict[str, Tensor]) -> Tensor:
            rows = layer_norm(self.embedding(tokens.add_(1).remainder_(10)), (4,))
            return self.linear(rows * others.pop("scale").sub_(0.5).div_(0.25))  # type: ignore[no-any-return]

    tokens, scale = torch.randint(10, (4, 5)), torch.rand(4, dtype=torch.float64)
    inputs = (tokens.clone(), {"scale": scale.clone()})
    assert list(scale_invariant_parameters(InPlace(), inputs)) == ["embedding.weight"]
    assert torch.equal(inputs[0], tokens)
    assert torch.equal(inputs[1]["scale"], scale)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_modes_and_the_default_device_do_not_matter(images: Tensor, context: Any) -> None:
    model = Zoo()
    expected = str(scale_invariant_parameters(model, images))
    with context():
        found = scale_invariant_parameters(model, images)
    assert str(found) == expected


def test_result_gives_the_models_own_parameters_and_groups() -> None:
    model = convnet()
    result = scale_invariant_parameters(model, batch(0)[0])
    assert list(result) == INVARIANT
    assert len(result) == 3
    named = dict(model.named_parameters())
    assert all(p is named[n] for n, p in result.named_parameters())
    assert [id(p) for p in result.parameters()] == [id(named[n]) for n in INVARIANT]
    first, second = split_parameters(model, batch(0)[0])
    assert [n for n, _ in first["params"]] == INVARIANT
    assert len(first["params"]) + len(second["params"]) == len(named)
    optimizer = torch.optim.SGD([first | {"weight_decay": 0.0}, second], lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == INVARIANT


def test_bisection_finds_exactly_the_items_that_change_nothing() -> None:
    def change(items: list[int]) -> float:
        return float(any(i in (1, 4) for i in items))

    assert [i for i, _ in bisect(change, list(range(7)), 1e-3)] == [0, 2, 3, 5, 6]
    assert bisect(change, [4], 1e-3) == []


def test_the_rescaling_decides_where_the_gradient_is_fooled() -> None:
    """Length enters as 2n − n², which has no slope at n = 1: there the gradient is orthogonal, and scale matters."""

    class Stationary(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            n = self.weight.norm(dim=1)
            return x @ (self.weight / n[:, None]).T * (2 * n - n**2)

    model = Stationary(4, 3, bias=False).double()
    with torch.no_grad():
        model.weight.div_(model.weight.norm(dim=1, keepdim=True))
    result = scale_invariant_parameters(model, torch.randn(8, 4))
    assert list(result) == []
    assert result["weight"].influence
    assert result["weight"].cosine < 1e-10


def test_bad_input_is_named() -> None:
    model = convnet()
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got Tensor"):
        scale_invariant_parameters(torch.ones(2), torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tol must lie"):
        scale_invariant_parameters(model, batch(0)[0], tol=0.0)
    with pytest.raises(ValueError, match=r"precision\.arithmetic"), precision.arithmetic("fp16"):
        scale_invariant_parameters(model, batch(0)[0])
    with pytest.raises(TypeError, match=r"must be a floating-point torch\.dtype, got torch\.int32"):
        scale_invariant_parameters(model, batch(0)[0], dtype=torch.int32)
    ambiguous = nn.Sequential()
    ambiguous.module, ambiguous.fc = nn.Sequential(), nn.Linear(2, 2)
    ambiguous.module.fc = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"two parameters are called 'fc\.weight' without the prefixes of wrappers"):
        scale_invariant_parameters(ambiguous, torch.randn(4, 2))
    with pytest.raises(ValueError, match="must hold numbers to be tested, it has tensors on the meta device"):
        scale_invariant_parameters(nn.Linear(2, 2, device="meta"), torch.ones(3, 2))
    with pytest.raises(ValueError, match="must have floating-point parameters to test, it has none"):
        scale_invariant_parameters(nn.ReLU(), batch(0)[0])
    with pytest.raises(ValueError, match="finite, non-zero"):
        scale_invariant_parameters(model, batch(0)[0] * float("nan"))
    locked = nn.Linear(3, 2)
    locked.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"copy\.deepcopy.*_thread\.lock"):
        scale_invariant_parameters(locked, torch.randn(4, 3))

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.calls += 1
            return super().forward(x) * Counting.calls

    with pytest.raises(ValueError, match="different outputs"):
        scale_invariant_parameters(Counting(3, 2), torch.randn(4, 3))


def test_a_model_is_cast_by_its_own_method() -> None:
    class Lightning(nn.Sequential):
        dtype = torch.float32

        def to(self, dtype: torch.dtype) -> Any:
            self.dtype = dtype
            return super().to(dtype)

        def forward(self, x: Tensor) -> Any:
            return super().forward(x.to(self.dtype))

    model = Lightning(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert list(scale_invariant_parameters(model, torch.randn(8, 3))) == ["0.weight"]


@pytest.mark.filterwarnings("ignore")  # of torch.jit
def test_an_eps_that_cannot_be_set_stays() -> None:
    class Fixed(nn.Module):
        @property
        def eps(self) -> float:
            return 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return layer_norm(x, x.shape[-1:], eps=self.eps)

    fixed = nn.Sequential(nn.Linear(3, 4, bias=False), Fixed())
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4)))
    for model in (fixed, scripted):
        assert list(scale_invariant_parameters(model, 3 * torch.randn(8, 3))) == ["0.weight"]


def test_complex_weights_keep_their_imaginary_part() -> None:
    """The copy in float64 had the real parts alone: another function, or one that could not be computed."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0j, 1j, 0j]))

        def forward(self, x: Tensor) -> Tensor:
            assert self.weight.is_complex()
            return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=4)

    model = nn.Sequential(Spectral(), nn.Linear(4, 3), nn.BatchNorm1d(3))
    first, second = split_parameters(model, torch.randn(8, 4))
    assert [name for name, _ in first["params"]] == ["1.weight"]
    assert [name for name, _ in second["params"]] == ["0.weight", "1.bias", "2.weight", "2.bias"]

    class Spectrum(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(super().forward(x)).conj()

    complex_output = nn.Sequential(nn.Linear(4, 4, bias=False), Spectrum(4))
    assert list(scale_invariant_parameters(complex_output, torch.randn(8, 4))) == ["0.weight"]


def test_normalizations_and_weight_norm_of_this_library() -> None:
    """L1, L∞, Top(k) and range batch norm and L1 layer norm are as scale invariant as L2."""
    from normmatters.nn import L1BatchNorm2d, L1LayerNorm, LInfBatchNorm2d, RangeBatchNorm2d, TopKBatchNorm2d
    from normmatters.weight_norm import bounded_weight_norm

    norms = [L1BatchNorm2d(4), LInfBatchNorm2d(4), TopKBatchNorm2d(4, k=3), RangeBatchNorm2d(4)]
    layers = [layer for norm in norms for layer in (nn.Conv2d(4, 4, 1), norm, nn.ReLU())]
    bounded = nn.Linear(16, 6)
    bounded_weight_norm(bounded)
    model = nn.Sequential(*layers, nn.Flatten(), bounded, nn.ReLU(), nn.Linear(6, 5, bias=False), L1LayerNorm(5))
    result = scale_invariant_parameters(model, torch.randn(8, 4, 2, 2))
    dims = {f"{i}.weight": 0 for i in (0, 3, 6, 9)}
    assert result.dims == dims | {"13.parametrizations.weight.original": 0, "15.weight": None}
