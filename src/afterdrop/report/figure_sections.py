"""The maps and curves of the page, each with how to read it."""

import math

import torch

from afterdrop.evaluation.scores.scores import Scores
from afterdrop.family.member import DET, Member
from afterdrop.report import figures
from afterdrop.report.class_counts import Classes, shown_name
from afterdrop.report.figure_style import Axes
from afterdrop.report.figure_svg import inline_svg
from afterdrop.report.page_elements import PageTable, Picture, Section
from afterdrop.report.prose import number, signed, with_error
from afterdrop.report.result_section import shown_members
from afterdrop.report.run_outcome import Outcome

_FEW_CLASSES = 30  # that get a point each
_WORDS = 6  # classes listed with the largest gain, and with the largest loss


def picture(ax: Axes, name: str, title: str, how: str, table: PageTable | None = None) -> Picture:
    """A figure of the page; its title and reading are also what a screen reader says."""
    return Picture(inline_svg(ax, name, f"{title}. {how}"), title, how, table)


def map_section(scores: Scores, chosen: Member | None) -> Section:
    """The family at T = 1 and at each member's best temperature."""
    if not scores.protocol.grid.stochastic:
        return _missing(
            "maps",
            "The family on a map",
            "only deterministic evaluation was scored; "
            "evaluate with --multipliers above 0 to see the others",
        )
    frame = (
        " The frame marks what was chosen (which may have another temperature)." if chosen else ""
    )
    return Section(
        "maps",
        "The family on a map",
        [
            "Training with dropout gives one set of weights but many ways to predict. One can "
            "lower the dropout rates again (top: the rates of training, bottom: none) and average "
            "the samples in different ways (left: geometric mean, right: arithmetic mean)."
        ],
        [
            picture(
                figures.family_map(scores, chosen=chosen),
                "map-plain",
                "Cross entropy at temperature 1",
                "Each cell is a model made from the same weights; darker is better and ★ the best "
                f"here. The bottom row is ordinary evaluation.{frame}",
                _map_table(scores, tuned=False),
            ),
            picture(
                figures.family_map(scores, tuned=True, chosen=chosen),
                "map-tuned",
                "Cross entropy, each at its best temperature",
                "The same cells after each got the temperature T that suits it best (below the "
                "number; above 1 is smoother). What still differs is what temperature cannot give.",
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
    head = ("α", "multiplier", "T", "XE (nats)", "gain over deterministic, T = 1")
    return PageTable("The numbers of this map", head, rows)


def temperature_section(outcome: Outcome) -> Section:
    """XE against temperature."""
    members = list(shown_members(outcome).values())
    bases = list(dict.fromkeys(member.at_temperature(1.0) for member in members))
    names = [_base_name(member, outcome.member) for member in bases]
    ax = figures.temperature_curves(outcome.scores, bases, labels=names)
    how = (
        "Below zero is better than ordinary evaluation; the marker is each curve's best "
        "temperature, and bands are one standard error of the paired difference. A minimum right "
        "of 1 means the model is too sure of itself and wants smoothing."
    )
    return Section(
        "temperature",
        "Temperature",
        ["A temperature above 1 flattens all predictions, one below 1 sharpens them."],
        [picture(ax, "temperature", "Cross entropy against temperature", how)],
    )


def _base_name(member: Member, chosen: Member) -> str:
    mark = "chosen: " if member == chosen.at_temperature(1.0) else ""
    if member.deterministic:
        return f"{mark}deterministic"
    return f"{mark}α = {member.alpha:g}, ×{member.multiplier:g}"


def trust_section(outcome: Outcome) -> Section:
    """Calibration and refusals."""
    members = shown_members(outcome)
    names, chosen = list(members), list(members.values())
    scores = outcome.scores
    return Section(
        "trust",
        "Can its confidence be trusted?",
        [],
        [
            picture(
                figures.reliability_diagram(scores, chosen, labels=names),
                "reliability",
                "Reliability",
                "Of predictions made with a confidence of 70 %, about 70 % should be right: on the "
                "diagonal. Below it a model is too sure, above it too modest.",
            ),
            picture(
                figures.risk_coverage_curves(scores, chosen, labels=names),
                "risk",
                "Risk against coverage",
                "If only the most confident predictions are kept (left), fewer of them are wrong. "
                "A lower curve knows better which of its predictions to doubt.",
            ),
        ],
    )


def bounds_section(scores: Scores) -> Section:
    """Why one training serves all members."""
    if not scores.protocol.grid.stochastic or not any(
        math.isfinite(scores.bounds(m).objective) for m in scores.members
    ):
        return Section("bounds", "Why one training serves them all")
    section = Section(
        "bounds",
        "Why one training serves them all",
        [
            "Dropout training maximises one quantity, which is a lower bound on the "
            "log-likelihood of every model in the map. What lies between is the Jensen gap and the "
            "normaliser gap; both shrink as the dropout rates do."
        ],
    )
    section.pictures.append(
        picture(
            figures.bounds_stacked(scores),
            "bounds",
            "The bound and what each member adds",
            "Grey is the dropout objective at that multiplier; a bar's top is the member's "
            "log-likelihood (higher is better), with α written above. Geometric means owe their "
            "gain to the normaliser, arithmetic ones to Jensen's inequality.",
        )
    )
    if any(alpha > 0 for alpha in scores.protocol.grid.alphas):
        section.pictures.append(
            picture(
                figures.tightness(scores),
                "tightness",
                "How tight the bound is",
                "As the multiplier (the small numbers) goes to 0, predictions vary less and the "
                "gap closes. The band is where theory says the gap must lie.",
            )
        )
    return section


def frequency_section(outcome: Outcome, classes: Classes | None, *, trained: bool) -> Section:
    """Where the gain is."""
    title = "Where the gain is"
    if classes is None:
        remedy = 'give --classes FILE, a JSON object such as {"cat": 5000, "dog": 120}, in order'
        if trained:
            remedy = "give the folder of its data with --data"
        text = f"how often each class occurred in training is unknown; {remedy}"
        return _missing("frequency", title, text)
    scores, member = outcome.scores, outcome.member
    section = Section("frequency", title)
    if member == DET:
        section.paragraphs.append("Ordinary evaluation was chosen, so there is no gain to divide.")
        return section
    if scores.protocol.num_classes <= _FEW_CLASSES:
        names = [shown_name(name) for name in classes.names]
        ax = figures.gain_by_class(scores, member, names, classes.counts)
        how = (
            "Right of zero the chosen member gives that class's examples more probability than "
            "ordinary evaluation. Bars are one standard error; classes are sorted by how often "
            "they occurred in training."
        )
        section.pictures.append(picture(ax, "classes", "Gain class by class", how))
        return section
    members = shown_members(outcome)
    names, drawn = list(members), list(members.values())
    how = (
        "Above zero is better than ordinary evaluation; left are classes that training rarely saw. "
        "The small grey numbers say how many targets a point rests on, bars are one standard error."
    )
    gain = figures.gain_by_frequency(scores, drawn, classes.counts, labels=names)
    section.pictures.append(picture(gain, "gain", "Gain by training frequency", how))
    how = (
        "What a target of each kind costs: lower is better, and rare classes cost most. "
        "Differences between members that look small here are enlarged in the other figure."
    )
    xe = figures.xe_by_frequency(scores, drawn, classes.counts, labels=names)
    section.pictures.append(picture(xe, "xe", "Cross entropy by training frequency", how))
    section.tables.append(_words(scores, member, classes))
    return section


def _words(scores: Scores, member: Member, classes: Classes) -> PageTable:
    """The classes that contribute most to the gain, and those that lose most."""
    gains = scores.values(DET).whole - scores.values(member).whole
    targets, size = scores.tensors["targets"], scores.protocol.num_classes
    total = torch.zeros(size, dtype=torch.float64).index_add_(0, targets, gains)
    seen = targets.bincount(minlength=size)
    order = total.nan_to_num().argsort(descending=True, stable=True).tolist()
    order = [i for i in order if seen[i] > 0]
    picked = list(dict.fromkeys(order[:_WORDS] + order[-_WORDS:]))
    rows = [
        (
            shown_name(classes.names[i]),
            f"{int(classes.counts[i]):,}",
            f"{int(seen[i]):,}",
            number((total[i] / seen[i]).item()),
            signed(total[i].item() / len(gains), 5),
        )
        for i in picked
    ]
    head = ("class", "in training", "targets", "mean gain (nats)", "adds to the gain (nats)")
    return PageTable("Classes that gain most, and those that lose most", head, rows)


def samples_section(scores: Scores, chosen: Member | None) -> Section:
    """How many samples are enough."""
    grid = scores.protocol.grid
    if not grid.stochastic or scores.num_samples < 2:
        return Section("samples", "How many samples are enough")
    at = chosen.multiplier if chosen and not chosen.deterministic else None
    section = Section(
        "samples",
        "How many samples are enough",
        ["Averaging few samples costs cross entropy, about in proportion to 1/K."],
        [
            picture(
                figures.sample_curves(scores, multiplier=at),
                "samples",
                "The price of few samples",
                "Solid lines are what a predictor with K samples pays over one with infinitely "
                "many. Dashed ones are the corrected estimates, which should lie on zero.",
            )
        ],
    )
    if scores.protocol.plan.blocks < 4:
        section.paragraphs.append(
            "These scores hold two points; evaluate with --num-samples 96 --blocks 16 for a curve "
            "of five."
        )
    return section


def _missing(name: str, title: str, text: str) -> Section:
    return Section(name, title, missing=[text])
