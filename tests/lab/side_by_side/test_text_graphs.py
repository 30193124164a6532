"""Translation in CUDA graphs: batches of few shapes that give the same numbers, and dropout that belongs to its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normmatters.lab.config import DataConfig, ModelConfig, RunConfig, from_dict
from normmatters.lab.data import Shard, TextData, load_data, text
from normmatters.lab.data.text import EOS, PAD, TextLoader
from normmatters.lab.models import build_text_model
from normmatters.lab.models.layers import Dropout, draw_from
from normmatters.lab.models.transformer import Attention
from normmatters.lab.objective import Translation
from normmatters.lab.plan import PlannedRun
from normmatters.lab.run import train
from normmatters.lab.runner import Runner
from support.fake_graphs import FakeExecution, FakeGraphs, train_with_fakes
from support.lab_runs import rows

CPU = torch.device("cpu")


def _loaders(count: int = 300, tokens: int = 128) -> tuple[TextLoader, TextLoader]:
    """The same batches, plain and filled up."""
    generator = np.random.default_rng(0)
    pairs = [([i + 3] * generator.integers(1, 30), [i + 3] * generator.integers(1, 30)) for i in range(count)]
    plain, filled = (TextLoader(pairs, tokens, 0, Shard(), CPU) for _ in range(2))
    filled.few_shapes()
    return plain, filled


def test_few_shapes_hold_the_same_batches() -> None:
    plain, filled = _loaders()
    assert len(filled.shapes) <= 8
    seen = set()
    for epoch in (0, 1):
        for batch, full in zip(plain.epoch(epoch), filled.epoch(epoch), strict=True):
            n, width = len(batch.source), full.source.shape[1]
            assert {t.shape for t in full[:3]} == {(filled.shapes[width], width)}  # type: ignore[union-attr]
            seen.add(width)
            for part, wide in zip(batch[:3], full[:3]):
                assert isinstance(part, Tensor)
                assert isinstance(wide, Tensor)
                assert torch.equal(wide[:n, : part.shape[1]], part)
                assert not wide[:n, part.shape[1] :].any()
            assert (full.source[n:, 0] == EOS).all()
            assert not full.source[n:, 1:].any()
            assert not full.target_in[n:].any()
            assert not full.target_out[n:].any()
            assert full.tokens is None
            assert batch.tokens == int((full.target_out != PAD).sum())
    assert seen == set(filled.shapes)
    assert next(iter(filled)).tokens is not None  # evaluation is eager
    with pytest.raises(ValueError, match="2 processes"):
        TextLoader([([3], [3])], 8, 0, Shard(0, 2), CPU).few_shapes()


@pytest.mark.parametrize("name", ["lstm", "transformer"])
@pytest.mark.parametrize(
    "options", [{"layer_norm": "l2"}, {"layer_norm": "l1"}, {"layer_norm": "none", "weight_norm": "bwn"}]
)
def test_filling_up_changes_no_loss_and_no_gradient(name: str, options: dict[str, str]) -> None:
    sizes = {} if name == "lstm" else {"heads": 2, "d_ff": 16}
    config = ModelConfig(name, d_model=8, layers=2, dropout=0.0, **sizes, **options)  # type: ignore[arg-type]
    plain, filled = _loaders(60, 200)
    model = build_text_model(config, 70, 30).double()
    objective = Translation(None, 0.1, Shard())  # type: ignore[arg-type]
    for batch, full in list(zip(plain.epoch(0), filled.epoch(0)))[:2]:
        assert full.source.shape != batch.source.shape
        found = []
        for b in (batch, full):
            model.zero_grad()
            loss, sums = objective.measure(model, b, smooth=True)
            loss.backward()
            found.append((loss.detach(), sums, [p.grad for p in model.parameters()]))
        assert found[1][0].dtype == torch.float64
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_dropout_draws_from_its_generator_only() -> None:
    drop, x = Dropout(0.25), torch.randn(400, 50, requires_grad=True)
    draw_from(nn.Sequential(drop), torch.Generator().manual_seed(5))
    before = torch.get_rng_state()
    y = drop(x)
    assert torch.equal(torch.get_rng_state(), before)
    kept = y != 0
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, kept / 0.75)
    assert not torch.equal(drop(x), y)
    draw_from(drop, torch.Generator().manual_seed(5))
    assert torch.equal(drop(x), y)
    assert drop.eval()(x) is x
    draw_from(drop.train(), None)
    torch.manual_seed(3)
    want = F.dropout(x, 0.25)
    torch.manual_seed(3)
    assert torch.equal(drop(x), want)


def test_half_precision_does_not_round_the_factor() -> None:
    drop = Dropout(0.1)
    draw_from(drop, torch.Generator().manual_seed(0))
    y = drop(torch.full((1000,), 9.0, dtype=torch.bfloat16))
    assert set(y.tolist()) == {0.0, 10.0}


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout_is_torchs(causal: bool) -> None:
    """With hardly any dropout it is torch's attention; with much of it that is still its mean."""
    attention = Attention(8, 2, dropout=1e-15).double()
    x, mask = torch.randn(3, 5, 8, dtype=torch.float64), torch.ones(3, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., 3:] = False
    options: dict[str, Any] = {"causal": True} if causal else {"mask": mask}
    kv = attention.keys_values(x)
    want = attention.eval()(x, kv, **options)
    torch.testing.assert_close(attention.train()(x, kv, **options), want, rtol=1e-9, atol=1e-9)

    attention.drop.p = 0.3
    draw_from(attention, torch.Generator().manual_seed(0))
    many = {k: v.repeat(2000, 1, 1, 1) if isinstance(v, Tensor) else v for k, v in options.items()}
    found = attention(x.repeat(2000, 1, 1), tuple(t.repeat(2000, 1, 1, 1) for t in kv), **many)
    assert not torch.equal(found[:3], found[3:6])
    torch.testing.assert_close(found.unflatten(0, (2000, 3)).mean(0), want, rtol=0, atol=0.03)


def _run(
    name: str, compile: str = "cudagraph", dropout: float = 0.0, device: str = "cpu", **sections: Any
) -> RunConfig:
    """Three epochs of about ten steps."""
    sizes = {"d_model": 16, "layers": 1} | ({} if name == "lstm" else {"heads": 2, "d_ff": 32})
    base: dict[str, dict[str, Any]] = {
        "data": {"name": "numbers", "vocab_size": 60, "tokens": 300, "train_size": 120, "val_size": 20},
        "model": {"name": name, "dropout": dropout, **sizes},
        "optim": {"name": "adam", "lr": 1e-2, "milestones": [2], "epochs": 3, "clip_norm": 5.0, "label_smoothing": 0.1},
        "precision": {"tf32": False},
        "runtime": {"compile": compile, "bleu": "none", "checkpoint_seconds": 0.0, "device": device, "threads": 1},
    }
    tables = {k: {**base.get(k, {}), **v} for k, v in sections.items() if isinstance(v, dict)}
    return from_dict({**base, **tables, "cell": name})


def _losses(folder: Path) -> list[tuple[float, float]]:
    return [(row["train_loss"], row["val_loss"]) for row in rows(folder)]


@pytest.mark.parametrize("inside", [False, True], ids=["optimizer outside", "optimizer inside"])
@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_graphs_of_several_shapes_take_the_eager_steps(
    name: str, inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeGraphs, "recorded", [])
    train(_run(name, "none"), tmp_path / "eager")
    config = _run(name, runtime={"compile": "cudagraph", "record": "none", "device": "cpu"})
    train(config, tmp_path / "graphs", execution=FakeExecution(capturable=inside))
    assert len(FakeGraphs.recorded) >= 3
    for found, want in zip(_losses(tmp_path / "graphs"), _losses(tmp_path / "eager"), strict=True):
        assert found == pytest.approx(want, rel=1e-4)


def _stop(event: dict[str, Any]) -> None:
    if event.get("epoch") == 2 and "val_loss" in event:
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_a_run_with_dropout_resumes_as_if_uninterrupted(name: str, tmp_path: Path) -> None:
    config = _run(name, dropout=0.3)
    train_with_fakes(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train_with_fakes(config, tmp_path / "broken", progress=_stop)
    train_with_fakes(config, tmp_path / "broken")
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    train_with_fakes(_run(name), tmp_path / "none")
    assert _losses(tmp_path / "none") != _losses(tmp_path / "whole")  # there was dropout


def test_text_is_encoded_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = []
    make = text.make_tokenizer

    def counted(*args: Any) -> Any:
        learned.append(args[2])
        return make(*args)

    monkeypatch.setattr(text, "make_tokenizer", counted)
    text._encode.cache_clear()
    config = DataConfig(name="numbers", vocab_size=110, train_size=100, val_size=10)
    for name in ("a", "b", "a"):
        (tmp_path / name).mkdir(exist_ok=True)
        data = load_data(config, seed=len(learned), cache=tmp_path / name)
        assert isinstance(data, TextData)
    written = {(tmp_path / name / "tokenizer.json").read_text() for name in ("a", "b")}
    assert len(written) == 1
    assert learned == [None, *written]  # learned once; then read, by a run that goes on


GPU = pytest.mark.gpu


@GPU
@pytest.mark.parametrize("amp", ["none", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_on_a_gpu_graphs_take_the_eager_steps(name: str, amp: str, tmp_path: Path) -> None:
    precision = {"amp": amp, "tf32": False}
    for mode in ("none", "cudagraph"):
        train(_run(name, mode, device="cuda", precision=precision), tmp_path / mode)
    for found, want in zip(_losses(tmp_path / "cudagraph"), _losses(tmp_path / "none"), strict=True):
        assert found == pytest.approx(want, rel=2e-3 if amp == "none" else 2e-2)


@GPU
@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_on_a_gpu_an_eager_optimizer_has_the_gradients_of_its_graph(name: str, tmp_path: Path) -> None:
    for mode in ("none", "cudagraph"):
        runtime = {"compile": mode, "device": "cuda", "record": "step", "bleu": "none", "threads": 1}
        train(_run(name, runtime=runtime), tmp_path / mode)
    for found, want in zip(_losses(tmp_path / "cudagraph"), _losses(tmp_path / "none"), strict=True):
        assert found == pytest.approx(want, rel=2e-3)


@GPU
@pytest.mark.parametrize("norm", [{"layer_norm": "l1"}, {"layer_norm": "none", "weight_norm": "bwn"}])
def test_on_a_gpu_runs_share_it_and_each_has_its_own_dropout(norm: dict[str, str], tmp_path: Path) -> None:
    def jobs(out: str, count: int) -> list[PlannedRun]:
        found = []
        for name in ("lstm", "transformer"):
            sizes = {"d_model": 16, "layers": 1} | ({} if name == "lstm" else {"heads": 2, "d_ff": 32})
            model = {"name": name, "dropout": 0.3, **sizes, **norm}
            runtime = {"device": "cuda", "compile": "cudagraph", "bleu": "epoch", "threads": 1}
            config = _run(name, model=model, runtime=runtime)
            found += [PlannedRun(f"text/{name}", config, tmp_path / out / f"{name}{i}", None) for i in range(count)]
        return found

    for out, count, workers in (("beside", 3, 6), ("alone", 1, 1)):
        started = jobs(out, count)
        assert Runner(started, workers=workers).run() == [], [j.reason for j in started]
    for name in ("lstm", "transformer"):
        alone = _losses(tmp_path / "alone" / f"{name}0")
        for i in range(3):
            for found, want in zip(_losses(tmp_path / "beside" / f"{name}{i}"), alone, strict=True):
                assert found == pytest.approx(want, rel=5e-3), (name, i)


@GPU
@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_on_a_gpu_a_run_with_dropout_resumes(name: str, tmp_path: Path) -> None:
    config = _run(name, dropout=0.3, device="cuda")
    train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "broken", progress=_stop)
    train(config, tmp_path / "broken")
    for found, want in zip(_losses(tmp_path / "broken"), _losses(tmp_path / "whole"), strict=True):
        assert found == pytest.approx(want, rel=5e-3)
