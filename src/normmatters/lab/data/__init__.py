"""From a ``DataConfig`` to loaders: ``load_data`` finds the files, checks them and puts them where they are used."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from normmatters.lab.config import TEXT, DataConfig
from normmatters.lab.data import augment, cifar10, folders, images, text
from normmatters.lab.data.images import (
    Augmentation,
    EvalLoader,
    ResidentLoader,
    Shard,
    Splits,
    StreamLoader,
    TrainLoader,
)
from normmatters.lab.data.text import TextData

__all__ = ["ImageData", "Shard", "TextData", "data_root", "load_data"]

RESIDENT_BYTES = 4 << 30  # a set up to this size lives on the device


class Usual(NamedTuple):
    """What is usual for a set. Of images of many sizes, ``side`` is what they are decoded to."""

    folder: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: str = "none"
    side: int = 0
    min_scale: float = 0.25  # the smallest part of an image that a resized crop takes


_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "resized_crop")
SETS = {
    "digits": Usual("", (0.3053,), (0.3760,), "crop"),
    "cifar10": Usual(cifar10.FOLDER, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "crop_flip"),
    "tiny_imagenet": Usual("tiny-imagenet-200", *_IMAGENET, 64),  # a twelfth, as below, would be too few pixels of 64
    "imagefolder": Usual("imagenet", *_IMAGENET, 224, 0.08),
    "text": Usual("translation/multi30k"),
    "numbers": Usual(""),
}


@dataclass(frozen=True)
class ImageData:
    """Loaders of uint8 images and what the model has to know of them."""

    train: TrainLoader
    val: EvalLoader
    classes: int
    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def data_root(data_dir: str | Path | None = None) -> Path:
    """Where data is: the argument, else ``NORMMATTERS_DATA``, else ``./data``.

    A shell expands no ~ after an equals sign (``--data-dir=~/data``), nor does a TOML file.
    """
    return Path(data_dir or os.environ.get("NORMMATTERS_DATA") or "data").expanduser()


def load_data(
    config: DataConfig,
    data_dir: str | Path | None = None,
    *,
    seed: int = 0,
    device: torch.device | None = None,
    shard: Shard | None = None,
    cache: Path | None = None,
) -> ImageData | TextData:
    """Open the data of a run. Raises ValueError with what is missing and how to get it."""
    device = device or torch.device("cpu")
    shard = shard or Shard()
    folder = _folder(config, data_dir)
    if config.name in TEXT:
        return text.load(config, folder, seed=seed, shard=shard, device=device, cache=cache)
    if config.name == "digits":
        return _resident(config, _digits(min(config.train_size or 1437, 1437)), 10, seed, device, shard)
    assert folder is not None
    if config.name == "cifar10":
        in_place = config.dir in (None, cifar10.FOLDER)  # a cell names it if another of its presets has another folder
        files = cifar10.find(folder) or (cifar10.prepare(folder.parent) if in_place else None)
        if files is None:
            raise ValueError(f"CIFAR-10: no test_batch.bin in {folder} (data.dir={config.dir!r})")
        return _resident(config, _shared(cifar10.load, (files,), device), 10, seed, device, shard)
    usual = SETS[config.name]
    train, val, classes = folders.open_splits(folder, config.image_size, usual.side, usual.min_scale)
    if isinstance(train, folders.ArraySource) and isinstance(val, folders.ArraySource):
        resident = config.resident if config.resident is not None else train.x.nbytes <= RESIDENT_BYTES
        if resident:
            splits = _shared(folders.load_arrays, (folder, config.image_size), device)
            return _resident(config, splits, classes, seed, device, shard)
    shape = _augmentation(config, train.size)
    # Files are cropped while they are decoded; all else is done to the centre crop, on the device.
    crop_on_read = isinstance(train, folders.FolderSource) and shape.kind == "resized_crop"
    sources = [
        source if size is None else images.Subset(source, size)
        for source, size in ((train, config.train_size), (val, config.val_size))
    ]
    loader = StreamLoader(sources[0], config.batch_size, shape, seed, shard, device, crop_on_read=crop_on_read)
    evaluation = EvalLoader(sources[1], config.eval_batch_size, shard, device)
    return ImageData(loader, evaluation, classes, train.channels, train.size, usual.mean, usual.std)


def _folder(config: DataConfig, data_dir: str | Path | None) -> Path | None:
    """Where the files of a set are; None where it is embedded."""
    usual = SETS[config.name].folder
    return data_root(data_dir) / Path(config.dir or usual).expanduser() if usual else None


def _shared(read: Callable[..., Splits], where: tuple[Any, ...], device: torch.device) -> Splits:
    """``read(*where)``, where ``where`` begins with a folder. Runs in one process share one copy on their GPU."""
    if device.type != "cuda":
        return read(*where)
    return _on_gpu(read, where, images.times_of_change(where[0]), device)


@functools.lru_cache(maxsize=1)
def _on_gpu(
    read: Callable[..., Splits], where: tuple[Any, ...], changed: tuple[int, ...], device: torch.device
) -> Splits:
    """Cached until a file changes."""
    train_x, train_y, val_x, val_y = read(*where)
    return train_x.to(device), train_y.to(device), val_x.to(device), val_y.to(device)


def _digits(train_size: int) -> Splits:
    """The embedded set: scikit-learn's 1,797 digits, 8 × 8 pixels. Those that do not train are the validation set."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the digits set comes with scikit-learn: pip install scikit-learn") from None
    bunch = load_digits()
    x = torch.from_numpy(bunch.images)
    x = (x * (255 / 16)).round().to(torch.uint8).unsqueeze(-1)  # the scanner's 17 grey levels
    y = torch.from_numpy(bunch.target).to(torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1797))  # writers are in blocks in the file
    train, val = order[:train_size], order[train_size:]
    return x[train], y[train], x[val], y[val]


def _augmentation(config: DataConfig, size: int) -> Augmentation:
    usual = SETS[config.name]
    kind = config.augment if isinstance(config.augment, str) else usual.augment if config.augment else "none"
    margin = max(1, size // 8)  # 4 pixels of 32, as is usual for CIFAR, 8 of 64, 1 of 8
    return Augmentation(kind, margin, size, usual.min_scale)


def _resident(
    config: DataConfig, splits: Splits, classes: int, seed: int, device: torch.device, shard: Shard
) -> ImageData:
    train, val = images.first(splits[:2], config.train_size), images.first(splits[2:], config.val_size)
    size = config.image_size or train[0].shape[1]
    train_x, val_x = (augment.resize(x, size).to(device) for x in (train[0], val[0]))
    augmentation = _augmentation(config, size)
    loader = ResidentLoader(train_x, train[1].to(device), config.batch_size, augmentation, seed, shard)
    evaluation = EvalLoader((val_x, val[1].to(device)), config.eval_batch_size, shard, device)
    usual = SETS[config.name]
    return ImageData(loader, evaluation, classes, train_x.shape[3], size, usual.mean, usual.std)
