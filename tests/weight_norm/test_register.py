"""bounded_weight_norm, classic_weight_norm and remove_weight_norm on single layers of every kind."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from normmatters.functional.weight import bounded_weight, slice_norm
from normmatters.weight_norm import (
    BoundedWeight,
    apply_weight_norm,
    bounded_weight_norm,
    classic_weight_norm,
    remove_weight_norm,
)

INF = math.inf
NORMS = [(1, None), (2, None), (3.0, None), (INF, None), (INF, 4)]

LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), "weight", 0, (3, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), "weight", 0, (2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 5, 3), "weight", 0, (2, 2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), "weight", 0, (1, 2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 2), "weight", 1, (1, 4, 3, 3)),
    "lstm": (lambda: nn.LSTM(4, 5), "weight_hh_l0", 0, (3, 2, 4)),
    "gru": (lambda: nn.GRU(4, 5, bidirectional=True), "weight_ih_l0_reverse", 0, (3, 2, 4)),
    "gru cell": (lambda: nn.GRUCell(4, 5), "weight_hh", 0, (2, 4)),
    "whole tensor": (lambda: nn.Linear(6, 5), "weight", None, (3, 6)),
}


def run(module, x):
    out = module(x)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("p", "k"), [(2, None), (INF, 4)])
def test_layer_computes_with_the_bounded_weight(layer, p, k):
    """Output and gradients equal those of the plain layer called with rho·v/‖v‖, F12's rho worked out by hand."""
    make, name, dim, shape = LAYERS[layer]
    torch.manual_seed(0)
    module, x = make().double(), torch.randn(shape, dtype=torch.float64)
    plain = {key: value.detach().clone().requires_grad_() for key, value in module.named_parameters()}
    norms = slice_norm(plain[name].detach(), dim=dim, p=p, k=k)
    rho = norms.square().mean().sqrt() if p == 2 else norms.mean()
    weights = dict(plain, **{name: bounded_weight(plain[name], rho, dim=dim, p=p, k=k)})
    expected = run(lambda x: torch.func.functional_call(module, weights, x), x)
    expected.square().sum().backward()

    assert bounded_weight_norm(module, name, dim, p, k=k) is module
    out = run(module, x)
    out.square().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(module.parametrizations[name].original.grad, plain[name].grad)
    torch.testing.assert_close(module.parametrizations[name][0].rho, rho)


@pytest.mark.parametrize(("p", "k"), NORMS)
def test_rho_is_that_of_the_initialisation(p, k):
    """F13: ‖V‖_p / N^{1/p}, the p-norm of the whole tensor."""
    layer = nn.Conv2d(3, 7, 3).double()
    v = layer.weight.detach().clone()
    bounded_weight_norm(layer, p=p, k=k)
    if k is not None:
        expected = v.flatten(1).abs().topk(k, 1).values.sum(1).mean()
    else:
        expected = v.flatten().norm(p) / 7 ** (1 / p)
    torch.testing.assert_close(layer.parametrizations.weight[0].rho, expected)
    torch.testing.assert_close(slice_norm(layer.weight, p=p, k=k), expected.expand(7, 1, 1, 1))
    if p == 2:  # the energy of the initialisation is kept
        torch.testing.assert_close(layer.weight.square().sum(), v.square().sum())


def test_rho_given_as_a_number_stays_fixed_in_training():
    layer = bounded_weight_norm(nn.Linear(6, 4), rho=0.25)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    lengths = []
    for _ in range(3):
        lengths.append(layer.parametrizations.weight.original.norm().item())
        layer(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(layer.weight.norm(dim=1), torch.full((4,), 0.25))
    assert lengths == sorted(lengths)  # v is scale-invariant: plain SGD only lengthens it
    assert lengths[0] < lengths[-1]


def test_an_optimizer_made_before_keeps_training_through_adding_and_removing():
    layer = nn.Linear(6, 4)
    parameter = layer.weight
    bounded_weight_norm(layer)
    assert layer.parametrizations.weight.original is parameter
    assert remove_weight_norm(layer).weight is parameter


def test_embedding_with_and_without_padding():
    embedding = nn.Embedding(5, 8, padding_idx=2)
    expected = embedding.weight.detach().norm(dim=1)[[0, 1, 3, 4]].square().mean().sqrt()
    bounded_weight_norm(embedding)
    out = embedding(torch.tensor([0, 2, 4]))
    torch.testing.assert_close(out.norm(dim=1), torch.stack([expected, torch.tensor(0.0), expected]))
    out.sum().backward()
    assert embedding.parametrizations.weight.original.grad[2].eq(0).all()
    with pytest.raises(ValueError, match="slice 2"):
        bounded_weight_norm(
            nn.Embedding.from_pretrained(torch.eye(4)[[0, 1]].repeat(2, 1) * torch.tensor([[1.0], [1], [0], [1]]))
        )


def test_assigning_a_weight_sets_the_directions():
    layer = bounded_weight_norm(nn.Linear(3, 2), rho=2.0)
    layer.weight = torch.tensor([[0.0, 5.0, 0.0], [3.0, 0.0, 4.0]])
    torch.testing.assert_close(layer.weight, torch.tensor([[0.0, 2.0, 0.0], [1.2, 0.0, 1.6]]))


@pytest.mark.parametrize("dim", [0, 1, None])
def test_classic_equals_torch_weight_norm(dim):
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    theirs.load_state_dict(ours.state_dict())
    plain = ours.weight.detach().clone()
    classic_weight_norm(ours, dim=dim)
    torch.testing.assert_close(ours.weight, plain)  # g starts as the norms
    if dim is not None:  # torch's own g of dim=None has another shape
        parametrizations.weight_norm(theirs, dim=dim)
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(5, 4, dtype=torch.float64)
        for layer in (ours, theirs):
            layer(x).square().sum().backward()
        for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.parametrize("add", [bounded_weight_norm, classic_weight_norm])
def test_remove_leaves_a_plain_weight_with_the_same_outputs(add):
    x = torch.randn(3, 6)
    layer = add(nn.Linear(6, 4))
    expected = layer(x)
    assert remove_weight_norm(layer) is layer
    assert type(layer) is nn.Linear
    assert type(layer.weight) is nn.Parameter
    assert layer.weight.requires_grad
    assert list(layer.state_dict()) == ["weight", "bias"]
    torch.testing.assert_close(layer(x), expected)


def every_layer() -> nn.Module:
    return nn.ModuleList([nn.Linear(3, 4), nn.LSTM(3, 4, 2), nn.MultiheadAttention(4, 2), nn.Bilinear(2, 3, 4)])


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("kind", ["bounded", "classic"])
def test_remove_keeps_the_order_of_parameters(kind, copied):
    """So that an optimizer state that was saved by index fits, also when the model was pickled in between."""
    plain = every_layer()
    model = copy.deepcopy(plain)
    apply_weight_norm(model, kind=kind)
    model = remove_weight_norm(pickle.loads(pickle.dumps(model)) if copied else model)
    expected = [(name, p.shape) for name, p in plain.named_parameters()]
    assert [(name, p.shape) for name, p in model.named_parameters()] == expected


def test_weights_normalized_one_after_the_other_return_to_their_order():
    lstm = nn.LSTM(3, 4)
    names = [name for name, _ in lstm.named_parameters()]
    for name in ("weight_hh_l0", "bias_ih_l0", "weight_ih_l0"):
        bounded_weight_norm(lstm, name)
    assert [name for name, _ in remove_weight_norm(lstm).named_parameters()] == names
    layer = nn.Linear(3, 4)
    parametrize.register_parametrization(layer, "weight", BoundedWeight(torch.ones(4, 3)))
    assert sorted(dict(remove_weight_norm(layer).named_parameters())) == ["bias", "weight"]  # no place is known


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 4), lambda: nn.LSTM(3, 4)], ids=["linear", "lstm"])
@pytest.mark.parametrize("add", [bounded_weight_norm, classic_weight_norm])
@pytest.mark.parametrize("frozen", [True, False])
def test_remove_leaves_a_parameter_of_a_frozen_layer_and_where_no_gradients_are_recorded(make, add, frozen):
    """Torch makes a buffer of classic weight norm's weight then: no optimizer would ever find it again."""
    layer, x = make(), torch.randn(2, 2, 3)
    name = next(iter(dict(layer.named_parameters())))
    names = set(layer.state_dict())
    add(layer, name).requires_grad_(not frozen)
    with torch.no_grad():
        expected = run(layer, x)
        remove_weight_norm(layer)
        torch.testing.assert_close(run(layer, x), expected)
    assert set(dict(layer.named_parameters())) == names
    assert getattr(layer, name).requires_grad is not frozen
    layer.requires_grad_(True)
    run(layer, x).sum().backward()
    assert getattr(layer, name).grad.any()


def test_remove_refuses_a_pruned_direction_until_it_is_pruned_for_good():
    """The masked direction is no parameter, and neither would the weight be that comes of it."""
    layer, x = bounded_weight_norm(nn.Linear(6, 4)), torch.randn(3, 6)
    prune.l1_unstructured(layer.parametrizations.weight, "original", 0.3)
    expected = layer(x)
    with pytest.raises(ValueError, match=r"weight is computed from no parameter.*prune\.remove"):
        remove_weight_norm(nn.Sequential(layer))
    assert torch.equal(layer(x), expected)
    prune.remove(layer.parametrizations.weight, "original")
    torch.testing.assert_close(remove_weight_norm(layer)(x), expected)
    assert isinstance(layer.weight, nn.Parameter)


def test_a_recurrent_layer_computes_its_weights_once_a_pass_and_shares_them_with_no_other():
    """Not by torch's cache, which is the process's: while another thread is inside it, old weights would stay."""
    layer, calls = bounded_weight_norm(nn.LSTM(4, 5), "weight_hh_l0"), []
    layer.parametrizations.weight_hh_l0[0].register_forward_hook(lambda *_: calls.append(parametrize._cache_enabled))
    before = set(layer.__dict__)
    layer(torch.randn(3, 2, 4))
    assert calls == [0]
    with pytest.raises(RuntimeError):
        layer(torch.randn(3, 2, 7))
    assert calls == [0, 0]
    assert set(layer.__dict__) == before  # nothing is kept


def test_remove_from_a_recurrent_layer_restores_its_flat_weights():
    torch.manual_seed(0)
    lstm, x = nn.LSTM(3, 4, num_layers=2, proj_size=2), torch.randn(5, 2, 3)
    for name in ("weight_ih_l0", "weight_hr_l1"):
        bounded_weight_norm(lstm, name, rho=0.5)
    expected = lstm(x)[0]
    remove_weight_norm(lstm)
    assert type(lstm) is nn.LSTM
    torch.testing.assert_close(lstm(x)[0], expected)
    assert all(w is getattr(lstm, n) for w, n in zip(lstm._flat_weights, lstm._flat_weights_names, strict=True))
    lstm(x)[0].sum().backward()
    assert lstm.weight_ih_l0.grad is not None


@pytest.mark.parametrize("add", [bounded_weight_norm, classic_weight_norm])
def test_torchs_own_removal_from_a_recurrent_layer(add):
    lstm = add(add(nn.LSTM(3, 4), "weight_ih_l0"), "weight_hh_l0")
    x = torch.randn(5, 2, 3)
    expected, _ = lstm(x)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        parametrize.remove_parametrizations(lstm, name)
    torch.testing.assert_close(lstm(x)[0], expected)
    lstm.weight_hh_l0.data.zero_()  # it is the very weight that is used
    assert not torch.allclose(lstm(x)[0], expected)


@pytest.mark.parametrize("rho", [None, 3.0])
def test_remove_refuses_to_change_a_layer_that_shares_the_parameter(rho):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    bounded_weight_norm(model[0], rho=1.0)
    if rho is not None:
        bounded_weight_norm(model[1], rho=rho)
    x = torch.randn(2, 3)
    expected = model(x)
    with pytest.raises(ValueError, match="shares its parameter"):
        remove_weight_norm(model)
    assert parametrize.is_parametrized(model[0])
    assert torch.equal(model(x), expected)


def test_remove_refuses_what_it_does_not_own():
    with pytest.raises(ValueError, match="no weight norm"):
        remove_weight_norm(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no weight norm"):
        remove_weight_norm(parametrizations.orthogonal(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="module"):
        remove_weight_norm(torch.ones(2))
    model = nn.Sequential(bounded_weight_norm(nn.Linear(2, 2)), bounded_weight_norm(nn.Linear(2, 2)))
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    with pytest.raises(ValueError, match=r"1\.weight"):
        remove_weight_norm(model)
    assert parametrize.is_parametrized(model[0])


def zero_channel():
    layer = nn.Linear(3, 2)
    nn.init.zeros_(layer.weight[1])
    return layer


def with_nan():
    layer = nn.Linear(3, 2)
    nn.init.constant_(layer.weight[1], math.nan)
    return layer


def integer_weight():
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.int32), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (lambda: nn.Linear(3, 2), {"rho": 0}, ValueError, "positive"),
        (lambda: nn.Linear(3, 2), {"rho": -1.0}, ValueError, "positive"),
        (lambda: nn.Linear(3, 2), {"rho": math.nan}, ValueError, "positive"),
        (lambda: nn.Linear(3, 2), {"rho": INF}, ValueError, "finite"),
        (lambda: nn.Linear(3, 2), {"rho": "auto"}, ValueError, "'init'"),
        (lambda: nn.Linear(3, 2), {"rho": None}, TypeError, "rho"),
        (lambda: nn.Linear(3, 2), {"name": "wieght"}, ValueError, "it has: weight, bias"),
        (lambda: nn.Linear(3, 2, bias=False), {"name": "bias"}, ValueError, "no parameter"),
        (lambda: nn.Linear(3, 2), {"dim": 2}, ValueError, "dim"),
        (lambda: nn.Linear(3, 2), {"p": 0.5}, ValueError, "at least 1"),
        (lambda: nn.Linear(3, 2), {"p": "mean"}, ValueError, "mean"),
        (lambda: nn.Linear(3, 2), {"k": 2}, ValueError, "math.inf"),
        (lambda: nn.Linear(3, 2), {"p": INF, "k": 4}, ValueError, "slice size 3"),
        (lambda: nn.LazyLinear(2), {}, ValueError, "not initialised"),
        (lambda: nn.Embedding(4, 3, sparse=True), {}, ValueError, "sparse"),
        (lambda: nn.Linear(3, 2, device="meta"), {}, ValueError, "meta"),
        (zero_channel, {}, ValueError, "slice 1 along dim 0"),
        (zero_channel, {"rho": 1.0}, ValueError, "slice 1"),
        (with_nan, {}, ValueError, "NaN"),
        (integer_weight, {}, TypeError, "floating-point"),
    ],
)
def test_bad_input_leaves_the_module_as_it_was(make, arguments, error, message):
    module = make()
    before = dict(module._parameters)
    with pytest.raises(error, match=message):
        bounded_weight_norm(module, **arguments)
    assert "Parametrized" not in type(module).__name__
    assert module._parameters == before
    assert not hasattr(module, "parametrizations")


@pytest.mark.parametrize("add", [bounded_weight_norm, classic_weight_norm])
def test_already_parametrized_and_no_module(add):
    layer = bounded_weight_norm(nn.Linear(3, 2))
    before = layer.weight
    with pytest.raises(ValueError, match="already parametrized"):
        add(layer)
    assert len(layer.parametrizations.weight) == 1
    torch.testing.assert_close(layer.weight, before)
    with pytest.raises(TypeError, match="module"):
        add(layer.weight)
