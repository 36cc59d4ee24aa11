"""How reliable confidences are: reliability diagrams and risk-coverage curves."""

import math
from collections.abc import Sequence

from torch import Tensor

from afterdrop.evaluation import Scores
from afterdrop.family.calibration import risk_coverage
from afterdrop.family.member import Member
from afterdrop.report.figure_style import Axes, axes, colour, legend, line_style, plain, series

_BIN = 40  # fewest targets per bin for which an error bar is meaningful
_CERTAIN = 0.99  # above this median confidence, nearly all bins of equal size would lie at 1
_POINTS = 100  # per risk curve


def reliability_diagram(
    scores: Scores | Sequence[Scores],
    members: Sequence[Member],
    *,
    labels: Sequence[str] | None = None,
    num_bins: int = 10,
    ax: Axes | None = None,
) -> Axes:
    """Accuracy against confidence, in bins with equal numbers of targets.

    If most predictions are nearly certain, each bin has half as many targets as the next more
    confident one: otherwise all uncertain predictions would share a single bin. Error bars are
    binomial standard errors; the legend shows the expected calibration error (ECE, 15 bins of equal
    width).

    Args:
        scores: One for all members, or one per member (several runs).
        members: The members, with their temperatures.
        labels: Legend entries.
        num_bins: Largest number of bins; fewer are used for few targets.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> import afterdrop as ad, torch
        >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
        >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
        >>> scores = ad.evaluate(net, data, num_samples=4)
        >>> reliability_diagram(scores, [ad.DET, ad.AMC]).get_ylabel()
        'accuracy (share of correct predictions)'
    """
    ax = axes(ax)
    ax.plot([0, 1], [0, 1], color=colour("muted"), linewidth=0.9, label="perfectly calibrated")
    lowest = 1.0
    for index, line in enumerate(series(scores, members, labels)):
        confidence = line.scores.confidence(line.member)
        correct = line.scores.correct(line.member)
        points = [
            (confidence[rows].mean().item(), correct[rows].double().mean().item(), len(rows))
            for rows in _bins(confidence, num_bins)
        ]
        errors = [math.sqrt(right * (1 - right) / count) for _, right, count in points]
        lowest = min([lowest, *(min(x, y - error) for (x, y, _), error in zip(points, errors))])
        name = f"{plain(line.label)}  (ECE {line.scores.ece(line.member).value:.3f})"
        ax.errorbar(
            [x for x, _, _ in points],
            [y for _, y, _ in points],
            errors,
            label=name,
            elinewidth=0.9,
            **line_style(index),
        )
    start = max(0.0, 0.1 * math.floor(10 * lowest - 1)) if math.isfinite(lowest) else 0.0
    ax.set_xlim(start, 1.01)
    ax.set_ylim(start, 1.0 + 0.03 * (1 - start))
    ax.set_xlabel("confidence (probability of the predicted class)")
    ax.set_ylabel("accuracy (share of correct predictions)")
    legend(ax)
    return ax


def _bins(confidence: Tensor, limit: int) -> list[Tensor]:
    """Indices of the targets of each bin, from the least to the most confident bin."""
    order = confidence.argsort(stable=True)
    if confidence.median() <= _CERTAIN:
        wanted = max(2, min(limit, len(order) // _BIN))
        return [rows for rows in order.tensor_split(wanted) if len(rows)]
    starts: list[int] = []
    end = len(order)
    while len(starts) < limit - 1 and end // 2 >= _BIN:
        end //= 2
        starts.insert(0, end)
    return list(order.tensor_split(starts))


def risk_coverage_curves(
    scores: Scores | Sequence[Scores],
    members: Sequence[Member],
    *,
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Error rate among the most confident predictions, against the share of predictions kept.

    Args:
        scores: One for all members, or one per member (several runs).
        members: The members, with their temperatures.
        labels: Legend entries.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> import afterdrop as ad, torch
        >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
        >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
        >>> scores = ad.evaluate(net, data, num_samples=4)
        >>> ax = risk_coverage_curves(scores, [ad.DET])
        >>> everything = 100 * (1 - scores.accuracy(ad.DET).value)
        >>> bool(abs(ax.lines[0].get_ydata()[-1] - everything) < 1e-4)
        True
    """
    ax = axes(ax)
    for index, line in enumerate(series(scores, members, labels)):
        coverage, risk = risk_coverage(
            line.scores.confidence(line.member), line.scores.correct(line.member)
        )
        keep = _thinned(len(coverage))
        look = line_style(index)
        look.pop("marker")
        ax.plot(
            [100 * coverage[i].item() for i in keep],
            [100 * risk[i].item() for i in keep],
            label=plain(line.label),
            **look,
        )
    ax.set_xlim(0, 100)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("predictions kept, most confident first (%)")
    ax.set_ylabel("errors among those kept (%)")
    legend(ax)
    return ax


def _thinned(count: int) -> list[int]:
    """Evenly spaced indices including the last; the first few, which are noisy, are left out."""
    first = min(count // 50, count - 1)
    steps = min(_POINTS, count - first)
    return sorted({first + round((i + 1) * (count - first) / steps) - 1 for i in range(steps)})
