"""The section on where the gain comes from: by class, or by the training frequency of the class."""

import torch

from afterdrop.evaluation import Scores
from afterdrop.family.member import DET, Member
from afterdrop.report import figures
from afterdrop.report.class_counts import Classes, shown_name
from afterdrop.report.figure_sections import picture
from afterdrop.report.page_elements import PageTable, Picture, Section
from afterdrop.report.prose import number, signed
from afterdrop.report.result_section import shown_members
from afterdrop.report.run_outcome import Outcome

_FEW_CLASSES = 30  # up to this number, each class gets its own point
_LISTED = 6  # classes listed with the largest gain, and as many with the largest loss


def frequency_section(outcome: Outcome, classes: Classes | None, *, trained: bool) -> Section:
    """The gain by class, or by the training frequency of the class."""
    section = Section("frequency", "Where the gain comes from")
    if not outcome.scores.protocol.has_classes:
        return section
    if classes is None:
        remedy = 'pass --classes FILE, a JSON object such as {"cat": 5000, "dog": 120}'
        if trained:
            remedy = "pass the folder of its data with --data"
        section.missing.append(f"the training counts of the classes are unknown; {remedy}")
    elif outcome.member.unchanged:
        section.paragraphs.append(
            "Deterministic evaluation was chosen, so there is no gain to analyse."
        )
    elif outcome.scores.num_kinds <= _FEW_CLASSES:
        section.pictures.append(_gain_per_class(outcome, classes))
    else:
        section.pictures += _by_frequency(outcome, classes)
        section.tables.append(_largest_changes(outcome.scores, outcome.member, classes))
    return section


def _gain_per_class(outcome: Outcome, classes: Classes) -> Picture:
    names = [shown_name(name) for name in classes.names]
    ax = figures.gain_by_class(outcome.scores, outcome.member, names, classes.counts)
    how = (
        "To the right of zero, the chosen member assigns the examples of a class more probability "
        "than deterministic evaluation does. Bars are one standard error; classes are sorted by "
        "their frequency in the training data."
    )
    return picture(ax, "classes", "Gain per class", how)


def _by_frequency(outcome: Outcome, classes: Classes) -> list[Picture]:
    members = shown_members(outcome)
    names, drawn = list(members), list(members.values())
    gain = figures.gain_by_frequency(outcome.scores, drawn, classes.counts, labels=names)
    xe = figures.xe_by_frequency(outcome.scores, drawn, classes.counts, labels=names)
    return [
        picture(
            gain,
            "gain",
            "Gain by training frequency",
            "Above zero is better than deterministic evaluation. Classes that are rare in the "
            "training data are on the left. Small grey numbers are the numbers of targets; bars "
            "are one standard error.",
        ),
        picture(
            xe,
            "xe",
            "Cross entropy by training frequency",
            "Lower is better; rare classes usually have the highest cross entropy. The other "
            "figure shows the differences between the members at a larger scale.",
        ),
    ]


def _largest_changes(scores: Scores, member: Member, classes: Classes) -> PageTable:
    """The classes that contribute most to the gain, and those that reduce it most."""
    gains = scores.values(DET).whole - scores.values(member).whole
    targets, size = scores.kinds, scores.num_kinds
    total = torch.zeros(size, dtype=torch.float64).index_add_(0, targets, gains)
    seen = targets.bincount(minlength=size)
    order = total.nan_to_num().argsort(descending=True, stable=True).tolist()
    order = [i for i in order if seen[i] > 0]
    picked = list(dict.fromkeys(order[:_LISTED] + order[-_LISTED:]))
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
    head = ("class", "training count", "targets", "mean gain (nats)", "share of the gain (nats)")
    return PageTable("Classes with the largest gains and losses", head, rows)
