"""What fusion leaves in a model: placeholders for what a norm took over, and blocks with a rewritten forward.

A block checks at every call that what was merged is still what it was: another module in the place of a norm that has
the ReLU, or of the ReLU's placeholder, would change the function in silence. No module knows who calls it, so neither
the norm nor the placeholder could tell.

A rewritten block stays an instance of its class. Its class becomes a subclass with another ``forward`` (as
``torch.nn.utils.parametrize`` does), not a ``torch.fx.GraphModule``: so ``isinstance``, attributes, methods, hooks and
state_dict keys stay, submodules are looked up by attribute on every call, and undoing the fusion is assigning the class
back. The subclass is made at run time, so copying and pickling go by its source (:class:`Program`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook

from normmatters.nn import twin
from normmatters.nn.batchnorm_base import LpBatchNorm
from normmatters.nn.leaf import function_call
from normmatters.surgery.parts import has_hooks
from normmatters.surgery.trace import setting

M = TypeVar("M", bound=nn.Module)


class FusedReLU(nn.ReLU):
    """Stands where an ``nn.ReLU`` was before the norm in front of it took it over; does nothing.

    Code that looks for ReLUs finds it: to hook them, or to put others in their place, which the block refuses.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``input`` itself."""
        return input


class FusedMaxPool2d(nn.MaxPool2d):
    """Stands where an ``nn.MaxPool2d`` was before the norm in front of it took it over; does nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """``input`` itself."""
        return input


def stand_in(cls: type[M], module: nn.Module) -> M:
    """A module of class ``cls`` that holds all that ``module`` holds: settings, hooks, attributes of the user's."""
    made = cls.__new__(cls)
    vars(made).update({name: value for name, value in vars(module).items() if name != "_compiled_call_impl"})
    return made


@dataclass(frozen=True)
class Program:
    """The source of a rewritten ``forward``, one for each mode of the block, with what is needed to run it.

    ``guards``, for training and for evaluation, are the settings of the block and of its modules (flags, sizes, absent
    submodules) that the program was made for, by their paths: with others the original ``forward`` would not be this
    program. ``norms`` are the paths of the norms that took over a ReLU, ``inlined`` those of the Sequentials whose
    modules the program calls itself. ``linked`` is ``train`` once more with links (:func:`with_links`), empty where the
    block does not end in a norm that adds, or changes its input in place, a change that the link's gradient would pass
    by; ``takes_link`` says that what it adds is the block's input, or what a shortcut makes of it.

    A block where only placeholders were set has a program of guards alone: its own ``forward`` runs behind them. Those
    of a Sequential hold as long as it has its ``length``: modules that come or go give the others new names.
    """

    train: str
    evaluate: str
    linked: str
    takes_link: bool
    guards: tuple[tuple[tuple[str, Any], ...], ...]
    norms: tuple[str, ...]
    inlined: tuple[str, ...]
    modules: tuple[tuple[str, str], ...]  # Python modules cannot be pickled: kept by name
    objects: tuple[tuple[str, Any], ...]
    length: int | None = None

    @classmethod
    def of(
        cls,
        train: fx.Graph,
        evaluate: fx.Graph,
        guards: list[dict[str, Any]],
        norms: list[str],
        inlined: list[str],
        *,
        links: bool,
    ) -> Program:
        """The program of two traced graphs of the same block, which has no ``linked`` unless ``links``.

        ``guards`` come in the order of the graphs.
        """
        linked, takes_link = with_links(train) if links else (None, False)
        graphs = [train, evaluate, *([] if linked is None else [linked])]
        codes = [graph.python_code(root_module="self") for graph in graphs]
        names = {name: value for code in codes for name, value in code.globals.items()}
        used = sorted({name for code in codes for name in _compile(code.src, names).__code__.co_names} & set(names))
        return cls(
            codes[0].src,
            codes[1].src,
            "" if linked is None else codes[2].src,
            takes_link,
            tuple(tuple(sorted(found.items())) for found in guards),
            tuple(sorted(norms)),
            tuple(sorted(inlined)),
            tuple((name, names[name].__name__) for name in used if isinstance(names[name], ModuleType)),
            tuple((name, names[name]) for name in used if not isinstance(names[name], ModuleType)),
        )

    @classmethod
    def of_placeholders(cls, guards: dict[str, Any], length: int | None) -> Program:
        """The program of a block whose forward stays, with guards of the norms and placeholders in it."""
        norms = tuple(sorted(path.removesuffix(".act") for path in guards if path.endswith(".act")))
        return cls("", "", "", False, (tuple(sorted(guards.items())),) * 2, norms, (), (), (), length)

    def fits(self, block: Any) -> bool:
        """Whether the modules of the block have the names that they had."""
        return self.length is None or self.length == len(block)

    def functions(self, base: Any) -> tuple[Any, Any, Any]:
        """The forward functions: for training, for evaluation, and for training with links."""
        if not self.train:
            return base.forward, base.forward, None
        names = {name: importlib.import_module(path) for name, path in self.modules} | dict(self.objects)
        train = _compile(self.train, names)
        evaluate = train if self.train == self.evaluate else _compile(self.evaluate, names)
        return train, evaluate, _compile(self.linked, names) if self.linked else None


def _compile(source: str, names: dict[str, Any]) -> Any:
    scope = dict(names)
    exec(compile(source, "<normmatters.convert>", "exec"), scope)
    return scope["forward"]


class FusedBlock:
    """First base of every block whose ``forward`` was rewritten."""

    fusion_program: ClassVar[Program]  # a block of the user's may well have a program
    unfused_class: ClassVar[type[nn.Module]]
    check_fusion: Callable[[], None]  # raises where a guard does not hold

    def __init_subclass__(cls, **_: Any) -> None:
        """Nothing: that of a user's class, which may keep a register, is not to hear of ours."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = cast(tuple[Any, ...], object.__reduce_ex__(self, protocol))
        return (new_block, (self.unfused_class, self.fusion_program), *state)


def new_block(base: Any, program: Program) -> Any:
    """An empty instance of the fused class; copying and unpickling fill in its state."""
    cls: Any = fused_class(base, program)
    return cls.__new__(cls)


@functools.cache
def fused_class(base: Any, program: Program) -> type[nn.Module]:
    """The subclass of ``base`` that runs ``program``. Blocks with the same program share it."""
    train, evaluate, linked = program.functions(base)
    in_training, in_evaluation = (
        [(path.split(".")[:-1], path.split(".")[-1], traced) for path, traced in found] for found in program.guards
    )
    inlined = [path.split(".") for path in program.inlined]

    def check(self: nn.Module) -> None:
        for owners, name, traced in in_training if self.training else in_evaluation:
            owner: Any = self
            for key in owners:  # asking a module for an attribute that is a module takes five times as long
                modules: Any = getattr(owner, "_modules", ())
                owner = modules[key] if key in modules else getattr(owner, key, None)
            now = getattr(owner, name, None)
            if now is not traced and setting(now) != traced and not _harmless(self, program, now, traced):
                raise RuntimeError(
                    f"{'.'.join((base.__name__, *owners, name))} is {now!r}, but was {traced!r} when "
                    "normmatters.convert fused this block: set it before converting or after to_torch, "
                    "or convert with fuse=False"
                )
        for keys in inlined:  # nobody else asks for their guards
            inner: Any = self
            for key in keys:
                inner = inner._modules[key]
            if isinstance(inner, FusedBlock):
                inner.check_fusion()

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return train(self, *args, **kwargs) if self.training else evaluate(self, *args, **kwargs)

    def forward_linked(self: nn.Module, x: Tensor, link: Tensor | None, wanted: bool) -> Any:
        check(self)
        return linked(self, x, link, wanted)

    body = {
        "forward": forward,
        "forward_linked": forward_linked,
        "check_fusion": check,
        "fusion_program": program,
        "unfused_class": base,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
    }
    if issubclass(base, nn.Sequential):
        body["__getitem__"] = _sliced(base)
    return type(f"Fused{base.__name__}", (FusedBlock, base), body)


def _sliced(base: Any) -> Any:
    """``base.__getitem__`` with slices that are of ``base``: the guards are those of the whole."""

    def __getitem__(self: Any, index: Any) -> Any:
        found = base.__getitem__(self, index)
        if isinstance(index, slice):
            object.__setattr__(found, "__class__", base)
        return found

    return __getitem__


def _harmless(block: Any, program: Program, now: Any, traced: Any) -> bool:
    """Whether a guard that does not hold says nothing: relu(relu(x)) = relu(x), and a Sequential gives new names."""
    return (now is nn.ReLU and traced is FusedReLU) or (not program.fits(block) and _in_order(block))


def _in_order(sequential: nn.Sequential) -> bool:
    """Whether each placeholder comes behind a norm that has what it stands for, and a pooling norm before its pool."""
    row = [module for module in _flat(sequential) if type(module) is not nn.Identity]
    for norm, relu, pool in zip([None, *row], [*row, None], [*row[1:], None, None]):
        if isinstance(relu, FusedReLU) and getattr(norm, "act", None) != "relu":
            return False
        if isinstance(pool, FusedMaxPool2d) != (isinstance(norm, LpBatchNorm) and norm.pool is not None):
            return False
    return not isinstance(row[:1] and row[0], FusedMaxPool2d)


def _flat(module: nn.Module) -> list[nn.Module]:
    if not isinstance(module, nn.Sequential):
        return [module]
    return [inner for child in module._modules.values() for inner in _flat(child)]


def norm_add_relu(norm: Any, input: Tensor, residual: Tensor, in_place: bool = False) -> Tensor:
    """relu(norm(input) + residual), in one operation where nothing is broadcast or promoted.

    The shapes are not known when a block is traced, and an add may broadcast where the fused operation must not.
    An add ``in_place``, into the norm's output, does not promote (under autocast). ``norm`` has ``act="relu"``.
    """
    if isinstance(input, fx.Proxy):
        return function_call(norm_add_relu, norm, input, residual, in_place)  # type: ignore[no-any-return]
    if _alike(residual, input):
        return norm(input, residual)  # type: ignore[no-any-return]
    output = norm(input, apply_act=False)
    return torch.relu(output.add_(residual) if in_place else output + residual)


def _alike(residual: Any, input: Tensor) -> bool:
    # The sum may also be of the norm's output and a number that the block is given.
    return isinstance(residual, Tensor) and residual.shape == input.shape and residual.dtype == input.dtype


def watched(module: nn.Module) -> bool:
    """Whether someone would miss the module's being called: a hook, its own or one of all modules (a profiler's), or
    who put another forward on the instance."""
    return has_hooks(module) or "forward" in vars(module) or bool(_has_any_global_hook())


def linked_norm_add_relu(
    norm: Any, input: Tensor, residual: Tensor, link: Tensor | None, wanted: bool, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """:func:`norm_add_relu` and, if ``wanted``, the link to its output; ``link`` is the residual's."""
    own = type(norm).forward is not LpBatchNorm.forward
    if own or not _alike(residual, input) or watched(norm):
        return norm_add_relu(norm, input, residual, in_place), None
    return norm.forward_linked(input, residual, link, wanted)  # type: ignore[no-any-return]


#: The norm that ends a shortcut and what it is to read; or None and the shortcut's output.
Pending = tuple[Any, Tensor]


def until_norm(shortcut: nn.Module, input: Tensor) -> Pending:
    """Run a shortcut up to the norm that ends it, which :func:`norm_norm_add_relu` then makes a part of the add.

    So much is decided at every call, for modules may be exchanged or watched. The norm reads what a convolution has
    just made: nobody else can write to that before the add.
    """
    if isinstance(input, fx.Proxy):
        return None, shortcut(input)
    modules = _in_a_row(shortcut)
    fresh = len(modules) > 1 and isinstance(modules[-2], (nn.modules.conv._ConvNd, nn.Linear))
    if not (fresh and isinstance(modules[-1], LpBatchNorm)) or watched(modules[-1]):
        return None, shortcut(input)
    for module in modules[:-1]:
        input = module(input)
    return modules[-1], input


def _in_a_row(module: nn.Module) -> list[Any]:
    """What a (nested) Sequential calls; the module itself where it is none, or is watched."""
    if type(module) is not nn.Sequential or watched(module):
        return [module]
    return [module] if module._compiled_call_impl is not None else [m for inner in module for m in _in_a_row(inner)]


def norm_norm_add_relu(norm: Any, input: Tensor, pending: Pending, in_place: bool = False) -> Tensor:
    """relu(norm(input) + shortcut), in one operation where the shortcut's norm fits; ``norm`` has ``act="relu"``."""
    other, value = pending
    if not watched(norm) and twin.twin_fits(norm, input, other, value):
        return twin.twin_batch_norm(norm, input, other, value)[0]
    return norm_add_relu(norm, input, value if other is None else other(value), in_place)


def linked_norm_norm_add_relu(
    norm: Any, input: Tensor, pending: Pending, wanted: bool, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """:func:`norm_norm_add_relu` and, if ``wanted``, the link to its output."""
    other, value = pending
    if not watched(norm) and twin.twin_fits(norm, input, other, value):
        return twin.twin_batch_norm(norm, input, other, value, linked=wanted)
    return linked_norm_add_relu(norm, input, value if other is None else other(value), None, wanted, in_place)


class _Through(torch.autograd.Function):
    """The values of one tensor with the history of another."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, link: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, g


def through_link(input: Tensor, link: Tensor | None) -> Tensor:
    """``input``, but its gradient goes through ``link``: what a shortcut sends back need not be added to the rest."""
    return input if link is None else _Through.apply(input.detach(), link)  # type: ignore[no-any-return]


def with_links(graph: fx.Graph) -> tuple[fx.Graph | None, bool]:
    """The graph of a block that ends in a fused add, with links in and out, and whether it uses the one in."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (result,) = graph.output_node().args
    if len(inputs) != 1 or not isinstance(result, fx.Node):
        return None, False
    if result.target not in (norm_add_relu, norm_norm_add_relu):
        return None, False
    linked = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    linked.graph_copy(graph, copies)
    with linked.inserting_after(copies[inputs[0]]):
        wanted = linked.placeholder("wanted")
        link = linked.placeholder("link")  # stands before the other one
    end, x = copies[result], copies[inputs[0]]
    added: Any = end.args[2]
    takes_link = added is x
    if end.target is norm_norm_add_relu and added.args[1] is x:
        takes_link = True
        with linked.inserting_before(added):
            added.update_arg(1, linked.call_function(through_link, (x, link)))
    with linked.inserting_before(end):
        if end.target is norm_norm_add_relu:
            pair = linked.call_function(linked_norm_norm_add_relu, (*end.args, wanted), end.kwargs)
        else:
            arguments = (*end.args, link if takes_link else None, wanted)
            pair = linked.call_function(linked_norm_add_relu, arguments, end.kwargs)
    end.replace_all_uses_with(pair)
    linked.erase_node(end)
    linked.output(pair)
    return linked, takes_link


class LinkedSequential(nn.Sequential):
    """``nn.Sequential`` whose fused blocks hand their output on with its link.

    A block uses its input twice, and the two gradients of it are then not added on their own but inside the backward
    pass of the norm that made it (see :mod:`normmatters.kernels.ops`). What is not such a block, or is watched, is
    called as ever.
    """

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Sequential``."""
        if isinstance(input, fx.Proxy):
            return super().forward(input)  # type: ignore[no-any-return]
        modules: list[Any] = list(self)
        link = None
        for module, following in zip(modules, [*modules[1:], None]):
            wanted = links(module) and links(following) and following.fusion_program.takes_link
            if wanted or link is not None:
                input, link = module.forward_linked(input, link, wanted)
            else:
                input = module(input)
        return input


def links(module: Any) -> bool:
    """Whether the module is a block in training that ends in a fused norm, and nobody would miss its being called."""
    return (
        isinstance(module, FusedBlock)
        and bool(module.fusion_program.linked)
        and module.training  # type: ignore[attr-defined]
        and not watched(module)  # type: ignore[arg-type]
        and module._compiled_call_impl is None  # type: ignore[attr-defined]
    )


def link_sequentials(model: nn.Module) -> None:
    """Make plain Sequentials that hold linking blocks behind one another hand links on."""
    for module in model.modules():
        guarded = isinstance(module, FusedBlock) and module.unfused_class is nn.Sequential
        if type(module) is nn.Sequential or guarded:
            children = module._modules.values()
            programs = [child.fusion_program if isinstance(child, FusedBlock) else None for child in children]
            if any(a and b and a.linked and b.takes_link for a, b in zip(programs, programs[1:])):
                linked = fused_class(LinkedSequential, module.fusion_program) if guarded else LinkedSequential
                object.__setattr__(module, "__class__", linked)
