"""Parallel text: aligned files, one joint byte-level BPE (by ``tokenizers``), batches of about equal size in tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normmatters.lab.config import DataConfig
from normmatters.lab.data import numerals
from normmatters.lab.data.images import Shard, times_of_change
from normmatters.lab.files import write_atomic

PAD, BOS, EOS = 0, 1, 2
_TOKENIZER = "tokenizer.json"  # in the folder of a run
_GRID = 4  # the widths of batches that are filled up
_SPECIAL = ["<pad>", "<s>", "</s>"]
Pairs = tuple[list[str], list[str]]


class TextBatch(NamedTuple):
    """``source`` (n, S) ends with EOS; ``target_in`` (n, T) starts with BOS, ``target_out`` (n, T) ends with EOS.

    The rest is PAD. ``tokens`` counts the target tokens of the whole batch, over all processes; None where these are
    all of it, and ``target_out`` can be counted. A row that only fills the batch up has the source EOS and no target.
    """

    source: Tensor
    target_in: Tensor
    target_out: Tensor
    tokens: int | None


def read_pairs(folder: Path, split: str, source: str, target: str) -> Pairs:
    """Lines of ``split.source`` and ``split.target``, aligned; an empty pair is left out."""
    sides = []
    for language in (source, target):
        path = folder / f"{split}.{language}"
        try:
            # not as text, for which a carriage return inside a line, such as web pages leave, would end it
            text = path.read_bytes().decode("utf-8-sig")
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
    pairs = [(a.strip(), b.strip()) for a, b in zip(*sides) if a.strip() and b.strip()]
    if not pairs:
        raise ValueError(f"{folder}/{split}: no sentence pairs")
    return [a for a, _ in pairs], [b for _, b in pairs]


def make_tokenizer(lines: list[str], vocab_size: int, learned: str | None = None) -> Any:
    """A joint byte-level BPE: as ``learned`` (JSON) describes it, else learned from ``lines``."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ValueError("text needs tokenizers: pip install tokenizers") from None
    if learned is not None:
        try:
            tokenizer = Tokenizer.from_str(learned)
        except Exception as error:  # tokenizers raises nothing more special
            problem = f"the run's tokenizer.json is damaged ({error})"
            raise ValueError(f"{problem}: begin again (--fresh)") from None
        tokenizer.encode_special_tokens = True
        return tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.encode_special_tokens = True  # "</s>" in a text, such as web pages have, is text and no end
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # all 256 bytes where the vocabulary has room for them: then no text is unknown
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if vocab_size > 256 + len(_SPECIAL) else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


class _Sentences:
    """Token sequences end to end in one tensor on the device; a batch is one gather from it."""

    def __init__(self, sequences: list[list[int]], device: torch.device) -> None:
        self.lengths = np.array([len(s) for s in sequences])
        flat = np.fromiter((t for s in sequences for t in s), np.int32, int(self.lengths.sum()))
        self.flat = torch.from_numpy(flat).to(device)
        ends = np.cumsum(self.lengths)
        self.starts = torch.from_numpy(ends - self.lengths).to(device)
        self.device_lengths = torch.from_numpy(self.lengths).to(device)

    def gather(self, rows: Tensor, width: int) -> Tensor:
        """(n, width) int64: each row's tokens, then PAD."""
        position = torch.arange(width, device=rows.device)
        inside = position < self.device_lengths[rows, None]
        index = (self.starts[rows, None] + position).clamp_(max=len(self.flat) - 1)
        return self.flat[index].long().masked_fill_(~inside, PAD)  # torch.where would copy PAD to the device, and wait


class TextLoader:
    """Sentence pairs of like length in batches of at most ``tokens`` padded tokens per side, new ones each epoch."""

    def __init__(
        self, pairs: list[tuple[list[int], list[int]]], tokens: int, seed: int, shard: Shard, device: torch.device
    ) -> None:
        self.count, self.seed, self.shard, self.device = len(pairs), seed, shard, device
        self.source = _Sentences([[*s, EOS] for s, _ in pairs], device)
        self.target = _Sentences([[BOS, *t, EOS] for _, t in pairs], device)
        self.lengths = np.maximum(self.source.lengths, self.target.lengths - 1)
        ordered = self.lengths[np.argsort(self.lengths, kind="stable")]
        bounds = [0]  # of the batches in any order by length: so every epoch has as many steps
        for stop in range(1, self.count):
            if (stop + 1 - bounds[-1]) * ordered[stop] > tokens:
                bounds.append(stop)
        self.bounds = [*bounds, self.count]
        self.steps = len(bounds)
        self._longest = ordered[np.array(self.bounds[1:]) - 1]  # of each batch, in any order by length
        self.shapes: dict[int, int] = {}  # rows by width

    def few_shapes(self) -> None:
        """Fill up the batches of :meth:`epoch` to one of few ``shapes``, since each shape takes a CUDA graph.

        Both sides become as wide as the next multiple of four, and as many rows as any batch of that width has.
        """
        if self.shard.world > 1:
            raise ValueError(f"CUDA graphs of text need a run in one process, got {self.shard.world} processes")
        for width, rows in zip(self._widths(), np.diff(self.bounds)):
            self.shapes[width] = max(self.shapes.get(width, 0), int(rows))

    def _widths(self) -> list[int]:
        return [-(-int(longest) // _GRID) * _GRID for longest in self._longest]

    def epoch(self, epoch: int) -> Iterator[TextBatch]:
        """Shuffle sentences of the same length between batches, and the order of the batches."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % (1 << 63))
        shuffled = torch.randperm(self.count, generator=generator).numpy()
        order = shuffled[np.argsort(self.lengths[shuffled], kind="stable")]
        numbers = torch.randperm(self.steps, generator=generator).tolist()
        return self._batches(order, numbers, fill=bool(self.shapes))

    def __iter__(self) -> Iterator[TextBatch]:
        return self._batches(np.argsort(self.lengths, kind="stable"), range(self.steps))

    def _batches(self, order: np.ndarray, numbers: Iterable[int], *, fill: bool = False) -> Iterator[TextBatch]:
        on_device = torch.from_numpy(order).to(self.device)
        widths = self._widths() if fill else []
        for number in numbers:
            part = slice(self.bounds[number], self.bounds[number + 1])
            yield (
                self._filled_up(on_device[part], widths[number]) if fill else self._batch(order[part], on_device[part])
            )

    def _filled_up(self, rows: Tensor, width: int) -> TextBatch:
        """The pairs ``rows`` in a batch of this width's shape."""
        count = len(rows)
        below = (0, 0, 0, self.shapes[width] - count)
        source, target_in, target_out = (F.pad(t, below, value=PAD) for t in self._pairs(rows, width, width))
        source[count:, 0].fill_(EOS)  # attention to no word at all would be NaN
        return TextBatch(source, target_in, target_out, None)

    def _batch(self, rows: np.ndarray, on_device: Tensor) -> TextBatch:
        """``rows`` come twice, on the host for shapes and on the device for tokens: nothing waits for a copy."""
        mine = slice(self.shard.rank, None, self.shard.world)
        empty = len(rows) <= self.shard.rank  # a process without a row takes one whose targets are all padding
        mine = slice(0, 1) if empty else mine
        widths = (int(self.source.lengths[rows[mine]].max()), int(self.target.lengths[rows[mine]].max()) - 1)
        source, target_in, target_out = self._pairs(on_device[mine], *widths)
        if empty:
            target_out = torch.full_like(target_out, PAD)
        return TextBatch(source, target_in, target_out.contiguous(), int((self.target.lengths[rows] - 1).sum()))

    def _pairs(self, rows: Tensor, source_width: int, target_width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Source, target in and target out of these pairs."""
        target = self.target.gather(rows, target_width + 1)
        target_out = target[:, 1:]
        target_in = target[:, :-1].masked_fill(target_out == PAD, PAD)  # the last EOS is never an input
        return self.source.gather(rows, source_width), target_in, target_out


def _numbers(config: DataConfig, split: str) -> Pairs:
    every = numerals.splits()
    if split not in every:
        raise ValueError(f"the embedded numbers have splits {', '.join(every)}; got {split!r}")
    side = dict(zip(("en", "de"), every[split]))
    for language in (config.source, config.target):
        if language not in side:
            raise ValueError(f"the embedded numbers are in 'en' and 'de', got {language!r}")
    return side[config.source], side[config.target]


@dataclass(frozen=True)
class TextData:
    """What a translation run needs; ``references`` are the test set's raw target lines, for BLEU."""

    train: TextLoader
    val: TextLoader
    test_sources: list[list[int]]
    references: list[str]
    tokenizer: Any
    max_length: int

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode([i for i in ids if i > EOS]))

    def save_tokenizer(self, folder: Path) -> None:
        write_atomic(folder / _TOKENIZER, self.tokenizer.to_str(pretty=True).encode())


def load(
    config: DataConfig, folder: Path | None, *, seed: int, shard: Shard, device: torch.device, cache: Path | None
) -> TextData:
    """``cache``: a folder for the learned tokenizer, so that a resumed run has the same one."""
    tokenizer = None if cache is None else cache / _TOKENIZER
    learned = tokenizer.read_text(encoding="utf-8") if tokenizer is not None and tokenizer.is_file() else None
    changed: tuple[int, ...] = ()
    if config.name != "numbers":
        if folder is None or not folder.is_dir():
            a, b = (f"{config.train_split}.{language}" for language in (config.source, config.target))
            problem = f"no folder of parallel text: {folder}; it has a file per split and language ({a}, {b}, ...)"
            raise ValueError(f"{problem}, line by line. Name the folder above it with --data-dir or NORMMATTERS_DATA")
        changed = times_of_change(folder)
    encoded = _encode(config, folder, changed, learned)
    train, val = (TextLoader(pairs, config.tokens, seed, shard, device) for pairs in encoded[:2])
    data = TextData(train, val, *encoded[2:], config.max_length)
    if cache is not None and learned is None:
        data.save_tokenizer(cache)
    return data


class Encoded(NamedTuple):
    """Sentences as token ids, and what made them."""

    train: list[tuple[list[int], list[int]]]
    val: list[tuple[list[int], list[int]]]
    test_sources: list[list[int]]
    references: list[str]
    tokenizer: Any


@functools.lru_cache(maxsize=2)
def _encode(config: DataConfig, folder: Path | None, changed: tuple[int, ...], learned: str | None) -> Encoded:
    """The splits as token ids: once for all runs that share a process, as long as the files stay as they are."""
    names = [config.train_split, config.val_split, config.test_split or config.val_split]
    if folder is None:
        train, val, test = (_numbers(config, name) for name in names)
    else:
        train, val, test = (read_pairs(folder, n, config.source, config.target) for n in names)
    train = (train[0][: config.train_size], train[1][: config.train_size])
    val, test = ((p[0][: config.val_size], p[1][: config.val_size]) for p in (val, test))
    tokenizer = make_tokenizer(train[0] + train[1], config.vocab_size, learned)

    def encode(lines: list[str]) -> list[list[int]]:
        return [e.ids for e in tokenizer.encode_batch(lines)]

    limit = config.max_length
    pairs = [(s, t) for s, t in zip(encode(train[0]), encode(train[1])) if len(s) <= limit and len(t) <= limit]
    if not pairs:
        raise ValueError(f"data.max_length={limit} leaves no training pair")
    held_out = [(s[:limit], t[:limit]) for s, t in zip(encode(val[0]), encode(val[1]))]
    return Encoded(pairs, held_out, [s[:limit] for s in encode(test[0])], test[1], tokenizer)
