"""Data: right files in, the same batches out everywhere; wrong files give clear errors and leave nothing behind."""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from normmatters.lab.cells import load_cell
from normmatters.lab.config import DataConfig
from normmatters.lab.data import ImageData, Shard, TextData, cifar10, data_root, load_data
from normmatters.lab.data.augment import crop_box, draw_epoch, pad, pad_crop, resize, resized_crop
from normmatters.lab.data.images import ResidentLoader, prefetch
from normmatters.lab.data.text import BOS, EOS, PAD, TextLoader, read_pairs


def images(config: DataConfig, data_dir: Path | None = None, **options: object) -> ImageData:
    data = load_data(config, data_dir, **options)  # type: ignore[arg-type]
    assert isinstance(data, ImageData)
    return data


def test_digits_are_real_and_fixed() -> None:
    data = images(DataConfig(augment=False))
    again = images(DataConfig(augment=False))
    assert data.train.count == 1437
    assert data.val.count == 360
    for (x, y), (x2, y2) in zip(data.train.epoch(3), again.train.epoch(3)):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
    x = torch.cat([x for x, _ in data.val]).float() / 255
    assert abs(x.mean() - data.mean[0]) < 0.01
    assert abs(x.std() - data.std[0]) < 0.01
    # a nearest-neighbour classifier reads them: labels belong to images
    train_x = torch.cat([x for x, _ in data.train.epoch(0)]).flatten(1).float()
    train_y = torch.cat([y for _, y in data.train.epoch(0)])
    val_x = torch.cat([x for x, _ in data.val]).flatten(1).float()
    val_y = torch.cat([y for _, y in data.val])
    assert (train_y[torch.cdist(val_x, train_x).argmin(1)] == val_y).float().mean() > 0.95


def test_epochs_differ_and_cover_the_set() -> None:
    data = images(DataConfig(augment=False, batch_size=479))  # 3 · 479 = 1437
    sums = [sum(float(x.sum()) for x, _ in data.train.epoch(e)) for e in (0, 1)]
    firsts = [next(iter(data.train.epoch(e)))[1] for e in (0, 1)]
    assert sums[0] == sums[1]
    assert not torch.equal(*firsts)


def test_processes_share_the_global_batch() -> None:
    whole = images(DataConfig(batch_size=64))
    parts = [images(DataConfig(batch_size=64), shard=Shard(rank, 2)) for rank in (0, 1)]
    for (x, y), (x0, y0), (x1, y1) in zip(whole.train.epoch(1), parts[0].train.epoch(1), parts[1].train.epoch(1)):
        assert torch.equal(x, torch.cat([x0, x1]))
        assert torch.equal(y, torch.cat([y0, y1]))
    with pytest.raises(ValueError, match="multiple of the 3 processes"):
        images(DataConfig(batch_size=64), shard=Shard(0, 3))
    with pytest.raises(ValueError, match="only 1437 training examples"):
        images(DataConfig(batch_size=2000))


def test_pad_crop_is_the_loop_it_stands_for() -> None:
    x = torch.randint(0, 256, (5, 6, 6, 3), dtype=torch.uint8)
    index, u = torch.tensor([3, 0, 4]), torch.rand(3, 5)
    u[:, 2] = torch.tensor([0.1, 0.9, 0.1])
    got = pad_crop(pad(x, 2), index, u, 6, flip=True)
    for row, i in enumerate(index.tolist()):
        canvas = torch.zeros(10, 10, 3, dtype=torch.uint8)
        canvas[2:8, 2:8] = x[i]
        top, left = int(u[row, 0] * 5), int(u[row, 1] * 5)
        want = canvas[top : top + 6, left : left + 6]
        assert torch.equal(got[row], want.flip(1) if u[row, 2] < 0.5 else want)


def test_resized_crop() -> None:
    u = torch.rand(64, 5)
    box = crop_box(u, 40, 30, 0.25)
    top, left, h, w = box.unbind(1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + h <= 40 + 1e-4).all()
    assert (left + w <= 30 + 1e-4).all()
    # a picture whose value is its column: the crop's columns are where the box says, mirrored where it flips
    ramp = (torch.arange(30) * 4).to(torch.uint8).expand(64, 30, 30)[..., None]
    box = crop_box(u, 30, 30, 0.25)
    crop = resized_crop(ramp, u, 10, 0.25).float()[..., 0] / 4
    centre = box[:, 1] + box[:, 3] * (4.5 + 0.5) / 10 - 0.5
    flipped = u[:, 2] < 0.5
    middle = torch.where(flipped, crop[:, 5, 5], crop[:, 5, 4]) + 0.05 * box[:, 3]
    assert (middle - centre).abs().max() < 0.3
    assert (torch.sign(crop[:, 5, 8] - crop[:, 5, 1]) == torch.where(flipped, -1.0, 1.0)).all()
    assert resize(ramp, 30) is ramp
    assert torch.equal(draw_epoch(9, 1, 2)[0], draw_epoch(9, 1, 2)[0])


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six files in the official format, 20 images each, their checksums in place of the official ones."""
    folder = tmp_path / "source" / cifar10.FOLDER
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    sums = {}
    for name in cifar10.SHA256:
        records = generator.integers(0, 256, (20, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)
        sums[name] = hashlib.sha256(records.tobytes()).hexdigest()
    monkeypatch.setattr(cifar10, "SHA256", sums)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(folder, cifar10.FOLDER)
    (tmp_path / "source" / cifar10.ARCHIVE).write_bytes(archive.getvalue())
    return tmp_path / "source"


def test_cifar_from_files_archive_and_download(cifar: Path, tmp_path: Path) -> None:
    data = images(DataConfig(name="cifar10", batch_size=20, augment="none"), cifar)
    raw = np.fromfile(cifar / cifar10.FOLDER / "test_batch.bin", np.uint8).reshape(20, 3073)
    x, y = next(iter(data.val))
    assert np.array_equal(x.numpy(), raw[:, 1:].reshape(20, 3, 32, 32))
    assert np.array_equal(y.numpy(), raw[:, 0])
    assert data.train.count == 100

    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / cifar10.ARCHIVE).write_bytes((cifar / cifar10.ARCHIVE).read_bytes())
    named = load_cell("fig3/l1_fp16").config("cifar").data  # by the set's usual folder
    assert images(replace(named, batch_size=20), packed).train.count == 100
    with pytest.raises(ValueError, match=r"no test_batch.bin in .*elsewhere"):
        images(replace(named, dir="elsewhere"), packed)

    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    (unpacked / cifar10.ARCHIVE).write_bytes((cifar / cifar10.ARCHIVE).read_bytes())
    assert cifar10.prepare(unpacked) == unpacked / cifar10.FOLDER

    fetched = cifar10.prepare(tmp_path / "new" / "dir", url=(cifar / cifar10.ARCHIVE).as_uri())
    assert (fetched / "data_batch_5.bin").is_file()


def test_runs_side_by_side_download_once(cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    download = cifar10._download

    def slow(url: str, target: Path) -> None:
        started.append(url)
        time.sleep(0.2)
        download(url, target)

    monkeypatch.setattr(cifar10, "_download", slow)

    def prepare(_: int) -> Path:
        return cifar10.prepare(tmp_path / "new", url=(cifar / cifar10.ARCHIVE).as_uri())

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(prepare, range(3))) == [tmp_path / "new" / cifar10.FOLDER] * 3
    assert len(started) == 1


def test_cifar_damage_is_told_and_nothing_is_left(cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(name="cifar10", batch_size=20)
    path = cifar / cifar10.FOLDER / "data_batch_2.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-7])
    with pytest.raises(ValueError, match=r"data_batch_2.bin is damaged, .*: delete the folder"):
        images(config, cifar)
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(ValueError, match=r"data_batch_2.bin is damaged, .*: delete the folder"):
        images(config, cifar)
    path.unlink()
    with pytest.raises(ValueError, match=r"data_batch_2.bin is missing: delete the folder .* and `normmatters"):
        images(config, cifar)
    (cifar / cifar10.FOLDER / "test_batch.bin").unlink()  # as of an archive that somebody stopped unpacking
    with pytest.raises(ValueError, match=r"data_batch_2.bin is missing: delete the folder"):
        images(config, cifar)
    shutil.rmtree(cifar / cifar10.FOLDER)
    assert images(config, cifar).train.count == 100  # as told, from the archive

    truncated = tmp_path / "truncated"
    truncated.mkdir()
    (truncated / cifar10.ARCHIVE).write_bytes((cifar / cifar10.ARCHIVE).read_bytes()[:-50])
    with pytest.raises(ValueError, match="truncated or another file"):
        cifar10.prepare(truncated)
    assert {p.name for p in truncated.iterdir()} == {cifar10.ARCHIVE, ".cifar10.lock"}

    empty = tmp_path / "empty"
    with pytest.raises(ValueError, match="nothing was kept"):
        cifar10.prepare(empty, url=(truncated / cifar10.ARCHIVE).as_uri())
    monkeypatch.setattr(cifar10, "URL", "http://127.0.0.1:9/none")  # nobody listens there: as without a network
    with pytest.raises(ValueError, match=r"cannot be downloaded .* NORMMATTERS_DATA"):
        cifar10.prepare(empty, url=cifar10.URL)
    assert [p.name for p in empty.iterdir()] == [".cifar10.lock"]


def make_arrays(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(1)
    for split, n in (("train", 48), ("val", 10)):
        x = generator.integers(0, 256, (n, 3, 16, 16), dtype=np.uint8)
        y = (np.arange(n) % 5).astype(np.uint8)
        np.save(folder / f"{split}_x.npy", x)
        np.save(folder / f"{split}_y.npy", y)
    return np.load(folder / "train_x.npy"), np.load(folder / "train_y.npy")


@pytest.mark.parametrize("augment", ["none", "crop_flip", "resized_crop"])
def test_streamed_and_resident_batches_are_equal(tmp_path: Path, augment: str) -> None:
    x, _ = make_arrays(tmp_path / "tiny-imagenet-200")
    larger = np.random.default_rng(2).integers(0, 256, (10, 3, 24, 24), dtype=np.uint8)  # than those to train with
    np.save(tmp_path / "tiny-imagenet-200" / "val_x.npy", larger)
    sizes = {"train_size": 40, "val_size": 6} if augment == "crop_flip" else {}
    base = DataConfig(name="tiny_imagenet", batch_size=16, augment=augment, **sizes)
    resident = images(DataConfig(**{**base.__dict__, "resident": True}), tmp_path)
    streamed = images(DataConfig(**{**base.__dict__, "resident": False}), tmp_path)
    assert resident.classes == streamed.classes == 5
    pairs = list(zip(resident.train.epoch(1), streamed.train.epoch(1)))
    assert len(pairs) == (2 if sizes else 3)
    assert resident.val.count == streamed.val.count == (6 if sizes else 10)
    for (x0, y0), (x1, y1) in pairs:
        assert torch.equal(x0, x1)
        assert torch.equal(y0, y1)
    for (x0, y0), (x1, y1) in zip(resident.val, streamed.val):
        assert torch.equal(x0, x1)
        assert torch.equal(y0, y1)
    if augment == "none":
        order = draw_epoch(48, 0, 1)[0][:16].numpy()
        assert np.array_equal(pairs[0][0][0].numpy(), x[order])


@pytest.mark.gpu
def test_runs_on_a_gpu_share_one_copy_until_the_files_change(tmp_path: Path) -> None:
    folder, device = tmp_path / "tiny-imagenet-200", torch.device("cuda")
    config = DataConfig(name="tiny_imagenet", batch_size=16, augment="none")

    def first_image() -> torch.Tensor:
        train = images(config, tmp_path, device=device).train
        assert isinstance(train, ResidentLoader)
        return train.images[0]

    x, _ = make_arrays(folder)
    first = first_image()
    assert np.array_equal(first.cpu().numpy(), x[0].transpose(1, 2, 0))
    assert first_image().data_ptr() == first.data_ptr()
    np.save(folder / "train_x.npy", 255 - x)
    assert torch.equal(first_image(), 255 - first)


def test_arrays_and_folders_that_are_wrong(tmp_path: Path) -> None:
    config = DataConfig(name="tiny_imagenet", batch_size=8)
    with pytest.raises(ValueError, match="no image folder"):
        images(config, tmp_path)
    folder = tmp_path / "tiny-imagenet-200"
    make_arrays(folder)
    np.save(folder / "train_y.npy", np.zeros(7, np.uint8))
    with pytest.raises(ValueError, match="48 images but labels"):
        images(config, tmp_path)
    np.save(folder / "train_x.npy", np.zeros((4, 3, 8, 8), np.float32))
    with pytest.raises(ValueError, match="expected uint8"):
        images(config, tmp_path)
    good = np.zeros((4, 3, 8, 8), np.uint8)
    for x, y, message in (
        (good[:, :1], np.zeros(4, int), r"\(N, 3, H, W\) or \(N, H, W, 3\), got uint8 \(4, 1, 8, 8\)"),
        (good[:0], np.zeros(0, int), r"got uint8 \(0, 3, 8, 8\)"),
        (good, np.array(3), r"4 images but labels of shape \(\)"),
        (good, np.zeros(4, int) - 1, "expected labels 0, 1, 2, ..., got int64 from -1"),
        (good, np.zeros(4) + 0.5, "expected labels 0, 1, 2, ..., got float64 from 0.5"),
    ):
        np.save(folder / "train_x.npy", x)
        np.save(folder / "train_y.npy", y)
        with pytest.raises(ValueError, match=message):
            images(config, tmp_path)
    (folder / "train_x.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match="cannot read the train arrays"):
        images(config, tmp_path)
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match="or folders train/CLASS"):
        images(DataConfig(name="imagefolder", dir="bare"), tmp_path)


def test_image_folders(tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        for label, colour in (("cat", (200, 0, 0)), ("dog", (0, 200, 0))):
            folder = tmp_path / "imagenet" / split / label
            folder.mkdir(parents=True)
            for i in range(4):
                pil.new("RGB", (40, 30), colour).save(folder / f"{i}.png")
    (tmp_path / "imagenet" / "train" / ".cache").mkdir()
    data = images(DataConfig(name="imagefolder", image_size=16, batch_size=4), tmp_path)
    assert data.classes == 2
    x, y = next(iter(data.train.epoch(0)))
    assert x.shape == (4, 3, 16, 16)
    assert torch.equal(x[:, :2].amax((2, 3)).argmax(1), y)
    (tmp_path / "imagenet" / "val" / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"cannot read the image .*0\.png"):
        list(data.val)
    (tmp_path / "imagenet" / "val" / "dgo").mkdir()
    with pytest.raises(ValueError, match="classes that train has not: dgo"):
        images(DataConfig(name="imagefolder", image_size=16, batch_size=4), tmp_path)
    (tmp_path / "imagenet" / "val" / "dgo").rmdir()
    (tmp_path / "imagenet" / "val" / "images").mkdir()
    for line in ("0.png\tdgo\t0\n", "0.png dog\n"):
        (tmp_path / "imagenet" / "val" / "val_annotations.txt").write_text(line)
        with pytest.raises(ValueError, match=r"val_annotations\.txt: no class '(dgo)?' in train"):
            images(DataConfig(name="imagefolder", image_size=16, batch_size=4), tmp_path)


def test_tiny_imagenets_validation_set_as_it_comes_and_sorted(tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    config, folder = DataConfig(name="tiny_imagenet", batch_size=2), tmp_path / "tiny-imagenet-200"
    for label in ("n01", "n02"):
        (folder / "train" / label / "images").mkdir(parents=True)
        pil.new("RGB", (64, 64)).save(folder / "train" / label / "images" / f"{label}_0.JPEG")
    (folder / "val" / "images").mkdir(parents=True)
    table = folder / "val" / "val_annotations.txt"
    table.write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    pil.new("RGB", (64, 64)).save(folder / "val" / "images" / "val_0.JPEG")
    with pytest.raises(ValueError, match=r"1 of its 2 images are missing, such as val_1\.JPEG"):
        images(config, tmp_path)
    pil.new("RGB", (64, 64)).save(folder / "val" / "images" / "val_1.JPEG")
    assert [y.tolist() for _, y in images(config, tmp_path).val] == [[1, 0]]
    # as the scripts leave it that sort it into folders
    for name, label in (("val_0.JPEG", "n02"), ("val_1.JPEG", "n01")):
        (folder / "val" / label).mkdir()
        (folder / "val" / "images" / name).rename(folder / "val" / label / name)
    (folder / "val" / "images").rmdir()
    assert [y.tolist() for _, y in images(config, tmp_path).val] == [[0, 1]]


def test_hidden_files_are_no_images_and_a_broken_one_is_named(tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        folder = tmp_path / "imagenet" / split / "cat"
        (folder / ".ipynb_checkpoints").mkdir(parents=True)
        for name in ("0.png", "1.png", ".ipynb_checkpoints/0-checkpoint.png"):
            pil.new("RGB", (20, 20)).save(folder / name)
        (folder / "._0.png").write_bytes(b"macOS")
    data = images(DataConfig(name="imagefolder", image_size=16, batch_size=2), tmp_path)
    assert data.train.steps == 1
    assert data.val.count == 2
    damaged = bytearray((folder / "1.png").read_bytes())
    damaged[damaged.index(b"IDAT") : damaged.index(b"IDAT") + 4] = b"\x97Y\xf4\x03"
    (folder / "1.png").write_bytes(damaged)  # of which PIL says SyntaxError
    with pytest.raises(ValueError, match=r"cannot read the image .*1\.png"):
        list(data.val)
    pil.new("I;16", (20, 20), 1000).save(folder / "1.png")  # of which PIL would make a white one
    with pytest.raises(ValueError, match=r"cannot read the image .*1\.png: expected 8 bits per channel, got .* mode I"):
        list(data.val)


@pytest.mark.parametrize("name", ["tiny_imagenet", "imagefolder"])
def test_arrays_and_folders_of_the_same_images_are_the_same_data(tmp_path: Path, name: str) -> None:
    """Arrays only load sooner: size, crops and flips are those of the image files."""
    pil = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(3)
    side = 64 if name == "tiny_imagenet" else 224
    (tmp_path / "arrays").mkdir()
    for split, n in (("train", 6), ("val", 4)):
        x = generator.integers(0, 256, (n, side, side, 3), dtype=np.uint8)
        y = np.arange(n) * 2 // n
        for i in range(n):
            folder = tmp_path / "folder" / split / "ab"[y[i]]
            folder.mkdir(parents=True, exist_ok=True)
            pil.fromarray(x[i]).save(folder / f"{i}.png")
        np.save(tmp_path / "arrays" / f"{split}_x.npy", x)
        np.save(tmp_path / "arrays" / f"{split}_y.npy", y)
    stored, decoded = (images(DataConfig(name=name, dir=kind, batch_size=2), tmp_path) for kind in ("arrays", "folder"))  # type: ignore[arg-type]
    assert stored.size == decoded.size == side
    for a, b in ((stored.train.epoch(0), decoded.train.epoch(0)), (stored.val, decoded.val)):
        for (x0, y0), (x1, y1) in zip(a, b, strict=True):
            assert torch.equal(y0, y1)
            assert (x0.int() - x1.int()).abs().max() <= 2  # PIL interpolates in fixed point, and rounds twice


def test_prefetch_keeps_order_and_passes_errors_on() -> None:
    def read(step: int) -> tuple[int]:
        if step == 5:
            raise ValueError("disk gone")
        return (step,)

    assert [s for (s,) in prefetch(read, 5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="disk gone"):
        list(prefetch(read, 7))
    iterator = prefetch(read, 5)
    next(iterator)
    iterator.close()  # leaves no thread waiting


def write_pairs(folder: Path, split: str, rows: list[tuple[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for column, language in enumerate(("de", "en")):
        (folder / f"{split}.{language}").write_text("".join(r[column] + "\n" for r in rows), encoding="utf-8")


def test_parallel_files(tmp_path: Path) -> None:
    folder = tmp_path / load_cell("supp2/ln").config("cifar").data.dir  # type: ignore[operator]
    rows = [(f"Käse {i} äöü", f"cheese {i}") for i in range(50)]
    write_pairs(folder, "train", [*rows, ("", "empty")])
    write_pairs(folder, "val", rows[:7])
    config = DataConfig(name="text", vocab_size=300, tokens=64)
    data = load_data(config, tmp_path)
    assert isinstance(data, TextData)
    assert data.train.count == 50
    assert data.references == [t for _, t in rows[:7]]
    batch = next(iter(data.val))
    row = batch.target_out[0]
    assert row[row != PAD][-1] == EOS
    assert batch.target_in[0, 0] == BOS
    assert torch.equal(batch.target_in[0, 1:][row[1:] != PAD], row[:-1][row[1:] != PAD])
    assert data.decode(row.tolist()) in data.references
    assert "Käse" in data.decode(batch.source[0].tolist())

    (folder / "val.en").write_text("one line\n")
    with pytest.raises(ValueError, match="de has 7 lines but en has 1"):
        load_data(config, tmp_path)
    with pytest.raises(ValueError, match=r"no parallel text .*files for 'en' there: train.en, val.en"):
        read_pairs(folder, "valid", "en", "de")
    (folder / "val.de").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_data(config, tmp_path)
    with pytest.raises(ValueError, match=r"no folder of parallel text: .*absent; .*\(train\.de, train\.en, \.\.\.\)"):
        load_data(DataConfig(name="text", dir="absent"), tmp_path)


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    (tmp_path / "train.de").write_bytes("\ufeffein\rHaus\r\nzwei\n".encode())
    (tmp_path / "train.en").write_bytes("\ufeffa house\ntwo".encode())
    assert read_pairs(tmp_path, "train", "de", "en") == (["ein\rHaus", "zwei"], ["a house", "two"])


def test_tags_in_a_text_are_text(tmp_path: Path) -> None:
    """A web page's "</s>" was taken for the end of the sentence, and "<pad>" for nothing at all."""
    rows = [("<s>alt</s> neu <pad> x", "<s>old</s> new <pad> x")] * 4
    for split in ("train", "val"):
        write_pairs(tmp_path / "tags", split, rows)
    (tmp_path / "run").mkdir()
    for _ in range(2):  # learned, and read again
        data = load_data(DataConfig(name="text", dir="tags", vocab_size=300), tmp_path, cache=tmp_path / "run")
        assert isinstance(data, TextData)
        batch = next(iter(data.val))
        assert (batch.target_out == EOS).sum(1).tolist() == [1] * 4
        assert data.decode(batch.target_out[0].tolist()) == rows[0][1]
        assert data.decode(batch.source[0].tolist()) == rows[0][0]


def test_text_batches_hold_every_pair_once_and_respect_the_budget() -> None:
    generator = np.random.default_rng(0)
    pairs = [([i + 3] * generator.integers(1, 30), [i + 3] * generator.integers(1, 30)) for i in range(300)]
    loader = TextLoader(pairs, 128, 0, Shard(), torch.device("cpu"))
    for epoch in (0, 1):
        ids: list[int] = []
        batches = list(loader.epoch(epoch))
        assert len(batches) == loader.steps
        for batch in batches:
            assert max(batch.source.numel(), batch.target_in.numel()) <= 128
            assert batch.tokens == int((batch.target_out != PAD).sum())
            ids += batch.target_out[:, 0].tolist()
            for row in zip(batch.source, batch.target_in, batch.target_out):
                source, target_in, target_out = (r[r != PAD].tolist() for r in row)
                pair = pairs[target_out[0] - 3]
                assert (source, target_in, target_out) == ([*pair[0], EOS], [BOS, *pair[1]], [*pair[1], EOS])
        assert sorted(ids) == [i + 3 for i in range(300)]
    halves = [TextLoader(pairs, 128, 0, Shard(r, 2), torch.device("cpu")) for r in (0, 1)]
    for whole, a, b in zip(loader.epoch(0), halves[0].epoch(0), halves[1].epoch(0)):
        both = int((a.target_out != PAD).sum() + (b.target_out != PAD).sum())
        assert whole.tokens == a.tokens == b.tokens == both


def test_numbers_and_their_cached_tokenizer(tmp_path: Path) -> None:
    config = DataConfig(name="numbers", vocab_size=120, train_size=200, val_size=20)
    data = load_data(config, cache=tmp_path)
    assert isinstance(data, TextData)
    before = (tmp_path / "tokenizer.json").read_bytes()
    again = load_data(config, cache=tmp_path)
    assert isinstance(again, TextData)
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    for a, b in zip(again.train.epoch(0), data.train.epoch(0)):
        assert torch.equal(a.source, b.source)
        assert torch.equal(a.target_out, b.target_out)
    (tmp_path / "tokenizer.json").write_bytes(before[:100])
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged .* begin again"):
        load_data(config, cache=tmp_path)
    with pytest.raises(ValueError, match="are in 'en' and 'de'"):
        load_data(DataConfig(name="numbers", source="fr"))
    with pytest.raises(ValueError, match="splits train, val, test"):
        load_data(DataConfig(name="numbers", val_split="dev"))


def test_data_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NORMMATTERS_DATA", raising=False)
    assert data_root() == Path("data")
    monkeypatch.setenv("NORMMATTERS_DATA", "/some/where")
    assert data_root() == Path("/some/where")
    assert data_root("here") == Path("here")
    monkeypatch.setenv("HOME", "/home/me")
    assert data_root("~/data") == Path("/home/me/data")
    with pytest.raises(ValueError, match="no image folder /home/me/sets/mine"):
        load_data(DataConfig(name="imagefolder", dir="~/sets/mine"))
