"""How reliable predicted quantiles of numbers are."""

from collections.abc import Sequence

from afterdrop.evaluation import Scores
from afterdrop.evaluation.scores.density_metrics import quantile_calibration
from afterdrop.family.member import Member
from afterdrop.report.figure_style import Axes, axes, colour, legend, line_style, plain, series


def quantile_diagram(
    scores: Scores | Sequence[Scores],
    members: Sequence[Member],
    *,
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Share of targets below each predicted quantile, against the level of the quantile.

    Args:
        scores: One for all members, or one per member (several runs).
        members: The members, with their temperatures.
        labels: Legend entries.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> import afterdrop as ad, torch
        >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        >>> data = [(torch.randn(16, 4), torch.randn(16))]
        >>> grid = ad.Grid((0, 1), (0, 1))
        >>> scores = ad.evaluate(net, data, grid=grid, num_samples=4, likelihood="squared_error")
        >>> quantile_diagram(scores, [ad.DET]).get_xlabel()
        'level of the predicted quantile'
    """
    ax = axes(ax)
    ax.plot([0, 1], [0, 1], color=colour("muted"), linewidth=0.9, label="perfectly calibrated")
    for index, line in enumerate(series(scores, members, labels)):
        levels, shares = quantile_calibration(line.scores, line.member)
        error = line.scores.calibration_error(line.member).value
        name = f"{plain(line.label)}  (mean error {error:.3f})"
        ax.plot(levels.tolist(), shares.tolist(), label=name, **line_style(index))
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    ax.set_xlabel("level of the predicted quantile")
    ax.set_ylabel("share of targets below it")
    legend(ax)
    return ax
