"""What one run is: frozen dataclasses read from TOML. An unknown key is an error that names the key that was meant.

>>> cfg = from_dict({"experiment": "fig1", "cell": "wd_on", "data": {"name": "digits"}})
>>> apply_overrides(cfg, ["optim.lr=0.05", "model.norm=l1"]).optim.lr
0.05
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from normmatters.lab.schema import build, suggest

DataName = Literal["digits", "cifar10", "imagefolder", "tiny_imagenet", "text", "numbers"]
ImageModel = Literal["small_cnn", "vgg11", "resnet8", "resnet20", "resnet56", "resnet110", "resnet18", "resnet50"]
TEXT = ("text", "numbers")  # all other data are images
TextModel = Literal["lstm", "transformer", "transformer_small"]
ModelName = Literal[ImageModel, TextModel]
NormName = Literal["native", "l1", "l2", "lp", "linf", "topk", "range", "mean_only", "none"]
WeightNormName = Literal["none", "wn", "bwn", "l1_wn", "linf_wn"]
Mode = Literal["wd_on", "wd_off", "corrected", "norm_schedule", "wd_free", "angular"]


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
    """Which network, with which norm. ``norm``, ``p``, ``constant``, ``k``, ``memory`` say what every batch norm is,
    ``layer_norm`` what every layer norm is (if it is L1, with ``constant``); ``weight_norm`` re-parametrizes the
    weights (then batch norm is mean-only); ``rho`` says at how many times the initial norm a bounded one holds them.
    ``norm_input_scale``, a power of two, multiplies what enters every batch norm: other units, the same network, unless
    ``precision.arithmetic`` has too little range for them. ``attention``: an LSTM's scores, or these over
    √d_model. ``width`` multiplies the number of channels; None below means the model's own default.
    """

    name: ModelName = "small_cnn"
    norm: NormName = "l2"
    p: float | None = None
    constant: str | float = "exact"
    k: int = 10
    memory: Literal["exact", "lean"] = "exact"
    fuse: bool = True
    norm_input_scale: float = 1.0
    layer_norm: Literal["l2", "l1", "none"] = "l2"
    weight_norm: WeightNormName = "none"
    rho: float = 1.0
    activation: Literal["relu", "trelu"] = "relu"
    width: float = 1.0
    zero_init_residual: bool = False
    layers: int | None = None
    d_model: int | None = None
    heads: int | None = None
    d_ff: int | None = None
    dropout: float | None = None
    attention: Literal["dot", "scaled"] = "dot"


@dataclass(frozen=True)
class OptimConfig:
    """The regime. ``milestones`` are epochs (fractions allowed). ``mode``: how decay acts on weights behind a norm:

    ``wd_on``/``wd_off`` plain; ``corrected`` no decay, step sizes corrected to the norms of ``reference`` (F3);
    ``norm_schedule`` constant lr, the norms follow the reference's or the schedule (F4); ``wd_free`` the exact
    recursion with no decay; ``angular`` fixed norms, the angle a step set by ``angle`` or by lr and weight decay.
    Four kinds of parameters decay apart. ``weight_decay`` is of all other weights, the v of a weight norm among them.
    ``last_layer_weight_decay`` (None: as the others) always acts as plain decay on the classifier.
    ``gain_weight_decay`` (None: as the others) is of the g of a weight norm.
    ``decay_norms``: vectors, which are biases and the norms' affine parameters, decay too.
    ``reference`` names the cell of the same experiment and seed whose recorded norms are used.
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 0.1
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


@dataclass(frozen=True)
class PrecisionConfig:
    """``amp``: autocast of the whole network. ``arithmetic``/``accumulate``: what the arithmetic of our own norms is
    rounded to (Fig. 3; see ``normmatters.precision.arithmetic``)."""

    amp: Literal["none", "fp16", "bf16"] = "none"
    arithmetic: Literal["fp16", "bf16", "fp32"] | None = None
    accumulate: Literal["fp16", "bf16", "fp32"] | None = None
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


def cell_folder(above: Path, config: RunConfig) -> Path:
    """``above/experiment/cell``. Names that lead elsewhere are refused: a config may be somebody else's."""
    for name, value in (("experiment", config.experiment), ("cell", config.cell)):
        if value in ("", ".", "..") or {*value} & {*"/\\\0"}:
            raise ValueError(f"{name} names a folder: expected one without / and \\, and not '..', got {value!r}")
    return above / config.experiment / config.cell


def run_path(above: Path, config: RunConfig) -> Path:
    """``above/experiment/cell/seedN``: where ``optim.reference`` finds its neighbour."""
    return cell_folder(above, config) / f"seed{config.seed}"


def read_toml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's table. ``extends = "other.toml"`` (relative) takes that file's values where this one has none."""
    path = path.resolve()
    if path in seen:
        raise ValueError(f"{path}: extends itself by way of {' -> '.join(p.name for p in seen)}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors put a mark at its head
    except FileNotFoundError:
        told = f", which {seen[-1]} extends" if seen else ""
        raise ValueError(f"{path}: no such config file{told}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None
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
    _check_values(config, origin)
    return config


def apply_overrides(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """``["optim.lr=0.1", "model.norm=l1"]``: values are TOML; a bare word is a string; ``null`` unsets."""
    table = to_dict(config)
    changed = False
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign:
            raise ValueError(f"override {item!r}: expected key=value, such as optim.lr=0.1")
        *sections, last = key.strip().split(".")
        target: Any = table
        for section in sections:
            if not isinstance(target.get(section), dict):
                raise ValueError(f"override {item!r}: no section {section!r}{suggest(section, target)}")
            target = target[section]
        if last not in target:
            raise ValueError(f"override {item!r}: unknown key {last!r}{suggest(last, target)}")
        target |= merge(target, {last: _parse_value(text.strip())})  # of a table, all that it does not name stays
        changed = True
    return from_dict(table, "override") if changed else config


def _parse_value(text: str) -> Any:
    if text == "null":
        return None
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return float(text)  # TOML itself refuses ".5"
    except ValueError:
        return text


_RANGES: tuple[tuple[str, Callable[[float], bool], dict[str, tuple[str, ...]]], ...] = (
    (
        "at least 1",
        lambda v: v >= 1,
        {
            "data": (
                *("batch_size", "eval_batch_size", "image_size", "train_size", "val_size"),
                *("vocab_size", "tokens", "max_length"),
            ),
            "model": ("k", "layers", "d_model", "heads", "d_ff"),
            "optim": ("epochs",),
            "runtime": ("threads", "checkpoint_every", "keep_checkpoints", "eval_every", "beam", "side_by_side"),
        },
    ),
    (
        "a positive number",
        lambda v: 0 < v < math.inf,
        {"model": ("width", "rho"), "optim": ("lr", "eps", "gamma", "clip_norm", "angle")},
    ),
    (
        "zero or more",
        lambda v: 0 <= v < math.inf,
        {"optim": ("weight_decay", "last_layer_weight_decay", "gain_weight_decay", "warmup_steps")},
    ),
    ("in [0, 1)", lambda v: 0 <= v < 1, {"model": ("dropout",), "optim": ("momentum", "label_smoothing")}),
)


def _check_values(config: RunConfig, origin: str) -> None:
    data, model, optim, runtime = config.data, config.model, config.optim, config.runtime

    def need(ok: bool, key: str, what: str, value: object) -> None:
        if not ok:
            raise ValueError(f"{origin}: {key} must be {what}, got {value!r}")

    for what, inside, sections in _RANGES:
        for section, keys in sections.items():
            for key in keys:
                value = getattr(getattr(config, section), key)
                need(value is None or inside(value), f"{section}.{key}", what, value)
    need(-(2**63) <= config.seed < 2**63, "seed", "a whole number of 64 bits", config.seed)
    need(runtime.checkpoint_seconds >= 0, "runtime.checkpoint_seconds", "zero or more", runtime.checkpoint_seconds)
    need(math.isfinite(runtime.length_penalty), "runtime.length_penalty", "finite", runtime.length_penalty)
    augments = ("none", "crop", "crop_flip", "resized_crop")
    need(
        isinstance(data.augment, bool) or data.augment in augments,
        "data.augment",
        f"a bool or {augments}",
        data.augment,
    )
    need(
        len(optim.betas) == 2 and all(0 <= b < 1 for b in optim.betas),
        "optim.betas",
        "two numbers in [0, 1)",
        optim.betas,
    )
    rising = list(optim.milestones) == sorted(m for m in optim.milestones if 0 <= m < math.inf)
    need(rising, "optim.milestones", "epochs in rising order", optim.milestones)
    if optim.mode == "corrected":
        told = "the cell whose norms are followed (mode corrected)"
        need(bool(optim.reference), "optim.reference", told, optim.reference)
    need(optim.angle is None or optim.mode == "angular", "optim.angle", "unset but with mode angular", optim.angle)
    if optim.mode in ("angular", "wd_free") and optim.angle is None:
        need(optim.weight_decay > 0, "optim.weight_decay", f"positive with mode {optim.mode}", optim.weight_decay)
    if optim.schedule == "warmup_sqrt":
        need(optim.warmup_steps >= 1, "optim.warmup_steps", "at least 1 with warmup_sqrt", optim.warmup_steps)
    if optim.mode == "wd_free":
        need(optim.name == "sgd", "optim.name", "sgd with mode wd_free", optim.name)
    if config.precision.arithmetic is not None:
        key = "layer_norm" if data.name in TEXT else "norm"
        norm = getattr(model, key)
        ours = norm == "l1" if data.name in TEXT else norm not in ("native", "none")
        need(ours, f"model.{key}", "one of ours: precision.arithmetic is theirs", norm)
    else:
        accumulate = config.precision.accumulate
        need(accumulate is None, "precision.accumulate", "unset without precision.arithmetic", accumulate)
    gain = optim.gain_weight_decay
    need(
        gain is None or model.weight_norm == "wn", "optim.gain_weight_decay", "unset where no weight norm has a g", gain
    )
    bounded = model.weight_norm not in ("none", "wn")
    need(model.rho == 1 or bounded, "model.rho", "1 without a bounded weight norm", model.rho)
    scale = model.norm_input_scale
    power = 2**-32 <= scale <= 2**32 and math.frexp(scale)[0] == 0.5
    need(power, "model.norm_input_scale", "a power of two from 2^-32 to 2^32", scale)
    rescales = model.norm not in ("mean_only", "none") and model.weight_norm == "none" and data.name not in TEXT
    need(scale == 1 or rescales, "model.norm_input_scale", "1 where no batch norm divides by a scale", scale)
    plain = model.attention == "dot"
    need(plain or model.name == "lstm", "model.attention", "dot in networks other than an LSTM", model.attention)
    if model.activation == "trelu":  # it rescales what it is given, so a chain of shortcuts would explode
        need(model.name in ("small_cnn", "vgg11"), "model.name", "small_cnn or vgg11 with activation trelu", model.name)
    if model.norm == "lp":
        need(model.p is not None and model.p >= 1, "model.p", "a number >= 1 with norm lp", model.p)
    else:
        need(model.p is None, "model.p", f"unset with norm {model.norm}: it is lp's", model.p)
    if isinstance(model.constant, str):
        names = ("exact", "paper", "none")
        need(model.constant in names, "model.constant", f"one of {names} or a positive factor", model.constant)
    else:
        need(model.constant > 0, "model.constant", "a positive factor", model.constant)
    text = data.name in TEXT
    translator = model.name in get_args(TextModel)
    need(text == translator, "model.name", f"a model for {'text' if text else 'images'} ({data.name})", model.name)
    mine, other = ("layer_norm", "norm") if text else ("norm", "layer_norm")  # to change the other would change nothing
    usual, value = getattr(ModelConfig, other), getattr(model, other)
    need(value == usual, f"model.{other}", f"{usual} with {model.name}, whose norms model.{mine} says", value)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Nested plain values, every key present."""
    return dataclasses.asdict(config)


def to_json(config: RunConfig) -> str:
    return json.dumps(to_dict(config), indent=2) + "\n"


# Settings that are younger than the published runs, whose hashes stay what they are: hashed where they are not at their
# defaults.
_YOUNGER = (
    ("model", ModelConfig, "norm_input_scale"),
    ("model", ModelConfig, "attention"),
    ("optim", OptimConfig, "gain_weight_decay"),
)
# Changing these does not make another run: its finished result stays valid.
_NOT_HASHED = {
    "label": None,
    "runtime": {
        *("device", "checkpoint_every", "checkpoint_seconds", "keep_checkpoints"),
        *("tensorboard", "threads", "side_by_side"),
    },
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
    for section, kind, name in _YOUNGER:
        if table[section][name] == getattr(kind, name):
            del table[section][name]
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:12]


def _hashed(config: RunConfig) -> dict[str, Any]:
    table = to_dict(config)
    for key, inner in _NOT_HASHED.items():
        if inner is None:
            table.pop(key)
        else:
            table[key] = {k: v for k, v in table[key].items() if k not in inner}
    if config.data.name in TEXT and config.runtime.compile == "cudagraph":
        table["runtime"]["compile"] = "none"  # of text, whose runs were all eager once: those stay valid
    return table
