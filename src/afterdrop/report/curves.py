"""Cross entropy against temperature, and against the number of samples."""

import math
from collections.abc import Sequence

import torch

from afterdrop.evaluate.scores import Scores
from afterdrop.family.member import DET, Member
from afterdrop.report.style import (
    Axes,
    axes,
    colour,
    line_style,
    plain,
    power_colour,
    power_name,
    series,
    spread_out,
)

_POINTS = 41  # of a temperature curve: smooth at the width of a column


def temperature_curves(
    scores: Scores | Sequence[Scores],
    members: Sequence[Member],
    *,
    labels: Sequence[str] | None = None,
    low: float | None = None,
    high: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Cross entropy against temperature, less that of deterministic evaluation at T = 1.

    Differences are paired, so the bands (one standard error) are those of what is compared and not
    of how hard the data are. Each curve's lowest point is marked.

    Args:
        scores: One for all members, or one a member (several runs).
        members: Each is drawn over all temperatures; its own does not matter.
        labels: Names for the legend.
        low: Lowest temperature; by default a little below every minimum.
        high: Highest temperature; by default a little above every minimum.
        ax: Where to draw; a new figure by default.

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
    low = min(1.0, *best) / 1.4 if low is None else low
    high = max(1.0, *best) * 1.4 if high is None else high
    for index, line in enumerate(lines):
        nodes = line.scores.protocol.nodes
        if line.member.temper == "sample":
            nodes = line.scores.protocol.sample_nodes
        ends = math.log(max(low, nodes.low)), math.log(min(high, nodes.high))
        points = torch.linspace(*ends, _POINTS, dtype=torch.float64).exp().tolist()
        found = [line.scores.difference(line.member.at_temperature(t), DET) for t in points]
        values, errors = [e.value for e in found], [e.error for e in found]
        if not any(map(math.isfinite, values)):
            continue
        look = line_style(index)
        marker = look.pop("marker")
        ax.plot(points, values, label=plain(line.label), **look)
        ax.fill_between(
            points,
            [v - e for v, e in zip(values, errors)],
            [v + e for v, e in zip(values, errors)],
            color=look["color"],
            alpha=0.14,
            linewidth=0,
        )
        best = min(range(len(values)), key=lambda i: values[i])
        ax.plot(points[best], values[best], marker=marker, color=look["color"])
    ax.axhline(0, color=colour("muted"), linewidth=0.8)
    ax.axvline(1, color=colour("muted"), linewidth=0.8)
    _temperature_axis(ax, low, high)
    ax.set_ylabel("XE minus deterministic at T = 1 (nats)")
    _zoom(ax)
    ax.legend(loc="best")
    return ax


def _temperature_axis(ax: Axes, low: float, high: float) -> None:
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    around = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0)
    ticks = spread_out([t for t in around if low <= t <= high], 7)
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel("temperature T")


def _zoom(ax: Axes) -> None:
    """Cuts off what lies far above the minima, which would flatten them."""
    curves = [[float(y) for y in line.get_ydata()] for line in ax.lines]
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
    """What few mask samples cost in cross entropy at T = 1, with and without correction.

    Shown is the distance to the best guess of the K = ∞ member, `Estimate.corrected` of all samples.
    The corrected value at K is `2·XE(K) − XE(K/2)`: on zero, if the bias falls as 1/K. Bars are
    standard errors from the masks, where they are known (at the last point).

    Args:
        scores: Of `evaluate(blocks=16)` for five points; two otherwise.
        multiplier: Which; the largest by default.
        alphas: Which; at most three of those evaluated by default.
        ax: Where to draw; a new figure by default.

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
    for alpha in shown:
        curve = scores.curve(Member(alpha, at, temper=grid.temper))
        limit = curve[-1][1].corrected
        ks, above = [float(k) for k, _ in curve], [e.value - limit for _, e in curve]
        look = {"color": power_colour(shown, alpha)}
        ax.plot(ks, above, marker="o", label=power_name(alpha), **look)
        corrected = [2 * b - a for a, b in zip(above, above[1:])]
        ax.plot(ks[1:], corrected, marker="o", markerfacecolor="none", linestyle="--", **look)
        error = curve[-1][1].mc_error
        if math.isfinite(error):
            ax.errorbar(ks[-1], above[-1], error, fmt="none", **look)
    ax.plot([], [], color=colour("muted"), linestyle="--", marker="o", markerfacecolor="none",
            label="corrected for few samples")  # fmt: skip
    ax.axhline(0, color=colour("muted"), linewidth=0.8)
    ax.set_xscale("log", base=2)
    ticks = [float(k) for k, _ in scores.curve(Member(shown[0], at, temper=grid.temper))]
    ax.set_xticks(ticks, [f"{k:g}" for k in ticks])
    ax.minorticks_off()
    ax.set_xlabel(f"number of mask samples K (dropout rates ×{at:g})")
    ax.set_ylabel("XE above its value at K = ∞ (nats)")
    ax.legend(loc="best")
    return ax
