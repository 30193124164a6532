from __future__ import annotations

import math

import torch

from normmatters.bench import optim as bench
from normmatters.bench.harness import Setup

SMOKE = Setup(torch.device("cpu"), smoke=True)


def test_shapes_are_resnet50s():
    shapes = bench.resnet50_shapes()
    assert len(shapes) == 161
    assert sum(math.prod(shape) for shape in shapes.values()) == 25_557_032
    assert shapes["layers.15.conv3.weight"] == (2048, 512, 1, 1)


def test_smoke_times_every_optimizer_and_all_checks_pass():
    rows = list(bench.rows(SMOKE))
    assert [row["variant"] for row in rows] == list(bench.OPTIMIZERS)
    assert all(row["status"] == "ok" for row in rows), rows
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1.0
    for row in rows:
        assert row["added_ms"] == row["ms"] - rows[0]["ms"]
        assert row["ours"] == (
            "WeightDecayFree" in row["variant"] or "Angular" in row["variant"] or "+" in row["variant"]
        )


def test_parameters_are_the_same_each_time_and_nobody_elses():
    shapes = bench.resnet50_shapes(8, (1, 1), 10)
    first = bench.make_parameters(shapes, "cpu", torch.float32)
    values = {n: p.detach().clone() for n, p in first.items()}
    for p in first.values():
        p.data.zero_()
        p.grad.zero_()
    again = bench.make_parameters(shapes, "cpu", torch.float32)
    assert all(torch.equal(again[n], values[n]) and again[n].grad.abs().max() > 0 for n in shapes)


def test_a_wrong_optimizer_gets_no_number(monkeypatch):
    def build(named, graph):
        optimizer = torch.optim.SGD(named.values(), lr=0.1)

        def damage(*_):
            if named["fc.bias"].dtype == torch.float32:
                with torch.no_grad():
                    named["fc.bias"][0] += 1e-4

        optimizer.register_step_post_hook(damage)
        return optimizer

    monkeypatch.setattr(bench, "OPTIMIZERS", {"wrong": (build, False)})
    (row,) = bench.rows(SMOKE)
    assert not {"ms", "ratio"} & row.keys()
    assert row["status"] == "WRONG"
    assert row["note"].startswith("'fc.bias' is off by 0.0003")


def test_an_optimizer_that_fails_does_not_take_the_others_with_it(monkeypatch):
    def broken(named, graph):
        raise RuntimeError("no such kernel")

    base = bench.OPTIMIZERS[bench.BASE]
    monkeypatch.setattr(bench, "OPTIMIZERS", {"broken": (broken, False), bench.BASE: base})
    rows = list(bench.rows(SMOKE))
    assert [row["status"] for row in rows] == ["failed", "ok"]
    assert rows[0]["note"] == "RuntimeError: no such kernel"
