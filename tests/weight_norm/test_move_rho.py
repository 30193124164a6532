"""F14: ρ moved into the last layer and the biases leaves the function as it was."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from normmatters.weight_norm import apply_weight_norm, bounded_weight_norm, classic_weight_norm, move_rho_to_last_layer


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, padding=1),
        nn.Sequential(nn.Conv2d(6, 5, 3), nn.LeakyReLU(0.1), nn.Dropout(0.5)),
        nn.ConvTranspose2d(5, 4, 2),
        nn.PReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 7, bias=False),
        nn.ReLU(),
        nn.Linear(7, 2),
        nn.Softmax(1),
    ).double()


def rhos(model):
    return [m.rho.item() for m in model.modules() if type(m).__name__ == "BoundedWeight"]


@pytest.mark.parametrize("p", [1, 2, float("inf")])
def test_outputs_agree_and_hidden_rhos_are_one(p):
    torch.manual_seed(0)
    model = convnet().eval()
    apply_weight_norm(model, p=p)
    x = torch.randn(4, 3, 10, 10, dtype=torch.float64)
    x = x[..., :9, :9]
    expected, before, last_bias = model(x), rhos(model), model[10].bias.clone()
    assert move_rho_to_last_layer(model) is model
    after = rhos(model)
    assert after[:-1] == [1.0] * 4
    assert after[-1] == pytest.approx(torch.tensor(before, dtype=torch.float64).prod().item(), rel=1e-12)
    assert before[:-1] != after[:-1]
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(model[10].bias, last_bias)
    move_rho_to_last_layer(model)  # a second time there is nothing left to move
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("last", ["plain", "classic"])
def test_layers_without_bounded_weights_take_part(last):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)]
    model = nn.Sequential(*layers).double()
    for i, rho in ((0, 3.0), (4, 0.2)):
        bounded_weight_norm(model[i], rho=rho)
    if last == "classic":
        classic_weight_norm(model[6])
    x = torch.randn(5, 4, dtype=torch.float64)
    expected, plain = model(x), model[2].weight.clone()
    move_rho_to_last_layer(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=0)
    assert rhos(model) == [1.0, 1.0]
    assert torch.equal(model[2].weight, plain)


@pytest.mark.parametrize(
    "between",
    [
        nn.Sigmoid(),
        nn.Tanh(),
        nn.GELU(),
        nn.ReLU6(),
        nn.BatchNorm1d(6),
        nn.LayerNorm(6),
        nn.AlphaDropout(),
        nn.Bilinear(6, 6, 6),
    ],
    ids=lambda module: type(module).__name__,
)
def test_layers_that_scale_does_not_pass_through_are_refused(between):
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), between), nn.Linear(6, 3))
    for i in (0, 2):
        bounded_weight_norm(model[i], rho=2.0)
    bias = model[0].bias.clone()
    with pytest.raises(ValueError, match=rf"layer 1\.1 is a {type(between).__name__}"):
        move_rho_to_last_layer(model)
    assert rhos(model) == [2.0, 2.0]
    assert torch.equal(model[0].bias, bias)


def test_before_the_first_and_after_the_last_weights_anything_may_stand():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.Sigmoid()).double()
    apply_weight_norm(model, rho=2.0)
    x = torch.randn(5, 4, dtype=torch.float64)
    expected = model(x)
    torch.testing.assert_close(move_rho_to_last_layer(model)(x), expected, rtol=1e-12, atol=0)
    assert rhos(model) == [1.0, 4.0]


def test_bad_input():
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        move_rho_to_last_layer(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no linear"):
        move_rho_to_last_layer(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))

    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    with pytest.raises(TypeError, match="Residual"):
        move_rho_to_last_layer(Residual(bounded_weight_norm(nn.Linear(2, 2))))
    layer = bounded_weight_norm(nn.Linear(2, 2), rho=2.0)
    inner = nn.Sequential(layer, Residual(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="layer 1 is a Residual"):
        move_rho_to_last_layer(inner)
    with pytest.raises(ValueError, match="earlier layer"):
        move_rho_to_last_layer(nn.Sequential(layer, nn.ReLU(), layer))
    with pytest.raises(ValueError, match="the last ParametrizedLinear is computed"):
        move_rho_to_last_layer(nn.Sequential(layer, nn.ReLU(), parametrizations.orthogonal(nn.Linear(2, 2))))

    class Standardized(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight / self.weight.norm(), self.bias)

    for last in ([], [nn.Linear(2, 2)]):
        with pytest.raises(ValueError, match="layer 1 is a Standardized"):
            move_rho_to_last_layer(nn.Sequential(layer, Standardized(2, 2), *last))
    assert layer.parametrizations.weight[0].rho == 2.0


@pytest.mark.parametrize(("place", "name"), [(0, "bias"), (2, "weight"), (2, "bias")])
def test_what_pruning_computes_anew_at_every_pass_is_not_rescaled_in_vain(place, name):
    model = nn.Sequential(bounded_weight_norm(nn.Linear(4, 6), rho=2.0), nn.ReLU(), nn.Linear(6, 3))
    prune.random_unstructured(model[place], name, 1)
    x = torch.randn(5, 4)
    expected = model(x)
    if (place, name) == (2, "bias"):  # which stays as it is
        move_rho_to_last_layer(model)
    else:
        with pytest.raises(ValueError, match=rf"the {name} of .* is computed \(parametrized, pruned\)"):
            move_rho_to_last_layer(model)
    torch.testing.assert_close(model(x), expected)
