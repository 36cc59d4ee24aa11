"""Cross entropy against temperature, and against the number of samples."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from afterdrop.evaluation import Scores
from afterdrop.family.member import DET, Member
from afterdrop.report.figure_style import (
    Axes,
    Series,
    axes,
    colour,
    legend,
    line_style,
    plain,
    power_colour,
    power_name,
    series,
    spread_out,
)

_POINTS = 31  # per temperature curve: looks smooth at the width of a column


def temperature_curves(
    scores: Scores | Sequence[Scores],
    members: Sequence[Member],
    *,
    labels: Sequence[str] | None = None,
    low: float | None = None,
    high: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Cross entropy against temperature, relative to deterministic evaluation at T = 1.

    Differences are paired by target, so the bands (one standard error) do not include how much
    targets differ in difficulty. The lowest point of each curve is marked.

    Args:
        scores: One for all members, or one per member (several runs).
        members: Each is drawn over a range of temperatures; its own temperature is ignored.
        labels: Legend entries.
        low: Lowest temperature; by default slightly below all minima.
        high: Highest temperature; by default slightly above all minima.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> import afterdrop as ad, torch
        >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
        >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
        >>> scores = ad.evaluate(net, data, num_samples=4)
        >>> temperature_curves(scores, [ad.DET, ad.AMC]).get_xlabel()
        'temperature T'
    """
    ax = axes(ax)
    lines = series(scores, members, labels)
    best = [line.scores.fit(line.member).member.temperature for line in lines]
    best = [1.0, *filter(math.isfinite, best)]
    ends = min(best) / 1.4 if low is None else low, max(best) * 1.4 if high is None else high
    for index, line in enumerate(lines):
        _temperature_curve(ax, line, index, ends)
    ax.axhline(0, color=colour("muted"), linewidth=0.8)
    ax.axvline(1, color=colour("muted"), linewidth=0.8)
    _temperature_axis(ax, *ends)
    ax.set_ylabel("XE minus deterministic at T = 1 (nats)")
    _zoom(ax)
    legend(ax)
    return ax


def _temperature_curve(ax: Axes, line: Series, index: int, ends: tuple[float, float]) -> None:
    protocol = line.scores.protocol
    nodes = protocol.nodes if line.member.temper == "mean" else protocol.sample_nodes
    if not protocol.has_classes:
        nodes = line.scores.density_nodes
    low, high = math.log(max(ends[0], nodes.low)), math.log(min(ends[1], nodes.high))
    points = torch.linspace(low, high, _POINTS, dtype=torch.float64).exp().tolist()
    found = [line.scores.difference(line.member.at_temperature(t), DET) for t in points]
    values, errors = [e.value for e in found], [e.error for e in found]
    if not all(map(math.isfinite, values)):
        return
    look = line_style(index)
    marker = look.pop("marker")
    ax.plot(points, values, label=plain(line.label), **look)
    if all(map(math.isfinite, errors)):
        below, above = ([v + sign * e for v, e in zip(values, errors)] for sign in (-1, 1))
        ax.fill_between(points, below, above, color=look["color"], alpha=0.14, linewidth=0)
    lowest = values.index(min(values))
    ax.plot(points[lowest], values[lowest], marker=marker, color=look["color"])


def _temperature_axis(ax: Axes, low: float, high: float) -> None:
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    wide = (0.125, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
    near = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.7)
    ticks = [t for t in (near if high / low < 2.5 else wide) if low <= t <= high]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel("temperature T")


def _zoom(ax: Axes) -> None:
    """Limits the y axis, because values far above the minima would flatten the curves."""
    curves = [np.asarray(line.get_ydata(), float).tolist() for line in ax.lines]
    minima = [min(c) for c in curves if len(c) > 2 and all(map(math.isfinite, c))]
    lowest, highest = min(0.0, *minima, 0.0), max(0.0, *minima, 0.0)
    reach = highest - lowest or 1.0
    ax.set_ylim(lowest - 0.35 * reach, highest + 1.3 * reach)


def sample_curves(
    scores: Scores,
    *,
    multiplier: float | None = None,
    alphas: Sequence[float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Excess cross entropy due to a finite number of mask samples K, at T = 1.

    The reference is the best estimate of the member at K = ∞: `Estimate.corrected` of all samples.
    The corrected value at K is `2·XE(K) − XE(K/2)`; it is zero if the bias falls as 1/K. Bars are
    standard errors from the masks, which are known at the last point only.

    Args:
        scores: Scores with 16 blocks give five points, with the default of 2 blocks two points.
        multiplier: The multiplier to show; by default the largest.
        alphas: The alphas to show; by default at most three of those evaluated.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> import afterdrop as ad, torch
        >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
        >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
        >>> scores = ad.evaluate(net, data, num_samples=16, blocks=8)
        >>> sample_curves(scores, alphas=[1.0]).lines[0].get_xdata().tolist()
        [2.0, 4.0, 8.0, 16.0]
    """
    ax = axes(ax)
    grid = scores.protocol.grid
    at = max(grid.stochastic) if multiplier is None else multiplier
    shown = spread_out(grid.alphas, 3) if alphas is None else list(alphas)
    hollow: dict[str, Any] = {"marker": "o", "markerfacecolor": "none", "linestyle": "--"}
    for alpha in shown:
        curve = scores.curve(Member(alpha, at, temper=grid.temper))
        last = curve[-1][1]
        limit = last.value if math.isnan(last.corrected) else last.corrected  # of one sample
        ks, above = [float(k) for k, _ in curve], [e.value - limit for _, e in curve]
        shade = power_colour(shown, alpha)
        ax.plot(ks, above, marker="o", label=power_name(alpha), color=shade)
        corrected = [2 * b - a for a, b in itertools.pairwise(above)]
        ax.plot(ks[1:], corrected, color=shade, **hollow)
        if math.isfinite(last.mc_error):
            ax.errorbar(ks[-1], above[-1], last.mc_error, fmt="none", color=shade)
    ax.plot([], [], color=colour("muted"), label="corrected", **hollow)
    ax.axhline(0, color=colour("muted"), linewidth=0.8)
    ax.set_xscale("log", base=2)
    ticks = [float(k) for k, _ in scores.curve(Member(shown[0], at, temper=grid.temper))]
    ax.set_xticks(ticks, [f"{k:g}" for k in ticks])
    ax.minorticks_off()
    ax.set_xlabel(f"number of mask samples K (dropout rates ×{at:g})")
    ax.set_ylabel("XE above its value at K = ∞ (nats)")
    legend(ax)
    return ax
