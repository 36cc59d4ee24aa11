"""Finished parts of an evaluation, kept on disk so that an interrupted one can resume.

A part holds the results of a few batches. Parts are written every half minute, every 33 MiB, on
interruption and at the end; in the order of the examples they are what an uninterrupted evaluation
would have held. They stay until the scores are saved (`Scores.save`). Where ranks share the work,
each writes its own parts, rank 0 loads those of all ranks, and the batches that are left are
distributed again: an evaluation can resume with any number of ranks.
"""

import contextlib
import hashlib
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, TypedDict
from typing import Protocol as TypingProtocol

from torch import Tensor

from afterdrop.errors import DamagedError, DataError, FileError, ScoresError
from afterdrop.evaluation.batches import Batch, digest_tensors
from afterdrop.evaluation.model_identity import ModelIdentity
from afterdrop.evaluation.part_files import part_path, part_paths, parts_lock
from afterdrop.evaluation.rank_shares import check_same_data, gather_results
from afterdrop.evaluation.request import Protocol
from afterdrop.evaluation.result_buffer import Pieces, ResultBuffer
from afterdrop.evaluation.scores.schema import Results
from afterdrop.evaluation.scores.scores_file import check_results
from afterdrop.files import check_header
from afterdrop.ranks import SINGLE_PROCESS, Ranks
from afterdrop.tensor_files import read_tensors, write_tensors
from afterdrop.typed_records import read_record

_KIND, _VERSION = "afterdrop-part", 4
_SECONDS = 30.0
_CARRIED, _OUTPUTS = "carried_", "outputs"


class PartNote(TypedDict):
    """What a part has in its note beside the protocol."""

    numbers: list[int]
    digests: list[str]
    first_example: int
    buffers: str


class _Finished(NamedTuple):
    """A batch that was evaluated here.

    Attributes:
        number: Which batch of the data.
        digest: Of its data.
        targets: The number of targets up to its last one.
        carried: What the next batch needs; engines may be further on when this is written.
    """

    number: int
    digest: str
    targets: int
    carried: Results


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
        identity: Of the model, if parts are kept. Parts of another one are refused: code and state
            outside of its weights may have changed.
        ranks: The processes that share the batches.
        expected: Number of targets in the data, if known.
    """

    def __init__(
        self,
        folder: str | Path | None,
        protocol: Protocol,
        engines: Carrying,
        first_example: int,
        identity: ModelIdentity | None,
        ranks: Ranks = SINGLE_PROCESS,
        expected: int | None = None,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.protocol, self.engines, self.first_example = protocol, engines, first_example
        self.ranks = ranks
        self._results = ResultBuffer(expected if ranks.count == 1 else None)  # ranks have shares
        self._identity = identity
        self._digests: dict[int, str] = {}  # of the batches on disk, by number
        self._held: list[int] = []  # numbers of the batches whose results this rank has
        self._fresh: list[_Finished] = []  # of those, the ones that are not on disk
        self._kept = 0  # targets whose results are on disk
        self._seen = self._left = 0
        self._data = hashlib.blake2b(digest_size=12)
        self._saved, self._blocks = 0.0, 0  # when, and with how many blocks of results
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> "ResumeStore":
        self._digests = dict(self.ranks.from_rank0(self._open))
        self._kept = self._results.count
        self._saved, self._blocks = time.monotonic(), self._results.num_blocks
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._lock:
            if kind is not None:
                self._save()
                error.add_note(self._what_is_kept())

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
        digest = batch.digest() if self.folder is not None else ""
        self._results.add(results)
        # A signal may come between any two steps: a batch is finished from this one on, or not.
        self._fresh.append(_Finished(number, digest, self._results.count, self.engines.carried()))
        self._held.append(number)
        if len(self._fresh) > 1:
            self._fresh[-2].carried.clear()  # only the last is written
        # Tensors are joined to be written, in memory that must not grow with the number of targets.
        more = self._results.num_blocks > max(1, self._blocks)
        if more or time.monotonic() - self._saved > _SECONDS:
            self._save()

    def finish(self) -> dict[str, Tensor]:
        """All results joined: those of each batch exactly once."""
        if max(self._digests, default=-1) >= self._seen:
            raise FileError(
                f"{self.folder} holds {len(self._digests)} finished batches, the data now have "
                f"{self._seen}; give the same data, or remove that folder"
            )
        self._save()  # until the scores are saved, or if another rank fails
        if self.ranks.count > 1:
            check_same_data(self._data.hexdigest(), self.ranks)
        held = Counter(number for share in self.ranks.gather(self._held) for number in share)
        if held != Counter(range(self._seen)):
            wrong = [n for n in range(self._seen) if held[n] != 1]
            raise FileError(
                f"{len(wrong)} of {self._seen} batches, the first of them {wrong[0]}, are in "
                f"{self.folder} twice or not at all; remove that folder and evaluate again"
            )
        return gather_results(self._results.take(), self.ranks)

    def _what_is_kept(self) -> str:
        if self.folder is None or not self._digests:
            return "no finished batch was saved, so nothing is kept: the same command starts over"
        count = len(self._digests)
        what = "batch is" if count == 1 else "batches are"
        return f"{count} finished {what} kept in {self.folder}: the same command resumes"

    def _save(self) -> None:
        self._saved, self._blocks = time.monotonic(), self._results.num_blocks
        if self.folder is None or not self._fresh:
            return
        assert self._identity is not None
        fresh = {batch.number: batch.digest for batch in self._fresh}
        first, stop = self._fresh[0].number, self._fresh[-1].targets
        note = {
            "kind": _KIND,
            "version": _VERSION,
            "protocol": self.protocol.to_json(),
            "numbers": list(fresh),
            "digests": list(fresh.values()),
            "first_example": self.first_example,
            "buffers": self._identity.buffers,
        }
        carried = {_CARRIED + n: tensor for n, tensor in self._fresh[-1].carried.items()}
        suffix = "" if self.ranks.count == 1 else f"-rank-{self.ranks.rank}"
        tensors: dict[str, Tensor | list[Tensor]] = {
            **self._results.part(self._kept, stop),
            **carried,
            _OUTPUTS: self._identity.outputs.projections,
        }
        # If a signal comes once it is written, saving again replaces the file by the same one.
        write_tensors(part_path(self.folder, first, suffix), tensors, note)
        self._digests |= fresh
        self._fresh, self._kept = [], stop

    def _open(self) -> list[tuple[int, str]]:
        """Reserves the folder and takes up its parts; number and digest of their batches."""
        if self.folder is None:
            return []
        self._lock.enter_context(parts_lock(self.folder))
        try:
            found: dict[int, str] = {}
            for path in part_paths(self.folder):
                found |= self._take_up(path, found)
        except BaseException:
            self._lock.close()
            raise
        return list(found.items())

    def _take_up(self, path: Path, before: dict[int, str]) -> dict[int, str]:
        """Takes up a part; numbers and digests of its batches, none if it cannot be used."""
        try:
            results, note = read_tensors(path)
        except DamagedError:
            return _leave_out(path, "is damaged")
        outputs = results.pop(_OUTPUTS, None)
        carried = {n: results.pop(n) for n in list(results) if n.startswith(_CARRIED)}
        part = self._check(path, note, results, outputs)
        if carried and part["numbers"][0] != len(before):
            return _leave_out(path, "continues from a part that is missing")
        if twice := before.keys() & set(part["numbers"]):
            raise FileError(
                f"batch {min(twice)} is in {path} and in another part; remove {self.folder} and "
                "evaluate again"
            )
        try:
            self.engines.restore({n.removeprefix(_CARRIED): t for n, t in carried.items()})
        except DataError as error:
            raise FileError(f"{path} is damaged: {error}") from error
        self._results.add(results)
        self._held += part["numbers"]
        return dict(zip(part["numbers"], part["digests"]))

    def _check(
        self, path: Path, note: dict[str, Any], results: Results, outputs: Tensor | None
    ) -> PartNote:
        """The note of a part, which must be one of this evaluation."""
        check_header(path, note, _KIND, _VERSION)
        kept = check_results(path, results, note)
        try:
            part = read_record(PartNote, note)
            if len(part["numbers"]) != len(part["digests"]) or min(part["numbers"]) < 0:
                raise ValueError("numbers and digests do not belong together")
        except ValueError as error:
            raise FileError(
                f"{path} is not a part of an evaluation ({error}); remove {self.folder}"
            ) from error
        try:
            self.protocol.require_same(kept, f"this evaluation and the parts in {self.folder}")
        except ScoresError as error:
            raise ScoresError(f"{error}; or remove that folder, to begin anew") from None
        if part["first_example"] != self.first_example:
            raise FileError(
                f"the parts in {self.folder} start at first_example={part['first_example']}, "
                f"not {self.first_example}; give the same, or remove that folder"
            )
        assert self._identity is not None
        same = kept.device == self.protocol.device
        other = self._identity.difference(outputs, part["buffers"], same_device=same)
        if other is not None:
            raise FileError(
                f"the model has {other} than the one of the parts in {self.folder}, although its "
                "weights are the same: its code, its settings or the first batch have changed. "
                "Restore them, or remove that folder."
            )
        return part


def _leave_out(path: Path, why: str) -> dict[int, str]:
    """Removes a part that cannot be used, whose batches are then evaluated again."""
    warnings.warn(f"{path} {why}; its batches are evaluated again", stacklevel=2)
    path.unlink(missing_ok=True)
    return {}
