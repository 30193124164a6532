"""What one run is: frozen dataclasses read from TOML. An unknown key is an error that names the key that was meant.

>>> cfg = from_dict({"experiment": "fig1", "cell": "wd_on", "data": {"name": "digits"}})
>>> cfg.optim.lr
0.1
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from normmatters.lab.files import read_plain
from normmatters.lab.schema import build, convert, meant

DataName = Literal["digits", "cifar10", "imagefolder", "tiny_imagenet", "text", "numbers"]
ImageModel = Literal["small_cnn", "vgg11", "resnet8", "resnet20", "resnet56", "resnet110", "resnet18", "resnet50"]
TEXT = ("text", "numbers")  # all other data are images
TextModel = Literal["lstm", "transformer", "transformer_small"]
ModelName = Literal[ImageModel, TextModel]
NormName = Literal["native", "l1", "l2", "lp", "linf", "topk", "range", "mean_only", "none"]
WeightNormName = Literal["none", "wn", "bwn", "l1_wn", "linf_wn"]
Mode = Literal["wd_on", "wd_off", "wd_follows_lr", "corrected", "norm_schedule", "wd_free", "angular"]


@dataclass(frozen=True)
class DataConfig:
    """Which examples, how many at a time, and how they are varied.

    ``dir`` is the set's folder below the data directory (or an absolute path); every set has a usual one.
    ``augment``: ``True`` is what is usual for the set, or "none", "crop" (pad and crop), "crop_flip", "resized_crop".
    ``train_size``/``val_size`` keep only that many examples (the first ones of a fixed shuffle; of text, of the file).
    ``tokens`` is the number of target tokens of one batch of text.
    """

    name: DataName = "digits"
    dir: str | None = None
    batch_size: int = 128
    eval_batch_size: int = 500
    augment: bool | str = True
    image_size: int | None = None
    train_size: int | None = None
    val_size: int | None = None
    resident: bool | None = None  # None: on the device when it is small, else streamed from disk
    source: str = "de"
    target: str = "en"
    train_split: str = "train"
    val_split: str = "val"
    test_split: str | None = None
    vocab_size: int = 8000
    tokens: int = 4096
    max_length: int = 100


@dataclass(frozen=True)
class ModelConfig:
    """Which network, with which norm. ``norm``, ``p``, ``constant``, ``k``, ``memory`` define every batch norm,
    ``layer_norm`` every layer norm (if it is L1, with ``constant``); ``weight_norm`` re-parametrizes the
    weights (then batch norm is mean-only, or with ``norm`` "none" a bias per channel); a bounded one holds
    them at ``rho`` times their initial norm, and with ``project`` v at its own after every step.
    ``gamma``: whether the batch norms' γ are trained; "frozen" ones stay 1. With ``zero_init_residual`` the last one of
    each branch begins at 0.
    ``norm_input_scale``, a power of two, multiplies what enters every batch norm: other units, the same network, unless
    ``precision.arithmetic`` has too little range for them. ``init_scale`` multiplies the initial weights that a batch
    norm follows, and with them the units of its eps and running variance: the same function. ``attention``: an LSTM's
    scores by a product, by that over √d_model, or Bahdanau's sum. ``width`` multiplies the number of channels; None
    below means the model's own default.
    """

    name: ModelName = "small_cnn"
    norm: NormName = "l2"
    p: float | None = None
    constant: str | float = "exact"
    k: int = 10
    memory: Literal["exact", "lean"] = "exact"
    fuse: bool = True
    norm_input_scale: float = 1.0
    init_scale: float = 1.0
    layer_norm: Literal["l2", "l1", "none"] = "l2"
    weight_norm: WeightNormName = "none"
    rho: float = 1.0
    project: bool = False
    activation: Literal["relu", "trelu"] = "relu"
    width: float = 1.0
    gamma: Literal["free", "frozen"] = "free"
    zero_init_residual: bool = False
    layers: int | None = None
    d_model: int | None = None
    heads: int | None = None
    d_ff: int | None = None
    dropout: float | None = None
    attention: Literal["dot", "scaled", "additive"] = "dot"


@dataclass(frozen=True)
class OptimConfig:
    """The regime. ``milestones`` are epochs (fractions too). ``mode``: how decay acts on weights followed by a norm:

    ``wd_on``/``wd_off`` plain; ``wd_follows_lr`` decay in proportion to the learning rate; ``corrected`` no decay, step
    sizes corrected to the norms of ``reference`` (F3); ``norm_schedule`` constant lr, the norms follow the reference's
    or the schedule (F4); ``wd_free`` the exact recursion with no decay; ``angular`` fixed norms, the angle per step set
    by ``angle`` or by lr and weight decay; from there it goes as the learning rate to the power ``angle_power``, ½ as
    in SGD's equilibrium (the lr that is logged is the one with that equilibrium).
    ``invariant_lr`` (None: as the others) is the learning rate of the weights followed by a norm. ``invariant``: which
    weights those are, as tested, or for a control all convolutions, whether a norm follows or not.
    Four kinds of parameters decay apart. ``weight_decay`` is of all other weights, the v of a weight norm among them.
    ``last_layer_weight_decay`` (None: as the others) always acts as plain decay on the classifier.
    ``gain_weight_decay`` (None: as the others) is of the g of a weight norm.
    ``decay_norms``: vectors, which are biases and the norms' affine parameters, decay too.
    ``reference`` names the cell of the same experiment and seed whose recorded norms are used.
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 0.1
    invariant_lr: float | None = None
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_norms: bool = False
    last_layer_weight_decay: float | None = None
    gain_weight_decay: float | None = None
    schedule: Literal["constant", "step", "cosine", "warmup_sqrt"] = "step"
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    warmup_steps: int = 0
    epochs: int = 10
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    mode: Mode = "wd_on"
    reference: str | None = None
    correction: Literal["epoch", "step"] = "epoch"
    angle: float | None = None
    angle_power: float = 0.5
    invariant: Literal["tested", "all"] = "tested"


@dataclass(frozen=True)
class PrecisionConfig:
    """``amp``: autocast of the whole network. ``arithmetic``/``accumulate``: what the arithmetic of our own norms is
    rounded to, ``sums``: in which order they add up (Fig. 3; see ``normmatters.precision.arithmetic``)."""

    amp: Literal["none", "fp16", "bf16"] = "none"
    arithmetic: Literal["fp16", "bf16", "fp32"] | None = None
    accumulate: Literal["fp16", "bf16", "fp32"] | None = None
    sums: Literal["tree", "running"] = "tree"
    tf32: bool = True


@dataclass(frozen=True)
class RuntimeConfig:
    """How it is run; nothing here changes a number by more than rounding (and what dropout draws), but for ``beam`` and
    ``length_penalty``, on which BLEU depends.

    ``compile``: "cudagraph" replays whole steps; batches of text are then filled up to few shapes.
    A checkpoint is written every ``checkpoint_every`` epochs, if the last one is ``checkpoint_seconds`` old or more.
    ``side_by_side``: how many runs shared the device (set by ``--jobs``); times are then not this run's alone.
    """

    device: str = "auto"
    compile: Literal["none", "compile", "cudagraph"] = "none"
    channels_last: bool = True
    checkpoint_every: int = 1
    checkpoint_seconds: float = 30.0
    keep_checkpoints: int = 2
    eval_every: int = 1
    record: Literal["none", "epoch", "step"] = "epoch"
    bleu: Literal["none", "last", "epoch"] = "last"
    beam: int = 4
    length_penalty: float = 0.6
    tensorboard: bool = False
    threads: int | None = None
    side_by_side: int = 1
    deterministic: bool = True


@dataclass(frozen=True)
class RunConfig:
    """One run: one cell of one experiment with one seed."""

    experiment: str = "run"
    cell: str = "default"
    label: str = ""
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        _check(self)


def cell_folder(above: Path, config: RunConfig) -> Path:
    """``above/experiment/cell``. Names that lead elsewhere are refused: a config may be somebody else's."""
    for name, value in (("experiment", config.experiment), ("cell", config.cell)):
        if value in ("", ".", "..") or {*value} & {*"/\\\0"}:
            raise ValueError(f"{name} names a folder: expected one without / and \\, and not '..', got {value!r}")
    return above / config.experiment / config.cell


def run_path(above: Path, config: RunConfig, change: str = "") -> Path:
    """``above/experiment/cell/seedN``, where ``optim.reference`` finds a neighbour; with a change, ``cell,change``."""
    folder = cell_folder(above, config)
    return folder.with_name(f"{folder.name},{change}" if change else folder.name) / f"seed{config.seed}"


def overrides_name(overrides: Iterable[str]) -> str:
    """What distinguishes the folder of a run with these overrides: itself a valid name of a folder."""
    unnamed = ("seed=", *(f"runtime.{key}=" for key in _NOT_HASHED))  # they make no other run
    name = ",".join(item for item in overrides if not item.startswith(unnamed))
    name = re.sub(r"[^\w.=+,-]", "_", name)
    return name if len(name) <= 100 else f"{name[:80]}~{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def read_toml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's table. ``extends = "other.toml"`` (relative) takes that file's values where this one has none."""
    path = path.resolve()
    if path in seen:
        raise ValueError(f"{path}: extends itself by way of {' -> '.join(p.name for p in seen)}")
    try:
        table = tomllib.loads(read_plain(path).decode("utf-8-sig"))  # Windows' editors put a mark at its head
    except FileNotFoundError:
        extended = f", which {seen[-1]} extends" if seen else ""
        near = meant(path.stem, sorted(file.stem for file in path.parent.glob("*.toml")))
        raise ValueError(f"{path}: no such config file{extended}{near}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: not valid TOML: nested too deeply") from None
    parent = table.pop("extends", None)
    if parent is None:
        return table
    if not isinstance(parent, str):
        raise ValueError(f"{path}: extends must be the name of a TOML file, got {parent!r}")
    base = read_toml(path.parent / parent, (*seen, path))
    if same_as := base.get("same_as"):  # it has no settings of its own to take, and would make this one that cell too
        raise ValueError(f"{path}: extends {parent}, which is the same as {same_as}: extend that one")
    return merge(base, table)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` where it has a value, ``base`` elsewhere; tables in them likewise."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def from_dict(table: Mapping[str, Any], origin: str = "config") -> RunConfig:
    """Build and check a run from nested mappings (what ``to_dict`` returns, or parsed TOML/JSON)."""
    config: RunConfig = build(RunConfig, table, "", origin)
    return config


def overrides_table(overrides: Iterable[str]) -> dict[str, Any]:
    """The settings that ``["optim.lr=0.1", "model.norm=l1"]`` name, each checked by itself.

    Values are TOML; a bare word is a string; ``null`` unsets.
    """
    table: dict[str, Any] = {}
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign:
            raise ValueError(f"--set {item}: expected key=value, such as optim.lr=0.1")
        value = _parse_value(text.strip())
        for name in reversed(key.strip().split(".")):
            value = {name: value}
        convert(RunConfig, value, "", f"--set {item}")
        table = merge(table, value)
    return table


def _parse_value(text: str) -> Any:
    if text == "null":
        return None
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (tomllib.TOMLDecodeError, RecursionError):
        pass
    try:
        return float(text)  # TOML itself refuses ".5"
    except ValueError:
        return text


_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "at least 1",
        lambda v: v >= 1,
        "data.batch_size data.eval_batch_size data.image_size data.train_size data.val_size data.vocab_size "
        "data.tokens data.max_length model.k model.layers model.d_model model.heads model.d_ff optim.epochs "
        "runtime.threads runtime.checkpoint_every runtime.keep_checkpoints runtime.eval_every runtime.beam "
        "runtime.side_by_side",
    ),
    (
        "a positive number",
        lambda v: 0 < v < math.inf,
        "model.width model.rho model.init_scale optim.lr optim.invariant_lr optim.eps optim.gamma optim.clip_norm "
        "optim.angle optim.angle_power",
    ),
    (
        "zero or more",
        lambda v: 0 <= v < math.inf,
        "optim.weight_decay optim.last_layer_weight_decay optim.gain_weight_decay optim.warmup_steps",
    ),
    ("zero or more", lambda v: v >= 0, "runtime.checkpoint_seconds"),
    ("in [0, 1)", lambda v: 0 <= v < 1, "model.dropout optim.momentum optim.label_smoothing"),
    ("finite", math.isfinite, "runtime.length_penalty"),
    ("a whole number of 64 bits", lambda v: -(2**63) <= v < 2**63, "seed"),
)
_AUGMENTS = ("none", "crop", "crop_flip", "resized_crop")
_CONSTANTS = ("exact", "paper", "none")


def _check(config: RunConfig) -> None:
    """Raise on a value out of its range, then on one that another setting rules out or makes pointless."""

    def value(key: str) -> Any:
        section, _, name = key.rpartition(".")
        return getattr(getattr(config, section) if section else config, name)

    def need(ok: bool, key: str, what: str) -> None:
        if not ok:
            raise ValueError(f"{key} must be {what}, got {value(key)!r}")

    for what, inside, keys in _RANGES:
        for key in keys.split():
            need(value(key) is None or inside(value(key)), key, what)
    data, model, optim, precision = config.data, config.model, config.optim, config.precision
    need(isinstance(data.augment, bool) or data.augment in _AUGMENTS, "data.augment", f"a bool or {_AUGMENTS}")
    need(len(optim.betas) == 2 and all(0 <= b < 1 for b in optim.betas), "optim.betas", "two numbers in [0, 1)")
    rising = list(optim.milestones) == sorted(m for m in optim.milestones if 0 <= m < math.inf)
    need(rising, "optim.milestones", "epochs in rising order")
    scale, constant = model.norm_input_scale, model.constant
    power = 2**-32 <= scale <= 2**32 and math.frexp(scale)[0] == 0.5
    need(power, "model.norm_input_scale", "a power of two from 2^-32 to 2^32")
    fits = constant in _CONSTANTS if isinstance(constant, str) else constant > 0
    need(fits, "model.constant", f"one of {_CONSTANTS} or a positive factor")

    text, mode = data.name in TEXT, optim.mode
    if mode == "corrected":
        need(bool(optim.reference), "optim.reference", "the cell whose norms are followed (mode corrected)")
    need(optim.angle is None or mode == "angular", "optim.angle", "unset but with mode angular")
    own = mode == "angular" and optim.name == "sgd" and optim.angle is None
    need(own or optim.angle_power == 0.5, "optim.angle_power", "0.5 but with mode angular, sgd and no angle of its own")
    plain = mode in ("wd_on", "wd_off")
    need(plain or optim.invariant_lr is None, "optim.invariant_lr", f"unset with mode {mode}")
    tested = optim.invariant == "tested"
    need(tested or not text, "optim.invariant", "tested with text, whose networks have no convolutions")
    if mode in ("angular", "wd_free", "wd_follows_lr") and optim.angle is None:
        need(optim.weight_decay > 0, "optim.weight_decay", f"positive with mode {mode}")
    if optim.schedule == "warmup_sqrt":
        need(optim.warmup_steps >= 1, "optim.warmup_steps", "at least 1 with warmup_sqrt")
    if mode == "wd_free":
        need(optim.name == "sgd", "optim.name", "sgd with mode wd_free")
    used, unused = ("layer_norm", "norm") if text else ("norm", "layer_norm")  # to change the other changes nothing
    if precision.arithmetic is None:
        need(precision.accumulate is None, "precision.accumulate", "unset without precision.arithmetic")
        need(precision.sums == "tree", "precision.sums", "tree without precision.arithmetic")
    else:
        ours = model.layer_norm == "l1" if text else model.norm not in ("native", "none")
        need(ours, f"model.{used}", "one of ours: precision.arithmetic is theirs")
    has_gain, bounded = model.weight_norm == "wn", model.weight_norm not in ("none", "wn")
    need(optim.gain_weight_decay is None or has_gain, "optim.gain_weight_decay", "unset where no weight norm has a g")
    need(model.rho == 1 or bounded, "model.rho", "1 without a bounded weight norm")
    need(not model.project or bounded, "model.project", "false without a bounded weight norm")
    rescales = model.norm not in ("mean_only", "none") and model.weight_norm == "none" and not text
    need(model.init_scale == 1 or rescales, "model.init_scale", "1 where no norm undoes it")
    need(scale == 1 or rescales, "model.norm_input_scale", "1 where no batch norm divides by a scale")
    free = model.gamma == "free"
    need(free or rescales, "model.gamma", "free where no batch norm divides by a scale")
    silent = model.zero_init_residual
    need(free or not silent, "model.gamma", "free with zero_init_residual: the branches stay silent")
    fits = model.attention == "dot" or model.name == "lstm"
    need(fits, "model.attention", "dot in networks other than an LSTM")
    # A truncated ReLU rescales its input, so a chain of shortcuts would explode.
    chain = model.name in ("small_cnn", "vgg11")
    need(model.activation == "relu" or chain, "model.name", "small_cnn or vgg11 with activation trelu")
    if model.norm == "lp":
        need(model.p is not None and model.p >= 1, "model.p", "a number >= 1 with norm lp")
    else:
        need(model.p is None, "model.p", f"unset with norm {model.norm}: it is lp's")
    kind = "text" if text else "images"
    need(text == (model.name in get_args(TextModel)), "model.name", f"a model for {kind} ({data.name})")
    default = getattr(ModelConfig, unused)
    said = f"{default} with {model.name}, whose norms model.{used} says"
    need(value(f"model.{unused}") == default, f"model.{unused}", said)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Nested plain values, every key present."""
    return dataclasses.asdict(config)


def to_json(config: RunConfig) -> str:
    return json.dumps(to_dict(config), indent=2) + "\n"


# Settings that are younger than the published runs, whose hashes stay what they are: hashed where they are not at their
# defaults.
_YOUNGER = {
    "model": ("norm_input_scale", "attention", "project", "gamma", "init_scale"),
    "optim": ("gain_weight_decay", "invariant_lr", "angle_power", "invariant"),
    "precision": ("sums",),
}
# Settings of ``runtime`` that make no other run when they change: a finished result stays valid.
_NOT_HASHED = {
    *("device", "checkpoint_every", "checkpoint_seconds", "keep_checkpoints"),
    *("tensorboard", "threads", "side_by_side"),
}


def differences(a: RunConfig, b: RunConfig) -> list[str]:
    """``"optim.epochs: 3 and 4"`` for every setting by which these are two runs."""
    left, right = _hashed(a), _hashed(b)
    names = []
    for key, value in left.items():
        if isinstance(value, dict):
            names += [f"{key}.{k}: {v} and {right[key][k]}" for k, v in value.items() if right[key][k] != v]
        elif right[key] != value:
            names.append(f"{key}: {value} and {right[key]}")
    return names


def config_hash(config: RunConfig) -> str:
    """12 hex digits over everything that decides a run's numbers."""
    table = _hashed(config)
    for section, names in _YOUNGER.items():
        for name in names:
            if table[section][name] == getattr(type(getattr(config, section)), name):
                del table[section][name]
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:12]


def _hashed(config: RunConfig) -> dict[str, Any]:
    table = to_dict(config)
    del table["label"]
    table["runtime"] = {k: v for k, v in table["runtime"].items() if k not in _NOT_HASHED}
    if config.data.name in TEXT and config.runtime.compile == "cudagraph":
        table["runtime"]["compile"] = "none"  # of text, whose runs were all eager once: those stay valid
    return table
