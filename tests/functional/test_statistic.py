"""Which statistic p and k name, and which number the constant is."""

from __future__ import annotations

import math

import pytest
import torch

from normmatters.constants import gaussian_scale
from normmatters.functional.statistic import hypotenuse, scale_and_divisor
from normmatters.norm import Norm, compute_dtype


@pytest.mark.parametrize(
    ("p", "k", "error", "message"),
    [
        (0.99, None, ValueError, "at least 1, got 0.99"),
        (-math.inf, None, ValueError, "at least 1"),
        (math.nan, None, ValueError, "at least 1, got nan"),
        ("l1", None, ValueError, "got 'l1'"),
        (True, None, TypeError, "got True"),
        (None, None, TypeError, "got None"),
        (1, 10, ValueError, r"needs p=math\.inf, got p=1"),
        ("range", 10, ValueError, r"needs p=math\.inf"),
        (math.inf, 0, ValueError, "k must be at least 1, got 0"),
        (math.inf, 2.0, TypeError, "k must be an int"),
    ],
)
def test_what_is_no_kind(p, k, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Norm(p, k)


def test_constants() -> None:
    assert Norm(1).scale_constant(50) == gaussian_scale(1, 50)
    assert Norm(math.inf).scale_constant(50) == gaussian_scale(math.inf, 50)
    assert Norm(math.inf, 5, "paper").scale_constant(50) == gaussian_scale(math.inf, 50, 5, "paper")
    assert Norm("range", constant=0.5).scale_constant(50) == 0.5 * gaussian_scale("range", 50)
    assert Norm("range", constant="none").scale_constant(50) == 1.0
    assert Norm("mean").scale_constant(50) == 1.0
    assert math.isfinite(Norm(math.inf).scale_constant(1))  # one feature deviates by 0, whatever the constant


@pytest.mark.parametrize(
    ("constant", "error"),
    [("Exact", ValueError), (0, ValueError), (-1.0, ValueError), (math.inf, ValueError), (math.nan, ValueError)]
    + [(None, TypeError), (True, TypeError)],
)
def test_what_is_no_constant(constant, error: type[Exception]) -> None:
    with pytest.raises(error, match="constant"):
        Norm(1, constant=constant)


def test_the_paper_has_no_constant_for_other_norms() -> None:
    with pytest.raises(ValueError, match="exact"):
        Norm(1.5, constant="paper")


def test_a_high_power_neither_over_nor_underflows() -> None:
    """(mean |x|^60)^(1/60) of 1e-8 and of 1e8 in float32, where the powers themselves are 0 and inf."""
    for size in (1e-8, 1e8):
        x = torch.tensor([[-size, size / 2, size / 2]], requires_grad=True)
        square, _ = scale_and_divisor(x, [1], Norm(60.0), 1.0, 0.0)
        (dx,) = torch.autograd.grad(square, x)
        assert square.item() == pytest.approx((size * 3 ** (-1 / 60)) ** 2, rel=1e-5)
        assert dx[0, 0].item() == pytest.approx(2 * -size * 3 ** (-1 / 30), rel=1e-5)


def test_compute_dtype() -> None:
    assert compute_dtype(torch.float64) == torch.float64
    assert {compute_dtype(d) for d in (torch.float32, torch.float16, torch.bfloat16)} == {torch.float32}


def test_the_exported_hypotenuse_is_the_hypotenuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX has no hypot, so an exported program computes it in another way."""
    s = torch.tensor([0.0, 1e-20, 3e-3, 1.0, 7.0, 1e30], dtype=torch.float32, requires_grad=True)
    results = []
    for exporting in (False, True):
        monkeypatch.setattr(torch.compiler, "is_exporting", lambda exporting=exporting: exporting)
        value = hypotenuse(s, 1e-5)
        results.append([value.detach(), *torch.autograd.grad(value.sum(), s)])
    for plain, exported in zip(*results):
        torch.testing.assert_close(exported, plain, rtol=8 * torch.finfo(torch.float32).eps, atol=0)
