"""Which weights does a normalization make scale invariant? Found by trying, not by reading names.

A weight w behind a normalization gives the same output at any length (F1): f(a·w) = f(w) for a > 0, and so by Euler's
theorem ⟨w, ∇L(w)⟩ = 0 for every loss L. Both are tested, channel by channel, on a float64 copy of the model:

1. *Gradient*: a few random linear losses of the output, one backward pass each for all weights together.
2. *Rescaling*: channels that pass are multiplied by random powers of two (exact in floating point), all of one weight
   in one forward pass, and the outputs compared. Where they differ, bisection finds the channels that are to blame.

What is asked is a property of the architecture, so two accidents of the present state are taken out of the copy: the
eps of normalization modules, which breaks F1 slightly, becomes machine epsilon, and tensors that are all zero (fresh
biases, zero-initialised residual branches) get random values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normmatters.optim._rows import plain_name, shaped

__all__ = ["Invariance", "ScaleInvariantParameters", "scale_invariant_parameters", "split_parameters"]

Granularity = Literal["channel", "tensor"]


@dataclass(frozen=True)
class Invariance:
    """What was found for one parameter.

    Attributes:
        granularity: `"channel"` if every slice along `dim` can be rescaled alone, `"tensor"` if only the whole can,
            else `None`.
        dim: channel dimension, `None` unless the granularity is `"channel"`.
        mask: bool `[channels]` (`[1]` for a whole tensor), which channels are invariant.
        jointly_with: other parameters of the module that must be rescaled by the same factor; `()` if none.
        cosine: largest |cos(w, ∇L)| over the invariant channels and losses, or over all channels where there are none.
        change: largest change of the output, relative to its root mean square; nan where the gradient had ruled it out.
        influence: False when the gradient is zero: an unused parameter, or a bias that the normalization subtracts.
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
        return ((n, p) for n, p in _named(self._model) if n in self)

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


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(plain_name(n), p) for n, p in model.named_parameters()]


def _unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and `torch.compile`."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _tensors(output: Any) -> Iterator[Tensor]:
    """All floating-point tensors in nested tuples, lists, mappings."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for value in output:
            yield from _tensors(value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {k: _cast(v, dtype) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_cast(v, dtype) for v in value)
    return value


class _Probe:
    """A private copy of the model whose output is a deterministic function of its parameters."""

    def __init__(self, model: nn.Module, example_input: Any, dtype: torch.dtype, seed: int) -> None:
        try:
            self.model = copy.deepcopy(model).to(dtype).train()
        except RuntimeError as error:
            raise ValueError(
                f"the model must allow copy.deepcopy, to be tested without touching it: {error}"
            ) from error
        self.input = _cast(example_input, dtype)
        self.seed = seed
        self.eps = torch.finfo(dtype).eps
        self.parameters = dict(_named(self.model))
        for module in self.model.modules():
            if isinstance(eps := getattr(module, "eps", None), float) and eps > self.eps:
                module.eps = self.eps  # type: ignore[assignment]
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters.values():
                if not p.any():
                    p.normal_(0, 0.1)
                p.requires_grad_(p.is_floating_point())
                p.grad = None
        self._buffers = [(b, b.clone()) for b in self.model.buffers()]
        self.base = self.output().detach()
        self.rms = self.base.square().mean().sqrt()
        if self.base.numel() == 0 or not self.base.isfinite().all() or self.rms == 0:
            raise ValueError(
                "the model's output on the example input must hold finite, non-zero floating-point numbers"
            )
        if not torch.equal(self.base, self.output().detach()):
            raise ValueError("the model gives different outputs for one input, one seed and one set of weights")

    def output(self) -> Tensor:
        """All outputs as one vector; random numbers and buffers are the same at every call."""
        torch.manual_seed(self.seed)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        x = self.input
        if isinstance(x, Mapping):
            out = self.model(**x)
        elif isinstance(x, tuple | list):
            out = self.model(*x)
        else:
            out = self.model(x)
        return torch.cat([t.reshape(-1) for t in _tensors(out)] or [torch.empty(0)])

    def gradients(self, probes: int) -> list[dict[str, Tensor]]:
        """Gradients of `probes` random linear losses of unit scale, by name."""
        found = []
        names = [n for n, p in self.parameters.items() if p.requires_grad]
        for i in range(probes):
            output = self.output()
            generator = torch.Generator().manual_seed(self.seed + 1 + i)
            direction = torch.randn(len(output), generator=generator, dtype=torch.float64).to(output)
            scale = direction.norm() * output.detach().norm()
            loss = (output @ direction) / scale
            grads = torch.autograd.grad(loss, [self.parameters[n] for n in names], allow_unused=True)
            found.append({n: torch.zeros_like(self.parameters[n]) if g is None else g for n, g in zip(names, grads)})
        return found

    @torch.no_grad()
    def change(self, tensors: Sequence[Tensor], dims: Sequence[int | None], mask: Tensor) -> float:
        """Output change when the masked channels of all `tensors` are rescaled, each by its own power of two."""
        generator = torch.Generator().manual_seed(self.seed)
        powers = torch.randint(1, 4, mask.shape, generator=generator) * (
            torch.randint(0, 2, mask.shape, generator=generator) * 2 - 1
        )
        factor = torch.where(mask.cpu(), 2.0**powers, 1.0)
        saved = [t.clone() for t in tensors]
        for t, dim in zip(tensors, dims):
            t.mul_(shaped(factor, t, dim).to(t))
        difference = (self.output() - self.base).abs().max() / self.rms
        for t, value in zip(tensors, saved):
            t.copy_(value)
        return difference.nan_to_num(nan=math.inf).item()


def _per_channel(t: Tensor, dim: int | None) -> Tensor:
    return t.sum().view(1) if dim is None else t.sum([d for d in range(t.ndim) if d != dim]) if t.ndim > 1 else t


@dataclass(frozen=True)
class _Trial:
    """Gradient evidence for a bundle of tensors that share their channels."""

    cosine: Tensor  # [channels], largest over the losses
    live: Tensor  # bool [channels], whether the channel acts on the output at all


def _gradient_trial(
    probe: _Probe, names: Sequence[str], dims: Sequence[int | None], grads: list[dict[str, Tensor]]
) -> _Trial:
    tensors = [probe.parameters[n].detach() for n in names]
    length = torch.stack([_per_channel(t * t, d) for t, d in zip(tensors, dims)]).sum(0).sqrt()
    cosine, live = torch.zeros_like(length), torch.zeros_like(length, dtype=torch.bool)
    for g in grads:
        dot = torch.stack([_per_channel(t * g[n], d) for n, t, d in zip(names, tensors, dims)]).sum(0).abs()
        slope = torch.stack([_per_channel(g[n] * g[n], d) for n, d in zip(names, dims)]).sum(0).sqrt()
        # The losses have unit scale, so a gradient of rounding noise (a bias before batch norm) is told by its size.
        alive = length * slope > probe.eps**0.7
        cosine = torch.where(alive, torch.maximum(cosine, dot / (length * slope)), cosine)
        live |= alive
    return _Trial(cosine, live)


def _bisect(change: Callable[[Tensor], float], mask: Tensor, tol: float) -> Tensor:
    """The channels of `mask` that can be rescaled without changing the output."""
    if change(mask) <= tol:
        return mask
    index = mask.nonzero().view(-1)
    if len(index) == 1:
        return torch.zeros_like(mask)
    halves = []
    for part in index.tensor_split(2):
        half = torch.zeros_like(mask)
        half[part] = True
        halves.append(_bisect(change, half, tol))
    return halves[0] | halves[1]


def _layouts(shapes: Sequence[torch.Size]) -> list[list[int | None]]:
    """Channel dimensions to try for tensors that are rescaled together, finest first."""
    layouts: list[list[int | None]] = []
    matrix = any(len(s) >= 2 for s in shapes)
    if matrix and all(len(s) >= 1 and s[0] == shapes[0][0] for s in shapes):
        layouts.append([0] * len(shapes))
    if matrix and all(len(s) >= 2 and s[1] == shapes[0][1] for s in shapes):
        layouts.append([1] * len(shapes))
    return [*layouts, [None] * len(shapes)]


def _examine(probe: _Probe, names: Sequence[str], grads: list[dict[str, Tensor]], tol: float) -> Invariance:
    """The finest invariance of these parameters, rescaled together; partial ones where no whole one holds."""
    tensors = [probe.parameters[n].detach() for n in names]
    rejected: Invariance | None = None
    partial: Invariance | None = None
    for dims in _layouts([t.shape for t in tensors]):
        trial = _gradient_trial(probe, names, dims, grads)
        if not trial.live.any():
            return Invariance(None, None, trial.live, (), 0.0, math.nan, influence=False)
        candidates = trial.live & (trial.cosine <= tol)
        kind: Granularity = "tensor" if dims[0] is None else "channel"
        if rejected is None:
            rejected = Invariance(None, None, torch.zeros_like(candidates), (), trial.cosine.max().item(), math.nan)
        if not candidates.any():
            continue

        def change(mask: Tensor, dims: Sequence[int | None] = dims) -> float:
            return probe.change(tensors, dims, mask)

        if torch.equal(candidates, trial.live) and (moved := change(candidates)) <= tol:
            # A channel without influence (a token that the example lacks) follows its siblings.
            mask = torch.ones_like(candidates)
            return Invariance(kind, dims[0], mask, (), trial.cosine[candidates].max().item(), moved)
        if kind == "channel" and partial is None:
            passed = _bisect(change, candidates, tol)
            if passed.any():
                partial = Invariance(kind, dims[0], passed, (), trial.cosine[passed].max().item(), change(passed))
    assert rejected is not None
    return partial or rejected


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

    Works on any architecture, by testing: see the head of this file. The model is copied; its parameters, gradients,
    buffers, mode and the global random state stay as they are.

    Args:
        model: any module; tested in training mode, so that batch norm normalizes by the batch.
        example_input: a tensor, a tuple of positional or a dict of keyword arguments. A small real batch is best.
        tol: largest |cos(w, ∇L)| and relative change of the output that count as none. Both come out near 1e-10 where
            eps is an attribute of its module, and at about eps/variance where the code passes it as a literal.
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
    bare = _unwrap(model)
    devices = {t.device for t in [*bare.parameters(), *bare.buffers()] if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
        probe = _Probe(bare, example_input, dtype, seed)
        grads = probe.gradients(probes)
        found = {n: _examine(probe, [n], grads, tol) for n, p in probe.parameters.items() if p.requires_grad}
        for prefix, module in probe.model.named_modules():
            own = [plain_name(f"{prefix}.{n}" if prefix else n) for n, _ in module.named_parameters(recurse=False)]
            own = [n for n in own if n in found and found[n].influence and not found[n].complete]
            if len(own) < 2:
                continue
            joint = _examine(probe, own, grads, tol)
            if joint.granularity is not None and joint.mask.all():
                for n in own:
                    others = tuple(o for o in own if o != n)
                    found[n] = Invariance(joint.granularity, joint.dim, joint.mask, others, joint.cosine, joint.change)
    # Masks are small; a caller keeps them on the host whatever the model's device is.
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
    >>> optimizer = torch.optim.SGD([invariant | {"weight_decay": 0.0}, rest | {"weight_decay": 5e-4}], lr=0.1)
    """
    result = scale_invariant_parameters(model, example_input, **options)
    invariant = list(result.named_parameters())
    rest = [(n, p) for n, p in _named(model) if n not in result]
    return [{"params": group} for group in (invariant, rest) if group]
