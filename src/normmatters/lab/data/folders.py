"""Large image sets: folders of images (ImageNet, Tiny-ImageNet) or uint8 arrays (``train_x.npy``, ``train_y.npy``)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normmatters.lab.data import augment
from normmatters.lab.data.images import Splits

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}


class ArraySource:
    """``SPLIT_x.npy`` and ``SPLIT_y.npy`` of a folder: images uint8 (N, 3, H, W) or (N, H, W, 3), and their labels.

    The images are memory-mapped, and resized to ``size`` (None: as they are) when they are read.
    """

    def __init__(self, folder: Path, split: str, size: int | None) -> None:
        try:
            x = np.load(folder / f"{split}_x.npy", mmap_mode="r", allow_pickle=False)
            y = np.load(folder / f"{split}_y.npy", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}: cannot read the {split} arrays: {error}") from None
        name = f"{folder}/{split}_x.npy"
        if x.dtype != np.uint8 or x.ndim != 4 or len(x) == 0 or 3 not in (x.shape[1], x.shape[3]):
            expected = "expected uint8 images (N, 3, H, W) or (N, H, W, 3)"
            raise ValueError(f"{name}: {expected}, got {x.dtype} {x.shape}")
        if y.ndim != 1 or len(x) != len(y):
            raise ValueError(f"{name}: {len(x)} images but labels of shape {y.shape}")
        if y.dtype.kind not in "iu" or y.min() < 0:
            raise ValueError(f"{name}: expected labels 0, 1, 2, ..., got {y.dtype} from {y.min()}")
        self.x = x
        self.channels_first, self.channels = x.shape[1] == 3, 3
        stored = x.shape[2]
        self.size = size or stored
        self.labels = torch.from_numpy(np.asarray(y).astype(np.int64))

    def read(self, index: np.ndarray, crops: np.ndarray | None) -> np.ndarray:
        order = np.argsort(index)  # rising offsets are what a disk likes
        images = np.empty((len(index), *self.x.shape[1:]), np.uint8)
        images[order] = self.x[index[order]]
        if self.channels_first:
            images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
        return augment.resize(torch.from_numpy(images), self.size).numpy()


class FolderSource:
    """Image files and their labels; decoded by PIL in threads (it releases the interpreter lock).

    ``min_scale``: the smallest part of an image's area that a random crop takes.
    """

    def __init__(self, files: list[Path], labels: list[int], size: int, min_scale: float, threads: int = 8) -> None:
        try:
            import PIL.Image  # noqa: F401
        except ImportError:
            raise ValueError("folders of images need Pillow: pip install pillow") from None
        self.files, self.size, self.channels, self.min_scale = files, size, 3, min_scale
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def read(self, index: np.ndarray, crops: np.ndarray | None) -> np.ndarray:
        jobs = [(self.files[i], None if crops is None else crops[row]) for row, i in enumerate(index)]
        return np.stack(list(self._pool.map(lambda job: self._decode(*job), jobs)))

    def _decode(self, path: Path, crop: np.ndarray | None) -> np.ndarray:
        from PIL import Image

        try:
            with Image.open(path) as file:
                if file.mode[0] in "IF":  # PIL would make white of all that is above 255
                    raise ValueError(f"expected 8 bits per channel, got PIL's mode {file.mode}")
                image: Any = file.convert("RGB")
        except Exception as error:  # PIL raises SyntaxError, too, or an error of its own for one that is too large
            raise ValueError(f"cannot read the image {path}: {error}") from None
        width, height = image.size
        if crop is not None:
            row = torch.from_numpy(crop)[None]
            top, left, h, w = augment.crop_box(row, height, width, self.min_scale)[0].tolist()
        else:  # the middle, as 224 of 256
            h = w = min(width, height) * (224 / 256 if min(width, height) > self.size else 1.0)
            top, left = (height - h) / 2, (width - w) / 2
        box = (left, top, left + w, top + h)
        return np.asarray(image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box))


def open_splits(
    folder: Path, size: int | None, decoded: int, min_scale: float
) -> tuple[ArraySource | FolderSource, ArraySource | FolderSource, int]:
    """``train, val, number of classes`` of a folder with arrays or with ``train/CLASS/*`` and ``val/CLASS/*``.

    Where ``size`` is None, arrays stay as they are and files are ``decoded`` to that side.
    """
    if not folder.is_dir():
        raise ValueError(f"no image folder {folder}; name the folder above it with --data-dir or NORMMATTERS_DATA")
    if (folder / "train_x.npy").is_file():
        train, val = _arrays(folder, size)
        return train, val, 1 + int(torch.maximum(train.labels.max(), val.labels.max()))
    classes = _classes(folder / "train")
    if not classes:
        raise ValueError(f"{folder}: expected train_x.npy and train_y.npy, or folders train/CLASS of images")
    number = {name: label for label, name in enumerate(classes)}
    sources = []
    for split in ("train", "val"):
        if more := {*_classes(folder / split)} - {*classes, "images"}:  # Tiny-ImageNet's validation set is in images
            raise ValueError(f"{folder / split}: classes that train has not: {', '.join(sorted(more)[:5])}")
        files, labels = _files(folder / split, number)
        if not files:
            raise ValueError(f"{folder / split}: no images found")
        sources.append(FolderSource(files, labels, size or decoded, min_scale))
    return sources[0], sources[1], len(classes)


def _classes(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("[!.]*") if p.is_dir())


def _arrays(folder: Path, size: int | None) -> tuple[ArraySource, ArraySource]:
    train = ArraySource(folder, "train", size)
    return train, ArraySource(folder, "val", train.size)


def _files(folder: Path, number: dict[str, int]) -> tuple[list[Path], list[int]]:
    annotations = folder / "val_annotations.txt"  # Tiny-ImageNet names its validation classes in a table
    if annotations.is_file() and (folder / "images").is_dir():  # many sort it into folders, and leave the table
        rows = [[*line.split("\t"), ""][:2] for line in annotations.read_text(encoding="utf-8").splitlines() if line]
        if unknown := [label for _, label in rows if label not in number]:
            problem = f"{annotations}: no class {unknown[0]!r} in train"
            raise ValueError(f"{problem}; a line has an image, a tab and its class")
        there = {path.name for path in (folder / "images").iterdir()}
        if missing := [name for name, _ in rows if name not in there]:
            raise ValueError(
                f"{annotations}: {len(missing)} of its {len(rows)} images are missing, such as {missing[0]}"
            )
        return [folder / "images" / name for name, _ in rows], [number[label] for _, label in rows]
    pairs = [
        (path, label)
        for name, label in number.items()
        for path in sorted((folder / name).rglob("*"))
        # Hidden are ``._cat.jpg``, which macOS leaves, and Jupyter's copies in ``.ipynb_checkpoints``.
        if path.suffix.lower() in _SUFFIXES and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]
    return [p for p, _ in pairs], [label for _, label in pairs]


def load_arrays(folder: Path, size: int | None) -> Splits:
    """The arrays of a folder whole, resized to ``size`` (None: as they are)."""
    train, val = _arrays(folder, size)
    return _whole(train), train.labels, _whole(val), val.labels


def _whole(source: ArraySource) -> Tensor:
    chunks = [source.read(np.arange(i, min(i + 5000, len(source.x))), None) for i in range(0, len(source.x), 5000)]
    return torch.from_numpy(np.concatenate(chunks))
