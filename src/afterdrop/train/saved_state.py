"""Checks of a checkpoint's content, before a model or a training is built from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

import torch
from torch import Tensor

from afterdrop.errors import FileError
from afterdrop.models import LanguageModel
from afterdrop.train.checkpoint import Checkpoint, read_facts
from afterdrop.train.schedule import ScheduleState
from afterdrop.train.trainer import Trainer
from afterdrop.train.two_tailed import Tails
from afterdrop.typed_records import read_record

_Facts = TypeVar("_Facts")
_REMEDY = "use another checkpoint, or train again in a new folder"


class TrainingFacts(TypedDict):
    """The facts of the checkpoint that training resumes from."""

    step: int
    schedule: ScheduleState
    optimiser: list[dict[str, Any]]
    averaged: int | None
    tails: NotRequired[Tails | None]  # checkpoints of earlier versions do not have it
    seconds: float


class BestFacts(TypedDict):
    """The facts of the best weights: the line of metrics of their validation."""

    interval: int
    xe_optimal: float
    temperature: float


def typed_facts(kind: type[_Facts], facts: object, path: Path) -> _Facts:
    """The facts of a checkpoint, each of its declared type.

    Raises:
        FileError: If one is missing or of another type; names the file and the fact.
    """
    try:
        return read_record(kind, facts)
    except ValueError as error:
        raise FileError(f"{path} is damaged ({error}); {_REMEDY}") from error


def read_training_facts(path: Path) -> TrainingFacts:
    """The facts of a checkpoint to resume from."""
    return typed_facts(TrainingFacts, read_facts(path), path)


def read_best_facts(path: Path) -> BestFacts:
    """The facts of a checkpoint of the best weights."""
    return typed_facts(BestFacts, read_facts(path), path)


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Requires tensors of the same names, shapes and types as those expected.

    Raises:
        FileError: If they differ; names the file and the first difference.
    """
    for name in (*expected, *found):
        wanted, there = _form(expected.get(name)), _form(found.get(name))
        if wanted != there:
            raise FileError(
                f"{path} is damaged or of another model ({name} is {there}, and the configuration "
                f"asks for {wanted}); {_REMEDY}"
            )


def check_training_state(saved: Checkpoint, trainer: Trainer, path: Path) -> None:
    """Requires everything that a training resumes from, in the form of that training.

    Raises:
        FileError: If something is missing or does not fit; names it.
    """
    facts = typed_facts(TrainingFacts, saved.facts, path)
    parameters = dict(trainer.model.named_parameters())
    check_tensors(saved.group("model"), parameters, path)
    if facts["averaged"] is not None:
        check_tensors(saved.group("average"), parameters, path)
    _check_tails(saved, facts, trainer, path)
    _check_carried(saved.group("carried"), trainer, path)
    _check_optimiser(saved, list(parameters.values()), path)
    others = {
        "random.cpu": torch.get_rng_state(),
        "loss_total": trainer.loss_total,
        "effective_total": trainer.effective_total,
    }
    if trainer.penalties:
        others["penalty_totals"] = trainer.penalty_totals
    check_tensors({n: saved.tensors[n] for n in others if n in saved.tensors}, others, path)
    try:
        torch.Generator().set_state(saved.tensors["random.cpu"])
        groups = trainer.optimiser.state_dict()["param_groups"]
        _require_like(facts["optimiser"], groups, "optimiser")
        if [group["params"] for group in facts["optimiser"]] != [g["params"] for g in groups]:
            raise ValueError("optimiser.params are not in the order of the parameters")
        _check_progress(facts, trainer.config.schedule.steps_per_interval)
    except (RuntimeError, ValueError) as error:
        raise FileError(f"{path} is damaged ({error}); {_REMEDY}") from error


def _check_tails(saved: Checkpoint, facts: TrainingFacts, trainer: Trainer, path: Path) -> None:
    """Requires both means of two-tailed averaging, and none of another averaging."""
    tails, count = facts.get("tails"), facts["averaged"] or 0
    two = trainer.config.averaging.kind == "two-tailed"
    if two != (tails is not None) or (tails is not None and not 0 <= tails.frozen <= count):
        raise FileError(f"{path} is damaged (tails is {tails!r:.60}); {_REMEDY}")
    if tails is not None and 0 < tails.frozen < count:
        for group in ("short", "frozen"):
            check_tensors(saved.group(group), dict(trainer.model.named_parameters()), path)


def _check_progress(facts: TrainingFacts, steps: int) -> None:
    """Requires that steps, intervals and the best values so far belong together."""
    state, step = facts["schedule"], facts["step"]
    done = max(state.interval, 0) * steps
    if not (
        -1 <= state.best_interval <= state.interval == len(state.bests) - 1
        and done <= step <= done + steps * (state.interval >= 0)
        and (facts["averaged"] or 0) >= 0
        and state.drops >= 0
    ):
        raise ValueError(f"step {step} does not belong to interval {state.interval}")


def _check_carried(found: Mapping[str, Tensor], trainer: Trainer, path: Path) -> None:
    """Requires the state of every layer of a language model, or of none."""
    if not found:
        return
    objective, model = trainer.config.objective, trainer.model
    sizes = model.config.hidden_sizes if isinstance(model, LanguageModel) else ()
    rows = objective.batch_size * objective.samples
    dtype = next(iter(found.values())).dtype  # that of the kernels, on a GPU
    expected = {
        f"{layer}.{part}": torch.empty(rows, size, dtype=dtype if dtype.is_floating_point else None)
        for layer, size in enumerate(sizes)
        for part in "hc"
    }
    check_tensors(found, expected, path)


def _check_optimiser(saved: Checkpoint, parameters: Sequence[Tensor], path: Path) -> None:
    """Requires that each tensor of the optimiser's state is a scalar or like its parameter."""
    for name, tensor in saved.group("optimiser").items():
        index, _, _ = name.partition(".")
        known = index.isascii() and index.isdecimal() and int(index) < len(parameters)
        if known and tensor.dim():
            check_tensors({name: tensor}, {name: parameters[int(index)]}, path)
        elif not known or not tensor.is_floating_point():
            raise FileError(f"{path} is damaged (it has optimiser.{name}); {_REMEDY}")


def _require_like(found: Any, own: Any, where: str) -> None:
    """Requires values of the same structure and kinds as the optimiser's own."""
    if isinstance(own, dict):
        if not isinstance(found, dict) or found.keys() != own.keys():
            raise ValueError(f"{where} does not have the settings of the optimiser")
        for name, value in own.items():
            _require_like(found[name], value, f"{where}.{name}")
    elif isinstance(own, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(own):
            raise ValueError(f"{where} is not a list of {len(own)}")
        for at, value in enumerate(own):
            _require_like(found[at], value, f"{where}[{at}]")
    elif isinstance(own, bool) or not isinstance(own, int | float):
        if found != own or type(found) is not type(own):
            raise ValueError(f"{where}={found!r:.60} is not {own!r}")
    elif isinstance(found, bool) or not isinstance(found, int | float) or not found >= 0:
        raise ValueError(f"{where}={found!r:.60} is not a number of at least 0")


def _form(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
