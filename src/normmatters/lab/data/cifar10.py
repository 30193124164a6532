"""CIFAR-10 from the official binary files, from the official archive, or downloaded; every byte checked."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.error
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
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as the official page gives it
SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_RECORD = 1 + 3 * 32 * 32
_BYTES = 10000 * _RECORD


def load(folder: Path) -> Splits:
    """``train_x, train_y, test_x, test_y``: uint8 N×32×32×3 and int64 labels, from the six .bin files in ``folder``."""
    parts = [_read(folder / name) for name in SHA256]
    train = np.concatenate(parts[:5])
    return (*_split(train), *_split(parts[5]))


def _read(path: Path) -> np.ndarray:
    again = f"delete the folder {path.parent}, and `normmatters data prepare cifar10` brings all of it"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"CIFAR-10: {path} is missing: {again}") from None
    if len(raw) != _BYTES:
        problem = f"is truncated or not the file, with {len(raw)} bytes, expected {_BYTES}"
        raise ValueError(f"CIFAR-10: {path} {problem}: {again}")
    if (got := hashlib.sha256(raw).hexdigest()) != SHA256[path.name]:
        raise ValueError(f"CIFAR-10: {path} has sha256 {got}, expected {SHA256[path.name]}: it is damaged: {again}")
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
    """Make sure that ``data_dir`` holds the files: those there, else the archive there, else the download.

    Nothing half written is left: files arrive under temporary names and are renamed once they are checked. Of runs
    side by side one does it, and the others wait.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot create the data folder {data_dir}: {error}") from None
    with FileLock(data_dir / ".cifar10.lock"):
        files = find(data_dir)
        if files is None and any((data_dir / FOLDER).glob("*")):
            files = data_dir / FOLDER  # a part of it: the error names the first file that is missing
        if files is not None:
            for name in SHA256:
                _read(files / name)
            return files
        archive = data_dir / ARCHIVE
        if not archive.is_file():
            _download(url, archive)
        return _unpack(archive, data_dir)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _download(url: str, target: Path) -> None:
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".download-")
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file, urllib.request.urlopen(url, timeout=30) as response:
            shutil.copyfileobj(response, file)
        if (got := _md5(partial)) != ARCHIVE_MD5:
            raise ValueError(f"CIFAR-10: what {url} sent has md5 {got}, expected {ARCHIVE_MD5}; nothing was kept")
        partial.replace(target)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise ValueError(
            f"CIFAR-10 is not in {target.parent} and cannot be downloaded ({error}). "
            f"Put {ARCHIVE} from {URL} there, or the folder {FOLDER} with its .bin files, "
            "and name the folder with --data-dir or NORMMATTERS_DATA."
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def _unpack(archive: Path, data_dir: Path) -> Path:
    if (got := _md5(archive)) != ARCHIVE_MD5:
        raise ValueError(
            f"CIFAR-10: {archive} has md5 {got}, expected {ARCHIVE_MD5}: truncated or another file; delete it and retry"
        )
    with tempfile.TemporaryDirectory(dir=data_dir, prefix=".unpack-") as scratch:
        try:
            with tarfile.open(archive, "r:gz") as tar:
                tar.extractall(scratch, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(f"CIFAR-10: {archive} cannot be unpacked: {error}") from None
        fresh = Path(scratch) / FOLDER
        for name in SHA256:
            _read(fresh / name)
        fresh.replace(data_dir / FOLDER)
    return data_dir / FOLDER
