"""The dispatcher: which backend serves a call, why not a faster one, and errors before anything has changed."""

from __future__ import annotations

import io
import logging
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils._pytree import tree_map_only

from support import called, tolerances

pytest.importorskip("triton")

from normmatters import precision
from normmatters.functional import lp_batch_norm, lp_layer_norm
from normmatters.kernels import backends, dispatch
from normmatters.kernels.triton.batch_norm import layout, select
from normmatters.nn import L1BatchNorm1d, L1LayerNorm, L1RMSNorm
from normmatters.norm import Norm
from support.batch_norm_cases import DEVICE, EPS, KINDS

X = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE)  # a module is read before any seed

# Which backend, and why ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "k"), KINDS.values())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kernels_serve_every_kind_and_dtype(p, k, dtype):
    assert called.backend(X.to(dtype), p=p, k=k) == ("triton", "")
    assert called.backend(X.to(dtype), p=p, k=k, memory="lean") == ("triton", "")


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        ({"input": X.double()}, "hand-derived", "float16, bfloat16 and float32, the input is torch.float64"),
        ({"input": X[:0]}, "plain", "the input is empty"),
        ({"input": X.to("meta")}, "hand-derived", "the input is on meta"),
        ({"p": 1.5}, "hand-derived", "not for a general p"),
        ({"p": math.inf, "k": 65}, "hand-derived", "k <= 64, got k=65"),
        ({"training": False}, "plain", "in evaluation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons(arguments, name, reason):
    backend = called.backend(**{"input": X, **arguments})
    assert backend.name == name
    assert reason in backend.reason


def test_too_many_groups(monkeypatch):
    monkeypatch.setattr(select, "MAX_GROUPS", 0)
    backend = called.backend(X, p="range")
    assert backend.name == "hand-derived"
    assert "groups per channel are more than the 0" in backend.reason
    assert called.backend(X, p=1).name == "triton"  # has none


@pytest.mark.parametrize("k", [None, 2, 10, 64])
@pytest.mark.parametrize("channels", [1, 3, 8, 16, 24, 64, 512])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_image_network_gets_the_selection_kernel(layout, channels, k):
    """With 16 channels, as in ResNet-56, Top(k) once had more groups than it can hold."""
    for size in (7, 8, 28, 32, 224):
        x = torch.empty(128, channels, size, size, dtype=torch.float16, device="meta", memory_format=layout)
        assert backends.why_not_batch_norm_kernel(x, Norm(math.inf, k)) == ""


@pytest.mark.parametrize("p", [1, 2, "mean", "range"])
def test_more_than_32_bits_count(p):
    """A volume of 512³ and 32 channels has 2³² columns, where a kernel's numbers would turn negative."""
    one = torch.zeros(1, device=X.device)
    volume = called.backend(one.expand(1, 32, 512, 512, 512), p=p)
    assert volume.name == "hand-derived"
    assert "values per image that is not channels last, not 4294967296" in volume.reason
    channel = called.backend(one.expand(2**31, 2), p=p)
    assert channel.name == "hand-derived"
    assert "values per channel, not 2147483648" in channel.reason
    assert called.backend(one.expand(2**28, 16), p=1).name == "triton"


def test_a_channels_last_image_has_few_columns(monkeypatch):
    monkeypatch.setattr(layout, "MAX_COLS", 7)
    x = torch.empty(2, 4, 3, 3, device=X.device)
    assert "at most 7 values per image" in backends.why_too_large(x)
    assert backends.why_too_large(x.to(memory_format=torch.channels_last)) == ""


@pytest.mark.parametrize(("p", "k"), [("range", None), (math.inf, None), (math.inf, 3)])
def test_the_groups_of_an_input_that_is_copied_are_those_of_the_copy(p, k):
    whole = torch.empty(1, 2, 130, 130, device=X.device)
    cropped, padded = whole[..., 1:, 1:], whole[..., :128]  # 129², which no group divides, and 130·128
    for input in (cropped, padded, whole, whole.to(memory_format=torch.channels_last)):
        copied = input if input.is_contiguous(memory_format=torch.channels_last) else input.contiguous()
        assert called.backend(input, p=p, k=k) == called.backend(copied, p=p, k=k)
    assert called.backend(cropped, p=p, k=k).name == "hand-derived"
    assert called.backend(padded, p=p, k=k).name == "triton"


def test_a_cpu_tensor_is_not_interpreted_unless_asked(monkeypatch):
    monkeypatch.setattr(backends, "INTERPRETED", False)
    assert called.backend(X.cpu()).name == ("hand-derived" if backends.NATIVE_MISSING else "cpu")
    assert dispatch.layer_norm_backend(X.cpu(), (4,), Norm()).name in ("cpu", "plain")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")  # torch.jit's own
@pytest.mark.parametrize("interpreted", [True, False], ids=["kernels", "equations"])
@pytest.mark.parametrize("norm", [L1BatchNorm1d(3), L1LayerNorm(4), L1RMSNorm(4)], ids=["batch", "layer", "rms"])
def test_a_traced_norm_is_saved_and_runs_without_this_library(norm, interpreted, monkeypatch):
    if not interpreted:
        monkeypatch.setattr(backends, "INTERPRETED", False)
    norm = norm.to(DEVICE)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(norm, X, check_trace=False), file)
    file.seek(0)
    assert torch.allclose(torch.jit.load(file)(2 * X), norm(2 * X), atol=1e-5)


def test_another_arithmetic_goes_before_everything():
    with precision.arithmetic("fp16"):
        assert called.backend(X).name == "arithmetic"
        assert dispatch.layer_norm_backend(X, (4,), Norm()).name == "arithmetic"
    assert called.backend(X).name == "triton"


@pytest.mark.parametrize(
    ("shape", "p", "k", "reason"),
    [((4,), 3.0, None, "p = 1 and p = 2"), ((4,), math.inf, 2, "p = 1 and p = 2"), ((1 << 20,), 1, None, "features")],
)
def test_layer_norm_reasons(shape, p, k, reason):
    x = torch.zeros(1, device=DEVICE).expand(2, *shape)
    backend = dispatch.layer_norm_backend(x, shape, Norm(p, k))
    assert backend.name == "plain"
    assert reason in backend.reason


def test_environment():
    """NORMMATTERS_KERNELS is read once; only "interpret" sends a CPU tensor to the kernels."""
    code = """
import importlib, os, torch
from normmatters.kernels import backends
for setting in "0", "interpret":
    os.environ["NORMMATTERS_KERNELS"] = setting  # too late
    print(*backends.batch_norm_backend(torch.ones(2, 3)))
    importlib.reload(backends)
    print(*backends.batch_norm_backend(torch.ones(2, 3)))
"""
    environment = os.environ | {"NORMMATTERS_KERNELS": "interpret", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    answers = done.stdout.splitlines()
    assert [answer.split()[0] for answer in answers] == ["triton", "hand-derived", "hand-derived", "triton"]
    assert ["NORMMATTERS_KERNELS=0" in answer for answer in answers] == [False, True, True, False]


def test_no_kernel_is_launched_where_they_are_switched_off():
    """Neither the optimizers' nor those of fused weight norms, which have no backend to ask for."""
    code = """
import normmatters
from normmatters.optim import channels
from normmatters.kernels import backends
print('cuda' in channels.BACKENDS, backends.TRITON_MISSING)
"""
    environment = os.environ | {"NORMMATTERS_KERNELS": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "False kernels are switched off by NORMMATTERS_KERNELS=0\n"


def test_triton_that_is_missing_is_said(monkeypatch):
    monkeypatch.delenv("NORMMATTERS_KERNELS", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert backends.find_triton() == "triton is not installed"


@pytest.mark.gpu
def test_a_fall_back_on_a_gpu_is_logged_once(caplog):
    backends.log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="normmatters.kernels"):
        for _ in range(3):
            called.batch_norm(X, None, None, None, None, True, 0.1, EPS, p=1.5)
            called.batch_norm(X, None, None, None, None, True, 0.1, EPS, p=1)
    assert [record.message for record in caplog.records] == [
        "batch norm falls back to hand-derived: "
        "there are kernels for p = 1, 2, inf, Top(k), range and mean-only, not for a general p"
    ]


class Wrapped(Tensor):
    """A tensor around another one, as DTensor is: with its shape and device, but without memory."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


def test_tensors_without_memory_take_the_equation():
    backend = called.backend(Wrapped(X))
    assert backend == ("plain", "a Wrapped has no memory of its own")
    y = called.batch_norm(Wrapped(X), None, None, None, None, True, 0.1, EPS)
    torch.testing.assert_close(y.inner, lp_batch_norm(X, training=True, eps=EPS))
    y = dispatch.layer_norm(Wrapped(X), [4], Norm(eps=EPS))
    torch.testing.assert_close(y.inner, lp_layer_norm(X, [4], eps=EPS))


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(("p", "k"), [*KINDS.values(), (1.5, None)])
def test_a_dtensor_takes_the_equation(one_process, p, k):
    """It does not mix with plain tensors, such as positions of extremes."""
    outputs = []
    whole = X.cpu().clone()
    for x in (whole, distribute_tensor(whole, one_process)):
        x.requires_grad_()
        y = called.batch_norm(x, None, None, None, None, True, 0.1, EPS, p=p, k=k, act="relu")
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        outputs.append([y, gradient])
    n = X.numel() // X.shape[1]
    for plain, distributed in zip(*outputs, strict=True):
        # relative, too: what the scale sends back falls on few elements, of L∞ on one
        rtol, atol = tolerances.statistic(torch.float32, n), tolerances.gradient(torch.float32, n)
        torch.testing.assert_close(distributed.full_tensor(), plain, rtol=rtol, atol=atol)


def test_a_fake_tensor_needs_no_mode_around_it():
    """It knows its own mode: models made under ``FakeTensorMode`` are called outside of it, too."""
    mode = FakeTensorMode()
    for made in (lambda: L1BatchNorm1d(3, device=DEVICE), lambda: L1LayerNorm(4, device=DEVICE)):
        with mode:
            norm, x = made(), torch.randn(X.shape, device=DEVICE, requires_grad=True)
        y = norm(x)
        y.sum().backward()
        assert (type(y), y.shape, x.grad.shape) == (FakeTensor, X.shape, X.shape)
    with pytest.raises(TypeError, match="the input is a plain Tensor, so all others must be, got a FakeTensor"):
        dispatch.layer_norm(X, [4], Norm(), norm.weight.detach())


def test_a_parameter_without_memory_is_refused():
    """A shard whose layer was not called by its hooks: a kernel would read at the address 0."""
    weight = Wrapped(torch.ones(3, device=DEVICE))
    mean = torch.zeros(3, device=DEVICE)
    with pytest.raises(TypeError, match="the input is a plain Tensor, so all others must be, got a Wrapped"):
        called.batch_norm(X, mean, None, weight, None, True, 0.1, EPS)
    with pytest.raises(TypeError, match="got a Wrapped"):
        called.pooled_batch_norm(X[..., None], mean, None, None, weight, True, 0.1, EPS, act="relu")
    with pytest.raises(TypeError, match="got a Wrapped"):
        dispatch.layer_norm(X, [4], Norm(), None, Wrapped(torch.ones(4, device=DEVICE)))
    assert (mean == 0).all()


# What falls back is right all the same -------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "k"), [(1.5, None), (math.inf, 66)])
def test_fall_back_computes_the_equation(p, k):
    x = torch.randn(70, 3, device=DEVICE)
    y = called.batch_norm(x, None, None, None, None, True, 0.1, EPS, p=p, k=k)
    expected = lp_batch_norm(x.double(), training=True, eps=EPS, p=p, k=k)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)


def test_empty_batch():
    mean, var = torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)
    x = X[:0].clone().requires_grad_()
    y = called.batch_norm(x, mean, var, None, None, True, 0.1, EPS)
    y.sum().backward()
    assert y.shape == (0, 3, 4)
    assert x.grad is not None
    assert (mean == 1).all()
    assert (var == 1).all()


def test_evaluation_uses_the_running_statistics():
    mean, var = torch.randn(3, device=DEVICE), torch.rand(3, device=DEVICE) + 0.5
    y = called.batch_norm(X, mean, var, None, None, False, 0.1, EPS)
    expected = torch.nn.functional.batch_norm(X, mean, var, training=False, eps=EPS)
    torch.testing.assert_close(y, expected)


def norm(x: Tensor) -> Tensor:
    return called.batch_norm(x, None, None, None, None, True, 0.1, EPS, p=1)


def test_function_transforms_take_the_equation():
    tangent = torch.randn_like(X)
    _, ours = torch.func.jvp(norm, (X,), (tangent,))
    _, expected = torch.func.jvp(lambda x: lp_batch_norm(x, training=True, eps=EPS), (X,), (tangent,))
    torch.testing.assert_close(ours, expected)
    stacked = torch.stack([X, 2 * X - 1])
    torch.testing.assert_close(torch.func.vmap(norm)(stacked), torch.stack([norm(x) for x in stacked]))
    weights = torch.randn_like(X)
    gradient = torch.func.grad(lambda x: (norm(x) * weights).sum())(X)
    x = X.clone().requires_grad_()
    norm(x).backward(weights)
    torch.testing.assert_close(gradient, x.grad, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_a_trace_takes_the_equation():
    traced = torch.jit.trace(norm, X, check_trace=False)
    torch.testing.assert_close(traced(2 * X - 1), norm(2 * X - 1), rtol=0, atol=1e-5)


def test_layer_and_rms_norm_agree_with_the_equation():
    weight = torch.rand(4, device=DEVICE)
    y = dispatch.layer_norm(X, (4,), Norm(eps=1e-3), weight)
    torch.testing.assert_close(y, lp_layer_norm(X, (4,), weight, None, 1e-3), rtol=0, atol=1e-5)
    assert dispatch.layer_norm_backend(X, (4,), Norm()) == ("triton", "")
    y = dispatch.rms_norm(X, (4,), Norm(2, eps=None), weight)
    expected = torch.nn.functional.rms_norm(X, (4,), weight)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)


# Errors, before anything has changed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"memory": "small"}, ValueError, "memory must be 'exact' or 'lean', got 'small'"),
        ({"act": "gelu"}, ValueError, "act must be None or 'relu', got 'gelu'"),
        ({"p": 0.5}, ValueError, "p"),
        ({"p": "l1"}, ValueError, "p"),
        ({"p": 1, "k": 3}, ValueError, "k"),
        ({"p": math.inf, "k": 25}, ValueError, r"Top\(k\) needs k <= the 24 values"),
        ({"constant": "gauss"}, ValueError, "constant"),
        ({"constant": -1.0}, ValueError, "constant"),
        ({"eps": -1e-5}, ValueError, "eps must not be negative"),
        ({"p": "mean"}, ValueError, "weight must be None"),
        ({"weight": torch.ones(4, device=DEVICE)}, ValueError, r"weight must have shape \(3,\).*got \(4,\)"),
        ({"bias": torch.ones(1, 3, device=DEVICE)}, ValueError, r"bias must have shape \(3,\)"),
        ({"residual": X[:3]}, ValueError, "residual must have the input's shape"),
        ({"residual": X.to("meta")}, ValueError, "must be on the input's device .* got one on meta"),
        ({"weight": torch.ones(3, device="meta")}, ValueError, "must be on the input's device .* got one on meta"),
        ({"input": X.long()}, TypeError, "floating-point dtype, got torch.int64"),
        ({"input": X[0, :, 0]}, ValueError, "a batch and a channel dimension"),
        ({"input": X[0, :, 0], "p": "range"}, ValueError, "a batch and a channel dimension"),
        ({"input": X[:1, :, :1]}, ValueError, "more than 1 value per channel"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_come_before_any_change(arguments, error, message):
    mean, var = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    call = {"input": X, "weight": torch.ones(3, device=DEVICE), "bias": None, "eps": EPS, **arguments}
    with pytest.raises(error, match=message):
        called.batch_norm(running_mean=mean, running_var=var, training=True, momentum=0.1, **call)
    assert (mean == 0).all()
    assert (var == 1).all()


@pytest.mark.parametrize("where", ["weight", "bias"])
def test_a_layer_norm_parameter_elsewhere_is_refused(where):
    """A kernel would read its address as one of the input's device."""
    tensors = {"weight": None, "bias": None, where: torch.ones(4, device="meta")}
    with pytest.raises(ValueError, match="must be on the input's device"):
        dispatch.layer_norm(X, [4], Norm(), **tensors)
