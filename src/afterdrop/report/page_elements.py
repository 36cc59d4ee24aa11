"""The parts of a page as plain data: the template turns them into HTML and escapes all text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup


@dataclass(frozen=True)
class PageTable:
    """A real table.

    Attributes:
        caption: What it shows.
        head: Of the columns.
        rows: Cells as text; the first names its row.
        marked: Rows that stand out.
        left: Columns of words rather than numbers.
    """

    caption: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    marked: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset({0})


@dataclass(frozen=True)
class Picture:
    """A figure: its SVG, a title, how to read it in two sentences, and its numbers if any."""

    svg: Markup
    title: str
    how: str
    table: PageTable | None = None


@dataclass(frozen=True)
class Card:
    """A number that stands out, with what it is and a remark."""

    label: str
    value: str
    remark: str = ""


@dataclass
class Section:
    """A part of the page under a heading."""

    name: str
    title: str
    paragraphs: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        parts = (self.paragraphs, self.pictures, self.tables, self.commands, self.missing)
        return not any(parts)


@dataclass
class Page:
    """A whole page."""

    title: str
    subtitle: str
    headline: str
    lead: list[str]
    cards: list[Card]
    sections: list[Section]
    missing: list[str] = field(default_factory=list)
