"""Scores as plain text tables: the family at a glance."""

from afterdrop.evaluation.scores import Scores
from afterdrop.family.member import Member


def family_table(scores: Scores, *, tuned: bool) -> str:
    """XE of every member: a row for each multiplier, a column for each alpha.

    Args:
        scores: The scores.
        tuned: Whether each member is shown at its own optimal temperature (T in parentheses)
            rather than at T = 1.
    """
    grid = scores.protocol.grid
    title = "each at its own optimal T" if tuned else "at T = 1"
    lines = [f"XE in nats on {scores.split}, K = {scores.num_samples}, {title}"]
    width = 16 if tuned else 12
    heads = "".join(f"{f'alpha={alpha:g}':>{width}}" for alpha in grid.alphas)
    given = scores.protocol.ensemble is not None and scores.protocol.ensemble.masks is None
    lines.append(f"{'' if given else 'multiplier':<12}{heads}")
    alone = "0 (DET)" if scores.protocol.ensemble is None else "best alone"
    lines.append(f"{alone:<12}{_cell(scores, scores.members[0], tuned):>{width}}")
    for multiplier in grid.stochastic:
        name = "mean of all" if given else f"{multiplier:g}"
        lines.append(f"{name:<12}{_row(scores, multiplier, tuned, width)}")
    if scores.pilot is not None:
        pilot, only = scores.pilot, scores.only_in_pilot
        lines += [f"pilot only, K = {pilot.num_samples}, {pilot.num_targets:,} targets:"] * bool(
            only
        )
        lines += [f"{m:<12g}{_row(pilot, m, tuned, width)}" for m in only]
    return "\n".join(lines)


def _row(scores: Scores, multiplier: float, tuned: bool, width: int) -> str:
    grid = scores.protocol.grid
    members = [Member(alpha, multiplier, temper=grid.temper) for alpha in grid.alphas]
    return "".join(f"{_cell(scores, member, tuned):>{width}}" for member in members)


def _cell(scores: Scores, member: Member, tuned: bool) -> str:
    if not tuned:
        return f"{scores.xe(member).value:.4f}"
    fit = scores.fit(member)
    edge = "!" if fit.at_edge else ""
    return f"{scores.xe(fit.member).value:.4f} ({fit.member.temperature:.2f}{edge})"


def bounds_table(scores: Scores, alphas: tuple[float, ...] | None = None) -> str:
    """The dropout objective and the gaps to each member's objective, at T = 1.

    Args:
        scores: The scores.
        alphas: Which alphas to show; all by default.
    """
    heads = ("multiplier", "alpha", "objective", "= bound", "+ Jensen", "+ normaliser", "mean p(y)")
    lines = ["What dropout training bounds: objective = bound + Jensen gap + normaliser gap (nats)"]
    lines.append("".join(f"{head:>13}" for head in heads))
    for member in scores.members:
        if alphas is not None and not member.deterministic and member.alpha not in alphas:
            continue
        b = scores.bounds(member)
        numbers = (b.objective, b.bound, b.jensen_gap, b.normaliser_gap, b.mean_probability)
        cells = "".join(f"{round(number, 4) + 0.0:>13.4f}" for number in numbers)  # no "-0.0000"
        lines.append(f"{member.multiplier:>13g}{member.alpha:>13g}{cells}")
    return "\n".join(lines)


def summary_table(scores: Scores, members: list[Member]) -> str:
    """XE with its errors and the likelihood's own metrics of some members."""
    shown = scores.metrics
    heads = "".join(f"{name:>{max(8, len(name) + 2)}}" for name in shown)
    lines = [f"{'member':<50}{'XE':>9}{'±':>8}{heads}"]
    for member in members:
        xe = scores.xe(member)
        cells = "".join(
            f"{metric(member).value:>{max(8, len(name) + 2)}.4f}" for name, metric in shown.items()
        )
        lines.append(f"{member!s:<50}{xe.value:>9.4f}{xe.error:>8.4f}{cells}")
    return "\n".join(lines)
