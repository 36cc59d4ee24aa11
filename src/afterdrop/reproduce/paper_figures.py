"""PDF figures that accompany the paper's tables, from finished runs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from afterdrop.errors import AfterdropError
from afterdrop.evaluation import Scores
from afterdrop.family.member import DET, Member
from afterdrop.files import write_atomic
from afterdrop.report import figures
from afterdrop.report.figure_style import Axes, styled
from afterdrop.report.result_section import member_label
from afterdrop.reproduce.tables.build_tables import read_sources
from afterdrop.reproduce.tables.table_input import TableInput


def write_figures(
    runs: Sequence[str | Path], folder: Path, *, data: Path | None = None
) -> tuple[list[Path], list[str]]:
    """Draws the validation scores of every run: maps, temperature, samples, tightness, frequency.

    Args:
        runs: Run folders of `afterdrop train` or `afterdrop evaluate`.
        folder: The folder for the files `RUN-FIGURE.pdf`.
        data: The folder of the named data sets, if it differs from that of training.

    Returns:
        The files, and the reasons why others could not be drawn.
    """
    written: list[Path] = []
    faults: list[str] = []
    sources, _ = read_sources(runs)  # the tables report unreadable folders
    for number, source in enumerate(sources):
        twin = any(other.name == source.name for other in sources[:number])
        name = f"{source.name}-{number + 1}" if twin else source.name
        for what, draw in _figures(source, data):
            path = folder / f"{name}-{what}.pdf"
            try:
                write_atomic(path, _pdf(draw))
            except AfterdropError as error:
                faults.append(f"{path.name}: {error}")
            else:
                written.append(path)
    return written, faults


def _figures(source: TableInput, data: Path | None) -> Iterator[tuple[str, Callable[[], Axes]]]:
    """The names of the figures and the functions that draw them."""
    scores = source.scores.get("valid")
    if scores is None:
        return
    members = _members(scores)
    names = [member_label(member).rpartition(", T")[0] for member in members]  # T is on the axis
    yield "temperature", partial(figures.temperature_curves, scores, members, labels=names)
    if not scores.protocol.grid.stochastic:
        return
    yield "map", partial(figures.family_map, scores)
    yield "map-tuned", partial(figures.family_map, scores, tuned=True)
    yield "tightness", partial(figures.tightness, scores)
    yield "samples", partial(figures.sample_curves, scores)

    def gain() -> Axes:
        return figures.gain_by_frequency(scores, _members(scores)[1:], source.counts(data))

    yield "frequency", gain


def _members(scores: Scores) -> list[Member]:
    """DET, and every alpha at the largest multiplier."""
    top = max(scores.protocol.grid.multipliers)
    return [DET, *(member for member in scores.members if member.multiplier == top > 0)]


def _pdf(draw: Callable[[], Axes]) -> bytes:
    with styled():
        figure, buffer = draw().get_figure(root=True), io.BytesIO()
        assert figure is not None
        # Without a date, the same scores give the same bytes.
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None})
    return buffer.getvalue()
