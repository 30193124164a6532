"""Rows as a plain text table while they come, as Markdown, and in the marked places of a Markdown file.

``python -m normmatters.bench.report README.md`` fills every section between ``<!-- bench:NAME -->`` and
``<!-- /bench -->`` with the table of ``results/bench/NAME.json``. Words after the name choose rows, as ``--only`` does:
``<!-- bench:layers cl fp16 native_compiled l1_lean -->``. ``<!-- bench:cpu summary -->`` has means and extremes,
``<!-- bench:cpu headlines -->`` those of the most used parts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normmatters.bench import axes_of, cpu
from normmatters.bench.harness import Selection, passes, replace

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A heading and the text under it; numbers that a row does not have are left empty."""

    head: str
    text: Callable[[Row], str]
    number: bool = True


def _number(head: str, key: str, digits: int = 2, factor: float = 1.0, unit: str = "") -> Column:
    def text(row: Row) -> str:
        value = row.get(key)
        return "" if value is None else f"{value * factor:.{digits}f}{unit}"

    return Column(head, text)


def _name(head: str, key: str) -> Column:
    return Column(head, lambda row: str(row.get(key) or ""), number=False)


def _faster(row: Row) -> str:
    ratio = row.get("ratio")
    return "" if not ratio else f"{1 / ratio:.2f}×"


_GIB = 2.0**-30
_MB = 1e-6
_LAYER = [
    _number("fwd ms", "fwd_ms", 3),
    _number("bwd ms", "bwd_ms", 3),
    _number("passes fwd", "fwd_passes", 1),
    _number("passes bwd", "bwd_passes", 1),
    Column("faster than native", _faster),
    _number("kept ÷ x", "saved_share"),
    _number("peak MB", "peak_bytes", 0, _MB),
    _number("eager fwd ms", "eager_fwd_ms", 3),
    _number("eager bwd ms", "eager_bwd_ms", 3),
]
_LAYER_NAMES = [_name("dtype", "dtype"), _name("layout", "layout"), _name("form", "form"), _name("shape", "size")]
COLUMNS: dict[str, list[Column]] = {
    "layers": [*_LAYER_NAMES, _name("variant", "variant"), *_LAYER],
    "cpu": [
        _name("part", "part"),
        *_LAYER_NAMES,
        _name("threads", "threads"),
        _name("variant", "variant"),
        _number("ms", "ms", 3),
        *_LAYER[:2],
        _number("time ÷ native", "ratio"),
        _number("passes", "passes", 1),
        _number("ns per element", "ns_per_element", 3),
        _number("kept ÷ x", "saved_share"),
        _number("saved MB", "saved_bytes", 0, _MB),
        _number("÷ native", "memory_ratio"),
        _number("peak ÷ x", "peak_share", 1),
    ],
    "layernorm": [_name("dtype", "dtype"), _name("shape", "size"), _name("variant", "variant"), *_LAYER],
    "resnet50": [
        _name("dtype", "dtype"),
        _name("mode", "mode"),
        _name("variant", "variant"),
        _number("ms per step", "ms", 1),
        _number("÷ native compiled", "ratio"),
        _number("÷ native, same mode", "ratio_same_mode"),
        _number("ms as CUDA graph", "graph_ms", 1),
        _number("÷ native, as graph", "graph_ratio_same_mode"),
        _number("GiB after forward", "after_forward_bytes", 1, _GIB),
        _number("÷ native compiled", "memory_ratio"),
        _number("peak GiB", "peak_bytes", 1, _GIB),
    ],
    "weightnorm": [
        _name("part", "part"),
        _name("mode", "mode"),
        _name("variant", "variant"),
        _number("ms", "ms", 2),
        _number("+ ms over none", "added_ms", 2),
        _number("ms as CUDA graph", "graph_ms", 2),
    ],
    "optim": [
        _name("optimizer", "variant"),
        _name("mode", "mode"),
        _number("ms per step", "ms", 3),
        _number("÷ SGD(foreach=True)", "ratio"),
        _number("+ ms over it", "added_ms", 3),
    ],
}
_WIDTHS = {"shape": 15, "variant": 19, "optimizer": 31, "form": 8, "mode": 8, "part": 11}


def text_header(bench: str) -> str:
    """The head of the table that is printed row by row."""
    return "  ".join(_pad(column, column.head) for column in COLUMNS[bench])


def with_passes(row: Row, memory_bandwidth: float | None) -> Row:
    """The row with its times in passes over memory, by this bandwidth and no other; without one there are none."""
    result = {key: value for key, value in row.items() if not key.endswith("_passes")}
    for name in ("fwd", "bwd"):
        if memory_bandwidth and f"{name}_ms" in row and "tensor_bytes" in row:
            result[f"{name}_passes"] = passes(row[f"{name}_ms"], memory_bandwidth, row["tensor_bytes"])
    if memory_bandwidth and "ms" in row and "tensor_bytes" in row:
        result["passes"] = passes(row["ms"], memory_bandwidth, row["tensor_bytes"])
    return result


def text_row(bench: str, row: Row) -> str:
    """One row of it: the numbers, or the reason why there are none."""
    names = [_pad(column, column.text(row)) for column in COLUMNS[bench] if not column.number]
    if row["status"] != "ok":
        return "  ".join([*names, _verdict(row)])
    numbers = (_pad(column, column.text(row)) for column in COLUMNS[bench] if column.number)
    return "  ".join([*names, *numbers, *([f"({row['note']})"] if row["note"] else [])]).rstrip()


def _pad(column: Column, text: str) -> str:
    width = max(len(column.head), _WIDTHS.get(column.head, 6))
    return text.rjust(width) if column.number else text.ljust(width)


def _verdict(row: Row) -> str:
    return f"{row['status']}: {row['note']}" if row["note"] else str(row["status"])


def markdown(data: Mapping[str, Any], only: Iterable[str] = ()) -> str:
    """The table of one benchmark's JSON, and a line that says where it was measured.

    Args:
        data: what ``results/bench/NAME.json`` holds.
        only: words that choose rows, as in :class:`~normmatters.bench.harness.Selection`.
    """
    bench = data["bench"]
    chosen = _chosen(bench, data["rows"], only)
    rows = [with_passes(row, data.get("memory_bandwidth")) for row in chosen]
    # A column that is empty everywhere, such as a GPU's memory on a CPU, is left out; so are names that never change.
    columns = [c for c in COLUMNS[bench] if any(c.text(row) for row in rows)]
    if not rows:
        return f"No rows of it were measured.\n\n{_where(data, rows)}"
    if not any(c.number for c in columns):
        columns.append(Column("result", lambda row: ""))
    lines = [
        "| " + " | ".join(c.head for c in columns) + " |",
        "|" + "|".join("--:" if c.number else "---" for c in columns) + "|",
    ]
    for row in rows:
        cells = [c.text(row) for c in columns]
        if row["status"] != "ok":
            first = next(i for i, c in enumerate(columns) if c.number)
            cells[first] = _verdict(row).replace("|", "\\|")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _where(data, rows)])


def _where(data: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> str:
    env = data["environment"]
    parts = [env["device"], f"torch {env['torch']}"]
    parts += [f"triton {env['triton']}"] if env.get("cuda") else [f"{env['threads']} threads"]
    if data.get("memory_bandwidth"):
        speed = data["memory_bandwidth"]
        parts.append(f"memory {speed / 1e12:.2f} TB/s" if env.get("cuda") else f"memory {speed / 1e9:.1f} GB/s")
    if env.get("commit"):
        whole = str(env["commit"])
        parts.append(f"commit {whole[:12]}{'+' if whole.endswith('+') else ''}")
    # None is the error of a row without a check of its own: a whole step with weight norm.
    checked = all(row.get("error", 0.0) is not None for row in rows if row["status"] == "ok")
    checks = " Each row was checked against float64 first." if checked else ""
    return f"<sub>{', '.join(parts)}, {env['date'][:10]}.{checks}</sub>"


def _chosen(bench: str, rows: Sequence[Row], words: Iterable[str]) -> list[Row]:
    """Rows that have, of every name column that any word may occur in, one of the words. A run may lack some rows."""
    keys = ("dtype", "layout", "form", "size", "threads", "variant", "mode", "part")
    axes = axes_of(bench)
    values = {key: [*{str(row[key]) for row in rows if key in row}, *axes.get(key, ())] for key in keys}
    selection = Selection.of(words, [values])
    return [row for row in rows if selection.allows(values, {key: str(row.get(key)) for key in keys})]


_SECTION = re.compile(r"(<!-- bench:(\w+)((?: [\w.]+)*) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def fill(text: str, results: Path) -> str:
    """``text`` with the marked sections filled from ``results/NAME.json``. Filling twice changes nothing."""
    if text.count("<!-- bench:") != len(_SECTION.findall(text)):
        raise ValueError("a <!-- bench:NAME --> section is not closed by <!-- /bench -->, or its mark is misspelt")

    def table(match: re.Match[str]) -> str:
        path = results / f"{match[2]}.json"
        if not path.exists():
            raise ValueError(f"{path} does not exist: run `normmatters bench {match[2]}` first")
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("smoke"):
            raise ValueError(f"{path} is of --smoke, whose times mean nothing: run `normmatters bench {match[2]}`")
        words = match[3].split()
        if words in (["summary"], ["headlines"]) and match[2] == "cpu":
            return f"{match[1]}{cpu.summary(data['rows'], whole=words == ['summary'])}\n{match[4]}"
        return f"{match[1]}{markdown(data, words)}\n{match[4]}"

    return _SECTION.sub(table, text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the sections of the named Markdown files."""
    parser = argparse.ArgumentParser(prog="python -m normmatters.bench.report", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, default=Path("results/bench"), help="folder of the JSON files")
    chosen = parser.parse_args(arguments)
    try:
        filled = {path: fill(path.read_text(encoding="utf-8"), chosen.results) for path in chosen.files}
        for path, text in filled.items():
            replace(path, text)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
