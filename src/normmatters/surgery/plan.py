"""Which norms of a model will fuse with what: read off the rewritten forwards, for the report and to choose the blocks.

Nothing depends on it being complete: whether a norm fuses is decided at the call. It goes through the source of each
block once, takes both sides of every branch, and follows deferred norms from call to call as
:class:`~normmatters.surgery.deferred.Fusion` does.
"""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from torch import Tensor, nn

from normmatters.surgery.blocks import fused_class, is_registered, own_class
from normmatters.surgery.deferred import is_plain, is_pool, is_relu_function
from normmatters.surgery.rewrite import Rewritten, Unfit

#: What an expression may be: modules, functions, and for deferred norms (norm, what it took over so far).
Values = frozenset[Any]
NOTHING: Values = frozenset()
_LOOPS = frozenset((zip, enumerate, reversed, list, tuple))
_AFTER_RELU = {"": "relu", "add": "add + relu"}


@dataclass
class FusionPlan:
    """``fused`` maps a norm to ``"relu"``, ``"add + relu"`` or ``"relu + max pool"``, ``notes`` one that stays alone to
    the reason; ``pools`` maps a norm to the max pool it takes over; ``blocks`` get another forward.
    """

    fused: dict[nn.Module, str] = field(default_factory=dict)
    notes: dict[nn.Module, str] = field(default_factory=dict)
    pools: dict[nn.Module, nn.Module] = field(default_factory=dict)
    blocks: list[nn.Module] = field(default_factory=list)


def plan_fusion(model: nn.Module, norms: Collection[nn.Module], pooling: Collection[nn.Module]) -> FusionPlan:
    """What the calls of ``norms`` lead to in ``model``; those of ``pooling`` may take over a max pool."""
    plan = FusionPlan(notes={norm: "it has hooks, or a call of its own" for norm in norms if not is_plain(norm)})
    norms = [norm for norm in norms if norm not in plan.notes]
    classes = _Classes()
    for module in model.modules():
        inside = set(module.modules())
        if module in norms or inside.isdisjoint(norms) or _is_container(module):
            continue
        try:
            cls = classes.of(module)
        except Unfit as reason:
            for norm in norms:
                if any(norm is child for child in _children(module)):
                    plan.notes[norm] = f"{type(module).__name__}.forward stays as it is written: {reason}"
            continue
        reader = _FusionReader(module, set(norms), set(pooling), plan)
        if is_registered(own_class(module)):
            plan.fused |= {norm: plan.fused.get(norm, "registered") for norm in norms if norm in _children(module)}
            plan.blocks.append(module)
        elif is_sequence(module):
            reader.sequence(module, NOTHING)
        else:
            reader.function(cls.fusion_sources["forward"], cls.fusion_sources)
        linked = isinstance(module, nn.Sequential) and classes.link(module)
        if reader.found or linked:
            plan.blocks.append(module)
    for norm in norms:
        if norm not in plan.fused:
            plan.notes.setdefault(norm, "no ReLU follows it that its block's forward shows")
    return plan


def is_sequence(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether the module calls its modules one after the other, as ``nn.Sequential`` does."""
    return forward_of(module) is nn.Sequential.forward


def forward_of(module: nn.Module) -> Any:
    """The ``forward`` of the module's own class."""
    return getattr(own_class(module), "forward", None)


def _is_container(module: nn.Module) -> bool:
    return forward_of(module) is nn.Module.forward  # ModuleList, ModuleDict: their owner calls what is in them


def _children(module: nn.Module) -> Iterable[nn.Module]:
    for child in module.children():
        yield child
        if _is_container(child):
            yield from _children(child)


class _Classes:
    """The classes with a rewritten forward, each made once."""

    def __init__(self) -> None:
        self.made: dict[type, Any] = {}

    def of(self, module: nn.Module) -> Any:
        """The class for the module; raises :class:`Unfit` where there is none."""
        cls = own_class(module)
        if cls not in self.made:
            try:
                self.made[cls] = fused_class(cls)
            except Unfit as reason:
                self.made[cls] = reason
        if isinstance(self.made[cls], Unfit):
            raise self.made[cls]
        return self.made[cls]

    def link(self, row: nn.Sequential) -> bool:
        """Whether two blocks in a row may hand a link on."""
        return any(self._may_link(one) and self._may_link(other) for one, other in zip(row, list(row)[1:]))

    def _may_link(self, block: nn.Module) -> bool:
        try:
            return hasattr(self.of(block), "fusion_takes_link")
        except Unfit:
            return False


class Reader:
    """Goes through the forward of one block; subclasses say what a call means."""

    def __init__(self, block: nn.Module, norms: set[nn.Module]) -> None:
        self.block, self.norms = block, norms
        self.depth = 0
        self.fusion = ""
        self.globals: dict[str, Any] = {}
        self.sources: dict[str, Rewritten] = {}
        self.asking = False  # whether something is None: that is no use of it

    def function(self, rewritten: Rewritten, sources: dict[str, Rewritten]) -> None:
        fusion, me, *_ = [*rewritten.tree.args.posonlyargs, *rewritten.tree.args.args]
        outer = self.fusion, self.globals
        self.sources, self.fusion, self.globals = sources, fusion.arg, rewritten.original.__globals__
        env = dict.fromkeys(rewritten.original.__code__.co_varnames, NOTHING)
        self.body(rewritten.tree.body, env | {me.arg: frozenset([self.block])})
        self.fusion, self.globals = outer

    def body(self, body: list[ast.stmt], env: dict[str, Values]) -> dict[str, Values]:
        for node in body:
            if isinstance(node, ast.If):
                known = self.known(node.test, env)
                if known is not None:
                    env = self.body(node.body if known else node.orelse, env)
                    continue
                self.value(node.test, env)
                one, other = self.body(node.body, dict(env)), self.body(node.orelse, dict(env))
                env = {name: one.get(name, NOTHING) | other.get(name, NOTHING) for name in {*one, *other}}
            elif isinstance(node, (ast.For, ast.While)):
                over = self.owners(node.iter, env) if isinstance(node, ast.For) else self.value(node.test, env)
                for _ in range(2):
                    if isinstance(node, ast.For):
                        self.bind(node.target, _members(over), env)
                    env = {
                        name: env.get(name, NOTHING) | value for name, value in self.body(node.body, dict(env)).items()
                    }
                env = self.body(node.orelse, env)
            elif isinstance(node, ast.With):
                env = self.body(node.body, env)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                value = self.value(node.value, env)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self.bind(target, value, env)
            else:
                for child in ast.iter_child_nodes(node):
                    self.value(child, env)
        return env

    def known(self, test: ast.expr, env: dict[str, Values]) -> bool | None:
        """The answer to ``self.part is None``, as far as it can be read off the block now."""
        if isinstance(test, ast.Compare) and isinstance(test.comparators[0], ast.Constant) and len(test.ops) == 1:
            self.asking = True
            found = self.value(test.left, env)
            self.asking = False
            if test.comparators[0].value is None and len(found) == 1 and ... not in found:
                return (None in found) == isinstance(test.ops[0], ast.Is)
        return None

    def bind(self, target: ast.expr, value: Values, env: dict[str, Values]) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                env[node.id] = value if node is target else without_pairs(value)

    def value(self, node: ast.AST, env: dict[str, Values]) -> Values:
        """What the expression may be; what fuses on the way is noted."""
        fusion = self.fusion
        if isinstance(node, ast.Name):
            return env[node.id] if node.id in env else frozenset([self.of_globals(node.id)])
        if isinstance(node, ast.Attribute):
            found = frozenset(getattr(v, node.attr, ...) for v in without_pairs(self.owners(node.value, env)))
            for module in found:
                self.mention(module, node)
            return found
        if isinstance(node, ast.Subscript):
            members = _members(self.owners(node.value, env))
            for module in members:
                self.mention(module, node)
            return members
        f = node.func if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name):
            if f.value.id == fusion:
                return self.step(node, f.attr, node.args, env, node.keywords)
        values = [self.value(child, env) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.IfExp):
            return values[1] | values[2]
        if (
            isinstance(node, ast.Call)
            and isinstance(f, ast.Call)
            and isinstance(f.func, ast.Attribute)
            and f.func.attr == "now"
        ):
            return frozenset().union(*([] if not node.args else values[1:]))  # zip(...), enumerate(...)
        return NOTHING

    def owners(self, node: ast.AST, env: dict[str, Values]) -> Values:
        """:meth:`value` of what is only looked into: for one of its attributes or members."""
        return self.value(node, env)

    def callee(self, node: ast.AST, functions: Values, x: Values, env: dict[str, Values]) -> Values:
        """``node``, one of ``functions``, is called with ``x``: what of ``x`` it may take over."""
        return x

    def of_globals(self, name: str) -> Any:
        """What can be called, or leads to it; else ``...``."""
        found = self.globals.get(name, getattr(builtins, name, ...))
        callable_ = (nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
        return found if found is None or isinstance(found, callable_) else ...

    def step(
        self, node: ast.Call, name: str, args: list[ast.expr], env: dict[str, Values], keywords: list[ast.keyword]
    ) -> Values:
        """One call of the fusion."""
        if name == "attr":
            setting = str(args[1].value) if isinstance(args[1], ast.Constant) else ""
            found = frozenset(_attribute(v, setting) for v in without_pairs(self.owners(args[0], env)))
            for module in () if self.asking else found:
                self.mention(module, node)
            return found
        if name == "method":
            return self.method(args[1])
        if name == "force":
            return without_pairs(self.owners(args[0], env))
        functions = self.value(args[0], env) if args else NOTHING
        loops = name == "call" and NOTHING < functions <= _LOOPS  # zip(...), enumerate(...)
        rest = [*args[1:], *(k.value for k in keywords)]
        values = [functions, *(self.owners(a, env) if loops else self.value(a, env) for a in rest)]
        if name == "now":
            self.callee(args[0], functions, NOTHING, env)
        if name in ("done", "now"):
            return without_pairs(functions)
        if name == "relu":
            return self.after_relu(values[0])
        if name == "add":
            # Not what is added in place into something else: for `+` alone there is no name.
            sides = values if len(args) == 2 else values[:1]
            takers = [frozenset(v[0] for v in side if isinstance(v, tuple) and v[1] == "") for side in sides]
            return frozenset((norm, "add") for norm in next(filter(None, takers), NOTHING))
        if name == "call":
            found, x = NOTHING, self.callee(args[0], functions, values[1], env)
            for f in functions:
                if isinstance(f, nn.Module):
                    found |= self.module(f, x, node, len(rest) - 1)
                elif is_relu_function(f) and len(args) == 2:
                    found |= self.after_relu(x)
                elif loops:
                    found |= frozenset().union(*values[1:])
            return found
        return NOTHING

    def method(self, node: ast.expr) -> Values:
        name = node.value if isinstance(node, ast.Constant) else ""
        if name not in self.sources or name in vars(self.block):
            self.unreadable()
        elif self.depth < 8:
            self.depth += 1
            self.function(self.sources[name], self.sources)
            self.depth -= 1
        return NOTHING

    def sequence(self, modules: nn.Sequential, x: Values) -> Values:
        for index, module in enumerate(modules._modules.values()):
            if module is not None:
                x = self.module(module, x, (modules, index))
        return x

    def module(self, f: nn.Module, x: Values, at: Hashable, rest: int = 0) -> Values:
        """What a call of ``f`` with ``x`` and ``rest`` more arguments gives."""
        raise NotImplementedError

    def after_relu(self, x: Values) -> Values:
        """What a ReLU gives."""
        return NOTHING

    def mention(self, f: Any, at: Hashable) -> None:
        """The forward reads ``f``."""

    def unreadable(self) -> None:
        """The forward may use anything in the block."""


class _FusionReader(Reader):
    """Notes what fuses."""

    def __init__(self, block: nn.Module, norms: set[nn.Module], pooling: set[nn.Module], plan: FusionPlan) -> None:
        super().__init__(block, norms)
        self.pooling, self.plan = pooling, plan
        self.found = False

    def module(self, f: nn.Module, x: Values, at: Hashable, rest: int = 0) -> Values:
        if rest:
            return NOTHING
        if f in self.norms:
            return frozenset([(f, "")])
        if type(f) is nn.Identity and is_plain(f):
            return x
        if type(f) is nn.ReLU and is_plain(f):
            return self.after_relu(x)
        if type(f) is nn.MaxPool2d and is_plain(f) and is_pool(f):
            for norm, took in (v for v in x if isinstance(v, tuple)):
                if took == "relu" and norm in self.pooling:
                    self.take(norm, "relu + max pool")
                    self.plan.pools[norm] = f
        elif is_sequence(f) and is_plain(f):
            return self.sequence(f, x)
        return NOTHING

    def after_relu(self, x: Values) -> Values:
        taken = [
            (norm, _AFTER_RELU[took]) for norm, took in (v for v in x if isinstance(v, tuple)) if took in _AFTER_RELU
        ]
        for norm, kind in taken:
            self.take(norm, kind)
        return frozenset(taken)

    def take(self, norm: nn.Module, kind: str) -> None:
        self.found = True
        if len(kind) >= len(self.plan.fused.get(norm, "")):
            self.plan.fused[norm] = kind
        self.plan.notes.pop(norm, None)


def without_pairs(values: Values) -> Values:
    """The modules and functions, but no deferred norms."""
    return frozenset(v for v in values if not isinstance(v, tuple))


def _attribute(owner: Any, name: str) -> Any:
    """A module, a plain function, ``Tensor`` for a tensor or its method, None where that is there; else ``...``."""
    if owner is Tensor:
        return Tensor
    if isinstance(owner, nn.Module):
        found = {**owner._parameters, **owner._buffers, **owner._modules, **owner.__dict__}.get(name, ...)
        if isinstance(found, Tensor):
            return Tensor
        if found is None or isinstance(found, (nn.Module, types.BuiltinFunctionType)):
            return found
        if isinstance(found, types.FunctionType) and not found.__closure__:
            return found
    return ...


def _members(values: Values) -> Values:
    """What a loop over one of these gives."""
    return frozenset(
        child
        for v in values
        if isinstance(v, nn.Module) and isinstance(v, (nn.ModuleList, nn.Sequential))
        for child in v
    )
