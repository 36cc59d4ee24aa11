"""The family as a heat map over alpha and multiplier."""

import math

from afterdrop.evaluation import Scores
from afterdrop.family.member import Member
from afterdrop.report.figure_style import Axes, Rectangle, axes, colour

# Dark is best. Lightness rises evenly from blue to yellow, so the order of the steps is visible to
# colour-blind readers, in greyscale print, and on light and dark pages.
_STEPS = (
    "#0b2a5b",
    "#124a7d",
    "#1b6b93",
    "#2f8a9c",
    "#57a69f",
    "#86c0a4",
    "#b3d6ae",
    "#dbe8c3",
    "#f4f4dc",
)
_DARK = 3  # the first steps, on which text is white


def family_map(
    scores: Scores, *, tuned: bool = False, chosen: Member | None = None, ax: Axes | None = None
) -> Axes:
    """Cross entropy of every member, with one row per multiplier and one column per alpha.

    Colours follow the square root of the distance to the best member, which makes small differences
    near it visible. At multiplier 0 all alphas are the same model, shown as one wide cell.

    Args:
        scores: The scores.
        tuned: Whether each member is shown at its own optimal temperature, which is written below
            its cross entropy, instead of at T = 1.
        chosen: The member whose cell gets a frame.
        ax: Axes to draw into; by default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> import afterdrop as ad, torch
        >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
        >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
        >>> scores = ad.evaluate(net, data, num_samples=4)
        >>> family_map(scores).get_ylabel()
        'multiplier of the dropout rates'
    """
    grid = scores.protocol.grid
    ax = axes(ax, 1.1 + 0.34 * (len(grid.stochastic) + 1))
    found = {member: _value(scores, member, tuned) for member in grid}
    finite = [value for value, _ in found.values() if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    for member, (value, text) in found.items():
        row = 0 if member.deterministic else grid.stochastic.index(member.multiplier) + 1
        left = 0 if member.deterministic else grid.alphas.index(member.alpha)
        width = len(grid.alphas) if member.deterministic else 1
        best = bool(finite) and value == low
        _cell(ax, left, row, width, text, _step(value, low, high), best=best)
        if chosen is not None and member == chosen.at_temperature(1.0):
            frame = (left + 0.04, row + 0.04), width - 0.08, 0.92
            ax.add_patch(
                Rectangle(*frame, fill=False, edgecolor=colour("vermilion"), linewidth=2.4)
            )
    _frame(ax, [f"{m:g}" for m in (0.0, *grid.stochastic)], [f"{a:g}" for a in grid.alphas])
    return ax


def _value(scores: Scores, member: Member, tuned: bool) -> tuple[float, str]:
    if not tuned:
        value = scores.xe(member).value
        return value, f"{value:.4f}" if math.isfinite(value) else "n/a"
    if not math.isfinite(scores.xe(member).value):
        return math.nan, "n/a"
    fit = scores.fit(member)
    value = scores.xe(fit.member).value
    edge = "!" if fit.at_edge else ""
    text = f"{value:.4f}\nT {fit.member.temperature:.2f}{edge}"
    return value, text if not member.deterministic else text.replace("\n", "   ")


def _step(value: float, low: float, high: float) -> int | None:
    if not math.isfinite(value):
        return None
    distance = math.sqrt((value - low) / (high - low)) if high > low else 0.0
    return min(int(distance * len(_STEPS)), len(_STEPS) - 1)


def _cell(
    ax: Axes, left: int, row: int, width: int, text: str, step: int | None, *, best: bool
) -> None:
    face = "none" if step is None else _STEPS[step]
    ax.add_patch(
        Rectangle(
            (left, row),
            width,
            1,
            facecolor=face,
            edgecolor=colour("paper"),
            linewidth=1.2,
            hatch="////" if step is None else None,
        )
    )
    ink = colour("muted") if step is None else "#ffffff" if step < _DARK else "#000000"
    ax.text(
        left + width / 2,
        row + 0.5,
        f"★ {text}" if best else text,
        ha="center",
        va="center",
        color=ink,
        fontsize=8,
        fontweight="bold" if best else "normal",
        linespacing=1.15,
    )


def _frame(ax: Axes, rows: list[str], columns: list[str]) -> None:
    ax.set_xlim(0, len(columns))
    ax.set_ylim(0, len(rows))
    ax.set_xticks([i + 0.5 for i in range(len(columns))], columns)
    ax.set_yticks([i + 0.5 for i in range(len(rows))], rows)
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("power of the mean, α  (0 geometric, 1 arithmetic)")
    ax.set_ylabel("multiplier of the dropout rates")
