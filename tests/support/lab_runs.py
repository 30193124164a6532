"""Small runs for the lab's tests: real digits, small nets, few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normmatters.lab.config import RunConfig, from_dict
from normmatters.lab.run_folder import read_metrics

TIMES = ("seconds", "time_per_step")


def small_run(**sections: Any) -> RunConfig:
    """A run of 3 epochs of 6 steps, about half a second; ``sections`` change it."""
    base: dict[str, dict[str, Any]] = {
        "data": {"name": "digits", "batch_size": 50, "train_size": 300, "val_size": 200},
        "model": {"name": "small_cnn", "norm": "l1", "width": 0.5},
        "optim": {"epochs": 3, "lr": 0.1, "milestones": [2], "weight_decay": 5e-3, "last_layer_weight_decay": 5e-4},
        "runtime": {"checkpoint_seconds": 0.0, "device": "cpu"},
    }
    top = {k: v for k, v in sections.items() if not isinstance(v, dict)}
    tables = {k: {**base.get(k, {}), **v} for k, v in sections.items() if isinstance(v, dict)}
    return from_dict({**base, **tables, **top})


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """A run's metrics without what the clock decides."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(run_dir / "metrics.jsonl")]
