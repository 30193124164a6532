"""The mutation check itself: its mutants are valid, differ from the code in one place, and leave the source alone."""

from __future__ import annotations

import ast
import functools
import importlib.util
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools" / "mutate.py")
assert spec is not None
assert spec.loader is not None
mutate = importlib.util.module_from_spec(spec)
sys.modules["mutate"] = mutate
spec.loader.exec_module(mutate)


@functools.cache
def mutants(group: str) -> list[mutate.Mutant]:
    return list(mutate.mutants(group))


@pytest.mark.parametrize("group", mutate.GROUPS)
def test_a_mutant_is_one_change(group: str) -> None:
    found = mutants(group)
    assert len(found) > 100
    for mutant in random.Random(0).sample(found, 8):
        original = ast.unparse(ast.parse((mutate.PACKAGE / mutant.file).read_text(encoding="utf-8"))).splitlines()
        source = mutant.source()
        changed = source.splitlines()
        compile(source, mutant.file, "exec")
        assert mutant.before != mutant.after
        differing = [pair for pair in zip(original, changed) if pair[0] != pair[1]]
        assert differing
        if len(original) == len(changed):
            assert len(differing) == 1


@pytest.mark.parametrize(
    ("code", "after"),
    [
        ("a + b", "a - b"),
        ("a < b", "a <= b"),
        ("a and b", "a or b"),
        ("not a", "a"),
        ("7", "8"),
        ("0.5", "1.0"),
        ("True", "False"),
        ("a if c else b", "b if c else a"),
        ("'text'", None),
        ("a | b", None),
    ],
)
def test_what_is_changed_into_what(code: str, after: str | None) -> None:
    new = mutate.changed(ast.parse(code, mode="eval").body)
    assert (None if new is None else ast.unparse(new)) == after


def test_words_and_types_are_no_code() -> None:
    text = 'def f(x: int = 3) -> "a + b":\n    """1 + 1"""\n    raise ValueError(f"{1 + 1}")\n'
    tree = ast.parse(text)
    nodes = [getattr(p, n) if i is None else getattr(p, n)[i] for p, n, i in mutate.places(tree)]
    assert [ast.unparse(node) for node in nodes if mutate.changed(node)] == ["3"]


def test_every_file_has_its_tests() -> None:
    for group in mutate.GROUPS:
        for mutant in {m.file: m for m in mutants(group)}.values():
            for tests in mutate.stages(mutant):
                assert all((ROOT / "tests" / test).exists() for test in tests), (mutant.file, tests)
