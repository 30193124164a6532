"""Which weights does a normalization make scale invariant? A test on a copy of the model, not a guess from names.

With a weight w followed by a normalization the output is the same for any length of w (F1): f(a·w) = f(w) for a > 0.
So, by Euler's theorem, ⟨w, ∇L(w)⟩ = 0 for every loss L. Both are tested, channel by channel, on a float64 copy:

1. *Gradient*: a few random linear losses of the output, one backward pass each for all weights together.
2. *Rescaling*: channels that pass are multiplied by random powers of two (exact in floating point), all of the model in
   one forward pass, and the outputs compared. Where they differ, bisection finds the weights and channels that did it.

The result is to be a property of the architecture, so the copy differs from the model in two ways: the eps of
normalization modules, which breaks F1 slightly, becomes machine epsilon, and tensors that are all zero (fresh biases,
zero-initialised residual branches) get random values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from normmatters.kernels import emulation
from normmatters.probe import Probe, Rescaling, cuda_devices, named_parameters, plain_name, unwrap

Granularity = Literal["channel", "tensor"]


@dataclass(frozen=True)
class Invariance:
    """The result for one parameter.

    Attributes:
        granularity: `"channel"` if every slice along `dim` can be rescaled alone, `"tensor"` if only the whole can,
            else `None`.
        dim: channel dimension, `None` unless the granularity is `"channel"`.
        mask: bool `[channels]` (`[1]` for a whole tensor), which channels are invariant.
        jointly_with: other parameters of the module that must be rescaled by the same factor; `()` if none.
        cosine: largest |cos(w, ∇L)| over losses and invariant channels, or over all channels where none is invariant.
        change: largest change of the output, relative to its root mean square; nan where the gradient test failed.
        influence: False when the gradient is zero: an unused parameter, or a bias that the normalization subtracts.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> found = scale_invariant_parameters(model, torch.randn(8, 3))
    >>> print(found["0.weight"], "/", found["0.bias"], "/", found["1.weight"])
    channel, dim 0 / no influence on the output / no
    """

    granularity: Granularity | None
    dim: int | None
    mask: Tensor
    jointly_with: tuple[str, ...]
    cosine: float
    change: float
    influence: bool = True

    @property
    def complete(self) -> bool:
        """Whether the whole parameter is scale invariant by itself."""
        return self.granularity is not None and not self.jointly_with and bool(self.mask.all())

    def __str__(self) -> str:
        if not self.influence:
            return "no influence on the output"
        if self.granularity is None:
            return "no"
        where = f"channel, dim {self.dim}" if self.granularity == "channel" else "tensor"
        if not self.mask.all():
            where += f", {int(self.mask.sum())} of {len(self.mask)}"
        return where + (f", with {', '.join(self.jointly_with)}" if self.jointly_with else "")


class ScaleInvariantParameters(Mapping[str, Invariance]):
    """Result of `scale_invariant_parameters`: iterates over the names of the scale-invariant parameters.

    `result[name]` is the `Invariance` of any parameter, invariant or not; `print(result)` shows all as a table.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> result = scale_invariant_parameters(model, torch.randn(8, 3))
    >>> list(result), result.dims, "0.bias" in result
    (['0.weight'], {'0.weight': 0}, False)
    """

    def __init__(self, model: nn.Module, found: Mapping[str, Invariance]) -> None:
        self._model = model
        self.found = dict(found)

    def __iter__(self) -> Iterator[str]:
        return (n for n, one in self.found.items() if one.complete)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self.found and self.found[str(name)].complete

    def __getitem__(self, name: str) -> Invariance:
        return self.found[name]

    @property
    def dims(self) -> dict[str, int | None]:
        """Name → channel dimension, `None` where only the whole tensor is invariant."""
        return {n: self.found[n].dim for n in self}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of the scale-invariant parameters of the model itself."""
        return ((n, p) for n, p in named_parameters(self._model) if n in self)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The scale-invariant parameters of the model itself."""
        return (p for _, p in self.named_parameters())

    def __str__(self) -> str:
        width = max([9, *(len(n) for n in self.found)])
        lines = [f"{'parameter':{width}}  {'max |cos(w, grad)|':>18}  {'output change':>13}  scale invariant"]
        for name, one in self.found.items():
            change = "-" if math.isnan(one.change) else f"{one.change:.1e}"
            lines.append(f"{name:{width}}  {one.cosine:18.1e}  {change:>13}  {one}")
        return "\n".join(lines)

    __repr__ = __str__


def _per_channel(t: Tensor, dim: int | None) -> Tensor:
    return t.sum().view(1) if dim is None else t.sum([d for d in range(t.ndim) if d != dim]) if t.ndim > 1 else t


@dataclass(frozen=True)
class _Trial:
    """Gradient evidence for tensors that share their channels."""

    dims: list[int | None]
    cosine: Tensor  # [channels], largest over the losses
    live: Tensor  # bool [channels], whether the channel acts on the output at all

    def passed(self, tol: float) -> Tensor:
        return self.live & (self.cosine <= tol)

    def accept(self, mask: Tensor, change: float, whole: bool) -> Invariance:
        kind: Granularity = "tensor" if self.dims[0] is None else "channel"
        # A channel without influence (a token that the example lacks) counts as its siblings.
        full = torch.ones_like(mask) if whole else mask
        return Invariance(kind, self.dims[0], full, (), self.cosine[mask].max().item(), change)


def _gradient_trials(probe: Probe, names: Sequence[str], grads: list[dict[str, Tensor]]) -> list[_Trial]:
    """One trial for every way to cut these tensors into channels, finest first."""
    tensors = [probe.parameters[n].detach() for n in names]
    trials = []
    for dims in _layouts([t.shape for t in tensors]):
        length = torch.stack([_per_channel(t * t, d) for t, d in zip(tensors, dims)]).sum(0).sqrt()
        cosine, live = torch.zeros_like(length), torch.zeros_like(length, dtype=torch.bool)
        for g in grads:
            dot = torch.stack([_per_channel(t * g[n], d) for n, t, d in zip(names, tensors, dims)]).sum(0).abs()
            slope = torch.stack([_per_channel(g[n] * g[n], d) for n, d in zip(names, dims)]).sum(0).sqrt()
            # The losses have unit scale, so rounding noise (a bias before batch norm) shows by its size.
            alive = length * slope > probe.eps**0.7
            cosine = torch.where(alive, torch.maximum(cosine, dot / (length * slope)), cosine)
            live |= alive
        trials.append(_Trial(dims, cosine, live))
    return trials


def _layouts(shapes: Sequence[torch.Size]) -> list[list[int | None]]:
    """Channel dimensions to try for tensors that are rescaled together, finest first."""
    layouts: list[list[int | None]] = []
    matrix = any(len(s) >= 2 for s in shapes)
    if matrix and all(len(s) >= 1 and s[0] == shapes[0][0] for s in shapes):
        layouts.append([0] * len(shapes))
    if matrix and all(len(s) >= 2 and s[1] == shapes[0][1] for s in shapes):
        layouts.append([1] * len(shapes))
    return [*layouts, [None] * len(shapes)]


T = TypeVar("T")


def bisect(change: Callable[[list[T]], float], items: list[T], tol: float) -> list[tuple[T, float]]:
    """The items that can be rescaled without changing the output, each with the change it was accepted at."""
    moved = change(items)
    if moved <= tol:
        return [(item, moved) for item in items]
    if len(items) == 1:
        return []
    half = len(items) // 2
    return bisect(change, items[:half], tol) + bisect(change, items[half:], tol)


def _examine(
    probe: Probe, bundles: Sequence[tuple[str, ...]], grads: list[dict[str, Tensor]], tol: float
) -> dict[tuple[str, ...], Invariance]:
    """The finest invariance of every bundle of parameters; a bundle's members are rescaled together.

    All bundles whose gradients pass are rescaled in one forward pass; bisection finds those that change the output.
    """
    result: dict[tuple[str, ...], Invariance] = {}
    trials = {names: _gradient_trials(probe, names, grads) for names in bundles}
    tensors = {names: [probe.parameters[n].detach() for n in names] for names in bundles}

    def rescaled(proposals: list[tuple[tuple[str, ...], _Trial]]) -> float:
        return probe.change([Rescaling(tensors[names], trial.dims, trial.live) for names, trial in proposals])

    waiting = {n: [t for t in ts if t.live.any() and torch.equal(t.passed(tol), t.live)] for n, ts in trials.items()}
    while proposals := [(names, candidates.pop(0)) for names, candidates in waiting.items() if candidates]:
        for (names, trial), moved in bisect(rescaled, proposals, tol):
            result[names] = trial.accept(trial.live, moved, whole=True)
            waiting[names] = []
    for names in bundles:
        if names not in result:
            result[names] = _partial(probe, tensors[names], trials[names], tol)
    return {names: result[names] for names in bundles}


def _partial(probe: Probe, tensors: Sequence[Tensor], trials: list[_Trial], tol: float) -> Invariance:
    """Invariance of some channels, or none."""
    first = trials[0]
    if not first.live.any():
        return Invariance(None, None, first.live, (), 0.0, math.nan, influence=False)
    for trial in trials:
        candidates = trial.passed(tol)
        if trial.dims[0] is None or not candidates.any():
            continue

        def mask_of(index: list[int], size: int = len(candidates)) -> Tensor:
            mask = torch.zeros(size, dtype=torch.bool, device="cpu")
            return mask.index_fill_(0, torch.tensor(index, device="cpu"), True)

        def change(index: list[int], trial: _Trial = trial) -> float:
            return probe.change([Rescaling(tensors, trial.dims, mask_of(index))])

        passed = bisect(change, candidates.nonzero().view(-1).tolist(), tol)
        if passed:
            mask = mask_of([c for c, _ in passed]).to(trial.cosine.device)
            return trial.accept(mask, max(moved for _, moved in passed), whole=False)
    return Invariance(None, None, torch.zeros_like(first.live), (), first.cosine.max().item(), math.nan)


def scale_invariant_parameters(
    model: nn.Module,
    example_input: Any,
    *,
    tol: float = 1e-3,
    probes: int = 3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> ScaleInvariantParameters:
    """Find the parameters whose length does not matter because a normalization follows, per output channel.

    Works on any architecture, because it tests a copy: see the top of this file. The model's parameters, gradients,
    buffers and mode and the global random state stay as they are.

    Args:
        model: any module; tested in training mode, so that batch norm normalizes by the batch. Complex parameters may
            be part of it, but are not tested.
        example_input: a tensor, a tuple of positional or a dict of keyword arguments. A small real batch is best.
        tol: largest |cos(w, ∇L)| and relative change of the output that count as none. Both are below 1e-10 where eps
            is an attribute of its module, and about eps/variance where the code passes it as a literal.
        probes: number of random losses.
        dtype: precision of the copy.
        seed: for the losses, the factors and the model's own randomness.

    Returns:
        Iterates over names; has `parameters()`, `named_parameters()`, `dims`, `[name]`; prints as a table.

    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    >>> list(scale_invariant_parameters(model, torch.randn(8, 1, 4, 4)))
    ['0.weight']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not 0 < tol < 1 or probes < 1:
        raise ValueError(f"tol must lie in (0, 1) and probes be 1 or more, got {tol} and {probes}")
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    if emulation.active() is not None:
        raise ValueError("precision.arithmetic rounds too coarsely for this test: call it outside")
    bare = unwrap(model)
    with torch.random.fork_rng(devices=cuda_devices(bare)), torch.inference_mode(False), torch.enable_grad():
        probe = Probe(bare, example_input, dtype, seed)
        names = [n for n, p in probe.parameters.items() if p.requires_grad]
        if not names:
            raise ValueError("the model must have floating-point parameters to test, it has none")
        grads = probe.gradients(probes)
        found = {n: one for (n,), one in _examine(probe, [(n,) for n in names], grads, tol).items()}
        bundles = []
        for prefix, module in probe.model.named_modules():
            own = [plain_name(f"{prefix}.{n}" if prefix else n) for n, _ in module.named_parameters(recurse=False)]
            own = [n for n in own if n in found and found[n].influence and not found[n].complete]
            if len(own) >= 2:
                bundles.append(tuple(own))
        for own_names, joint in _examine(probe, bundles, grads, tol).items():
            if joint.granularity is not None and joint.mask.all():
                for n in own_names:
                    found[n] = replace(joint, jointly_with=tuple(o for o in own_names if o != n))
    # Masks are small, so they are on the host whatever the model's device is.
    cpu = {n: replace(one, mask=one.mask.cpu()) for n, one in found.items()}
    return ScaleInvariantParameters(model, cpu)


def split_parameters(model: nn.Module, example_input: Any, **options: Any) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: first the scale-invariant parameters, then all others, with their names.

    Args:
        model, example_input, options: as for `scale_invariant_parameters`.

    Returns:
        `[{"params": [(name, parameter), ...]}, {"params": [...]}]`; a group that would be empty is left out.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> invariant, rest = split_parameters(model, torch.randn(8, 3))
    >>> groups = [invariant, rest | {"weight_decay_free": False}]
    >>> optimizer = WeightDecayFreeSGD(groups, lr=0.1, momentum=0.9, weight_decay=5e-4)
    """
    result = scale_invariant_parameters(model, example_input, **options)
    invariant = list(result.named_parameters())
    rest = [(n, p) for n, p in named_parameters(model) if n not in result]
    return [{"params": group} for group in (invariant, rest) if group]
