"""What a model's norms do: to which weights, at what cost, and what :func:`normmatters.convert` would change.

Nothing of the model is changed. See :mod:`normmatters.doctor.saved_bytes` for how memory is counted without using any.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from normmatters.doctor.saved_bytes import Ghosts, Kept
from normmatters.kernels import backends
from normmatters.norm import Norm
from normmatters.optim import Invariance, Recipe, channel_norms, scale_invariant_parameters, steps_to_equilibrium
from normmatters.optim.channels import named_weights
from normmatters.probe import plain_name, unwrap
from normmatters.surgery import ConversionReport
from normmatters.surgery.swap import check_model, swap
from normmatters.tails import measure_tails
from normmatters.text_table import aligned
from normmatters.weight_norm import BoundedWeight, ClassicWeight

__all__ = ["Diagnosis", "Kept", "NormLayer", "Spread", "Table", "Weight", "diagnose"]

#: The invariance test computes in float64, and a few samples tell as much as many.
_PROBE_BATCH = 8

#: Tails worth a line: what a step or two of γ does not take up.
_HEAVY = 1.1

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
_WEIGHT_NORMS = (
    BoundedWeight,
    ClassicWeight,
    nn.utils.parametrizations._WeightNorm,
    nn.utils.parametrizations._SpectralNorm,
)


class NormLayer(NamedTuple):
    """One norm of the model and what ``convert`` would make of it.

    ``becomes`` is the class that would take its place, None where it would stay, ``""`` where a checkpoint alone cannot
    tell; ``fused`` is ``""``, ``"relu"``, ``"add + relu"`` or ``"relu + max pool"``; ``note`` says why if that is not
    all one could wish for.
    ``input`` is the shape that came in, ``tails`` σ ÷ C·mean|S| of it, per channel or token: the factor by which an L1
    norm's output is larger than an L2 norm's (see :mod:`normmatters.tails`).

    >>> NormLayer("bn", "BatchNorm2d", becomes="L1BatchNorm2d", fused="relu").becomes
    'L1BatchNorm2d'
    """

    name: str
    norm: str
    becomes: str | None = None
    fused: str = ""
    note: str = ""
    input: tuple[int, ...] | None = None
    kept: Kept | None = None
    tails: Spread | None = None


class Spread(NamedTuple):
    """The smallest, the median and the largest of one number per channel.

    >>> Spread.of(torch.tensor([3.0, 1.0, 2.0]))
    Spread(smallest=1.0, median=2.0, largest=3.0)
    """

    smallest: float
    median: float
    largest: float

    @classmethod
    def of(cls, values: Tensor) -> Spread:
        """The spread of ``values``, [channels]."""
        return cls(values.min().item(), values.median().item(), values.max().item())


class Weight(NamedTuple):
    """One weight: is its length without effect, and how large is its effective step?

    ``invariant`` is what the test found in words (None: not tested), ``dim`` the channel dimension that norms are taken
    along. ``step`` is η/‖w‖² per channel (F2); None for a weight whose length does act on the output, if only in some
    channels, or by itself.

    >>> Weight("fc.weight", (10, 512), "no", 0, Spread(0.9, 1.0, 1.1)).step is None
    True
    """

    name: str
    shape: tuple[int, ...]
    invariant: str | None
    dim: int | None
    length: Spread | None = None
    step: Spread | None = None


class Table(NamedTuple):
    """A table as text; a command line may print it in its own way.

    >>> print(Table("Norms", ("layer", "norm"), [("1", "BatchNorm2d")]))
    Norms
    layer  norm
    1      BatchNorm2d
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def __str__(self) -> str:
        return f"{self.title}\n{aligned([self.columns, *self.rows])}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found; ``print`` shows it, :meth:`as_dict` gives it as plain data.

    Attributes:
        norms: every norm of the model, in the model's order.
        weights: every weight with two or more dimensions.
        recipe: the learning rate, weight decay and momentum that were asked about.
        kept: bytes that one forward pass of the whole model keeps; None without an input.
        notes: what could not be found out, and why.

    >>> print(diagnose({"0.weight": torch.ones(1, 4)}, lr=0.1).tables()[1])
    Weights
    weight    shape  scale invariant  ‖w‖  η/‖w‖²
    0.weight  1×4    not tested       2    0.025
    """

    norms: tuple[NormLayer, ...]
    weights: tuple[Weight, ...]
    recipe: Recipe
    kept: Kept | None = None
    notes: tuple[str, ...] = ()

    def tables(self) -> list[Table]:
        """Norms, then weights."""
        norms = [
            (
                n.name or "(model)",
                n.norm,
                _shape(n.input),
                "(kept)" if n.becomes is None else n.becomes or "-",
                n.fused or "-",
                *_sizes(n.kept),
                _spread(n.tails),
                n.note,
            )
            for n in self.norms
        ]
        weights = [
            (w.name, _shape(w.shape), w.invariant or "not tested", _spread(w.length), _spread(w.step))
            for w in self.weights
        ]
        columns = ("layer", "norm", "input", "convert", "fused", "keeps", "exact", "lean", "tails", "note")
        return [
            Table("Norms", columns, norms),
            Table("Weights", ("weight", "shape", "scale invariant", "‖w‖", "η/‖w‖²"), weights),
        ]

    def summary(self) -> list[str]:
        """The conclusions, one sentence per line."""
        converted = [n for n in self.norms if n.becomes]
        fused = sum(bool(n.fused) for n in converted)
        lines = []
        if any(n.becomes != "" for n in self.norms):
            lines.append(
                f"convert would replace {len(converted)} of {len(self.norms)} norms and fuse {fused} with what follows."
            )
        if self.kept is not None:
            after = [
                f"{_bytes(size)} with memory={mode!r}"
                for mode, size in (("exact", self.kept.exact), ("lean", self.kept.lean))
                if size is not None
            ]
            now = f"A forward pass keeps {_bytes(self.kept.now)} for the backward pass"
            lines.append(f"{now}; converted, on a GPU, {', '.join(after)}." if after else f"{now}.")
        heavy = [(n.tails.median, n.name) for n in self.norms if n.tails is not None]
        if heavy and max(heavy)[0] >= _HEAVY:
            ratio, name = max(heavy)
            lines.append(
                f"Tails are heaviest in {name or 'the model'}: an L1 norm's output there is {ratio:.3g} times an L2 "
                "norm's, in the median. A converted layer starts that much louder."
            )
        tested = [w for w in self.weights if w.invariant is not None]
        if tested:
            steps = sum(w.step is not None for w in tested)
            effect = ": weight decay acts on their step size alone." if steps else "."
            lines.append(f"{steps} of {len(tested)} weights are scale invariant{effect}")
        r = self.recipe
        if r.lr * r.weight_decay > 0 and (not tested or any(w.step is not None for w in tested)):
            steps_there = steps_to_equilibrium(r.lr, r.weight_decay, r.momentum)
            lines.append(
                f"At lr {r.lr:g}, weight decay {r.weight_decay:g}, momentum {r.momentum:g}, scale-invariant weights "
                f"turn by {r.angle:.4g} rad per step once norms have settled, in about {steps_there:.4g} steps."
            )
        return lines + [f"Note: {note}" for note in self.notes]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON: no tuples of ours, no infinities."""
        parts: dict[str, Any] = {
            "recipe": dataclasses.asdict(self.recipe) | {"angle": self.recipe.angle},
            "kept": self.kept,
            "norms": list(self.norms),
            "weights": list(self.weights),
            "notes": list(self.notes),
        }
        plain: dict[str, Any] = _plain(parts)
        return plain

    def __str__(self) -> str:
        return "\n\n".join([*(str(table) for table in self.tables() if table.rows), "\n".join(self.summary())])


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shape(shape: tuple[int, ...] | None) -> str:
    return "-" if shape is None else "×".join(map(str, shape))


def _bytes(size: int | None) -> str:
    if size is None:
        return "-"
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


def _sizes(kept: Kept | None) -> tuple[str, str, str]:
    now, exact, lean = (None, None, None) if kept is None else kept
    return _bytes(now), _bytes(exact), _bytes(lean)


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    low, middle, high = (f"{value:.3g}" for value in spread)
    return middle if low == high else f"{low} … {middle} … {high}"


@torch.inference_mode(False)  # that mode saves nothing for backward and has no gradients
def diagnose(
    model: nn.Module | Mapping[str, Tensor],
    example_input: Any = None,
    *,
    lr: float = 0.1,
    weight_decay: float = 5e-4,
    momentum: float = 0.9,
    norm: str | float = "l1",
    layer_norm: str | float | None = None,
    dtype: torch.dtype | None = None,
    invariance: bool = True,
    tails: bool = False,
) -> Diagnosis:
    """Look at a model's norms and weights; the model, its gradients and statistics stay as they are.

    Args:
        model: a module, or a ``state_dict``, which tells only names and lengths.
        example_input: a tensor (N, ...), a tuple of positional or a dict of keyword arguments. Without it neither
            scale invariance nor memory is found. Memory is counted at its shape; invariance is tested on the first 8
            samples.
        lr, weight_decay, momentum: of SGD; for the effective step sizes and the equilibrium.
        norm, layer_norm: what ``convert`` would be asked for.
        dtype: of the activations, such as ``torch.float16`` for training under autocast; None is the model's own.
        invariance: test which weights are scale invariant: a few passes in float64, seconds for a large model.
        tails: measure how heavy the tails are of what the norms get, in one forward pass of all of ``example_input``,
            which should be real data: noise says nothing about them.

    Returns:
        Prints as tables; see :class:`Diagnosis`.

    Example::

        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> found = diagnose(model, torch.randn(16, 3, 8, 8))
        >>> [(layer.name, layer.norm, layer.becomes, layer.fused) for layer in found.norms]
        [('1', 'BatchNorm2d', 'L1BatchNorm2d', 'relu')]
        >>> found.norms[0].kept.now == 16 * 8 * 6 * 6 * 4 + 2 * 8 * 4  # the input, and two numbers per channel
        True
        >>> [(weight.name, weight.invariant) for weight in found.weights]
        [('0.weight', 'channel, dim 0'), ('3.weight', 'no')]
    """
    recipe = Recipe(lr, weight_decay, momentum)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    if isinstance(model, Mapping):
        return _of_state_dict(model, recipe)
    check_model(model)
    model = unwrap(model)
    if any(nn.parameter.is_lazy(t) for t in [*model.parameters(), *model.buffers()]):
        raise ValueError("the model has parameters or buffers that are not initialised yet: run it once first")
    notes: list[str] = []
    ghosts = Ghosts(dtype)
    report = ConversionReport()
    layer_kind = None if layer_norm is None else Norm.named(layer_norm, argument="layer_norm")
    converted = swap(ghosts.of(model), Norm.named(norm), layer_kind, report)
    kept: dict[str, Kept] = {}
    inputs: dict[str, tuple[int, ...]] = {}
    total = None
    if example_input is None:
        notes.append("without an input neither memory nor scale invariance is found")
    else:
        try:
            kept, inputs, total = ghosts.compare(ghosts.of(model), converted, example_input)
            if backends.TRITON_MISSING:
                notes.append(f"memory after convert was not measured: {backends.TRITON_MISSING}")
        except Exception as error:  # whatever the model's own code raises
            notes.append(f"memory was not measured: {first_line(error)}")
    measured: dict[str, Spread] = {}
    if tails and example_input is not None:
        try:
            measured = {name: Spread.of(ratios) for name, ratios in measure_tails(model, example_input).items()}
        except Exception as error:  # whatever the model's own code raises
            notes.append(f"tails were not measured: {first_line(error)}")
    changes = {change.name: change for change in report.changes}
    norms = []
    for name, kind in _norms(model):
        change = changes.get(name)
        plan = {"note": "not a layer that convert replaces"}
        if change is not None:
            plan = {"becomes": change.after, "fused": change.fused, "note": change.note}  # type: ignore[dict-item]
        seen: Any = {"input": inputs.get(name), "kept": kept.get(name), "tails": measured.get(name)}
        norms.append(NormLayer(name, kind, **plan, **seen))  # type: ignore[arg-type]
    weights = _weights(model, example_input if invariance else None, lr, notes)
    return Diagnosis(tuple(norms), weights, recipe, total, tuple(notes))


def first_line(error: Exception) -> str:
    """What kind of error, and what it says first."""
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def _norms(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Name and class of every norm; a norm of another package is known by its class's name."""
    for name, module in model.named_modules():
        if isinstance(module, _WEIGHT_NORMS):  # of the tensor that it computes, not of an activation
            yield name.replace("parametrizations.", "").rpartition(".")[0], type(module).__name__
        elif isinstance(module, _NORMS) or (
            "Norm" in type(module).__name__ and not any(map(_is_layer, module.children()))
        ):
            yield name, type(module).__name__


def _is_layer(module: nn.Module) -> bool:
    """Whether it is more than an activation: then the module that holds it is a block, not a norm."""
    return any(True for _ in module.parameters()) or any(True for _ in _norms(module))


def _weights(model: nn.Module, example_input: Any, lr: float, notes: list[str]) -> tuple[Weight, ...]:
    if all(p.dim() < 2 for p in model.parameters()):
        return ()
    tensors, dims = named_weights(model)
    tested = None
    if example_input is not None and not any(t.is_meta for t in tensors.values()):
        try:
            tested = _invariant(model, example_input)
        except Exception as error:  # whatever the model's own code raises
            notes.append(f"scale invariance was not tested: {first_line(error)}")
    weights = []
    for name, w in tensors.items():
        invariance = None if tested is None else tested.get(name)
        steps = invariance is None or invariance.complete
        dim = dims[name] if invariance is None or invariance.granularity is None else invariance.dim
        words = None if invariance is None else str(invariance)
        weights.append(_weight(name, w, words, dim, lr if steps else None))
    return tuple(weights)


def _invariant(model: nn.Module, example_input: Any) -> Mapping[str, Invariance]:
    small = tree_map_only(Tensor, lambda t: t[:_PROBE_BATCH] if t.dim() else t, example_input)
    try:
        return scale_invariant_parameters(model, small).found
    except Exception:
        if sum(isinstance(leaf, Tensor) for leaf in tree_leaves(example_input)) < 2:
            raise
        # One of several tensors may have no samples to take the first of, such as a mask, (T, T).
        return scale_invariant_parameters(model, example_input).found


def _weight(name: str, w: Tensor, invariant: str | None, dim: int | None, lr: float | None) -> Weight:
    shape = tuple(w.shape)
    if w.is_meta or w.numel() == 0 or not w.is_floating_point():
        return Weight(name, shape, invariant, dim)
    try:
        lengths = channel_norms(w.detach(), dim)
    except RuntimeError:  # of sparse, quantized and fp8 tensors torch takes no norm
        return Weight(name, shape, invariant, dim)
    return Weight(name, shape, invariant, dim, Spread.of(lengths), None if lr is None else Spread.of(lr / lengths**2))


def _of_state_dict(state: Mapping[str, Tensor], recipe: Recipe) -> Diagnosis:
    """A checkpoint alone: a batch norm is known by its statistics, another norm by a weight with one dimension."""
    if others := [name for name in state if not isinstance(name, str)]:
        raise ValueError(f"a state_dict has names for keys, got {others[0]!r}")
    tensors = {plain_name(name): t for name, t in state.items() if isinstance(t, Tensor)}
    if not tensors:
        raise ValueError("the state_dict holds no tensors")
    norms = []
    for name, t in tensors.items():
        owner, _, last = name.rpartition(".")
        prefix = f"{owner}." if owner else ""
        if last == "running_mean":
            norms.append(NormLayer(owner, "batch norm", becomes=""))
        elif last == "weight" and t.dim() == 1 and f"{prefix}running_mean" not in tensors:
            norms.append(NormLayer(owner, "layer, group or RMS norm", becomes=""))
    weights = [_weight(n, t, None, 0, recipe.lr) for n, t in tensors.items() if t.dim() >= 2 and t.is_floating_point()]
    note = "a checkpoint alone tells neither what convert would do, nor memory, nor scale invariance: give the model"
    return Diagnosis(tuple(norms), tuple(weights), recipe, None, (note,))
