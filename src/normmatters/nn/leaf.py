"""What ``torch.fx`` records of this library: each norm as one call, as it does with those of ``torch.nn``.

It would go through any other library's ``forward``, and fail where that asks for a shape.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def module_call(module: Any, *arguments: Any) -> Tensor:
    """The call of ``module`` as a node of the graph that is traced; the first of the arguments is an ``fx.Proxy``.

    So is the result, which stands for a tensor.
    """
    if not str(module.forward.__module__).startswith("normmatters."):  # recorded whole, it would be done once more
        raise ValueError(
            f"torch.fx does not record {type(module).__name__}.forward, which calls the norm's own, as one call: trace "
            "with a torch.fx.Tracer whose is_leaf_module says that it is one"
        )
    tracer = arguments[0].tracer
    path = tracer.path_of_module(module)
    if not path:
        raise ValueError(
            f"torch.fx records a {type(module).__name__} as one call: trace a module that has it as a part"
        )
    output: Tensor = tracer.create_proxy("call_module", path, arguments, {})
    return output
