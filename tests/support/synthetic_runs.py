"""Run folders as the trainer leaves them, without training: the report's tests decide what they say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from normmatters.lab import config
from normmatters.lab.cells import load_cell, load_cells


def write_run(
    root: Path,
    cell: str,
    *,
    seed: int = 0,
    final: float = 0.9,
    preset: str = "quick",
    epochs: int = 6,
    device: str = "cpu",
    seconds: float = 1.0,
    memory: float | None = None,
    diverge: bool = False,
    finished: bool = True,
    error: str | None = None,
    speed: float = 2.0,
    bleu: float = 20.0,
    ppl: float = 5.0,
) -> Path:
    """A run of ``cell`` whose accuracy rises to ``final``; the higher ``speed``, the sooner."""
    cfg = load_cell(cell).config(preset, seed)
    folder = root / cfg.experiment / cfg.cell / f"seed{seed}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json(cfg))
    (folder / "environment.json").write_text(json.dumps({"device": device, "torch": "2.13.0"}))
    text = cfg.data.name in ("text", "numbers")
    rows: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        part = 1 - math.exp(-speed * epoch / epochs * 3)
        last = epoch == epochs
        row = {"epoch": epoch, "train_loss": 2.3 * (1 - part) + 0.1, "val_loss": 2.3 * (1 - part) + 0.2, "lr": 0.1}
        row |= {"seconds": seconds, "norm": 1 + 0.1 * epoch, "effective_step": 0.1 / (1 + 0.1 * epoch) ** 2}
        row["val_ppl" if text else "val_acc"] = (
            (ppl if last else ppl + 50 * (1 - part)) if text else 100 * (final if last else final * part)
        )
        if last and text:
            row["bleu"] = bleu
        if not (diverge and last):  # the epoch in which the loss is no number is not logged
            rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if diverge:
        (folder / "error.json").write_text(json.dumps({"kind": "nan", "message": "loss is nan"}))
    elif error is not None:
        (folder / "error.json").write_text(json.dumps({"type": "RuntimeError", "message": error}))
    elif finished:
        summary = {"status": "finished", "seconds": seconds * epochs}
        summary |= {"peak_memory": memory} if memory is not None else {}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def write_all(root: Path, seeds: int = 2, preset: str = "quick") -> None:
    """One run a seed for every cell that has runs of its own, a little different for each."""
    cells = [c for c in load_cells() if c.same_as is None]
    for i, cell in enumerate(cells):
        for seed in range(seeds):
            final = 0.9 + 0.002 * (i % 7) + 0.001 * seed
            write_run(root, cell.id, seed=seed, final=final, preset=preset, epochs=12, speed=1 + 0.2 * (i % 5))
