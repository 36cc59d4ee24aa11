"""Cross entropy and gain by the training frequency of the class, and gain per class.

Shapes: V classes.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from afterdrop.errors import ScoresError
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
    series,
)

CountRange = tuple[float, float]


def frequency_bands(counts: Tensor) -> list[CountRange]:
    """Bands at powers of ten that cover all counts: 0, 1 to 10, 11 to 100, ...

    Example:
        >>> frequency_bands(torch.tensor([0, 3, 250]))
        [(-1.0, 0.0), (0.0, 10.0), (10.0, 100.0), (100.0, inf)]
    """
    top = max(int(counts.max()), 1)
    edges = [10.0**i for i in range(1, max(1, math.ceil(math.log10(top))))]
    inner = [0.0, *edges, math.inf]
    never = [(-1.0, 0.0)] if bool((counts == 0).any()) else []
    return never + list(itertools.pairwise(inner))


def band_name(band: CountRange) -> str:
    """The label of a band.

    Example:
        >>> [band_name(b) for b in ((-1, 0), (0, 10), (10, 100), (100, math.inf))]
        ['never', '1 to 10', '11 to 100', 'over 100']
    """
    low, high = band
    if high == 0:
        return "never"
    return f"over {low:,.0f}" if math.isinf(high) else f"{low + 1:,.0f} to {high:,.0f}"


def xe_by_frequency(
    scores: Scores | Sequence[Scores],
    members: Sequence[Member],
    counts: Tensor,
    *,
    bands: Sequence[CountRange] | None = None,
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Cross entropy by training frequency of the target's class.

    Bars are one standard error. A band without targets is left out.

    Args:
        scores: One for all members, or one per member (several runs on the same data).
        members: The members, with their temperatures.
        counts: [V] training counts of the classes.
        bands: Pairs (low, high) for classes with low < count <= high; by default powers of ten.
        labels: Legend entries.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Raises:
        ScoresError: If no band has a target.

    Example:
        >>> import afterdrop as ad
        >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
        >>> scores = ad.evaluate(net, [(torch.randn(16, 4), torch.arange(16) % 3)], num_samples=4)
        >>> xe_by_frequency(scores, [ad.DET], torch.tensor([5, 50, 500])).get_ylabel()
        'XE (nats)'
    """
    ax = axes(ax)
    lines = series(scores, members, labels)
    _draw_bands(ax, lines, counts, bands, against=None)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("XE (nats)")
    legend(ax)
    return ax


def gain_by_frequency(
    scores: Scores | Sequence[Scores],
    members: Sequence[Member],
    counts: Tensor,
    *,
    bands: Sequence[CountRange] | None = None,
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Gain over deterministic evaluation at T = 1, by training frequency of the target's class.

    Bars are one standard error of the paired difference. A band without targets is left out.

    Args:
        scores: One for all members, or one per member (several runs on the same data).
        members: The members, with their temperatures.
        counts: [V] training counts of the classes.
        bands: Pairs (low, high) for classes with low < count <= high; by default powers of ten.
        labels: Legend entries.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Raises:
        ScoresError: If no band has a target.

    Example:
        >>> import afterdrop as ad
        >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
        >>> scores = ad.evaluate(net, [(torch.randn(16, 4), torch.arange(16) % 3)], num_samples=4)
        >>> ax = gain_by_frequency(scores, [ad.AMC], torch.tensor([5, 50, 500]))
        >>> [tick.get_text() for tick in ax.get_xticklabels()]
        ['1 to 10', '11 to 100', 'over 100']
    """
    ax = axes(ax)
    lines = series(scores, members, labels)
    _draw_bands(ax, lines, counts, bands, against=DET)
    ax.axhline(0, color=colour("muted"), linewidth=0.8)
    ax.set_ylabel("gain over deterministic, T = 1 (nats)")
    legend(ax)
    return ax


def _draw_bands(
    ax: Axes,
    lines: list[Series],
    counts: Tensor,
    bands: Sequence[CountRange] | None,
    against: Member | None,
) -> None:
    """Draws a point with an error bar per line and band; gains over `against` if it is given."""
    chosen = frequency_bands(counts) if bands is None else list(bands)
    found = [s.scores.by_frequency(s.member, counts, chosen, against) for s in lines]
    full = [i for i in range(len(chosen)) if any(rows[i][1] for rows in found)]
    if not full:
        raise ScoresError(
            f"no target belongs to a class whose training count is in bands={list(chosen)}; pass "
            "bands that cover the counts"
        )
    sign = 1.0 if against is None else -1.0
    for index, (line, rows) in enumerate(zip(lines, found)):
        shift = 0.1 * (index - (len(lines) - 1) / 2)
        here = [(place + shift, rows[i][2]) for place, i in enumerate(full)]
        known = [(place, e) for place, e in here if e is not None]
        ax.errorbar(
            [place for place, _ in known],
            [sign * e.value for _, e in known],
            [e.error if math.isfinite(e.error) else 0.0 for _, e in known],
            label=plain(line.label),
            elinewidth=0.9,
            **line_style(index),
        )
    ax.margins(y=0.18)
    ax.set_xticks(range(len(full)), [band_name(chosen[i]) for i in full])
    ax.set_xlim(-0.5, len(full) - 0.5)
    ax.set_xlabel("occurrences of the class in training (grey: number of targets)")
    _annotate_sizes(ax, [found[0][i][1] for i in full])


def _annotate_sizes(ax: Axes, sizes: list[int]) -> None:
    """Writes the number of targets of each band at the bottom."""
    for place, size in enumerate(sizes):
        ax.annotate(
            f"{size:,}",
            (place, 0),
            (0, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color=colour("muted"),
        )


def gain_by_class(
    scores: Scores,
    member: Member,
    names: Sequence[str],
    counts: Tensor | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Gain over deterministic evaluation at T = 1 for each class; meant for few classes.

    Args:
        scores: The scores.
        member: The member, with its temperature.
        names: [V] names of the classes.
        counts: [V] training counts, which the classes are sorted by and labelled with.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> import afterdrop as ad
        >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
        >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
        >>> scores = ad.evaluate(net, data, num_samples=4)
        >>> ax = gain_by_class(scores, ad.AMC, ["cat", "dog", "<b>"])
        >>> [tick.get_text() for tick in ax.get_yticklabels()]
        ['<b>', 'dog', 'cat']
    """
    classes = scores.num_kinds
    ax = axes(ax, 1.2 + 0.24 * classes)
    singles = torch.arange(classes)
    order = singles if counts is None else counts.argsort(descending=True, stable=True)
    # With its index in place of its count, each class is a band of its own.
    rows = scores.by_frequency(member, singles, [(i - 0.5, i + 0.5) for i in order.tolist()], DET)
    rows, shown = rows[::-1], order.tolist()[::-1]
    here = [(place, e) for place, (_, _, e) in enumerate(rows) if e is not None]
    ax.errorbar(
        [-e.value for _, e in here],
        [place for place, _ in here],
        xerr=[e.error if math.isfinite(e.error) else 0.0 for _, e in here],
        fmt="o",
        color=colour("blue"),
        elinewidth=0.9,
    )
    ax.axvline(0, color=colour("muted"), linewidth=0.8)
    ticks = [plain(names[i], 24) for i in shown]
    if counts is not None:
        ticks = [f"{tick}  ({int(counts[i]):,})" for tick, i in zip(ticks, shown)]
    ax.set_yticks(range(classes), ticks)
    ax.set_xlabel("gain over deterministic, T = 1 (nats)")
    ax.set_ylabel("class" if counts is None else "class (training examples)")
    return ax
