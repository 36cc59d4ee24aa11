"""Figures of a study: its history, the importance of each axis, and slices along it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from afterdrop.errors import ExtraError
from afterdrop.tune.backend import Trial, importance
from afterdrop.tune.space import Axis, Space

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DONE, _PRUNED, _BEST = "#30638e", "#b0b0b0", "#d1495b"
_LEAST_FOR_IMPORTANCE = 10


def draw_history(axes: Axes, rows: Sequence[Trial]) -> None:
    """Values in the order of the trials, and the lowest so far."""
    for state, colour, word in (("complete", _DONE, "complete"), ("pruned", _PRUNED, "stopped")):
        chosen = [(r.number, r.value) for r in rows if r.state == state and r.value is not None]
        axes.scatter(*_columns(chosen), s=14, color=colour, label=word)
    best, line = float("inf"), []
    for row in rows:
        if row.state == "complete" and row.value is not None:
            best = min(best, row.value)
        line.append(best)
    known = [(row.number, value) for row, value in zip(rows, line) if value < float("inf")]
    axes.step(*_columns(known), where="post", color=_BEST, label="best so far")
    for row in rows:
        if row.state == "failed":
            axes.axvline(row.number, color=_BEST, linewidth=0.5, linestyle=":")
    axes.set(xlabel="trial", ylabel="validation XE (nats)")
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, fontsize=8)


def draw_importance(axes: Axes, space: Space, rows: Sequence[Trial]) -> None:
    """Share of each axis in what separates good trials from the others."""
    known = [(row.point, row.value) for row in rows if row.value is not None]
    if len(known) < _LEAST_FOR_IMPORTANCE:
        text = f"needs {_LEAST_FOR_IMPORTANCE} trials"
        axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    shares = importance(space, known)
    names = list(shares)[::-1]
    axes.barh([_short(name) for name in names], [shares[name] for name in names], color=_DONE)
    axes.set(xlabel="importance")


def draw_slice(axes: Axes, axis: Axis, rows: Sequence[Trial]) -> None:
    """Values along one axis."""
    for state, colour in (("pruned", _PRUNED), ("complete", _DONE)):
        known = [row for row in rows if row.state == state and row.value is not None]
        chosen = [(row.point[axis.name], row.value or 0.0) for row in known]
        axes.scatter(*_columns(chosen), s=10, color=colour)
    axes.set(xlabel=_short(axis.name), xscale="log" if axis.log else "linear")
    margin = 0.03  # so that points on the edge of the range are seen whole
    low, high = axis.place(-margin), axis.place(1 + margin)
    axes.set_xlim(low, high)
    axes.tick_params(labelsize=8)
    axes.tick_params(axis="x", which="minor", labelbottom=False)  # of a log scale: they overlap


def study_figures(space: Space, rows: Sequence[Trial]) -> dict[str, str]:
    """All figures of a study as SVG texts, by title.

    Raises:
        ExtraError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ExtraError(
            "the study page needs matplotlib: pip install 'afterdrop[report]'"
        ) from error
    history, shares = Figure((7, 3), layout="constrained"), Figure((7, 2.2), layout="constrained")
    draw_history(history.subplots(), rows)
    draw_importance(shares.subplots(), space, rows)
    high = -(-len(space) // 3)
    slices = Figure((7, 2.1 * high), layout="constrained")
    panels = slices.subplots(high, 3, squeeze=False, sharey=True).flat
    for axis, panel in zip(space, panels):  # in this order: the rest of the panels is kept
        draw_slice(panel, axis, rows)
    for panel in panels:
        panel.set_axis_off()
    figures = {"History": history, "Importance": shares, "Slices": slices}
    return {title: _svg(figure) for title, figure in figures.items()}


def _svg(figure: object) -> str:
    import matplotlib

    buffer = io.StringIO()
    # A fixed salt and no date: the same study gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "afterdrop", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})  # type: ignore[attr-defined]
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _short(name: str) -> str:
    return name.rpartition(".")[2].replace("_", " ")
