"""Finished parts of an evaluation, kept on disk so that an interrupted one can resume.

A part holds the results of a few batches. Parts are written every half minute and on interruption;
in the order of the examples they are what an uninterrupted evaluation would have held. Where ranks
share the work, each writes its own parts, rank 0 loads those of all ranks, and the batches that are
left are distributed again: an evaluation can resume with any number of ranks.
"""

import contextlib
import hashlib
import time
from pathlib import Path
from typing import Any
from typing import Protocol as TypingProtocol

from torch import Tensor

from afterdrop.errors import FileError, ScoresError
from afterdrop.evaluation.batches import Batch, digest_tensors
from afterdrop.evaluation.rank_shares import check_same_data, gather_results
from afterdrop.evaluation.request import Protocol
from afterdrop.evaluation.result_buffer import Pieces, ResultBuffer
from afterdrop.evaluation.scores.schema import Results
from afterdrop.evaluation.scores.scores_file import read_tensors, write_tensors
from afterdrop.files import make_folder
from afterdrop.ranks import SINGLE_PROCESS, Ranks

_SECONDS = 30.0
_CARRIED = "carried_"


class Carrying(TypingProtocol):
    """Computes batches of which each may need something of those before it."""

    def carried(self) -> Results:
        """What the next batch needs of those before it."""

    def restore(self, carried: Results) -> None:
        """Takes up what `carried` gave."""


class ResumeStore:
    """Collects the results of batches that ranks share, or that are kept in a folder.

    Args:
        folder: Where parts are kept; None if ranks share the batches and nothing is kept.
        protocol: Of this evaluation; parts of another one are refused.
        engines: Compute the batches; what they carry is kept with the parts.
        first_example: Number of the first example.
        ranks: The processes that share the batches.
        expected: Number of targets in the data, if known.
    """

    def __init__(
        self,
        folder: str | Path | None,
        protocol: Protocol,
        engines: Carrying,
        first_example: int,
        ranks: Ranks = SINGLE_PROCESS,
        expected: int | None = None,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:  # now, rather than when there is something to lose
            make_folder(self.folder)
        self.protocol, self.engines, self.first_example = protocol, engines, first_example
        self.ranks = ranks
        self._results = ResultBuffer(expected if ranks.count == 1 else None)  # ranks have shares
        self._fresh: list[int] = []  # numbers of the batches whose results are not on disk
        self._seen = self._left = 0
        self._data = hashlib.blake2b(digest_size=12)
        self._saved = 0.0
        # Of finished batches, by number.
        self._digests = dict(ranks.from_rank0(self._load))
        self._kept = self._results.count  # targets whose results are on disk

    def due(self, number: int, batch: Batch) -> bool:
        """Whether a batch is this rank's to evaluate; refuses a finished one whose data changed."""
        self._seen = number + 1
        if self.ranks.count > 1:
            self._data.update(digest_tensors([batch.host]).encode())
        if number not in self._digests:
            self._left += 1
            return (self._left - 1) % self.ranks.count == self.ranks.rank
        if self._digests[number] != batch.digest():
            raise FileError(
                f"batch {number} is not the one that was evaluated before the interruption in "
                f"{self.folder}; give the same data in the same order, or remove that folder"
            )
        return False

    def add(self, number: int, batch: Batch, results: Pieces) -> None:
        """Adds the results of a batch that was due."""
        self._results.add(results)
        self._digests[number] = batch.digest() if self.folder is not None else ""
        self._fresh.append(number)
        if time.monotonic() - self._saved > _SECONDS:
            self._save()

    def finish(self) -> dict[str, Tensor]:
        """All results joined; the parts on disk are not needed any more."""
        if max(self._digests, default=-1) >= self._seen:
            raise FileError(
                f"{self.folder} holds {len(self._digests)} finished batches, the data now have "
                f"{self._seen}; give the same data, or remove that folder"
            )
        joined = self._results.since(0)
        if self.ranks.count > 1:
            self._save()  # whatever becomes of the others, this share is done
            check_same_data(self._data.hexdigest(), self.ranks)
        joined = gather_results(joined, self.ranks)
        if self.folder is not None and self.folder.exists():
            with contextlib.suppress(OSError):  # another rank may remove the same
                for path in self.folder.glob("part-*.safetensors"):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # what else is in the folder is not ours
                self.folder.rmdir()
        return joined

    def __enter__(self) -> "ResumeStore":
        self._saved = time.monotonic()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._save()
            if self.folder is not None and not self._digests:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()

    def _save(self) -> None:
        self._saved = time.monotonic()
        if self.folder is None or not self._fresh:
            return
        joined = self._results.since(self._kept)
        note = {
            "protocol": self.protocol.to_json(),
            "numbers": self._fresh,
            "digests": [self._digests[number] for number in self._fresh],
            "first_example": self.first_example,
        }
        carried = {_CARRIED + name: tensor for name, tensor in self.engines.carried().items()}
        write_tensors(self._next_path(self.folder), {**joined, **carried}, note)
        self._fresh, self._kept = [], self._results.count

    def _next_path(self, folder: Path) -> Path:
        rank = "" if self.ranks.count == 1 else f"-rank-{self.ranks.rank}"
        taken = len(list(folder.glob(f"part-*{rank}.safetensors"))) if folder.exists() else 0
        return folder / f"part-{taken:05d}{rank}.safetensors"

    def _load(self) -> list[tuple[int, str]]:
        """Takes up the parts in the folder; returns number and digest of their batches."""
        found: list[tuple[int, str]] = []
        if self.folder is None or not self.folder.exists():
            return found
        for path in sorted(self.folder.glob("part-*.safetensors")):
            results, note = read_tensors(path)
            if "digests" not in note or "numbers" not in note:
                raise FileError(f"{path} is not a part of an evaluation; remove {self.folder}")
            try:
                self.protocol.require_same(
                    Protocol.from_json(note["protocol"]),
                    f"this evaluation and the parts in {self.folder}",
                )
            except ScoresError as error:
                raise ScoresError(f"{error}; or remove that folder, to begin anew") from None
            if note["first_example"] != self.first_example:
                raise FileError(
                    f"the parts in {self.folder} start at first_example={note['first_example']}, "
                    f"not {self.first_example}; give the same, or remove that folder"
                )
            carried = {n: results.pop(n) for n in list(results) if n.startswith(_CARRIED)}
            self.engines.restore({n.removeprefix(_CARRIED): t for n, t in carried.items()})
            self._results.add(results)
            found += zip(note["numbers"], note["digests"])
        return found
