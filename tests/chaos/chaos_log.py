"""What each attempt found finished and what it began, to see that nothing is redone."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Attempt:
    """One process's attempt: the items that were kept before it, and the numbers of those begun."""

    kept: int
    begun: list[int] = field(default_factory=list)


class WorkLog:
    """A file with a line per attempt and per item begun, which outlives killed processes.

    Items are numbered from 0 in the order in which they are done: the steps of a training, or the
    batches of an evaluation.

    Args:
        path: The file, to which several processes may append.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, ""

    def start(self, place: Path, kept: int) -> None:
        """Notes an attempt in the folder `place`, where `kept` items are on the disk."""
        self.place = str(place)
        self._append({"place": self.place, "kept": kept})

    def noting(
        self, real: Callable[..., object], number: Callable[..., int]
    ) -> Callable[..., object]:
        """A method that notes the number of its item before it does what `real` does."""

        def method(*arguments: object, **options: object) -> object:
            self._append({"place": self.place, "begun": number(*arguments)})
            return real(*arguments, **options)

        return method

    def attempts(self) -> dict[str, list[Attempt]]:
        """The attempts in each folder, in their order."""
        found: dict[str, list[Attempt]] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            entry = json.loads(line)
            if "kept" in entry:
                found.setdefault(entry["place"], []).append(Attempt(entry["kept"]))
            else:
                found[entry["place"]][-1].begun.append(entry["begun"])
        return found

    def resumed(self) -> int:
        """The number of attempts that had both kept items and items left to do."""
        attempts = [each for some in self.attempts().values() for each in some]
        return sum(each.kept > 0 and len(each.begun) > 0 for each in attempts)

    def check(self, total: int, lost: int) -> None:
        """Requires that every attempt went on exactly where the kept items end, up to the last one.

        Args:
            total: The number of items.
            lost: The most items that an interrupted attempt may have begun and not kept.
        """
        for place, attempts in self.attempts().items():
            for at, attempt in enumerate(attempts):
                done = attempt.kept + len(attempt.begun)
                where = f"attempt {at + 1} of {len(attempts)} in {place}: {attempt}"
                assert attempt.begun == list(range(attempt.kept, done)), where
                if at + 1 == len(attempts):
                    assert done == total, where
                else:
                    kept = attempts[at + 1].kept
                    assert done - lost <= kept <= done, f"{where}, after which {kept} are kept"

    def _append(self, entry: dict[str, object]) -> None:
        with open(self.path, "ab", buffering=0) as file:
            file.write(json.dumps(entry).encode() + b"\n")
