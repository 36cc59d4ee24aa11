"""Table 3: cross entropy by the training frequency of the target's class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from afterdrop.errors import AfterdropError
from afterdrop.evaluation import Scores
from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.family.member import DET, Member
from afterdrop.reproduce.tables import published
from afterdrop.reproduce.tables.frequency_bands import FrequencyBand, suitable_bands
from afterdrop.reproduce.tables.paper_table import (
    PaperTable,
    TableLine,
    TableRow,
    errors_of,
    name_member,
    values_of,
)
from afterdrop.reproduce.tables.table_input import TableInput

SPLITS = ("train", "valid")


def frequency_table(
    sources: Sequence[TableInput], bands: Sequence[FrequencyBand] = (), data: Path | None = None
) -> PaperTable:
    """XE of DET, AMC ×0.8 and AMC by training frequency, on training and validation data.

    Args:
        sources: The runs.
        bands: The bands to show; by default bands that suit each data set.
        data: The folder of the named data sets, if it differs from that of training.
    """
    heads = ("DET", "×0.8", "AMC", "×0.8 − DET", "AMC − DET")
    table = PaperTable(
        3,
        "XE (nats) by training frequency of the target, alpha = 1, T = 1",
        [f"{split} {head}" for split in SPLITS for head in heads],
    )
    for source in sources:
        present = [split for split in SPLITS if source.has(split, table)]
        if not present:
            continue
        try:
            counts = source.counts(data)
        except AfterdropError as error:
            table.miss(
                f"{source.name}: {error}; pass the folder of the training data with --data DIR"
            )
            continue
        chosen = bands or suitable_bands(source.data, counts, classes=source.unit == "image")
        table.rows += [_row(source, band, counts, table) for band in chosen]
        for split in present:
            table.note(_verdict(source, split, chosen, counts))
    if any(source.data == "ptb" for source in sources):
        table.note(published.note(3))
    return table


def _row(source: TableInput, band: FrequencyBand, counts: Tensor, table: PaperTable) -> TableRow:
    found: list[Estimate | None] = []
    paper: list[float | None] = []
    sizes = []
    for split in SPLITS:
        estimates, size = _in_band(source, split, band, counts, table)
        found += estimates
        if split in source.scores:
            sizes.append(f"{size:,} {split}")
        paper += _printed(source.data, split, band)
    lines = [
        TableLine("ours", values_of(found), 3),
        TableLine("±", errors_of(found), 3),
    ]
    if any(value is not None for value in paper):
        lines.append(TableLine("paper", paper, 2))
    printed = published.targets(source.data, "valid", band.name)
    paper_size = f" (paper: {printed:,} valid)" if printed else ""
    return TableRow(f"{source.name}: {band.name}, {' and '.join(sizes)} targets{paper_size}", lines)


def _in_band(
    source: TableInput, split: str, band: FrequencyBand, counts: Tensor, table: PaperTable
) -> tuple[list[Estimate | None], int]:
    """XE of the members and paired differences to DET, on the targets of a band."""
    nothing: list[Estimate | None] = [None] * 5
    if split not in source.scores:
        return nothing, 0
    scores = source.scores[split]
    if len(counts) != scores.protocol.num_classes:
        table.miss(
            f"{source.name}: the data have {len(counts)} classes and the Scores "
            f"{scores.protocol.num_classes}; make the Scores again with: "
            f"{source.command(split, more=' --overwrite')}"
        )
        return nothing, 0
    at = counts[scores.targets]
    chosen = (at > band.low) & (at <= band.high)
    size = int(chosen.sum())
    if size == 0:
        table.miss(f"{source.name}: no {split} target is in the band {band.name}")
        return nothing, 0
    clusters = scores.clusters[chosen].unique(return_inverse=True)[1]

    def mean(values: Values) -> Estimate:
        halves = None if values.halves is None else values.halves[:, chosen]
        part = Values(values.whole[chosen], halves, values.num_samples)
        return estimate(part, clusters, shared=scores.protocol.shared)

    members = published.members("arithmetic")
    known = [m for m in members if source.xe(split, m, table) is not None]
    values: dict[Member, Values] = {member: scores.values(member) for member in known}
    own = [mean(values[m]) if m in values else None for m in members]
    gaps = [mean(values[m].minus(values[DET])) if m in values else None for m in members[1:]]
    return [*own, *gaps], size


def _verdict(source: TableInput, split: str, bands: Sequence[FrequencyBand], counts: Tensor) -> str:
    """How much of the difference to DET comes from rare targets, where the paper locates it."""
    scores = source.scores[split]
    rare = max((b for b in bands if b.low < 0), key=lambda b: b.high, default=None)
    if rare is None or len(counts) != scores.protocol.num_classes:
        return ""
    inside = counts[scores.targets] <= rare.high
    if not bool(inside.any()) or bool(inside.all()):
        return ""
    sentences = []
    for member in _sampled(scores):
        gap = scores.values(member).minus(scores.values(DET))
        parts = []
        for mask in (inside, ~inside):
            halves = None if gap.halves is None else gap.halves * mask
            part = Values(gap.whole * mask, halves, gap.num_samples)
            parts.append(estimate(part, scores.clusters, shared=scores.protocol.shared))
        whole = scores.difference(member, DET)
        if math.isfinite(whole.value):
            one, two = (f"{p.value:+.4f} ± {p.error:.4f}" for p in parts)
            sentences.append(
                f"{name_member(member)} − DET is {whole.value:+.4f} ± {whole.error:.4f}, the sum "
                f"of {one} from these targets and {two} from the others"
            )
    share = f"{100 * inside.double().mean().item():.0f} % of the targets are {rare.name}"
    return f"{source.name}, {split}: {share}; {'; '.join(sentences)}." if sentences else ""


def _sampled(scores: Scores) -> list[Member]:
    """The members with alpha 1 and a multiplier above 0 that were evaluated."""
    grid = scores.protocol.grid
    wanted = published.members("arithmetic")[1:]
    return [m for m in wanted if m.alpha in grid.alphas and m.multiplier in grid.multipliers]


def _printed(data: str, split: str, band: FrequencyBand) -> list[float | None]:
    """The published values of a band, and the differences to DET derived from them."""
    members = published.members("arithmetic")
    values = [published.value(3, data, split, m, band=band.name) for m in members]
    xe = [f.meant for f in values if f is not None]
    if len(xe) < len(members):
        return [None] * 5
    return [*xe, xe[1] - xe[0], xe[2] - xe[0]]
