"""The files of a finished study (`best.toml`, `study.json`) and its ranking as text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

from afterdrop.errors import AfterdropError, FileError
from afterdrop.files import read_json, write_atomic, write_json
from afterdrop.plain_text import one_line
from afterdrop.recipes import Recipe, to_toml
from afterdrop.tune.search_space import apply_point
from afterdrop.tune.study_result import Ranked, StudyResult
from afterdrop.tune.study_settings import STUDY_FILE, TuneSettings
from afterdrop.tune.trials import Trial, ends, read_trial
from afterdrop.typed_records import read_record

_KIND, _VERSION = "afterdrop-study", 2


def best_recipe(result: StudyResult) -> Recipe:
    """The best configuration as a recipe that states the origin of its values."""
    best = result.ranking[0]
    settings = result.settings
    config = apply_point(settings.config, best.point)
    description = f"{settings.recipe}, tuned: trial {best.number} of {len(ends(result.trials))}"
    source = dict.fromkeys(best.point, f"tuned on validation data (trial {best.number})")
    return Recipe("best", f"{description}, validation XE {format_xe(best)}", source, config)


def write_result(result: StudyResult, folder: Path) -> None:
    """Writes `best.toml` and `study.json` into the folder of the study."""
    write_atomic(folder / "best.toml", to_toml(best_recipe(result)).encode())
    content = {
        "settings": result.settings.to_dict(),
        "ranking": [asdict(row) for row in result.ranking],
        "trials": [asdict(row) for row in result.trials],
        "reruns": [asdict(row) for row in result.reruns],
    }
    write_json(folder / STUDY_FILE, _KIND, _VERSION, content)


def read_result(folder: Path) -> StudyResult:
    """Reads a study that `write_result` wrote, without its storage.

    Raises:
        FileError: If `study.json` does not exist or is damaged.
    """
    path = folder / STUDY_FILE
    content = read_json(path, _KIND, _VERSION)
    try:
        record = read_record(_StudyRecord, content)
        result = StudyResult(
            TuneSettings.from_dict(record["settings"]),
            [read_trial(row) for row in record["trials"]],
            [read_trial(row) for row in record["reruns"]],
            record["ranking"],
        )
        _check_points(result)
        return result
    except (AfterdropError, ValueError) as error:
        raise FileError(
            f"{path} is damaged ({error}); run the command of the study again to rewrite it"
        ) from error


class _StudyRecord(TypedDict):
    """What `study.json` has; `read_trial` reads the trials."""

    settings: dict[str, Any]
    trials: list[dict[str, Any]]
    reruns: list[dict[str, Any]]
    ranking: list[Ranked]


def _check_points(result: StudyResult) -> None:
    """Requires a ranking, and a value of every searched setting in every point."""
    names = {axis.name for axis in result.settings.space}
    rows: list[Ranked | Trial] = [*result.ranking, *result.trials, *result.reruns]
    for row in rows:
        if row.point.keys() != names:
            raise ValueError(f"the point of trial {row.number} is not one of the space")
    if not result.ranking or not result.trials:
        raise ValueError("it has no trials or no ranking")


def format_xe(row: Ranked) -> str:
    """The XE of a ranked configuration with its standard error.

    Example:
        >>> format_xe(Ranked(3, {}, 4.10, (4.12, 4.16)))
        '4.1400 ± 0.0200 (2 reruns)'
        >>> format_xe(Ranked(3, {}, 4.10))
        '4.1000 (not rerun)'
    """
    if not row.reruns:
        return f"{row.tuned:.4f} (not rerun)"
    error = "" if row.error is None else f" ± {row.error:.4f}"
    return f"{row.mean:.4f}{error} ({len(row.reruns)} rerun{'s' * (len(row.reruns) > 1)})"


def ranking_table(result: StudyResult) -> str:
    """The ranking as text, followed by the failed trials."""
    names = [axis.name for axis in result.settings.space]
    width = max(len(format_xe(row)) for row in result.ranking)
    lines = [
        f"trial {row.number:>4}  tuned {row.tuned:.4f}  {format_xe(row):<{width}}  "
        + "  ".join(f"{name.rpartition('.')[2]} {row.point[name]:.3g}" for name in names)
        for row in result.ranking
    ]
    failed = [row for row in ends(result.trials) if row.state == "failed"]
    lines += [f"trial {row.number:>4}  failed: {row.notes.get('reason')}" for row in failed]
    return "\n".join(map(one_line, lines))
