"""Run folders in, results out: which runs there are, what each cell measured, what differs from the paper's setting."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from normmatters.lab import config as _config
from normmatters.lab.cells import PRESETS, Cell, Paper, experiment_names, load_cell, load_cells
from normmatters.lab.claims import CLAIMS
from normmatters.lab.config import RunConfig
from normmatters.lab.norms import NormFactory
from normmatters.lab.recorded_runs import METRICS, PUBLISHED, ForeignConfig, Run, own_images, read_run


@dataclass(frozen=True)
class Result:
    """What one cell of the paper measured here: the runs of all its seeds."""

    cell: Cell
    runs: tuple[Run, ...]

    @property
    def done(self) -> tuple[Run, ...]:
        """The runs with a result: finished, or diverged."""
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
        """The runs that diverged."""
        return [run for run in self.done if run.diverged]

    @property
    def all_diverged(self) -> bool:
        return 0 < len(self.diverged) == len(self.done)

    @property
    def divergence(self) -> str:
        """ "diverged", and in how many seeds if not in all; empty if none did."""
        some = f" in {len(self.diverged)} of {len(self.done)} seeds" * (not self.all_diverged)
        return f"diverged{some}" if self.diverged else ""

    def final(self, name: str) -> float | None:
        """The mean of :meth:`by_seed`; None where no run has a value."""
        values = self.by_seed(name).values()
        return statistics.fmean(values) if values else None

    def by_seed(self, name: str) -> dict[int, float]:
        """The last epoch's value of each seed that has one (for ``seconds`` the median epoch)."""
        metric, values = METRICS[name], dict[int, float]()
        for run in self.done:
            epochs = run.values(metric)
            value = statistics.median(epochs) if epochs and name == "seconds" else run.last(metric)
            if value is not None and math.isfinite(value):
                values[run.seed] = value
        return values

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

        A difference that no setting expresses has empty second and third parts.
        """
        if self.cell.of_user:
            return []
        source = load_cell(self.cell.source)
        regime = _config.merge(_config.to_dict(source.config("full")), dict(source.paper.regime))
        # The paper does not say that its networks without batch or layer norm begin in another way.
        with_norm = _config.merge(regime, {"model": {"norm": "l2", "layer_norm": "l2", "weight_norm": "none"}})
        paper = _words(regime) | _initial_weights(with_norm)
        here = _words(_config.to_dict(self.config))
        differing = [(key, value, paper[key]) for key, value in here.items() if value != paper.get(key, value)]
        return differing + [(text, "", "") for text in source.paper.departs]

    @property
    def deviations(self) -> list[str]:
        """Settings in which these runs differ from what their cell says now, at the preset that fits them best."""
        if self.cell.of_user:
            return []
        source, here = load_cell(self.cell.source), _words(_config.to_dict(self.config))
        cells = [_words(_config.to_dict(source.config(preset))) for preset in PRESETS]
        differing = [
            [f"{k} {here[k]} instead of {now[k]}" for k in here if here[k] != now.get(k, here[k])] for now in cells
        ]
        return min(differing, key=len)

    @property
    def paper_text(self) -> str:
        """The paper's number for a table, or what it says instead."""
        paper, metric = self.cell.paper, METRICS[self.cell.paper.metric]
        return paper.note or "–" if paper.value is None else f"{paper.value:g} {metric.unit or metric.label}"

    def sampling_error(self, name: str) -> float | None:
        """The standard error of an accuracy or error on a validation set of this size; None for other metrics."""
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
        names = {r.cell.experiment for id, r in self.results.items() if r.cell.source == id}
        names |= {claim.experiment for claim in CLAIMS if claim.cells <= self.results.keys()}
        paper = [name for name in experiment_names() if name in names]
        return paper + sorted(names - set(paper))


def collect(paths: Iterable[str | Path], progress: Callable[[str], None] | None = None) -> Collection:
    """Read every run below ``paths``: folders with a ``config.json``, and published runs, one file each.

    A ``config.json`` of something else is left out and named in the report. ``progress`` is called with a few words
    from time to time: thousands of runs take seconds.
    """
    runs: list[Run] = []
    foreign: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{path}: no such folder")
        places = [path]
        if not path.name.endswith(PUBLISHED):
            places = sorted({p.parent for p in path.rglob("config.json")} | {*path.rglob(f"*{PUBLISHED}")})
        if not places:
            raise ValueError(f"{path}: no run folders below it (a run folder has a config.json)")
        known = {r.path.resolve() for r in runs}
        for place in places:
            if place.resolve() in known:
                continue
            if progress and len(runs) % 250 == 0:
                progress(f"{len(runs)} of {len(places)} runs read")
            try:
                runs.append(read_run(place))
            except ForeignConfig as error:
                if place.name.endswith(PUBLISHED) or len(places) == 1:
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
        if twice:  # they would count as two seeds
            where = ", ".join(str(run.path) for run in twice[:4])
            raise ValueError(f"{name} has seed {twice[0].seed} more than once ({where}): report one of them")
    cells = {cell.id: cell for cell in load_cells()}
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


def _identity(config: RunConfig) -> RunConfig:
    """The settings that all seeds of a cell must share."""
    decoding = _config.RuntimeConfig(beam=config.runtime.beam, length_penalty=config.runtime.length_penalty)
    return replace(config, seed=0, label="", runtime=decoding)


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


def describe(config: dict[str, Any]) -> dict[str, str]:
    """The settings of a run that a reader asks for first, in words."""
    data, model, optim = config["data"], config["model"], config["optim"]
    name = own_images(data["name"], data["dir"]) or data["name"]
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
    return list(dict.fromkeys(each for result in results for each in result.differences))


def _words(config: dict[str, Any]) -> dict[str, str]:
    return {**describe(config), **_others(config), **_initial_weights(config)}


def _initial_weights(config: dict[str, Any]) -> dict[str, str]:
    """How the network begins. It follows from the settings, and from nothing that a reader would look at."""
    words = NormFactory(_config.ModelConfig(**config["model"])).initial_weights
    return {"initial weights": words} if words else {}


# Settings that ``describe`` covers, that say where data lie, or that change no number.
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
