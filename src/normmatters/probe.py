"""Try things on a model without changing it: names, devices, one call, and a deterministic copy.

`Probe` is a copy of a model whose output is a deterministic function of its parameters. The small functions name
parameters without the prefixes of wrappers, find the model inside wrappers, and call a model on an example input.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Parts that torch.compile and checkpoint_wrapper put into names, also of single blocks. DDP's is `module`, and counts
# only at the front, because a user may have a module of that name.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """``name`` without the parts of DDP, `torch.compile` and checkpointing.

    >>> plain_name("module._orig_mod.conv1.weight")
    'conv1.weight'
    """
    name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    while name.startswith("module."):
        name = name.split(".", 1)[1]
    return name


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) without the prefixes of wrappers."""
    return [(plain_name(n), p) for n, p in model.named_parameters()]


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and `torch.compile`."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def cuda_devices(model: nn.Module) -> list[torch.device]:
    """The GPUs that hold the model's tensors: there it may draw random numbers too."""
    return [*{t.device for t in [*model.parameters(), *model.buffers()] if t.device.type == "cuda"}]


def _seed(seed: int, devices: set[torch.device]) -> None:
    """Seed the host and these devices. `torch.manual_seed` would seed all GPUs, also where no state was saved."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        elif device.type != "cpu":
            torch.get_device_module(device).manual_seed(seed)


def call(model: nn.Module, example_input: Any) -> Any:
    """The model's output for a tensor, a tuple or list of positional, or a mapping of keyword arguments."""
    if isinstance(example_input, Mapping):
        return model(**example_input)
    if isinstance(example_input, tuple | list):
        return model(*example_input)
    return model(example_input)


def _tensors(output: Any) -> Iterator[Tensor]:
    """All floating-point tensors in nested tuples, lists and mappings; complex ones as pairs of numbers."""
    if isinstance(output, Tensor):
        if output.is_complex():
            yield torch.view_as_real(output.resolve_conj())
        elif output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for value in output:
            yield from _tensors(value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A copy with its numbers in ``dtype``."""
    if isinstance(value, Tensor):
        if value.is_complex():
            dtype = dtype.to_complex()
        numbers = value.is_floating_point() or value.is_complex()
        return value.detach().to(dtype if numbers else value.dtype, copy=True)
    if isinstance(value, Mapping):
        return {k: _cast(v, dtype) for k, v in value.items()}
    if isinstance(value, tuple | list):
        cast = [_cast(v, dtype) for v in value]
        return type(value)._make(cast) if hasattr(value, "_make") else type(value)(cast)  # a named tuple
    return value


@dataclass(frozen=True)
class Rescaling:
    """Tensors that share their channels, and the channels to rescale."""

    tensors: Sequence[Tensor]
    dims: Sequence[int | None]
    mask: Tensor


class Probe:
    """The copy: in training mode, in `dtype`, with machine epsilon for eps and random values for all-zero tensors."""

    def __init__(self, model: nn.Module, example_input: Any, dtype: torch.dtype, seed: int) -> None:
        counts = Counter(name for name, _ in named_parameters(model))
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(
                f"two parameters are called {twice[0]!r} without the prefixes of wrappers (module., _orig_mod.): "
                "rename one of the model's modules"
            )
        tensors = [*model.parameters(), *model.buffers()]
        if any(t.is_meta for t in tensors):
            raise ValueError("the model must hold numbers to be tested, it has tensors on the meta device")
        try:
            copied = copy.deepcopy(model)
            # `Module.to` drops imaginary parts; it is called otherwise because a model may have its own.
            is_complex = any(t.is_complex() for t in tensors)
            self.model = (copied._apply(lambda t: _cast(t, dtype)) if is_complex else copied.to(dtype)).train()
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"the model must allow copy.deepcopy, to be tested without touching it: {error}"
            ) from error
        self.input, self.dtype = example_input, dtype
        self.seed = seed
        self.eps = torch.finfo(dtype).eps
        self.parameters = dict(named_parameters(self.model))
        for module in self.model.modules():
            if isinstance(eps := getattr(module, "eps", None), float) and eps > self.eps:
                with contextlib.suppress(AttributeError, RuntimeError):  # a property, or a constant of TorchScript
                    module.eps = self.eps  # type: ignore[assignment]
        self._devices = {t.device for t in tensors}
        _seed(seed, self._devices)
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
        """All outputs as one vector, with the same random numbers and buffers in every call."""
        _seed(self.seed, self._devices)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        # A fresh copy per call: a model may normalize its input in place, or empty a dictionary.
        parts = [t.reshape(-1) for t in _tensors(call(self.model, _cast(self.input, self.dtype)))]
        return torch.cat(parts or [torch.empty(0)])

    def gradients(self, probes: int) -> list[dict[str, Tensor]]:
        """Gradients of `probes` random linear losses of unit scale, by name."""
        gradients = []
        names = [n for n, p in self.parameters.items() if p.requires_grad]
        for i in range(probes):
            output = self.output()
            generator = torch.Generator().manual_seed(self.seed + 1 + i)
            drawn = torch.randn(len(output), generator=generator, dtype=torch.float64, device="cpu")
            direction = drawn.to(output)
            scale = direction.norm() * output.detach().norm()
            loss = (output @ direction) / scale
            grads = torch.autograd.grad(loss, [self.parameters[n] for n in names], allow_unused=True)
            # Dense, because torch knows few operations on sparse gradients, which embeddings may have.
            pairs = zip(names, grads)
            gradients.append({n: torch.zeros_like(self.parameters[n]) if g is None else g.to_dense() for n, g in pairs})
        return gradients

    @torch.no_grad()
    def change(self, rescalings: Sequence[Rescaling]) -> float:
        """Change of the output when every masked channel is multiplied by its own power of two."""
        generator = torch.Generator().manual_seed(self.seed)
        saved = [(t, t.clone()) for r in rescalings for t in r.tensors]
        for r in rescalings:
            which = torch.randint(6, r.mask.shape, generator=generator, device="cpu")
            powers = torch.tensor([-3, -2, -1, 1, 2, 3], device="cpu")[which]
            factor = torch.where(r.mask.cpu(), 2.0**powers, 1.0)
            for t, dim in zip(r.tensors, r.dims):
                shape = [1] * t.ndim
                if dim is not None:
                    shape[dim] = -1
                t.mul_(factor.view(shape).to(t))
        difference = (self.output() - self.base).abs().max() / self.rms
        for t, value in saved:
            t.copy_(value)
        return difference.nan_to_num(nan=math.inf).item()
