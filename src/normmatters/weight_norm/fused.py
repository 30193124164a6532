"""All normalized weights of a model in a few launches, once per forward pass."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from normmatters.kernels.backends import plain_only
from normmatters.kernels.operators import needs_operators
from normmatters.weight_norm.parametrizations import BoundedWeight, ClassicWeight, weight_norms
from normmatters.weight_norm.precomputed import kernels_on

#: Layers whose output is linear in their weight, and a channel of it in one slice.
WEIGHT_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)

M = TypeVar("M", bound=nn.Module)

# What groups depend on in a v or ρ.
_ATTRIBUTES: tuple[Any, ...] = (*map(attrgetter, ("device", "dtype", "shape", "requires_grad")), Tensor.stride)

# Bytes of a group in distributed training: what DistributedDataParallel exchanges at a time.
BUCKET_BYTES = 25 * 2**20


def fuse(model: M) -> M:
    """Compute all weights of ``model`` that have weight norm together at the start of its forward passes, in place.

    This takes a few kernels instead of several for each layer, and under autocast the weights of linear and
    convolutional layers come out in the precision they are used in. Values and gradients are those of
    :func:`bounded_weight_norm` and :func:`classic_weight_norm`. Nothing is added to the state dict. Copies of the model
    are fused too.

    A layer still computes its own weight outside the model's forward pass, inside ``torch.compile`` (which makes
    kernels of its own), under a dispatch mode (which must see operators), and where the kernels cannot take it: Top(k),
    slices along another dimension than 0, sharded weights, a g of another dtype than its v; on a GPU also float64 and
    other p than 1, 2 and ∞; on a CPU where the native kernels are missing.

    Weights computed together also get their gradients together. In distributed training they are therefore cut into
    groups of about 25 MB, as ``DistributedDataParallel`` cuts gradients, so that their exchange overlaps with the
    backward pass.

    :func:`apply_weight_norm` calls it; call it again after adding weight norm in another way.

    Args:
        model: any module whose ``forward`` uses the layers; wrap it (DDP, ``torch.compile``) after or before.

    Raises:
        ValueError: no layer of ``model`` has bounded or classic weight norm.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> report = apply_weight_norm(model)
        >>> fuse(model)(torch.randn(3, 4)).shape
        torch.Size([3, 2])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module, got {type(model).__name__}")
    layers = [
        # Autocast runs these in low precision: their weights are made in it, so that nothing is left to cast.
        _Layer(owner.parametrizations, name, stack, norm, v.shape, isinstance(owner, WEIGHT_LAYERS))
        for owner in model.modules()
        for name, stack, norm in weight_norms(owner)
        for v in (stack.original if isinstance(norm, BoundedWeight) else stack.original1,)
    ]
    if not layers:
        raise ValueError(f"found no bounded weight norm to fuse in {type(model).__name__}, and no classic one")
    for module in model.modules():
        unfuse(module)
    fusion = _Fusion(layers)
    model.register_forward_pre_hook(fusion.before, prepend=True)
    model.register_forward_hook(fusion.after, always_call=True)
    return model


def unfuse(model: M) -> M:
    """Undo :func:`fuse`: each layer computes its own weight again. Does nothing to a model that is not fused.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> report = apply_weight_norm(model)
        >>> unfuse(fuse(model))(torch.randn(3, 4)).shape
        torch.Size([3, 2])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module, got {type(model).__name__}")
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), _Fusion):
                del hooks[key]
                model._forward_hooks_always_called.pop(key, None)
    return model


class _Layer(NamedTuple):
    home: Any  # the ModuleDict of the layer's parametrizations
    name: str  # of the weight
    stack: Any  # home[name], the ParametrizationList, which has v, and g if there is one
    norm: BoundedWeight | ClassicWeight
    shape: torch.Size
    low_precision: bool

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """v and ρ, or g; None if the weight norm has been removed, or the parameter is not there."""
        if self.home._modules.get(self.name) is not self.stack:
            return None, None
        return self.norm.v_and_rho(self.stack)


class _GroupKey(NamedTuple):
    """What layers whose weights are computed in one call have in common. In most models, all do."""

    kernels: Any  # a module
    device: torch.device
    v: torch.dtype
    dtype: torch.dtype
    p: float
    learned: bool  # one ρ for each row: classic weight norm
    trained: bool  # if one weight of a call requires gradients, all do: a frozen layer would compute some for nothing
    bucket: int


class _Fusion:
    """The hooks. An object and not closures, so that a copied model gets hooks for its own layers."""

    def __init__(self, layers: list[_Layer]) -> None:
        self.layers = layers
        self._signature: Any = None
        self.groups: list[tuple[list[int], Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers}  # a copy makes its own launches

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["layers"])  # type: ignore[misc]

    def before(self, model: nn.Module, args: Any) -> None:
        # Tensors of function transforms have no memory. Compilers and dispatch modes must see operators; the hooks of
        # the outermost module are compiled apart from its forward, so every weight would leave one graph and enter
        # another. Replicas of DataParallel share this object.
        if needs_operators() or plain_only() or getattr(model, "_is_replica", False):
            return
        tensors: list[Any] = [x for layer in self.layers for x in layer.tensors()]
        v, rho = tensors[::2], tensors[1::2]
        buckets = torch.distributed.is_available() and torch.distributed.is_initialized()
        # All that the groups depend on. It rarely differs from the last pass, and then the groups serve again. `map`
        # reads it, as the host does this in every pass.
        kinds = [*map(type, tensors)]
        present = tensors if type(None) not in kinds else [x for x in tensors if x is not None]
        signature = (
            buckets,
            [torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cuda", "cpu")],
            kinds,
            [[*map(read, present)] for read in _ATTRIBUTES],
        )
        if signature != self._signature:
            self.groups = [
                (members, key.kernels.WeightGroup([v[i] for i in members], key.p, key.dtype, key.learned))
                for key, members in self._members(v, rho, buckets).items()
            ]
            self._signature = signature
        for members, group in self.groups:
            for i, weight in zip(members, group([v[i] for i in members], [rho[i] for i in members])):
                self.layers[i].norm.precomputed.put(weight, v[i], rho[i])

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for layer in self.layers:
            layer.norm.precomputed.clear()

    def _members(self, v: list[Any], rho: list[Any], buckets: bool) -> dict[_GroupKey, list[int]]:
        """Which layers' weights the kernels compute together."""
        groups: dict[_GroupKey, list[int]] = {}
        total = 0
        for i, (x, r, layer) in enumerate(zip(v, rho, self.layers)):
            norm = layer.norm
            # Another shape than at first: the weight is sharded, and whole only when its layer runs.
            if not {type(x), type(r)} <= {nn.Parameter, Tensor} or x.shape != layer.shape:
                continue
            kernels = kernels_on(x.device)
            if kernels is not None and not kernels.why_not(x, r, dim=norm.dim, p=norm.p, k=norm.k):
                bucket = total // BUCKET_BYTES if buckets else 0
                total += x.numel() * x.element_size()
                dtype = _dtype_for(x, layer.low_precision)
                trained = x.requires_grad or r.requires_grad
                learned = kernels.is_learned(r)
                key = _GroupKey(kernels, x.device, x.dtype, dtype, float(norm.p), learned, trained, bucket)
                groups.setdefault(key, []).append(i)
        return groups


def _dtype_for(v: Tensor, low_precision: bool) -> torch.dtype:
    device = v.device.type
    if low_precision and v.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return v.dtype
