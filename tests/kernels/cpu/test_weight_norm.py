"""The native weight norm, beside the same equation in float64."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from normmatters.functional import bounded_weight
from normmatters.kernels import cpu
from normmatters.kernels.cpu.weight_norm import WeightGroup, why_not
from normmatters.norm import compute_dtype
from normmatters.weight_norm import apply_weight_norm, fuse, unfuse

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=cpu.why_not())

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(3, 1), (5, 16), (4, 3, 3, 3), (2, 7, 5), (2, 147), (1, 9001), (700, 33)]


def check(v, rho, p, dtype, g):
    """Weights and gradients, within roundings of the numbers that each is a sum of."""
    learned = rho[0].ndim > 0
    leaves = [x.clone().requires_grad_() for x in v] + [r.clone().requires_grad_(learned) for r in rho]
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in leaves]
    count = len(v)
    assert not any(why_not(x, r, dim=0, p=p, k=None) for x, r in zip(v, rho))
    weights = WeightGroup(v, p, dtype, learned)(leaves[:count], leaves[count:])
    wide = [bounded_weight(x, r, p=p) for x, r in zip(exact[:count], exact[count:])]
    inputs = slice(None) if learned else slice(count)
    own = torch.autograd.grad(weights, leaves[inputs], g)
    expected = torch.autograd.grad(wide, exact[inputs], [x.double() for x in g])
    inner = 64 * torch.finfo(compute_dtype(v[0].dtype)).eps
    for w, e, x in zip(weights, wide, v):
        assert w.dtype == dtype
        assert w.stride() == x.stride()
        torch.testing.assert_close(w.double(), e, rtol=torch.finfo(dtype).eps + inner, atol=1e-7)
    for a, b in zip(own, expected):
        bound = (torch.finfo(v[0].dtype).eps + inner) * (1 + b.abs().amax().item()) * 4
        torch.testing.assert_close(a.double(), b, rtol=0, atol=bound)


@pytest.mark.parametrize("learned", [False, True], ids=["bounded", "classic"])
@pytest.mark.parametrize("p", [1, 2, 1.5, 3, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_and_gradients(dtype, p, learned):
    torch.manual_seed(0)
    v = [torch.randn(s, dtype=torch.float64).to(dtype) for s in SHAPES]
    v[2] = v[2].contiguous(memory_format=torch.channels_last)
    rho = [torch.randn(len(x), *[1] * (x.ndim - 1)).to(dtype) if learned else torch.tensor(1.7) for x in v]
    g = [torch.randn(x.shape).to(dtype) for x in v]
    check(v, rho, p, dtype, g)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_in_another_dtype(dtype):
    torch.manual_seed(0)
    v = [torch.randn(s) for s in SHAPES]
    check(v, [torch.tensor(0.7) for _ in v], 2, dtype, [torch.randn(x.shape).to(dtype) for x in v])


@pytest.mark.parametrize("p", [1, 2, 1.5, math.inf])
def test_rows_that_are_zero_huge_or_tiny_or_tied(p):
    torch.manual_seed(0)
    v, g = torch.randn(5, 40), torch.randn(5, 40)
    v[1] *= 1e30
    v[2] *= 1e-30
    v[3] = v[3].sign()
    (w,) = WeightGroup([v], p, v.dtype)([v], [torch.tensor(1.0)])
    torch.testing.assert_close(w.double(), bounded_weight(v.double(), 1.0, p=p), rtol=1e-5, atol=1e-7)
    v[4] = 0
    leaf, exact = v.clone().requires_grad_(), v.double().requires_grad_()
    (w,) = WeightGroup([v], p, v.dtype)([leaf], [torch.tensor(1.0)])
    (own,) = torch.autograd.grad(w, leaf, g)
    (expected,) = torch.autograd.grad(bounded_weight(exact, 1.0, p=p), exact, g.double())
    for a, b in zip(own, expected):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
    assert torch.equal(own[4], g[4])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("p", [1, 2, 1.5, math.inf])
def test_bad_numbers_stay_in_their_row(p, bad):
    v = torch.randn(3, 40)
    v[1, 5] = bad
    (w,) = WeightGroup([v], p, v.dtype)([v], [torch.tensor(1.0)])
    assert w[1].isnan().any()
    assert w[[0, 2]].isfinite().all()


@pytest.mark.parametrize("learned", [False, True], ids=["bounded", "classic"])
@pytest.mark.parametrize("where", ["weight", "gradient"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("p", [1, 2, 1.5, math.inf])
def test_bad_numbers_go_backward_as_in_the_equation(p, bad, where, learned):
    v, g = torch.randn(2, 3, 40)
    (v if where == "weight" else g)[1, 5] = bad
    rho = torch.rand(3, 1) + 1 if learned else torch.tensor(1.5)

    def results(weight_of):
        x, r = v.clone().requires_grad_(), rho.clone().requires_grad_(learned)
        w = weight_of(x, r)
        return w.detach(), *torch.autograd.grad(w, [x, r] if learned else [x], g)

    w, *own = results(lambda x, r: WeightGroup([v], p, v.dtype, learned)([x], [r])[0])
    expected, *gradients = results(lambda x, r: bounded_weight(x, r, p=p))
    for a, b in zip(own, gradients):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-5, atol=1e-6)
        assert not b[1].isfinite().any()
        assert a[[0, 2]].isfinite().all()
    if math.isinf(bad) and where == "weight":  # ∞/∞; the equation scales the row by its maximum for some p
        assert w.isnan().nonzero().tolist() == [[1, 5]]
        assert not w[1].nan_to_num(0).any()
    else:
        torch.testing.assert_close(w, expected, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_the_number_of_threads_changes_no_bit(threads):
    v, results = [torch.randn(300, 700), torch.randn(64, 33), torch.randn(3, 90_000)], []
    for count in (1, 2, 3, 7):  # the last: more than the last weight has rows
        threads(count)
        results.append(WeightGroup(v, 2, v[0].dtype)(v, [torch.tensor(1.0)] * 3))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_random_shapes_and_strides(rng):
    """The dimensions of a row in any order in memory; several weights in one call."""

    def one_of(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    for _ in range(40):
        p, dtype, learned = (1, 2, 1.5, math.inf)[one_of(0, 4)], DTYPES[one_of(0, 4)], bool(one_of(0, 2))
        v = []
        for _ in range(one_of(1, 4)):
            order = [0, *(torch.randperm(one_of(1, 4), generator=rng) + 1).tolist()]
            whole = torch.randn([one_of(1, 12) for _ in order], generator=rng)
            v.append(whole.permute([order.index(d) for d in range(len(order))]).to(dtype))
        rho = [torch.randn(len(x), *[1] * (x.ndim - 1)).to(dtype) if learned else torch.tensor(0.7) for x in v]
        check(v, rho, p, dtype, [torch.randn(x.shape, generator=rng).to(dtype) for x in v])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_an_empty_weight_is_left_to_the_equation(shape):
    assert why_not(torch.empty(shape), torch.tensor(1.0), dim=0, p=2, k=None)


@pytest.mark.parametrize("kind", ["bounded", "classic"])
def test_a_fused_model_computes_what_its_layers_do(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    apply_weight_norm(model, kind=kind)
    x = torch.randn(2, 3, 8, 8)

    def gradients():
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return [y.detach(), *[p.grad.clone() for p in model.parameters()]]

    fused = gradients()
    unfuse(model)
    for a, b in zip(fused, gradients()):
        torch.testing.assert_close(a, b)
    fuse(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    loss = model(x).square().sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), list(model.parameters()), allow_unused=True)
    unfuse(model)
    grads = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
    plain = torch.autograd.grad(sum(g.square().sum() for g in grads), list(model.parameters()), allow_unused=True)
    for a, b in zip(second, plain):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def weights_and_gradients(group, v):
    leaves = [x.clone().requires_grad_() for x in v]
    weights = group(leaves, [torch.tensor(1.5)] * len(v))
    return weights, torch.autograd.grad(weights, leaves, [torch.ones_like(w) for w in weights])


def test_memory_that_nobody_holds_serves_again():
    v = [torch.randn(4, 6), torch.randn(3, 2, 3, 3)]
    group = WeightGroup(v, 2, torch.float32)
    passes = []
    for _ in range(3):
        weights, gradients = weights_and_gradients(group, v)
        passes.append([t.data_ptr() for t in (*weights, *gradients)])
        del weights, gradients
    assert passes[0] == passes[1] == passes[2]


HOLD = {
    "tensor": lambda w: w,
    "view": lambda w: w[0],
    "detached": lambda w: w.detach(),
    "numpy": lambda w: w.detach().numpy(),
    "storage": lambda w: w.untyped_storage(),
    "graph": lambda w: (w.clone() ** 2).grad_fn if w.grad_fn is None else (w**2).grad_fn,
    "shared": lambda w: w.detach().share_memory_().untyped_storage(),
}


@pytest.mark.parametrize("hold", HOLD)
def test_memory_that_somebody_holds_does_not_serve_again(hold):
    v = [torch.randn(4, 6), torch.randn(3, 2, 3, 3)]
    group = WeightGroup(v, 2, torch.float32)
    weights, gradients = weights_and_gradients(group, v)
    held, addresses = [HOLD[hold](t) for t in weights], [t.data_ptr() for t in (*weights, *gradients)]
    del weights, gradients
    weights, gradients = weights_and_gradients(group, [2 * x + 1 for x in v])
    again = [t.data_ptr() for t in (*weights, *gradients)]
    assert not set(addresses[:2]) & set(again)
    assert again[2:] == addresses[2:]
    del held


def test_memory_under_another_pass_of_the_same_group():
    """Weights that are held keep their values while the group computes others, in eager and in inference mode."""
    v = [torch.randn(4, 6)]
    group = WeightGroup(v, 2, torch.float32)
    with torch.inference_mode():
        (first,) = group(v, [torch.tensor(1.0)])
    (second,) = group(v, [torch.tensor(2.0)])
    (third,) = group(v, [torch.tensor(3.0)])
    torch.testing.assert_close([2 * first, 3 * first], [second, third])
    assert not second.is_inference()


def test_threads_do_not_share_memory():
    v = [torch.randn(64, 64)]
    group = WeightGroup(v, 2, torch.float32)

    def work(rho):
        for _ in range(200):
            (w,) = group(v, [torch.tensor(rho)])
            if not torch.allclose(w.norm(dim=1), torch.tensor(rho)):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, [1.0, 2.0, 3.0, 4.0]))


@pytest.mark.parametrize("length", [4096, 4500], ids=["aligned rows", "others"])
def test_large_outputs_are_those_of_their_parts(length):
    """Outputs of 16 MB and more are stored past the cache."""
    torch.manual_seed(0)
    v = torch.randn((17 << 20) // (4 * length), length)

    def run(v):
        v = v.clone().requires_grad_()
        (w,) = WeightGroup([v], 2, torch.float32)([v], [torch.tensor(1.5)])
        return w.detach(), *torch.autograd.grad(w, v, v.detach() ** 2)

    parts = [run(part) for part in v.chunk(3)]
    for whole, own in zip(run(v), zip(*parts)):
        assert torch.equal(whole, torch.cat(own))
