"""The verdicts of a check, and how they print."""

from __future__ import annotations

import dataclasses
from typing import Literal

Status = Literal["ok", "FAILED", "skipped"]


class Skipped(Exception):
    """Raised by a test that cannot run; the message is the reason."""


class Failed(Exception):
    """Raised by a test that found a fault; the message is the fault."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of one test.

    Attributes:
        name: What was tested.
        status: "ok", "FAILED" or "skipped".
        detail: What was found, or the reason.
    """

    name: str
    status: Status
    detail: str


@dataclasses.dataclass(frozen=True)
class Check:
    """The verdicts on a model; prints one per line.

    Attributes:
        verdicts: In the order of the tests.

    Example:
        >>> print(Check((Verdict("eval mode twice", "ok", "the outputs are equal"),)))
        ok       eval mode twice  the outputs are equal
    """

    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """Whether no test failed; tests that were skipped do not count."""
        return all(verdict.status != "FAILED" for verdict in self.verdicts)

    def __getitem__(self, name: str) -> Verdict:
        """The verdict of a test, by its name."""
        for verdict in self.verdicts:
            if verdict.name == name:
                return verdict
        raise KeyError(name)

    def __str__(self) -> str:
        width = max((len(verdict.name) for verdict in self.verdicts), default=0)
        lines = [f"{v.status:<7}  {v.name:<{width}}  {v.detail}" for v in self.verdicts]
        return "\n".join(" ".join(line.splitlines()) for line in lines)
