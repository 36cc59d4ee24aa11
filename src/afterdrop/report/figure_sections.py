"""Sections with figures, each with an explanation of how to read it."""

import math

from afterdrop.evaluation import Scores
from afterdrop.family.member import DET, Member
from afterdrop.report import figures
from afterdrop.report.figure_style import Axes
from afterdrop.report.figure_svg import inline_svg
from afterdrop.report.page_elements import PageTable, Picture, Section
from afterdrop.report.prose import loss_label, number, with_error
from afterdrop.report.result_section import shown_members
from afterdrop.report.run_outcome import Outcome


def picture(ax: Axes, name: str, title: str, how: str, table: PageTable | None = None) -> Picture:
    """A figure of the page; its title and explanation are also its alternative text."""
    return Picture(inline_svg(ax, name, f"{title}. {how}"), title, how, table)


_FAMILY = (
    "Training with dropout gives one set of weights but many ways to predict with them. The "
    "dropout rates can be multiplied by a factor (top: the training rates, bottom: no dropout), "
    "and the predictions of different masks can be averaged in different ways (left: geometric "
    "mean, right: arithmetic mean)."
)
_MEANS = (
    "The predictions of several models can be averaged in different ways (left: geometric mean, "
    "right: arithmetic mean); the bottom row is the best model alone."
)


def map_section(scores: Scores, chosen: Member | None) -> Section:
    """The family at T = 1 and at the optimal temperature of each member."""
    if not scores.protocol.grid.stochastic:
        return Section(
            "maps",
            "The family of members",
            missing=[
                "only the deterministic member was evaluated; evaluate with --multipliers above 0 "
                "to see the others"
            ],
        )
    frame = " The frame marks the chosen member (at any temperature)." if chosen else ""
    cells = "Each cell is a member of the family. Darker is better, and ★ marks the best."
    if scores.protocol.ensemble is None:
        cells = (
            "Each cell is a member: a model with the same weights. Darker is better, and ★ marks "
            "the best. The bottom row is deterministic evaluation."
        )
    return Section(
        "maps",
        "The family of members",
        [_FAMILY if scores.protocol.ensemble is None else _MEANS],
        [
            picture(
                figures.family_map(scores, chosen=chosen),
                "map-plain",
                "Cross entropy at temperature 1",
                f"{cells}{frame}",
                _map_table(scores, tuned=False),
            ),
            picture(
                figures.family_map(scores, tuned=True, chosen=chosen),
                "map-tuned",
                "Cross entropy at the optimal temperature of each member",
                "The same members, each at its optimal temperature T (below the cross entropy). "
                "The remaining differences cannot be obtained by temperature alone.",
                _map_table(scores, tuned=True),
            ),
        ],
    )


def _map_table(scores: Scores, *, tuned: bool) -> PageTable:
    rows = []
    for member in scores.members:
        finite = math.isfinite(scores.xe(member).value)
        shown = scores.fit(member).member if tuned and finite else member
        gain = scores.difference(DET, shown)
        row = ["—" if member.deterministic else f"{member.alpha:g}", f"{member.multiplier:g}"]
        row += [number(shown.temperature, 3), number(scores.xe(shown).value), with_error(gain)]
        rows.append(tuple(row))
    head = ("α", "multiplier", "T", loss_label(scores), "gain over deterministic, T = 1")
    return PageTable("Values of this map", head, rows)


def temperature_section(outcome: Outcome) -> Section:
    """Cross entropy against temperature."""
    members = list(shown_members(outcome).values())
    bases = list(dict.fromkeys(member.at_temperature(1.0) for member in members))
    names = [_base_name(member, outcome.member) for member in bases]
    ax = figures.temperature_curves(outcome.scores, bases, labels=names)
    how = (
        "Below zero is better than deterministic evaluation. Markers are the optimal temperatures, "
        "and bands are one standard error of the paired difference. A minimum at T > 1 means that "
        "predictions are overconfident, a minimum at T < 1 that they are underconfident."
    )
    return Section(
        "temperature",
        "Temperature",
        ["Temperatures above 1 flatten the predicted distributions; those below 1 sharpen them."],
        [picture(ax, "temperature", "Cross entropy against temperature", how)],
    )


def _base_name(member: Member, chosen: Member) -> str:
    mark = "chosen: " if member == chosen.at_temperature(1.0) else ""
    if member.deterministic:
        return f"{mark}deterministic"
    return f"{mark}α = {member.alpha:g}, ×{member.multiplier:g}"


def trust_section(outcome: Outcome) -> Section:
    """Calibration, and errors when only confident predictions are kept."""
    members = shown_members(outcome)
    names, chosen = list(members), list(members.values())
    scores = outcome.scores
    if not scores.protocol.has_classes:
        return Section("trust", "Calibration", [], [_quantile_picture(scores, chosen, names)])
    return Section(
        "trust",
        "Calibration",
        [],
        [
            picture(
                figures.reliability_diagram(scores, chosen, labels=names),
                "reliability",
                "Reliability",
                "Of predictions with a confidence of 70 %, about 70 % should be correct: these are "
                "on the diagonal. A model below it is overconfident, a model above it "
                "underconfident.",
            ),
            picture(
                figures.risk_coverage_curves(scores, chosen, labels=names),
                "risk",
                "Risk against coverage",
                "The error rate when only the most confident predictions are kept (left: few, "
                "right: all). A lower curve separates correct from wrong predictions better.",
            ),
        ],
    )


def _quantile_picture(scores: Scores, members: list[Member], names: list[str]) -> Picture:
    return picture(
        figures.quantile_diagram(scores, members, labels=names),
        "quantiles",
        "Calibration of quantiles",
        "Of the targets, 70 % should lie below the predicted quantile of level 0.7: on the "
        "diagonal. A curve that is steeper in the middle belongs to intervals that are too wide, a "
        "flatter one to intervals that are too narrow.",
    )


def bounds_section(scores: Scores) -> Section:
    """The bound that dropout training optimises, and its gap to every member."""
    if not scores.protocol.grid.stochastic or not any(
        math.isfinite(scores.bounds(m).objective) for m in scores.members
    ):
        return Section("bounds", "Why one training run serves all members")
    section = Section(
        "bounds",
        "Why one training run serves all members",
        [
            "The mean log-likelihood of the samples is a lower bound on the log-likelihood of each "
            "of their power means. The difference is the sum of the Jensen gap and the normaliser "
            "gap: what the mean gains over one sample."
            if scores.protocol.ensemble is not None
            else "Dropout training maximises one quantity, which is a lower bound on the "
            "log-likelihood of every member. The difference between the two is the sum of the "
            "Jensen gap and the normaliser gap; both usually shrink with the dropout rates."
        ],
    )
    section.pictures.append(
        picture(
            figures.bounds_stacked(scores),
            "bounds",
            "The bound and the gaps of each member",
            "Grey is the dropout objective at each multiplier. The top of a bar is the "
            "log-likelihood of the member (higher is better), with its α above. For geometric "
            "means the difference is the normaliser gap, for arithmetic means the Jensen gap.",
        )
    )
    varies = scores.request.likelihood != "squared_error"  # variances are kept at T = 1 only
    if varies and any(alpha > 0 for alpha in scores.protocol.grid.alphas):
        section.pictures.append(
            picture(
                figures.tightness(scores),
                "tightness",
                "How tight the bound is",
                "As the multiplier (the small numbers) approaches 0, predictions vary less and the "
                "gap closes. The shaded bands are the theoretical limits of the gap.",
            )
        )
    return section


def samples_section(scores: Scores, chosen: Member | None) -> Section:
    """Cross entropy against the number of mask samples."""
    grid = scores.protocol.grid
    if not grid.stochastic or scores.num_samples < 2:
        return Section("samples", "How many samples are enough?")
    at = chosen.multiplier if chosen and not chosen.deterministic else None
    section = Section(
        "samples",
        "How many samples are enough?",
        ["The cross entropy of a mean over K samples decreases with K; the excess is about c/K."],
        [
            picture(
                figures.sample_curves(scores, multiplier=at),
                "samples",
                "Excess cross entropy with few samples",
                "Solid lines are the excess cross entropy of a predictor with K samples over one "
                "with infinitely many. Dashed lines are the corrected estimates, which should be "
                "zero.",
            )
        ],
    )
    if scores.protocol.plan.blocks < 4:
        section.paragraphs.append(
            "These scores contain two points of this curve; evaluate with --num-samples 96 "
            "--blocks 16 to get five."
        )
    return section
