"""The dropout objective as a lower bound on every member: its gaps, and how tight it is."""

import math
from collections.abc import Sequence

from afterdrop.errors import ScoresError
from afterdrop.evaluation import Scores
from afterdrop.family.member import Member
from afterdrop.report.figure_style import (
    Axes,
    axes,
    colour,
    legend,
    line_style,
    log_axis,
    plain,
    power_colour,
    power_name,
    spread_out,
)

_NAMES = ("dropout objective", "+ Jensen gap", "+ normaliser gap")


def bounds_stacked(
    scores: Scores,
    *,
    alphas: Sequence[float] | None = None,
    multipliers: Sequence[float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Each member's objective as the dropout objective plus its two gaps, at T = 1.

    There is one group of bars per multiplier and, within it, one bar per alpha. Heights are mean
    log-probabilities of the targets, so the top of a bar is minus the member's cross entropy.

    Args:
        scores: The scores.
        alphas: The alphas to show; by default at most three of those evaluated.
        multipliers: The multipliers to show; by default at most five above 0. 0 is always shown.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> import afterdrop as ad, torch
        >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
        >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
        >>> scores = ad.evaluate(net, data, num_samples=4)
        >>> bounds_stacked(scores).get_xlabel()
        'multiplier of the dropout rates'
    """
    ax = axes(ax)
    grid = scores.protocol.grid
    powers = spread_out(grid.alphas, 3) if alphas is None else list(alphas)
    shown = spread_out(grid.stochastic, 5) if multipliers is None else list(multipliers)
    places, parts, ticks = [], [], []
    for group, multiplier in enumerate([0.0, *shown]):
        for index, alpha in enumerate(powers if multiplier else powers[:1]):
            found = scores.bounds(Member(alpha, multiplier))
            part = (found.bound, found.jensen_gap, found.normaliser_gap)
            if all(map(math.isfinite, part)):
                offset = (index - (len(powers) - 1) / 2) if multiplier else 0.0
                places.append(group + 0.27 * offset)
                parts.append(part)
                ticks.append(f"{alpha:g}" if multiplier else "DET")
    if not parts:
        raise ScoresError(
            "no member has a finite bound on these data, because some sample assigns probability 0 "
            "to a target; check the model's outputs"
        )
    _stack(ax, places, parts, ticks)
    ax.set_xticks(range(len(shown) + 1), [f"{m:g}" for m in (0.0, *shown)])
    ax.grid(False, axis="x")
    ax.set_xlabel("multiplier of the dropout rates")
    ax.set_ylabel("log-probability of the target (nats)")
    legend(ax)
    return ax


def _stack(
    ax: Axes, places: list[float], parts: list[tuple[float, float, float]], ticks: list[str]
) -> None:
    tops = [sum(part) for part in parts]
    bottom = min(part[0] for part in parts)
    floor = bottom - 0.25 * (max(tops) - bottom or 1.0)
    colours = (colour("slate"), colour("vermilion"), colour("blue"))
    for number, (name, face) in enumerate(zip(_NAMES, colours)):
        base = [floor if number == 0 else sum(part[:number]) for part in parts]
        heights = [part[number] - (floor if number == 0 else 0.0) for part in parts]
        pale = 0.35 if number == 0 else 1.0
        ax.bar(places, heights, 0.24, bottom=base, color=face, label=name, alpha=pale)
    for place, top, text in zip(places, tops, ticks):
        ax.annotate(text, (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    ax.set_ylim(floor, max(tops) + 0.1 * (max(tops) - floor))


def tightness(
    scores: Scores | Sequence[Scores],
    *,
    alphas: Sequence[float] | None = None,
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The Jensen gap against the variance of the predictions over masks, for each multiplier.

    The shaded band lies between the lower and the upper bound on the gap of K samples (Liao and
    Berg, 2017), averaged over targets. Both axes are logarithmic; points are labelled with their
    multiplier.

    Args:
        scores: The scores, or those of several runs, each of which is drawn at its largest alpha.
        alphas: The alphas to show; by default the smallest above 0 and the largest.
        labels: Legend entries of several runs.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> import afterdrop as ad, torch
        >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
        >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
        >>> scores = ad.evaluate(net, data, num_samples=4)
        >>> tightness(scores).get_xscale()
        'log'
    """
    ax = axes(ax)
    lines = _tightness_lines(scores, alphas, labels)
    last = len(lines) - 1
    drawn = [_tightness_line(ax, *line, numbered=i == last) for i, line in enumerate(lines)]
    ax.fill_between([], [], [], color=colour("slate"), alpha=0.3, label="theoretical bounds")
    ax.margins(x=0.1)
    if any(drawn):  # a logarithmic axis cannot be empty
        ax.set_xscale("log")
        ax.set_yscale("log")
        log_axis(ax.xaxis)
        log_axis(ax.yaxis)
    ax.set_xlabel("variance of the target's probability over masks")
    ax.set_ylabel("Jensen gap (nats)")
    legend(ax)
    return ax


def _tightness_lines(
    scores: Scores | Sequence[Scores],
    alphas: Sequence[float] | None,
    labels: Sequence[str] | None,
) -> list[tuple[Scores, float, str, str]]:
    """Scores, alpha, label and colour of each line."""
    if isinstance(scores, Scores):
        positive = [a for a in scores.protocol.grid.alphas if a > 0]
        shown = sorted({*positive[:1], *positive[-1:]}) if alphas is None else list(alphas)
        among = sorted({0.0, *shown})
        return [(scores, a, power_name(a), power_colour(among, a)) for a in shown]
    names = labels or [source.split for source in scores]
    return [
        (source, max(source.protocol.grid.alphas), plain(name), line_style(index)["color"])
        for index, (source, name) in enumerate(zip(scores, names))
    ]


def _tightness_line(
    ax: Axes, scores: Scores, alpha: float, name: str, shade: str, *, numbered: bool
) -> bool:
    """Draws a line; False if dropout changes no prediction, so that there is no gap to draw."""
    found = [(m, scores.bounds(Member(alpha, m))) for m in scores.protocol.grid.stochastic]
    found = [(m, b) for m, b in found if b.variance > 0 and 0 < b.jensen_gap < math.inf]
    x = [b.variance for _, b in found]
    band = [b.jensen_lower for _, b in found], [b.jensen_upper for _, b in found]
    ax.fill_between(x, *band, color=shade, alpha=0.2, linewidth=0)
    ax.plot(x, [b.jensen_gap for _, b in found], marker="o", color=shade, label=name)
    for multiplier, bounds in found if numbered else []:
        ax.annotate(
            f"{multiplier:g}",
            (bounds.variance, bounds.jensen_gap),
            (-3, 4),
            textcoords="offset points",
            ha="right",
            fontsize=7,
            color=colour("muted"),
        )
    return bool(found)
