"""The files of a finished study (`best.toml`, `study.json`) and its ranking as text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from afterdrop.errors import FileError
from afterdrop.files import read_json, write_atomic, write_json
from afterdrop.recipes import Recipe, to_toml
from afterdrop.tune.search_space import apply_point
from afterdrop.tune.study_result import Ranked, StudyResult
from afterdrop.tune.study_settings import STUDY_FILE, TuneSettings
from afterdrop.tune.trials import Trial, ends

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
        return StudyResult(
            TuneSettings.from_dict(content["settings"]),
            [_trial(row) for row in content["trials"]],
            [_trial(row) for row in content["reruns"]],
            [Ranked(**{**row, "reruns": tuple(row["reruns"])}) for row in content["ranking"]],
        )
    except (KeyError, TypeError) as error:
        raise FileError(
            f"{path} is damaged ({error}); run the command of the study again to rewrite it"
        ) from error


def _trial(row: dict[str, Any]) -> Trial:
    """A trial from JSON, in which intervals are texts."""
    return Trial(**{**row, "curve": {int(interval): xe for interval, xe in row["curve"].items()}})


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
    return "\n".join(lines)
