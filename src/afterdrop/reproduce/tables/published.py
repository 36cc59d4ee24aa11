"""The cross entropies published in the paper, from `published.toml`, each with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from afterdrop.family.member import Member

SIZES = 0.15  # models whose parameter counts differ by less than this share have the same size


@dataclass(frozen=True)
class PublishedValue:
    """One published cross entropy.

    Attributes:
        xe: The printed value, in nats.
        meant: The value to compare with: the printed one, or the correct value of an obvious
            misprint.
        misprint: Why the printed value is a misprint; empty if it is not.
        source: The table it is printed in.
    """

    xe: float
    meant: float
    misprint: str
    source: str


def value(
    table: int, data: str, split: str, member: Member, *, tuned: bool = False, **also: Any
) -> PublishedValue | None:
    """The published value of a member, or None.

    Args:
        table: Number of the table.
        data: Name of the data set.
        split: `train`, `valid` or `test`.
        member: The member, of which only alpha and multiplier are used.
        tuned: Whether the value is for the optimal temperature.
        also: Further keys of the row: `band` (Table 3); `masks` and `parameters` (Table 5).

    Example:
        >>> value(2, "mnist", "valid", Member(0.5, 0.8)).meant
        0.092
        >>> value(2, "mnist", "valid", Member(0.5, 0.7)) is None
        True
    """
    wanted = {"table": table, "data": data, "split": split, **also}
    row = next((r for r in _content()["row"] if _matches(r, wanted, tuned)), None)
    if row is None:
        return None
    columns, plain = members(row["members"]), Member(member.alpha, member.multiplier)
    if plain not in columns:
        return None
    at = columns.index(plain)
    wrong: dict[str, Any] = next((m for m in row.get("misprints", ()) if m["at"] == at), {})
    printed = row["xe"][at]
    return PublishedValue(printed, wrong.get("meant", printed), wrong.get("why", ""), source(table))


def targets(data: str, split: str, band: str) -> int | None:
    """The number of targets that Table 3 prints for a band.

    Example:
        >>> targets("ptb", "valid", "< 20")
        5008
    """
    wanted = {"table": 3, "data": data, "split": split, "band": band}
    return next((r.get("targets") for r in _content()["row"] if _matches(r, wanted, False)), None)


def parameters(table: int, data: str) -> tuple[float, ...]:
    """Sizes of the models in a table, ascending; empty if the paper does not state them.

    Example:
        >>> parameters(5, "ptb")
        (10000000.0, 24000000.0)
    """
    rows = [r for r in _content()["row"] if r["table"] == table and r["data"] == data]
    return tuple(sorted({r["parameters"] for r in rows if "parameters" in r}))


def same_size(one: float, other: float) -> bool:
    """Whether two parameter counts belong to models of the same size.

    Example:
        >>> same_size(23_979_620, 24e6), same_size(10e6, 24e6)
        (True, False)
    """
    return abs(one - other) < SIZES * max(one, other)


def members(name: str) -> tuple[Member, ...]:
    """The members of a table by the name of their list.

    Example:
        >>> len(members("nine"))
        10
    """
    return tuple(Member(alpha, multiplier) for alpha, multiplier in _content()["members"][name])


def source(table: int) -> str:
    """Where a table is printed.

    Example:
        >>> source(2)
        'Table 2 (tab:eval-methods-validation, lines 627-647)'
    """
    return _content()["sources"][str(table)]


def note(table: int) -> str:
    """What to keep in mind when comparing with a table; may be empty."""
    return _content()["notes"].get(str(table), "")


def _matches(row: Mapping[str, Any], wanted: Mapping[str, Any], tuned: bool) -> bool:
    if row.get("tuned", False) != tuned:
        return False
    for name, value in wanted.items():
        if name == "parameters":
            if not same_size(row["parameters"], value):
                return False
        elif row.get(name) != value:
            return False
    return True


@cache
def _content() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("published.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
