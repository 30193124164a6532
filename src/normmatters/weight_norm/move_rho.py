"""ρ of the hidden layers moved into the last layer and the biases (F14)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normmatters.weight_norm.fused import WEIGHT_LAYERS
from normmatters.weight_norm.parametrizations import BoundedWeight, ClassicWeight, weight_norm_of

# f(a·x) = a·f(x) for every a > 0: the scale of their input passes through to their output.
_HOMOGENEOUS = (
    *(nn.Identity, nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Flatten, nn.Unflatten, nn.Upsample, nn.PixelShuffle),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
_FORWARDS = {kind.forward for kind in WEIGHT_LAYERS + _HOMOGENEOUS}  # a subclass may have another


@torch.no_grad()
def move_rho_to_last_layer(model: nn.Sequential) -> nn.Sequential:
    """Set ρ = 1 in every bounded hidden layer of a ReLU network, in place, with the same outputs (F14).

    With c the product of the ρ up to and including a layer, its activations become h/c if its bias becomes b/c, since
    ReLU, pooling and dropout pass a positive scale through. The last layer with weights gets the product of all ρ;
    its bias, and whatever follows it, stays. Training is not the same afterwards: only the function is.

    Args:
        model: an ``nn.Sequential``, nested or not, of linear and convolutional layers (at least one with bounded
            weight norm) and layers that a positive scale passes through.

    Raises:
        ValueError: a layer between the first and the last weights does not pass scale through (sigmoid, batch norm, a
            subclass with a forward of its own), or is used twice, or has a bias that is computed, as the last weight
            must not be either (pruning); or no layer has bounded weight norm. Nothing is then changed.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> report = apply_weight_norm(model, rho=2.0)
        >>> [float(layer.parametrizations.weight[0].rho) for layer in move_rho_to_last_layer(model)[::2]]
        [1.0, 4.0]
    """
    layers = _weight_layers(model)
    product = 1.0
    for layer in layers[:-1]:
        norm = weight_norm_of(layer, "weight")
        if isinstance(norm, BoundedWeight):
            product *= norm.rho.item()
            norm.rho.fill_(1)
        if layer.bias is not None:
            assert isinstance(layer.bias, Tensor)
            layer.bias.div_(product)
    _length(layers[-1]).mul_(product)
    return model


def _weight_layers(model: nn.Sequential) -> list[nn.Module]:
    """The layers with weights in the order of the data; an error for anything that scale does not pass through."""
    if not _is_plain_sequential(model):
        raise TypeError(f"expected an nn.Sequential, whose order of layers is known, got {type(model).__name__}")
    path = list(_flatten(model, ""))
    places = [i for i, (_, module) in enumerate(path) if isinstance(module, WEIGHT_LAYERS)]
    layers = [path[i][1] for i in places]
    if not any(isinstance(weight_norm_of(layer, "weight"), BoundedWeight) for layer in layers):
        raise ValueError("found no linear or convolutional layer with bounded weight norm")
    for name, module in path[places[0] : places[-1] + 1]:
        if not isinstance(module, WEIGHT_LAYERS + _HOMOGENEOUS) or type(module).forward not in _FORWARDS:
            raise ValueError(
                f"layer {name} is a {type(module).__name__}: a positive scale does not pass through it unchanged, "
                "so rho cannot be moved past it"
            )
    seen: set[int] = set()
    for i in places:
        name, layer = path[i]
        own = {id(parameter) for parameter in layer.parameters()}
        if own & seen:
            raise ValueError(
                f"layer {name} is, or shares a parameter with, an earlier layer: rho cannot leave just one"
            )
        seen |= own
        if i != places[-1] and layer.bias is not None and "bias" not in layer._parameters:
            raise ValueError(f"the bias of layer {name} is computed (parametrized, pruned): rho cannot divide it")
    _length(layers[-1])
    return layers


def _is_plain_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _flatten(model: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model._modules.items():
        if isinstance(module, nn.Sequential) and _is_plain_sequential(module):
            yield from _flatten(module, f"{prefix}{name}.")
        elif module is not None:
            yield prefix + name, module


def _length(layer: nn.Module) -> Tensor:
    """The tensor in which the weights of a layer are linear: ρ, g or the weight itself."""
    norm = weight_norm_of(layer, "weight")
    if isinstance(norm, BoundedWeight):
        return norm.rho
    if isinstance(norm, ClassicWeight):
        return layer.parametrizations.weight.original0  # type: ignore[union-attr, return-value]
    weight = layer._parameters.get("weight")
    if weight is None:
        raise ValueError(
            f"the weight of the last {type(layer).__name__} is computed (parametrized, pruned): rho cannot enter it"
        )
    return weight
