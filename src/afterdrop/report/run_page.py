"""The report of a run as one self-contained HTML page without scripts or external resources."""

from collections.abc import Callable
from pathlib import Path

import jinja2

from afterdrop.errors import AfterdropError
from afterdrop.files import write_atomic
from afterdrop.report.background_sections import (
    commands_section,
    fit_section,
    protocol_section,
    trained_section,
    training_section,
)
from afterdrop.report.figure_sections import (
    bounds_section,
    map_section,
    samples_section,
    temperature_section,
    trust_section,
)
from afterdrop.report.figure_style import THEME, styled
from afterdrop.report.frequency_section import frequency_section
from afterdrop.report.page_elements import Page, Section
from afterdrop.report.prose import certainty, headline
from afterdrop.report.report_input import ReportInput
from afterdrop.report.result_section import cards, summary_section
from afterdrop.report.run_outcome import Outcome, find_outcome


def build_run_page(run: ReportInput) -> tuple[Page, Outcome | None]:
    """The page of a run as plain data, and its outcome."""
    outcome = find_outcome(run)
    with styled():
        sections = make_sections(_makers(run, outcome))
    what = "your own model"
    if run.config is not None:
        what = f"{run.config.model.kind.replace('_', ' ')} trained on {run.config.data.name}"
    text = "This run has not been evaluated yet."
    if outcome is not None:
        text = headline(outcome, run.unit)
        text += (
            ""
            if run.choice
            else " (No choice is saved yet; this is what afterdrop select would choose.)"
        )
    page = Page(
        run.name,
        what,
        text,
        certainty(outcome) if outcome else [],
        cards(outcome, run.unit) if outcome else [],
        sections,
        run.missing,
    )
    return page, outcome


def _makers(run: ReportInput, outcome: Outcome | None) -> list[Callable[[], Section]]:
    """Functions that make the sections, in order; those whose input is missing are left out."""
    scores, train = run.scores, run.train
    makers: list[Callable[[], Section]] = []
    if outcome is not None:
        makers.append(lambda: summary_section(outcome, run.unit))
    makers.append(lambda: trained_section(run))
    if scores is not None:
        makers.append(lambda: map_section(scores, outcome.member if outcome else None))
    if outcome is not None:
        trained = run.config is not None
        makers += [
            lambda: temperature_section(outcome),
            lambda: trust_section(outcome),
            lambda: frequency_section(outcome, run.classes, trained=trained),
        ]
    if scores is not None:
        makers += [
            lambda: bounds_section(scores),
            lambda: samples_section(scores, outcome.member if outcome else None),
        ]
    if train is not None:
        makers.append(lambda: fit_section(train))
    makers.append(lambda: training_section(run))
    if scores is not None:
        makers.append(
            lambda: protocol_section(scores.protocol, scores.num_targets, scores.num_examples)
        )
    return [*makers, lambda: commands_section(run)]


def make_sections(makers: list[Callable[[], Section]]) -> list[Section]:
    """Makes the sections and drops empty ones; a section that fails says why instead."""
    sections = []
    for number, make in enumerate(makers):
        try:
            sections.append(make())
        except AfterdropError as error:
            title = "A section that could not be made"
            sections.append(Section(f"failed-{number}", title, missing=[str(error)]))
    return [section for section in sections if not section.empty]


def render(page: Page) -> str:
    """The HTML of a page.

    Example:
        >>> html = render(Page("<script>", "s", "h", [], [], []))
        >>> "<script>" in html, "&lt;script&gt;" in html
        (False, True)
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("afterdrop.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template("page.html.jinja").render(page=page, theme=THEME)
    return text.encode("utf-8", "backslashreplace").decode()  # names of files need not be Unicode


def write_report(run: ReportInput, path: Path) -> Outcome | None:
    """Writes the report of a run, replacing the file atomically.

    Args:
        run: The run, from `read_input`.
        path: The HTML file.

    Returns:
        The outcome, or None if there are no usable scores.
    """
    page, outcome = build_run_page(run)
    write_atomic(path, render(page).encode())
    return outcome
