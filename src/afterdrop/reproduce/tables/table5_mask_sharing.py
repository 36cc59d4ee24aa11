"""Table 5: masks shared over time or drawn at each step, and dropout of whole embeddings.

All values are for DET at its optimal validation temperature. Only runs that differ in nothing else
are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.family.member import DET, Member
from afterdrop.family.presentation import presentation
from afterdrop.models import LanguageModelConfig
from afterdrop.reproduce.tables import published
from afterdrop.reproduce.tables.paper_table import (
    PaperTable,
    TableLine,
    TableRow,
    errors_of,
    values_of,
)
from afterdrop.reproduce.tables.published_lines import published_lines
from afterdrop.reproduce.tables.seed_means import by_seed, error_over, mean_over
from afterdrop.reproduce.tables.table_input import TableInput

SPLITS = ("valid", "test")
SITES = ("input", "inter_layer", "state", "update", "output", "projection")
VARIED = (
    *(f"model.{site}_sharing" for site in SITES),
    "model.embedding_dropout",
    "model.embedding_rows",
)
SHARED, STEP, ALL = "shared", "step", "all"
LABELS = {
    SHARED: "state masks shared (S)",
    STEP: "no mask shared (NS)",
    ALL: "all masks shared",
}


def mask_sharing_table(sources: Sequence[TableInput]) -> PaperTable:
    """Kinds of masks, compared with the shared state masks of the published recipes."""
    table = PaperTable(
        5,
        "Shared and non-shared masks and embedding dropout, DET at the optimal validation T",
        ["valid XE", "test XE", "valid (unit)", "test (unit)"],
    )
    texts = [s for s in sources if s.config and s.config.model.kind == "language_model"]
    for group in by_seed(texts, without=VARIED):
        kinds: dict[str, list[TableInput]] = {}
        for source in group:
            if source.has("valid", table):
                kinds.setdefault(kind_of(source), []).append(source)
        comparable = published.parameters(5, group[0].data)
        if len(kinds) > 1 or comparable:
            base = {s.but(*VARIED): s for s in kinds.get(SHARED, [])}
            order = sorted(kinds, key=[*LABELS, *kinds].index)  # the paper's kinds first
            table.rows += [_row(kind, kinds[kind], base, table) for kind in order]
    if not table.rows:
        table.miss(
            "no two runs differ only in their masks; train another one, as in: afterdrop train "
            "RECIPE --out RUN --set model.state_sharing=step"
        )
    elif any(source.data == "ptb" for source in texts):
        table.note(published.note(5))
    return table


def kind_of(source: TableInput) -> str:
    """Which masks are shared over a window: those of the state, none, all, or of some sites."""
    config = LanguageModelConfig(**source.facts["model"]).resolved()
    sites = [s for s in SITES if (getattr(config, f"{s}_dropout") or 0) > 0]
    shared = [s for s in sites if getattr(config, f"{s}_sharing") == "sequence"]
    if not shared:
        kind = STEP
    elif shared == sites:
        kind = ALL
    elif shared == ["state"]:
        kind = SHARED
    else:
        kind = "masks shared: " + ", ".join(shared)
    if config.embedding_dropout:
        kind += f" + embedding dropout {config.embedding_dropout:g}"
    return kind


def _row(
    kind: str, runs: list[TableInput], base: Mapping[str, TableInput], table: PaperTable
) -> TableRow:
    """The mean over seeds of one kind, and paired differences to shared state masks."""
    unit = presentation(runs[0].unit)
    found = {split: [_tuned(run, split, table) for run in runs] for split in SPLITS}
    xe = {split: values_of(found[split]) for split in SPLITS}
    means = [mean_over(xe[split]) for split in SPLITS]
    shown = [None if value is None else unit.show(value) for value in means]
    errors = [mean_over(errors_of(found[split])) for split in SPLITS]
    lines = [
        TableLine("ours", [*means, *shown]),
        TableLine("± (data)", [*errors, None, None]),
        TableLine("± (seeds)", [*(error_over(xe[split]) for split in SPLITS), None, None]),
    ]
    pairs = [(run, base[run.but(*VARIED)]) for run in runs if run.but(*VARIED) in base]
    if pairs and kind != SHARED:
        gaps = {split: [_gap(*pair, split) for pair in pairs] for split in SPLITS}
        values = {split: values_of(gaps[split]) for split in SPLITS}
        inner = [mean_over(errors_of(gaps[split])) for split in SPLITS]
        lines += [
            TableLine(
                "− S, same seed", [*(mean_over(values[s]) for s in SPLITS), None, None], signed=True
            ),
            TableLine("± (data)", [*inner, None, None]),
            TableLine("± (seeds)", [*(error_over(values[s]) for s in SPLITS), None, None]),
        ]
    size = runs[0].parameters or 0
    printed = [
        published.value(5, runs[0].data, s, DET, tuned=True, masks=kind, parameters=size)
        for s in SPLITS
    ]
    lines += published_lines([*printed, None, None], [*means, None, None], table)
    names = ", ".join(run.name for run in runs)
    masks, plus, more = kind.partition(" + ")
    label = LABELS.get(masks, masks) + plus + more
    lines = [line for line in lines if any(value is not None for value in line.values)]
    return TableRow(
        f"{label}: {runs[0].data}, {size / 1e6:.1f}M weights ({names}); {unit.name}", lines
    )


def _tuned(run: TableInput, split: str, table: PaperTable) -> Estimate | None:
    """XE of DET at its optimal validation temperature."""
    if not run.has(split, table):
        return None
    plain = run.xe(split, DET, table)
    return plain if (fitted := _fitted(run)) is None else run.xe(split, fitted, table)


def _fitted(run: TableInput) -> Member | None:
    """DET at its optimal validation temperature; None if its cross entropy is not finite."""
    scores = run.scores["valid"]
    return scores.fit(DET).member if math.isfinite(scores.xe(DET).value) else None


def _gap(run: TableInput, other: TableInput, split: str) -> Estimate | None:
    """Paired difference of two runs on the same targets, each at its optimal temperature."""
    if split not in run.scores or split not in other.scores:
        return None
    mine, theirs = run.scores[split], other.scores[split]
    if not torch.equal(mine.targets, theirs.targets):
        return None
    one, two = _fitted(run), _fitted(other)
    if one is None or two is None:
        return None
    difference = mine.values(one).whole - theirs.values(two).whole
    return estimate(Values(difference, None, 0), mine.clusters, shared=False)
