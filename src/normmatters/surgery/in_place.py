"""Which operations of a block's graph change a tensor in place, and whose memory that may be."""

from __future__ import annotations

import operator

from torch import fx, nn

#: What ``x += y`` and the like call.
OPERATORS = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
    *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor),
)
# What these return is new memory; any other module, function or method may return a view of what it got.
_FRESH = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._NormBase)


def changes(block: nn.Module, node: fx.Node, tensor: fx.Node) -> bool:
    """Whether ``node`` may change in place what ``tensor``, of the same graph, holds.

    Modules are trusted not to change what they get, unless they have an ``inplace``: it may be set at any time.
    """
    return _is_in_place(block, node) and not _origins(block, node.all_input_nodes[:1]).isdisjoint(
        _origins(block, [tensor])
    )


def changed_attribute(block: nn.Module, graph: fx.Graph) -> str | None:
    """The parameter or buffer that the block's graph changes in place, by itself or by what is made of it alone."""
    for node in graph.nodes:
        sources = node.all_input_nodes[:1] if _is_in_place(block, node) else []
        while len(sources) == 1:
            if sources[0].op == "get_attr":
                return str(sources[0].target)
            sources = sources[0].all_input_nodes
    return None


def _is_in_place(block: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = block.get_submodule(str(node.target))
        while isinstance(module, nn.Sequential) and len(module) > 0:
            module = module[0]
        return hasattr(module, "inplace")
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = name.endswith("_") and not name.endswith("__")  # as torch names them
    return named or node.target in OPERATORS or bool(node.kwargs.get("inplace"))


def _origins(block: nn.Module, nodes: list[fx.Node]) -> set[fx.Node | str]:
    """The nodes whose memory these may be views of; the block's inputs are one, for they may be one tensor."""
    found: set[fx.Node | str] = set()
    seen: set[fx.Node] = set()
    while nodes:
        node, *nodes = nodes
        if node in seen:
            continue
        seen.add(node)
        fresh = node.op == "call_module" and isinstance(block.get_submodule(str(node.target)), _FRESH)
        if fresh or not node.all_input_nodes:
            found.add(node.op if node.op == "placeholder" else node)
        else:
            nodes += node.all_input_nodes
    return found
