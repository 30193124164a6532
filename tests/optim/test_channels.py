"""F1 and F2 as equations, in float64 on the functions users call."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import batch_norm

from normmatters.optim import angular_update, channel_norms, effective_step_size
from support.optim_nets import NO_EPS


def loss_of(w: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A smooth loss of BN(x wᵀ)."""
    return ((batch_norm(x @ w.T, None, None, training=True, eps=NO_EPS).tanh() - target) ** 2).sum()


@pytest.fixture
def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((5, 9), (32, 9), (32, 5)))  # type: ignore[return-value]


def gradient(w: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    w = w.clone().requires_grad_()
    return torch.autograd.grad(loss_of(w, x, target), w)[0]


def test_f1_output_unchanged_gradient_scales_inversely(problem: tuple[torch.Tensor, ...]) -> None:
    w, x, target = problem
    scale = torch.tensor([0.3, 1.7, 5.0, 11.0, 0.01], dtype=torch.float64)[:, None]
    outputs = [batch_norm(x @ v.T, None, None, training=True, eps=NO_EPS) for v in (w, scale * w)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-12
    g = gradient(w, x, target)
    assert (gradient(scale * w, x, target) * scale - g).abs().max() < 1e-12 * g.abs().max()
    assert ((w * g).sum(1) / w.norm(dim=1) / g.norm(dim=1)).abs().max() < 1e-12


def test_f2_error_falls_a_hundredfold_when_lr_falls_tenfold(problem: tuple[torch.Tensor, ...]) -> None:
    w, x, target = problem
    unit = w / channel_norms(w)[:, None]
    g = gradient(unit, x, target)  # ∇L(ŵ)
    tangent = g - unit * (unit * g).sum(1, keepdim=True)

    def error(lr: float) -> float:
        after = w - lr * gradient(w, x, target)
        predicted = unit - effective_step_size(w, lr)[:, None] * tangent
        return (after / channel_norms(after)[:, None] - predicted).norm().item()

    errors = [error(lr) for lr in (1e-2, 1e-3, 1e-4, 1e-5)]
    for coarse, fine in zip(errors, errors[1:]):
        assert coarse / fine == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize("lr", [1e-7, 1e-3, 0.5])
def test_f2_exact_form_is_the_angular_update(problem: tuple[torch.Tensor, ...], lr: float) -> None:
    w, x, target = problem
    unit = w / channel_norms(w)[:, None]
    after = w - lr * gradient(w, x, target)
    tangent = lr * gradient(unit, x, target).norm(dim=1) / channel_norms(w) ** 2
    torch.testing.assert_close(angular_update(w, after), tangent.atan(), rtol=1e-9, atol=1e-15)


def test_adams_effective_step_is_lr_over_norm_and_not_norm_squared(problem: tuple[torch.Tensor, ...]) -> None:
    w, x, target = problem

    def turned(scale: float, optimizer: type[torch.optim.Optimizer]) -> torch.Tensor:
        p = torch.nn.Parameter(w * scale)
        p.grad = gradient(p.detach(), x, target)
        optimizer([p], lr=1e-4).step()  # type: ignore[call-arg]
        return angular_update(w * scale, p)

    adam = turned(1.0, torch.optim.Adam) / turned(4.0, torch.optim.Adam)
    sgd = turned(1.0, torch.optim.SGD) / turned(4.0, torch.optim.SGD)
    torch.testing.assert_close(adam, torch.full_like(adam, 4.0), rtol=1e-3, atol=0)
    torch.testing.assert_close(sgd, torch.full_like(sgd, 16.0), rtol=1e-3, atol=0)


def test_channel_norms_dims_and_dtypes() -> None:
    w = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(channel_norms(w, 1), w.transpose(0, 1).flatten(1).norm(dim=1))
    torch.testing.assert_close(channel_norms(w, -1), w.permute(2, 0, 1).flatten(1).norm(dim=1))
    torch.testing.assert_close(channel_norms(w, None), w.norm()[None])
    torch.testing.assert_close(channel_norms(w[0, :, 0]), w[0, :, 0].abs())
    half = (100 * w).half()  # squares overflow fp16
    torch.testing.assert_close(channel_norms(half), half.float().flatten(1).norm(dim=1))
    assert effective_step_size(w, 0.1, None).item() == pytest.approx(0.1 / w.norm().item() ** 2, rel=1e-14)
    with pytest.raises(ValueError, match="dim must lie"):
        channel_norms(w, 3)


def test_angular_update_keeps_tiny_and_large_angles_in_float32() -> None:
    angles = torch.tensor([1e-6, 1e-4, 0.3, 2.0, 3.0], dtype=torch.float64)
    before = torch.tensor([[3.0, 0.0]]).expand(5, 2)
    after = torch.stack([5 * angles.cos(), 5 * angles.sin()], 1).float()
    torch.testing.assert_close(angular_update(before, after).double(), angles, rtol=1e-3, atol=0)
    assert angular_update(before, -before)[0].item() == pytest.approx(math.pi)
    with pytest.raises(ValueError, match="one shape"):
        angular_update(before, after[:2])


@pytest.mark.parametrize(("shape", "dim"), [((3, 4), 0), ((3, 4), 1), ((3, 4), None), ((5,), 0)])
def test_norms_of_a_parameter_have_gradients(shape: tuple[int, ...], dim: int | None) -> None:
    w = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: channel_norms(x, dim), (w,))
    given = torch.empty_like(channel_norms(w.detach(), dim))
    assert channel_norms(w.detach(), dim, out=given) is given
    assert torch.equal(given, channel_norms(w.detach(), dim))
    half = channel_norms(w.detach(), dim, out=given.half())
    torch.testing.assert_close(half.double(), given, atol=0, rtol=1e-3)
