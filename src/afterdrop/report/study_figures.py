"""Figures of a study: history, curves of the trials, importance of each axis, slices along it.

Values far above the others would flatten the rest, so they are drawn as triangles at the upper
edge.
"""

from collections.abc import Callable, Sequence
from typing import Any

from afterdrop.report.figure_style import (
    WIDTH,
    Axes,
    Figure,
    axes,
    colour,
    legend,
    log_axis,
    plain,
    styled,
)
from afterdrop.tune.observed_points import cut_of
from afterdrop.tune.search_space import Axis, Space
from afterdrop.tune.trials import Trial, origin

_COLUMNS = 2  # of slices: with two, their text is legible on a phone
_PANEL = 1.9  # height of a slice in inches
_MARGIN = 0.04  # fraction of a range added at both ends, so that points on its edge are not cut
_KINDS = {  # state of a trial: colour, marker, legend entry
    "complete": ("blue", "o", "complete"),
    "pruned": ("ochre", "s", "stopped early"),
}


def study_history(rows: Sequence[Trial], *, ax: Axes | None = None) -> Axes:
    """Values of the trials in order, and the lowest value so far.

    Args:
        rows: The trials, one per configuration.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> rows = [Trial(0, "complete", {}, 2.0), Trial(1, "complete", {}, 1.5)]
        >>> study_history(rows).get_xlabel()
        'trial'
    """
    ax = axes(ax)
    _scatter(ax, rows, origin)
    done = [(origin(row), row.value) for row in rows if row.state == "complete" and row.value]
    best = [(number, min(v for _, v in done[: i + 1])) for i, (number, _) in enumerate(done)]
    if best:
        best.append((max(origin(row) for row in rows), best[-1][1]))
        ax.step(*zip(*best), where="post", color=colour("vermilion"), label="best so far")
    failed = [origin(row) for row in rows if row.state == "failed"]
    for place, number in enumerate(failed):
        label = "failed" if place == 0 else "_"  # matplotlib ignores labels that start with "_"
        ax.axvline(number, color=colour("muted"), linestyle=":", linewidth=1.0, label=label)
    ax.set(xlabel="trial", ylabel="validation XE (nats)")
    ax.locator_params(axis="x", integer=True)
    legend(ax)
    return ax


def study_curves(rows: Sequence[Trial], best: int, *, ax: Axes | None = None) -> Axes:
    """Validation cross entropy during training, one line per trial.

    Args:
        rows: The trials, one per configuration.
        best: The number of the trial to highlight.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> row = Trial(0, "complete", {}, 2.0, curve={0: 3.0, 1: 2.0})
        >>> len(study_curves([row], 0).lines)
        1
    """
    ax = axes(ax)
    looks: dict[str, dict[str, Any]] = {
        "complete": {"color": colour("blue"), "alpha": 0.45},
        "pruned": {"color": colour("ochre"), "alpha": 0.8, "linestyle": "--"},
    }
    drawn: set[str] = set()
    for row in sorted(rows, key=lambda row: origin(row) == best):  # the best on top
        if row.state in looks and row.curve:
            look = {"linewidth": 1.0, **looks[row.state]}
            word = _KINDS[row.state][2]
            if origin(row) == best:
                look, word = {"color": colour("vermilion"), "linewidth": 2.2}, f"trial {best}"
            label = "_" if word in drawn else word
            drawn.add(word)
            intervals = sorted(row.curve)
            ax.plot(intervals, [row.curve[interval] for interval in intervals], label=label, **look)
    _limit(ax, [value for row in rows for interval, value in row.curve.items() if interval > 0])
    ax.set(xlabel="validation interval", ylabel="validation XE (nats)")
    ax.locator_params(axis="x", integer=True)
    legend(ax)
    return ax


def study_importance(shares: dict[str, float], *, ax: Axes | None = None) -> Axes:
    """Importance of each axis: its share in what separates good trials from the rest.

    Args:
        shares: From `tune.optuna_backend.importance`.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> study_importance({"model.input_dropout": 0.7, "seed": 0.3}).get_xlabel()
        'share'
    """
    ax = axes(ax, height=0.6 + 0.32 * len(shares))
    names = list(shares)[::-1]
    ax.barh(
        [setting_label(name) for name in names], [shares[n] for n in names], color=colour("blue")
    )
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("share")
    return ax


def study_slices(space: Space, rows: Sequence[Trial], best: int) -> Axes:
    """Values along each axis of the space.

    Args:
        space: The search space.
        rows: The trials, one per configuration.
        best: The number of the trial to highlight.

    Returns:
        The first axes of the figure, which has one panel per axis of the space.

    Example:
        >>> space = Space((Axis("model.input_dropout", 0, 0.9),))
        >>> study_slices(space, [], 0).get_xlabel()
        'input dropout'
    """
    lines = -(-len(space) // _COLUMNS)
    with styled():
        figure = Figure((WIDTH, _PANEL * lines), layout="constrained")
        panels = figure.subplots(lines, _COLUMNS, squeeze=False, sharey=True)
    for axis, panel in zip(space, panels.flat):
        _slice(panel, axis, rows, best)
    for panel in list(panels.flat)[len(space) :]:
        panel.set_axis_off()
    for panel in panels[:, 0]:
        panel.set_ylabel("XE (nats)")
    first: Axes = panels[0, 0]
    return first


def _slice(ax: Axes, axis: Axis, rows: Sequence[Trial], best: int) -> None:
    _scatter(ax, rows, lambda row: row.point[axis.name])
    chosen = [row for row in rows if origin(row) == best and row.value is not None]
    for row in chosen:
        place = row.point[axis.name], row.value or 0.0
        ax.scatter(*place, s=90, marker="*", color=colour("vermilion"), zorder=3)
    ax.set_xscale("log" if axis.log else "linear")
    ax.set_xlim(axis.place(-_MARGIN), axis.place(1 + _MARGIN))
    if axis.log:
        log_axis(ax.xaxis, narrow=True)
    else:
        ax.locator_params(axis="x", nbins=5)
    ax.set_xlabel(setting_label(axis.name))


def _scatter(ax: Axes, rows: Sequence[Trial], place: Callable[[Trial], float]) -> None:
    """Draws trials by state; values above the cut are triangles at the upper edge."""
    values = [row.value for row in rows if row.value is not None]
    cut = cut_of(values) if values else 0.0
    beyond = "above the plotted range"
    for state, (name, marker, word) in _KINDS.items():
        ended = [row for row in rows if row.state == state and row.value is not None]
        low = [row for row in ended if row.value is not None and row.value <= cut]
        high = [row for row in ended if row not in low]
        if ended:
            x, y = [place(row) for row in low], [row.value or 0.0 for row in low]
            ax.scatter(x, y, s=18, marker=marker, color=colour(name), label=word)
        if high:
            x, y = [place(row) for row in high], [cut] * len(high)
            ax.scatter(x, y, s=24, marker="^", color=colour(name), label=beyond)
            beyond = "_"
    _limit(ax, values)


def _limit(ax: Axes, values: Sequence[float]) -> None:
    """Limits the y axis to values up to the cut, with a margin even if all values are equal."""
    if values:
        low, high = min(values), cut_of(values)
        margin = max(0.07 * (high - low), 1e-3 * abs(high), 1e-6)
        ax.set_ylim(low - margin, high + margin)


def setting_label(name: str) -> str:
    """The last component of a setting's name, with spaces.

    Example:
        >>> setting_label("model.input_dropout")
        'input dropout'
    """
    return plain(name.rpartition(".")[2].replace("_", " "), limit=24)
