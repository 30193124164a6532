"""Find norm→ReLU, norm→add→ReLU and norm→ReLU→max pool in a model, block by block, and merge them into the norm.

A block is the smallest module whose own forward calls both the norm and the ReLU. Each block is looked at alone, so a
model with control flow that cannot be traced still gets its blocks fused, and its class and its forward stay.
A ReLU *module* whose every call follows a norm is replaced by a :class:`FusedReLU`, and the forward stays, behind a
check that norm and placeholder are still there. Only a ReLU function, a ReLU module with other uses, or a residual add
needs the block's forward rewritten. A max pool is merged where it is a module of the block's own that nothing else
calls: a :class:`FusedMaxPool2d` takes its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from normmatters.nn.replace import held_beside
from normmatters.surgery.fused import (
    FusedBlock,
    FusedMaxPool2d,
    FusedReLU,
    Program,
    fused_class,
    stand_in,
)
from normmatters.surgery.in_place import changes
from normmatters.surgery.match import NO_RELU, Match, match_of, module_of, pool_behind, rewrite
from normmatters.surgery.mentioned import called_elsewhere, mentioned
from normmatters.surgery.parts import (
    WATCHED,
    blocks_of,
    called_without,
    has_hooks,
    has_own_call,
    in_watched_sequentials,
    is_identity,
    is_pool,
    is_relu,
    is_sequential,
    not_its_own,
    slots_of,
)
from normmatters.surgery.trace import Trace, setting, trace_block
from normmatters.surgery.value import Untraceable

_ALONE = "a part of its block is called alone"


@dataclass
class FusionPlan:
    """What to merge: found without changing the model, then applied at once.

    ``fused`` maps a norm to ``"relu"``, ``"add + relu"`` or ``"relu + max pool"``, ``notes`` a norm that stays alone to
    the reason.
    """

    fused: dict[nn.Module, str] = field(default_factory=dict)
    notes: dict[nn.Module, str] = field(default_factory=dict)
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)  # ReLUs to replace: owner and name
    pools: dict[nn.Module, tuple[nn.Module, str]] = field(default_factory=dict)  # max pools, by norm: owner and name
    classes: dict[nn.Module, type[nn.Module]] = field(default_factory=dict)  # blocks with a new forward
    guards: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)  # of blocks with placeholders
    alone: set[nn.Module] = field(default_factory=set)  # parts of a block that are called from outside it
    elsewhere: set[nn.Module] = field(default_factory=set)  # and those that its other methods call

    def apply(self) -> None:
        """Put the plan into effect on the model; giving each fused norm ``act`` and ``pool`` is the caller's part."""
        placeholders: dict[nn.Module, FusedReLU] = {}
        for owner, name in self.slots:
            relu = owner._modules[name]
            assert isinstance(relu, nn.ReLU)
            if relu not in placeholders:
                placeholders[relu] = stand_in(FusedReLU, relu)
            owner._modules[name] = placeholders[relu]
        for owner, name in self.pools.values():
            pool = owner._modules[name]
            assert isinstance(pool, nn.MaxPool2d)
            owner._modules[name] = stand_in(FusedMaxPool2d, pool)
        for block, guards in self.guards.items():
            base: Any = type(block)
            length = len(block) if isinstance(block, nn.Sequential) else None
            if isinstance(block, FusedBlock):  # by an earlier conversion
                base = block.unfused_class
                guards = dict(block.fusion_program.guards[0]) | guards if block.fusion_program.fits(block) else guards
            self.classes[block] = fused_class(base, Program.of_placeholders(guards, length))
        for block, cls in self.classes.items():
            object.__setattr__(block, "__class__", cls)

    def guard(self, block: nn.Module, norm: nn.Module, slots: Iterable[tuple[nn.Module, str]]) -> None:
        """Let the block see to it that the norm, and what is in these slots, stay together.

        They are ReLUs, which placeholders are put for, and the identities before them.
        """
        if not _may_change_class(block):
            return
        paths = {module: path for path, module in block.named_modules()}
        guards = self.guards.setdefault(block, {})
        guards[f"{paths[norm]}.act"] = "relu"
        for owner, name in slots:
            held = type(owner._modules[name])
            guards[f"{paths[owner]}.{name}.__class__".lstrip(".")] = FusedReLU if held is nn.ReLU else held
        guards |= self.pool_guards(block, norm)

    def pool_guards(self, block: nn.Module, norm: nn.Module) -> dict[str, Any]:
        """The same for the max pool that the norm takes over, if it does."""
        if norm not in self.pools:
            return {}
        owner, name = self.pools[norm]
        paths = {module: path for path, module in block.named_modules()}
        return {f"{paths[norm]}.pool": "max", f"{paths[owner]}.{name}.__class__".lstrip("."): FusedMaxPool2d}


def plan_fusion(
    model: nn.Module, norms: Collection[nn.Module], pooling: Collection[nn.Module] = frozenset()
) -> FusionPlan:
    """Find what the given norms of ``model`` can take over; those of ``pooling`` also a max pool."""
    plan = FusionPlan()
    paths = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    paths.update(module for _, _, module in held_beside(model) if isinstance(module, nn.MaxPool2d))
    candidates = {norm for norm in norms if not has_hooks(norm)}
    plan.notes = {norm: "hooks see its output" for norm in norms if norm not in candidates}
    for block in blocks_of(model, set(norms)):
        _plan_methods(block, set(norms), plan)
    for block in blocks_of(model, set(norms)):
        # Another way to a norm than through this block would meet the ReLU without having asked for it.
        reachable = Counter(module for _, module in block.named_modules(remove_duplicate=False))
        once = {norm for norm in candidates if reachable[norm] == 1 and paths[norm] == paths[block]}
        own = {norm for norm in once if not called_without(block, norm, plan.alone)}
        plan_block = _plan_sequential if is_sequential(block) else _plan_traced
        plan_block(block, own, own.intersection(pooling) - plan.elsewhere, paths, plan)
    plan.fused.update(dict.fromkeys(plan.pools, "relu + max pool"))
    watched = in_watched_sequentials(model)
    for norm in set(norms) - plan.fused.keys():
        alone = any(norm in part.modules() for part in plan.alone)
        otherwise = _ALONE if alone else WATCHED if norm in watched else NO_RELU
        plan.notes.setdefault(norm, "it is used at several places" if paths[norm] > 1 else otherwise)
    return plan


def _plan_methods(block: nn.Module, norms: set[nn.Module], plan: FusionPlan) -> None:
    """See to the methods of a block beside its forward: what they call is to stay what it is."""
    for called in called_elsewhere(block):
        relus = {module for module in called if isinstance(module, nn.ReLU)}
        # With a ReLU behind the norm there too, relu(relu(x)) is harmless; an add or a pool in between is not.
        harmless = norms | relus if relus and not norms.isdisjoint(called) else set()
        plan.alone |= called - harmless
        plan.elsewhere |= called


def _plan_sequential(
    block: nn.Module, own: set[nn.Module], pooling: set[nn.Module], paths: Counter[nn.Module], plan: FusionPlan
) -> None:
    chain = [slot for slot in slots_of(block, True) if not is_sequential(slot[2])]
    for position, (_, _, norm) in enumerate(chain):
        if norm not in own or norm in plan.fused or norm in plan.notes:
            continue
        following = chain[position + 1 :]
        behind = [slot for slot in following if not is_identity(slot[2])]
        if not behind or not is_relu(behind[0][2]):
            continue
        if _has_other_uses(block, behind[0], paths, plan):
            plan.notes[norm] = "the ReLU behind it has other uses"
            continue
        plan.fused[norm] = "relu"
        plan.slots.append(behind[0][:2])
        last = behind[0]
        pool = behind[1] if len(behind) > 1 else None
        if norm in pooling and pool and is_pool(pool[2]) and not _has_other_uses(block, pool, paths, plan):
            plan.pools[norm] = pool[:2]
            last = pool
        taken = following[: following.index(last) + 1]
        # A Sequential in another one may be exchanged whole: it looks after its own.
        near = chain[position][0] if all(owner is chain[position][0] for owner, _, _ in taken) else block
        plan.guard(near, norm, [slot[:2] for slot in taken if slot is not pool])


def _has_other_uses(
    block: nn.Module, slot: tuple[nn.Module, str, nn.Module], paths: Counter[nn.Module], plan: FusionPlan
) -> bool:
    """Whether someone else would meet the placeholder in this slot: who shares its owner, or calls past the block."""
    owner, _, module = slot
    return paths[owner] != paths[block] or called_without(block, module, plan.alone)


def _plan_traced(
    block: nn.Module, own: set[nn.Module], pooling: set[nn.Module], paths: Counter[nn.Module], plan: FusionPlan
) -> None:
    direct = {module for _, _, module in slots_of(block, False)}
    tails = {tail: inner for _, _, s in slots_of(block, False) if is_sequential(s) for tail, inner in _tail(s, own)}
    mine = own & (direct | tails.keys())
    try:
        if isinstance(block, FusedBlock):
            raise Untraceable("it was fused before: go back with to_torch first")
        traces = _trace(block, {module for inner in tails.values() for module in inner})
    except Untraceable as reason:
        for norm in own & direct:
            plan.notes.setdefault(norm, f"{type(block).__name__} cannot be traced: {reason}")
        plan.alone |= not_its_own(block, mentioned(block))
        return
    called = [module for trace in traces for module in trace.called]
    alone = not_its_own(block, called)
    plan.alone |= alone
    for norm in own & alone - mine:
        plan.notes.setdefault(norm, f"{type(block).__name__} calls it from outside its own block")

    matches = _matches(block, traces, mine, plan)
    if not matches:
        return
    slots = _relu_slots(block, traces, matches, paths, plan)
    if slots is None and not _may_change_class(block):
        for norm in matches:
            plan.notes[norm] = f"{type(block).__name__} defines its own copying, so its forward stays"
        return
    through: set[nn.Module] = set()
    if slots is None and tails:  # go through the Sequentials that a fused norm ends, call the others whole
        before: set[nn.Module] = set()
        while matches.keys() != before:  # what is behind a norm may be in one that is called whole
            before = set(matches)
            through = {module for norm in before for module in tails.get(norm, ())}
            traces = _trace(block, through)
            matches = _matches(block, traces, before, plan)
        if not matches:
            return
    plan.fused.update({norm: pair[0].kind for norm, pair in matches.items()})
    _plan_pools(block, Counter(called), {norm: matches[norm] for norm in pooling & matches.keys()}, paths, plan)
    if slots is not None:
        plan.slots += slots
        for norm, pair in matches.items():
            relus = {module_of(block, match.relu) for match in pair}
            passed = [str(node.target).rpartition(".") for match in pair for node in match.identities]
            identities = [(block.get_submodule(path), name) for path, _, name in passed]
            merged = [(owner, name) for owner, name in slots if owner._modules[name] in relus]
            plan.guard(block, norm, [*identities, *merged])
        return
    pools = {path: value for norm in matches for path, value in plan.pool_guards(block, norm).items()}
    guards = [trace.guards | _built_of(block, through, matches.values()) | pools for trace in traces]
    shortcuts = [around[0] for around in tails.values()]
    for mode, trace in enumerate(traces):
        for pair in matches.values():
            rewrite(block, trace.graph, pair[mode], shortcuts)
    fused = [str(train.norm.target) for train, _ in matches.values()]
    inlined = [path for path, module in block.named_modules() if module in through]
    links = not _changes_inputs(block, traces[0]) and not has_own_call(block)
    program = Program.of(traces[0].graph, traces[1].graph, guards, fused, inlined, links=links)
    base: Any = type(block)
    plan.classes[block] = fused_class(base, program)


def _built_of(block: nn.Module, through: set[nn.Module], matches: Iterable[tuple[Match, Match]]) -> dict[str, Any]:
    """What a rewritten forward does not look at again: modules that it does not call, and which norms have a ReLU."""
    guards = {f"{p}._modules": setting(m._modules) for p, m in block.named_modules() if m in through}
    for match in (match for pair in matches for match in pair):
        guards[f"{match.norm.target}.act"] = "relu"
        gone = (match.relu, *match.identities)
        guards |= {f"{n.target}.__class__": type(module_of(block, n)) for n in gone if n.op == "call_module"}
    return guards


def _changes_inputs(block: nn.Module, trace: Trace) -> bool:
    inputs = [node for node in trace.graph.nodes if node.op == "placeholder"]
    return any(changes(block, node, given) for node in trace.graph.nodes for given in inputs)


def _tail(sequential: nn.Module, norms: set[nn.Module]) -> list[tuple[nn.Module, list[nn.Module]]]:
    """The norm that ends a (nested) Sequential, if one does, with the Sequentials around it."""
    around = [sequential]
    while around[-1]._modules:
        last = list(around[-1]._modules.values())[-1]
        if last in norms:
            return [(last, around)]
        if last is None or not is_sequential(last):
            break
        around.append(last)
    return []


def _trace(block: nn.Module, inline: set[nn.Module]) -> tuple[Trace, Trace]:
    return trace_block(block, True, inline), trace_block(block, False, inline)


def _matches(
    block: nn.Module, traces: tuple[Trace, Trace], norms: set[nn.Module], plan: FusionPlan
) -> dict[nn.Module, tuple[Match, Match]]:
    """The norms that fuse in the same way in training and in evaluation."""
    found: dict[nn.Module, tuple[Match, Match]] = {}
    for norm in norms - plan.notes.keys():
        pair = [match_of(block, trace.graph, norm) for trace in traces]
        reasons = [reason for reason in pair if isinstance(reason, str)]
        match pair:
            case [Match() as train, Match() as evaluate] if train.kind == evaluate.kind:
                if train.add is None or norm not in plan.elsewhere:
                    found[norm] = (train, evaluate)
                else:
                    plan.notes[norm] = _ALONE
            case _:
                plan.notes[norm] = reasons[0] if reasons else "training and evaluation differ behind it"
    for norm, (train, _) in list(found.items()):
        # Both sides of an add may be norms: the left one, `out` of `out + shortcut`, takes the other as its residual.
        rivals = [other for other, (theirs, _) in found.items() if theirs.add is train.add and other is not norm]
        if train.add is not None and rivals and train.residual == 0:
            plan.notes[norm] = "it is the residual of another norm"
            del found[norm]
    return found


def _plan_pools(
    block: nn.Module,
    times: Counter[nn.Module],
    matches: dict[nn.Module, tuple[Match, Match]],
    paths: Counter[nn.Module],
    plan: FusionPlan,
) -> None:
    for norm, pair in matches.items():
        pool, other = (pool_behind(block, match) for match in pair)
        if pool is None or pool is not other:
            continue
        places = [slot for slot in slots_of(block, False) if slot[2] is pool]
        # Called once in either mode, and by nobody else: another way to it would miss the pool.
        if len(places) == 1 and times[pool] == 2 and paths[pool] == paths[block]:
            if not called_without(block, pool, plan.alone):
                plan.pools[norm] = places[0][:2]


def _relu_slots(
    block: nn.Module,
    traces: tuple[Trace, Trace],
    matches: dict[nn.Module, tuple[Match, Match]],
    paths: Counter[nn.Module],
    plan: FusionPlan,
) -> list[tuple[nn.Module, str]] | None:
    """Where the block holds the ReLU modules, if replacing them is all that there is to do."""
    merged = {match.relu for pair in matches.values() for match in pair}
    if any(match.add for pair in matches.values() for match in pair) or any(n.op != "call_module" for n in merged):
        return None
    relus = {module_of(block, node) for node in merged}
    others = {node for trace in traces for node in trace.graph.nodes if node.op == "call_module"} - merged
    if any(module_of(block, node) in relus for node in others):
        return None
    slots = [slot for slot in slots_of(block, False) if slot[2] in relus]
    if any(_has_other_uses(block, slot, paths, plan) for slot in slots):
        return None
    return [slot[:2] for slot in slots] if {slot[2] for slot in slots} == relus else None


def _may_change_class(block: nn.Module) -> bool:
    names = ("__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__")
    own: Any = block.unfused_class if isinstance(block, FusedBlock) else type(block)
    return all(getattr(own, name, None) is getattr(object, name, None) for name in names)
