"""From a ``DataConfig`` to loaders: ``load_data`` finds the files, checks them and puts them where they are used."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normmatters.lab.config import TEXT, DataConfig
from normmatters.lab.data import augment, cifar10, digits, folders, images, text
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

__all__ = ["ImageData", "Shard", "TextData", "data_root", "load_data", "warm_text_cache"]

RESIDENT_BYTES = 4 << 30  # a set up to this size lives on the device
USUAL_FOLDER = {
    "cifar10": cifar10.FOLDER,
    "tiny_imagenet": "tiny-imagenet-200",
    "imagefolder": "imagenet",
    "text": "translation/multi30k",
}
# mean, deviation, usual augmentation
About = tuple[tuple[float, ...], tuple[float, ...], str]
_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "crop_flip")
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "resized_crop")
_DIGITS = ((0.3053,), (0.3760,), "crop")
# A set of images of many sizes: the side to decode them to, and the smallest part of one that a resized crop takes. Of
# 64 pixels a twelfth, which is usual for ImageNet, would be too few.
_CROPS = {"imagefolder": (224, 0.08), "tiny_imagenet": (64, 0.25)}


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
        return _resident(config, *digits.load(min(config.train_size or 1437, 1437)), 10, _DIGITS, seed, device, shard)
    assert folder is not None
    if config.name == "cifar10":
        usual = config.dir in (None, cifar10.FOLDER)  # which a cell may name, as another preset's set is elsewhere
        files = cifar10.find(folder) or (cifar10.prepare(folder.parent) if usual else None)
        if files is None:
            raise ValueError(f"CIFAR-10: no test_batch.bin in {folder} (data.dir={config.dir!r})")
        tensors = _shared(cifar10.load, (files,), device)
        return _resident(config, *tensors, 10, _CIFAR, seed, device, shard)
    side, min_scale = _CROPS[config.name]
    train, val, classes = folders.open_splits(folder, config.image_size, side, min_scale)
    if isinstance(train, folders.ArraySource) and isinstance(val, folders.ArraySource):
        resident = config.resident if config.resident is not None else train.x.nbytes <= RESIDENT_BYTES
        if resident:
            tensors = _shared(folders.load_arrays, (folder, config.image_size), device)
            return _resident(config, *tensors, classes, _IMAGENET, seed, device, shard)
    kind = _kind(config, _IMAGENET[2])
    shape = Augmentation(kind, _margin(train.size), train.size, min_scale)
    # Files are cropped while they are decoded; all else is done to the centre crop, on the device.
    crop_on_read = isinstance(train, folders.FolderSource) and kind == "resized_crop"
    sources = [
        source if size is None else images.Subset(source, size)
        for source, size in ((train, config.train_size), (val, config.val_size))
    ]
    loader = StreamLoader(sources[0], config.batch_size, shape, seed, shard, device, crop_on_read=crop_on_read)
    evaluation = EvalLoader(sources[1], config.eval_batch_size, shard, device)
    return ImageData(loader, evaluation, classes, train.channels, train.size, _IMAGENET[0], _IMAGENET[1])


def warm_text_cache(config: DataConfig, data_dir: str | Path | None, run_folder: Path) -> None:
    """Read and encode the text of a run, if it is one of text, so that ``load_data`` finds it done. Never raises."""
    if config.name in TEXT:
        with contextlib.suppress(OSError, ValueError):  # the run will meet the same, and report it
            text.read_encoded(config, _folder(config, data_dir), run_folder)


def _folder(config: DataConfig, data_dir: str | Path | None) -> Path | None:
    """Where the files of a set are; None where it is embedded."""
    if config.name not in USUAL_FOLDER:
        return None
    return data_root(data_dir) / Path(config.dir or USUAL_FOLDER[config.name]).expanduser()


def _shared(read: Callable[..., Splits], where: tuple[Any, ...], device: torch.device) -> Splits:
    """``read(*where)``, of a folder. Runs that share a GPU and a process share one copy there, read once."""
    if device.type != "cuda":
        return read(*where)
    return _on_gpu(read, where, images.times_of_change(where[0]), device)


@functools.lru_cache(maxsize=1)
def _on_gpu(
    read: Callable[..., Splits], where: tuple[Any, ...], changed: tuple[int, ...], device: torch.device
) -> Splits:
    """Kept as long as the files stay as they are."""
    train_x, train_y, val_x, val_y = read(*where)
    return train_x.to(device), train_y.to(device), val_x.to(device), val_y.to(device)


def _margin(size: int) -> int:
    """Padding of the crops: 4 pixels of 32, as is usual for CIFAR, 8 of 64, 1 of 8."""
    return max(1, size // 8)


def _kind(config: DataConfig, usual: str) -> str:
    if isinstance(config.augment, str):
        return config.augment
    return usual if config.augment else "none"


def _resident(
    config: DataConfig,
    train_x: Tensor,
    train_y: Tensor,
    val_x: Tensor,
    val_y: Tensor,
    classes: int,
    about: About,
    seed: int,
    device: torch.device,
    shard: Shard,
) -> ImageData:
    mean, std, usual = about
    if config.train_size is not None and config.train_size < len(train_x):
        rows = images.keep(len(train_x), config.train_size)
        train_x, train_y = train_x[rows], train_y[rows]
    if config.val_size is not None and config.val_size < len(val_x):
        rows = images.keep(len(val_x), config.val_size)
        val_x, val_y = val_x[rows], val_y[rows]
    size = config.image_size or train_x.shape[1]
    train_x, val_x = (augment.resize(x, size).to(device) for x in (train_x, val_x))
    _, min_scale = _CROPS.get(config.name, _CROPS["tiny_imagenet"])
    augmentation = Augmentation(_kind(config, usual), _margin(size), size, min_scale)
    train = ResidentLoader(train_x, train_y.to(device), config.batch_size, augmentation, seed, shard)
    val = EvalLoader((val_x, val_y.to(device)), config.eval_batch_size, shard, device)
    return ImageData(train, val, classes, train_x.shape[3], size, mean, std)
