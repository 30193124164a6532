"""Do the tests notice a wrong line? Change one thing in `constants`, `functional` or `optim`, run their tests, repeat.

    python tools/mutate.py                     # the sample of docs/mutation.md: about 15 minutes on one core
    python tools/mutate.py --only optim --count 10 --seed 7

A mutant is one small change to the code: another operator, number or comparison, a condition turned round, a call left
out. It dies when a test fails. The package is copied first, so the source tree is never touched.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "normmatters"
GROUPS = {
    "constants": ["constants.py"],
    "functional": ["functional/*.py", "kernels/hand_derived.py"],
    "optim": ["optim/*.py"],
}
COUNTS = {"constants": 15, "functional": 25, "optim": 30}
# Which tests to try, nearest first: a mutant that outlives those of its own file meets its neighbours'.
NEAR = {
    "constants.py": ["test_constants.py"],
    "functional/batch_norm.py": ["functional/test_lp_batch_norm.py"],
    "functional/checks.py": ["functional"],
    "functional/layer_norm.py": ["functional/test_lp_layer_norm.py"],
    "functional/statistic.py": ["functional/test_statistic.py", "functional/test_lp_batch_norm.py"],
    "functional/torch_batch_norm.py": ["kernels/test_hand_derived.py"],
    "functional/weight.py": ["functional/test_weight.py"],
    "kernels/hand_derived.py": ["kernels/test_hand_derived.py"],
    "optim/_base.py": ["optim/test_refusals.py", "optim/test_weight_decay_free.py", "optim/test_base_exponents.py"],
    "optim/angular.py": ["optim/test_angular.py"],
    "optim/angular_sgd.py": ["optim/test_angular.py"],
    "optim/corrected_decay.py": ["optim/test_corrected_decay.py"],
    "optim/decay_groups.py": ["optim/test_decay_groups.py", "optim/test_from_model.py"],
    "optim/channels.py": ["optim/test_channels.py", "optim/test_recorder.py", "kernels/triton/test_rows.py"],
    "optim/weight_decay_free_adamw.py": ["optim/test_refusals.py", "optim/test_weight_decay_free.py"],
    "optim/equilibrium.py": ["optim/test_refusals.py", "optim/test_equilibrium.py"],
    "optim/recipe.py": ["optim/test_equilibrium.py"],
    "optim/recording.py": ["optim/test_refusals.py", "optim/test_recorder.py"],
}
FAR = {
    "constants": ["test_constants.py", "functional"],
    "functional": ["functional", "kernels/test_hand_derived.py", "nn", "docs/test_docstrings.py"],
    "optim": ["optim", "kernels/triton/test_rows.py", "docs/test_docstrings.py"],
}

# Not "|": most are between types.
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Div, ast.Mod: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change: the ``site``-th place of a file where something can be changed."""

    group: str
    file: str
    site: int
    line: int
    before: str
    after: str

    def source(self) -> str:
        """The file with the change in it."""
        tree = ast.parse((PACKAGE / self.file).read_text(encoding="utf-8"))
        parent, name, index = list(places(tree))[self.site]
        new = changed(_get(parent, name, index))
        assert new is not None
        if index is None:
            setattr(parent, name, new)
        else:
            getattr(parent, name)[index] = new
        return ast.unparse(ast.fix_missing_locations(tree))


def places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """(parent, field, index) of every child that is code; messages, annotations and what is exported are left out."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params") or isinstance(node, ast.Raise):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_no_code(child):
                continue
            yield node, name, index
            yield from places(child)


def _is_no_code(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) for t in node.targets):
        value = node.value
        names = {t.id for t in node.targets if isinstance(t, ast.Name)}
        # Exports and the names of types.
        return "__all__" in names or (isinstance(value, ast.BinOp | ast.Subscript) and "Literal" in ast.unparse(value))
    return False


def changed(node: ast.AST) -> ast.AST | None:
    """What takes the node's place in a mutant; None where nothing is tried."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(new.op) in _SWAPS:
        new.op = _SWAPS[type(new.op)]()  # type: ignore[assignment]
    elif isinstance(new, ast.Compare) and type(new.ops[0]) in _SWAPS:
        new.ops[0] = _SWAPS[type(new.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not | ast.USub):
        return new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new.value = not new.value
    elif isinstance(new, ast.Constant) and isinstance(new.value, int):
        new.value += 1
    elif isinstance(new, ast.Constant) and isinstance(new.value, float):
        new.value = 2 * new.value or 1.0
    elif isinstance(new, ast.IfExp):
        new.body, new.orelse = new.orelse, new.body
    elif isinstance(new, ast.If) and isinstance(new.test, ast.Name | ast.Attribute | ast.Call):
        new.test = ast.UnaryOp(ast.Not(), new.test)
    elif isinstance(new, ast.Expr) and isinstance(new.value, ast.Call):
        return ast.copy_location(ast.Pass(), node)
    else:
        return None
    return new


def mutants(group: str) -> Iterator[Mutant]:
    """Every mutant of a group, in the order of its files and lines."""
    for path in sorted(p for pattern in GROUPS[group] for p in PACKAGE.glob(pattern) if p.name != "__init__.py"):
        file = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for site, (parent, name, index) in enumerate(places(tree)):
            node = _get(parent, name, index)
            new = changed(node)
            if new is not None:
                before, after = (ast.unparse(ast.fix_missing_locations(n)).splitlines()[0] for n in (node, new))
                yield Mutant(group, file, site, getattr(node, "lineno", 0), before, after)


def _get(parent: ast.AST, name: str, index: int | None) -> ast.AST:
    value = getattr(parent, name)
    return value if index is None else value[index]  # type: ignore[no-any-return]


def stages(mutant: Mutant) -> Iterator[list[str]]:
    """The tests to run, one after the other until one fails."""
    name = mutant.file.rpartition("/")[2]
    yield NEAR.get(mutant.file, [f"{mutant.group}/test_{name}"])
    yield FAR[mutant.group]


def fails(tests: list[str], home: Path, timeout: float) -> bool:
    """Whether one of the tests fails, or does not end, with the package in ``home``."""
    # The interpreter must see the file that is there now, not the bytecode of the mutant before.
    env = {**os.environ, "PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    words = [*pytest, *(str(ROOT / "tests" / test) for test in tests)]
    try:
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in (0, 1, 2):  # 1: a test failed; 2: the package could not be imported
        raise RuntimeError(done.stdout.decode()[-2000:] + done.stderr.decode()[-2000:])
    return done.returncode != 0


def dies(mutant: Mutant, home: Path, timeout: float) -> bool:
    """Whether a test fails with the mutant in place of the file in ``home``."""
    target = home / PACKAGE.name / mutant.file
    original = target.read_text(encoding="utf-8")
    target.write_text(mutant.source(), encoding="utf-8")
    try:
        return any(fails(tests, home, timeout) for tests in stages(mutant))
    finally:
        target.write_text(original, encoding="utf-8")


def main() -> int:
    """Sample, run, and print a table; 1 if fewer than 85 % of the mutants die."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=GROUPS, help="one group")
    parser.add_argument("--count", type=int, help="mutants a group (15, 25 and 30)")
    parser.add_argument("--seed", type=int, default=0, help="which sample (0)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which tests count as failed (600)")
    parser.add_argument("--list", action="store_true", help="show the sample and stop")
    chosen = parser.parse_args()
    groups = [chosen.only] if chosen.only else list(GROUPS)
    total = {group: list(mutants(group)) for group in groups}
    sample = []
    for group, found in total.items():
        count = min(chosen.count or COUNTS[group], len(found))
        sample += sorted(random.Random(chosen.seed).sample(found, count), key=lambda m: (m.file, m.line))
    survivors: dict[str, list[Mutant]] = {group: [] for group in groups}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(PACKAGE, Path(folder) / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "experiments", Path(folder) / PACKAGE.name / "experiments")  # as a wheel has it
        for group in groups:
            if not chosen.list and fails(FAR[group], Path(folder), chosen.timeout):
                sys.exit(f"the tests of {group} fail without any mutant: mend them first")
        for number, mutant in enumerate(sample, 1):
            start = time.perf_counter()
            died = None if chosen.list else dies(mutant, Path(folder), chosen.timeout)
            if died is False:
                survivors[mutant.group].append(mutant)
            mark = {None: "", True: "died", False: "SURVIVED"}[died]
            took = "" if died is None else f"{time.perf_counter() - start:4.0f} s"
            place = f"{mutant.file}:{mutant.line}"
            print(f"{number:3}/{len(sample)} {mark:8} {took} {place}  {mutant.before}  →  {mutant.after}", flush=True)
    if chosen.list:
        return 0
    print("\n| | possible | sampled | died | |\n|---|---|---|---|---|")
    for group in groups:
        tried = sum(m.group == group for m in sample)
        died_here = tried - len(survivors[group])
        print(f"| `{group}` | {len(total[group])} | {tried} | {died_here} | {100 * died_here / tried:.0f} % |")
    dead = len(sample) - sum(map(len, survivors.values()))
    print(f"\n{dead} of {len(sample)} mutants died: {100 * dead / len(sample):.1f} %")
    return int(dead < 0.85 * len(sample))


if __name__ == "__main__":
    sys.exit(main())
