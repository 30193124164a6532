"""Beam search, batched on the device, and BLEU by sacrebleu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from normmatters.lab.data.text import BOS, EOS, PAD, TextData
from normmatters.lab.models.layers import Translator


def length_penalty(length: int | Tensor, alpha: float) -> Any:
    """((5 + length)/6)^α, by which a translation's log probability is divided."""
    return ((5 + length) / 6) ** alpha


@torch.no_grad()
def beam_search(
    model: Translator,
    source: Tensor,
    *,
    beam: int = 4,
    alpha: float = 0.6,
    max_length: int = 100,
    before_token: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """The best translation of each sentence.

    Every hypothesis that ends (with EOS) competes by log probability over length penalty, EOS counted in its length;
    ``beam`` unfinished ones continue. A sentence is done when none of them can overtake its best finished ones.

    Args:
        source: (n, S) token ids, padded.
        before_token: called before each token is decoded.

    Returns:
        Token ids (n, L) without BOS, EOS and what follows replaced by PAD, and scores (n,). A sentence with no
        finished hypothesis within ``max_length`` tokens gives its best unfinished one.
    """
    n, device = len(source), source.device
    state = pytree.tree_map(lambda t: t.repeat_interleave(beam, 0), model.begin(source))
    tokens = torch.full((n, beam, 1), BOS, device=device)
    alive = torch.full((n, beam), float("-inf"), device=device)
    alive[:, 0] = 0.0  # all beams start equal: one of them is enough
    best = torch.full((n, max_length), PAD, device=device)
    best_score = torch.full((n,), float("-inf"), device=device)
    first = torch.arange(n, device=device)[:, None] * beam
    for length in range(1, max_length + 1):
        before_token()
        logits, state = model.step(tokens[:, :, -1].flatten(), state)
        log_p = logits.float().log_softmax(-1)
        log_p[:, PAD] = log_p[:, BOS] = float("-inf")
        total = alive[:, :, None] + log_p.view(n, beam, -1)
        # ended hypotheses: the best of the beams' own ends
        ended, which = total[:, :, EOS].max(1)
        score = ended / length_penalty(length, alpha)
        better = score > best_score
        prefix = tokens.gather(1, which[:, None, None].expand(-1, 1, length))[:, 0, 1:]
        row = torch.full_like(best, PAD)
        row[:, : length - 1] = prefix
        best = torch.where(better[:, None], row, best)
        best_score = torch.where(better, score, best_score)
        # those that continue
        total[:, :, EOS] = float("-inf")
        vocabulary = total.shape[2]
        alive, flat = total.flatten(1).topk(beam, dim=1)
        parent, token = flat // vocabulary, flat % vocabulary
        tokens = torch.cat([tokens.gather(1, parent[:, :, None].expand(-1, -1, length)), token[:, :, None]], 2)
        rows = (first + parent).flatten()
        state = pytree.tree_map(lambda t, rows=rows: t.index_select(0, rows), state)
        # log p only falls: a beam's best hope is to end where the penalty divides most, after max_length tokens, or
        # (α < 0) at once
        hope = alive[:, 0] / max(length_penalty(length + 1, alpha), length_penalty(max_length, alpha))
        if length % 4 == 0 and bool((best_score >= hope).all()):
            break
    unfinished = best_score.isinf()
    if bool(unfinished.any()):
        whole = torch.full_like(best, PAD)
        whole[:, : tokens.shape[2] - 1] = tokens[:, 0, 1:]
        best = torch.where(unfinished[:, None], whole, best)
        best_score = torch.where(unfinished, alive[:, 0] / length_penalty(max_length, alpha), best_score)
    return best, best_score


def bleu(hypotheses: list[str], references: list[str]) -> float:
    """sacrebleu's corpus BLEU with its defaults."""
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} translations for {len(references)} references")
    try:
        import sacrebleu
    except ImportError:
        raise ValueError("BLEU needs sacrebleu: pip install sacrebleu") from None
    return float(sacrebleu.corpus_bleu(hypotheses, [references]).score)


def translate(
    model: Translator,
    data: TextData,
    device: torch.device,
    *,
    beam: int = 4,
    alpha: float = 0.6,
    tokens: int = 2048,
    before_token: Callable[[], None] = lambda: None,
) -> list[str]:
    """The test set's translations, in its order; sentences of like length are decoded together."""
    sources = data.test_sources
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    result = [""] * len(sources)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and (stop + 1 - start) * (len(sources[order[stop]]) + 1) <= tokens:
            stop += 1
        stop = max(stop, start + 1)
        rows = [sources[i] for i in order[start:stop]]
        width = max(len(r) for r in rows) + 1
        source = torch.tensor([[*r, EOS] + [PAD] * (width - 1 - len(r)) for r in rows], device=device)
        limit = min(2 * width + 10, data.max_length + 50)
        best, _ = beam_search(model, source, beam=beam, alpha=alpha, max_length=limit, before_token=before_token)
        for i, ids in zip(order[start:stop], best.tolist()):
            result[i] = data.decode(ids)
        start = stop
    return result
