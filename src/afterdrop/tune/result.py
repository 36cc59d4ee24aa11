"""What a study leaves: the best configuration as a recipe, the ranking, and a table of it."""

from __future__ import annotations

from pathlib import Path

from afterdrop.files import write_atomic, write_json
from afterdrop.recipes import Recipe
from afterdrop.recipes.write import to_toml
from afterdrop.tune.ledger import ends
from afterdrop.tune.rerun import Ranked
from afterdrop.tune.space import apply_point
from afterdrop.tune.study import StudyResult

_KIND, _VERSION = "afterdrop-ranking", 1


def best_recipe(result: StudyResult) -> Recipe:
    """The first of the ranking as a recipe, with where its numbers come from."""
    best = result.ranking[0]
    settings = result.settings
    config = apply_point(settings.config, best.point)
    words = f"{settings.recipe}, tuned: trial {best.number} of {len(ends(result.trials))}"
    source = dict.fromkeys(best.point, f"tuned on validation data (trial {best.number})")
    return Recipe("best", f"{words}, validation XE {shown(best)}", source, config)


def write_result(result: StudyResult, folder: Path) -> None:
    """Writes `best.toml` and `ranking.json` into the study's folder."""
    write_atomic(folder / "best.toml", to_toml(best_recipe(result)).encode())
    rows = [
        {"trial": r.number, "point": r.point, "tuned": r.tuned, "reruns": list(r.reruns)}
        for r in result.ranking
    ]
    write_json(folder / "ranking.json", _KIND, _VERSION, {"ranking": rows})


def shown(row: Ranked) -> str:
    """The XE of a ranked configuration with its error.

    Example:
        >>> shown(Ranked(3, {}, 4.10, (4.12, 4.16)))
        '4.1400 ± 0.0200 (2 reruns)'
        >>> shown(Ranked(3, {}, 4.10))
        '4.1000 (not run again)'
    """
    if not row.reruns:
        return f"{row.tuned:.4f} (not run again)"
    error = "" if row.error is None else f" ± {row.error:.4f}"
    return f"{row.mean:.4f}{error} ({len(row.reruns)} rerun{'s' * (len(row.reruns) > 1)})"


def table(result: StudyResult) -> str:
    """The ranking as text."""
    names = [axis.name for axis in result.settings.space]
    width = max(len(shown(row)) for row in result.ranking)
    lines = [
        f"trial {row.number:>4}  tuned {row.tuned:.4f}  {shown(row):<{width}}  "
        + "  ".join(f"{name.rpartition('.')[2]} {row.point[name]:.3g}" for name in names)
        for row in result.ranking
    ]
    failed = [row for row in ends(result.trials) if row.state == "failed"]
    lines += [f"trial {row.number:>4}  failed: {row.notes.get('reason')}" for row in failed]
    return "\n".join(lines)
