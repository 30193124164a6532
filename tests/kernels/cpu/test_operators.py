"""The native kernels as operators of ``torch.library``, and tensors whose memory does not hold their values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from normmatters import nn as norms
from normmatters.kernels import cpu, dispatch
from normmatters.kernels.cpu.weight_norm import WeightGroup, why_not
from normmatters.norm import Norm, RunningStats
from support import native_steps
from support.native_steps import LAYERS, data, native_nodes

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=cpu.why_not())

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "strided": lambda x: x.mT.contiguous().mT,
}
#: Kind, k and p as batch norm's operators take them.
BATCH_NORMS: dict[str, tuple[int, int, float]] = {
    "l1": (0, 0, 0.0), "lean": (0, 0, 0.0), "l2": (1, 0, 0.0), "lp": (2, 0, 1.5), "topk": (4, 3, 0.0),
    "mean": (6, 0, 0.0),
}  # fmt: skip


def _operator(name: str) -> Any:
    dispatch.batch_norm(torch.randn(4, 3), Norm(), None, None, RunningStats(), True)  # which registers them
    dispatch.layer_norm(torch.randn(4, 3), [3], Norm())
    return getattr(torch.ops.normmatters, name)


def _inputs(layout: str, *, grad: bool) -> list[Tensor]:
    x, residual = (LAYOUTS[layout](torch.randn(3, 5, 6, 4)).requires_grad_(grad) for _ in range(2))
    weight, bias = (torch.randn(5, requires_grad=grad) for _ in range(2))
    return [x, weight, bias, residual]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("name", BATCH_NORMS)
def test_opcheck_of_batch_norm(name: str, added: bool, layout: str) -> None:
    kind, k, p = BATCH_NORMS[name]
    code = 0 if name != "lean" else 4 if added else 1  # bits per element, of x
    mask = int(added or name == "mean")  # and of the ReLU
    x, weight, bias, residual = _inputs(layout, grad=True)
    running = torch.zeros(5), torch.ones(5)
    numbers = [kind, k, p, 1.25, 1e-5, True, mask, code]
    tensors = [x, None if name == "mean" else weight, bias, residual if added else None]
    forward = _operator("cpu_batch_norm_forward")
    torch.library.opcheck(forward, (*tensors, *running, 0.1, *numbers))
    y, statistics, bits, positions = forward(
        *[t if t is None else t.detach() for t in tensors], *running, 0.1, *numbers
    )
    saved = None if name == "mean" or code == 4 else y if code else x.detach()
    given = torch.randn_like(y), saved, statistics, bits if mask or code else None, positions if k else None
    rows = layout == "channels_last"
    arguments = *given, *[t if t is None else t.detach() for t in tensors[1:3]], rows, *numbers, added
    torch.library.opcheck(_operator("cpu_batch_norm_backward"), arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("p", "centered"), [(1.0, True), (2.0, False), (1.5, True)])
def test_opcheck_of_layer_norm(p: float, centered: bool, affine: bool, layout: str) -> None:
    x, *_ = _inputs(layout, grad=True)
    weight, bias = (torch.randn(6, 4, requires_grad=True) if affine else None for _ in range(2))
    options = 1e-5, 1.25, p, centered, 2
    forward = _operator("native_layer_norm_forward")
    torch.library.opcheck(forward, (x, weight, bias, *options))
    given = x.detach(), None if weight is None else weight.detach()
    y, statistics = forward(*given, None if bias is None else bias.detach(), *options)
    arguments = torch.randn_like(y), *given, statistics, *options, affine, torch.float32, torch.float32
    torch.library.opcheck(_operator("native_layer_norm_backward"), arguments)


def _negated(t: Tensor) -> Tensor:
    """The same values, as a view of memory that holds the others' signs."""
    return torch._neg_view(-t)


def _zeros(t: Tensor) -> Tensor:
    """Zeros without memory."""
    return torch._efficientzerotensor(t.shape, dtype=t.dtype)


def _results(call: Callable[..., Tensor], tensors: Sequence[Tensor], g: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = call(*leaves)
    assert native_nodes(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


CALLS: dict[str, Callable[..., Tensor]] = {
    "batch norm": lambda x, w, b, r: dispatch.batch_norm(x, Norm(), w, b, RunningStats(), True, residual=r, act="relu"),
    "lean": lambda x, w, b, r: dispatch.batch_norm(
        x, Norm(memory="lean"), w, b, RunningStats(), True, residual=r, act="relu"
    ),
    "layer norm": lambda x, w, b, r: dispatch.layer_norm(x.movedim(1, -1), [5], Norm(), w, b).movedim(-1, 1) + r,
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("other", [_negated, _zeros])
@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("name", CALLS)
def test_values_that_are_not_in_memory(name: str, which: int, other: Callable[[Tensor], Tensor], layout: str) -> None:
    """A negative view has a flag, and so have the zeros that forward-mode differentiation makes."""
    tensors = [*_inputs(layout, grad=False), LAYOUTS[layout](torch.randn(3, 5, 6, 4))]
    tensors[which] = other(tensors[which])
    plain = [t.clone() for t in tensors]
    assert not any(t.is_neg() or t._is_zerotensor() for t in plain)
    assert tensors[which].is_neg() or tensors[which]._is_zerotensor()
    assert torch.equal(tensors[which], plain[which])
    expected = _results(CALLS[name], plain[:4], plain[4])
    for ours, theirs in zip(_results(CALLS[name], tensors[:4], tensors[4]), expected):
        assert torch.equal(ours, theirs)


def test_weight_norm_of_negative_views() -> None:
    v, rho = torch.randn(4, 6), torch.tensor(1.5)
    assert not why_not(v, rho, dim=0, p=2, k=None)
    assert "negative view" in why_not(_negated(v), rho, dim=0, p=2, k=None)
    assert "negative view" in why_not(v, _negated(rho), dim=0, p=2, k=None)
    v.requires_grad_()
    (w,) = WeightGroup([v], 2, torch.float32)([v], [rho])
    g = torch.randn_like(w)
    assert torch.equal(*[torch.autograd.grad(w, v, one, retain_graph=True)[0] for one in (g, _negated(g))])


@pytest.mark.parametrize("name", ["l1", "layer"])
def test_a_tensor_that_has_left_a_transform(name: str) -> None:
    layer, x, left = LAYERS[name](), data(), []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(x)
    expected = copy.deepcopy(layer)(x)
    assert torch.equal(layer(left[0]), expected)
    assert native_nodes(expected)


def test_the_imaginary_part_of_a_conjugate() -> None:
    """What negative views there are outside of tests."""
    x = torch.randn(*data().shape, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    norm = norms.L1BatchNorm2d(native_steps.CHANNELS)
    assert torch.equal(copy.deepcopy(norm)(x), norm(x.clone()))
