"""What all batch norm modules share: ``torch.nn.BatchNorm``'s state, the running statistics, the forward pass."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn import init
from torch.nn.modules.batchnorm import _NormBase  # not BatchNorm2d: torch's SyncBatchNorm would turn us into plain L2
from torch.utils._python_dispatch import _disable_current_modes

from normmatters.functional.checks import check_act, check_eps, check_memory
from normmatters.functional.statistic import scale_constant
from normmatters.kernels import dispatch
from normmatters.nn.leaf import module_call


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

    #: None, or ``"max"``: a max pool over 3×3 windows with stride 2 and padding 1 follows ``act``, in one pass where a
    #: kernel can. Set by :func:`normmatters.convert`, which leaves a placeholder where the pool was.
    pool: str | None = None

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
        scale_constant(p, k or 2, k, constant)  # refuses a p, a k, or a constant that this p does not have
        check_act(act)
        check_memory(memory)
        check_eps(eps)
        if p == "mean":  # no scale: so that evaluation is still exactly a batch norm, whose running_var stays 1
            eps = 0.0
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

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalize ``input``, (N, C, ...), add ``residual`` of the same shape if given, apply ``act`` if set."""
        if isinstance(input, Proxy):
            return module_call(self, input, *(() if residual is None else (residual,)))
        return self._batch_norm(input, *self._state(input), residual)[0]

    def forward_linked(
        self, input: Tensor, residual: Tensor | None = None, link: Tensor | None = None, linked: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`forward` where the gradients of a residual and of its other use are not added in between.

        Hand the output and the link that comes with it on together: the output to whatever else uses it, both to the
        ``forward_linked`` whose residual it is. That saves two passes over memory. There is no link, but None, unless
        ``linked``, and where no kernel runs; the result is the same. It is not used where the residual is not that
        output any more, but changed in place.

        Example::

            >>> first, second = L1BatchNorm2d(4, act="relu"), L1BatchNorm2d(4, act="relu")
            >>> z, link = first.forward_linked(torch.randn(8, 4, 5, 5))
            >>> z, _ = second.forward_linked(2 * z, z, link, linked=False)
        """
        return self._batch_norm(input, *self._state(input), residual, link, linked)

    def _state(self, input: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, bool, float]:
        """Running mean and variance, the count of batches to raise, whether the batch's own statistics count, momentum.

        The first three are None where this pass is not to touch them.
        """
        self._check_input_dim(input)
        buffers = self._buffers  # attributes of a module are looked for here last, and take several times as long
        try:
            running_mean, running_var = buffers["running_mean"], buffers["running_var"]
        except KeyError:  # parametrized, or a parameter now
            running_mean, running_var = self.running_mean, self.running_var
        training = self.training or (running_mean is None and running_var is None)
        count = None
        if self.training:
            count = buffers["num_batches_tracked"]
            if not self.track_running_stats:
                running_mean = running_var = count = None
            elif _recomputing():
                running_mean, running_var, count = self._in_vain(running_mean, running_var, count)
        momentum = self.momentum
        if momentum is None:  # cumulative average: the count is raised later, once nothing can fail any more
            momentum = 0.0 if count is None else 1.0 / (float(count) + 1)
        return running_mean, running_var, count, training, momentum

    def _in_vain(self, *state: Tensor | None) -> list[Tensor | None]:
        """What a recomputed forward pass moves in place of the state: nothing, or where that would be noticed, copies.

        Torch's own batch norm, which may compute L2, keeps the running statistics for its backward pass, and there must
        be as many tensors as the first time. Selective checkpointing counts operators: there must be the same ones,
        and it may not see the copies made.
        """
        if self.p != 2 and torch._C._len_torch_dispatch_stack() == 0:
            return [None] * len(state)
        with _disable_current_modes():
            return [None if t is None else t.clone() for t in state]

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        count: Tensor | None,
        training: bool,
        momentum: float,
        residual: Tensor | EllipsisType | None,
        link: Tensor | None = None,
        linked: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The normalization itself, and its link; :class:`~normmatters.nn.sync.SyncLpBatchNorm` has its own.

        ``...`` stands for a residual that only the caller can add, so that ``act`` is the caller's too: taking it off
        the module for the time of a call would take it off for all threads.
        """
        act = self.act
        if residual is ...:
            act = residual = None
        statistics = (running_mean, running_var, self.weight, self.bias, training, momentum, self.eps)
        options: dict[str, Any] = {
            "p": self.p,
            "k": self.k,
            "constant": self.constant,
            "act": act,
            "memory": self.memory,
            "num_batches_tracked": count,
        }
        if self.pool is None:
            return dispatch.linked_batch_norm(
                input, *statistics, residual=residual, link=link, linked=linked, **options
            )
        # A link belongs to what is not pooled.
        if residual is None:
            return dispatch.pooled_batch_norm(input, *statistics, **options), None
        return dispatch.max_pool(dispatch.batch_norm(input, *statistics, residual=residual, **options)), None

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
            "pool": (self.pool, None),
        }
        changed = [f"{name}={value!r}" for name, (value, default) in ours.items() if value != default]
        return ", ".join([super().extra_repr(), *changed])


def _recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass: activation checkpointing's recompute.

    It must give the same output again but not count the batch a second time. A checkpoint inside a compiled function
    needs no such check: what is recomputed there are values, never the updates of buffers. A compiled module inside an
    eager checkpoint cannot be told apart and counts twice, as torch.nn's does.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
