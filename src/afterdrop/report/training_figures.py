"""Training and validation curves from the metrics of runs."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from afterdrop.report.figure_style import Axes, axes, colour, legend, line_style, plain

_MARKS = 15  # markers per curve, regardless of the number of intervals


def training_curves(metrics: Sequence[Mapping[str, Any]], *, ax: Axes | None = None) -> Axes:
    """Training loss and deterministic validation cross entropy against the training step.

    Args:
        metrics: The lines of `metrics.jsonl` (`train.folder.RunFolder.read_metrics`).
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> line = {"step": 0, "loss": None, "xe": 2.3, "xe_optimal": 2.2, "learning_rate": 1.0}
        >>> ax = training_curves([line, line | {"step": 10, "loss": 1.5, "xe": 1.2}])
        >>> ax.get_xlabel()
        'training step'
    """
    ax = axes(ax)
    shown = (
        ("loss", "training loss, with dropout"),
        ("xe", "validation XE, deterministic, T = 1"),
        ("xe_optimal", "validation XE at the optimal T"),
    )
    for index, (name, label) in enumerate(shown):
        steps, values = _column(metrics, name)
        every = max(1, len(steps) // _MARKS)
        ax.plot(steps, values, label=label, markevery=every, **line_style(index))
    rates = [(line["step"], line.get("learning_rate")) for line in metrics]
    drops = [b[0] for a, b in itertools.pairwise(rates) if b[1] is not None and b[1] != a[1]]
    for number, step in enumerate(drops):
        label = (
            "learning rate drops" if number == 0 else "_"
        )  # matplotlib ignores labels that start with "_"
        ax.axvline(step, color=colour("muted"), linestyle=":", linewidth=1.0, label=label)
    _finish(ax)
    return ax


def validation_curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], *, ax: Axes | None = None
) -> Axes:
    """Deterministic validation cross entropy of several runs against the training step.

    Args:
        runs: The lines of `metrics.jsonl` for each run, by name.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> line = {"step": 0, "xe": 2.3}
        >>> len(validation_curves({"a": [line], "b": [line]}).lines)
        2
    """
    ax = axes(ax)
    for index, (name, metrics) in enumerate(runs.items()):
        steps, values = _column(metrics, "xe")
        every = max(1, len(steps) // _MARKS)
        ax.plot(steps, values, label=plain(name), markevery=every, **line_style(index))
    _finish(ax)
    ax.set_ylabel("validation XE, deterministic (nats)")
    return ax


def _column(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric; missing and non-finite values are NaN, which leaves a gap."""
    values = [line.get(name) for line in metrics]
    return (
        [float(line["step"]) for line in metrics],
        [math.nan if v is None or not math.isfinite(v) else float(v) for v in values],
    )


def _finish(ax: Axes) -> None:
    """Labels the axes and limits the y axis, because the first values would flatten the rest."""
    curves = [np.asarray(line.get_ydata(), float)[1:].tolist() for line in ax.lines]
    values = list(itertools.chain(*curves))
    later = sorted(v for v in values if math.isfinite(v))
    if len(later) > 8:
        low, high = later[0], later[int(0.93 * len(later))]
        ax.set_ylim(low - 0.06 * (high - low or 1.0), high + 0.25 * (high - low or 1.0))
    ax.set_xlabel("training step")
    ax.set_ylabel("nats per target")
    legend(ax)
