"""The page of a tuning study: the best configuration, how reliable it is, and the search."""

import math
from collections.abc import Callable
from pathlib import Path

from afterdrop.files import write_atomic
from afterdrop.plain_text import shell_word
from afterdrop.report import study_figures as figures
from afterdrop.report.figure_sections import picture
from afterdrop.report.figure_style import styled
from afterdrop.report.page_elements import Card, Page, PageTable, Section
from afterdrop.report.prose import number, signed
from afterdrop.report.run_page import make_sections, render
from afterdrop.report.study_figures import setting_label
from afterdrop.tune.optuna_backend import importance
from afterdrop.tune.search_space import Axis, own_point
from afterdrop.tune.study_files import format_xe
from afterdrop.tune.study_result import Ranked, StudyResult
from afterdrop.tune.trials import Trial, ends, origin

_LEAST_FOR_IMPORTANCE = 10  # trials with a value
_EDGE = 0.02  # fraction of a range: within this distance of an end, a wider range may be better


def write_study(result: StudyResult, folder: Path, path: Path | None = None) -> Path:
    """Writes the page of a study.

    Args:
        result: The finished study.
        folder: The folder of the study, as the user wrote it.
        path: The HTML file; by default `study.html` in the folder.

    Returns:
        The path of the page.
    """
    path = folder / "study.html" if path is None else path
    write_atomic(path, render(build_study_page(result, folder)).encode())
    return path


def build_study_page(result: StudyResult, folder: Path) -> Page:
    """The page of a study as plain data."""
    rows, settings = ends(result.trials), result.settings
    makers: list[Callable[[], Section]] = [
        lambda: _ranking_section(result),
        lambda: _history_section(result, rows),
        lambda: _axes_section(result, rows),
        lambda: _failures_section(rows),
        lambda: _settings_section(result),
        lambda: _next_section(result, folder),
    ]
    with styled():
        sections = make_sections(makers)
    return Page(
        folder.resolve().name,
        f"study of {settings.recipe}",
        _headline(result, rows),
        _certainty(result),
        _cards(result, rows),
        sections,
    )


def _headline(result: StudyResult, rows: list[Trial]) -> str:
    best, objective = result.ranking[0], result.settings.objective
    at = "its optimal temperature" if objective.temperature == "optimal" else "temperature 1"
    text = (
        f"Trial {best.number} is the best of {len(rows)} configurations: validation cross entropy "
        f"{number(best.mean)}"
    )
    if best.error is not None:
        text += f" ± {number(best.error)}"
    text += f" nats per target ({_member(result)} at {at}"
    if best.reruns:
        text += f"; mean of {_counted(len(best.reruns), 'training run')} with other seeds"
    return text + ")."


def _member(result: StudyResult) -> str:
    member = result.settings.objective.member
    if member.deterministic:
        return "deterministic evaluation"
    return f"α = {member.alpha:g}, ×{member.multiplier:g},"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _certainty(result: StudyResult) -> list[str]:
    """How reliable the best configuration is, one item per remark."""
    best, *others = result.ranking
    lines = []
    if best.reruns:
        lines.append(
            f"Its reruns differ by {signed(best.mean - best.tuned)} nats from its trial "
            f"({number(best.tuned)}). The lowest of many noisy values is biased downwards; reruns "
            "are not selected by their value, so the ranking uses them alone."
        )
    else:
        lines.append(
            "It was not rerun, and the lowest of many noisy values is biased downwards: expect a "
            "slightly higher value with another seed (--reruns measures it)."
        )
    second = next((row for row in others if row.error is not None), None)
    if best.error is not None and second is not None:
        error = math.hypot(best.error, second.error or 0.0)
        lines.append(
            f"Trial {second.number} is second, {number(second.mean - best.mean)} ± "
            f"{number(error)} nats higher (standard error over seeds)."
        )
    for axis in _at_edge(result, best):
        lines.append(
            f"Its {setting_label(axis.name)}, {best.point[axis.name]:.3g}, is at the edge of "
            f"the range {axis.low:g} to {axis.high:g}: a wider one may be better "
            f"(--range {axis.name}=LOW:HIGH)."
        )
    return lines


def _at_edge(result: StudyResult, best: Ranked) -> list[Axis]:
    """Axes along which the best point lies at an end of the range that could be extended."""
    found = []
    for axis in result.settings.space:
        unit = axis.unit(best.point[axis.name])
        ends_at_zero = axis.low == 0 and unit < 0.5
        if min(unit, 1 - unit) < _EDGE and not ends_at_zero:
            found.append(axis)
    return found


def _cards(result: StudyResult, rows: list[Trial]) -> list[Card]:
    best = result.ranking[0]
    again = _counted(len(best.reruns), "rerun") if best.reruns else "not rerun"
    error = "" if best.error is None else f"± {number(best.error)} nats, "
    states = {s: sum(r.state == s for r in rows) for s in ("complete", "pruned", "failed")}
    shown_cards = [
        Card("Best configuration", number(best.mean), f"{error or 'nats, '}{again}"),
        Card("In its trial", number(best.tuned), "nats, as seen by the tuner"),
    ]
    own = own_point(result.settings.config, result.settings.space)
    asked = [r for r in rows if r.point == own and r.state == "complete" and r.value is not None]
    if asked and origin(asked[0]) != best.number:
        value = asked[0].value or 0.0
        remark = f"nats, trial {origin(asked[0])}: the unmodified recipe"
        shown_cards.append(Card("Before tuning", number(value), remark))
    remark = f"complete; {states['pruned']} stopped early, {states['failed']} failed"
    return [*shown_cards, Card("Trials", str(states["complete"]), remark)]


def _ranking_section(result: StudyResult) -> Section:
    axes = list(result.settings.space)
    rows = [
        (
            f"trial {row.number}",
            format_xe(row),
            number(row.tuned),
            *(f"{row.point[axis.name]:.3g}" for axis in axes),
        )
        for row in result.ranking
    ]
    head = ("trial", "validation XE", "in its trial", *(setting_label(axis.name) for axis in axes))
    table = PageTable("The best configurations", head, rows, frozenset({0}), frozenset({0, 1}))
    text = (
        "Cross entropies (XE) are in nats; lower is better. If a configuration was rerun with "
        "other seeds, its XE is the mean of the reruns, with its standard error."
    )
    return Section("ranking", "Ranking", [text], tables=[table])


def _history_section(result: StudyResult, rows: list[Trial]) -> Section:
    best = result.ranking[0].number
    lost = len(result.trials) - len(rows)
    section = Section("history", "Search history")
    if lost:
        section.paragraphs.append(
            f"{_counted(lost, 'attempt')} ended early because the worker stopped or died; the same "
            "configuration was then tried again."
        )
    section.pictures.append(
        picture(
            figures.study_history(rows),
            "history",
            "Values in the order of the trials",
            "Each point is a configuration; the line is the lowest value so far. When the search "
            "has converged, the line is flat and new points are close to it.",
        )
    )
    if any(row.curve for row in rows):
        section.pictures.append(
            picture(
                figures.study_curves(rows, best),
                "curves",
                "Validation during training",
                "Each line is a configuration; the thick one is the best. Trials that were among "
                "the worst at the same interval were stopped early.",
            )
        )
    return section


def _axes_section(result: StudyResult, rows: list[Trial]) -> Section:
    space, best = result.settings.space, result.ranking[0].number
    known = [(row.point, row.value) for row in rows if row.value is not None]
    section = Section("axes", "Which settings matter")
    if len(known) >= _LEAST_FOR_IMPORTANCE:
        section.pictures.append(
            picture(
                figures.study_importance(importance(space, known)),
                "importance",
                "Importance",
                "The share of each setting in what separates good trials from the rest "
                "(PED-ANOVA). With few trials it is unreliable.",
            )
        )
    else:
        section.missing.append(
            f"the importance of settings needs {_LEAST_FOR_IMPORTANCE} trials with a value and "
            f"there are {len(known)}; increase --trials"
        )
    section.pictures.append(
        picture(
            figures.study_slices(space, rows, best),
            "slices",
            "Values along each setting",
            "Every panel shows all trials: ★ is the best, squares were stopped early, triangles "
            "lie above the plotted range. The points are lowest at good values of a setting.",
        )
    )
    return section


def _failures_section(rows: list[Trial]) -> Section:
    failed = [row for row in rows if row.state == "failed"]
    section = Section("failures", "Failures")
    if failed:
        cells = [(f"trial {origin(row)}", str(row.notes.get("reason", ""))) for row in failed]
        left = frozenset({0, 1})
        section.tables.append(PageTable("Failed trials", ("trial", "reason"), cells, left=left))
    return section


def _settings_section(result: StudyResult) -> Section:
    settings, best = result.settings, result.ranking[0]
    ranges = [
        (
            axis.name,
            f"{axis.low:g} to {axis.high:g}",
            "log" if axis.log else "linear",
            f"{best.point[axis.name]:.4g}",
        )
        for axis in settings.space
    ]
    how = "a Gaussian-process bandit" if settings.sampler == "gp" else "random search"
    intervals, steps = (
        settings.config.schedule.intervals,
        settings.config.schedule.steps_per_interval,
    )
    pruning = "unpromising trials are stopped early" if settings.prune else "all run to the end"
    text = (
        f"Points are proposed by {how} with seed {settings.seed}. A trial trains for {intervals} "
        f"validation intervals of {steps} steps; {pruning}."
    )
    head = ("setting", "range", "scale", "best")
    table = PageTable("Search space", head, ranges, left=frozenset({0, 1, 2}))
    return Section("search", "Search settings", [text], tables=[table])


def _next_section(result: StudyResult, folder: Path) -> Section:
    path = shell_word(folder)
    trial = shell_word(folder / "trials" / f"{result.ranking[0].number:04d}")
    lines = [
        f"afterdrop train {shell_word(folder / 'best.toml')} --out RUN",
        f"afterdrop evaluate {trial}",
        f"afterdrop report {path}",
    ]
    text = (
        "These commands train the best configuration, evaluate the weights of its trial, and write "
        "this page again."
    )
    return Section("next", "Next steps", [text], commands=lines)
