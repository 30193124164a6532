"""Beam search against brute force, BLEU against sacrebleu's own, and a translator that learns."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
from torch import Tensor, nn

from normmatters.lab.config import DataConfig, ModelConfig, from_dict
from normmatters.lab.data import TextData, load_data
from normmatters.lab.data.text import BOS, EOS, PAD
from normmatters.lab.models import build_text_model
from normmatters.lab.models.layers import Translator
from normmatters.lab.run import train
from normmatters.lab.translate import beam_search, bleu, length_penalty, translate

WORDS = [3, 4, 5]  # the toy's vocabulary, after PAD, BOS and EOS


class Toy(Translator):
    """Next-token logits from a table by (sentence, position, previous token): every decision matters."""

    def __init__(self, sentences: int, length: int, sharpness: float) -> None:
        super().__init__()
        self.table = nn.Parameter(sharpness * torch.randn(sentences, length, 6, 6, dtype=torch.float64))

    def begin(self, source: Tensor) -> dict[str, Any]:
        return {"sentence": source[:, 0], "position": torch.zeros_like(source[:, 0])}

    def step(self, tokens: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        logits = self.table[state["sentence"], state["position"], tokens]
        return logits.float(), {**state, "position": state["position"] + 1}


def log_p(model: Toy, sentence: int, tokens: list[int]) -> float:
    total = 0.0
    for position, (before, now) in enumerate(zip([BOS, *tokens], tokens)):
        total += float(model.table[sentence, position, before].detach().float().log_softmax(0)[now])
    return total


def brute_force(model: Toy, sentence: int, length: int, alpha: float) -> tuple[list[int], float]:
    candidates = [[*w, EOS] for n in range(length) for w in itertools.product(WORDS, repeat=n)]
    scored = [(log_p(model, sentence, c) / length_penalty(len(c), alpha), c) for c in candidates]
    score, best = max(scored)
    return best[:-1], score


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_wide_beam_finds_the_best_of_all(alpha: float) -> None:
    length = 4
    model = Toy(8, length, sharpness=2.0)
    found, scores = beam_search(model, torch.arange(8)[:, None], beam=27, alpha=alpha, max_length=length)
    for sentence in range(8):
        want, score = brute_force(model, sentence, length, alpha)
        assert [t for t in found[sentence].tolist() if t != PAD] == want
        assert scores[sentence].item() == pytest.approx(score, abs=1e-5)


def test_beam_of_one_is_greedy_until_its_first_end_pays() -> None:
    """With α = 0 nothing is gained by going on: the result of beam 1 is a prefix of the greedy path, scored right."""
    model = Toy(6, 5, sharpness=1.0)
    found, scores = beam_search(model, torch.arange(6)[:, None], beam=1, alpha=0.0, max_length=5)
    for sentence in range(6):
        greedy, ends = [], []
        for position in range(5):
            row = model.table[sentence, position, (greedy or [BOS])[-1]].detach().float().log_softmax(0)
            ends.append(log_p(model, sentence, greedy) + float(row[EOS]))
            greedy.append(max(WORDS, key=lambda w, row=row: float(row[w])))
        best = max(range(5), key=lambda i: ends[i])
        assert [t for t in found[sentence].tolist() if t != PAD] == greedy[:best]
        assert scores[sentence].item() == pytest.approx(ends[best], abs=1e-5)


def test_narrow_beam_scores_what_it_returns_and_never_beats_the_best() -> None:
    model = Toy(10, 4, sharpness=3.0)
    found, scores = beam_search(model, torch.arange(10)[:, None], beam=2, alpha=0.6, max_length=4)
    for sentence in range(10):
        tokens = [t for t in found[sentence].tolist() if t != PAD]
        own = log_p(model, sentence, [*tokens, EOS]) / length_penalty(len(tokens) + 1, 0.6)
        assert scores[sentence].item() == pytest.approx(own, abs=1e-5)
        assert own <= brute_force(model, sentence, 4, 0.6)[1] + 1e-6


def test_a_penalty_on_length_stops_no_search_too_soon() -> None:
    """With α < 0 a beam's hope is its next end, not the longest."""
    model = Toy(1, 50, sharpness=0.0)
    with torch.no_grad():
        model.table[..., EOS] = -10.0
        model.table[..., 4] = 1.0
        model.table[:, 4, :, EOS] = 20.0
    found, scores = beam_search(model, torch.zeros(1, 1, dtype=torch.int64), alpha=-1.0, max_length=50)
    want = [4, 4, 4, 4, EOS]
    assert [t for t in found[0].tolist() if t != PAD] == want[:-1]
    assert scores.item() == pytest.approx(log_p(model, 0, want) / length_penalty(5, -1.0), abs=1e-5)


def test_a_sentence_that_never_ends_is_cut() -> None:
    model = Toy(1, 3, sharpness=0.0)
    with torch.no_grad():
        model.table[..., EOS] = -torch.inf
        model.table[..., 4] = 5.0
    found, scores = beam_search(model, torch.zeros(1, 1, dtype=torch.int64), beam=2, max_length=3)
    assert found.tolist() == [[4, 4, 4]]
    assert scores.isfinite().all()


def test_batch_does_not_change_a_translation() -> None:
    data = load_data(DataConfig(name="numbers", vocab_size=100, train_size=100, val_size=12))
    assert isinstance(data, TextData)
    config = ModelConfig("transformer", d_model=16, layers=1, heads=2, d_ff=16)
    model = build_text_model(config, data.vocab_size, data.max_length).eval()
    together = translate(model, data, torch.device("cpu"), tokens=10_000)
    alone = translate(model, data, torch.device("cpu"), tokens=1)
    assert together == alone


def test_bleu_is_sacrebleus() -> None:
    references = ["the cat sat on the mat .", "two dogs run", "nineteen hundred"]
    hypotheses = ["the cat sat on a mat .", "two dogs run", "nineteen"]
    assert bleu(hypotheses, references) == sacrebleu.BLEU().corpus_score(hypotheses, [references]).score
    assert bleu(references, references) == pytest.approx(100)
    with pytest.raises(ValueError, match="2 translations for 3 references"):
        bleu(hypotheses[:2], references)


def test_a_small_transformer_learns_to_count(tmp_path: Path) -> None:
    config = from_dict(
        {
            "data": {"name": "numbers", "vocab_size": 100, "tokens": 800, "train_size": 1500, "val_size": 60},
            "model": {"name": "transformer", "d_model": 48, "layers": 1, "heads": 4, "d_ff": 96, "dropout": 0.0},
            "optim": {"name": "adam", "lr": 5e-3, "schedule": "warmup_sqrt", "warmup_steps": 40, "epochs": 7},
        }
    )
    result = train(config, tmp_path / "run")
    assert result.metrics["val_ppl"] < 2
    assert result.metrics["bleu"] > 40
    assert (tmp_path / "run" / "tokenizer.json").is_file()
