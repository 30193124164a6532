"""Run folders in, results out: which runs there are, what each cell measured, what differs from the paper's setting."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from normmatters.lab import config as _config
from normmatters.lab import experiments
from normmatters.lab.claims import CLAIMS
from normmatters.lab.config import RunConfig
from normmatters.lab.experiments import Cell, Paper
from normmatters.lab.files import read_value
from normmatters.lab.run_folder import read_metrics


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
        """Whether the loss was no longer a number in the end: a result, not a failure of the run.

        Of training, which ends the run, or of validation, whose accuracy is then that of a guess.
        """
        validated = [row for row in self.metrics if "val_loss" in row]
        in_the_end = self.finished and bool(validated) and validated[-1]["val_loss"] is None
        return (self.error or {}).get("kind") == "nan" or in_the_end

    @property
    def alone_on_gpu(self) -> bool:
        """The trainer measures a peak of memory there only."""
        return "peak_memory" in {**(self.error or {}).get("metrics", {}), **(self.summary or {})}

    @property
    def val_examples(self) -> int | None:
        """How many images the validation set has; None for text and for sets of the user's own."""
        data = self.config.data
        if _own_images(data.name, data.dir):
            return None
        trained = min(data.train_size or 1437, 1437)
        whole = {"digits": 1797 - trained, "cifar10": 10_000, "tiny_imagenet": 10_000, "imagefolder": 50_000}
        size = whole.get(data.name)
        return size if size is None else min(size, data.val_size or size)

    def values(self, metric: Metric) -> list[float]:
        """Of the epochs that have one."""
        return [value for row in self.metrics if (value := metric.of(row)) is not None]

    def last(self, metric: Metric) -> float | None:
        values = self.values(metric)
        return values[-1] if values else metric.of(self.summary or {})


@dataclass(frozen=True)
class Result:
    """What one cell of the paper measured here: the runs of all its seeds."""

    cell: Cell
    runs: tuple[Run, ...]

    @property
    def done(self) -> tuple[Run, ...]:
        """Runs that say something about the cell: finished, or diverged."""
        return tuple(r for r in self.runs if r.finished or r.diverged)

    @property
    def config(self) -> RunConfig:
        return self.runs[0].config

    @cached_property
    def words(self) -> dict[str, str]:
        """:func:`describe` of its runs."""
        return describe(_config.to_dict(self.config))

    @property
    def setting(self) -> str:
        return f"{self.words['network']} on {self.words['data']}"

    @property
    def diverged(self) -> list[Run]:
        """The runs that did."""
        return [run for run in self.done if run.diverged]

    @property
    def all_diverged(self) -> bool:
        return 0 < len(self.diverged) == len(self.done)

    @property
    def divergence(self) -> str:
        """ "diverged", and in how many seeds where it was not in all; empty where none did."""
        some = f" in {len(self.diverged)} of {len(self.done)} seeds" * (not self.all_diverged)
        return f"diverged{some}" if self.diverged else ""

    def final(self, name: str) -> float | None:
        """The mean of :meth:`by_seed`; None where no run has a value."""
        values = self.by_seed(name).values()
        return statistics.fmean(values) if values else None

    def by_seed(self, name: str) -> dict[int, float]:
        """The last epoch's value of each seed that has one (for ``seconds`` the median epoch)."""
        metric, found = METRICS[name], dict[int, float]()
        for run in self.done:
            epochs = run.values(metric)
            value = statistics.median(epochs) if epochs and name == "seconds" else run.last(metric)
            if value is not None and math.isfinite(value):
                found[run.seed] = value
        return found

    def text(self, name: str) -> str:
        """Mean and standard deviation of :meth:`by_seed` for a table."""
        metric, values = METRICS[name], self.by_seed(name).values()
        if self.diverged or not values:
            return self.divergence or "–"
        spread = f" ± {statistics.stdev(values):.{metric.digits}f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.{metric.digits}f}{spread} {metric.unit or metric.label}"

    @cached_property
    def differences(self) -> list[tuple[str, str, str]]:
        """``(what, here, in the paper)`` for each setting in which these runs differ from the paper's own regime.

        What no setting can say has no second and third part.
        """
        if self.cell.of_user:
            return []
        source = experiments.load_cell(self.cell.source)
        paper = _words(_config.merge(_config.to_dict(source.config("full")), dict(source.paper.regime)))
        here = _words(_config.to_dict(self.config))
        found = [(key, value, paper[key]) for key, value in here.items() if value != paper.get(key, value)]
        return found + [(text, "", "") for text in source.paper.departs]

    @property
    def deviations(self) -> list[str]:
        """Settings in which these runs differ from what their cell says now, at the preset that fits them best."""
        if self.cell.of_user:
            return []
        source, here = experiments.load_cell(self.cell.source), _words(_config.to_dict(self.config))
        cells = [_words(_config.to_dict(source.config(preset))) for preset in experiments.PRESETS]
        found = [
            [f"{k} {here[k]} instead of {now[k]}" for k in here if here[k] != now.get(k, here[k])] for now in cells
        ]
        return min(found, key=len)

    @property
    def paper_text(self) -> str:
        """The paper's number for a table, or what it says instead."""
        paper, metric = self.cell.paper, METRICS[self.cell.paper.metric]
        return paper.note or "–" if paper.value is None else f"{paper.value:g} {metric.unit or metric.label}"

    def sampling_error(self, name: str) -> float | None:
        """The standard error of a share of images of a validation set of this size; None of what is no such share."""
        mean, size = self.final(name), self.runs[0].val_examples
        if mean is None or not size or name not in ("accuracy", "error"):
            return None
        share = min(max(mean / 100, 0.5 / size), 1 - 0.5 / size)  # 0 of N is not known to be 0
        return 100 * math.sqrt(share * (1 - share) / size)

    def curve(self, name: str) -> list[tuple[float, float, float, float]]:
        """``(epoch, mean, lowest, highest)`` over seeds; stops where the first value is not finite."""
        metric, by_epoch = METRICS[name], dict[float, list[float]]()
        for run in self.done or self.runs:
            for row in run.metrics:
                value = metric.of(row)
                if value is None:
                    continue
                if not math.isfinite(value):
                    break
                by_epoch.setdefault(row["epoch"], []).append(value)
        return [(e, statistics.fmean(v), min(v), max(v)) for e, v in sorted(by_epoch.items())]


@dataclass(frozen=True)
class Collection:
    """All results by cell id (``same_as`` followed), and the runs that did not finish."""

    results: dict[str, Result]
    runs: tuple[Run, ...]
    foreign: tuple[Path, ...] = ()

    @property
    def unfinished(self) -> list[Run]:
        return [r for r in self.runs if not r.finished and not r.diverged]

    def of(self, experiment: str) -> dict[str, Result]:
        return {r.cell.name: r for id, r in self.results.items() if id.partition("/")[0] == experiment}

    @property
    def experiments(self) -> list[str]:
        """Experiments with a run of their own, or with a claim about others' runs: the paper's in its order, then the
        user's own."""
        found = {r.cell.experiment for id, r in self.results.items() if r.cell.source == id}
        found |= {claim.experiment for claim in CLAIMS if claim.cells <= self.results.keys()}
        paper = [name for name in experiments.experiment_names() if name in found]
        return paper + sorted(found - set(paper))


def collect(paths: Iterable[str | Path], progress: Callable[[str], None] | None = None) -> Collection:
    """Read every run below ``paths``: folders with a ``config.json``, and published runs, one file each.

    A ``config.json`` that is no run's is left out and named in the report. ``progress`` is called with a few words from
    time to time: thousands of runs take seconds.
    """
    runs: list[Run] = []
    foreign: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{path}: no such folder")
        found = [path]
        if not path.name.endswith(PUBLISHED):
            found = sorted({p.parent for p in path.rglob("config.json")} | {*path.rglob(f"*{PUBLISHED}")})
        if not found:
            raise ValueError(f"{path}: no run folders below it (a run folder has a config.json)")
        known = {r.path.resolve() for r in runs}
        for place in found:
            if place.resolve() in known:
                continue
            if progress and len(runs) % 250 == 0:
                progress(f"{len(runs)} of {len(found)} runs read")
            try:
                runs.append(_read(place) if place.is_dir() else read_published(place))
            except ForeignConfig as error:
                if place.name.endswith(PUBLISHED) or len(found) == 1:
                    raise ValueError(str(error)) from None
                foreign.append(place)
    if foreign and not runs:
        raise ValueError(f"{foreign[0]}: its config.json is not the config of a run, and there is no other")
    by_cell: dict[str, list[Run]] = {}
    for run in runs:
        by_cell.setdefault(run.cell_id, []).append(run)
    for name, group in by_cell.items():
        if len({_identity(run.config) for run in group}) > 1:
            where = ", ".join(str(run.path) for run in group[:4])
            raise ValueError(f"{name} has runs of different settings ({where}): report one folder at a time")
        count = Counter(run.seed for run in group)
        twice = [run for run in group if count[run.seed] > 1]
        if twice:  # which would count as two seeds, and halve the noise
            where = ", ".join(str(run.path) for run in twice[:4])
            raise ValueError(f"{name} has seed {twice[0].seed} more than once ({where}): report one of them")
    cells = {cell.id: cell for cell in experiments.load_cells()}
    results = {
        name: Result(cell, tuple(sorted(by_cell[cell.source], key=lambda r: r.seed)))
        for name, cell in cells.items()
        if cell.source in by_cell
    }
    for name, group in by_cell.items():
        if name not in cells or cells[name].same_as:  # the lab runs that one under the other's name
            config = group[0].config
            paper = Paper("ppl" if config.data.name in _config.TEXT else "accuracy")
            cell = Cell(name, config.label or config.cell, group[0].path, {}, {}, paper)
            results[name] = Result(cell, tuple(group))
    return Collection(results, tuple(runs), tuple(foreign))


class ForeignConfig(ValueError):
    """A ``config.json`` of something else than a run."""


PUBLISHED = ".run.jsonl"
"""How the name of a published run ends: its config, environment, epochs, and summary or error, a line each."""


def published_file(results: Path, config: _config.RunConfig) -> Path:
    """Where ``publish`` keeps this run of a cell."""
    return _config.cell_folder(results, config) / f"seed{config.seed}{PUBLISHED}"


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


def _identity(config: RunConfig) -> RunConfig:
    """What the seeds of a cell must have in common."""
    decoding = _config.RuntimeConfig(beam=config.runtime.beam, length_penalty=config.runtime.length_penalty)
    return replace(config, seed=0, label="", runtime=decoding)


def _read(folder: Path) -> Run:
    def table(name: str) -> dict[str, Any] | None:
        value = read_value(folder / name) if (folder / name).exists() else None
        return value if isinstance(value, dict) else None

    config = _run_config(table("config.json"), folder / "config.json")
    rows, summary = read_metrics(folder / "metrics.jsonl"), table("summary.json")
    if summary is not None and len(rows) < (epochs := summary.get("epoch", 0)):  # their last line is not its result
        lost = f"finished with {epochs} epochs, but {len(rows)} are left in metrics.jsonl"
        raise ValueError(f"{folder}: {lost}; remove summary.json, and its command brings them back")
    return Run(folder, config, table("environment.json") or {}, rows, summary, table("error.json"))


_DATA = {
    "digits": "scikit-learn digits (8×8 grey images)",
    "cifar10": "CIFAR-10",
    "tiny_imagenet": "Tiny-ImageNet (200 classes, 64×64)",
    "imagefolder": "ImageNet",
    "numbers": "number words, German to English",
}
_MODELS = {
    "small_cnn": "a small convnet",
    "vgg11": "VGG11",
    "transformer": "Transformer base",
    "transformer_small": "a small Transformer",
}


def _own_images(data: str, directory: str | None) -> str:
    """The name of a folder of images of the user's own; empty for ImageNet and all other sets."""
    folder = Path(directory or "imagenet").name or "images"  # "." has no name
    return folder if data == "imagefolder" and folder != "imagenet" else ""


def describe(config: dict[str, Any]) -> dict[str, str]:
    """The settings of a run that a reader asks for first, in words."""
    data, model, optim = config["data"], config["model"], config["optim"]
    name = _own_images(data["name"], data["dir"]) or data["name"]
    if data["name"] == "text":
        folder = Path(data["dir"] or "multi30k").name or "parallel text"
        name = {"wmt14": "WMT14", "multi30k": "Multi30k", "tatoeba": "Tatoeba"}.get(
            folder, folder
        ) + f" {data['source']}-{data['target']}"
    network = str(model["name"])
    network = _MODELS.get(network, network.replace("resnet", "ResNet-"))
    sizes = {key: model[key] for key in ("width", "layers", "d_model")}
    if network == "lstm":
        network = f"{sizes.pop('layers') or 2}-layer LSTM with attention"
    extra = [f"{k} {v:g}" for k, v in sizes.items() if v is not None and (k, v) != ("width", 1.0)]
    milestones = ", ".join(f"{m:g}" for m in optim["milestones"])
    drops = f", ÷{1 / optim['gamma']:g} at {milestones}" if milestones and optim["schedule"] == "step" else ""
    amp = config["precision"]["amp"]
    return {
        "data": _DATA.get(name, name),
        "training examples": f"{data['train_size'] or 'all'}",
        "network": network + (f" ({', '.join(extra)})" if extra else ""),
        "batch": f"{data['tokens']} tokens" if data["name"] in _config.TEXT else f"{data['batch_size']}",
        "epochs": f"{optim['epochs']}",
        "optimizer": f"{optim['name'].upper() if optim['name'] == 'sgd' else optim['name'].capitalize()}",
        "learning rate": f"{optim['lr']:g}{drops}",
        "weight decay": f"{optim['weight_decay']:g}",
        "precision": "fp32" if amp == "none" else f"{amp} autocast",
    }


def differences(results: Iterable[Result]) -> list[tuple[str, str, str]]:
    """:attr:`Result.differences` of several, each said once."""
    return list(dict.fromkeys(found for result in results for found in result.differences))


def _words(config: dict[str, Any]) -> dict[str, str]:
    return {**describe(config), **_others(config)}


# Settings that ``describe`` tells, that say where data lie, or that change no number.
_DESCRIBED = {
    "data": {"name", "dir", "batch_size", "eval_batch_size", "train_size", "resident", "source", "target", "tokens"}
    | {"train_split", "val_split", "test_split"},
    "model": {"name", "width", "layers", "d_model", "fuse"},
    "optim": {"name", "lr", "weight_decay", "milestones", "gamma", "epochs", "reference"}
    | {"last_layer_weight_decay", "gain_weight_decay"},
    "precision": {"amp"},
}


def _others(config: dict[str, Any]) -> dict[str, str]:
    """All other settings, by their own names."""

    def word(value: Any) -> str:
        if value is None or isinstance(value, bool):
            return {None: "usual", True: "yes", False: "no"}[value]
        return f"{value:g}" if isinstance(value, float) else str(list(value) if isinstance(value, tuple) else value)

    words = {
        key.replace("_", " "): word(value)
        for section, described in _DESCRIBED.items()
        for key, value in config[section].items()
        if key not in described
    }
    optim = config["optim"]  # these two are by default what all other weights have
    for key, kind in (("last_layer_weight_decay", "classifier"), ("gain_weight_decay", "g")):
        if kind == "classifier" or config["model"]["weight_norm"] == "wn":
            own = optim[key] if optim[key] is not None else optim["weight_decay"] * (optim["mode"] == "wd_on")
            words[f"weight decay of {kind}"] = word(own)
    return words
