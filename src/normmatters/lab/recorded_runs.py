"""Runs that were made, as values: read from their folders, or from the files that ``publish`` wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from normmatters.lab import config as _config
from normmatters.lab.config import RunConfig
from normmatters.lab.files import read_value
from normmatters.lab.run_folder import read_metrics

PUBLISHED = ".run.jsonl"
"""How the name of a published run ends: its config, environment, epochs, and summary or error, a line each."""


@dataclass(frozen=True)
class Metric:
    """A quantity of one epoch: ``key`` in ``metrics.jsonl``, times ``scale``; or 100 minus that (``complement``)."""

    label: str
    key: str
    unit: str = ""
    scale: float = 1.0
    complement: bool = False
    digits: int = 2
    log: bool = False
    less_is_better: bool = False

    def of(self, row: dict[str, Any]) -> float | None:
        value = row.get(self.key)
        if not isinstance(value, int | float):
            return None
        return 100 - self.scale * value if self.complement else self.scale * value


METRICS = {
    "accuracy": Metric("accuracy", "val_acc", "%"),
    "error": Metric("validation error", "val_acc", "%", complement=True, log=True, less_is_better=True),
    "loss": Metric("training loss", "train_loss", digits=4, log=True, less_is_better=True),
    "bleu": Metric("BLEU", "bleu", "", digits=1),
    "ppl": Metric("perplexity", "val_ppl", log=True, less_is_better=True),
    "norm": Metric("mean ‖w‖", "norm", digits=3, log=True),
    "effective_step": Metric("mean η/‖w‖²", "effective_step", digits=4, log=True),
    "seconds": Metric("seconds per epoch", "seconds", "s"),
    "memory": Metric("peak memory", "peak_memory", "GiB", 1 / 2**30),
}


@dataclass(frozen=True)
class Run:
    """One run folder, or one published run, read."""

    path: Path
    config: RunConfig
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None
    error: dict[str, Any] | None

    @property
    def cell_id(self) -> str:
        return f"{self.config.experiment}/{self.config.cell}"

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def finished(self) -> bool:
        return (self.summary or {}).get("status") == "finished"

    @property
    def diverged(self) -> bool:
        """Whether the loss ended as NaN or infinite: a result, not a failure of the run.

        The training loss ends the run. With the validation loss the accuracy is that of a guess.
        """
        validated = [row for row in self.metrics if "val_loss" in row]
        in_the_end = self.finished and bool(validated) and validated[-1]["val_loss"] is None
        return (self.error or {}).get("kind") == "nan" or in_the_end

    @property
    def alone_on_gpu(self) -> bool:
        """Only then a run records its peak memory."""
        return "peak_memory" in {**(self.error or {}).get("metrics", {}), **(self.summary or {})}

    @property
    def val_examples(self) -> int | None:
        """The number of images in the validation set; None for text and for the user's own sets."""
        data = self.config.data
        if own_images(data.name, data.dir):
            return None
        trained = min(data.train_size or 1437, 1437)
        whole = {"digits": 1797 - trained, "cifar10": 10_000, "tiny_imagenet": 10_000, "imagefolder": 50_000}
        size = whole.get(data.name)
        return size if size is None else min(size, data.val_size or size)

    def values(self, metric: Metric) -> list[float]:
        """The metric of the epochs that have it."""
        return [value for row in self.metrics if (value := metric.of(row)) is not None]

    def last(self, metric: Metric) -> float | None:
        values = self.values(metric)
        return values[-1] if values else metric.of(self.summary or {})


def own_images(data: str, directory: str | None) -> str:
    """The name of a folder of images of the user's own; empty for ImageNet and all other sets."""
    folder = Path(directory or "imagenet").name or "images"  # "." has no name
    return folder if data == "imagefolder" and folder != "imagenet" else ""


class ForeignConfig(ValueError):
    """A ``config.json`` of something else than a run."""


def published_file(results: Path, config: _config.RunConfig) -> Path:
    """Where ``publish`` keeps this run of a cell."""
    return _config.cell_folder(results, config) / f"seed{config.seed}{PUBLISHED}"


def read_run(place: Path) -> Run:
    """A run by its folder, or by its published file."""
    return _read_folder(place) if place.is_dir() else read_published(place)


def read_published(path: Path) -> Run:
    """A run that ``publish`` wrote."""
    parts: dict[str, Any] = {"config": None, "environment": {}, "summary": None, "error": None}
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):  # of a str, a label's U+2028 would end one too
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {json.dumps(record)[:40]}")
        if "epoch" in record:
            rows.append(record)
        else:
            parts |= record
    if parts["config"] is None:
        raise ValueError(f"{path}: not a published run: it has no config")
    config = _run_config(parts["config"], path)
    return Run(path, config, parts["environment"], rows, parts["summary"], parts["error"])


def _run_config(config: Any, path: Path) -> RunConfig:
    """The config, checked; a setting that is younger than the run has its default."""
    if not isinstance(config, dict) or not {"experiment", "cell", "seed"} <= config.keys():
        raise ForeignConfig(f"{path}: not the config of a run (experiment, cell and seed are needed)")
    seed = config["seed"]
    if type(seed) is not int:
        return _config.from_dict(config, str(path))  # says what is wrong with it
    # The seeds of a cell share all else, which is parsed and held once.
    return replace(_parsed(json.dumps({**config, "seed": 0}), str(path.parent.parent)), seed=seed)


@lru_cache(maxsize=1024)
def _parsed(text: str, origin: str) -> RunConfig:
    return _config.from_dict(json.loads(text), origin)


def _read_folder(folder: Path) -> Run:
    def table(name: str) -> dict[str, Any] | None:
        value = read_value(folder / name) if (folder / name).exists() else None
        return value if isinstance(value, dict) else None

    try:
        config = _run_config(table("config.json"), folder / "config.json")
    except ForeignConfig:
        raise
    except ValueError as error:
        if any((folder / name).exists() for name in ("metrics.jsonl", "summary.json", "environment.json")):
            raise
        raise ForeignConfig(str(error)) from None  # no other file here is of a run
    rows, summary = read_metrics(folder / "metrics.jsonl"), table("summary.json")
    if summary is not None and len(rows) < (epochs := summary.get("epoch", 0)):  # their last line is not its result
        lost = f"finished with {epochs} epochs, but {len(rows)} are left in metrics.jsonl"
        raise ValueError(f"{folder}: {lost}; remove summary.json, and its command brings them back")
    return Run(folder, config, table("environment.json") or {}, rows, summary, _error(table("error.json")))


def _error(error: dict[str, Any] | None) -> dict[str, Any] | None:
    """An ``error.json`` without the fields that are not of the type that a run writes."""
    kinds = {"kind": str, "message": str, "metrics": dict}
    return error and {key: value for key, value in error.items() if isinstance(value, kinds.get(key, object))}
