"""What the backward pass finds of what the forward pass saved: with other strides, changed since, or asked twice."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from normmatters import L1BatchNorm2d, L1BatchNorm3d, L1LayerNorm, L1RMSNorm, LpBatchNorm2d, MeanOnlyBatchNorm2d
from normmatters.functional import bounded_weight
from normmatters.nn import twin
from normmatters.weight_norm import apply_weight_norm
from support.batch_norm_cases import DEVICE, made


class Watching(TorchDispatchMode):
    """Sees every operator, and so makes the library call operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODES = {"eager": contextlib.nullcontext, "operators": Watching}


def gradients(call, leaves, *contexts):
    """Of all ``leaves``, with ``contexts`` around forward and backward pass."""
    for leaf in leaves:
        leaf.grad = None
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        y = call()
        y.backward(torch.linspace(-1, 1, y.numel(), device=DEVICE).view(y.shape))
    return [leaf.grad for leaf in leaves]


def check_offloaded(mode, call, leaves):
    """Pinned memory is contiguous: what comes back from there has lost its channels_last strides."""
    expected = gradients(call, leaves)
    assert_close(gradients(call, leaves, mode(), save_on_cpu(pin_memory=True)), expected)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(
    ("p", "act", "memory"), [(1, None, "exact"), (1, "relu", "lean"), (2, "relu", "exact"), (math.inf, None, "exact")]
)
def test_offloaded_batch_norm(mode, p, act, memory):
    norm = LpBatchNorm2d(4, p=p, act=act, memory=memory, device=DEVICE)
    x = made((3, 4, 3, 2), "channels_last").requires_grad_()
    check_offloaded(mode, lambda: norm(x), [x, norm.weight, norm.bias])


def test_offloaded_batch_norm_3d():
    norm = L1BatchNorm3d(4, act="relu", device=DEVICE)
    x = made((3, 4, 2, 3, 2), "channels_last").requires_grad_()
    check_offloaded(contextlib.nullcontext, lambda: norm(x), [x, norm.weight, norm.bias])


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_offloaded_twins(mode):
    norm, other = L1BatchNorm2d(4, act="relu", device=DEVICE), L1BatchNorm2d(4, device=DEVICE)
    x, y = (made((3, 4, 3, 2), "channels_last").requires_grad_() for _ in range(2))
    leaves = [x, y, *norm.parameters(), *other.parameters()]
    check_offloaded(mode, lambda: twin.twin_batch_norm(norm, x, other, y)[0], leaves)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kind", ["bounded", "classic"])
def test_offloaded_weights(kind, mode):
    layer = nn.Conv2d(3, 5, 2, device=DEVICE).to(memory_format=torch.channels_last)
    apply_weight_norm(layer, kind=kind)
    x = torch.randn(2, 3, 4, 4, device=DEVICE)
    check_offloaded(mode, lambda: layer(x), list(layer.parameters()))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kind", ["bounded", "classic"])
def test_a_rho_changed_before_the_backward_pass_is_noticed(kind, mode):
    layer = nn.Linear(4, 3, device=DEVICE)
    apply_weight_norm(layer, kind=kind)
    with mode():
        y = layer(torch.ones(2, 4, device=DEVICE))
    stack = layer.parametrizations.weight
    (stack[0].rho if kind == "bounded" else stack.original0.detach()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(
    "make",
    [lambda: L1BatchNorm2d(4, act="relu", device=DEVICE), lambda: L1LayerNorm(4, device=DEVICE)],
    ids=["batch norm", "layer norm"],
)
def test_differentiating_twice_is_an_error(make, mode):
    module = make()
    x = torch.randn(3, 4, 4, 4, device=DEVICE).requires_grad_()
    (parameter, *_) = module.parameters()
    with mode():
        (g,) = torch.autograd.grad(module(x).pow(3).sum(), parameter, create_graph=True)
        with pytest.raises(RuntimeError, match="only once"):
            g.square().sum().backward()


def strided(x):
    return x.transpose(2, 3)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("change", [lambda x: x.clone(), strided], ids=["dense", "strided"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: L1BatchNorm2d(4, act="relu", device=DEVICE),
        lambda: L1BatchNorm2d(4, memory="lean", device=DEVICE),
        lambda: L1BatchNorm2d(4, act="relu", memory="lean", device=DEVICE),
        lambda: MeanOnlyBatchNorm2d(4, act="relu", device=DEVICE),
        lambda: L1LayerNorm(4, device=DEVICE),
        lambda: L1RMSNorm(4, device=DEVICE),
    ],
    ids=["batch norm", "lean", "lean, relu", "mean", "layer norm", "RMS norm"],
)
def test_no_part_of_a_second_derivative_is_left_out(make, change, mode):
    """A Hessian asks for the way to what it differentiates by: an error that lies beside that way is never met."""
    norm = make()
    x = torch.randn(3, 4, 4, 4, device=DEVICE).requires_grad_()
    for leaf in (x, *norm.parameters()):

        def hessian(leaf=leaf):
            loss = norm(change(x)).pow(3).sum() + sum(one.pow(3).sum() for one in (x, *norm.parameters()))
            (g,) = torch.autograd.grad(loss, leaf, create_graph=True)
            torch.autograd.grad(g.square().sum(), leaf)

        with mode(), pytest.raises(RuntimeError, match="only once"):
            hessian()


def test_gradients_that_are_recorded_may_be_used():
    norm = LpBatchNorm2d(4, p=math.inf, device=DEVICE)
    x = made((3, 4, 3, 2)).requires_grad_()
    expected = torch.autograd.grad(norm(x).pow(3).sum(), (x, *norm.parameters()))
    assert_close(torch.autograd.grad(norm(x).pow(3).sum(), (x, *norm.parameters()), create_graph=True), expected)


@pytest.mark.parametrize("kind", ["bounded", "classic"])
def test_differentiating_a_weight_twice_is_an_error_where_a_kernel_made_it(kind):
    """Under a mode the layer computes its weight itself, and that can be."""
    layer = nn.Linear(4, 4, bias=False, device=DEVICE)
    apply_weight_norm(layer, kind=kind)
    x = torch.randn(3, 4, device=DEVICE)
    parameters = list(layer.parameters())

    def twice(call, leaves):
        gradients = torch.autograd.grad(call().pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)

    with Watching():
        watched = twice(lambda: layer(x), parameters)
    leaves = [p.detach().requires_grad_() for p in parameters]
    rho = layer.parametrizations.weight[0].rho if kind == "bounded" else leaves[0]
    assert_close(watched, twice(lambda: nn.functional.linear(x, bounded_weight(leaves[-1], rho)), leaves))
    for leaf in parameters:
        with pytest.raises(RuntimeError, match="only once"):
            twice(lambda: layer(x), [leaf])
