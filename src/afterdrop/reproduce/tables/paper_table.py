"""Tables as data: rows of named lines of numbers, which `table_writers` formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from afterdrop.family.estimates import Estimate
from afterdrop.family.member import Member


@dataclass(frozen=True)
class TableLine:
    """Numbers of one kind, one per column of the table.

    Attributes:
        name: The name of the line, such as `ours` or `paper`.
        values: The numbers; None where there is none.
        digits: Number of decimals.
        signed: Whether to show plus signs, as for differences.
        marks: A mark after each number, such as that of a misprint.
        best: Whether to highlight the lowest number.
    """

    name: str
    values: Sequence[float | None]
    digits: int = 4
    signed: bool = False
    marks: Sequence[str] = ()
    best: bool = False

    def text(self, at: int) -> str:
        """The formatted number of a column, with its mark.

        Example:
            >>> TableLine("ours − paper", [0.25, None, -0.0], 2, signed=True).text(0)
            '+0.25'
        """
        value = self.values[at]
        mark = self.marks[at] if self.marks else ""
        if value is None:
            return "–"
        if not math.isfinite(value):
            return ("NaN" if math.isnan(value) else "inf") + mark
        value = round(value, self.digits) + 0.0  # no "-0.00"
        text = f"{value:{'+' if self.signed else ''}.{self.digits}f}"
        return text.replace("-", "−") + mark

    @property
    def lowest(self) -> int | None:
        """The column to highlight, or None."""
        known = [(v, i) for i, v in enumerate(self.values) if v is not None and math.isfinite(v)]
        return min(known)[1] if self.best and known else None


@dataclass(frozen=True)
class TableRow:
    """The lines of one run, frequency band or kind of mask.

    Attributes:
        label: What the numbers describe.
        lines: The numbers.
    """

    label: str
    lines: Sequence[TableLine]


@dataclass
class PaperTable:
    """One of the paper's tables, computed from runs.

    Attributes:
        number: Its number in the paper.
        title: One line, with the unit.
        columns: Column headings.
        rows: The rows that could be computed.
        notes: Remarks on the numbers.
        missing: What could not be computed, the reason, and the command that produces it.
    """

    number: int
    title: str
    columns: Sequence[str]
    rows: list[TableRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Adds a note unless it is empty or already there."""
        if text and text not in self.notes:
            self.notes.append(text)

    def miss(self, text: str) -> None:
        """Records what is missing unless it is already there."""
        if text not in self.missing:
            self.missing.append(text)


def name_member(member: Member) -> str:
    """A short column heading for a member.

    Example:
        >>> [name_member(Member(a, m)) for a, m in ((0, 0), (0, 0.8), (0.5, 1), (1, 0.9))]
        ['DET', 'GMC ×0.8', 'α=0.5 ×1', 'AMC ×0.9']
    """
    if member.deterministic:
        return "DET"
    kind = {0.0: "GMC", 1.0: "AMC"}.get(member.alpha, f"α={member.alpha:g}")
    return f"{kind} ×{member.multiplier:g}"


def values_of(found: Sequence[Estimate | None]) -> list[float | None]:
    """The values of the estimates; None where there is none."""
    return [None if estimate is None else estimate.value for estimate in found]


def errors_of(found: Sequence[Estimate | None]) -> list[float | None]:
    """The errors of the estimates; None where there is none."""
    return [None if estimate is None else estimate.error for estimate in found]
