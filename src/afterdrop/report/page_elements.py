"""The elements of a page as plain data, which the template renders as HTML with text escaped."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup


@dataclass(frozen=True)
class PageTable:
    """A table of a page.

    Attributes:
        caption: The caption.
        head: Column headings.
        rows: Cells as text; the first cell of a row is its heading.
        marked: Indices of the highlighted rows.
        left: Indices of the left-aligned columns, which hold text rather than numbers.
    """

    caption: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    marked: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset({0})


@dataclass(frozen=True)
class Picture:
    """A figure: its SVG, a title, how to read it, and optionally a table of its numbers."""

    svg: Markup
    title: str
    how: str
    table: PageTable | None = None


@dataclass(frozen=True)
class Card:
    """A highlighted number with a label and a remark."""

    label: str
    value: str
    remark: str = ""


@dataclass
class Section:
    """A section of a page; `missing` says what cannot be shown and why."""

    name: str
    title: str
    paragraphs: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether the section has no content."""
        content = (self.paragraphs, self.pictures, self.tables, self.commands, self.missing)
        return not any(content)


@dataclass
class Page:
    """A page: headline, numbers and remarks at the top, then the sections."""

    title: str
    subtitle: str
    headline: str
    lead: list[str]
    cards: list[Card]
    sections: list[Section]
    missing: list[str] = field(default_factory=list)
