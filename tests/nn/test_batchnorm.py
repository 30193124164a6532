"""The batch norm modules: torch.nn's state and manners, the paper's equation."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_eval

from normmatters import nn as ours
from normmatters.functional import lp_batch_norm
from normmatters.nn.batchnorm_act import LpBatchNormAct2d
from support import oracle, tolerances

RANKS = {"1d": (6, 3, 4), "2d": (6, 3, 2, 4), "3d": (6, 3, 2, 2, 3)}
FAMILIES: dict[str, tuple[float | str, int | None]] = {
    "L1": (1, None),
    "LInf": (math.inf, None),
    "TopK": (math.inf, 10),
    "Range": ("range", None),
    "MeanOnly": ("mean", None),
    "Lp": (1, None),
}
EVERY_CLASS = [f"{family}BatchNorm{rank}" for family, rank in itertools.product(FAMILIES, RANKS)]


def of_kind(p: float | str, k: int | None, **options: Any) -> nn.Module:
    """A 2d batch norm over 3 channels."""
    if p == "mean":
        return ours.MeanOnlyBatchNorm2d(3, **options)
    return ours.LpBatchNorm2d(3, p, k=k, **options)


@pytest.mark.parametrize("name", EVERY_CLASS)
def test_every_class_computes_its_equation(name: str) -> None:
    p, k = FAMILIES[name.split("BatchNorm")[0]]
    module = getattr(ours, name)(3).double()
    x = torch.randn(RANKS[name[-2:]], dtype=torch.float64, requires_grad=True)
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    weight = None if p == "mean" else torch.ones(3, dtype=torch.float64)
    g = torch.randn_like(x)
    y, expected = module(x), lp_batch_norm(x, mean, var, weight, torch.zeros(3).double(), True, p=p, k=k)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(expected, x, g))
    torch.testing.assert_close(module.running_mean, mean)
    torch.testing.assert_close(module.running_var, var)
    assert module.num_batches_tracked == 1
    evaluated = module.eval()(x)
    eps = torch.finfo(torch.float32).tiny if p == "mean" else 1e-5  # torch 2.11 refuses 0
    assert torch.equal(
        evaluated, nn.functional.batch_norm(x, module.running_mean, module.running_var, weight, module.bias, eps=eps)
    )


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("momentum", [0.1, None, 0.0, 1.0])
def test_order_two_is_torchs(rank: str, momentum: float | None) -> None:
    """Values, gradients and running statistics over three batches, in training and then in evaluation."""
    theirs = getattr(nn, f"BatchNorm{rank}")(3, 1e-3, momentum)
    mine = getattr(ours, f"LpBatchNorm{rank}")(3, 2, 1e-3, momentum)
    nn.init.uniform_(theirs.weight)
    nn.init.uniform_(theirs.bias)
    mine.load_state_dict(theirs.state_dict())
    for training in (True, True, True, False):
        x = torch.randn(RANKS[rank]) * 2 + 1
        n = x.numel() // 3
        g = torch.randn_like(x)
        results = []
        for module in (mine, theirs):
            module.train(training).zero_grad()
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            y.backward(g)
            results.append((y, leaf.grad, module.weight.grad, module.bias.grad))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerances.parameter_gradient(torch.float32, n))
        for key, value in theirs.state_dict().items():
            torch.testing.assert_close(
                mine.state_dict()[key], value, rtol=tolerances.statistic(torch.float32, n), atol=1e-7
            )


@pytest.mark.parametrize(("p", "k"), oracle.SCALED_KINDS)
def test_checkpoints_move_both_ways(p: float | str, k: int | None) -> None:
    mine, theirs = of_kind(p, k), nn.BatchNorm2d(3)
    assert {k: v.shape for k, v in mine.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    nn.init.normal_(mine.weight)
    nn.init.normal_(mine.bias)
    x = torch.randn(8, 3, 4, 4)
    mine(x)
    theirs.load_state_dict(mine.state_dict())
    expected = theirs.eval()(x)
    assert torch.equal(mine.eval()(x), expected)
    back = of_kind(p, k).eval()
    back.load_state_dict(theirs.state_dict())
    assert torch.equal(back(x), expected)


def test_a_checkpoint_from_before_the_batch_count_loads() -> None:
    old = nn.BatchNorm2d(3).state_dict()
    del old["num_batches_tracked"]
    old._metadata[""]["version"] = 1
    mine = ours.L1BatchNorm2d(3)
    mine.load_state_dict(old)
    assert mine.num_batches_tracked == 0


@pytest.mark.parametrize(("p", "k"), oracle.KINDS)
def test_folds_into_a_convolution(p: float | str, k: int | None) -> None:
    conv, bn = nn.Conv2d(2, 3, 3).double(), of_kind(p, k, dtype=torch.float64)
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    for _ in range(3):
        bn(conv(x))
    conv.eval()
    bn.eval()
    torch.testing.assert_close(fuse_conv_bn_eval(conv, bn)(x), bn(conv(x)))


@pytest.mark.parametrize(("p", "k"), oracle.KINDS)
def test_residual_and_activation(p: float | str, k: int | None) -> None:
    x, residual = torch.randn(2, 6, 3, 4, 4).unbind()
    plain, fused = of_kind(p, k), of_kind(p, k, act="relu")
    for training in (True, False):
        y = fused.train(training)(x, residual=residual)
        torch.testing.assert_close(y, (plain.train(training)(x) + residual).relu())
        assert (y == 0).any()
        assert (y > 0).any()


def test_without_affine_or_statistics() -> None:
    x = torch.randn(6, 3, 4, 4)
    bare = ours.L1BatchNorm2d(3, affine=False, track_running_stats=False)
    assert bare.state_dict() == {}
    assert not list(bare.parameters())
    expected = lp_batch_norm(x, training=True)
    torch.testing.assert_close(bare(x), expected)
    torch.testing.assert_close(bare.eval()(x), expected)  # no statistics: the batch's, as in torch.nn
    no_bias = ours.L1BatchNorm2d(3, bias=False)
    assert set(no_bias.state_dict()) == {"weight", "running_mean", "running_var", "num_batches_tracked"}
    torch.testing.assert_close(no_bias(x), expected)


def test_statistics_switched_off_later_are_left_alone() -> None:
    bn = ours.L1BatchNorm2d(3)
    bn.track_running_stats = False
    bn(torch.randn(6, 3, 4, 4))
    assert torch.equal(bn.running_mean, torch.zeros(3))
    assert bn.num_batches_tracked == 0


def test_reset_parameters() -> None:
    for bn in (ours.L1BatchNorm2d(3), ours.MeanOnlyBatchNorm2d(3), ours.L1BatchNorm2d(3, bias=False)):
        fresh = copy.deepcopy(bn.state_dict())
        bn(torch.randn(6, 3, 4, 4) + 1)
        for parameter in bn.parameters():
            nn.init.normal_(parameter)
        bn.reset_parameters()
        assert all(torch.equal(value, fresh[key]) for key, value in bn.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_device_and_dtype(dtype: torch.dtype) -> None:
    bn = ours.TopKBatchNorm2d(3, device="cpu", dtype=dtype)
    assert {v.dtype for k, v in bn.state_dict().items() if k != "num_batches_tracked"} == {dtype}
    x = torch.randn(6, 3, 4, 4).to(dtype)
    assert bn(x).dtype == dtype
    assert bn.running_var.dtype == dtype
    assert ours.L1BatchNorm2d(3, device="meta").weight.is_meta


def test_half_inputs_with_float32_parameters() -> None:
    """Mixed precision's usual pair; the statistics are float32's."""
    bn, wide = ours.L1BatchNorm2d(3), ours.L1BatchNorm2d(3)
    x = torch.randn(6, 3, 4, 4).bfloat16()
    for training in (True, False):
        y, expected = bn.train(training)(x), wide.train(training)(x.float())
        torch.testing.assert_close(y.float(), expected, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)
    torch.testing.assert_close(bn.running_var, wide.running_var)


def test_repr_shows_what_is_not_the_default() -> None:
    torchs = repr(nn.BatchNorm2d(3)).removeprefix("BatchNorm2d")
    assert repr(ours.L1BatchNorm2d(3)) == "L1BatchNorm2d" + torchs
    assert repr(ours.TopKBatchNorm2d(3)) == "TopKBatchNorm2d" + torchs
    assert repr(ours.RangeBatchNorm2d(3)) == "RangeBatchNorm2d" + torchs
    changed = ours.LpBatchNorm2d(3, p=math.inf, k=4, constant="paper", act="relu", memory="lean")
    assert repr(changed).endswith("p=inf, k=4, constant='paper', act='relu', memory='lean')")


def test_copies_and_pickles() -> None:
    bn = ours.TopKBatchNorm2d(3, k=5, act="relu")
    x = torch.randn(6, 3, 4, 4)
    bn(x)
    others = [copy.deepcopy(bn), pickle.loads(pickle.dumps(bn))]
    trained, evaluated = bn(x), bn.eval()(x)
    for other in others:
        assert repr(other) == repr(bn)
        assert torch.equal(other(x), trained)
        assert torch.equal(other.eval()(x), evaluated)


def test_torchs_sync_conversion_leaves_ours_alone() -> None:
    """Why the modules do not inherit nn.BatchNorm2d: torch would silently make plain L2 of them."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(ours.L1BatchNorm2d(3)))
    assert type(model[0]) is ours.L1BatchNorm2d


@pytest.mark.parametrize("arguments", [{"act": "relu"}, {"p": math.inf, "k": 3}])
def test_compiles_to_one_graph(arguments: dict[str, Any]) -> None:
    """Values, gradients and running statistics; the batch size changes on the way."""
    module = ours.LpBatchNorm2d(3, **arguments)
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for samples in (4, 6):
        x = torch.randn(samples, 3, 4, 4)
        g = torch.randn_like(x)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [f(leaf) for f, leaf in zip((compiled, eager), leaves)]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*(torch.autograd.grad(y, leaf, g) for y, leaf in zip(outputs, leaves)))
    assert module.num_batches_tracked == 2
    torch.testing.assert_close(module.running_var, eager.running_var)
    module.eval()
    torch.testing.assert_close(compiled(x), eager.eval()(x))


def test_norms_of_several_orders_compile_to_one_graph_each() -> None:
    """The compiler takes a float for a variable once it has met two values of it; the constant of p is none of p."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda norm, x: norm(x), fullgraph=True, backend="aot_eager")
    for p in (1.5, 3.0, 2.0):
        norm = ours.LpBatchNorm1d(4, p=p)
        x = torch.randn(6, 4, requires_grad=True)
        g = torch.randn(6, 4)
        outputs = compiled(norm, x), norm(x)
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, g) for y in outputs))


BAD_CALLS: list[tuple[Any, type[Exception], str]] = [
    (lambda bn: bn(torch.randn(6, 3)), ValueError, r"expected 4D input \(got 2D input\)"),
    (lambda bn: bn(torch.randn(6, 4, 2, 2)), ValueError, "expected 3 channels"),
    (lambda bn: bn(torch.randn(1, 3, 1, 1)), ValueError, "more than 1 value per channel"),
    (lambda bn: bn(torch.ones(6, 3, 2, 2, dtype=torch.int)), TypeError, "floating-point"),
    (lambda bn: bn(torch.randn(6, 3, 2, 2), torch.randn(6, 3, 2, 1)), ValueError, "residual must have"),
]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_bad_input_changes_no_state(call: Any, error: type[Exception], message: str, momentum: float | None) -> None:
    bn = ours.L1BatchNorm2d(3, momentum=momentum)
    bn(torch.randn(6, 3, 4, 4))
    before = copy.deepcopy(bn.state_dict())
    with pytest.raises(error, match=message):
        call(bn)
    assert all(torch.equal(value, before[key]) for key, value in bn.state_dict().items())


def test_more_extremes_than_values() -> None:
    bn = ours.TopKBatchNorm2d(3, k=10)
    with pytest.raises(ValueError, match="k <= the 8 values per channel"):
        bn(torch.randn(2, 3, 2, 2))
    assert bn.num_batches_tracked == 0
    assert bn.eval()(torch.randn(2, 3, 2, 2)).isfinite().all()  # evaluation needs no extremes


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: ours.LpBatchNorm2d(3, p=0.5), ValueError),
        (lambda: ours.LpBatchNorm2d(3, p="l1"), ValueError),
        (lambda: ours.LpBatchNorm2d(3, k=10), ValueError),
        (lambda: ours.TopKBatchNorm2d(3, k=0), ValueError),
        (lambda: ours.L1BatchNorm2d(3, constant="gaussian"), ValueError),
        (lambda: ours.LpBatchNorm2d(3, p=3, constant="paper"), ValueError),
        (lambda: ours.L1BatchNorm2d(3, act="gelu"), ValueError),
        (lambda: ours.L1BatchNorm2d(3, memory="small"), ValueError),
        (lambda: ours.L1BatchNorm2d(3, eps=-1.0), ValueError),
        (lambda: ours.L1BatchNorm2d(3, eps=math.nan), ValueError),
        (lambda: ours.LpBatchNorm2d(3, p=None), TypeError),
        (lambda: ours.MeanOnlyBatchNorm2d(3, 1e-5), TypeError),  # it has no eps, and this is no momentum
    ],
)
def test_bad_arguments_are_refused_at_once(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_an_empty_batch_counts_and_leaves_the_statistics() -> None:
    """As torch.nn.BatchNorm2d does."""
    mine, theirs = ours.LpBatchNorm2d(3, 2), nn.BatchNorm2d(3)
    for bn in (mine, theirs):
        y: Tensor = bn(torch.randn(0, 3, 2, 2))
        y.sum().backward()
        assert y.shape == (0, 3, 2, 2)
    for key, value in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[key], value)
    assert torch.equal(mine.weight.grad, theirs.weight.grad)


@pytest.mark.parametrize("p", [1, 2, math.inf, "mean"])
def test_a_training_step_before_the_backward_pass_of_evaluation(p: float | str) -> None:
    """As adversarial training and self-distillation do: the gradient is that of the statistics evaluation had."""
    x, other = torch.randn(2, 4, 3, 5, 5, dtype=torch.float64)
    bn = of_kind(p, None, dtype=x.dtype)
    x.requires_grad_()
    bn(other)
    (expected,) = torch.autograd.grad(bn.eval()(x).square().sum(), x)
    evaluated = bn(x).square().sum()
    bn.train()(2 * other)
    (gradient,) = torch.autograd.grad(evaluated, x)
    assert torch.equal(gradient, expected)


def test_a_model_of_inference_mode_evaluates_outside_of_it() -> None:
    with torch.inference_mode():
        bn, x = of_kind(1, None, dtype=torch.float64).eval(), torch.randn(4, 3, 5, 5, dtype=torch.float64)
        expected = bn(x)
    assert torch.equal(bn(x), expected)


@pytest.mark.parametrize("training", [False, True])
def test_running_statistics_need_not_be_buffers(training: bool) -> None:
    """Parameters in their place, to be tuned or kept by whoever keeps parameters, and parametrized ones."""
    x = torch.randn(4, 3, 2, 2)
    mine, theirs = ours.LpBatchNorm2d(3, 2), nn.BatchNorm2d(3)
    for bn in (mine, theirs):
        bn.train(training)
        bn.running_mean = nn.Parameter(torch.ones(3), requires_grad=False)
        parametrize.register_parametrization(bn, "running_var", nn.Softplus())
    torch.testing.assert_close(mine(x), theirs(x))
    assert torch.equal(mine.running_mean, theirs.running_mean)
    assert not torch.equal(mine.running_mean, torch.ones(3)) or not training


def test_general_class_with_p_mean_is_mean_only() -> None:
    """``LpBatchNorm2d(C, p="mean")`` has no weight and no eps, in training and evaluation alike."""
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    general, special = ours.LpBatchNorm2d(3, p="mean", dtype=x.dtype), ours.MeanOnlyBatchNorm2d(3, dtype=x.dtype)
    assert general.weight is None
    assert general.eps == 0
    torch.testing.assert_close(general(x), special(x))
    torch.testing.assert_close(general.eval()(x), special.eval()(x))


def test_a_linked_forward_applies_the_activation_too() -> None:
    bn = LpBatchNormAct2d(3)
    bn.drop, bn.activation = nn.Identity(), nn.SiLU()
    x = torch.randn(4, 3, 2, 2)
    for residual in (None, torch.randn_like(x)):
        output, link = bn.forward_linked(x, residual)
        assert link is None
        torch.testing.assert_close(output, nn.functional.silu(ours.LpBatchNorm2d(3)(x, residual)))
