"""The study page: one HTML file that needs nothing else."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from afterdrop.files import write_atomic
from afterdrop.tune.figures import study_figures
from afterdrop.tune.ledger import ends
from afterdrop.tune.result import shown
from afterdrop.tune.study import StudyResult


def study_page(result: StudyResult) -> str:
    """The page of a study: ranking, history, importance, slices, and what failed.

    Raises:
        ExtraError: If matplotlib is not installed.
    """
    text = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        text
    )
    rows = ends(result.trials)
    objective = result.settings.objective
    drawn = study_figures(result.settings.space, rows)
    return template.render(
        settings=result.settings,
        member=f"{objective.member}".rpartition(", T")[0],
        optimal=objective.temperature == "optimal",
        axes=list(result.settings.space),
        ranking=[(row, shown(row)) for row in result.ranking],
        counts={s: sum(row.state == s for row in rows) for s in ("complete", "pruned", "failed")},
        failed=[row for row in rows if row.state == "failed"],
        lost=len(result.trials) - len(rows),
        # The drawings are our own; all other text is escaped.
        figures={title: Markup(svg) for title, svg in drawn.items()},
    )


def write_page(result: StudyResult, folder: Path) -> Path:
    """Writes `study.html` into the study's folder."""
    path = folder / "study.html"
    write_atomic(path, study_page(result).encode())
    return path
