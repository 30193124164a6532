"""`Norm` is checked when it is built, and is what its arguments say."""

from __future__ import annotations

import math

import pytest
import torch

from normmatters.constants import gaussian_scale
from normmatters.norm import NAMES, Norm, RunningStats


@pytest.mark.parametrize(
    ("p", "k", "kind", "selected"),
    [
        (1, None, "l1", 0),
        (1.0, None, "l1", 0),
        (2, None, "l2", 0),
        (1.5, None, "lp", 0),
        (math.inf, None, "linf", 1),
        (math.inf, 10, "topk", 10),
        ("range", None, "range", 2),
        ("mean", None, "mean", 0),
    ],
)
def test_kind_follows_from_p_and_k(p, k, kind, selected):
    norm = Norm(p, k)
    assert (norm.kind, norm.selected) == (kind, selected)
    assert norm == Norm(p, k)
    assert hash(norm) == hash(Norm(p, k))


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"p": 0.5}, ValueError, "p must"),
        ({"p": math.nan}, ValueError, "p must"),
        ({"p": True}, TypeError, "p must"),
        ({"p": "l1"}, ValueError, "p must"),
        ({"p": 1, "k": 3}, ValueError, "k=3"),
        ({"p": math.inf, "k": 0}, ValueError, "k must"),
        ({"p": math.inf, "k": 2.0}, TypeError, "k must"),
        ({"p": "range", "k": 2}, ValueError, "k=2"),
        ({"constant": "other"}, ValueError, "constant"),
        ({"constant": -1.0}, ValueError, "constant"),
        ({"constant": True}, TypeError, "constant"),
        ({"eps": -1e-5}, ValueError, "eps"),
        ({"eps": math.nan}, ValueError, "eps"),
        ({"memory": "none"}, ValueError, "memory"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, named):
    with pytest.raises(error, match=named):
        Norm(**arguments)


def test_mean_only_has_no_eps_and_no_constant():
    norm = Norm("mean", eps=1e-3)
    assert norm.eps == 0.0
    assert norm.scale_constant(7) == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_named_norms(name):
    norm = Norm.named(name, k=7)
    assert norm.kind == name
    assert norm.k == (7 if name == "topk" else None)


def test_a_misspelt_name_is_answered_with_a_near_one():
    with pytest.raises(ValueError, match=r"layer_norm must be one of .* did you mean 'topk'"):
        Norm.named("top_k", argument="layer_norm")
    with pytest.raises(TypeError, match="norm must"):
        Norm.named(None)  # type: ignore[arg-type]


def test_scale_constants():
    assert Norm(1).scale_constant(64) == pytest.approx(math.sqrt(math.pi / 2))
    assert Norm(1, constant=4.0).scale_constant(64) == pytest.approx(4 * math.sqrt(math.pi / 2))
    assert Norm(1, constant="none").scale_constant(64) == 1.0
    assert Norm(math.inf, 3).scale_constant(60) == gaussian_scale(math.inf, 60, 3, "exact")
    assert Norm("range").scale_constant(1) == gaussian_scale("range", 2, None, "exact")


def test_epsilon_none_is_the_compute_dtypes():
    assert Norm(eps=None).epsilon(torch.float16) == torch.finfo(torch.float32).eps
    assert Norm(eps=None).epsilon(torch.float64) == torch.finfo(torch.float64).eps
    assert Norm(eps=1e-3).epsilon(torch.float64) == 1e-3


def test_running_stats_default_to_nothing():
    assert RunningStats() == (None, None, None, 0.1)
