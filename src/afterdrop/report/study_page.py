"""The page of a study: what was found, how certain that is, and how it was searched."""

import math
import shlex
from collections.abc import Callable
from pathlib import Path

from afterdrop.files import write_atomic
from afterdrop.report import study_figures as figures
from afterdrop.report.figure_sections import picture
from afterdrop.report.figure_style import styled
from afterdrop.report.page_elements import Card, Page, PageTable, Section
from afterdrop.report.prose import number, signed
from afterdrop.report.run_page import made, render
from afterdrop.report.study_figures import setting_label
from afterdrop.tune.optuna_backend import Trial, importance
from afterdrop.tune.reruns import Ranked
from afterdrop.tune.search_space import Axis, own_point
from afterdrop.tune.study_files import format_xe
from afterdrop.tune.study_runner import StudyResult
from afterdrop.tune.trial_ledger import ends, origin

_LEAST_FOR_IMPORTANCE = 10  # trials
_EDGE = 0.02  # of a range: so near its end, a wider one may be better


def write_study(result: StudyResult, folder: Path, path: Path | None = None) -> Path:
    """Writes the page of a study, `study.html` in its folder unless told otherwise.

    Args:
        result: The study.
        folder: Its folder, as the user wrote it.
        path: Where the page goes.

    Returns:
        Where it went.
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
        sections = made(makers)
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
    at = "its best temperature" if objective.temperature == "optimal" else "temperature 1"
    text = (
        f"Trial {best.number} is the best of {len(rows)} configurations: validation cross entropy "
        f"{number(best.mean)}"
    )
    if best.error is not None:
        text += f" ± {number(best.error)}"
    text += f" nats a target ({_member(result)} at {at}"
    if best.reruns:
        text += f"; mean of {_counted(len(best.reruns), 'training')} under other seeds"
    return text + ")."


def _member(result: StudyResult) -> str:
    member = result.settings.objective.member
    if member.deterministic:
        return "dropout switched off,"
    return f"α = {member.alpha:g}, ×{member.multiplier:g},"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _certainty(result: StudyResult) -> list[str]:
    """How far the best can be believed, a sentence each."""
    best, *others = result.ranking
    lines = []
    if best.reruns:
        lines.append(
            f"Run again, it differs by {signed(best.mean - best.tuned)} nats from its own trial "
            f"({number(best.tuned)}). The lowest of many noisy values is too low; reruns are not "
            "chosen by their value, so the ranking uses them alone."
        )
    else:
        lines.append(
            "It was not run again, and the lowest of many noisy values is too low: expect a little "
            "more under another seed (--reruns measures it)."
        )
    second = next((row for row in others if row.error is not None), None)
    if best.error is not None and second is not None:
        error = math.hypot(best.error, second.error or 0.0)
        lines.append(
            f"Trial {second.number} comes next, {number(second.mean - best.mean)} ± "
            f"{number(error)} nats behind (standard errors over seeds)."
        )
    for axis in _at_edge(result, best):
        lines.append(
            f"Its {setting_label(axis.name)}, {best.point[axis.name]:.3g}, is at the edge of "
            f"the range {axis.low:g} to {axis.high:g}: a wider one may be better "
            f"(--range {axis.name}=LOW:HIGH)."
        )
    return lines


def _at_edge(result: StudyResult, best: Ranked) -> list[Axis]:
    """Axes along which the best lies at an end of its range that a setting could go beyond."""
    found = []
    for axis in result.settings.space:
        unit = axis.unit(best.point[axis.name])
        ends_at_zero = axis.low == 0 and unit < 0.5
        if min(unit, 1 - unit) < _EDGE and not ends_at_zero:
            found.append(axis)
    return found


def _cards(result: StudyResult, rows: list[Trial]) -> list[Card]:
    best = result.ranking[0]
    again = _counted(len(best.reruns), "rerun") if best.reruns else "not run again"
    error = "" if best.error is None else f"± {number(best.error)} nats, "
    states = {s: sum(r.state == s for r in rows) for s in ("complete", "pruned", "failed")}
    shown_cards = [
        Card("Best configuration", number(best.mean), f"{error or 'nats, '}{again}"),
        Card("In its own trial", number(best.tuned), "nats: what the tuner saw"),
    ]
    own = own_point(result.settings.config, result.settings.space)
    asked = [r for r in rows if r.point == own and r.state == "complete" and r.value is not None]
    if asked and origin(asked[0]) != best.number:
        value = asked[0].value or 0.0
        remark = f"nats, trial {origin(asked[0])}: the recipe's own settings"
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
    head = ("trial", "validation XE", "as tuned", *(setting_label(axis.name) for axis in axes))
    table = PageTable("The best configurations", head, rows, frozenset({0}), frozenset({0, 1}))
    words = (
        "Cross entropies (XE) are in nats, lower is better. Where a configuration was run again "
        "under other seeds, its XE is their mean with its standard error."
    )
    return Section("ranking", "Ranking", [words], tables=[table])


def _history_section(result: StudyResult, rows: list[Trial]) -> Section:
    best = result.ranking[0].number
    lost = len(result.trials) - len(rows)
    section = Section("history", "How the search went")
    if lost:
        section.paragraphs.append(
            f"{_counted(lost, 'attempt')} ended with the worker, or by giving the trial back; "
            "the same configuration was then tried again."
        )
    section.pictures.append(
        picture(
            figures.study_history(rows),
            "history",
            "Values in the order of the trials",
            "Each point is a configuration; the line is the lowest so far. A search that has "
            "found its place has a flat line and points close to it.",
        )
    )
    if any(row.curve for row in rows):
        section.pictures.append(
            picture(
                figures.study_curves(rows, best),
                "curves",
                "The trials while they trained",
                "A line is a configuration, the thick one the best. Those that were among the "
                "worst for their turn were stopped early.",
            )
        )
    return section


def _axes_section(result: StudyResult, rows: list[Trial]) -> Section:
    space, best = result.settings.space, result.ranking[0].number
    known = [(row.point, row.value) for row in rows if row.value is not None]
    section = Section("axes", "What matters")
    if len(known) >= _LEAST_FOR_IMPORTANCE:
        section.pictures.append(
            picture(
                figures.study_importance(importance(space, known)),
                "importance",
                "Importance",
                "The share of each setting in what separates the good trials from the others "
                "(PED-ANOVA). Few trials say little.",
            )
        )
    else:
        section.missing.append(
            f"the importance of settings, which needs {_LEAST_FOR_IMPORTANCE} trials with a value "
            f"(there are {len(known)}); give more --trials"
        )
    section.pictures.append(
        picture(
            figures.study_slices(space, rows, best),
            "slices",
            "Values along each setting",
            "Every panel shows all trials, ★ the best, squares those that were stopped early, "
            "triangles those beyond the upper edge. A valley is where a setting should be.",
        )
    )
    return section


def _failures_section(rows: list[Trial]) -> Section:
    failed = [row for row in rows if row.state == "failed"]
    section = Section("failures", "Failures")
    if failed:
        cells = [(f"trial {origin(row)}", str(row.notes.get("reason", ""))) for row in failed]
        left = frozenset({0, 1})
        section.tables.append(
            PageTable("Trials without a value", ("trial", "reason"), cells, left=left)
        )
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
    turns, steps = settings.config.schedule.turns, settings.config.schedule.steps_per_turn
    words = (
        f"Points come from {how}, seed {settings.seed}. A trial trains {turns} turns of {steps} "
        f"steps; hopeless ones are {'stopped early' if settings.prune else 'not stopped'}."
    )
    head = ("setting", "range", "scale", "best")
    table = PageTable("What was searched", head, ranges, left=frozenset({0, 1, 2}))
    return Section("search", "How it was searched", [words], tables=[table])


def _next_section(result: StudyResult, folder: Path) -> Section:
    path = shlex.quote(str(folder))
    trial = shlex.quote(str(folder / "trials" / f"{result.ranking[0].number:04d}"))
    lines = [
        f"afterdrop train {shlex.quote(str(folder / 'best.toml'))} --out RUN",
        f"afterdrop evaluate {trial}",
        f"afterdrop report {path}",
    ]
    words = "To train the best configuration, to evaluate the weights of its trial, and this page:"
    return Section("next", "What next", [words], commands=lines)
