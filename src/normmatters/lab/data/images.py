"""Loaders of images: small sets stay on the device, large ones are read ahead by a thread; the batches are the same."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from normmatters.lab.data import augment

# Images uint8 (N, H, W, C) and labels int64 (N,) to train with, and the same to validate with.
Splits = tuple[Tensor, Tensor, Tensor, Tensor]
CHUNK_BYTES = 1 << 25  # images augmented by one gather: few launches, little memory
_AHEAD = 5  # batches that are read ahead


def times_of_change(folder: Path) -> tuple[int, ...]:
    """When the files in ``folder`` were changed: while this stays the same, what was read from them is valid."""
    return tuple(sorted(p.stat().st_mtime_ns for p in folder.iterdir()))


class Source(Protocol):
    """Images by index, decoded to ``size``; ``labels`` is int64 (N,)."""

    labels: Tensor
    size: int
    channels: int

    def read(self, index: np.ndarray, crops: np.ndarray | None) -> np.ndarray:
        """uint8 (n, size, size, C). ``crops`` (n, 5): uniform numbers for a random resized crop made while decoding."""
        ...


class Subset:
    """The first ``size`` images of a fixed shuffle of ``source`` (sets are often sorted by class)."""

    def __init__(self, source: Source, size: int) -> None:
        self.source, self.size, self.channels = source, source.size, source.channels
        self.rows = chosen(len(source.labels), size)
        self.labels = source.labels[self.rows]

    def read(self, index: np.ndarray, crops: np.ndarray | None) -> np.ndarray:
        return self.source.read(self.rows.numpy()[index], crops)


def chosen(count: int, size: int) -> Tensor:
    """Which ``size`` of ``count`` examples a smaller set has: the first ones of a fixed shuffle."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:size]


def first(pair: tuple[Tensor, Tensor], size: int | None) -> tuple[Tensor, Tensor]:
    """The first ``size`` images and labels of the fixed shuffle; all if it is None."""
    x, y = pair
    if size is None or size >= len(x):
        return pair
    rows = chosen(len(x), size)
    return x[rows], y[rows]


@dataclass(frozen=True)
class Augmentation:
    """``kind``: "none", "crop", "crop_flip", "resized_crop"; ``margin``: pixels of padding of the crops;
    ``min_scale``: the smallest part of an image's area that a resized crop takes."""

    kind: str
    margin: int
    size: int
    min_scale: float = 0.25

    def prepare(self, images: Tensor) -> Tensor:
        return augment.pad(images, self.margin) if self.kind.startswith("crop") else images

    def apply(self, prepared: Tensor, index: Tensor, u: Tensor) -> Tensor:
        """uint8 (n, size, size, C) from images that went through ``prepare``."""
        if self.kind.startswith("crop"):
            return augment.pad_crop(prepared, index, u, self.size, flip=self.kind == "crop_flip")
        if self.kind == "resized_crop":
            return augment.resized_crop(prepared[index], u, self.size, self.min_scale)
        return prepared[index]


@dataclass(frozen=True)
class Shard:
    """This process's part of every global batch."""

    rank: int = 0
    world: int = 1

    def slice(self, batch_size: int) -> slice:
        part = batch_size // self.world
        return slice(self.rank * part, (self.rank + 1) * part)


class TrainLoader(abc.ABC):
    """Batches of one shape. An epoch leaves out the examples that fill no batch, other ones each time.

    ``batch_size`` is that of all processes together. ``epoch(e)`` yields uint8 images (n, C, H, W) (channels last in
    memory) and labels (n,), on the device.
    """

    def __init__(self, count: int, batch_size: int, seed: int, shard: Shard) -> None:
        if batch_size > count:
            raise ValueError(f"data.batch_size is {batch_size}, but there are only {count} training examples")
        if batch_size % shard.world:
            raise ValueError(f"data.batch_size {batch_size} must be a multiple of the {shard.world} processes")
        self.count, self.batch_size, self.seed, self.shard = count, batch_size, seed, shard
        self.steps = count // batch_size

    @abc.abstractmethod
    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]: ...

    def _draw(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Which images, (steps, n), and their random numbers, (steps, n, 5).

        Every process draws the whole epoch and keeps its rows: the global batch does not depend on their number.
        """
        order, u = augment.draw_epoch(self.count, self.seed, epoch)
        used, mine = self.steps * self.batch_size, self.shard.slice(self.batch_size)
        return order[:used].view(self.steps, -1)[:, mine], u[:used].view(self.steps, self.batch_size, -1)[:, mine]


class ResidentLoader(TrainLoader):
    """All images on the device as uint8; augmented there, many batches by one gather."""

    def __init__(
        self, images: Tensor, labels: Tensor, batch_size: int, augmentation: Augmentation, seed: int, shard: Shard
    ) -> None:
        super().__init__(len(images), batch_size, seed, shard)
        self.images, self.labels, self.augmentation = augmentation.prepare(images), labels, augmentation

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order, u = (t.to(self.images.device) for t in self._draw(epoch))
        together = max(1, CHUNK_BYTES // (self.batch_size * self.images[0].numel()))
        for start in range(0, self.steps, together):
            index = order[start : start + together]
            chunk = self.augmentation.apply(self.images, index.flatten(), u[start : start + together].flatten(0, 1))
            chunk = chunk.view(*index.shape, *chunk.shape[1:]).permute(0, 1, 4, 2, 3)
            labels = self.labels[index]
            for step in range(len(index)):
                yield chunk[step], labels[step]


class StreamLoader(TrainLoader):
    """Images read (or decoded) ahead by a thread into pinned memory, copied while the device computes."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        augmentation: Augmentation,
        seed: int,
        shard: Shard,
        device: torch.device,
        *,
        crop_on_read: bool = False,
    ) -> None:
        super().__init__(len(source.labels), batch_size, seed, shard)
        self.source, self.augmentation, self.device, self.crop_on_read = source, augmentation, device, crop_on_read

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order, u = self._draw(epoch)

        def read(step: int) -> tuple[Tensor, Tensor, Tensor]:
            crops = u[step].numpy() if self.crop_on_read else None
            images = torch.from_numpy(self.source.read(order[step].numpy(), crops))
            return images, self.source.labels[order[step]], u[step]

        pin = self.device.type == "cuda"
        for images, labels, numbers in prefetch(read, self.steps, pin=pin):
            x = images.to(self.device, non_blocking=True)
            numbers = numbers.to(self.device, non_blocking=True)
            if not self.crop_on_read:
                every = torch.arange(len(x), device=self.device)
                x = self.augmentation.apply(self.augmentation.prepare(x), every, numbers)
            else:
                x = torch.where((numbers[:, 2] < 0.5)[:, None, None, None], x.flip(2), x)
            yield x.permute(0, 3, 1, 2), labels.to(self.device, non_blocking=True)


def prefetch(
    read: Callable[[int], tuple[Tensor, ...]], steps: int, *, pin: bool = False
) -> Iterator[tuple[Tensor, ...]]:
    """``read(0) … read(steps − 1)`` in order, a few ahead, in one thread; its errors are raised here."""

    def load(step: int) -> tuple[Tensor, ...]:
        item = read(step)
        return tuple(t.pin_memory() for t in item) if pin else item

    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead = deque(pool.submit(load, step) for step in range(min(_AHEAD, steps)))
        for step in range(steps):
            item = ahead.popleft().result()
            if step + _AHEAD < steps:
                ahead.append(pool.submit(load, step + _AHEAD))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


class EvalLoader:
    """All examples in order, the last batch shorter; process ``rank`` of ``world`` takes every world-th batch."""

    def __init__(
        self, source: Source | tuple[Tensor, Tensor], batch_size: int, shard: Shard, device: torch.device
    ) -> None:
        self.source, self.batch_size, self.shard, self.device = source, batch_size, shard, device
        self.count = len(source[1]) if isinstance(source, tuple) else len(source.labels)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        starts = list(range(0, self.count, self.batch_size))[self.shard.rank :: self.shard.world]
        if isinstance(self.source, tuple):
            images, labels = self.source
            for start in starts:
                rows = slice(start, start + self.batch_size)
                yield images[rows].permute(0, 3, 1, 2), labels[rows]
            return
        source = self.source

        def read(step: int) -> tuple[Tensor, Tensor]:
            index = np.arange(starts[step], min(starts[step] + self.batch_size, self.count))
            return torch.from_numpy(source.read(index, None)), source.labels[torch.from_numpy(index)]

        for pair in prefetch(read, len(starts), pin=self.device.type == "cuda"):
            images, labels = (tensor.to(self.device, non_blocking=True) for tensor in pair)
            yield images.permute(0, 3, 1, 2), labels
