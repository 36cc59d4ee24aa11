"""The shell commands that reproduce a run, from what its files record."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from afterdrop import recipes
from afterdrop.data import names as data_names
from afterdrop.errors import DataError
from afterdrop.evaluation.request import LOGITS_FUNCTION, Adaptive, Protocol
from afterdrop.evaluation.scores import Scores
from afterdrop.family.member import Grid
from afterdrop.family.temperature import SPAN
from afterdrop.plain_text import shell_word
from afterdrop.report.report_input import ReportInput
from afterdrop.train import TrainConfig

# Options that take several values, each of which is quoted already.
_LISTS = ("alphas", "multipliers", "temperatures", "rates", "noise")


def repeat_commands(run: ReportInput) -> list[str]:
    """The commands that reproduce this run and its report, in order."""
    path = run.word
    lines = [] if run.config is None else [_train(run.config, path)]
    trained = run.config is not None
    lines += [
        _evaluate(scores, path, trained=trained)
        for scores in (run.scores, run.train)
        if scores is not None
    ]
    if run.scores is not None:
        by_xe = run.choice is None or run.choice.by == "xe"
        default = run.scores.predictor_samples if by_xe else run.scores.num_samples
        samples = run.choice.num_samples if run.choice else default
        extra = f" --num-samples {samples}" if samples != default else ""
        split = f" --split {_value(run.split)}" if run.split != "valid" else ""
        if run.choice is not None and run.choice.by != "xe":
            extra += f" --by {_value(run.choice.by)}"
        if run.choice is not None and run.choice.also:
            extra += " --also " + " ".join(_value(o.name) for o in run.choice.also)
        lines.append(f"afterdrop select {path}{split}{extra}")
        if trained:
            lines.append(f"afterdrop test {path}")
    return [*lines, f"afterdrop report {path}"]


def _train(config: TrainConfig, path: str) -> str:
    """`afterdrop train` with the closest recipe and `--set` for each difference."""
    custom = config.data.name not in data_names()
    content = _flat(config)
    if custom:  # the user's own text
        name = "lm-char" if config.data.level in ("char", "byte") else "lm"
        base = _flat(recipes.load(name).config)
        content = {k: v for k, v in content.items() if not k.startswith("data.")}
        options = [f"--data {shell_word(Path(config.data.name))}"]
        options += [f"--level {config.data.level}"] if config.data.level else []
        options += [f"--min-count {config.data.min_count}"] if config.data.min_count else []
    else:
        known = {name: _flat(recipes.load(name).config) for name in recipes.names()}
        name = min(known, key=lambda n: len(_changes(known[n], content)))
        base, options = known[name], []
        if not config.data.name.startswith("builtin:"):
            options = ["--data DIR"]
    options += [f"--set {shell_word(change)}" for change in _changes(base, content)]
    return " ".join([f"afterdrop train {name}", *options, f"--out {path}"])


def _flat(config: TrainConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, value in config.to_dict().items():
        if isinstance(value, dict):
            flat.update({f"{section}.{name}": entry for name, entry in value.items()})
        else:
            flat[section] = value
    return flat


def _changes(base: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """`name=value` for each setting that differs from `base`."""
    return [
        f"{name}={'none' if value is None else json.dumps(value)}"
        for name, value in wanted.items()
        if base.get(name) != value
    ]


def _evaluate(scores: Scores, path: str, *, trained: bool) -> str:
    protocol = dataclasses.replace(scores.protocol, request=scores.asked)
    start = f"afterdrop evaluate {path}"
    if protocol.ensemble is not None:
        start = f"afterdrop evaluate --samples SAMPLES --targets TARGETS --out {path}"
    elif not trained:
        start = f"afterdrop evaluate pkg.module:load_model pkg.module:batches --out {path}"
    shown = [
        f"--{name} {value if name in _LISTS else _value(value)}"
        for name, value in _evaluate_options(protocol).items()
        if value is not None and value != _DEFAULTS.get(name)
    ]
    return " ".join([start, *shown])


def _evaluate_options(protocol: Protocol) -> dict[str, Any]:
    grid = protocol.grid
    request, stream = protocol.request, protocol.request.stream
    return {
        "split": request.split,
        "limit": request.limit,
        "alphas": _joined(grid.alphas),
        "temper": grid.temper,
        "temperatures": _joined((protocol.low, protocol.high)),
        "ignore-index": request.ignore_index,
        "likelihood": request.likelihood,
        **(_of_model(protocol) if protocol.ensemble is None else {}),
        **({} if stream is None else dataclasses.asdict(stream)),
    }


def _of_model(protocol: Protocol) -> dict[str, Any]:
    """Options that samples in files do not have."""
    request = protocol.request
    return {
        **_masks(protocol),
        "batch-dim": request.batch_dim,
        "class-dim": request.class_dim,
        "logits": None if request.logits == LOGITS_FUNCTION else request.logits,
        "rates": " ".join(map(_value, request.rates)) or None,
        "noise": " ".join(map(_value, request.noise)) or None,
    }


def _masks(protocol: Protocol) -> dict[str, Any]:
    plan, adaptive = protocol.plan, protocol.request.adaptive
    rules = {} if adaptive is None else dataclasses.asdict(adaptive)
    return {
        "num-samples": plan.num_samples if adaptive is None else "auto",
        "mask-share": rules.get("mask_share"),
        "beaten-by": rules.get("beaten_by"),
        "multipliers": _joined(protocol.grid.multipliers),
        "masks": plan.scheme,
        "blocks": plan.blocks,
        "seed": plan.seed,
    }


def _value(value: object) -> str:
    """The value of an option as a word of a command.

    Raises:
        DataError: If it would be read as another option.
    """
    if isinstance(value, str) and value.startswith("-"):
        raise DataError(f"no command can have the value {value!r:.60}, which begins with a dash")
    return shell_word(value)


def _joined(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)


_DEFAULTS: dict[str, Any] = {  # of afterdrop evaluate
    "split": "valid",
    "alphas": _joined(Grid().alphas),
    "multipliers": _joined(Grid().multipliers),
    "temper": "mean",
    "temperatures": _joined((1 / SPAN, SPAN)),  # the range that most models keep
    "mask-share": Adaptive.mask_share,
    "beaten-by": Adaptive.beaten_by,
    "masks": "lhs",
    "blocks": 2,
    "seed": 0,
    "batch-dim": 0,
    "ignore-index": -100,
    "likelihood": "categorical",
}
