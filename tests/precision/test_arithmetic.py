"""precision.arithmetic: agreement with the plain equations in fp32, with numpy's fp16 to the bit, and F5's point."""

import contextlib
import contextvars
import math
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import normmatters
from normmatters import functional, precision
from normmatters.kernels import emulation
from normmatters.nn.batchnorm import LpBatchNorm1d, LpBatchNorm2d, TopKBatchNorm1d
from normmatters.nn.layernorm import L1LayerNorm
from normmatters.precision import rounding
from support.markdown_pages import ROOT, blocks, read

EPS16, EPS32 = torch.finfo(torch.float16).eps, torch.finfo(torch.float32).eps
KINDS = [(1, None), (2, None), (math.inf, None), (math.inf, 4), ("range", None), ("mean", None)]


def values_and_gradients(function, tensors, grad):
    tensors = [t.clone().requires_grad_() for t in tensors]
    output = function(*tensors)
    output.backward(grad)
    return [output.detach(), *(t.grad for t in tensors)]


def relative_error(result, reference):
    """Worst over the tensors of ‖difference‖/‖reference‖."""
    pairs = list(zip(result, reference, strict=True))
    return max(((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs)


# --- The context ---


def test_context_nests_restores_and_decorates():
    assert precision.active() is None
    with precision.arithmetic("fp16", accumulate="fp16") as outer:
        assert precision.active() == outer
        assert (outer.dtype, outer.accumulate) == (torch.float16, torch.float16)
        with contextlib.suppress(KeyError), precision.arithmetic(torch.bfloat16):
            assert precision.active().dtype == torch.bfloat16
            assert precision.active().accumulate == torch.float32
            raise KeyError
        assert precision.active() == outer
    assert precision.active() is None

    @precision.arithmetic("bf16", accumulate="bf16")
    def decorated():
        return precision.active().accumulate

    assert (decorated(), decorated(), precision.active()) == (torch.bfloat16, torch.bfloat16, None)

    def batches():
        yield precision.active()

    async def served():
        return precision.active()

    for late in (batches, served):  # which had no arithmetic, silently
        with pytest.raises(TypeError, match=f"{late.__name__} is a generator or coroutine"):
            precision.arithmetic("bf16")(late)


def test_one_context_serves_every_step():
    """As ``torch.autocast``'s, which training loops make once; also inside itself, and decorating what recurses."""
    context = precision.arithmetic("fp16")
    for _ in range(2):
        with context as setting, precision.arithmetic("bf16"), context:
            assert precision.active() is setting
        assert precision.active() is None

    @context
    def depth(n):
        return n and precision.active() is setting and depth(n - 1)

    assert (depth(3), precision.active(), emulation.open_contexts) == (0, None, 0)


def test_context_belongs_to_its_thread():
    seen = []
    with precision.arithmetic("fp16"):
        thread = threading.Thread(target=lambda: seen.append(precision.active()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_context_left_by_another_task_is_no_longer_open():
    context = precision.arithmetic("fp16")
    contextvars.copy_context().run(context.__enter__)
    with pytest.raises(ValueError, match="by the thread or task that entered it"):
        context.__exit__(None, None, None)
    assert emulation.open_contexts == 0  # compiled models stay whole


@pytest.mark.parametrize(
    ("dtype", "accumulate", "message"),
    [("fp17", "fp32", "dtype must be one of"), ("fp16", "e4m3", "accumulate must be"), (torch.int8, "fp16", "int8")],
)
def test_unknown_formats_are_refused_at_the_call(dtype, accumulate, message):
    with pytest.raises(ValueError, match=message):
        precision.arithmetic(dtype, accumulate)


def test_unsupported_calls():
    x = torch.randn(8, 3)
    with pytest.raises(RuntimeError, match="no arithmetic is active"):
        precision.batch_norm(x, training=True)
    with precision.arithmetic("fp16"):
        with pytest.raises(ValueError, match=r"p = 1\.5"):
            precision.batch_norm(x, training=True, p=1.5)
        with pytest.raises(ValueError, match="RMS norm"):
            precision.rms_norm(x, (3,), p="range")
        with pytest.raises(RuntimeError, match=r"does not go through the transforms of torch\.func"):
            torch.func.vmap(L1LayerNorm(3))(x)
        with pytest.raises(ValueError, match="more than 1 value"):
            precision.batch_norm(x[:1], training=True)
        with pytest.raises(ValueError, match="needs k <= the 3 values"):
            precision.layer_norm(x, (3,), p=math.inf, k=4)


# --- In fp32 it is the plain equation ---


@pytest.mark.parametrize("act", [None, "relu"])
@pytest.mark.parametrize(("p", "k"), KINDS)
def test_batch_norm_in_fp32_is_the_plain_equation(p, k, act):
    torch.manual_seed(0)
    x, residual, grad = torch.randn(3, 7, 5, 3, 3)
    x = 2 * x + 1
    parameters = [torch.randn(5)] if p == "mean" else [torch.rand(5) + 0.5, torch.randn(5)]

    def norm(implementation):
        def call(x, residual, *parameters):
            weight, bias = parameters if len(parameters) == 2 else (None, *parameters)
            options = {"p": p, "k": k, "act": act, "residual": residual, "constant": 1.3}
            return implementation(x, None, None, weight, bias, True, eps=0.1, **options)

        return call

    tensors = [x, residual, *parameters]
    reference = values_and_gradients(norm(functional.lp_batch_norm), [t.double() for t in tensors], grad.double())
    with precision.arithmetic("fp32", accumulate="fp32"):
        result = values_and_gradients(norm(precision.batch_norm), tensors, grad)
    assert relative_error(result, reference) < 8 * EPS32


@pytest.mark.parametrize(
    ("name", "p"),
    [(name, p) for name in ("layer_norm", "rms_norm") for p in (1, 2, math.inf)] + [("layer_norm", "range")],
)
def test_layer_and_rms_norm_in_fp32_are_the_plain_equations(name, p):
    torch.manual_seed(1)
    x, grad = torch.randn(2, 4, 3, 17)
    tensors = [x + 0.5, torch.rand(17) + 0.5]
    reference = values_and_gradients(
        lambda x, w: getattr(functional, f"lp_{name}")(x, (17,), w, eps=0.1, p=p),
        [t.double() for t in tensors],
        grad.double(),
    )
    with precision.arithmetic("fp32"):
        call = getattr(precision, name)
        result = values_and_gradients(lambda x, w: call(x, (17,), w, eps=0.1, p=p), tensors, grad)
    assert relative_error(result, reference) < 8 * EPS32


@pytest.mark.parametrize("p", [1, "mean"])
def test_evaluation_and_its_gradient_in_fp32(p):
    torch.manual_seed(2)
    x, grad = torch.randn(2, 6, 3, 4)
    mean, var, bias = torch.randn(3), torch.rand(3) + 0.5, torch.randn(3)
    kept = mean.clone(), var.clone()
    reference = values_and_gradients(
        lambda x, b: functional.lp_batch_norm(x, mean, var, None, b, False, p=p), [x, bias], grad
    )
    with precision.arithmetic("fp32"):
        result = values_and_gradients(
            lambda x, b: precision.batch_norm(x, mean, var, None, b, False, p=p), [x, bias], grad
        )
    assert relative_error(result, [t.double() for t in reference]) < 8 * EPS32
    assert torch.equal(mean, kept[0])
    assert torch.equal(var, kept[1])


def test_running_statistics_and_empty_batch():
    torch.manual_seed(3)
    x = torch.randn(32, 3) + 2
    ours, plain = LpBatchNorm1d(3, p=1), LpBatchNorm1d(3, p=1)
    plain(x)
    with precision.arithmetic("fp32"):
        ours(x)
        assert ours(x[:0]).shape == (0, 3)
    torch.testing.assert_close(ours.running_mean, plain.running_mean)
    torch.testing.assert_close(ours.running_var, plain.running_var)


def test_more_extremes_than_values_matter_in_training_only():
    torch.manual_seed(4)
    norm = TopKBatchNorm1d(3, k=10)
    norm(torch.randn(32, 3))
    x = torch.randn(2, 3)
    expected = norm.eval()(x)
    with precision.arithmetic("fp32"):
        torch.testing.assert_close(norm(x), expected)
        assert norm.train()(x[:0]).shape == (0, 3)
        with pytest.raises(ValueError, match="Top"):
            norm(x)


# --- In fp16 it is hardware's, to the bit ---


def numpy_mean(values):
    """The documented tree, one number at a time, in numpy's own fp16."""
    count = len(values)
    while len(values) > 1:
        half = (len(values) + 1) // 2
        right = list(values[half:]) + [np.float16(0)] * (2 * half - len(values))
        values = [np.float16((np.float32(a) + np.float32(b)) / 2) for a, b in zip(values[:half], right)]
    return values[0] / np.float16(count / 2 ** math.ceil(math.log2(count)))


@pytest.mark.parametrize("n", [2, 37, 64])
@pytest.mark.parametrize("p", [1, 2])
def test_fp16_forward_is_numpys_to_the_bit(p, n):
    torch.manual_seed(n)
    x = (torch.randn(n, 3) * 3 + 1).half()
    weight, bias = torch.rand(3).half() + 1, torch.randn(3).half()
    with precision.arithmetic("fp16", accumulate="fp16"):
        result = precision.batch_norm(x, None, None, weight, bias, True, p=p).numpy()
    for c in range(3):
        column = x[:, c].numpy()
        deviation = column - numpy_mean(column)
        if p == 1:
            s = numpy_mean(np.abs(deviation)) * np.float16(math.sqrt(math.pi / 2))
            ratio = np.float16(math.sqrt(1e-5)) / s
            scale = s * np.sqrt(np.float16(1) + ratio * ratio)
        else:
            scale = np.sqrt(numpy_mean(deviation * deviation) + np.float16(1e-5))
        assert deviation.dtype == scale.dtype == np.float16
        np.testing.assert_array_equal(result[:, c], deviation / scale * weight[c].numpy() + bias[c].numpy())


@pytest.mark.parametrize(("p", "k"), KINDS)
def test_fp16_gradients_are_near_float64(p, k):
    """Rounding moves each result by a few ulp: no more than 8 of them after some ten operations on each element."""
    torch.manual_seed(4)
    x, grad = torch.randn(2, 64, 4, 3, 3).half().float()
    weight, bias = None if p == "mean" else torch.rand(4).half().float() + 0.5, torch.randn(4).half().float()
    tensors = [t for t in (x, bias, weight) if t is not None]

    def call(implementation):
        return lambda x, b, w=None: implementation(x, None, None, w, b, True, p=p, k=k)

    doubles = [t.double() for t in tensors]
    reference = values_and_gradients(call(functional.lp_batch_norm), doubles, grad.double())
    with precision.arithmetic("fp16", accumulate="fp16"):
        result = values_and_gradients(call(precision.batch_norm), tensors, grad)
    assert 0.05 * EPS16 < relative_error(result[:2], reference[:2]) < 8 * EPS16
    assert relative_error(result[2:], reference[2:]) < 8 * EPS16
    assert all(torch.equal(t, t.half().float()) for t in result[:2])


def test_backward_keeps_the_forwards_arithmetic():
    torch.manual_seed(5)
    x, grad = torch.randn(2, 32, 4)
    inside, outside, plain = (x.clone().requires_grad_() for _ in range(3))
    with precision.arithmetic("bf16", accumulate="bf16"):
        LpBatchNorm1d(4)(inside).backward(grad)
        y = LpBatchNorm1d(4)(outside)
    y.backward(grad)
    LpBatchNorm1d(4)(plain).backward(grad)
    assert torch.equal(inside.grad, outside.grad)
    assert torch.equal(outside.grad, outside.grad.bfloat16().float())
    assert not torch.equal(outside.grad, plain.grad)


def test_checkpointing_takes_the_context_along():
    torch.manual_seed(13)
    x, grad = torch.randn(2, 32, 4)

    def again():
        return contextlib.nullcontext(), precision.arithmetic("bf16", accumulate="bf16")

    plain, recomputed = LpBatchNorm1d(4), LpBatchNorm1d(4)
    with precision.arithmetic("bf16", accumulate="bf16"):
        expected = values_and_gradients(plain, [x], grad)
        inputs = x.clone().requires_grad_()
        y = checkpoint(recomputed, inputs, use_reentrant=False, context_fn=again)
    y.backward(grad)
    assert torch.equal(inputs.grad, expected[1])
    assert torch.equal(recomputed.running_var, plain.running_var)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_no_part_of_a_second_derivative_is_left_out(dtype):
    """There is none; `torch.autograd.grad` would not notice by itself where another way leads to the same input."""
    bn = LpBatchNorm2d(2, p=1)
    x = torch.randn(4, 2, 3, 3, requires_grad=True)
    with precision.arithmetic(dtype):
        loss = bn(x).exp().sum() + x.pow(3).sum()

    def hessian():
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.autograd.grad(g.square().sum(), x)

    with pytest.raises(RuntimeError, match="only once"):
        hessian()


def test_ties_share_the_gradient_whatever_their_order():
    """fp16 makes ties common; an arbitrary winner would differ from device to device."""
    x = torch.tensor([3.0, -3.0, 3.0, -3.0, 1.0, -1.0])[:, None]
    grad = torch.tensor([1.0, 2.0, -1.0, 0.5, 0.0, 1.0])[:, None]
    order = torch.tensor([2, 0, 5, 3, 1, 4])
    for options in ({"p": math.inf}, {"p": math.inf, "k": 3}, {"p": "range"}):
        with precision.arithmetic("fp16", accumulate="fp16"):
            dx, permuted = (
                values_and_gradients(lambda x: precision.batch_norm(x, training=True, **options), [x[i]], grad[i])[1]  # noqa: B023
                for i in (torch.arange(6), order)
            )
        torch.testing.assert_close(permuted, dx[order], rtol=0, atol=2 * EPS16)
        assert dx.abs().min() > 0.01


def test_fp8_is_a_storage_format():
    torch.manual_seed(6)
    x, grad = torch.randn(2, 64, 4)
    for name, stored in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        with precision.arithmetic(name, accumulate="fp16"):
            y, dx = values_and_gradients(lambda x: precision.batch_norm(x, training=True), [x], grad)
        with precision.arithmetic("fp16", accumulate="fp16"):  # fp16 arithmetic between rounded ends
            rounded = [t.to(dtype).float() for t, dtype in ((x, stored), (grad, torch.float8_e5m2))]
            y16, dx16 = values_and_gradients(lambda x: precision.batch_norm(x, training=True), rounded[:1], rounded[1])
        assert torch.equal(y, y16.to(stored).float())
        assert torch.equal(dx, dx16.to(torch.float8_e5m2).float())
    for name, bias, largest in (("e4m3", 1000.0, 448), ("e5m2", 65000.0, 57344)):  # saturates, where a cast may not
        with precision.arithmetic(name):
            y = precision.batch_norm(x, bias=torch.full((4,), bias), training=True)
        assert torch.equal(y, torch.full_like(y, largest))


def _scalar_loop(row, dtype):
    total = dtype(0)
    for value in row:
        total = dtype(total + dtype(value))
    return float(total)


@pytest.mark.parametrize(("accumulate", "dtype"), [(torch.float16, np.float16), (torch.float32, np.float32)])
def test_a_running_mean_is_a_scalar_loops(accumulate, dtype):
    torch.manual_seed(7)
    x = torch.randn(3, 777) * torch.tensor([[1.0], [1e-6], [300.0]]) + torch.tensor([[1.0], [0.0], [200.0]])
    sums = [_scalar_loop(row, dtype) for row in x.numpy()]
    assert (sums[2] == math.inf) == (dtype is np.float16)  # 777 · 200 is beyond 65504
    expected = rounding.divide(torch.tensor(sums)[:, None], 777, accumulate)
    found = rounding.running_mean(x, 1, accumulate)
    assert torch.equal(found, expected)
    assert torch.equal(rounding.running_mean(x.T, 0, accumulate), expected.T)
    assert not torch.equal(found, rounding.tree_mean(x, 1, accumulate))
    assert torch.equal(
        rounding.running_mean(-x.abs() * 0, 1, accumulate).signbit(), torch.zeros(3, 1, dtype=torch.bool)
    )


def test_a_running_sum_in_fp16_stagnates_and_overflows_where_a_tree_does_not():
    for value in (1.0, 2.0**-9):  # from 2048 numbers on, half of the last digit is the number itself: it goes to even
        equal = torch.full((1, 8192), value)
        assert rounding.running_mean(equal, 1, torch.float16).item() == value / 4
        assert rounding.tree_mean(equal, 1, torch.float16).item() == value
    assert rounding.running_mean(torch.full((1, 2000), 60.0), 1, torch.float16).item() == math.inf
    bf16 = rounding.running_mean(torch.full((1, 512), 1.0), 1, torch.bfloat16).item()
    assert bf16 == 0.5  # 8 binary digits: it stands still at 256


@pytest.mark.parametrize(("p", "k"), KINDS)
def test_every_norm_in_fp32_takes_running_sums(p, k):
    torch.manual_seed(8)
    x, grad = torch.randn(2, 16, 3, 4, 4)
    results = []
    for sums in ("tree", "running"):
        with precision.arithmetic("fp32", accumulate="fp32", sums=sums) as setting:
            assert setting.sums == sums
            results.append(values_and_gradients(lambda x: precision.batch_norm(x, training=True, p=p, k=k), [x], grad))
    assert relative_error(results[0], [t.double() for t in results[1]]) < 1e-5


def test_top_k_sums_few_numbers_and_l1_many():
    torch.manual_seed(9)
    x = torch.randn(32768, 1)
    errors = {}
    for name, p, k in (("l1", 1, None), ("l2", 2, None), ("linf", math.inf, None), ("topk", math.inf, 10)):
        scales = []
        for sums in ("tree", "running"):
            with precision.arithmetic("fp16", accumulate="fp16", sums=sums):
                y = precision.batch_norm(x, training=True, p=p, k=k)
            scales.append(y.std().item())
        errors[name] = abs(scales[1] / scales[0] - 1)
    assert errors["l1"] > 2
    assert errors["l2"] > 0.4  # the largest squares still count
    assert max(errors["linf"], errors["topk"]) < 0.05


def test_unknown_orders_of_summation_are_refused():
    with pytest.raises(ValueError, match="sums must be 'tree' or 'running', got 'pairs'"):
        precision.arithmetic("fp16", sums="pairs")


def test_tree_mean_neither_overflows_nor_drifts():
    values = torch.full((1, 1_000_003), 60000.0)
    assert rounding.tree_mean(values, 1, torch.float16).item() == pytest.approx(60000, rel=2 * EPS16)
    torch.manual_seed(7)
    values = torch.rand(1, 100_001).half().float()
    exact = values.double().mean().item()
    for accumulate, ulp in ((torch.float16, EPS16), (torch.float32, EPS32)):
        result = rounding.tree_mean(values, 1, accumulate).item()
        assert result == pytest.approx(exact, rel=2 * ulp)
        assert result == rounding.tree_mean(values.T, 0, accumulate).item()


# --- F5's point ---


def scale_error(p, sigma, n, dtype, accumulate):
    """Worst relative error, over 8 channels, of s in this arithmetic against float64."""
    torch.manual_seed(8)
    x = (torch.randn(n, 8) * sigma).to(rounding.FORMATS[dtype])
    deviation = x.double() - x.double().mean(0)
    exact = deviation.abs().mean(0) * math.sqrt(math.pi / 2) if p == 1 else deviation.square().mean(0).sqrt()
    running_mean, running_var = torch.zeros(8), torch.ones(8)
    with precision.arithmetic(dtype, accumulate):
        precision.batch_norm(x, running_mean, running_var, None, None, True, 1.0, p=p)
    return ((running_var.double() * ((n - 1) / n)).sqrt() / exact - 1).abs().max().item()


@pytest.mark.parametrize("n", [4096, 50_000, 65_536])
@pytest.mark.parametrize("accumulate", ["fp16", "fp32"])
def test_l1_is_accurate_in_fp16_where_squares_leave_its_range(accumulate, n):
    for sigma in (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 3000.0):
        assert scale_error(1, sigma, n, "fp16", accumulate) <= 0.005
    assert scale_error(2, 100.0, n, "fp16", accumulate) == math.inf  # a square above 65504
    assert scale_error(2, 1e-4, n, "fp16", accumulate) > 0.1  # squares below the smallest subnormal, 6e-8
    assert scale_error(2, 1.0, n, "fp16", accumulate) <= 0.005  # the same tree is fair to L2 in range
    if accumulate == "fp16":
        assert scale_error(2, 1e-3, n, "fp16", accumulate) > 0.01


def test_bf16_has_the_range_for_both_and_less_precision():
    for p in (1, 2):
        for sigma in (1e-3, 1.0, 100.0):
            assert 0.001 < scale_error(p, sigma, 4096, "bf16", "bf16") < 0.02
            assert scale_error(p, sigma, 4096, "bf16", "fp32") < 0.005


def test_the_card_says_which_scales_are_kept():
    card = read(ROOT / "docs" / "precision.md")
    names = {"torch": torch, "nm": normmatters}
    (code,) = [block.code for block in blocks(card) if "def scales" in block.code]
    exec(code, names)
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*) \| (.*) \|$", card, re.MULTILINE)
    assert [row[:2] for row in rows[:2]] == [("fp16", "fp16"), ("fp16", "fp32")]
    assert len(rows) == 5
    for dtype, sums, l1, l2 in rows:
        assert (names["scales"](1, dtype, sums), names["scales"](2, dtype, sums)) == (l1, l2)


def test_layer_norm_of_large_activations():
    torch.manual_seed(9)
    x = torch.randn(4, 256) * 300
    l1, l2 = L1LayerNorm(256), nn.LayerNorm(256)
    with precision.arithmetic("fp16", accumulate="fp16"):
        y = l1(x)
        squares = precision.layer_norm(x, (256,), p=2)
    torch.testing.assert_close(y, l1(x), rtol=0, atol=0.02)
    assert squares.abs().max() == 0  # divided by an infinite scale
    assert l2(x).abs().max() > 1


# --- Training ---


def train(p, setting, gain=1.0, steps=12):
    """Loss after a few steps on ten noisy prototypes; ``gain`` scales what the first norm sees."""
    torch.manual_seed(10)
    prototypes = torch.randn(10, 1, 8, 8)
    labels = torch.randint(10, (128,))
    images = (prototypes[labels] + torch.randn(128, 1, 8, 8)) * gain
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        LpBatchNorm2d(8, p=p, act="relu"),
        nn.Conv2d(8, 16, 3, padding=1, stride=2, bias=False),
        LpBatchNorm2d(16, p=p, act="relu"),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    loss_scale = 1024.0  # as for any fp16 training
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / loss_scale, momentum=0.9)
    for _ in range(steps):
        if setting is None:
            loss = nn.functional.cross_entropy(model(images), labels)
        else:
            with precision.arithmetic(*setting):
                loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        (loss * loss_scale).backward()
        optimizer.step()
    return loss.item()


def test_l1_trains_in_pure_fp16_and_l2_does_not():
    baseline = train(1, None)
    assert 0.02 < baseline < 0.2
    assert train(1, ("fp16", "fp16")) == pytest.approx(baseline, rel=0.02)
    assert train(1, ("bf16", "bf16")) == pytest.approx(baseline, rel=0.1)
    assert train(1, ("e4m3", "fp16")) == pytest.approx(baseline, rel=0.3)
    assert train(1, ("fp16", "fp16"), gain=300.0) < 2 * baseline
    assert train(2, ("fp16", "fp32"), gain=300.0) > 0.9 * math.log(
        10
    )  # the first norm's output is 0: nothing is learnt


# --- PyTorch's machinery ---


def test_the_default_device_does_not_matter():
    x = torch.randn(8, 3)
    rounding.constant.cache_clear()
    with torch.device("meta"), precision.arithmetic("fp16", accumulate="fp16"):
        y = precision.batch_norm(x, training=True, eps=2e-5)
    with precision.arithmetic("fp16", accumulate="fp16"):
        assert torch.equal(y, precision.batch_norm(x, training=True, eps=2e-5))


def test_channels_last_and_dtype_are_kept():
    x = torch.randn(4, 3, 5, 5, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    with precision.arithmetic("fp16"):
        y = precision.batch_norm(x, training=True)
        other = precision.batch_norm(x.contiguous(), training=True)
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, other)


def test_compiled_models_stay_whole_and_obey_the_context():
    torch.manual_seed(11)
    x, bn = torch.randn(16, 4), LpBatchNorm1d(4, track_running_stats=False)
    compiled = torch.compile(bn, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), bn(x))
    compiled = torch.compile(bn, backend="eager")
    plain = compiled(x)
    with precision.arithmetic("bf16", accumulate="bf16"):
        rounded = compiled(x)
        assert torch.equal(rounded, bn(x))
    assert not torch.equal(rounded, plain)
    assert torch.equal(compiled(x), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("sums", ["tree", "running"])
@pytest.mark.parametrize(("p", "k"), KINDS)
def test_gpu_agrees_to_the_bit_and_can_be_captured(p, k, sums):
    torch.manual_seed(12)
    x, grad = torch.randn(2, 37, 5, 3, 3)

    def call(x):
        with precision.arithmetic("fp16", accumulate="fp16", sums=sums):
            return precision.batch_norm(x, training=True, p=p, k=k)

    expected = values_and_gradients(call, [x], grad)
    result = values_and_gradients(call, [x.cuda()], grad.cuda())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(result, expected, strict=True))
    static, graph = x.cuda(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(static)
    graph.replay()
    assert torch.equal(y.cpu(), expected[0])
