"""One run: from a config to a finished run folder, by one training loop for all experiments."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normmatters.lab import checkpoint
from normmatters.lab.config import RunConfig, config_hash
from normmatters.lab.data import ImageData, Shard, TextData, load_data
from normmatters.lab.errors import RunError, describe_error
from normmatters.lab.execution import Execution, execution_for, first_process_first, from_first_process, process_group
from normmatters.lab.files import write_atomic
from normmatters.lab.models import build_model
from normmatters.lab.models.layers import Translator, draw_from
from normmatters.lab.objective import Classification, Objective, Translation
from normmatters.lab.regimes import Regime, build_regime, find_invariant, find_recording
from normmatters.lab.run_folder import RunFolder, RunResult
from normmatters.lab.steps import Arithmetic, Evaluation, Stepper
from normmatters.lab.translate import bleu, translate
from normmatters.nn.sync import convert_sync_batchnorm

Progress = Callable[[dict[str, Any]], None]


def train(
    config: RunConfig,
    run_dir: str | Path,
    *,
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
    resume: bool = True,
    reference_dir: str | Path | None = None,
    execution: Execution | None = None,
) -> RunResult:
    """Run ``config`` in ``run_dir``, from its last checkpoint if there is one. A finished run is returned as it is.

    Under ``torchrun`` (WORLD_SIZE > 1) the processes share each batch: gradients are averaged, batch norms
    synchronized, and the first process writes. ``data.batch_size`` is that of all processes together.

    Args:
        data_dir: where the data sets are; None: ``NORMMATTERS_DATA``, else ``./data``.
        progress: called with a dict: "messages" of what the run could not do as it was asked to, once; "step" and
            "steps" about once per second; and each epoch's metrics.
        resume: False throws away what the folder holds and begins again, once all that the new run needs is there.
        reference_dir: the run folder that ``optim.reference`` means, where it is not beside this one.
        execution: how the process is used; None: as ``runtime.compile`` and the device want it.

    Returns:
        Status "finished", or "nan" where the loss became NaN or infinite; with the last metrics.

    Raises:
        RunError: the folder cannot be written, the disk is full, another process or another run is in the folder.
        ValueError: bad config or data. The reason is in ``error.json`` too, unless an earlier run is still there.

    Example::

        >>> train(from_dict({"optim": {"epochs": 2}}), "runs/digits").metrics["val_acc"]  # doctest: +SKIP
    """
    device, shard = process_group(config)
    execution = execution or execution_for(config, device, shard.world)
    folder, first = RunFolder(Path(run_dir)), shard.rank == 0
    with contextlib.ExitStack() as stack:
        ended: RunResult | None = None
        if first:
            stack.enter_context(folder)
            if resume:
                folder.check(config)
                ended = folder.ended()
        ended = from_first_process(ended, shard)  # all of them train, or none
        if ended is not None:
            return ended
        begun_with = from_first_process(folder.threads() if first and resume else None, shard)
        config = _with_threads(config, begun_with, device, folder.path)
        try:
            with execution.settings(config, device):
                if first and resume:
                    folder.start(config, device)
                with execution.setting_up():
                    torch.manual_seed(config.seed)
                    cache = folder.path if resume and folder.path.is_dir() else None
                    run = TrainingRun(config, folder, device, shard, execution, data_dir, reference_dir, cache)
                    if first and not resume:  # not before: a misspelt --data-dir must not cost a finished run
                        folder.clear()
                        folder.start(config, device)
                        if isinstance(run.data, TextData):
                            run.data.save_tokenizer(folder.path)
                    start = run.resume()
                with execution.training():
                    return run.train(start, progress if progress and first else (lambda _: None))
        except Exception as error:
            if first:
                reason = describe_error(error)
                details = {"traceback": traceback.format_exc()} if reason["kind"] == "exception" else {}
                folder.fail(**reason, **details)
            raise


def _with_threads(config: RunConfig, begun_with: int | None, device: torch.device, folder: Path) -> RunConfig:
    """The config with its number of threads, which stays what it was when the run began: sums depend on it."""
    wanted = config.runtime.threads
    if wanted and begun_with not in (None, wanted) and device.type == "cpu":
        problem = f"began with {begun_with} threads, and its sums would round differently with {wanted}"
        how = f"--set runtime.threads={begun_with} resumes it, --fresh begins again"
        raise RunError("other_run", f"{folder}: {problem}: {how}")
    threads = wanted or begun_with or torch.get_num_threads()
    return replace(config, runtime=replace(config.runtime, threads=threads))


class TrainingRun:
    """Everything of one run, built in the order in which its parts depend on each other."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        device: torch.device,
        shard: Shard,
        execution: Execution,
        data_dir: str | Path | None,
        reference_dir: str | Path | None,
        cache: Path | None,
    ) -> None:
        self.config, self.folder, self.device, self.shard = config, folder, device, shard
        optim, runtime = config.optim, config.runtime
        with first_process_first(shard):  # it downloads, and learns the tokenizer, for all
            self.data = load_data(config.data, data_dir, seed=config.seed, device=device, shard=shard, cache=cache)
        text = isinstance(self.data, TextData)
        execution.pause()
        self.steps = self.data.train.steps
        recording = find_recording(folder.path, config, reference_dir) if optim.reference else None
        model = build_model(config.model, self.data).to(device)
        self.objective: Objective
        if isinstance(self.data, ImageData):
            self.objective = Classification(self.data, optim.label_smoothing, device)
        else:
            self.objective = Translation(self.data, optim.label_smoothing, shard)
        execution.pause()
        invariant = find_invariant(config, model, self.objective.example(device))
        execution.pause()
        if runtime.channels_last and not text:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if shard.world > 1:
            model = convert_sync_batchnorm(model)
        self.model: nn.Module = model
        self.regime: Regime = build_regime(config, model, self.steps, invariant, recording)
        wrapped = model
        if runtime.compile == "compile":
            wrapped = torch.compile(wrapped, dynamic=text)  # type: ignore[assignment]
        if shard.world > 1:
            ids = [device.index] if device.type == "cuda" else None
            wrapped = nn.parallel.DistributedDataParallel(wrapped, device_ids=ids)
        self.arithmetic = Arithmetic(config.precision, device)
        self.scaler = torch.amp.GradScaler(device.type) if config.precision.amp == "fp16" else None
        self.generator: torch.Generator | None = None
        if text and runtime.compile != "compile":  # torch.compile cannot use generators
            self.generator = torch.Generator(device).manual_seed((config.seed * 1_000_003 - 1) % (1 << 63))
            draw_from(model, self.generator)
        self.stepper, self.evaluation = execution.prepare(
            Stepper(wrapped, self.objective, self.regime, self.arithmetic, self.scaler, optim.clip_norm),
            Evaluation(model, self.objective, self.arithmetic, execution.pause),
            self.data,
            self.generator,
        )
        self.pause = execution.pause
        self._reseed(0)
        self.rows: list[dict[str, Any]] = []
        self.messages: list[str] = []
        if runtime.compile == "cudagraph" and not execution.uses_graphs:
            self.messages.append("runtime.compile=cudagraph needs one process and a GPU: the steps ran eagerly")

    def train(self, start: int, progress: Progress) -> RunResult:
        """All epochs from number ``start`` on."""
        with contextlib.closing(writer) if (writer := self._tensorboard(start)) else contextlib.nullcontext():
            return self._epochs(start, writer, progress)

    def _epochs(self, start: int, writer: Any, progress: Progress) -> RunResult:
        config, total = self.config, self.config.optim.epochs
        saved_at = time.monotonic()
        about = {"epochs": total, "steps": total * self.steps}
        progress({"epoch": start, "step": start * self.steps, **about, "messages": self.messages})
        for epoch in range(start, total):
            row = self._epoch(epoch, lambda step: progress({"step": step, **about}))
            last = epoch + 1 == total
            if row["train_loss"] is None:
                message = f"the training loss is NaN or infinite in epoch {epoch + 1}, by step {row['step']}"
                return self._ended_nan(message, row)
            if last or (epoch + 1) % config.runtime.eval_every == 0:
                row |= self._evaluate(last)
            self.rows.append(row)
            if self.shard.rank == 0:
                self.folder.append(row)
                if writer is not None:
                    for key, value in row.items():
                        if isinstance(value, int | float) and key not in ("epoch", "step"):
                            writer.add_scalar(key, value, row["step"])
                progress({**row, **about})
                due = (epoch + 1) % config.runtime.checkpoint_every == 0
                old = time.monotonic() - saved_at >= config.runtime.checkpoint_seconds
                if due and old and not last:
                    self._save(epoch + 1)
                    saved_at = time.monotonic()
        return self._finish(saved=start == total)

    def _epoch(self, epoch: int, heartbeat: Callable[[int], None]) -> dict[str, Any]:
        started = reported = time.monotonic()
        self.model.train()
        self.stepper.sums.zero_()
        step = epoch * self.steps
        recorder = self.regime.recorder
        before = recorder.steps if recorder is not None else 0
        for batch in self.data.train.epoch(epoch):
            self.stepper(batch, step)
            step += 1
            if (now := time.monotonic()) - reported > 1:
                reported = now
                heartbeat(step)
        sums = self._total(self.stepper.sums)  # the epoch's only wait for the device
        seconds = time.monotonic() - started
        row: dict[str, Any] = {"epoch": epoch + 1, "step": step, "lr": self.regime.lr}
        row |= self.objective.epoch_metrics(sums, "train")
        if row["train_loss"] is not None:
            if recorder is not None and recorder.steps > before:  # fp16 may have left out all of a few steps
                recorder.end_epoch()
            row |= self.regime.describe()
        return row | {"seconds": seconds, "time_per_step": seconds / self.steps}

    @torch.no_grad()
    def _evaluate(self, last: bool) -> dict[str, Any]:
        sums = self._total(self.evaluation(self.data.val))
        row: dict[str, Any] = dict(self.objective.epoch_metrics(sums, "val"))
        when = self.config.runtime.bleu
        if isinstance(self.data, TextData) and self.shard.rank == 0 and (when == "epoch" or (when == "last" and last)):
            assert isinstance(self.model, Translator)
            with self.arithmetic():
                beam, alpha = self.config.runtime.beam, self.config.runtime.length_penalty
                tokens = 16384 if self.device.type == "cuda" else 2048
                lines = translate(
                    self.model, self.data, self.device, beam=beam, alpha=alpha, tokens=tokens, before_token=self.pause
                )
            row["bleu"] = bleu(lines, self.data.references)
        return row

    def _total(self, sums: Tensor) -> list[float]:
        """Over all processes, on the host."""
        if self.shard.world > 1:
            dist.all_reduce(sums)
        values: list[float] = sums.tolist()
        return values

    def _state(self, epoch: int) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "config": config_hash(self.config),
            "rows": json.dumps(self.rows),
            "model": self.model.state_dict(),
            "regime": self.regime.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "random": checkpoint.random_state(),
            "dropout": self.generator.get_state() if self.generator is not None else None,
        }

    def _save(self, epoch: int, keep: int | None = None) -> None:
        keep = keep or self.config.runtime.keep_checkpoints
        checkpoint.save(self.folder.checkpoints, epoch, self._state(epoch), keep)

    def resume(self) -> int:
        """Load the newest good checkpoint; the number of epochs that are done."""
        state, damaged = None, list[str]()
        if self.shard.rank == 0:
            where = self.device if self.shard.world == 1 else "cpu"
            state, damaged = checkpoint.load(self.folder.checkpoints, where)
        state = from_first_process(state, self.shard)  # the folder may be on the first process's machine only
        self.messages += damaged
        if state is None:
            if self.shard.rank == 0:
                self.folder.rewrite([])
            return 0
        if not isinstance(state, dict) or state.get("config") != config_hash(self.config):
            raise RunError("checkpoint", f"the checkpoint in {self.folder.checkpoints} is of another config")
        try:
            epoch = self._restore(state)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, RunError):
                raise
            problem = f"the last checkpoint in {self.folder.checkpoints} does not fit this run"
            detail = (str(error) or type(error).__name__).splitlines()[0]
            raise RunError("checkpoint", f"{problem} ({detail}): remove it, or begin again (--fresh)") from error
        if self.shard.rank == 0:
            self.folder.rewrite(self.rows)
        return epoch

    def _restore(self, state: dict[str, Any]) -> int:
        epoch, self.rows = int(state["epoch"]), json.loads(state["rows"])
        if (before := self.rows[-1]["step"] // epoch) != self.steps:  # a learning rate, or a norm, of another step
            problem = f"an epoch had {before} steps and has {self.steps} now: the data are not those that it began with"
            raise RunError("checkpoint", f"{self.folder.path}: {problem}; give it those, or begin again (--fresh)")
        self.model.load_state_dict(state["model"])
        self.regime.load_state_dict(state["regime"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        checkpoint.set_random_state(state["random"])
        if self.generator is not None:
            self.generator.set_state(state["dropout"].cpu())
        self._reseed(epoch)
        return epoch

    def _reseed(self, epoch: int) -> None:
        """The models start equal in all processes, but their dropout must differ."""
        if self.shard.rank > 0:
            seed = (self.config.seed * 1_000_003 + epoch) * self.shard.world + self.shard.rank
            torch.manual_seed(seed)
            if self.generator is not None:
                self.generator.manual_seed(seed % (1 << 63))

    def _finish(self, saved: bool) -> RunResult:
        summary = self._summary("finished")
        if self.shard.rank == 0:
            self._save_norms()
            if not saved:  # or there would be a moment without it, when it is the only one
                self._save(len(self.rows), keep=1)
            self.folder.finish(summary)
        return RunResult("finished", self.folder.path, summary)

    def _ended_nan(self, message: str, row: dict[str, Any]) -> RunResult:
        summary = {**self._summary("nan"), "epoch": row["epoch"], "step": row["step"]}
        if self.shard.rank == 0:
            self._save_norms()
            self.folder.fail("nan", message, epoch=row["epoch"], metrics=summary)
        return RunResult("nan", self.folder.path, summary, message)

    def _save_norms(self) -> None:
        recorder = self.regime.recorder
        if recorder is not None and recorder.steps and self.rows:
            with tempfile.TemporaryDirectory() as scratch:  # a full disk there is not the run's, and tells so itself
                recorder.save(f"{scratch}/norms")
                write_atomic(self.folder.path / "norms.safetensors", Path(scratch, "norms").read_bytes())

    def _summary(self, status: str) -> dict[str, Any]:
        seconds = [r["seconds"] for r in self.rows]
        summary: dict[str, Any] = {
            "status": status,
            "hash": config_hash(self.config),
            **(self.rows[-1] if self.rows else {}),
        }
        for key, best in (("val_acc", max), ("val_ppl", min), ("bleu", max)):
            values = [r[key] for r in self.rows if r.get(key) is not None]
            if values:
                summary[f"best_{key}"] = best(values)
        steps = [r["time_per_step"] for r in self.rows]
        summary |= {
            "seconds": math.fsum(seconds),
            "time_per_step": sorted(steps)[len(steps) // 2] if steps else None,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps_per_epoch": self.steps,
        }
        if self.device.type == "cuda" and self.config.runtime.side_by_side == 1:  # else it is that of all together
            summary["peak_memory"] = torch.cuda.max_memory_allocated(self.device)
        if self.messages:
            summary["messages"] = self.messages
        return summary

    def _tensorboard(self, start: int) -> Any:
        if not self.config.runtime.tensorboard or self.shard.rank:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("runtime.tensorboard needs tensorboard: pip install tensorboard") from None
        return SummaryWriter(str(self.folder.path / "tensorboard"), purge_step=start * self.steps)
