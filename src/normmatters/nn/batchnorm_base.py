"""What all batch norm modules share: ``torch.nn.BatchNorm``'s state, the running statistics, the forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn import init
from torch.nn.modules.batchnorm import _NormBase  # not BatchNorm2d: torch's SyncBatchNorm would turn us into plain L2
from torch.utils._python_dispatch import _disable_current_modes

from normmatters.kernels import dispatch
from normmatters.nn.leaf import module_call
from normmatters.norm import Norm, RunningStats, cached_norm, check_act, check_eps


class LpBatchNorm(_NormBase):
    """State and forward pass of every batch norm here; subclasses fix the statistic and the input's rank.

    The state is ``torch.nn.BatchNorm``'s: weight, bias, running_mean, running_var and num_batches_tracked, under the
    same keys and with the same meaning, so checkpoints move both ways and evaluation is a plain batch norm.

    ``running_var`` holds s²·n/(n−1), where s = C·statistic is the scale of a batch and n its elements per channel. For
    p = 2 that is the unbiased variance, as in PyTorch. Under a Gaussian, C·mean|x−μ| estimates σ√(1−1/n), exactly as
    the biased standard deviation does in the square, so the same factor corrects L1 in the same sense (F5).
    """

    _ranks: tuple[int, ...]
    _default_p: float | str = 1
    _default_k: int | None = None

    def __init__(
        self,
        num_features: int,
        p: float | str = 1,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        bias: bool = True,
        k: int | None = None,
        constant: str | float = "exact",
        act: str | None = None,
        memory: str = "exact",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_act(act)
        check_eps(eps)
        if p == "mean":  # no scale: so that evaluation is still exactly a batch norm, whose running_var stays 1
            eps = 0.0
        Norm(p, k, constant, eps, memory)  # refuses what is no norm
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:  # not passed on: torch 2.11's base class has no such argument
            self.register_parameter("bias", None)
        if p == "mean":
            self.register_parameter("weight", None)
        self.p = p
        self.k = k
        self.constant = constant
        self.act = act
        self.memory = memory

    @property
    def norm(self) -> Norm:
        """Which normalization: p, k, constant, eps and memory as they are now."""
        # The compiler would look into the cache anyway, and warn of it.
        make = Norm if torch.compiler.is_compiling() else cached_norm
        return make(self.p, self.k, self.constant, self.eps, self.memory)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalize ``input``, (N, C, ...), add ``residual`` of the same shape if given, apply ``act`` if set."""
        if isinstance(input, Proxy):
            return module_call(self, input, *(() if residual is None else (residual,)))
        return self._batch_norm(input, residual, self.act)[0]

    def forward_linked(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        link: Tensor | None = None,
        linked: bool = True,
        *,
        relu: bool = False,
        pooled: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`forward`, and a link that saves memory traffic where the output is the residual of another norm.

        An output that is used twice has two gradients, which autograd adds: three passes over memory. Pass the output
        and its link on together, the output to everything that uses it, both to the ``forward_linked`` whose residual
        it is. Then the backward pass adds the two gradients while it reads them. The result is the same. There is no
        link, but None, unless ``linked``, and where no kernel runs. A link is ignored if the residual has been changed
        in place since.

        Args:
            input, residual: (N, C, ...).
            link: the link that came with ``residual``.
            linked: return a link to the output.
            relu: apply a ReLU, also where ``act`` is None.
            pooled: apply a max pool over 3×3 windows with stride 2 and padding 1 at the end; there is no link then.

        Example::

            >>> first, second = L1BatchNorm2d(4, act="relu"), L1BatchNorm2d(4, act="relu")
            >>> z, link = first.forward_linked(torch.randn(8, 4, 5, 5))
            >>> z, _ = second.forward_linked(2 * z, z, link, linked=False)
        """
        return self._batch_norm(input, residual, "relu" if relu else self.act, link, linked, pooled)

    def running_stats(self, input: Tensor) -> tuple[RunningStats, bool]:
        """The buffers that this forward pass reads or updates, and whether it normalizes by the batch's statistics."""
        self._check_input_dim(input)
        buffers = self._buffers  # attributes of a module are looked for here last, and take several times as long
        try:
            mean, var = buffers["running_mean"], buffers["running_var"]
        except KeyError:  # parametrized, or a parameter now
            mean, var = self.running_mean, self.running_var
        training = self.training or (mean is None and var is None)
        count = None
        if self.training:
            count = buffers["num_batches_tracked"]
            if not self.track_running_stats:
                mean = var = count = None
            elif _recomputing():
                mean, var, count = self._stats_to_discard(mean, var, count)
        momentum: float | Tensor | None = self.momentum
        if momentum is None:  # cumulative average: the count is raised later, once nothing can fail any more
            momentum = 0.0 if count is None else _next_share(count)
        return RunningStats(mean, var, count, momentum), training

    def _stats_to_discard(self, *stats: Tensor | None) -> list[Tensor | None]:
        """What a recomputed forward pass updates instead: nothing, or copies where their absence would be noticed.

        Torch's own batch norm, which may compute L2, saves the running statistics for its backward pass, and there must
        be as many tensors as the first time. Selective checkpointing counts operators: there must be the same ones,
        and it may not see the copies made.
        """
        if self.p != 2 and torch._C._len_torch_dispatch_stack() == 0:
            return [None] * len(stats)
        with _disable_current_modes():
            return [None if t is None else t.clone() for t in stats]

    def _batch_norm(
        self,
        input: Tensor,
        residual: Tensor | None,
        act: str | None,
        link: Tensor | None = None,
        linked: bool = False,
        pooled: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The normalization and its link; :class:`~normmatters.nn.sync.SyncLpBatchNorm` has its own."""
        running, training = self.running_stats(input)
        parameters = self._parameters
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # parametrized
            weight, bias = self.weight, self.bias
        if pooled:  # a link belongs to what is not pooled
            output = dispatch.pooled_batch_norm(
                input, self.norm, weight, bias, running, training, residual=residual, act=act
            )
            return output, None
        return dispatch.linked_batch_norm(
            input, self.norm, weight, bias, running, training, residual=residual, act=act, link=link, linked=linked
        )

    def reset_parameters(self) -> None:
        """Reset the running statistics, the weight to 1 and the bias to 0."""
        self.reset_running_stats()
        if self.weight is not None:
            init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self._ranks:
            expected = " or ".join(f"{rank}D" for rank in self._ranks)
            raise ValueError(f"expected {expected} input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels in dimension 1, got shape {tuple(input.shape)}")

    def extra_repr(self) -> str:
        """``torch.nn.BatchNorm``'s, then what differs from this class's defaults."""
        ours = {
            "p": (self.p, self._default_p),
            "k": (self.k, self._default_k),
            "constant": (self.constant, "exact"),
            "act": (self.act, None),
            "memory": (self.memory, "exact"),
        }
        changed = [f"{name}={value!r}" for name, (value, default) in ours.items() if value != default]
        return ", ".join([super().extra_repr(), *changed])


def _next_share(count: Tensor) -> float | Tensor:
    """1/(count + 1). To a compiler it is a tensor: as a number it would be a symbol, which no operator takes."""
    return 1.0 / ((count.double() if torch.compiler.is_compiling() else float(count)) + 1)


def _recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass: activation checkpointing's recompute.

    It must give the same output again but not count the batch a second time. A checkpoint inside a compiled function
    needs no such check: what is recomputed there are values, never the updates of buffers. A compiled module inside an
    eager checkpoint looks like any other and counts twice, as torch.nn's does.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
