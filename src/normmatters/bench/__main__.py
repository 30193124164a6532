"""``python -m normmatters.bench layers --only cl,fp16 --out results/bench``: needs nothing but torch."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from normmatters import bench


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the library against its peers. A kernel whose check fails gets no number, and the exit code is 1."""
    parser = argparse.ArgumentParser(prog="python -m normmatters.bench", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{' '.join(bench.NAMES)}; all when none is named")
    parser.add_argument("--smoke", action="store_true", help="small shapes, a few seconds, any machine")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; a GPU where there is one by default")
    parser.add_argument(
        "--out", type=Path, help="folder of the JSON files (results/bench; none for --smoke and --only)"
    )
    parser.add_argument("--only", default="", help="rows by their words, such as cl,fp16,l1_lean; or all")
    parser.add_argument("--jobs", type=int, help="processes that compile beforehand (as many as fit on a GPU)")
    parser.add_argument("--share", type=_share, help=argparse.SUPPRESS)  # I/N: what those processes are started with
    chosen = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that has no ÷ is no reason to lose the times
        sys.stdout.reconfigure(errors="replace")
    try:
        return bench.run(
            chosen.names,
            smoke=chosen.smoke,
            device=chosen.device,
            out=chosen.out,
            only=[chosen.only] if chosen.only else [],
            jobs=chosen.jobs,
            share=chosen.share,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _share(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    return int(index), int(count)


if __name__ == "__main__":
    sys.exit(main())
