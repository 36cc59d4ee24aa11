"""Runs training: from a configuration to a run folder, resumably."""

from __future__ import annotations

import math
import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from afterdrop.data import is_own_text
from afterdrop.errors import DamagedError
from afterdrop.plain_text import one_line
from afterdrop.ranks import Ranks, Splitting, current
from afterdrop.train.build_task import build_task, load_set, require_same
from afterdrop.train.checkpoint import Checkpoint, keep_copy, read_checkpoint
from afterdrop.train.checks import TrainError, check_number, check_one_of
from afterdrop.train.config import TrainConfig, differences
from afterdrop.train.device import choose_device
from afterdrop.train.folder import RESUMES, Resume, RunFolder, locked
from afterdrop.train.objective import prior_scale
from afterdrop.train.progress import Progress, present
from afterdrop.train.replicas import check_batch
from afterdrop.train.saved_state import check_training_state, read_best_facts, read_training_facts
from afterdrop.train.track import Tracker
from afterdrop.train.trainer import Trainer
from afterdrop.train.training_loop import Loop, Watch


@dataclass(frozen=True)
class TrainResult:
    """The result of a call of `run`.

    Attributes:
        folder: The run folder.
        finished: Whether training is complete; if not, the same call continues it.
        reason: Why it ended: the reason of the schedule or of `watch`, the name of a signal,
            or `max_minutes`.
        message: A summary, with how to continue.
        step: Steps done.
        interval: Validation intervals done.
        best: The line of metrics of the best validation (`interval`, `xe`, `temperature`,
            `xe_optimal`, ...); empty if stopped before the first one.
    """

    folder: Path
    finished: bool
    reason: str
    message: str
    step: int
    interval: int
    best: dict[str, Any]


def run(
    config: TrainConfig,
    out: str | Path,
    *,
    data: str | Path | None = None,
    device: str | torch.device | None = None,
    max_minutes: float | None = None,
    progress: bool = True,
    resume: Resume = "auto",
    track: bool = False,
    ranks: Splitting | None = None,
    watch: Watch | None = None,
) -> TrainResult:
    """Trains a model, or continues to train it.

    Ctrl-C, SIGTERM and SIGHUP finish the step, save and return. The same call then continues; on a
    CPU bit for bit as if it had not been interrupted (with the same number of threads, which
    torch's sums depend on). A run that was killed continues from its last saved validation.

    Args:
        config: The configuration.
        out: The run folder. A run of the same configuration in it is resumed; anything else in it
            is refused.
        data: The folder of the named data sets; None is the environment variable AFTERDROP_DATA.
            To resume a run of a text of your own that has moved, its folder.
        device: Where to train; None is a GPU if there is one.
        max_minutes: Save and return after this number of minutes.
        progress: Whether to show a bar.
        resume: `"auto"`, `"require"` (`out` must hold a run) or `"refuse"` (it must not).
        track: Whether to write TensorBoard files.
        ranks: `"split"` trains data-parallel in the caller's process group: every rank makes this
            call and has a share of each batch; only rank 0 accesses `out` and shows the bar. The
            losses equal those of one process up to rounding.
        watch: Called with each validation's line of metrics. A reason that it returns stops the
            run there and becomes `result.reason`; the same call would resume.

    Raises:
        TrainError: If `out` holds something else; a `DivergedError` if training diverged.
        ConfigError: If the ranks cannot share the batch evenly.
        RankError: If there is no process group, or a rank has ended; the last good checkpoint is
            kept.
        DataError: If the data cannot be loaded or do not match the model.
        FileError: If the disk is full; the last good checkpoint is kept.
        ExtraError: If `track` is set and tensorboard is not installed.

    Example:
        >>> import tempfile
        >>> from afterdrop import recipes
        >>> config = recipes.load("digits-mlp").config.override({"schedule.intervals": 1})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = run(config, folder, progress=False)
        >>> result.finished, result.interval
        (True, 1)
    """
    check_one_of("resume", resume, RESUMES)
    if max_minutes is not None:
        check_number("max_minutes", max_minutes, above=0)
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    where = choose_device(device)
    group = current(ranks)
    check_batch(config.objective.batch_size, group)
    with ExitStack() as held:
        folder, there = _enter(held, config, Path(out), resume, group)
        if there and group.from_rank0(lambda: _finished(folder)):
            return _result(folder, None, group)
        # A new run reads the text that its configuration names; later, `data` says where it is.
        moved = data if there or not is_own_text(config.data.name) else None
        task = build_task(config, load_set(config, moved), where, group)
        with torch.random.fork_rng([where] if where.type == "cuda" else []):
            torch.manual_seed(config.seed)
            trainer = Trainer(config, task, task.build_model().to(where), group)
            _open(folder, trainer, data, there)
            return _train(trainer, folder, deadline, progress and group.first, track, watch)


def _enter(
    held: ExitStack, config: TrainConfig, path: Path, resume: Resume, ranks: Ranks
) -> tuple[RunFolder, bool]:
    """The folder, locked by rank 0, and whether it holds this run already."""

    def enter() -> bool:
        return held.enter_context(locked(path)).check(config, resume)

    for rank, content in enumerate(ranks.gather(config.to_dict())):
        if differing := differences(config, TrainConfig.from_dict(content)):
            raise TrainError(
                f"ranks {ranks.rank} and {rank} were given different configurations "
                f"({ranks.rank} → {rank}): {'; '.join(differing)}. Give all ranks the same."
            )
    return RunFolder(path), ranks.from_rank0(enter)


def _finished(folder: RunFolder) -> bool:
    if not (folder.last.exists() and folder.best.exists()):
        return False
    try:
        return read_training_facts(folder.last)["schedule"].stopped is not None
    except DamagedError:  # `_read_last` resumes from the one before it
        return False


def _open(folder: RunFolder, trainer: Trainer, data: str | Path | None, there: bool) -> None:
    """Writes the configuration of a new run, or restores an existing one."""
    task, config, ranks = trainer.task, trainer.config, trainer.ranks
    identity = task.identity()
    recorded = ranks.from_rank0(lambda: folder.read_config()[1]["data"] if there else identity)
    for found in ranks.gather(identity):
        require_same(recorded, found)
    if there:
        saved = _last(folder, ranks)
        if saved is not None:
            check_training_state(saved, trainer, folder.last)
            trainer.restore(saved)
        else:
            ranks.from_rank0(lambda: _require_new(folder))
        if ranks.first:
            folder.trim_metrics(trainer.schedule.interval)
        return
    scale = prior_scale(config.objective.l2_penalty, task.train_targets, task.window)
    model: Any = trainer.model
    # A text of the user's own has a path, which may be relative to the current folder.
    place = config.data.name if is_own_text(config.data.name) else data
    facts = {
        "model": asdict(model.config),
        "parameters": sum(p.numel() for p in trainer.parameters),
        "prior_scale": scale if math.isfinite(scale) else None,
        "unit": task.unit,
        "data": identity,
        "data_folder": None if place is None else str(Path(place).expanduser().resolve()),
    }
    if ranks.first:
        folder.write_config(config, facts)


def _require_new(folder: RunFolder) -> None:
    """Refuses to restart a run that has trained and whose last checkpoint is missing."""
    if any(line["interval"] > 0 for line in folder.read_metrics()):
        raise TrainError(
            f"{folder.path} holds a run without its checkpoint {folder.last.name}, as a finished "
            "trial of afterdrop tune does: it cannot be continued, and restarting it would replace "
            "its best weights; train into another folder"
        )


def _last(folder: RunFolder, ranks: Ranks) -> Checkpoint | None:
    """The checkpoint to resume from, read by rank 0 for all ranks."""
    read: list[Checkpoint] = []

    def facts() -> dict[str, Any] | None:
        if not folder.last.exists():
            return None
        read.append(_read_last(folder))
        return dict(read[0].facts)

    found = ranks.from_rank0(facts)
    if found is None:
        return None
    return Checkpoint(ranks.tensors_from_rank0(read[0].tensors if read else {}), found)


def _read_last(folder: RunFolder) -> Checkpoint:
    """The last checkpoint, or the one before it if the last one is damaged."""
    try:
        return read_checkpoint(folder.last)
    except DamagedError:
        if not folder.previous.exists():
            raise
        saved = read_checkpoint(folder.previous)
        step = read_training_facts(folder.previous)["step"]
        warnings.warn(
            f"the checkpoint {folder.last} is damaged; training resumes from the one before it "
            f"(step {step})",
            stacklevel=2,
        )
        # The next write makes the last checkpoint the one before it, which must not be damaged.
        keep_copy(folder.previous, folder.last)
        return saved


def _train(
    trainer: Trainer,
    folder: RunFolder,
    deadline: float | None,
    progress: bool,
    track: bool,
    watch: Watch | None,
) -> TrainResult:
    schedule = trainer.config.schedule
    writes = track and trainer.ranks.first
    tracker = Tracker(folder.tensorboard, trainer.step) if writes else None
    total = schedule.intervals * schedule.steps_per_interval
    bar = Progress(total, trainer.step, trainer.task.unit, shown=progress)
    message = ""
    if trainer.plain is not None:
        bar.note(f"Training without kernels, which is slower: {trainer.plain}.")
    try:
        reason = Loop(trainer, folder, bar, tracker, deadline, watch).run()
        result = _result(folder, reason, trainer.ranks)
        message = result.message
        return result
    finally:
        bar.close(message)
        if tracker is not None:
            tracker.close()


def _result(folder: RunFolder, reason: str | None, ranks: Ranks) -> TrainResult:
    """The result according to the folder, as rank 0 reads it, with the reason for stopping."""
    return TrainResult(folder.path, **ranks.from_rank0(lambda: _ending(folder, reason)))


def _ending(folder: RunFolder, reason: str | None) -> dict[str, Any]:
    last = read_training_facts(folder.last)
    best: dict[str, Any] = {}
    if folder.best.exists():
        best = {**read_best_facts(folder.best)}
    stopped = reason or last["schedule"].stopped
    words = [f"Finished: {stopped}." if reason is None else f"Stopped ({reason}) and saved."]
    if best:
        found = present(folder.read_config()[1]["unit"], best["xe_optimal"])
        words.append(f"Best {found} (interval {best['interval']}, T={best['temperature']:.3f}).")
    if reason is not None:
        words.append(
            f"To resume from step {last['step']}, run the same command "
            f"(out={one_line(folder.path)})."
        )
    return {
        "finished": reason is None,
        "reason": stopped,
        "message": " ".join(words),
        "step": last["step"],
        "interval": last["schedule"].interval,
        "best": best,
    }
