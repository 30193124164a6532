"""The hand-derived backward pass against autograd of the plain equation, for every kind and everything folded in."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normmatters.functional import lp_batch_norm
from normmatters.kernels import hand_derived
from normmatters.nn import LpBatchNorm1d
from support import called, oracle, tolerances

SHAPES = [(7, 3), (4, 3, 5), (3, 2, 4, 5), (2, 3, 2, 3, 2)]


def differentiated(function, x: Tensor, p, k, act, residual, weight, bias, g, constant="exact") -> list[Tensor]:
    """Output, the running statistics it leaves, and the gradient of every tensor given."""
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, weight, bias)]
    leaves += [] if residual is None else [residual.detach().clone().requires_grad_()]
    mean, var = torch.zeros(2, x.shape[1], dtype=weight.dtype).unbind()
    y = function(
        leaves[0],
        mean,
        var,
        None if p == "mean" else leaves[1],
        leaves[2],
        True,
        1.0,
        1e-3,
        p=p,
        k=k,
        constant=constant,
        act=act,
        residual=leaves[3] if residual is not None else None,
    )
    grads = torch.autograd.grad(y, leaves, g, allow_unused=p == "mean", materialize_grads=p == "mean")
    return [y.detach(), mean, var, *grads]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("chunk", [1 << 18, 40, 5])  # in one chunk, a few samples at a time, and one
@pytest.mark.parametrize("act", [None, "relu"])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(
    ("p", "k", "constant"),
    [*((p, k, "exact") for p, k in oracle.KINDS), (1, None, 0.7), (2, None, 1.5), (3.0, None, 0.7)],
)
def test_agrees_with_autograd(
    p: float | str,
    k: int | None,
    constant: str | float,
    with_residual: bool,
    act: str | None,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hand_derived, "CHUNK", chunk)
    for shape in SHAPES:
        x = torch.randn(shape, dtype=torch.float64) + 0.3
        residual = torch.randn_like(x) if with_residual else None
        weight, bias = torch.randn(2, shape[1], dtype=torch.float64).unbind()
        g = torch.randn_like(x)
        ours = differentiated(called.hand_derived, x, p, k, act, residual, weight, bias, g, constant)
        plain = differentiated(lp_batch_norm, x, p, k, act, residual, weight, bias, g, constant)
        for a, b in zip(ours, plain):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@given(
    samples=st.integers(2, 4),
    channels=st.sampled_from([1, 3, 65]),
    pixels=st.integers(2, 5),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    layout=st.sampled_from(["contiguous", "channels_last", "strided", "transposed"]),
    kind=st.sampled_from(oracle.KINDS),
    act=st.sampled_from([None, "relu"]),
)
def test_any_shape_dtype_and_layout(
    samples: int, channels: int, pixels: int, dtype: torch.dtype, layout: str, kind, act: str | None
) -> None:
    """Against the plain equation in float64 on the same rounded inputs."""
    p, k = kind
    n = samples * pixels * pixels
    x = torch.randn(samples, channels, pixels, pixels).to(dtype)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "strided":
        x = x.repeat_interleave(2, dim=-1)[..., ::2]
    elif layout == "transposed":
        x = x.transpose(2, 3)
    weight, bias = torch.rand(2, channels).unbind()
    bias = bias + 10.0 if act else bias  # open everywhere: whether a ReLU is open may hang on a rounding
    g = torch.randn(x.shape).to(dtype)
    y, _, _, dx, dw, db = differentiated(called.hand_derived, x, p, k, act, None, weight, bias, g)
    wide = differentiated(lp_batch_norm, x.double(), p, k, act, None, weight.double(), bias.double(), g.double())
    assert y.dtype == dx.dtype == dtype
    scale = 4.0 if act is None else 16.0  # the size of the output, which is rounded to dtype
    torch.testing.assert_close(y.double(), wide[0], rtol=0, atol=scale * tolerances.normalized(dtype, n))
    slope = max(1.0, wide[2].rsqrt().max().item()) if p != "mean" else 1.0
    torch.testing.assert_close(dx.double(), wide[3], rtol=0, atol=16 * slope * tolerances.gradient(dtype, n))
    # Summed over inputs that are the same rounded numbers, in float32.
    atol = 4 * tolerances.parameter_gradient(torch.float32, n)
    torch.testing.assert_close(dw.double(), wide[4], rtol=0, atol=atol)
    torch.testing.assert_close(db.double(), wide[5], rtol=0, atol=atol)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_mean_far_from_zero_does_not_spoil_l1s_scale(memory_format: torch.memory_format) -> None:
    """The mean is rounded; the deviations from it are summed on both sides, so that its error cancels."""
    x = (torch.randn(32, 4, 28, 28) + 1000).contiguous(memory_format=memory_format)
    running_var, expected = torch.zeros(4), torch.zeros(4, dtype=torch.float64)
    called.hand_derived(x, None, running_var, training=True, momentum=1.0)
    lp_batch_norm(x.double(), None, expected, training=True, momentum=1.0)
    torch.testing.assert_close(running_var.double(), expected, rtol=2e-5, atol=0)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("few", [0, 100])  # numbers per channel as they are, or repeated for every pixel
@pytest.mark.parametrize("samples", [1, 3, 7])  # 7 samples, in chunks of equal size or not
def test_chunks_in_every_layout(
    memory_format: torch.memory_format, few: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1, whose passes go backwards and borrow memory of the output and of the input's gradient."""
    monkeypatch.setattr(hand_derived, "FEW_PIXELS", few)
    monkeypatch.setattr(hand_derived, "CHUNK", max(1, samples * 60 // torch.get_num_threads()))
    x, residual, g = torch.randn(3, 7, 3, 4, 5, dtype=torch.float64).unbind()
    x = x.contiguous(memory_format=memory_format)
    weight, bias = torch.randn(2, 3, dtype=torch.float64).unbind()
    for act in (None, "relu"):
        for added in (None, residual):
            ours = differentiated(called.hand_derived, x, 1, None, act, added, weight, bias, g)
            plain = differentiated(lp_batch_norm, x, 1, None, act, added, weight, bias, g)
            for a, b in zip(ours, plain):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_l2_is_torchs_batch_norm_to_the_bit(dtype: torch.dtype) -> None:
    x, residual, g = torch.randn(3, 4, 3, 5, 5, dtype=dtype).unbind()
    weight, bias = torch.randn(2, 3, dtype=dtype).unbind()

    def torchs(x, mean, var, weight, bias, training, momentum, eps, *, residual, **_) -> Tensor:
        return (torch.nn.functional.batch_norm(x, mean, var, weight, bias, training, momentum, eps) + residual).relu()

    ours = differentiated(called.hand_derived, x, 2, None, "relu", residual, weight, bias, g)
    theirs = differentiated(torchs, x, 2, None, "relu", residual, weight, bias, g)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("with_mean", [False, True])
@pytest.mark.parametrize("option", [{}, {"momentum": torch.tensor(0.3, dtype=torch.float64)}, {"eps": 0.0}])
def test_l2_where_torchs_batch_norm_would_refuse(option: dict, with_mean: bool) -> None:
    """One running statistic without the other, a momentum that is a tensor, an eps of 0."""
    x = torch.randn(6, 3, dtype=torch.float64)
    results = []
    for function in (called.hand_derived, lp_batch_norm):
        mean, var = torch.ones(2, 3, dtype=torch.float64).unbind()
        y = function(x, mean if with_mean else None, var, training=True, p=2, **option)
        results.append((y, mean, var))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_l2_can_be_differentiated_twice() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x, weight: called.hand_derived(x, weight=weight, training=True, p=2), (x, weight)
    )


def with_channels_last(shape: tuple[int, ...]) -> Tensor:
    """In channels_last, though the strides of its dimensions of size 1 do not look it."""
    t = torch.randn(shape[0], *shape[2:], shape[1], dtype=torch.float64).movedim(-1, 1)
    return t.as_strided(shape, [1 if size == 1 else stride for size, stride in zip(shape, t.stride())])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 3, 5, 1), (1, 3, 5, 2), (2, 3, 2, 3, 1)])
@pytest.mark.parametrize(("p", "k"), [(1, None), (2, None), (1.5, None), (math.inf, 3), ("mean", None)])
def test_a_gradient_in_another_layout_than_the_input(
    p: float | str, k: int | None, shape: tuple[int, ...], training: bool
) -> None:
    """torch.nn.BatchNorm's gradients are wrong here: it reads one of the two in the wrong order."""
    mean, var = torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 0.5
    weight = None if p == "mean" else torch.randn(3, dtype=torch.float64, requires_grad=True)

    def gradients(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        y = called.batch_norm(x, mean.clone(), var.clone(), weight, None, training, p=p, k=k)
        return torch.autograd.grad(y, [x] if weight is None else [x, weight], g)

    x, g = with_channels_last(shape), with_channels_last(shape)
    expected = gradients(x.contiguous(), g.contiguous())
    for one, other in ((x, g.contiguous()), (x.contiguous(), g), (x, g)):
        torch.testing.assert_close(gradients(one, other), expected)


def test_layout_is_kept() -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = called.hand_derived(x, training=True, act="relu")
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert dx.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("p", "k"), oracle.SCALED_KINDS)
def test_a_constant_channel_has_finite_gradients(p: float | str, k: int | None) -> None:
    x = torch.full((4, 1, 2), 3.0, dtype=torch.float64, requires_grad=True)
    y = called.hand_derived(x, training=True, p=p, k=k)
    g = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(dx, (g - g.mean()) / math.sqrt(1e-5))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("p", "k"), oracle.KINDS)
def test_nan_and_inf_spoil_their_channel_only(p: float | str, k: int | None, bad: float) -> None:
    x = torch.randn(4, 2, 3)
    x[1, 0, 2] = bad
    x.requires_grad_()
    y = called.hand_derived(x, training=True, p=p, k=k)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert not y[:, 0].isfinite().any()
    assert y[:, 1].isfinite().all()
    assert dx[:, 1].isfinite().all()
    if p != "mean":
        assert not dx[:, 0].isfinite().all()


def test_saves_no_float_beside_input_and_output() -> None:
    """What is kept for the backward pass: x, y, and numbers per channel."""
    x = torch.randn(8, 3, 6, 6, requires_grad=True)
    weight = torch.ones(3, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = called.hand_derived(x, weight=weight, training=True, act="relu")
    large = [t for t in saved if t.numel() > 3]
    assert {t.data_ptr() for t in large} == {x.data_ptr(), y.data_ptr()}
    assert len(large) == 2


def test_only_what_is_asked_for() -> None:
    """A frozen input, a frozen weight, an output that is not used."""
    x, weight = torch.randn(4, 3), torch.ones(3, requires_grad=True)
    g = torch.randn(4, 3)
    (dw,) = torch.autograd.grad(called.hand_derived(x, weight=weight, training=True), weight, g)
    (expected,) = torch.autograd.grad(lp_batch_norm(x, weight=weight, training=True), weight, g)
    torch.testing.assert_close(dw, expected)
    x.requires_grad_()
    y = called.hand_derived(x, weight=weight.detach(), training=True)
    (dx,) = torch.autograd.grad(y, x, g)
    (expected,) = torch.autograd.grad(lp_batch_norm(x, weight=weight.detach(), training=True), x, g)
    torch.testing.assert_close(dx, expected)


def test_differentiating_twice_says_what_to_use() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    y = called.hand_derived(x, training=True)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)  # using the gradient is fine
    with pytest.raises(RuntimeError, match=r"use normmatters\.functional\.lp_batch_norm"):
        dx.sum().backward()


def test_transforms_use_the_plain_equation() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    gradient = torch.func.grad(lambda x: called.batch_norm(x, training=True).pow(3).sum())(x)
    y = lp_batch_norm(x.requires_grad_(), training=True).pow(3).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(y, x)[0])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("act", [None, "relu"])
@pytest.mark.parametrize(("p", "k"), [(1, None), (1.5, None), (math.inf, None), (math.inf, 3), ("range", None)])
def test_a_batch_of_gradients_at_once(p: float | str, k: int | None, act: str | None) -> None:
    """As jacobian(..., vectorize=True) asks for, and torch.func.vmap over torch.autograd.grad."""
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3, 2), 3, 3, (4, 3, 2))]
    x, weight, bias, residual = leaves
    y = called.hand_derived(x, None, None, weight, bias, True, p=p, k=k, act=act, residual=residual)
    g = torch.randn(5, *y.shape, dtype=torch.float64)

    def gradients(g: Tensor, **options: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, leaves, g, retain_graph=True, **options)

    expected = [torch.stack(parts) for parts in zip(*map(gradients, g))]
    torch.testing.assert_close([*gradients(g, is_grads_batched=True)], expected)
    torch.testing.assert_close([*torch.func.vmap(gradients)(g)], expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("p", "k"), [(1, None), (1.5, None), (math.inf, 3), ("mean", None)])
def test_a_training_step_can_be_traced(p: float | str, k: int | None) -> None:
    """As torch.nn's can: TensorBoard's graphs are traces of a model as it is, and that is in training mode."""
    norm = LpBatchNorm1d(3, p=p, k=k, act="relu").double()
    x = torch.randn(7, 3, 4, dtype=torch.float64)
    expected = copy.deepcopy(norm)
    traced = torch.jit.trace(norm, x, check_trace=False)  # a trace runs the step once
    torch.jit.save(traced, io.BytesIO())  # it has no Python in it
    expected(x)
    other = torch.randn_like(x).requires_grad_()
    y = traced(other)
    (dx,) = torch.autograd.grad(y.pow(3).sum(), other)
    z = expected(other)
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(dx, torch.autograd.grad(z.pow(3).sum(), other)[0])
    torch.testing.assert_close(dict(traced.named_buffers()), dict(expected.named_buffers()))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_activation_checkpointing(use_reentrant: bool) -> None:
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return called.hand_derived(x, training=True, act="relu").pow(3)

    (dx,) = torch.autograd.grad(function(x).sum(), x)
    checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close(x.grad, dx)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [called.hand_derived, lp_batch_norm])
@pytest.mark.parametrize(("p", "k"), oracle.SCALED_KINDS)
def test_scales_whose_squares_overflow(p: float | str, k: int | None, function, dtype: torch.dtype) -> None:
    """From 2e19 on a square is infinite in float32; the output once was 0."""
    if p == 2 and (function is lp_batch_norm or dtype == torch.float32):
        pytest.skip("the equation of L2 squares, and so does PyTorch's own batch norm, which computes L2 in float32")
    x = (torch.randn(16, 3, 4) * 1e25).to(dtype).requires_grad_()
    g = torch.randn(x.shape).to(dtype)
    y = function(x, training=True, p=p, k=k)
    (dx,) = torch.autograd.grad(y, x, g)
    wide = x.detach().double().requires_grad_()
    expected = lp_batch_norm(wide, training=True, p=p, k=k)
    (expected_dx,) = torch.autograd.grad(expected, wide, g.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), expected, rtol=4 * eps, atol=16 * eps)
    torch.testing.assert_close(dx.double() * 1e25, expected_dx * 1e25, rtol=4 * eps, atol=64 * eps)
