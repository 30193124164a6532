"""The source of a ``forward`` with its calls sent through a :class:`~normmatters.surgery.deferred.Fusion`.

``x = self.bn(x)`` becomes ``x = fusion.call(self.bn, x)``. A variable hands a deferred norm on only where nobody reads
the variable again. Every other read of one that may hold a deferred norm becomes ``fusion.force(x)``, and before a
statement that may do more than call modules and add, ``fusion.flush()`` runs what is pending. Branches and loops stay.
The rewritten function belongs to the class: nothing about an instance is in it.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import linecache
import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

_FUTURES = functools.reduce(int.__or__, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names))
_SCOPES = (
    *(ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
_SEE_LOCALS = {"locals", "vars", "eval", "exec", "super"}
_UNFIT = {
    ast.Try: "it has a try", ast.TryStar: "it has a try", ast.Match: "it has a match", ast.Yield: "it yields",
    ast.YieldFrom: "it yields", ast.Await: "it awaits", ast.AsyncFor: "it awaits", ast.AsyncWith: "it awaits",
}  # fmt: skip


class Unfit(Exception):
    """Why a function stays as it is written."""


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A rewritten function, called with a fusion first. ``tree`` is its source; ``adds``: it has an add to fuse."""

    original: Any
    function: Any
    tree: ast.FunctionDef
    methods: frozenset[str]
    adds: bool

    def text(self) -> str:
        """The source that runs."""
        return ast.unparse(self.tree)


def rewrite(function: Any, owner: type) -> Rewritten:
    """Rewrite ``function``, which the class ``owner`` finds as its method; raises :class:`Unfit`."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        raise Unfit("it is no plain function")
    code = function.__code__
    if code.co_freevars:
        raise Unfit("it is a closure, or calls super()")
    tree = _source(function)
    if names := _SEE_LOCALS.intersection(code.co_names):
        raise Unfit(f"it calls {min(names)}()")
    for node in ast.walk(tree):
        if type(node) in _UNFIT:
            raise Unfit(_UNFIT[type(node)])
    arguments = [*tree.args.posonlyargs, *tree.args.args]
    if not arguments:
        raise Unfit("it has no self")
    fusion = _fresh_name("fusion", tree)
    rewriter = _Rewriter(tree, fusion, owner)
    tree.body = [*rewriter.body(tree.body), *([] if isinstance(tree.body[-1], ast.Return) else [rewriter.flush()])]
    first = [ast.arg(fusion)]
    tree.args.posonlyargs, tree.args.args = (
        (first + tree.args.posonlyargs, tree.args.args) if tree.args.posonlyargs else ([], first + tree.args.args)
    )
    shown = ast.fix_missing_locations(tree)
    compiled = _compiled(_in_class(function, shown), function)
    made = types.FunctionType(compiled, function.__globals__, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return Rewritten(function, made, shown, frozenset(rewriter.methods), rewriter.adds)


def _source(function: Any) -> ast.FunctionDef:
    """The function's definition, without defaults and annotations."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    try:
        functions, codes = _parsed(text, code.co_filename, code.co_flags & _FUTURES)
    except (SyntaxError, ValueError) as error:
        raise Unfit("its source cannot be parsed") from error
    if not text:
        raise Unfit("its source is not at hand")
    if code not in codes:
        raise Unfit("its source is not what runs")
    nodes = functions.get((code.co_name, code.co_firstlineno), ())
    if len(nodes) != 1:  # a lambda; with a decorator the code begins there
        raise Unfit("it has a decorator, or is a lambda")
    found = copy.deepcopy(nodes[0])
    arguments = found.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    found.returns = None
    arguments.defaults = [ast.copy_location(ast.Constant(None), node) for node in arguments.defaults]
    arguments.kw_defaults = [node and ast.copy_location(ast.Constant(None), node) for node in arguments.kw_defaults]
    return found


@functools.lru_cache(maxsize=32)
def _parsed(
    text: str, filename: str, flags: int
) -> tuple[dict[tuple[str, int], list[ast.FunctionDef]], frozenset[types.CodeType]]:
    """A file's functions, and their code. Of the file as a whole: its imports change how a function is compiled."""
    functions: dict[tuple[str, int], list[ast.FunctionDef]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault((node.name, node.lineno), []).append(node)
    codes = [compile(text, filename, "exec", flags, dont_inherit=True)]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return functions, frozenset(codes)


def _in_class(function: Any, tree: ast.FunctionDef) -> ast.Module:
    """A module with the function in a class of the right name, by which ``self.__private`` is found."""
    names: list[str] = function.__qualname__.split(".")
    body: list[ast.stmt] = [tree]
    if len(names) > 1 and names[-2].isidentifier():
        body = [ast.ClassDef(names[-2], bases=[], keywords=[], body=body, decorator_list=[], type_params=[])]  # type: ignore[call-arg, unused-ignore]
    return ast.fix_missing_locations(ast.Module(body, type_ignores=[]))


def _compiled(module: ast.Module, function: Any) -> types.CodeType:
    flags = function.__code__.co_flags & _FUTURES
    code: types.CodeType = compile(module, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    while code.co_name != function.__code__.co_name or code.co_name == "<module>":
        code = next(inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    return code


def _fresh_name(name: str, tree: ast.AST) -> str:
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)
    }
    used |= {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    while name in used:
        name += "_"
    return name


def _loads(*nodes: ast.AST | None) -> Counter[str]:
    names = (n.id for node in nodes if node is not None for n in ast.walk(node) if isinstance(n, ast.Name))
    return Counter(names)


class _Rewriter:
    """Rewrites one function; see the module's text for the rule."""

    def __init__(self, tree: ast.FunctionDef, fusion: str, owner: type) -> None:
        self.fusion, self.owner = fusion, owner
        self.me = [*tree.args.posonlyargs, *tree.args.args][0].arg
        self.methods: set[str] = set()
        self.adds = False
        inner: set[str] = set()  # what nested scopes see, or what is not a local: never deferred
        for node in ast.walk(tree):
            if isinstance(node, _SCOPES) and node is not tree:
                inner.update(_loads(node))
            elif isinstance(node, ast.NamedExpr):
                inner.update(_loads(node.target))
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                inner.update(node.names)
        held = set()
        for node in ast.walk(tree):
            target = _single_target(node)
            if target is not None and target not in inner and _may_defer(node.value):  # type: ignore[attr-defined]
                held.add(target)
        self.held = held - {self.me}
        self.stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        self.locals = self.stored | {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)}
        self.after: dict[ast.AST, set[str]] = {}  # for each statement, the variables that are read after it
        self._live(tree.body, set(), set(), set())
        self.last: Callable[[str], bool] = lambda name: False

    # --- Which variables are read again ---

    def _live(self, body: list[ast.stmt], after: set[str], at_break: set[str], at_continue: set[str]) -> set[str]:
        for node in reversed(body):
            self.after[node] = set() if isinstance(node, ast.Return) else after
            if isinstance(node, ast.If):
                branches = [self._live(part, after, at_break, at_continue) for part in (node.body, node.orelse)]
                after = branches[0] | branches[1] | set(_loads(node.test))
            elif isinstance(node, (ast.For, ast.While)):
                head = self._live(node.orelse, after, at_break, at_continue) | set(_loads(getattr(node, "test", None)))
                again = head
                for _ in range(2):
                    again = again | self._live(node.body, again, after, again)
                after = again | set(_loads(getattr(node, "iter", None)))
            elif isinstance(node, ast.With):
                after = self._live(node.body, after, at_break, at_continue) | set(_loads(*node.items))
            elif isinstance(node, ast.Return):
                after = set(_loads(node.value))
            elif isinstance(node, ast.Break):
                after = at_break
            elif isinstance(node, ast.Continue):
                after = at_continue
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and _single_target(node) is not None:
                after = (after - {_single_target(node)}) | set(_loads(node.value))
            else:
                after = after | set(_loads(node))
        return after

    def _set_last(self, node: ast.AST) -> None:
        """For the expressions of ``node``: it reads the variable once, and rebinds it or nobody reads it later."""
        target, reads = _single_target(node), _loads(getattr(node, "value", None))
        if isinstance(node, ast.AugAssign):
            reads[target or ""] += 1
        simple = isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr))
        self.last = lambda name: simple and reads[name] == 1 and (name == target or name not in self.after[node])

    # --- Statements ---

    def body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [made for node in body for made in self._statement(node)]

    def flush(self) -> ast.stmt:
        return ast.Expr(self._do("flush"))

    def _statement(self, node: ast.stmt) -> Iterable[ast.stmt]:
        self._set_last(node)
        value: Any = getattr(node, "value", None)
        target = _single_target(node)
        if isinstance(node, (ast.Pass, ast.Global, ast.Nonlocal)):
            return [node]
        if isinstance(node, _SCOPES):
            return [self.flush(), node]
        if isinstance(node, ast.Return):
            before = [] if value is None or _is_simple(value, self) else [self.flush()]
            node.value = self._do("done", ast.Constant(None) if value is None else self._deferring(value))
            return [*before, node]
        if isinstance(node, (ast.Break, ast.Continue)):
            return [self.flush(), node]
        if target in self.held and value is not None and isinstance(node, (ast.Assign, ast.AnnAssign)):
            before = [] if _is_simple(value, self) else [self.flush()]
            node.value = self._deferring(value)
            return [*before, node]
        if target in self.held and isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            before = [] if _is_simple(value, self) else [self.flush()]
            left = ast.Name(target, ast.Load())
            made = self._add(left, value, "+=")
            return [*before, ast.copy_location(ast.Assign([ast.Name(target, ast.Store())], made), node)]
        if target in self.held and isinstance(node, ast.AugAssign):
            force = ast.Assign([ast.Name(target, ast.Store())], self._do("force", ast.Name(target, ast.Load())))
            node.value = self._forced(value)
            return [self.flush(), force, node]
        if isinstance(node, ast.If):
            before = [] if _is_simple_test(node.test, self) else [self.flush()]
            node.test = self._forced(node.test)
            node.body, node.orelse = self.body(node.body), self.body(node.orelse)
            return [*before, node]
        if isinstance(node, (ast.For, ast.While)):
            name = "iter" if isinstance(node, ast.For) else "test"
            setattr(node, name, self._forced(getattr(node, name)))
            node.body, node.orelse = [*self.body(node.body), self.flush()], self.body(node.orelse)
            return [self.flush(), node]
        if isinstance(node, ast.With):
            for item in node.items:
                item.context_expr = self._forced(item.context_expr)
            node.body = [*self.body(node.body), self.flush()]
            return [self.flush(), node]
        simple = isinstance(node, (ast.Assign, ast.Expr)) and target is not None and _is_simple(value, self)
        for field_name, old in ast.iter_fields(node):
            if isinstance(old, ast.expr):
                setattr(node, field_name, self._forced(old))
            elif isinstance(old, list):
                old[:] = [self._forced(one) if isinstance(one, ast.expr) else one for one in old]
        return [node] if simple else [self.flush(), node]

    # --- Expressions ---

    def _do(self, name: str, *arguments: ast.expr, keywords: Iterable[ast.keyword] = ()) -> ast.Call:
        f = ast.Attribute(ast.Name(self.fusion, ast.Load()), name, ast.Load())
        return ast.Call(f, list(arguments), list(keywords))

    def _deferring(self, node: ast.expr) -> ast.expr:
        """The expression where its value may be a deferred norm, which then has no other holder."""
        made: ast.expr
        if isinstance(node, ast.Name) and self.last(node.id):
            made = node
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            made = self._add(node.left, node.right, "+")
        elif isinstance(node, ast.IfExp):
            made = ast.IfExp(self._forced(node.test), self._deferring(node.body), self._deferring(node.orelse))
        elif isinstance(node, ast.Call):
            made = self._call(node)
        else:
            made = self._forced(node)
        return ast.copy_location(made, node)

    def _call(self, node: ast.Call) -> ast.expr:
        starred = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        rest = [*node.args[1:], *(k.value for k in node.keywords)]
        keywords = [ast.keyword(k.arg, self._forced(k.value)) for k in node.keywords]
        if self._is_method(node.func):
            self.methods.add(name)
            f = self._do("method", ast.Name(self.me, ast.Load()), ast.Constant(name))
            return ast.Call(f, [self._forced(a) for a in node.args], keywords)
        if isinstance(node.func, ast.Attribute) and _may_defer(node.func.value, names=self.held):
            of, count = node.func.value, len(node.args) + len(node.keywords)
            if name in ("relu", "relu_") and count == 0:
                return self._do("relu", self._deferring(of), ast.Constant(name))
            if name in ("add", "add_") and count == len(node.args) == 1 and not starred:
                return self._add(of, node.args[0], name)
        f = self._forced(node.func)
        if not self.is_known(node.func):  # a method of a value: the statement has run what is pending
            return ast.Call(f, [self._forced(a) for a in node.args], keywords)
        if not node.args or starred:
            return ast.Call(self._do("now", f), [self._forced(a) for a in node.args], keywords)
        first = node.args[0]
        x = self._deferring(first) if all(_is_simple(a, self) for a in rest) else self._forced(first)
        others = [self._forced(a) for a in node.args[1:]]
        return self._do("call", f, x, *others, keywords=keywords)

    def _add(self, left: ast.expr, right: ast.expr, name: str) -> ast.expr:
        x = self._deferring(left) if _is_simple(right, self) else self._forced(left)
        self.adds = True
        named = [] if name == "+" else [ast.Constant(name)]
        return self._do("add", x, self._deferring(right), *named)

    def is_known(self, f: ast.expr) -> bool:
        """Whether what is called is a variable, or an attribute of ``self`` or of something global."""
        return isinstance(f, ast.Name) or _rooted(f, self.me) or _is_global(f, self)

    def _is_method(self, f: ast.expr) -> bool:
        if not (isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id == self.me):
            return False
        found = inspect.getattr_static(self.owner, f.attr, None)
        return isinstance(found, types.FunctionType) and self.me not in self.stored and not _is_of_module(f.attr)

    def _forced(self, node: Any) -> Any:
        """The expression where its value must be what was written."""
        if isinstance(node, _SCOPES) or not isinstance(node, ast.AST):
            return node
        if isinstance(node, ast.Name):
            held = node.id in self.held and isinstance(node.ctx, ast.Load)
            return ast.copy_location(self._do("force", node), node) if held else node
        if isinstance(node, (ast.Call, ast.BinOp, ast.IfExp)) and _may_defer(node):
            return ast.copy_location(self._do("force", self._deferring(node)), node)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _rooted(node, self.me):
            return ast.copy_location(self._do("attr", self._forced(node.value), ast.Constant(node.attr)), node)
        for name, old in ast.iter_fields(node):
            if isinstance(old, ast.AST):
                setattr(node, name, self._forced(old))
            elif isinstance(old, list):
                setattr(node, name, [self._forced(one) for one in old])
        return node


def _is_of_module(name: str) -> bool:
    return hasattr(nn.Module, name)


def _single_target(node: ast.AST) -> str | None:
    """The one variable that a statement binds."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)) and isinstance(node.target, ast.Name):
        return node.target.id if node.value is not None else None
    return None


def _may_defer(node: ast.AST | None, names: Iterable[str] = ()) -> bool:
    if isinstance(node, ast.IfExp):
        return _may_defer(node.body, names) or _may_defer(node.orelse, names)
    if isinstance(node, ast.Name):
        return node.id in names
    return isinstance(node, ast.Call) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add))


def _rooted(node: ast.expr, name: str) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == name


def _is_simple(node: ast.expr, of: _Rewriter) -> bool:
    """Whether all that the expression does goes through the fusion, which runs what is pending where it must."""
    if isinstance(node, (ast.Name, ast.Constant)):
        return True
    if isinstance(node, ast.Attribute):
        return _rooted(node, of.me)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and _is_simple(node.left, of) and _is_simple(node.right, of)
    if isinstance(node, ast.Call):
        f = node.func
        plain = of.is_known(f)
        if isinstance(f, ast.Attribute) and f.attr in ("relu", "relu_", "add", "add_") and _may_defer(f.value, of.held):
            plain = _is_simple(f.value, of)
        parts = [*node.args, *(k.value for k in node.keywords)]
        return plain and all(not isinstance(a, ast.Starred) and _is_simple(a, of) for a in parts)
    if isinstance(node, ast.IfExp):
        return _is_simple_test(node.test, of) and _is_simple(node.body, of) and _is_simple(node.orelse, of)
    return False


def _is_simple_test(node: ast.expr, of: _Rewriter) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _is_simple_test(node.operand, of)
    if isinstance(node, ast.BoolOp):
        return all(_is_simple_test(value, of) for value in node.values)
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            return all(_is_simple(part, of) for part in parts)
        return all(isinstance(part, ast.Constant) or _rooted(part, of.me) for part in parts)
    return isinstance(node, (ast.Attribute, ast.Call)) and _is_simple(node, of)


def _is_global(node: ast.expr, of: _Rewriter) -> bool:
    """``F.relu``, ``torch.nn.functional.relu``: attributes of what is no variable of the function."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id not in of.locals
