"""Parallel text: aligned files, one joint byte-level BPE (by ``tokenizers``), batches of about equal size in tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normmatters.lab.config import DataConfig
from normmatters.lab.data import numerals
from normmatters.lab.data.images import Shard

PAD, BOS, EOS = 0, 1, 2
_SPECIAL = ["<pad>", "<s>", "</s>"]
Pairs = tuple[list[str], list[str]]


@dataclass(frozen=True)
class TextBatch:
    """``source`` (n, S) ends with EOS; ``target_in`` (n, T) starts with BOS, ``target_out`` (n, T) ends with EOS.

    The rest is PAD. ``tokens`` counts the target tokens of the whole batch, over all processes.
    """

    source: Tensor
    target_in: Tensor
    target_out: Tensor
    tokens: int


def read_pairs(folder: Path, split: str, source: str, target: str) -> Pairs:
    """Lines of ``split.source`` and ``split.target``, aligned; an empty pair is left out."""
    sides = []
    for language in (source, target):
        path = folder / f"{split}.{language}"
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            have = ", ".join(sorted(p.name for p in folder.glob(f"*.{language}"))) or "none"
            raise ValueError(f"no parallel text {path} (files for {language!r} there: {have})") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8: {error}") from None
        sides.append(text.split("\n")[:-1] if text.endswith("\n") else text.split("\n"))
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{folder}/{split}: {source} has {len(sides[0])} lines but {target} has {len(sides[1])}; "
            "parallel files need the same number of lines"
        )
    kept = [(a.strip(), b.strip()) for a, b in zip(*sides) if a.strip() and b.strip()]
    if not kept:
        raise ValueError(f"{folder}/{split}: no sentence pairs")
    return [a for a, _ in kept], [b for _, b in kept]


def make_tokenizer(lines: list[str], vocab_size: int, path: Path | None) -> Any:
    """A joint byte-level BPE, read from ``path`` where it is there, else learned and written there."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ValueError('text needs tokenizers: pip install "normmatters[lab]"') from None
    if path is not None and path.is_file():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # all 256 bytes where the vocabulary has room for them: then no text is unknown
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if vocab_size > 256 + len(_SPECIAL) else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    if path is not None:
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        tokenizer.save(str(partial))
        partial.replace(path)
    return tokenizer


class TextLoader:
    """Sentence pairs in batches of at most ``tokens`` padded tokens a side, alike lengths together, new each epoch."""

    def __init__(
        self, pairs: list[tuple[list[int], list[int]]], tokens: int, seed: int, shard: Shard, device: torch.device
    ) -> None:
        self.pairs, self.seed, self.shard, self.device = pairs, seed, shard, device
        lengths = np.array([max(len(s) + 1, len(t) + 1) for s, t in pairs])
        order = np.argsort(lengths, kind="stable")
        self.batches: list[np.ndarray] = []  # rows of each batch: fixed by length, so every epoch has as many steps
        start = 0
        for stop in range(1, len(order) + 1):
            if stop == len(order) or (stop + 1 - start) * lengths[order[stop]] > tokens:
                self.batches.append(order[start:stop])
                start = stop
        self.steps = len(self.batches)

    def epoch(self, epoch: int) -> Iterator[TextBatch]:
        """Sentences of the same length change places between batches, and the batches their order."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % (1 << 63))
        shuffled = torch.randperm(len(self.pairs), generator=generator).numpy()
        lengths = np.array([max(len(s), len(t)) for s, t in self.pairs])
        order = shuffled[np.argsort(lengths[shuffled], kind="stable")]
        sizes = np.cumsum([0] + [len(b) for b in self.batches])
        for number in torch.randperm(self.steps, generator=generator).tolist():
            yield self.collate(order[sizes[number] : sizes[number + 1]])

    def __iter__(self) -> Iterator[TextBatch]:
        for rows in self.batches:
            yield self.collate(rows)

    def collate(self, rows: np.ndarray) -> TextBatch:
        every = [self.pairs[i] for i in rows]
        tokens = sum(len(t) + 1 for _, t in every)
        # every world-th row is mine; a process without a row gets a padded one, which counts for nothing
        mine = every[self.shard.rank :: self.shard.world] or [([], [])]
        empty = len(every) <= self.shard.rank
        source = _padded([[*s, EOS] for s, _ in mine])
        target_in = _padded([[BOS, *t] for _, t in mine])
        target_out = _padded([[] if empty else [*t, EOS] for _, t in mine], width=target_in.shape[1])
        pin = self.device.type == "cuda"
        source, target_in, target_out = (
            (x.pin_memory() if pin else x).to(self.device, non_blocking=True) for x in (source, target_in, target_out)
        )
        return TextBatch(source, target_in, target_out, tokens)


def _padded(rows: list[list[int]], width: int | None = None) -> Tensor:
    width = width or max(len(r) for r in rows)
    return torch.tensor([r + [PAD] * (width - len(r)) for r in rows], dtype=torch.int64)


def _numbers(config: DataConfig, split: str) -> Pairs:
    every = numerals.splits(train=8000, val=1000, test=1000)
    if split not in every:
        raise ValueError(f"the embedded numbers have splits {', '.join(every)}; got {split!r}")
    side = dict(zip(("en", "de"), every[split]))
    for language in (config.source, config.target):
        if language not in side:
            raise ValueError(f"the embedded numbers are in 'en' and 'de', got {language!r}")
    return side[config.source], side[config.target]


@dataclass(frozen=True)
class TextData:
    """What a translation run needs; ``references[split]`` are the raw target lines for BLEU."""

    train: TextLoader
    val: TextLoader
    test_sources: list[list[int]]
    references: list[str]
    tokenizer: Any
    vocab_size: int
    max_length: int

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode([i for i in ids if i > EOS]))


def load(
    config: DataConfig, folder: Path | None, *, seed: int, shard: Shard, device: torch.device, cache: Path | None
) -> TextData:
    """``cache``: a folder for the learned tokenizer, so that a resumed run has the same one."""
    names = [config.train_split, config.val_split, config.test_split or config.val_split]
    if config.name == "numbers":
        train, val, test = (_numbers(config, name) for name in names)
    else:
        if folder is None or not folder.is_dir():
            raise ValueError(f"no folder of parallel text: {folder}; name it with --data-dir and data.dir")
        train, val, test = (read_pairs(folder, n, config.source, config.target) for n in names)
    train = (train[0][: config.train_size], train[1][: config.train_size])
    val, test = ((p[0][: config.val_size], p[1][: config.val_size]) for p in (val, test))
    path = None if cache is None else cache / "tokenizer.json"
    tokenizer = make_tokenizer(train[0] + train[1], config.vocab_size, path)

    def encode(lines: list[str]) -> list[list[int]]:
        return [e.ids for e in tokenizer.encode_batch(lines)]

    limit = config.max_length
    pairs = [(s, t) for s, t in zip(encode(train[0]), encode(train[1])) if len(s) <= limit and len(t) <= limit]
    if not pairs:
        raise ValueError(f"data.max_length={limit} leaves no training pair")
    held_out = [(s[:limit], t[:limit]) for s, t in zip(encode(val[0]), encode(val[1]))]
    return TextData(
        train=TextLoader(pairs, config.tokens, seed, shard, device),
        val=TextLoader(held_out, config.tokens, seed, shard, device),
        test_sources=[s[:limit] for s in encode(test[0])],
        references=test[1],
        tokenizer=tokenizer,
        vocab_size=tokenizer.get_vocab_size(),
        max_length=limit,
    )
