"""CIFAR-10 from the official binary files, from the official archive, or downloaded; every byte checked."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from normmatters.lab.data.images import Splits

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"
ARCHIVE = "cifar-10-binary.tar.gz"
SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_RECORD = 1 + 3 * 32 * 32  # bytes of a label and an image


def load(folder: Path) -> Splits:
    """``train_x, train_y, test_x, test_y``: uint8 N×32×32×3 and int64 labels, from the six .bin files in ``folder``."""
    parts = [_read(folder / name) for name in SHA256]
    return (*_split(np.concatenate(parts[:5])), *_split(parts[5]))


def _read(path: Path) -> np.ndarray:
    again = f"delete the folder {path.parent}, and `normmatters data prepare cifar10` brings all of it"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"CIFAR-10: {path} is missing: {again}") from None
    if (got := hashlib.sha256(raw).hexdigest()) != SHA256[path.name]:
        raise ValueError(f"CIFAR-10: {path} is damaged, with sha256 {got}, expected {SHA256[path.name]}: {again}")
    return np.frombuffer(raw, np.uint8).reshape(-1, _RECORD)


def _split(records: np.ndarray) -> tuple[Tensor, Tensor]:
    images = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return torch.from_numpy(images), torch.from_numpy(records[:, 0].astype(np.int64))


def find(data_dir: Path) -> Path | None:
    """The folder with the binary files: ``data_dir`` itself or its ``cifar-10-batches-bin``."""
    for folder in (data_dir, data_dir / FOLDER):
        if (folder / "test_batch.bin").is_file():
            return folder
    return None


def prepare(data_dir: Path, *, url: str = URL) -> Path:
    """Make sure that ``data_dir`` holds the files: those there, else from the archive there, else from the download.

    Nothing half written stays: files are unpacked elsewhere, and moved once they are checked. If several runs start at
    once, one does it and the others wait.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot create the data folder {data_dir}: {error}") from None
    with FileLock(data_dir / ".cifar10.lock"), tempfile.TemporaryDirectory(dir=data_dir, prefix=".cifar10-") as scratch:
        target = data_dir / FOLDER
        files = find(data_dir) or (target if any(target.glob("*")) else None)  # of a part, the first missing is named
        if files is not None:
            load(files)
            return files
        archive, advice = data_dir / ARCHIVE, "delete it and retry"
        if not archive.is_file():
            archive, advice = Path(scratch) / ARCHIVE, f"{url} has sent it; nothing was kept"
            _download(url, archive)
        try:
            shutil.unpack_archive(archive, scratch, filter="data")
            load(Path(scratch) / FOLDER)
        except Exception as error:  # there are many ways in which an archive may be damaged
            raise ValueError(f"CIFAR-10: {archive} is truncated or another file ({error}): {advice}") from None
        return (Path(scratch) / FOLDER).replace(target)


def _download(url: str, target: Path) -> None:
    try:
        with target.open("wb") as file, urllib.request.urlopen(url, timeout=30) as response:
            shutil.copyfileobj(response, file)
    except OSError as error:
        raise ValueError(
            f"CIFAR-10 is not in {target.parent.parent} and cannot be downloaded ({error}). "
            f"Put {ARCHIVE} from {URL} there, or the folder {FOLDER} with its .bin files, "
            "and name the folder with --data-dir or NORMMATTERS_DATA."
        ) from None
