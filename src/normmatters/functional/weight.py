"""Weights of bounded norm (F11–F13): w_i = ρ · v_i / ‖v_i‖ for each slice i of a tensor."""

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from normmatters.norm import norm_of


def bounded_weight(
    v: Tensor, rho: float | Tensor, *, dim: int | None = 0, p: float = 2, k: int | None = None
) -> Tensor:
    """ρ · v / ‖v‖ for every slice of ``v`` along ``dim`` (F12, F13; with a vector ``rho``, F11).

    Args:
        v: the free tensor, any shape with at least one dimension.
        rho: the norm that every slice gets: a positive number, or a tensor that broadcasts against ``v`` (it gets its
            gradient; its values are not checked).
        dim: the dimension that counts the slices (output channels); ``None`` takes ``v`` as one slice.
        p: norm order, a number ≥ 1 or ``math.inf``.
        k: with ``p=math.inf``, the Top(k) norm: the *sum* of the k largest magnitudes of a slice. So k = 1 is L∞ and
            k = slice size is L1.

    Returns:
        A tensor of ``v``'s shape and dtype; fp16 and bf16 are computed in fp32.

    The value does not depend on the length of a slice, so gradients with respect to v are orthogonal to it and ‖v‖
    grows in training. A slice that is exactly zero has no direction: it maps to zero, with the finite gradient ρ·g.

    Example:
        >>> bounded_weight(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), 10.0)
        tensor([[ 6.,  8.],
                [ 0., 10.]])
    """
    if not isinstance(rho, Tensor):
        check_rho(rho)
    norm = slice_norm(v, dim=dim, p=p, k=k)
    if isinstance(rho, Tensor):
        rho = rho.to(norm.dtype)
    return (v.to(norm.dtype) / torch.where(norm == 0, 1, norm) * rho).to(v.dtype)


def slice_norm(v: Tensor, *, dim: int | None = 0, p: float = 2, k: int | None = None) -> Tensor:
    """‖v_i‖ of every slice along ``dim``, with all other dimensions kept as 1, in fp32 or better.

    Shape: ``(C, …) → (C, 1, …)`` for ``dim=0``. ``p`` and ``k`` as in :func:`bounded_weight`.
    """
    size = check_slices(v, dim=dim, p=p, k=k)
    x = v.float() if v.dtype in (torch.float16, torch.bfloat16) else v
    others = [d for d in range(v.ndim) if dim is None or d != dim % v.ndim]
    if not others:  # a vector with one slice per element
        return x.abs()
    if k is not None:
        slices = x.reshape(1, size) if dim is None else x.movedim(dim, 0).reshape(-1, size)
        kept = [1 if d in others else v.shape[d] for d in range(v.ndim)]
        return slices.abs().topk(k, dim=1, sorted=False).values.sum(1).reshape(kept)
    norm: Tensor
    if p in (1, math.inf):
        norm = torch.linalg.vector_norm(x, p, others, keepdim=True)
        return norm
    # Powers leave fp32's range long before x does, so take them of x/max|x|. The norm's gradient does not depend on
    # the scale of x, hence the maximum may be a constant to autograd.
    largest = x.detach().abs().amax(others, keepdim=True)
    norm = torch.linalg.vector_norm(x / torch.where(largest == 0, 1, largest), p, others, keepdim=True)
    return largest * norm


def has_values(v: Tensor) -> bool:
    """Whether there is something to look at: not on the meta device, nor under ``FakeTensorMode``."""
    return not v.is_meta and not is_fake(v)


def check_slices(v: Tensor, *, dim: int | None, p: float, k: int | None) -> int:
    """Raise for anything but a real tensor, a dimension of it and a norm of its slices. Returns the slices' size."""
    if not isinstance(v, Tensor):
        raise TypeError(f"expected a tensor to normalize, got {type(v).__name__}")
    if not v.is_floating_point() or v.dtype.itemsize == 1:  # torch computes nothing in fp8
        raise TypeError(f"expected a floating-point tensor of 16 bits or more to normalize, got {v.dtype}")
    if v.layout != torch.strided:
        raise TypeError(f"expected a dense tensor to normalize, got one of layout {v.layout}")
    if v.ndim == 0 or v.numel() == 0:
        raise ValueError(f"expected a tensor with at least one dimension and one element, got shape {tuple(v.shape)}")
    check_norm(p, k)
    size = v.numel()
    if dim is not None:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dim must be an integer or None, got {dim!r} of type {type(dim).__name__}")
        if not -v.ndim <= dim < v.ndim:
            raise ValueError(f"dim must lie in {-v.ndim}..{v.ndim - 1} for shape {tuple(v.shape)}, got {dim}")
        size //= v.shape[dim]
    if k is not None and k > size:
        raise ValueError(f"k must be at most the slice size {size} of shape {tuple(v.shape)} along {dim}, got {k}")
    return size


def check_norm(p: float, k: int | None) -> None:
    """Raise unless p (and k, for Top(k)) names a norm of a weight vector."""
    if isinstance(p, str):
        raise ValueError(f"p must be a number >= 1 or math.inf for weights, got {p!r}")
    norm_of(p, k, "exact", 0.0)


def check_rho(rho: float) -> None:
    """Raise unless rho is a positive, finite number."""
    if isinstance(rho, bool) or not isinstance(rho, int | float):
        raise TypeError(f"rho must be a positive number, got {rho!r} of type {type(rho).__name__}")
    if not 0 < rho < math.inf:
        raise ValueError(f"rho must be positive and finite, got {rho}")
