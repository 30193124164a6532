"""Bad input: an error that says what was expected and what came, before the running statistics are touched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from normmatters.functional import lp_batch_norm
from normmatters.norm import check_memory
from support import called

X = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": torch.randn(4)}, ValueError, r"got shape \(4,\)"),
    ({"input": torch.randn(4, 5, 2)}, ValueError, r"running_mean must have shape \(5,\)"),
    ({"weight": torch.ones(2)}, ValueError, r"weight must have shape \(3,\).*got \(2,\)"),
    ({"bias": torch.ones(3, 1)}, ValueError, r"bias must have shape \(3,\)"),
    ({"input": torch.randn(1, 3)}, ValueError, "more than 1 value per channel"),
    ({"input": torch.randn(1, 3, 1, 1)}, ValueError, "more than 1 value per channel"),
    ({"input": torch.ones(4, 3, 2, dtype=torch.long)}, TypeError, "floating-point dtype, got torch.int64"),
    ({"input": torch.ones(4, 3, 2, dtype=torch.complex64)}, TypeError, "floating-point dtype, got torch.complex64"),
    (
        {"residual": torch.randn(4, 3, 1)},
        ValueError,
        r"residual must have the input's shape \(4, 3, 2\), got \(4, 3, 1\)",
    ),
    ({"residual": torch.ones(4, 3, 2, dtype=torch.int)}, TypeError, "residual must have a real floating-point"),
    ({"input": X.to(torch.float8_e5m2)}, TypeError, "input must have .* 16 bits or more, got torch.float8_e5m2"),
    ({"p": 2, "residual": X.to(torch.float8_e5m2)}, TypeError, "residual must have .* 16 bits or more"),
    ({"p": 2, "residual": X.to("meta")}, ValueError, "residual must be on the input's device cpu, got one on meta"),
    ({"weight": torch.ones(3, device="meta")}, ValueError, "weight must be on the input's device cpu"),
    ({"running_var": torch.ones(3, device="meta")}, ValueError, "running_var must be on the input's device cpu"),
    ({"p": 0.5}, ValueError, "p must be at least 1"),
    ({"p": math.inf, "k": 9}, ValueError, "k <= the 8 values per channel.*got k=9"),
    ({"p": 1, "k": 2}, ValueError, "needs p=math.inf"),
    ({"p": "mean", "weight": torch.ones(3)}, ValueError, "weight must be None"),
    ({"constant": "approximate"}, ValueError, "constant must be 'exact', 'paper', 'none' or a positive number"),
    ({"constant": -1.0}, ValueError, "positive and finite"),
    ({"p": 3.0, "constant": "paper"}, ValueError, "exact"),
    ({"act": "gelu"}, ValueError, "act must be None or 'relu', got 'gelu'"),
    ({"eps": -1e-5}, ValueError, "eps must not be negative"),
    ({"eps": math.nan}, ValueError, "eps must not be .* NaN, got nan"),
    ({"eps": math.inf}, ValueError, "eps must not be .* infinite .*, got inf"),
]


@pytest.mark.parametrize("function", [lp_batch_norm, called.batch_norm])
@pytest.mark.parametrize(("change", "error", "message"), CASES)
def test_bad_input_changes_nothing(function, change: dict[str, Any], error: type[Exception], message: str) -> None:
    mean, var = torch.randn(3), torch.rand(3)
    arguments = {"input": X, "running_mean": mean, "running_var": var, "training": True}
    before = mean.clone(), var.clone()
    with pytest.raises(error, match=message):
        function(**(arguments | change))
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])


def test_only_tensors() -> None:
    with pytest.raises(TypeError, match="input must be a Tensor, got list"):
        lp_batch_norm([[1.0]], training=True)  # type: ignore[arg-type]


def test_evaluation_needs_statistics() -> None:
    with pytest.raises(ValueError, match="needed when not training"):
        lp_batch_norm(X, None, None)


def test_memory_names() -> None:
    check_memory("lean")
    with pytest.raises(ValueError, match="memory must be 'exact' or 'lean', got 'small'"):
        check_memory("small")
