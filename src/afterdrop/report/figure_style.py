"""The style of figures: named colours, axes without global state, legends and labels.

Every colour has a name, a light value and a dark value. Figures are drawn with the light values; in
a page they are replaced by CSS variables (`figure_svg.inline_svg`), so that figures follow the
reader's colour scheme. Series differ in marker and dash pattern as well as in colour.
"""

import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from afterdrop.errors import ExtraError, ScoresError
from afterdrop.evaluation import Scores
from afterdrop.family.member import Member
from afterdrop.plain_text import one_line

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
except ImportError as error:
    raise ExtraError.of(error, "figures and reports need matplotlib", "report") from error

__all__ = [
    "Axes",
    "Figure",
    "Rectangle",
]  # re-exported, because a missing matplotlib is reported here

THEME: dict[str, tuple[str, str]] = {  # name: light, dark
    "ink": ("#1c2127", "#e6e9ed"),
    "muted": ("#56606c", "#a7b0bc"),
    "grid": ("#dde1e6", "#333c47"),
    "paper": ("#fefefe", "#15191f"),
    "blue": ("#0069b4", "#63b1f6"),
    "vermilion": ("#c4481c", "#ff9569"),
    "teal": ("#007f6b", "#3fc9b1"),
    "purple": ("#8c3a89", "#dc9cdf"),
    "ochre": ("#946500", "#e0b64f"),
    "slate": ("#5e6a77", "#aab4bf"),
    # Alphas from the geometric mean (0) to the arithmetic mean (4): a ramp from blue to red.
    "power0": ("#0a5fae", "#68b4ff"),
    "power1": ("#5a62b5", "#9ba6ff"),
    "power2": ("#91559f", "#cf9be6"),
    "power3": ("#b94a74", "#fb95b4"),
    "power4": ("#c5461f", "#ff9a6b"),
}
SERIES = ("blue", "vermilion", "teal", "purple", "ochre", "slate")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))
WIDTH, HEIGHT = 5.0, 3.5  # inches: legible on a phone and in a column

_OURS = "afterdrop"  # the gid of figures created by `axes`
_SHORT = 25  # characters of a label that fits into half the width
_ROW = 0.19  # inches per legend row

STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": THEME["muted"][0],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": THEME["ink"][0],
    "axes.labelsize": 10,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.unicode_minus": True,
    "errorbar.capsize": 2.0,
    "figure.facecolor": "none",
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "grid.color": THEME["grid"][0],
    "grid.linewidth": 0.7,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "text.color": THEME["ink"][0],
    "xtick.color": THEME["muted"][0],
    "xtick.labelsize": 9,
    "ytick.color": THEME["muted"][0],
    "ytick.labelsize": 9,
}


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a figure: a member, the Scores it is evaluated in, and its legend entry."""

    scores: Scores
    member: Member
    label: str


def series(
    scores: Scores | Sequence[Scores],
    members: Sequence[Member],
    labels: Sequence[str] | None = None,
) -> list[Series]:
    """Pairs members with their Scores and labels, one per line of a figure.

    Args:
        scores: One for all members, or one per member.
        members: The members.
        labels: Legend entries; by default a description of each member.

    Raises:
        ScoresError: If the lengths differ.
    """
    sources = [scores] * len(members) if isinstance(scores, Scores) else list(scores)
    names = [str(member) for member in members] if labels is None else list(labels)
    if not len(sources) == len(members) == len(names):
        raise ScoresError(
            f"got {len(sources)} scores, {len(members)} members and {len(names)} labels; pass the "
            "same number of each, or one Scores for all members"
        )
    return [Series(*line) for line in zip(sources, members, names)]


def colour(name: str) -> str:
    """The light value of a named colour."""
    return THEME[name][0]


def power_colour(alphas: Sequence[float], alpha: float) -> str:
    """The colour of an alpha, by its rank among the alphas that a figure shows."""
    place = sorted(alphas).index(alpha) / max(len(alphas) - 1, 1)
    return colour(f"power{round(4 * place)}")


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dash pattern of the series with this index."""
    return {
        "color": colour(SERIES[index % len(SERIES)]),
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def styled(salt: str | None = None) -> AbstractContextManager[None]:
    """A context with this style in matplotlib's settings; `salt` makes ids in SVG reproducible."""
    return matplotlib.rc_context({**STYLE, "svg.hashsalt": salt})


def axes(ax: Axes | None, height: float = HEIGHT) -> Axes:
    """The given axes, or those of a new figure in this style.

    The figure is not registered with pyplot and does not have to be closed. To save it, call
    `ax.figure.savefig(...)`.
    """
    if ax is not None:
        return ax
    with styled():
        figure = Figure((WIDTH, height), layout="constrained")
        figure.set_gid(_OURS)
        return figure.add_subplot()


def legend(ax: Axes) -> None:
    """Adds a legend above the axes; figures created by `axes` grow by its height."""
    _, labels = ax.get_legend_handles_labels()
    if not labels:
        return
    columns = 2 if max(map(len, labels)) <= _SHORT else 1
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.01),
        ncols=columns,
        borderaxespad=0.0,
        columnspacing=1.4,
        labelspacing=0.3,
    )
    figure = ax.get_figure(root=True)
    if figure is not None and figure.get_gid() == _OURS:
        rows = -(-len(labels) // columns)
        figure.set_size_inches(WIDTH, figure.get_size_inches()[1] + _ROW * rows)


def log_axis(axis: Any, *, narrow: bool = False) -> None:
    """Sets decimal tick labels on a logarithmic axis, few enough not to overlap."""
    low, high = axis.get_view_interval()
    decades = (math.log10(high / low) if low > 0 else 1.0) * (2 if narrow else 1)
    subs = (1.0, 2.0, 5.0) if decades < 2 else (1.0, 3.0) if decades < 4 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def plain(name: str, limit: int = 40) -> str:
    r"""A name as matplotlib text: dollar signs escaped, on one line, shortened to `limit`.

    Example:
        >>> plain("cost $x$ of " + "a" * 60, limit=16)
        'cost \\$x\\$ of aa…'
    """
    line = one_line(" ".join(name.split()))
    line = line if len(line) <= limit else line[: limit - 2] + "…"
    return line.replace("$", r"\$")


def power_name(alpha: float) -> str:
    """A legend entry for an alpha."""
    return {0.0: "geometric (α = 0)", 1.0: "arithmetic (α = 1)"}.get(alpha, f"α = {alpha:g}")


def spread_out(values: Sequence[float], limit: int) -> list[float]:
    """At most `limit` of the values, evenly spaced, including the first and the last.

    Example:
        >>> spread_out([0, 1, 2, 3, 4, 5], 3)
        [0, 2, 5]
    """
    if len(values) <= limit:
        return list(values)
    last = len(values) - 1
    return [values[round(i * last / (limit - 1))] for i in range(limit)]
