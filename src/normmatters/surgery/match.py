"""A norm's call in a traced block, the add and ReLU behind it, and the one call that takes their place."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from normmatters.surgery.fused import norm_add_relu, norm_norm_add_relu, until_norm
from normmatters.surgery.in_place import changes
from normmatters.surgery.parts import is_identity, is_pool, is_relu

_RELUS = {F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"}
_ADDS = {operator.add, torch.add, "add"}
_ADDS_IN_PLACE = {operator.iadd, "add_"}
NO_RELU = "no ReLU behind it was found"


@dataclass(frozen=True)
class Match:
    """A norm's call in a graph and what follows it."""

    norm: fx.Node
    identities: tuple[fx.Node, ...]
    add: fx.Node | None
    residual: int  # which operand of the add; not the node itself, which may be the ReLU of another match
    relu: fx.Node

    @property
    def kind(self) -> str:
        return "relu" if self.add is None else "add + relu"


def module_of(block: nn.Module, node: fx.Node) -> nn.Module:
    return block.get_submodule(str(node.target))


def match_of(block: nn.Module, graph: fx.Graph, norm: nn.Module) -> Match | str:
    """What follows the norm in the graph; or why that cannot be merged into it."""
    calls = [node for node in graph.nodes if node.op == "call_module" and module_of(block, node) is norm]
    if len(calls) != 1:
        return f"{type(block).__name__} calls it {len(calls)} times"
    call = last = calls[0]
    if len(call.args) != 1 or call.kwargs or not isinstance(call.args[0], fx.Node):
        return "it is not called with one tensor"
    identities: list[fx.Node] = []
    add: fx.Node | None = None
    residual = 0
    while True:
        if len(last.users) != 1:
            return f"its output is used {len(last.users)} times"
        user = next(iter(last.users))
        if user.op == "output":
            return NO_RELU
        module = module_of(block, user) if user.op == "call_module" else None
        function = user.target if module is None else None  # a module's target is its name, which may be "relu"
        if module is not None and is_identity(module):
            identities.append(user)
        elif user.args[:1] == (last,) and ((module is not None and is_relu(module)) or function in _RELUS):
            method = call.meta["method"]
            # forward alone is rewritten: relu(relu(x)) is harmless in another method, an add behind the ReLU is not.
            if user.meta["method"] != method or (add is not None and method is not None):
                return f"{type(block).__name__}.{method or user.meta['method']} may be called on its own"
            return Match(call, tuple(identities), add, residual, user)
        elif add is None and function in _ADDS | _ADDS_IN_PLACE:
            operands = [operand for operand in user.args if operand is not last]
            if user.kwargs or len(user.args) != 2 or len(operands) != 1 or not isinstance(operands[0], fx.Node):
                return "the add behind it is not of two tensors"
            if function in _ADDS_IN_PLACE and user.args[0] is not last:
                return "it is the residual: it is added into another tensor"
            # The fused call takes the add's place: what the norm reads must not be touched until then.
            between = [node for node in graph.nodes if call < node < user]
            if any(node in call.args[0].users or changes(block, node, call.args[0]) for node in between):
                return "its input is used again before the add"
            add, residual = user, user.args.index(operands[0])
        else:
            what = type(module).__name__ if module is not None else getattr(function, "__name__", function)
            changed = type(module) is nn.ReLU
            return f"{what} with hooks or another forward follows it" if changed else f"{what} follows it, not a ReLU"
        last = user


def pool_behind(block: nn.Module, match: Match) -> nn.Module | None:
    """The max pool that alone gets the ReLU's output."""
    users = list(match.relu.users)
    if match.add is not None or len(users) != 1 or users[0].op != "call_module":
        return None
    module = module_of(block, users[0])
    return module if users[0].args == (match.relu,) and not users[0].kwargs and is_pool(module) else None


def rewrite(block: nn.Module, graph: fx.Graph, match: Match, shortcuts: list[nn.Module]) -> None:
    if match.add is None:
        match.relu.replace_all_uses_with(match.relu.args[0])  # type: ignore[arg-type]
        graph.erase_node(match.relu)
        return
    residual: Any = match.add.args[match.residual]
    function: Any = norm_add_relu
    if _ends_in_norm(block, residual, shortcuts):
        function = norm_norm_add_relu
        with graph.inserting_before(residual):
            shortcut = graph.create_node("get_attr", str(residual.target))
            pending = graph.call_function(until_norm, (shortcut, residual.args[0]))
        residual.replace_all_uses_with(pending)
        graph.erase_node(residual)
        residual = pending
    with graph.inserting_before(match.add):
        norm = graph.create_node("get_attr", str(match.norm.target))
        in_place: dict[str, Any] = {"in_place": True} if match.add.target in _ADDS_IN_PLACE else {}
        fused = graph.call_function(function, (norm, match.norm.args[0], residual), in_place)
    match.relu.replace_all_uses_with(fused)
    # identities come in order, before or behind the add: erase from the ReLU backwards
    for node in sorted((match.relu, match.add, match.norm, *match.identities), reverse=True):
        graph.erase_node(node)


def _ends_in_norm(block: nn.Module, residual: fx.Node, shortcuts: list[nn.Module]) -> bool:
    """Whether the residual is one of these modules' output and is used for nothing but the add."""
    return (
        residual.op == "call_module"
        and module_of(block, residual) in shortcuts
        and len(residual.users) == len(residual.args) == 1
        and not residual.kwargs
    )
